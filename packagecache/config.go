package packagecache

import (
	"context"
	"crypto/x509"
	"encoding/base64"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"path"
	"strings"
	"time"

	"vivarium/sandbox"
)

// Kinds of registries.
const (
	Debian = "debian"
	NPM    = "npm"
	PyPI   = "pypi"
	Go     = "go"
)

// Upstream is one registry that the cache may speak to.
type Upstream struct {
	// Name is its part of a path, 1 to 64 of a-z, 0-9 and -.
	Name string
	// URL is where it begins: the archive of a Debian mirror, an npm registry, the
	// simple index of a PyPI, a Go module proxy. http or https. A user and
	// password in it are sent to its host and to no other.
	URL string
	// Also are other hosts, as host or host:port, that it may send a client to, by
	// a redirect or a link: say, where an index keeps its files.
	Also []string
}

// Config is what a cache needs. Dir, Tenant and Dial must be set.
type Config struct {
	Dir string // of the cache alone; made if it is not there

	// Budget is how many bytes of disk the cache may use, of all tenants together.
	// When it is used up, the tenant with the most loses what it has not used
	// longest. 0 means 10 GiB.
	Budget int64
	// MaxObject bounds one object in bytes; 0 means half of the budget, at most
	// 8 GiB.
	MaxObject int64

	Debian []Upstream
	NPM    []Upstream // the first is the default registry
	PyPI   []Upstream // the first is the default index
	Go     []Upstream // asked in order while they answer 404 or 410
	// GoDirect lets the go command fetch a module from its source when no proxy has
	// it, as the word direct in GOPROXY does.
	GoDirect bool

	// Tenant says whose sandbox has an address; "" is nobody's, who gets nothing.
	Tenant func(netip.Addr) string
	// Allow says whether the sandbox with an address may have what a host (lower
	// case; an IP address as such) serves at a port. nil allows all upstreams.
	Allow func(client netip.Addr, host string, port uint16) bool
	// Dial connects to an upstream, address as host:port. It resolves the name and
	// refuses what must not be reached.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// RootCAs verify upstreams; nil means those of the host.
	RootCAs *x509.CertPool

	// MetadataTTL is how long an index is served without asking upstream whether it
	// changed; 0 means a minute. NegativeTTL is the same for an object that is not
	// there; 0 means 20 seconds. StaleFor is how much longer an index is served
	// when upstream does not answer; 0 means a day, less is never.
	MetadataTTL, NegativeTTL, StaleFor time.Duration
	// Stall is how long upstream may send nothing; 0 means a minute.
	Stall time.Duration
	// Fetches bounds concurrent requests to upstreams, per tenant; 0 means 48.
	Fetches int
	// Conns bounds the connections of one client; 0 means 256.
	Conns int

	Log *slog.Logger
}

const (
	maxMetadata = 64 << 20 // an index, after decompression; the largest packuments have about 60 MB
	smallObject = 256 << 10
	heldTail    = 64 << 10
)

// upstream is an Upstream made ready.
type upstream struct {
	kind, name string
	base       *url.URL        // no user, no slash at the end
	auth       string          // Authorization for base's host
	hosts      map[string]bool // host:port
}

