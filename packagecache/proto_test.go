package packagecache

import (
	"archive/zip"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"testing"
)

// TestNPM: a packument's tarballs are at the cache, checked by what it says, in
// both of its forms.
func TestNPM(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	tgz := noise(600 << 10)
	lie := strings.Replace(tgz, tgz[:8], "12345678", 1)
	dist := func(p, sum string) string {
		return fmt.Sprintf(`{"integrity":%q,"shasum":"da39a3ee5e6b4b0d3255bfef95601890afd80709","tarball":%q}`, sum, p)
	}
	l.host("npm.example.com", true, func(w http.ResponseWriter, r *http.Request) {
		name := strings.TrimPrefix(r.URL.Path, "/reg/")
		switch {
		case strings.HasSuffix(name, "lie-1.0.0.tgz"):
			_, _ = io.WriteString(w, lie)
		case strings.HasSuffix(name, "small-1.0.0.tgz"):
			_, _ = io.WriteString(w, "not it")
		case strings.HasSuffix(name, ".tgz"):
			_, _ = io.WriteString(w, tgz)
		default:
			if strings.HasPrefix(name, "@") && !strings.Contains(r.URL.EscapedPath(), "%2f") {
				t.Errorf("a scoped name was asked for as %s", r.URL.EscapedPath())
			}
			if r.Header.Get("Accept-Encoding") != "gzip" {
				t.Errorf("asked with %v", r.Header)
			}
			w.Header().Set("Content-Type", "application/json")
			if strings.HasPrefix(r.Header.Get("Accept"), npmAbbreviated) {
				w.Header().Set("Content-Type", npmAbbreviated)
			}
			base := name[strings.LastIndex(name, "/")+1:]
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			_, _ = fmt.Fprintf(z, `{ "name":%q,"kind":%q, "versions":{"1.0.0":{"x":"tarball","dist":%s},"2.0.0":{"dist":%s},"3.0.0":{"dist":%s},"4.0.0":{"dist":%s},"5.0.0":{"dist":{"tarball":5}}},"é\"":"}"}`,
				name, r.Header.Get("Accept"),
				dist("https://npm.example.com/reg/"+name+"/-/"+base+"-1.0.0.tgz", sri(tgz)),
				dist("http://npm.example.com/reg/"+name+"/-/"+base+"-2.0.0.tgz", sri(tgz)), // as old ones have it
				dist("https://files.example.com/a/"+base+".tgz", sri(tgz)),
				dist("https://evil.example.com/a/"+base+".tgz", sri(tgz)))
			_ = z.Close()
		}
	})
	l.host("files.example.com", true, func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, tgz) })
	l.cfg.NPM = []Upstream{{Name: "main", URL: "https://npm.example.com/reg/", Also: []string{"files.example.com"}}}
	l.start()
	for _, pkg := range []string{"left-pad", "@scope%2fleft", "@scope/left", "lie", "small", "npm", "go"} {
		abbreviated := l.get("/npm/"+pkg, "Accept", npmAbbreviated+"; q=1.0, application/json; q=0.8, */*").want(t, 200, "-")
		full := l.get("/npm/"+pkg, "Accept", "application/json").want(t, 200, "-")
		if abbreviated.header.Get("Content-Type") != npmAbbreviated || full.header.Get("Content-Type") != "application/json" {
			t.Errorf("types %q, %q", abbreviated.header.Get("Content-Type"), full.header.Get("Content-Type"))
		}
		var v struct {
			Kind     string
			Versions map[string]struct{ Dist struct{ Tarball any } }
		}
		if err := json.Unmarshal([]byte(full.body), &v); err != nil {
			t.Fatalf("%s: %v", full.body, err)
		}
		base := "http://" + l.addr + "/npm/"
		name, _ := url.PathUnescape(pkg)
		short := name[strings.LastIndex(name, "/")+1:]
		for version, want := range map[string]string{
			"1.0.0": base + name + "/-/" + short + "-1.0.0.tgz", "2.0.0": base + name + "/-/" + short + "-2.0.0.tgz",
			"4.0.0": "https://evil.example.com/a/" + short + ".tgz",
		} {
			if got := v.Versions[version].Dist.Tarball; got != want {
				t.Errorf("%s %s: %s, want %s", name, version, got, want)
			}
		}
		first := "/" + strings.TrimPrefix(v.Versions["1.0.0"].Dist.Tarball.(string), "http://"+l.addr+"/")
		switch pkg {
		case "lie": // more than is held back whole: the connection breaks
			l.get(first).refused(t)
		case "small":
			l.get(first).want(t, 502, "-")
		default:
			l.get(first).want(t, 200, tgz)
			// npm takes the cache's host and loses its path.
			l.get(strings.TrimPrefix(first, "/npm")).want(t, 200, tgz).how(t, "hit")
		}
		other := v.Versions["3.0.0"].Dist.Tarball.(string)
		l.get(strings.TrimPrefix(other, "http://"+l.addr)).want(t, 200, tgz)
		bad := strings.Replace(strings.TrimPrefix(other, "http://"+l.addr), "sha512-", "sha256-", 1)
		l.get(bad).want(t, 404, "-")
		s := l.c.disk.shelves[refName("tenant0")[:32]]
		eventually(t, "it is kept", func() bool { return l.files("tmp") == 0 })
		m := s.peek(npmKey(l.c.up[NPM][0], name+"/-/"+short+"-1.0.0.tgz"))
		if bad := pkg == "lie" || pkg == "small"; bad != (m == nil) {
			t.Errorf("%s: kept %v", pkg, m)
		} else if m != nil && m.Verified != "sha512" {
			t.Errorf("%s: not verified: %+v", pkg, m)
		}
	}
	if g := l.get("/npm/left-pad", "User-Agent", "yarn/1.22.22 npm/? node/v20.0.0 linux x64").want(t, 200, "-"); strings.Contains(g.body, l.addr) || !strings.Contains(g.body, "https://npm.example.com/reg/left-pad/-/") {
		t.Errorf("yarn 1 would write into its lock file: %s", g.body)
	}
	l.get("/npm/-/ping").want(t, 200, "{}\n")
}

