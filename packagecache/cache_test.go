package packagecache

import (
	"bufio"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"vivarium/sandbox"
)

func mirror(url string, also ...string) []Upstream {
	return []Upstream{{Name: "m", URL: url, Also: also}}
}

// TestSingleFlight: many ask for an object at once; upstream is asked once, and
// all read the first part while upstream still holds the rest.
func TestSingleFlight(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	body := noise(3 << 20)
	rest := make(chan struct{})
	l.host("m.example.com", true, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(len(body)))
		_, _ = io.WriteString(w, body[:1<<20])
		w.(http.Flusher).Flush()
		<-rest
		_, _ = io.WriteString(w, body[1<<20:])
	})
	l.cfg.Debian = mirror("https://m.example.com/debian")
	l.start()
	const n = 20
	var began, wg sync.WaitGroup
	began.Add(n)
	for i := range n {
		from := fmt.Sprintf("127.0.0.%d", i+1) // of one tenant
		wg.Go(func() {
			resp, err := client(t, from).Get("http://" + l.addr + "/debian/m/pool/main/a/a_1_all.deb")
			if err != nil {
				t.Error(err)
				began.Done()
				return
			}
			defer func() { _ = resp.Body.Close() }()
			head := make([]byte, 512<<10)
			_, err = io.ReadFull(resp.Body, head)
			began.Done()
			if err != nil {
				t.Error(err)
				return
			}
			tail, err := io.ReadAll(resp.Body)
			if err != nil || string(head)+string(tail) != body {
				t.Errorf("%s got %d bytes, %v", from, len(head)+len(tail), err)
			}
		})
	}
	began.Wait() // or the test hangs: nobody gets a byte before upstream is done
	close(rest)
	wg.Wait()
	if k := l.times("m.example.com", "/debian/pool/main/a/a_1_all.deb"); k != 1 {
		t.Errorf("upstream was asked %d times", k)
	}
	eventually(t, "it is kept", func() bool { return l.c.Stats().Objects == 1 })
	l.get("/debian/m/pool/main/a/a_1_all.deb").want(t, 200, body).how(t, "hit")
	if st := l.c.Stats(); st.Kinds[Debian].Misses != 1 || st.Kinds[Debian].Hits != n || st.Fetched != int64(len(body)) || st.Served != (n+1)*int64(len(body)) {
		t.Errorf("stats %+v", st)
	}
}

// TestRangeInFlight: parts of an object are served while it arrives, and after.
func TestRangeInFlight(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	body := noise(2 << 20)
	rest := make(chan struct{})
	l.host("m.example.com", false, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", fmt.Sprint(len(body)))
		w.Header().Set("Last-Modified", "Mon, 02 Jan 2006 15:04:05 GMT")
		_, _ = io.WriteString(w, body[:1<<20])
		w.(http.Flusher).Flush()
		<-rest
		_, _ = io.WriteString(w, body[1<<20:])
	})
	l.cfg.Debian = mirror("http://m.example.com")
	l.start()
	const p = "/debian/m/pool/x.deb"
	hold, err := client(t, "127.0.0.9").Get("http://" + l.addr + p) // keeps the download going
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = hold.Body.Close() }()
	g := l.get(p, "Range", "bytes=1000-1999").want(t, 206, body[1000:2000])
	if cr := g.header.Get("Content-Range"); cr != fmt.Sprintf("bytes 1000-1999/%d", len(body)) {
		t.Errorf("Content-Range %q", cr)
	}
	if g := l.do("127.0.0.1", http.MethodHead, p).want(t, 200, ""); g.header.Get("Content-Length") != fmt.Sprint(len(body)) {
		t.Errorf("HEAD: %v", g.header)
	}
	close(rest)
	if b, err := io.ReadAll(hold.Body); err != nil || string(b) != body {
		t.Fatalf("%d bytes, %v", len(b), err)
	}
	l.get(p, "Range", "bytes=-10").want(t, 206, body[len(body)-10:]).how(t, "hit")
	l.get(p, "Range", "bytes=5-", "If-Range", "Mon, 02 Jan 2006 15:04:05 GMT").want(t, 206, body[5:])
	l.get(p, "Range", "bytes=5-", "If-Range", "Mon, 02 Jan 2007 15:04:05 GMT").want(t, 200, body)
	l.get(p, "Range", "bytes=99999999-").want(t, 416, "-")
	l.get(p, "Range", "bytes=0-1,5-6,9-10").want(t, 200, body)
	l.get(p, "If-Modified-Since", "Mon, 02 Jan 2006 15:04:05 GMT").want(t, 304, "")
	l.get(p, "If-None-Match", `"`+sha(body)+`"`).want(t, 304, "")
}

