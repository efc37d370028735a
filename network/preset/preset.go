package preset

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

// Names of presets.
const (
	Debian = "debian"
	NPM    = "npm"
	PyPI   = "pypi"
	Go     = "go"
)

// Upstream is what the package cache needs to know of a registry.
type Upstream struct {
	Name string   `yaml:"name"`
	URL  string   `yaml:"url"` // without user and password
	Also []string `yaml:"also,omitempty"`
}

// Warning is something that the operator should look at.
type Warning struct {
	Preset string
	Text   string
}

// Result is what the host's settings say.
type Result struct {
	// Presets are rules, as policy.ParseRule reads them, by preset. A tool without
	// any setting has none.
	Presets map[string][]string
	// Upstreams are those of the package cache, by kind, which is the preset's name.
	Upstreams map[string][]Upstream
	// GoDirect says that modules may be fetched from where they come from.
	GoDirect bool
	Warnings []Warning
}

// FromHost reads the settings of this host and of the user that the process runs
// as. What cannot be read or understood is a warning.
func FromHost(ctx context.Context) Result {
	home, _ := os.UserHomeDir() // none: there are no files of a user
	return read(ctx, host{root: "/", home: home, env: os.Environ(), run: run})
}

// host is where settings are read.
type host struct {
	root string // of the file system
	home string // as a path in it
	env  []string
	run  func(ctx context.Context, env []string, argv ...string) (string, error)
}

// reader collects a result.
type reader struct {
	host
	ctx context.Context
	out Result
}

func read(ctx context.Context, h host) Result {
	r := &reader{host: h, ctx: ctx, out: Result{Presets: map[string][]string{}, Upstreams: map[string][]Upstream{}}}
	r.apt()
	r.npm()
	r.pip()
	r.golang()
	return r.out
}

func (r *reader) warn(preset, format string, args ...any) {
	w := Warning{preset, fmt.Sprintf(format, args...)}
	if !slices.Contains(r.out.Warnings, w) {
		r.out.Warnings = append(r.out.Warnings, w)
	}
}

// maxFile bounds a file of settings.
const maxFile = 1 << 20

// file reads a file of settings; false: there is none, or it cannot be read, of
// which it warns.
func (r *reader) file(preset, p string) (string, bool) {
	p = filepath.Join(r.root, p)
	fi, err := os.Stat(p)
	if err == nil && (!fi.Mode().IsRegular() || fi.Size() > maxFile) {
		err = fmt.Errorf("%s is not a file of settings", p)
	}
	var b []byte
	if err == nil {
		b, err = os.ReadFile(p)
	}
	if err != nil {
		if !os.IsNotExist(err) {
			r.warn(preset, "read settings: %v", err)
		}
		return "", false
	}
	return string(b), true
}

// getenv is a variable's value; fold ignores the case of its name.
func (r *reader) getenv(name string, fold bool) string {
	v := ""
	for _, e := range r.env {
		k, val, _ := strings.Cut(e, "=")
		if k == name || fold && strings.EqualFold(k, name) {
			v = val
		}
	}
	return v
}

// ask runs a tool that prints a setting. An error means that it is not there.
func (r *reader) ask(env []string, argv ...string) (string, bool) {
	if r.run == nil {
		return "", false
	}
	ctx, cancel := context.WithTimeout(r.ctx, 15*time.Second)
	defer cancel()
	out, err := r.run(ctx, append(slices.Clone(r.env), env...), argv...)
	return strings.TrimSpace(out), err == nil
}

func run(ctx context.Context, env []string, argv ...string) (string, error) {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir, cmd.Env, cmd.WaitDelay = "/", env, time.Second
	var out bytes.Buffer
	cmd.Stdout = &out
	err := cmd.Run()
	return out.String(), err
}

// registry adds a URL to a preset: a rule for its host, and an upstream. It
// returns the upstream to add to, or nil if it is not one.
func (r *reader) registry(preset, raw string) *Upstream {
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		what := "a setting"
		if err == nil && u.Scheme != "" {
			what = "a setting with " + u.Scheme + ":"
		}
		r.warn(preset, "%s is not an http or https URL and is left out", what)
		return nil
	}
	if u.User != nil {
		r.warn(preset, "the setting for %s has a user or password, which is left out: put it into the cache's upstream by hand if it is needed", u.Hostname())
	}
	if !r.rule(preset, u.Hostname(), port(u)) {
		return nil
	}
	clean := (&url.URL{Scheme: u.Scheme, Host: strings.ToLower(u.Host), Path: strings.TrimRight(u.Path, "/")}).String()
	list := r.out.Upstreams[preset]
	for i := range list {
		if list[i].URL == clean {
			return &list[i]
		}
	}
	list = append(list, Upstream{Name: slug(u, list), URL: clean})
	r.out.Upstreams[preset] = list
	return &list[len(list)-1]
}

func port(u *url.URL) string {
	switch {
	case u.Port() != "":
		return u.Port()
	case u.Scheme == "http":
		return "80"
	}
	return "443"
}

// rule adds host:port to a preset, if it can be in a policy.
func (r *reader) rule(preset, host, port string) bool {
	text := strings.ToLower(host) + ":" + port
	if a, err := netip.ParseAddr(host); err == nil {
		text = net.JoinHostPort(a.String(), port) + "/" + sandbox.ProtocolTCP
	}
	p, err := policy.ParseRule(sandbox.RuleAllow, text)
	if err != nil {
		r.warn(preset, "%v", err)
		return false
	}
	if text = policy.FormatRule(p); !slices.Contains(r.out.Presets[preset], text) {
		r.out.Presets[preset] = append(r.out.Presets[preset], text)
	}
	return true
}

// slug makes a name from a URL that no other of the list has.
func slug(u *url.URL, list []Upstream) string {
	var b strings.Builder
	for _, c := range strings.ToLower(u.Hostname() + u.Path) {
		if c >= 'a' && c <= 'z' || c >= '0' && c <= '9' {
			b.WriteRune(c)
		} else if s := b.String(); s != "" && s[len(s)-1] != '-' {
			b.WriteByte('-')
		}
	}
	name := b.String()
	name = strings.Trim(name[:min(len(name), 56)], "-")
	if name == "" {
		name = "upstream"
	}
	for n := 1; ; n++ {
		s := name
		if n > 1 {
			s = fmt.Sprintf("%s-%d", name, n)
		}
		if !slices.ContainsFunc(list, func(u Upstream) bool { return u.Name == s }) {
			return s
		}
	}
}
