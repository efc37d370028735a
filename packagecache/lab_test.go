package packagecache

import (
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"vivarium/sandbox"
)

// lab is a cache on loopback with registries that are whatever a test makes
// them. Its clients are the addresses of 127.0.0.0/8.
type lab struct {
	t    *testing.T
	c    *Cache
	cfg  Config
	addr string // of the cache

	mu    sync.Mutex
	hosts map[string]string // host:port -> where it is
	asked map[string]int    // "host path" -> times
	roots *x509.CertPool
}

// newLab makes one; hosts are added before the cache is opened by start.
func newLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{t: t, hosts: map[string]string{}, asked: map[string]int{}, roots: x509.NewCertPool()}
	l.cfg = Config{Dir: t.TempDir(), Tenant: func(a netip.Addr) string {
		if b := a.As4(); b[0] == 127 && b[2] < 200 {
			return fmt.Sprintf("tenant%d", b[2])
		}
		return ""
	}, Dial: l.dial, RootCAs: l.roots}
	return l
}

func (l *lab) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	l.mu.Lock()
	to, ok := l.hosts[addr]
	l.mu.Unlock()
	if !ok {
		return nil, fmt.Errorf("no host %s", addr)
	}
	return (&net.Dialer{}).DialContext(ctx, network, to)
}

// host puts a registry at a name; https says how it is spoken to.
func (l *lab) host(name string, https bool, h http.HandlerFunc) {
	l.t.Helper()
	counted := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		l.mu.Lock()
		l.asked[name+" "+r.URL.Path]++
		l.mu.Unlock()
		h(w, r)
	})
	var s *httptest.Server
	port := ":80"
	if https {
		s, port = httptest.NewUnstartedServer(counted), ":443"
		s.Config.ErrorLog = discardLog
		s.StartTLS()
		l.roots.AddCert(s.Certificate()) // for example.com and its subdomains
	} else {
		s = httptest.NewServer(counted)
	}
	l.t.Cleanup(s.Close)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hosts[name+port] = s.Listener.Addr().String()
}

func (l *lab) times(host, path string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.asked[host+" "+path]
}

func (l *lab) start() *lab {
	l.t.Helper()
	c, err := Open(l.cfg)
	if err != nil {
		l.t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		l.t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- c.Serve(ln) }()
	l.c, l.addr = c, ln.Addr().String()
	l.t.Cleanup(func() {
		if err := c.Close(); err != nil {
			l.t.Error(err)
		}
		if c == l.c {
			if err := <-done; err != nil && !errors.Is(err, sandbox.Conflict) { // closed before it began
				l.t.Error(err)
			}
		}
		_ = ln.Close()
	})
	return l
}

// client of an address.
func client(t *testing.T, from string) *http.Client {
	t.Helper()
	tr := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64,
		DialContext: (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}).DialContext}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: time.Minute, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

type got struct {
	status int
	body   string
	header http.Header
	err    error // of the body
}

func (l *lab) do(from, method, path string, h ...string) got {
	l.t.Helper()
	req, err := http.NewRequestWithContext(l.t.Context(), method, "http://"+l.addr+path, nil)
	if err != nil {
		l.t.Fatal(err)
	}
	for i := 0; i+1 < len(h); i += 2 {
		req.Header.Set(h[i], h[i+1])
	}
	resp, err := client(l.t, from).Do(req)
	if err != nil {
		return got{err: err}
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	return got{resp.StatusCode, string(b), resp.Header, err}
}

func (l *lab) get(path string, h ...string) got {
	l.t.Helper()
	return l.do("127.0.0.1", http.MethodGet, path, h...)
}

// want checks a status and, unless it is "-", a body.
func (g got) want(t *testing.T, status int, body string) got {
	t.Helper()
	if g.err != nil || g.status != status || body != "-" && g.body != body {
		t.Fatalf("got %d %.300q (%v), want %d %.300q", g.status, g.body, g.err, status, body)
	}
	return g
}

func (g got) how(t *testing.T, how string) got {
	t.Helper()
	if h := g.header.Get("X-Vivarium-Cache"); h != how {
		t.Fatalf("cache says %q, want %q", h, how)
	}
	return g
}

func sha(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])
}

func sri(s string) string {
	h := sha512.Sum512([]byte(s))
	return "sha512-" + base64.StdEncoding.EncodeToString(h[:])
}

// noise is n bytes that nothing repeats.
func noise(n int) string {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(n)})
	_, _ = r.Read(b)
	return string(b)
}

// files counts what is on disk below a part of the cache's folder.
func (l *lab) files(part string) int {
	l.t.Helper()
	m, err := filepath.Glob(filepath.Join(l.cfg.Dir, "*", part, "*"))
	if err != nil {
		l.t.Fatal(err)
	}
	return len(m)
}

// eventually waits for what another goroutine does.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 1000 {
		if ok() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("never: %s", what)
}

// reopen closes the cache and opens it again on the same folder.
func (l *lab) reopen() {
	l.t.Helper()
	if err := l.c.Close(); err != nil {
		l.t.Fatal(err)
	}
	l.start()
}

func write(t *testing.T, p, s string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(p), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(s), 0o600); err != nil {
		t.Fatal(err)
	}
}

func removeFile(p string) error { return os.Remove(p) }

func newNoDial(t testing.TB) func(context.Context, string, string) (net.Conn, error) {
	return func(context.Context, string, string) (net.Conn, error) {
		t.Error("dialled")
		return nil, io.EOF
	}
}

// refused checks that a lie did not arrive as a whole: either it is refused, or
// the connection broke before its end.
func (g got) refused(t *testing.T) {
	t.Helper()
	if g.err == nil && g.status != http.StatusBadGateway {
		t.Errorf("a lie arrived: %d, %d bytes", g.status, len(g.body))
	}
}