// TestNPMLater: a tarball that was fetched before its packument is compared when
// that comes, and forgotten if it is another.
func TestNPMLater(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.host("npm.example.com", true, func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, ".tgz") {
			_, _ = io.WriteString(w, r.URL.Path)
			return
		}
		_, _ = fmt.Fprintf(w, `{"versions":{"1.0.0":{"dist":{"tarball":"https://npm.example.com/a/-/a-1.0.0.tgz","integrity":%q}},"2.0.0":{"dist":{"tarball":"https://npm.example.com/a/-/a-2.0.0.tgz","integrity":%q}}}}`,
			sri("/a/-/a-1.0.0.tgz"), sri("something else"))
	})
	l.cfg.NPM = mirror("https://npm.example.com")
	l.start()
	l.get("/npm/a/-/a-1.0.0.tgz").want(t, 200, "/a/-/a-1.0.0.tgz")
	l.get("/npm/a/-/a-2.0.0.tgz").want(t, 200, "/a/-/a-2.0.0.tgz")
	eventually(t, "kept", func() bool { return l.files("ref") == 2 && l.files("tmp") == 0 })
	l.get("/npm/a").want(t, 200, "-")
	l.get("/npm/a/-/a-1.0.0.tgz").want(t, 200, "-").how(t, "hit")
	l.get("/npm/a/-/a-2.0.0.tgz").want(t, 502, "-")
}

const simplePage = `<!DOCTYPE html><html><head><base href="/simple/proj/"><title>Links</title></head><body>
<!-- <a href="x"> --><a href="../../packages/proj-1.0-py3-none-any.whl#sha256=%s" data-requires-python="&gt;=3.8" data-core-metadata="sha256=%s">proj-1.0</a>
<a href="https://files.example.com/p/lie-2.0.tar.gz#sha256=%s">lie</a><A HREF='https://files.example.com/p/nohash-3.0.tar.gz'>n</A>
<a href="https://evil.example.com/p/e-1.0.tar.gz#sha256=%s">e</a><a href="https://files.example.com/p/q-1.0.tar.gz?sig=1&amp;b=2">q</a>
</body></html>`