// TestBrokenUpstream: a body that breaks off is resumed where upstream can, and
// else reaches nobody as a whole one and is not kept.
func TestBrokenUpstream(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	body := noise(1 << 20)
	hijack := func(w http.ResponseWriter, etag string, n int) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = conn.Close() }()
		_, _ = fmt.Fprintf(rw, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n%s", len(body), etag, body[:n])
		_ = rw.Flush()
	}
	var short atomic.Bool
	l.host("m.example.com", false, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasSuffix(r.URL.Path, "resumes.deb"):
			if rg := r.Header.Get("Range"); rg != "" {
				var from int
				if _, err := fmt.Sscanf(rg, "bytes=%d-", &from); err != nil || r.Header.Get("If-Range") != `"e"` {
					t.Errorf("resumed with %v", r.Header)
				}
				w.Header().Set("Content-Range", contentRange(int64(from), int64(len(body))))
				w.WriteHeader(http.StatusPartialContent)
				_, _ = io.WriteString(w, body[from:])
				return
			}
			hijack(w, "ETag: \"e\"\r\n", 500_000)
		case strings.HasSuffix(r.URL.Path, "breaks.deb"):
			hijack(w, "", 900_000)
		case strings.HasSuffix(r.URL.Path, "small.deb"):
			if short.Load() {
				_, _ = io.WriteString(w, "whole")
				return
			}
			conn, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwho")
				_ = conn.Close()
			}
		}
	})
	l.cfg.Debian = mirror("http://m.example.com")
	l.start()
	l.get("/debian/m/pool/resumes.deb").want(t, 200, body)
	l.get("/debian/m/pool/breaks.deb").refused(t)
	l.get("/debian/m/pool/small.deb").want(t, 502, "-")
	eventually(t, "nothing but the good one", func() bool {
		return l.files("tmp") == 0 && l.files("ref") == 1 && l.files("blob") == 1
	})
	short.Store(true)
	l.get("/debian/m/pool/small.deb").want(t, 200, "whole")
}

// TestTenantsApart: what one tenant has, another has to fetch itself.
func TestTenantsApart(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.host("m.example.com", true, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "deb") })
	l.cfg.Debian = mirror("https://m.example.com")
	l.start()
	p := "/debian/m/pool/a.deb"
	l.do("127.0.1.1", "GET", p).want(t, 200, "deb").how(t, "miss")
	l.do("127.0.1.2", "GET", p).want(t, 200, "deb").how(t, "hit")
	l.do("127.0.2.1", "GET", p).want(t, 200, "deb").how(t, "miss")
	l.do("127.0.201.1", "GET", p).want(t, 403, "-") // nobody's
	if n := l.times("m.example.com", "/pool/a.deb"); n != 2 {
		t.Errorf("upstream was asked %d times", n)
	}
	eventually(t, "each tenant has a file", func() bool { return l.files("blob") == 2 && l.files("ref") == 2 })
}

// TestPolicy: the cache gives a sandbox nothing of a host that its policy does
// not allow, kept or not.
func TestPolicy(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.host("m.example.com", true, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "deb") })
	l.cfg.Debian = mirror("https://m.example.com")
	l.cfg.Allow = func(a netip.Addr, host string, port uint16) bool {
		if host != "m.example.com" || port != 443 {
			t.Errorf("asked for %s:%d", host, port)
		}
		return a == netip.MustParseAddr("127.0.0.1")
	}
	l.start()
	l.get("/debian/m/pool/a.deb").want(t, 200, "deb")
	l.do("127.0.0.2", "GET", "/debian/m/pool/a.deb").want(t, 403, "-")
	if n := l.c.Stats().Kinds[Debian].Denied; n != 1 {
		t.Errorf("%d denied", n)
	}
}

