package packagecache

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"strings"
)

// What npm asks for: the packument of a package at /name or /@scope/name (with
// the slash encoded or not), in full or abbreviated, and tarballs wherever the
// packument says.

const (
	npmFull        = "application/json"
	npmAbbreviated = "application/vnd.npm.install-v1+json"
)

// npmTarball says whether a path is that of a tarball at an npm registry:
// name/-/file.tgz.
func npmTarball(p string) bool {
	if !strings.HasSuffix(p, ".tgz") {
		return false
	}
	name, file, ok := strings.Cut(p, "/-/")
	return ok && npmName(name) && file != "" && strings.Count(file, "/") <= 1
}

func npmName(s string) bool {
	scope, name, scoped := strings.Cut(s, "/")
	if !scoped {
		scope, name = "", s
	}
	if strings.HasPrefix(s, "@") != scoped || scoped && len(scope) < 2 || strings.Contains(name, "/") {
		return false
	}
	return name != "" && name != "-" && !strings.ContainsAny(name[:1], "._@")
}

func (c *Cache) npm(q *request) (*object, error) {
	up := q.ups[0]
	if q.path == "-/ping" {
		return nil, nil //nolint:nilnil // an empty answer, see ServeHTTP
	}
	if rest, ok := strings.CutPrefix(q.path, "-/f/"); ok {
		return elsewhere(up, rest, "npm")
	}
	if npmTarball(q.path) {
		o := &object{key: npmKey(up, q.path), up: up, url: up.at(q.path), ttl: forever, max: c.cfg.MaxObject, digests: []string{"sha512", "sha1"}}
		o.want = c.npmWant(q, up)
		return o, nil
	}
	name, version := q.path, ""
	if i := strings.LastIndexByte(name, '/'); i > 0 && (!strings.HasPrefix(name, "@") || strings.Count(name, "/") == 2) {
		name, version = name[:i], name[i+1:]
	}
	if !npmName(name) || strings.HasPrefix(version, "-") || strings.HasSuffix(q.path, "/") {
		return nil, fail(http.StatusNotFound, "no such path of an npm registry; searches, audits and the like are not answered here")
	}
	accept := npmFull
	if strings.Contains(q.r.Header.Get("Accept"), npmAbbreviated) && version == "" {
		accept = npmAbbreviated
	}
	o := &object{key: npmDocKey(q, up, accept, q.path), up: up, url: up.at(q.path), ttl: c.cfg.MetadataTTL, max: maxMetadata,
		accept: accept, rewrite: func(raw []byte, _ *url.URL, typ string) ([]byte, string, error) {
			out, err := npmRewrite(q, up, raw)
			if !strings.Contains(typ, "json") {
				typ = npmFull
			}
			return out, typ, err
		}}
	if strings.HasPrefix(q.r.UserAgent(), "yarn/1.") {
		// It would write our addresses into the project's yarn.lock, and has no
		// setting against it. So it gets tarballs from upstream itself.
		o.key, o.rewrite = o.key+" as it is", func(raw []byte, _ *url.URL, typ string) ([]byte, string, error) { return raw, typ, nil }
	}
	if accept == npmAbbreviated {
		o.accept = npmAbbreviated + "; q=1.0, application/json; q=0.8, */*" // registries that have only the full one
	}
	if strings.HasPrefix(name, "@") { // the registry's own spelling of a scoped name
		o.url.RawPath = (&url.URL{Path: up.base.Path}).EscapedPath() + "/" + strings.Replace(q.path, "/", "%2f", 1)
	}
	return o, nil
}

func npmKey(up *upstream, p string) string { return "npm " + up.base.String() + " tarball " + p }

// A packument has our own address in it, so it is kept for each.
func npmDocKey(q *request, up *upstream, accept, p string) string {
	return "npm " + up.base.String() + " " + q.base + q.where + " " + accept + " " + p
}

// npmDist is one dist of a packument.
type npmDist struct {
	tarball            string
	start, end         int // of the tarball's token
	integrity, shasum  string
	hasTarball, hasAny bool
}

// npmDists calls fn with every dist of a packument or of a version's manifest.
// The text must be valid JSON.
func npmDists(raw []byte, fn func(d *npmDist)) {
	cur, version := npmDist{}, ""
	flush := func() {
		if cur.hasTarball {
			fn(&cur)
		}
		cur = npmDist{}
	}
	eachString(raw, func(keys []string, start, end int) {
		v := ""
		switch {
		case len(keys) == 4 && keys[0] == "versions" && keys[2] == "dist":
			v = keys[1]
		case len(keys) == 2 && keys[0] == "dist":
		default:
			return
		}
		if v != version || !cur.hasAny {
			flush()
			version = v
		}
		cur.hasAny = true
		switch keys[len(keys)-1] {
		case "tarball":
			cur.tarball, cur.start, cur.end, cur.hasTarball = unquote(raw[start:end]), start, end, true
		case "integrity":
			cur.integrity = unquote(raw[start:end])
		case "shasum":
			cur.shasum = unquote(raw[start:end])
		}
	})
	flush()
}

