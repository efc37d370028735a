package packagecache

import (
	"bytes"
	"net/http"
	"net/url"
	"path"
	"strings"
	"sync"
)

// A Debian mirror is reached in two ways. apt asks for http sources as it would
// ask a forward proxy, for the mirrors' hosts alone (see Setup), so that the
// image's own sources work as they are. Where a source is of https, apt would
// want a tunnel, which we do not open: such a source goes straight to its mirror,
// or is written as http://ADDRESS/debian/NAME.

// debianProxy finds the mirror of a request to a proxy. A mirror that the
// configuration has as https is asked over https.
func (c *Cache) debianProxy(q *request) (*object, error) {
	u := q.r.URL
	if u.Scheme != "http" || u.User != nil {
		return nil, fail(http.StatusForbidden, "only http sources come through here")
	}
	var best *upstream
	rest := ""
	for _, up := range c.up[Debian] {
		if !strings.EqualFold(up.base.Hostname(), u.Hostname()) || up.base.Port() != u.Port() && hostPort(up.base) != hostPort(u) {
			continue
		}
		if r, ok := strings.CutPrefix("/"+q.path, up.base.Path+"/"); ok && (best == nil || len(r) < len(rest)) {
			best, rest = up, r
		}
	}
	if best == nil {
		return nil, fail(http.StatusForbidden, "the configuration has no such Debian mirror")
	}
	return c.debianObject(q, best, rest)
}

func (c *Cache) debianPath(q *request) (*object, error) {
	name, rest, _ := strings.Cut(q.path, "/")
	for _, up := range c.up[Debian] {
		if up.name == name {
			return c.debianObject(q, up, rest)
		}
	}
	return nil, fail(http.StatusNotFound, "the configuration has no Debian mirror of that name")
}

func debianKey(up *upstream, p string) string { return "debian " + up.base.String() + " " + p }

// byHash are the folders of by-hash files, by the name of their hash.
var byHash = map[string]string{"MD5Sum": "md5", "SHA1": "sha1", "SHA256": "sha256", "SHA512": "sha512"}

func (c *Cache) debianObject(q *request, up *upstream, p string) (*object, error) {
	if p == "" || strings.HasSuffix(p, "/") {
		return nil, fail(http.StatusNotFound, "folders are not listed")
	}
	o := &object{key: debianKey(up, p), up: up, url: up.at(p), ttl: c.cfg.MetadataTTL, max: c.cfg.MaxObject}
	dir, file := path.Split(p)
	dir = strings.TrimSuffix(dir, "/")
	if algo, ok := byHash[path.Base(dir)]; ok && path.Base(path.Dir(dir)) == "by-hash" {
		if o.want = (digest{algo, strings.ToLower(file)}); !o.want.valid() {
			return nil, fail(http.StatusNotFound, "not a hash")
		}
		o.ttl = forever
		if algo == "sha256" {
			o.key = algo + " " + o.want.hex
		}
		return o, nil
	}
	switch file {
	case "InRelease":
		o.max = maxRelease
		return o, nil
	case "Release", "Release.gpg": // two files that must fit
		o.max, o.ttl = maxRelease, 0
		return o, nil
	}
	if strings.HasPrefix(p, "pool/") || strings.Contains(p, "/pool/") {
		o.ttl = forever // a pool's file has its version in its name
		return o, nil
	}
	c.suiteIndex(q, up, o, p)
	return o, nil
}

const maxRelease = 16 << 20

// suiteIndex holds an index to what the suite's InRelease, as it is kept here,
// says: so what apt gets fits what it got before, and needs no question to
// upstream.
func (c *Cache) suiteIndex(q *request, up *upstream, o *object, p string) {
	for dir := path.Dir(p); ; dir = path.Dir(dir) {
		in := dir + "/"
		if dir == "." {
			in = ""
		}
		for _, name := range []string{"InRelease", "Release"} {
			m := q.s.peek(debianKey(up, in+name))
			if m == nil {
				continue
			}
			sums := c.suites.of(m.Sum, func() []byte {
				b, err := c.body(q.r.Context(), q.s, m)
				if err != nil {
					return nil
				}
				defer c.memory.Release(b.weight)
				return bytes.Clone(b.b)
			})
			if sum, ok := sums[strings.TrimPrefix(p, in)]; ok {
				o.want = digest{"sha256", sum}
				o.ttl, o.fresh = 0, func(k *meta) bool { return k.Sum == sum }
				o.lied = func() { q.s.drop(m) } // the mirror has moved on: its InRelease too
				return
			}
		}
		if dir == "." {
			return
		}
	}
}

// suites are the tables of the Release files that were used last, by the hash of
// the file.
type suites struct {
	mu     sync.Mutex
	tables map[string]map[string]string
}

const maxTables = 64

func (s *suites) of(sum string, read func() []byte) map[string]string {
	s.mu.Lock()
	t, ok := s.tables[sum]
	s.mu.Unlock()
	if ok {
		return t
	}
	b := read()
	if b == nil {
		return nil
	}
	t = releaseSums(b)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tables == nil {
		s.tables = map[string]map[string]string{}
	}
	for k := range s.tables {
		if len(s.tables) < maxTables {
			break
		}
		delete(s.tables, k)
	}
	s.tables[sum] = t
	return t
}

// releaseSums reads the SHA256 table of a Release file (deb822, with or without
// a clear signature around it): path to hash.
func releaseSums(b []byte) map[string]string {
	out := map[string]string{}
	in := false
	for line := range bytes.Lines(b) {
		line = bytes.TrimRight(line, "\r\n")
		if !bytes.HasPrefix(line, []byte(" ")) {
			in = string(line) == "SHA256:"
			continue
		}
		if !in || len(out) >= 200_000 {
			continue
		}
		f := bytes.Fields(line)
		if len(f) != 3 || !(digest{"sha256", string(f[0])}).valid() {
			continue
		}
		out[string(f[2])] = string(f[0])
	}
	return out
}

// debianHosts are the hosts for which apt is to use us as a proxy.
func (c *Cache) debianHosts() []string {
	seen := map[string]bool{}
	var out []string
	for _, up := range c.up[Debian] {
		h := (&url.URL{Host: up.base.Host}).Hostname()
		if !seen[h] {
			seen[h] = true
			out = append(out, h)
		}
	}
	return out
}