// TestPyPI: both forms of an index, the files behind it and their metadata.
func TestPyPI(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	files := map[string]string{
		"/packages/proj-1.0-py3-none-any.whl": noise(300 << 10), "/packages/proj-1.0-py3-none-any.whl.metadata": "Name: proj\n",
		"/p/lie-2.0.tar.gz": "lie", "/p/nohash-3.0.tar.gz": "no hash",
	}
	wheel, md := files["/packages/proj-1.0-py3-none-any.whl"], files["/packages/proj-1.0-py3-none-any.whl.metadata"]
	h := func(w http.ResponseWriter, r *http.Request) {
		if b, ok := files[r.URL.Path]; ok {
			_, _ = io.WriteString(w, b)
			return
		}
		switch {
		case r.URL.Path == "/simple/":
			w.Header().Set("Content-Type", "text/html")
			_, _ = io.WriteString(w, `<a href="/simple/proj/">Proj</a>`)
		case r.URL.Path != "/simple/proj/":
			w.WriteHeader(http.StatusNotFound)
		case strings.HasPrefix(r.Header.Get("Accept"), simpleJSON):
			w.Header().Set("Content-Type", simpleJSON)
			_, _ = fmt.Fprintf(w, `{"meta":{"api-version":"1.1"},"name":"proj","files":[{"core-metadata":{"sha256":%q},"url":"/packages/proj-1.0-py3-none-any.whl","filename":"proj-1.0-py3-none-any.whl","hashes":{"sha256":%q}},
{"filename":"lie-2.0.tar.gz","hashes":{"sha256":%q},"url":"https:\/\/files.example.com/p/lie-2.0.tar.gz","core-metadata":false}]}`, sha(md), sha(wheel), sha("truth"))
		default:
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			_, _ = fmt.Fprintf(w, simplePage, sha(wheel), sha(md), sha("truth"), sha("e"))
		}
	}
	l.host("pypi.example.com", true, h)
	l.host("files.example.com", true, h)
	l.cfg.PyPI = []Upstream{{Name: "main", URL: "https://pypi.example.com/simple", Also: []string{"files.example.com"}}, {Name: "other", URL: "https://pypi.example.com/simple/"}}
	l.start()
	wheelPath := "/pypi/files/sha256-" + sha(md) + "/sha256-" + sha(wheel) + "/https/pypi.example.com/packages/proj-1.0-py3-none-any.whl"
	liePath := "/pypi/files/-/sha256-" + sha("truth") + "/https/files.example.com/p/lie-2.0.tar.gz"

	page := l.get("/pypi/simple/Proj/", "Accept", "text/html").want(t, 200, "-").body
	want := strings.NewReplacer("<base href=\"/simple/proj/\">", "", "../../packages/proj-1.0-py3-none-any.whl", wheelPath,
		"https://files.example.com/p/lie-2.0.tar.gz", liePath, "<A HREF='https://files.example.com/p/nohash-3.0.tar.gz'>n</A>", `<a href="/pypi/files/-/-/https/files.example.com/p/nohash-3.0.tar.gz">n</A>`).
		Replace(fmt.Sprintf(simplePage, sha(wheel), sha(md), sha("truth"), sha("e")))
	if page != want {
		t.Errorf("page is\n%s\nwant\n%s", page, want)
	}
	var v struct {
		Files []struct{ Filename, URL string }
	}
	if err := json.Unmarshal([]byte(l.get("/pypi/simple/proj", "Accept", simpleJSON+", text/html; q=0.1").want(t, 200, "-").body), &v); err != nil {
		t.Fatal(err)
	}
	if len(v.Files) != 2 || v.Files[0].URL != wheelPath || v.Files[1].URL != liePath {
		t.Errorf("index has %+v", v)
	}
	l.get(wheelPath).want(t, 200, wheel).how(t, "miss")
	eventually(t, "kept", func() bool { return l.files("tmp") == 0 })
	l.get(wheelPath, "Range", "bytes=10-19").want(t, 206, wheel[10:20]).how(t, "hit")
	l.get(wheelPath+".metadata").want(t, 200, md)
	l.get(liePath).want(t, 502, "-")
	l.get("/pypi/files/-/-/https/files.example.com/p/nohash-3.0.tar.gz").want(t, 200, "no hash")
	l.get("/pypi/simple/").want(t, 200, `<a href="/pypi/simple/proj/">Proj</a>`)
	l.get("/pypi/simple/no-such/").want(t, 404, "-")
	// The other index leads to the same bytes, which are there already.
	other := l.get("/pypi/_/other/simple/proj/", "Accept", simpleJSON).want(t, 200, "-").body
	if !strings.Contains(other, `"/pypi/_/other/files/`) || !strings.Contains(other, `"https://files.example.com/p/lie`) {
		t.Errorf("other index: %s", other)
	}
	l.get(strings.Replace(wheelPath, "/pypi/", "/pypi/_/other/", 1)).want(t, 200, wheel).how(t, "hit")
	// A sandbox makes up an address: it gets no bytes of that name from another.
	l.get(strings.Replace(liePath, sha("truth"), sha(wheel), 1)).want(t, 200, wheel).how(t, "hit")
	l.get(strings.Replace(wheelPath, "sha256-"+sha(wheel), "sha256-"+sha("made up"), 1)).refused(t)
}

