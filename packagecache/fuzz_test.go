package packagecache

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/net/html"
)

// FuzzRoute: whatever a sandbox asks for, what is asked of upstream is at a host
// of the configuration, over TLS, below the upstream's path where it names no
// host itself, and is kept inside the tenant's folder.
func FuzzRoute(f *testing.F) {
	for _, s := range []string{"/debian/m/pool/a.deb", "/npm/@s%2fx", "/npm/@s/x/-/x-1.0.0.tgz", "/x/-/x-1.tgz", "/npm/_/m/x", "/npm/-/f/-/https/files.example.com/x",
		"/pypi/simple/A_b/", "/pypi/files/-/-/https/m.example.com/../x", "/go/sumdb/s/lookup/a@v1.0.0", "/go/a/@v/v1.0.0.zip", "http://m.example.com/r/pool/x", "/debian/m/%2e%2e/x", "/go/a/@v/%2e%2e%2f.zip"} {
		f.Add(s, "application/json")
	}
	c, err := Open(Config{Dir: f.TempDir(), Tenant: func(netip.Addr) string { return "t" }, Dial: newNoDial(f),
		Debian: mirror("https://m.example.com/r"), NPM: mirror("https://m.example.com/r", "files.example.com"), PyPI: mirror("https://m.example.com/r", "files.example.com"), Go: mirror("https://m.example.com/r")})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = c.Close() })
	f.Fuzz(func(t *testing.T, target, accept string) {
		u, err := url.ParseRequestURI(target)
		if err != nil {
			return
		}
		r := httptest.NewRequest(http.MethodGet, "http://x/", nil)
		r.URL, r.RemoteAddr = u, "127.0.0.1:1"
		r.Header.Set("Accept", accept)
		_, o, s, err := c.route(r)
		if err != nil || o == nil {
			return
		}
		got, err := url.Parse(o.url.String()) // as upstream reads it
		if err != nil {
			t.Fatal(err)
		}
		if got.Scheme != "https" || got.Host != "m.example.com" && got.Host != "files.example.com" || got.RawQuery != "" || got.Fragment != "" || got.User != nil {
			t.Fatalf("%q asks for %s", target, got)
		}
		if p := strings.TrimSuffix(got.Path, "/"); path.Clean(p) != p {
			t.Fatalf("%q asks for %s", target, got)
		}
		named := strings.Contains(u.Path, "/-/f/") || strings.Contains(u.Path, "/files/")
		if !named && !strings.HasPrefix(got.Path, "/r/") {
			t.Fatalf("%q asks for %s", target, got)
		}
		if rel, err := filepath.Rel(s.dir, s.refPath(o.key)); err != nil || !filepath.IsLocal(rel) {
			t.Fatalf("%q is kept in %s", target, rel)
		}
	})
}

// FuzzEachString: the scanner finds the strings that encoding/json finds.
func FuzzEachString(f *testing.F) {
	for _, s := range []string{`{"a":{"b":["x",{"c":"y"}]},"a\"\\":"\u00e9\\"}`, `["a",[["b"],"c"],{}]`, `{"a":1,"b":[true,null,"z"]}`, `"s"`, `[[],"x"]`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if !json.Valid(data) {
			return
		}
		var v any
		if err := json.Unmarshal(data, &v); err != nil {
			return
		}
		want := map[string]string{}
		var walk func(keys []string, v any)
		walk = func(keys []string, v any) {
			switch v := v.(type) {
			case map[string]any:
				for k, e := range v {
					walk(append(keys[:len(keys):len(keys)], k), e)
				}
			case []any:
				for i, e := range v {
					walk(append(keys[:len(keys):len(keys)], strconv.Itoa(i)), e)
				}
			case string:
				if n := len(keys); n > 0 && n <= scanDepth {
					want[strings.Join(keys, "\x00")] = v
				}
			}
		}
		walk(nil, v)
		got := map[string]string{}
		eachString(data, func(keys []string, start, end int) {
			var s string
			if err := json.Unmarshal(data[start:end], &s); err != nil {
				t.Fatalf("not a string: %q", data[start:end])
			}
			got[strings.Join(keys, "\x00")] = s
		})
		for k, s := range want {
			if g, ok := got[k]; !ok || g != s {
				t.Fatalf("%q: %q is %q, want %q", data, k, g, s)
			}
		}
	})
}

// FuzzIndexes: no index, whatever is in it, breaks the cache, and what it makes
// of one leads to no other host than the upstream's as ours.
func FuzzIndexes(f *testing.F) {
	f.Add([]byte(`{"versions":{"1":{"dist":{"tarball":"https://m.example.com/r/a/-/a.tgz","integrity":"sha512-x"}}}}`))
	f.Add([]byte(`{"files":[{"url":"x","hashes":{"sha256":"y"}}]}`))
	f.Add([]byte(`<base href=x><a href="a.whl#sha256=00">a</a><a href='b' data-core-metadata=true>`))
	f.Add([]byte("SHA256:\n 00 1 x\n"))
	ups, err := parse(NPM, mirror("https://m.example.com/r", "files.example.com"))
	if err != nil {
		f.Fatal(err)
	}
	d, err := openDisk(f.TempDir(), 1<<20, 1)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = d.close() })
	s, err := d.shelf("t")
	if err != nil {
		f.Fatal(err)
	}
	from, _ := url.Parse("https://m.example.com/r/a/")
	f.Fuzz(func(t *testing.T, data []byte) {
		q := &request{s: s, base: "http://c", where: "/pypi", ups: ups}
		for _, fn := range []func() ([]byte, error){
			func() ([]byte, error) { return npmRewrite(q, ups[0], data) },
			func() ([]byte, error) { return pypiJSON(q, ups[0], data, from) },
		} {
			if out, err := fn(); err == nil && !json.Valid(out) {
				t.Fatalf("%q became %q", data, out)
			}
		}
		out, err := pypiHTML(q, ups[0], data, from)
		if err != nil {
			return
		}
		for z := html.NewTokenizer(bytes.NewReader(out)); z.Next() != html.ErrorToken; {
			tok := z.Token()
			for _, a := range tok.Attr {
				if tok.Data == "a" && a.Key == "href" && strings.HasPrefix(a.Val, "/pypi/files/") &&
					!strings.Contains(a.Val, "/https/m.example.com/") && !strings.Contains(a.Val, "/https/files.example.com/") {
					t.Fatalf("%q became %q", data, out)
				}
			}
		}
		releaseSums(data)
	})
}