// TestRevalidation: an index is served for its time, then confirmed, then
// replaced; when upstream is gone, what it said last is served.
func TestRevalidation(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	var mu sync.Mutex
	tag, down, confirmed := "1", false, 0
	l.host("go.example.com", true, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if down {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		w.Header().Set("ETag", `"`+tag+`"`)
		if r.Header.Get("If-None-Match") == `"`+tag+`"` {
			confirmed++
			w.WriteHeader(http.StatusNotModified)
			return
		}
		_, _ = io.WriteString(w, "v1.0."+tag+"\n")
	})
	l.cfg.Go = mirror("https://go.example.com")
	l.cfg.MetadataTTL = time.Hour
	l.start()
	const p = "/go/example.com/m/@v/list"
	l.get(p).want(t, 200, "v1.0.1\n").how(t, "miss")
	l.get(p).want(t, 200, "v1.0.1\n").how(t, "hit")
	l.cfg.MetadataTTL = time.Nanosecond
	l.reopen()
	l.get(p).want(t, 200, "v1.0.1\n").how(t, "revalidated")
	mu.Lock()
	tag = "2"
	mu.Unlock()
	l.get(p).want(t, 200, "v1.0.2\n").how(t, "miss")
	eventually(t, "kept", func() bool { return l.files("tmp") == 0 })
	mu.Lock()
	down = true
	mu.Unlock()
	l.get(p).want(t, 200, "v1.0.2\n").how(t, "stale")
	st := l.c.Stats().Kinds[Go]
	l.cfg.StaleFor = -1
	l.reopen()
	l.get(p).want(t, 502, "-")
	if confirmed != 1 {
		t.Errorf("confirmed %d times", confirmed)
	}
	if st != (Counts{Misses: 1, Revalidated: 1, Stale: 1}) {
		t.Errorf("counts %+v", st)
	}
	if n := l.files("blob"); n != 1 {
		t.Errorf("%d files; the old one should be gone", n)
	}
}

// TestAbsent: that something is not there is remembered, for a while.
func TestAbsent(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.host("go.example.com", true, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusGone) })
	l.cfg.Go = mirror("https://go.example.com")
	l.cfg.NegativeTTL = time.Hour
	l.start()
	const p = "/example.com/no/@v/v1.0.0.info"
	l.get("/go"+p).want(t, 410, "-")
	l.get("/go"+p).want(t, 410, "-")
	if n := l.times("go.example.com", p); n != 1 {
		t.Errorf("asked %d times", n)
	}
	l.do("127.0.5.1", "GET", "/go"+p).want(t, 410, "-")
	if n := l.times("go.example.com", p); n != 2 {
		t.Errorf("another tenant learnt of it: asked %d times", n)
	}
}

// TestRedirects: within the hosts of an upstream, and nowhere else; its password
// goes to its own host alone.
func TestRedirects(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	to := func(u string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if u, p, _ := r.BasicAuth(); u != "me" || p != "secret" {
				t.Errorf("asked without the password: %v", r.Header)
			}
			http.Redirect(w, r, u, http.StatusFound)
		}
	}
	files := func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" {
			t.Error("another host got the password")
		}
		_, _ = io.WriteString(w, "file")
	}
	l.host("good.example.com", true, to("https://files.example.com/x"))
	l.host("bad.example.com", true, to("https://evil.example.com/x"))
	l.host("clear.example.com", true, to("http://files.example.com/x"))
	l.host("meta.example.com", true, to("http://169.254.169.254/x"))
	l.host("round.example.com", true, to("https://round.example.com/x"))
	l.host("files.example.com", true, files)
	l.host("files.example.com", false, files)
	l.host("evil.example.com", true, files)
	for _, n := range []string{"good", "bad", "clear", "meta", "round"} {
		l.cfg.Debian = append(l.cfg.Debian, Upstream{Name: n, URL: "https://me:secret@" + n + ".example.com", Also: []string{"files.example.com"}})
	}
	l.start()
	l.get("/debian/good/pool/x.deb").want(t, 200, "file")
	for _, n := range []string{"bad", "clear", "meta", "round"} {
		g := l.get("/debian/"+n+"/pool/x.deb").want(t, 502, "-")
		if strings.Contains(g.body, "secret") {
			t.Errorf("%s: the password is in %q", n, g.body)
		}
	}
	for _, h := range []string{"evil.example.com"} {
		if l.times(h, "/x") != 0 {
			t.Errorf("%s was asked", h)
		}
	}
}