func moduleZip(t *testing.T, files ...string) (string, string) {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	var sums [][]byte
	for _, f := range files { // in order
		w, err := z.Create(f)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(w, "content of "+f)
		sums = append(sums, sum256([]byte("content of "+f)))
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String(), hash1(files, sums)
}

// TestGo: the proxy's protocol, a chain of proxies, and the checksum database
// through it, which modules are held to.
func TestGo(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	good, h1 := moduleZip(t, "example.com/!m@v1.0.0/a.go", "example.com/!m@v1.0.0/go.mod")
	bad, _ := moduleZip(t, "example.com/!m@v1.0.0/evil.go")
	mod := "module example.com/M\n"
	modH1 := hash1([]string{"go.mod"}, [][]byte{sum256([]byte(mod))})
	var mu sync.Mutex
	zips := map[string]string{"v1.0.0": good, "v1.1.0": bad, "v1.2.0": bad, "v1.3.0": "<html>"}
	l.host("first.example.com", true, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) })
	l.host("go.example.com", true, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		p := strings.TrimPrefix(r.URL.Path, "/example.com/!m/@v/")
		version := strings.TrimSuffix(strings.TrimSuffix(strings.TrimSuffix(p, ".zip"), ".mod"), ".info")
		switch {
		case strings.HasPrefix(r.URL.Path, "/sumdb/sum.example.com/lookup/example.com/!m@"):
			v := r.URL.Path[strings.LastIndex(r.URL.Path, "@")+1:]
			_, _ = fmt.Fprintf(w, "7\nexample.com/M %s %s\nexample.com/M %s/go.mod %s\n\nsigned\n", v, h1, v, modH1)
		case strings.HasPrefix(r.URL.Path, "/sumdb/"):
			_, _ = io.WriteString(w, "tile")
		case strings.HasSuffix(p, ".zip") && zips[version] != "":
			_, _ = io.WriteString(w, zips[version])
		case strings.HasSuffix(p, ".mod"):
			_, _ = io.WriteString(w, mod)
		case strings.HasSuffix(p, ".info"), strings.HasSuffix(r.URL.Path, "@latest"):
			_, _ = fmt.Fprintf(w, `{"Version":%q}`, "v1.0.0")
		default:
			w.WriteHeader(http.StatusGone)
		}
	})
	l.cfg.Go = []Upstream{{Name: "a", URL: "https://first.example.com"}, {Name: "b", URL: "https://go.example.com"}}
	l.start()
	const m = "/go/example.com/!m/@v/"
	const lookup = "/go/sumdb/sum.example.com/lookup/example.com/!m@"
	l.get(m+"v1.0.0.info").want(t, 200, `{"Version":"v1.0.0"}`)
	l.get("/go/example.com/!m/@latest").want(t, 200, `{"Version":"v1.0.0"}`)
	l.get(m+"v1.0.0.mod").want(t, 200, mod)
	l.get(m+"v9.9.9.zip").want(t, 410, "-")
	l.get(m+"v1.3.0.zip").want(t, 502, "-")
	l.get("/go/sumdb/sum.example.com/supported").want(t, 200, "tile")
	l.get("/go/sumdb/sum.example.com/tile/8/0/x001/234.p/5").want(t, 200, "tile")
	// The record is there first.
	l.get(lookup+"v1.0.0").want(t, 200, "-")
	l.get(lookup+"v1.1.0").want(t, 200, "-")
	eventually(t, "kept", func() bool { return l.files("tmp") == 0 })
	l.get(m+"v1.0.0.zip").want(t, 200, good)
	l.get(m+"v1.1.0.zip").want(t, 502, "-")
	// The zip is there first.
	l.get(m+"v1.2.0.zip").want(t, 200, bad)
	eventually(t, "kept", func() bool { return l.files("tmp") == 0 })
	s := l.c.disk.shelves[refName("tenant0")[:32]]
	key := "go https://first.example.com example.com/!m/@v/"
	if s.peek(key+"v1.2.0.zip") == nil || s.peek(key+"v1.1.0.zip") != nil {
		t.Fatal("the wrong ones are kept")
	}
	l.get(lookup+"v1.2.0").want(t, 200, "-")
	eventually(t, "it is forgotten", func() bool { return s.peek(key+"v1.2.0.zip") == nil })
	eventually(t, "verified", func() bool {
		z, g := s.peek(key+"v1.0.0.zip"), s.peek(key+"v1.0.0.mod")
		return z != nil && z.Verified == "h1" && g != nil && g.Verified == "h1"
	})
	if n := l.times("first.example.com", "/example.com/!m/@v/v1.0.0.zip"); n != 1 {
		t.Errorf("the first proxy was asked %d times", n)
	}
}