// digest is the strongest hash that the dist has.
func (d *npmDist) digest() digest {
	best := digest{algo: "sha1", hex: strings.ToLower(d.shasum)}
	if !best.valid() {
		best = digest{}
	}
	rank := map[string]int{"sha1": 1, "sha256": 2, "sha384": 3, "sha512": 4} // of those of Subresource Integrity
	for f := range strings.FieldsSeq(d.integrity) {
		algo, b64, _ := strings.Cut(f, "-")
		b64, _, _ = strings.Cut(b64, "?")
		sum, err := base64.StdEncoding.DecodeString(b64)
		if g := (digest{algo, hex.EncodeToString(sum)}); err == nil && g.valid() && rank[algo] > rank[best.algo] {
			best = g
		}
	}
	return best
}

// npmRewrite makes tarballs' addresses ours. It also compares the tarballs that
// were kept before their packument was known.
func npmRewrite(q *request, up *upstream, raw []byte) ([]byte, error) {
	if !json.Valid(raw) {
		return nil, errors.New("it is not JSON")
	}
	var ps []patch
	npmDists(raw, func(d *npmDist) {
		u, err := url.Parse(d.tarball)
		if err != nil || u.RawQuery != "" || u.Fragment != "" || !cleanPath(strings.TrimPrefix(u.Path, "/")) {
			return
		}
		want := d.digest()
		// Old packuments name a registry of https as http.
		if rest, ok := up.below(u); ok && npmTarball(rest) || u.Scheme == "http" && u.Host == up.base.Host && strings.HasPrefix(u.Path, up.base.Path+"/") {
			if !ok {
				rest = strings.TrimPrefix(u.Path, up.base.Path+"/")
			}
			ps = append(ps, patch{d.start, d.end, quote(q.base + q.where + "/" + escape(rest))})
			if m := q.s.peek(npmKey(up, rest)); m != nil && m.Verified == "" && want.algo != "" {
				compare(q.s, m, want)
			}
			return
		}
		if up.may(u) {
			ps = append(ps, patch{d.start, d.end, quote(q.base + q.where + "/-/f/" + elsewherePath(u, want))})
		}
	})
	return apply(raw, ps), nil
}

// compare checks an object that was kept without knowing what it should be.
func compare(s *shelf, m *meta, want digest) {
	got, ok := m.Digests[want.algo]
	if want.algo == "sha256" {
		got, ok = m.Sum, true
	}
	switch {
	case !ok:
	case got != want.hex:
		s.drop(m)
	default:
		n := *m
		n.Verified = want.algo
		_ = s.update(&n) // else it is compared again
	}
}

// npmWant is what the packument, if it is kept, says of a tarball.
func (c *Cache) npmWant(q *request, up *upstream) digest {
	name, _, _ := strings.Cut(q.path, "/-/")
	if q.s.peek(npmKey(up, q.path)) != nil {
		return digest{} // nothing will be fetched
	}
	for _, accept := range []string{npmAbbreviated, npmFull} {
		m := q.s.peek(npmDocKey(q, up, accept, name))
		if m == nil {
			continue
		}
		b, err := c.body(q.r.Context(), q.s, m)
		if err != nil {
			continue
		}
		var want digest
		url := q.base + q.where + "/" + escape(q.path)
		npmDists(b.b, func(d *npmDist) {
			if d.tarball == url {
				want = d.digest()
			}
		})
		c.memory.Release(b.weight)
		if want.algo != "" {
			return want
		}
	}
	return digest{}
}

// escape is a decoded path as it is in a URL.
func escape(p string) string { return strings.TrimPrefix((&url.URL{Path: "/" + p}).EscapedPath(), "/") }

// elsewherePath is our path for a file at another host of an upstream, with what
// it must be: HASH-HEX/SCHEME/HOST/PATH.
func elsewherePath(u *url.URL, want digest) string {
	w := "-"
	if want.algo != "" {
		w = want.algo + "-" + want.hex
	}
	return w + "/" + u.Scheme + "/" + u.Host + "/" + escape(strings.TrimPrefix(u.Path, "/"))
}

// elsewhere reads such a path. Who makes one up with another hash than the
// file's gets an error, and nothing is kept.
func elsewhere(up *upstream, p, kind string) (*object, error) {
	hash, rest, _ := strings.Cut(p, "/")
	scheme, rest, _ := strings.Cut(rest, "/")
	host, rest, ok := strings.Cut(rest, "/")
	if !ok || rest == "" || strings.HasSuffix(rest, "/") {
		return nil, fail(http.StatusNotFound, "no such path")
	}
	u := &url.URL{Scheme: scheme, Host: host, Path: "/" + rest}
	if !up.may(u) {
		return nil, fail(http.StatusForbidden, "not a host of the upstream %q", up.name)
	}
	o := &object{key: kind + " " + u.String(), up: up, url: u, ttl: forever, max: 1 << 62}
	if hash != "-" {
		o.want.algo, o.want.hex, _ = strings.Cut(hash, "-")
		if !o.want.valid() {
			return nil, fail(http.StatusNotFound, "no such path")
		}
		o.key = o.want.algo + " " + o.want.hex
	}
	return o, nil
}