// TestClientHeaders: nothing of a sandbox's request reaches upstream.
func TestClientHeaders(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.host("m.example.com", true, func(w http.ResponseWriter, r *http.Request) {
		for k := range r.Header {
			switch k {
			case "User-Agent", "Accept-Encoding":
			default:
				t.Errorf("upstream got %s: %v", k, r.Header[k])
			}
		}
		w.Header().Set("Set-Cookie", "a=b")
		w.Header().Set("X-Secret", "s")
		_, _ = io.WriteString(w, "x")
	})
	l.cfg.Debian = mirror("https://m.example.com")
	l.start()
	g := l.get("/debian/m/pool/a.deb", "Authorization", "Bearer x", "Cookie", "a=b", "X-Forwarded-For", "10.0.0.1").want(t, 200, "x")
	if g.header.Get("Set-Cookie") != "" || g.header.Get("X-Secret") != "" {
		t.Errorf("upstream's headers are handed on: %v", g.header)
	}
}

// TestUntrusted: a registry whose certificate nobody vouches for is not spoken to.
func TestUntrusted(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.host("m.elsewhere.test", true, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "x") })
	l.cfg.Debian = mirror("https://m.elsewhere.test") // the certificate is for example.com
	l.start()
	g := l.get("/debian/m/pool/a.deb").want(t, 502, "-")
	if l.times("m.elsewhere.test", "/pool/a.deb") != 0 || !strings.Contains(g.body, "certificate") {
		t.Errorf("got %q", g.body)
	}
}

// TestHostilePaths: what is not an object of a known shape is refused, and
// upstream is not asked.
func TestHostilePaths(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	h := func(w http.ResponseWriter, r *http.Request) {
		t.Errorf("upstream was asked for %s", r.URL)
		_, _ = io.WriteString(w, "x")
	}
	l.host("m.example.com", true, h)
	l.host("evil.example.com", true, h)
	l.host("evil.example.com", false, h)
	l.cfg.Debian, l.cfg.NPM, l.cfg.PyPI, l.cfg.Go = mirror("https://m.example.com/debian"), mirror("https://m.example.com/npm"), mirror("https://m.example.com/simple"), mirror("https://m.example.com/go")
	l.start()
	for _, c := range []struct {
		line   string
		status int
	}{
		{"GET / HTTP/1.1", 404},
		{"GET /debian/m/../../secret HTTP/1.1", 404},
		{"GET /debian/m/%2e%2e/secret HTTP/1.1", 404},
		{"GET /debian/m/pool/..%2f..%2fsecret HTTP/1.1", 404},
		{"GET /debian/m/pool/a%00b HTTP/1.1", 404},
		{"GET /debian/m/pool/a%0d%0aHost:%20x HTTP/1.1", 404},
		{"GET /debian/m//pool/a HTTP/1.1", 404},
		{"GET /debian/m/pool/ HTTP/1.1", 404},
		{"GET /debian/no/pool/a HTTP/1.1", 404},
		{"GET /debian/m/dists/by-hash/SHA256/abc HTTP/1.1", 404},
		{"GET /debian/m/pool/a?x=y HTTP/1.1", 404},
		{"GET http://evil.example.com/debian/pool/a HTTP/1.1", 403},
		{"GET http://m.example.com/other/pool/a HTTP/1.1", 403},
		{"GET http://m.example.com:81/debian/pool/a HTTP/1.1", 403},
		{"GET https://m.example.com/debian/pool/a HTTP/1.1", 403},
		{"GET http://a@m.example.com/debian/pool/a HTTP/1.1", 403},
		{"CONNECT m.example.com:443 HTTP/1.1", 405},
		{"POST /npm/-/npm/v1/security/audits HTTP/1.1", 405},
		{"PUT /npm/left-pad HTTP/1.1", 405},
		{"GET /npm/-/v1/search HTTP/1.1", 404},
		{"GET /npm/@scope HTTP/1.1", 404},
		{"GET /npm/_/no/left-pad HTTP/1.1", 404},
		{"GET /npm/-/f/-/https/evil.example.com/x.tgz HTTP/1.1", 403},
		{"GET /npm/-/f/-/http/m.example.com/x.tgz HTTP/1.1", 403},
		{"GET /npm/-/f/sha512-zz/https/m.example.com/x.tgz HTTP/1.1", 404},
		{"GET /pypi/simple/a/b/ HTTP/1.1", 404},
		{"GET /pypi/simple/-/ HTTP/1.1", 404},
		{"GET /pypi/files/-/-/https/evil.example.com/a.whl HTTP/1.1", 403},
		{"GET /pypi/files/-/-/https/a@m.example.com/a.whl HTTP/1.1", 403},
		{"GET /pypi/files/-/-/https/m.example.com:444/a.whl HTTP/1.1", 403},
		{"GET /pypi/files/-/sha256-00/https/m.example.com/a.whl HTTP/1.1", 404},
		{"GET /go/example.com/m/@v/v1.0.0.exe HTTP/1.1", 404},
		{"GET /go/example.com/m HTTP/1.1", 404},
		{"GET /go/sumdb/sum.example.com/other HTTP/1.1", 404},
		{"GET /" + strings.Repeat("a", 2000) + " HTTP/1.1", 404},
		{"GET /debian/m/pool/a HTTP/1.1\r\nContent-Length: 1000000", 400},
		{"GET /debian/m/pool/a HTTP/1.1\r\nTransfer-Encoding: chunked", 400},
		{"GET /debian/m/pool/a HTTP/1.1\r\nX: " + strings.Repeat("a", 64<<10), 431},
	} {
		conn, err := net.Dial("tcp", l.addr)
		if err != nil {
			t.Fatal(err)
		}
		host := "x"
		if strings.HasPrefix(c.line, "CONNECT") {
			host = "m.example.com:443"
		}
		_, _ = fmt.Fprintf(conn, "%s\r\nHost: %s\r\nConnection: close\r\n\r\n", c.line, host)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Errorf("%.80s: %v", c.line, err)
		} else {
			if resp.StatusCode != c.status {
				b, _ := io.ReadAll(resp.Body)
				t.Errorf("%.80s: %d %.100s, want %d", c.line, resp.StatusCode, b, c.status)
			}
			_ = resp.Body.Close()
		}
		_ = conn.Close()
	}
}