// TestDebian: what apt gets is one set, however the mirror moves on.
func TestDebian(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	var mu sync.Mutex
	packages := "Package: a\n"
	release := func() string {
		return "-----BEGIN PGP SIGNED MESSAGE-----\n\nOrigin: Debian\nMD5Sum:\n 00 11 main/binary-amd64/Packages\nSHA256:\n " + sha(packages) +
			" 11 main/binary-amd64/Packages\n " + sha("x") + " 1 main/x\nAcquire-By-Hash: yes\n"
	}
	l.host("deb.example.com", true, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		switch r.URL.Path {
		case "/debian/dists/stable/InRelease":
			_, _ = io.WriteString(w, release())
		case "/debian/dists/stable/main/binary-amd64/Packages":
			_, _ = io.WriteString(w, packages)
		case "/debian/dists/stable/main/binary-amd64/by-hash/SHA256/" + sha(packages), "/debian/dists/stable/main/binary-amd64/by-hash/SHA256/" + sha("lie"):
			_, _ = io.WriteString(w, packages)
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	})
	l.cfg.Debian = []Upstream{{Name: "deb", URL: "https://deb.example.com/debian"}, {Name: "root", URL: "https://root.example.com"}}
	l.start()
	const suite, index = "/debian/deb/dists/stable/", "main/binary-amd64/"
	before := l.get(suite+"InRelease").want(t, 200, "-").body
	l.get(suite+index+"Packages").want(t, 200, packages).how(t, "miss")
	l.get(suite+index+"by-hash/SHA256/"+sha(packages)).want(t, 200, packages)
	l.get(suite+index+"by-hash/SHA256/"+sha("lie")).want(t, 502, "-")
	l.get(suite+index+"by-hash/SHA256/"+sha("none")).want(t, 404, "-")
	eventually(t, "kept", func() bool { return l.files("tmp") == 0 })
	asked := l.times("deb.example.com", "/debian/dists/stable/"+index+"Packages")

	mu.Lock()
	old := packages
	packages = "Package: b\n"
	mu.Unlock()
	// As long as apt has the old InRelease from here, it gets what goes with it.
	l.get(suite+"InRelease").want(t, 200, before).how(t, "hit")
	l.get(suite+index+"Packages").want(t, 200, old).how(t, "hit")
	if n := l.times("deb.example.com", "/debian/dists/stable/"+index+"Packages"); n != asked {
		t.Errorf("the mirror was asked again")
	}
	// Evicted, it cannot be had any more: the next apt-get update begins anew.
	s := l.c.disk.shelves[refName("tenant0")[:32]]
	s.drop(s.peek("debian https://deb.example.com/debian dists/stable/" + index + "Packages"))
	l.get(suite+index+"Packages").want(t, 502, "-")
	if l.get(suite+"InRelease").want(t, 200, "-").body == before {
		t.Error("the old InRelease is still served")
	}
	l.get(suite+index+"Packages").want(t, 200, packages)

	// As a proxy, for http sources.
	proxy, err := url.Parse("http://" + l.addr)
	if err != nil {
		t.Fatal(err)
	}
	tr := &http.Transport{Proxy: http.ProxyURL(proxy)}
	defer tr.CloseIdleConnections()
	for u, status := range map[string]int{
		"http://deb.example.com/debian/dists/stable/main/binary-amd64/Packages":   200,
		"http://deb.example.com/debian/./dists/stable/main/binary-amd64/Packages": 200,
		"http://deb.example.com/other/x":                                          403,
		"http://evil.example.com/debian/x":                                        403,
	} {
		resp, err := (&http.Client{Transport: tr}).Get(u)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != status {
			t.Errorf("%s: %d, want %d", u, resp.StatusCode, status)
		}
	}
	// A tunnel to a TLS source is not opened.
	if resp, err := (&http.Client{Transport: tr}).Get("https://deb.example.com/debian/x"); err == nil {
		_ = resp.Body.Close()
		t.Errorf("a tunnel: %d", resp.StatusCode)
	}
}