func (cfg *Config) fill() error {
	switch {
	case cfg.Dir == "":
		return sandbox.Invalid.Errorf("package cache: no folder")
	case cfg.Tenant == nil || cfg.Dial == nil:
		return sandbox.Invalid.Errorf("package cache: Tenant and Dial must be set")
	case cfg.Budget < 0 || cfg.MaxObject < 0 || cfg.Fetches < 0 || cfg.Conns < 0:
		return sandbox.Invalid.Errorf("package cache: a limit is negative")
	}
	if cfg.Budget == 0 {
		cfg.Budget = 10 << 30
	}
	if cfg.MaxObject == 0 {
		cfg.MaxObject = min(cfg.Budget/2, 8<<30)
	}
	for _, d := range []struct {
		v *time.Duration
		d time.Duration
	}{{&cfg.MetadataTTL, time.Minute}, {&cfg.NegativeTTL, 20 * time.Second}, {&cfg.StaleFor, 24 * time.Hour}, {&cfg.Stall, time.Minute}} {
		if *d.v == 0 {
			*d.v = d.d
		}
	}
	if cfg.Fetches == 0 {
		cfg.Fetches = 48
	}
	if cfg.Conns == 0 {
		cfg.Conns = 256
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

// parse makes the upstreams of a kind ready. Errors: Invalid; no password is in
// them.
func parse(kind string, list []Upstream) ([]*upstream, error) {
	var out []*upstream
	seen := map[string]bool{}
	for i, u := range list {
		bad := func(why string, args ...any) error {
			return sandbox.Invalid.Errorf("%s upstream %d (%q): "+why, append([]any{kind, i + 1, u.Name}, args...)...)
		}
		if !validName(u.Name) {
			return nil, bad("want a name of 1 to 64 of a-z, 0-9 and -, not first")
		}
		if seen[u.Name] {
			return nil, bad("the name is there twice")
		}
		seen[u.Name] = true
		b, err := url.Parse(u.URL)
		if err != nil { // the error has the whole URL in it
			return nil, bad("its url is not one")
		}
		if b.Scheme != "https" && b.Scheme != "http" || b.Host == "" || b.RawQuery != "" || b.Fragment != "" || b.Opaque != "" {
			return nil, bad("its url must be an http or https one without query and fragment")
		}
		up := &upstream{kind: kind, name: u.Name, hosts: map[string]bool{}}
		if b.User != nil {
			pw, _ := b.User.Password()
			up.auth = "Basic " + base64.StdEncoding.EncodeToString([]byte(b.User.Username()+":"+pw))
		}
		b.Host = strings.ToLower(b.Host)
		up.base = &url.URL{Scheme: b.Scheme, Host: b.Host, Path: strings.TrimSuffix(b.Path, "/")}
		if up.base.Path != "" && path.Clean(up.base.Path) != up.base.Path {
			return nil, bad("its url has a path such as //, . or ..")
		}
		up.hosts[hostPort(up.base)] = true
		for _, h := range u.Also {
			hu, err := url.Parse(b.Scheme + "://" + strings.ToLower(h))
			if err != nil || hu.Host == "" || hu.Path != "" || hu.User != nil || hu.RawQuery != "" {
				return nil, bad("%q is not a host or host:port", h)
			}
			up.hosts[hostPort(hu)] = true
		}
		out = append(out, up)
	}
	return out, nil
}

// hostPort is the host and port of a URL, lower case, the port always there.
func hostPort(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = "443"
		if u.Scheme == "http" {
			port = "80"
		}
	}
	return net.JoinHostPort(strings.ToLower(u.Hostname()), port)
}

// may says whether a URL is one of the upstream's: at one of its hosts, and not
// in the clear where the upstream itself is not.
func (u *upstream) may(t *url.URL) bool {
	return (t.Scheme == "https" || t.Scheme == "http" && u.base.Scheme == "http") && t.User == nil && u.hosts[hostPort(t)]
}

// at is the URL of a path (decoded, checked by cleanPath) below the upstream's.
func (u *upstream) at(rest string) *url.URL {
	t := *u.base
	t.Path = u.base.Path + "/" + rest
	return &t
}

// below is the part of a URL's path below the upstream's, if it is below.
func (u *upstream) below(t *url.URL) (string, bool) {
	if hostPort(t) != hostPort(u.base) {
		return "", false
	}
	return strings.CutPrefix(t.Path, u.base.Path+"/")
}

func validName(s string) bool {
	if s == "" || len(s) > 64 || s[0] == '-' {
		return false
	}
	return strings.IndexFunc(s, func(c rune) bool { return (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' }) < 0
}

// cleanPath says whether a decoded path without its first slash is plain: each
// of its parts is a name, and nothing in it means something to a file system, a
// URL or a log. A slash at the end is allowed.
func cleanPath(p string) bool {
	if p == "" || len(p) > 1024 {
		return false
	}
	for part := range strings.SplitSeq(strings.TrimSuffix(p, "/"), "/") {
		if part == "" || part == "." || part == ".." || len(part) > 255 {
			return false
		}
	}
	return strings.IndexFunc(p, func(c rune) bool {
		return c <= ' ' || c >= 0x7f || strings.ContainsRune("\\%?#\"<>|^`{};", c)
	}) < 0
}