// TestBounds: sizes that upstream sends, or says, or hides in compression.
func TestBounds(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.host("m.example.com", true, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/pool/says.deb":
			w.Header().Set("Content-Length", "99999999")
			_, _ = io.WriteString(w, "x")
		case "/pool/sends.deb":
			for range 100 {
				if _, err := io.WriteString(w, noise(64<<10)); err != nil {
					return
				}
			}
		case "/bomb":
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			_, _ = io.WriteString(z, `{"name":"`)
			b := []byte(strings.Repeat("a", 1<<20))
			for range 80 {
				if _, err := z.Write(b); err != nil {
					return
				}
			}
			_, _ = io.WriteString(z, `"}`)
			_ = z.Close()
		case "/headers":
			for i := range 4000 {
				w.Header().Set(fmt.Sprintf("X-%d", i), strings.Repeat("a", 100))
			}
			_, _ = io.WriteString(w, "{}")
		case "/odd":
			w.Header().Set("Content-Encoding", "br")
			_, _ = io.WriteString(w, "{}")
		case "/nojson":
			_, _ = io.WriteString(w, "<html>")
		}
	})
	l.cfg.MaxObject = 2 << 20
	l.cfg.Debian, l.cfg.NPM = mirror("https://m.example.com"), mirror("https://m.example.com")
	l.start()
	l.get("/debian/m/pool/says.deb").want(t, 502, "-")
	l.get("/debian/m/pool/sends.deb").refused(t)
	l.cfg.MaxObject = 1 << 30
	l.reopen()
	for _, p := range []string{"bomb", "headers", "odd", "nojson"} {
		l.get("/npm/"+p).want(t, 502, "-")
	}
	eventually(t, "nothing is kept", func() bool { return l.files("*") == 0 && l.c.Stats().Used == 0 })
}