func TestSetup(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.cfg.Debian, l.cfg.NPM, l.cfg.PyPI, l.cfg.Go = mirror("http://me:secret@deb.example.com:8080/debian"), mirror("https://npm.example.com"), mirror("https://pypi.example.com/simple"), mirror("https://go.example.com")
	l.cfg.GoDirect = true
	l.start()
	env, files := l.c.Setup(netip.MustParseAddrPort("10.1.2.3:81"))
	for k, want := range map[string]string{"GOPROXY": "http://10.1.2.3:81/go,direct", "NPM_CONFIG_REGISTRY": "http://10.1.2.3:81/npm/", "PIP_INDEX_URL": "http://10.1.2.3:81/pypi/simple/", "PIP_TRUSTED_HOST": "10.1.2.3:81", "UV_DEFAULT_INDEX": "", "GOSUMDB": ""} {
		if env[k] != want {
			t.Errorf("%s=%q, want %q", k, env[k], want)
		}
	}
	if len(files) != 1 || files[0].Path != "/etc/apt/apt.conf.d/95vivarium" || !strings.HasSuffix(string(files[0].Data), "\nAcquire::http::Proxy::deb.example.com \"http://10.1.2.3:81/\";\n") {
		t.Errorf("files %q", files)
	}
	empty := newLab(t).start()
	if env, files := empty.c.Setup(netip.MustParseAddrPort("10.1.2.3:81")); len(env)+len(files) > 0 {
		t.Errorf("without upstreams: %v %v", env, files)
	}
}