// TestBudget: the cache stays within its budget; the tenant that has most gives,
// what was not used longest first; and the order outlives the process.
func TestBudget(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	body := noise(90_000) // with what describes it, 96 KiB
	l.host("m.example.com", true, func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.URL.Path+body) })
	l.cfg.Debian = mirror("https://m.example.com")
	l.cfg.Budget = 3 << 20
	l.start()
	l.do("127.0.9.1", "GET", "/debian/m/pool/other.deb").want(t, 200, "-")
	for i := range 40 {
		l.get(fmt.Sprintf("/debian/m/pool/%d.deb", i)).want(t, 200, "-")
		l.get("/debian/m/pool/0.deb").want(t, 200, "-") // in use
		eventually(t, "kept", func() bool { return l.files("tmp") == 0 })
		if st := l.c.Stats(); st.Used > st.Budget {
			t.Fatalf("uses %d of %d", st.Used, st.Budget)
		}
	}
	l.get("/debian/m/pool/0.deb").how(t, "hit")
	l.get("/debian/m/pool/39.deb").how(t, "hit")
	l.get("/debian/m/pool/1.deb").how(t, "miss")
	l.do("127.0.9.1", "GET", "/debian/m/pool/other.deb").how(t, "hit")
	if l.c.Stats().Evictions == 0 {
		t.Error("no eviction was counted")
	}
	eventually(t, "kept", func() bool { return l.files("tmp") == 0 })
	before := l.c.Stats()
	l.reopen()
	after := l.c.Stats()
	if after.Used != before.Used || after.Objects != before.Objects || after.Objects != l.files("ref") || after.Objects != l.files("blob") {
		t.Errorf("%d objects of %d bytes, before %d of %d", after.Objects, after.Used, before.Objects, before.Used)
	}
	l.do("127.0.9.1", "GET", "/debian/m/pool/other.deb").how(t, "hit")
}

// TestCrash: what an unfinished write left is removed, what is damaged too, and
// the rest is there.
func TestCrash(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.host("m.example.com", true, func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.URL.Path) })
	l.cfg.Debian = mirror("https://m.example.com")
	l.start()
	for _, n := range []string{"good", "short", "norefs"} {
		l.get("/debian/m/pool/"+n+".deb").want(t, 200, "/pool/"+n+".deb")
	}
	eventually(t, "kept", func() bool { return l.files("ref") == 3 && l.files("tmp") == 0 })
	if _, err := Open(l.cfg); !errors.Is(err, sandbox.Conflict) {
		t.Errorf("a second process opened it: %v", err)
	}
	if err := l.c.Close(); err != nil {
		t.Fatal(err)
	}
	dirs, _ := filepath.Glob(filepath.Join(l.cfg.Dir, "*", "blob"))
	if len(dirs) != 1 {
		t.Fatal(dirs)
	}
	dir := filepath.Dir(dirs[0])
	write(t, filepath.Join(dir, "tmp", "f1"), "half")
	write(t, filepath.Join(dir, "blob", sha("/pool/short.deb")), "/pool")
	write(t, filepath.Join(dir, "blob", sha("orphan")), "orphan")
	write(t, filepath.Join(dir, "ref", refName("debian https://m.example.com pool/norefs.deb")), `{"key":"debian https://m.exam`)
	write(t, filepath.Join(dir, "ref", refName("x")), `{"key":"y"}`)
	l.start()
	if l.files("ref") != 1 || l.files("blob") != 1 || l.files("tmp") != 0 || l.c.Stats().Objects != 1 {
		t.Errorf("left: %d %d %d", l.files("ref"), l.files("blob"), l.files("tmp"))
	}
	l.get("/debian/m/pool/good.deb").want(t, 200, "/pool/good.deb").how(t, "hit")
	l.get("/debian/m/pool/short.deb").want(t, 200, "/pool/short.deb").how(t, "miss")
	// Somebody removes a file under a running cache.
	write(t, filepath.Join(dir, "x"), "")
	m := l.c.disk.shelves[filepath.Base(dir)].peek("debian https://m.example.com pool/good.deb")
	if err := removeFile(filepath.Join(dir, "blob", m.Sum)); err != nil {
		t.Fatal(err)
	}
	l.get("/debian/m/pool/good.deb").want(t, 200, "/pool/good.deb").how(t, "miss")
}

// TestAbandoned: a download that nobody waits for ends, and the next is served.
func TestAbandoned(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	gone := make(chan struct{}, 1)
	var calls atomic.Int32
	l.host("m.example.com", false, func(w http.ResponseWriter, r *http.Request) {
		if calls.Add(1) > 1 {
			_, _ = io.WriteString(w, "whole")
			return
		}
		w.Header().Set("Content-Length", "10000000")
		_, _ = io.WriteString(w, noise(1<<20))
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		gone <- struct{}{}
	})
	l.cfg.Debian = mirror("http://m.example.com")
	l.start()
	ctx, cancel := context.WithCancel(t.Context())
	req, _ := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+l.addr+"/debian/m/pool/a.deb", nil)
	resp, err := client(t, "127.0.0.1").Do(req)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	_ = resp.Body.Close()
	<-gone
	l.get("/debian/m/pool/a.deb").want(t, 200, "whole")
	eventually(t, "the half is gone", func() bool { return l.files("tmp") == 0 })
}

// TestStall: an upstream that sends nothing more is given up.
func TestStall(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.host("m.example.com", false, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "1000")
		_, _ = io.WriteString(w, "x")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	l.cfg.Debian = mirror("http://m.example.com")
	l.cfg.Stall = 200 * time.Millisecond
	l.start()
	l.get("/debian/m/pool/a.deb").want(t, 502, "-")
}

// TestConnections: one client cannot take all.
func TestConnections(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.host("m.example.com", false, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "x") })
	l.cfg.Debian = mirror("http://m.example.com")
	l.cfg.Conns = 4
	l.start()
	var conns []net.Conn
	closed := 0
	for range 8 {
		conn, err := net.Dial("tcp", l.addr)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	for _, conn := range conns {
		_, _ = io.WriteString(conn, "GET /debian/m/pool/a.deb HTTP/1.1\r\nHost: x\r\n\r\n")
		_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
		if _, err := conn.Read(make([]byte, 1)); err != nil {
			closed++
		}
	}
	if closed != 4 {
		t.Errorf("%d of 8 connections were closed, want 4", closed)
	}
	l.do("127.0.0.2", "GET", "/debian/m/pool/a.deb").want(t, 200, "x") // others are served
	for _, conn := range conns {
		_ = conn.Close()
	}
	eventually(t, "it may come again", func() bool { return l.get("/debian/m/pool/a.deb").status == 200 })
}

func TestConfig(t *testing.T) {
	t.Parallel()
	good := newLab(t).cfg
	for name, change := range map[string]func(*Config){
		"no dir":     func(c *Config) { c.Dir = "" },
		"no tenant":  func(c *Config) { c.Tenant = nil },
		"no dial":    func(c *Config) { c.Dial = nil },
		"no name":    func(c *Config) { c.NPM = []Upstream{{URL: "https://x"}} },
		"bad name":   func(c *Config) { c.NPM = []Upstream{{Name: "a/b", URL: "https://x"}} },
		"twice":      func(c *Config) { c.NPM = []Upstream{{Name: "a", URL: "https://x"}, {Name: "a", URL: "https://y"}} },
		"no url":     func(c *Config) { c.NPM = []Upstream{{Name: "a", URL: "https://me:secret@x:y"}} },
		"ftp":        func(c *Config) { c.NPM = []Upstream{{Name: "a", URL: "ftp://x"}} },
		"query":      func(c *Config) { c.NPM = []Upstream{{Name: "a", URL: "https://me:secret@x/?y"}} },
		"dots":       func(c *Config) { c.NPM = []Upstream{{Name: "a", URL: "https://x/../y"}} },
		"also":       func(c *Config) { c.NPM = []Upstream{{Name: "a", URL: "https://x", Also: []string{"http://y/"}}} },
		"negative":   func(c *Config) { c.Budget = -1 },
		"also paths": func(c *Config) { c.PyPI = []Upstream{{Name: "a", URL: "https://x", Also: []string{"y/z"}}} },
	} {
		cfg := good
		change(&cfg)
		c, err := Open(cfg)
		if !errors.Is(err, sandbox.Invalid) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v, %v", name, c, err)
		}
	}
}
