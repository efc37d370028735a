package tunnel

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"vivarium/sandbox"
)

// lab is a node: sandboxes that are servers of the test, and a store.
type lab struct {
	t   *testing.T
	dir string
	m   *Manager
	log *strings.Builder // everything that was logged

	mu     sync.Mutex
	boxes  map[string]sandbox.Sandbox // by id
	ports  map[string]string          // id/port to address
	rows   map[string]sandbox.Tunnel
	dialed int
	open   int // connections to the inside
}

const domain = "tunnels.example.test"

type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

func newLab(t *testing.T, change ...func(*Options)) *lab {
	t.Helper()
	l := &lab{t: t, dir: t.TempDir(), boxes: map[string]sandbox.Sandbox{}, ports: map[string]string{}, rows: map[string]sandbox.Tunnel{}, log: &strings.Builder{}}
	for _, id := range []string{"sb-1", "sb-2"} {
		l.boxes[id] = sandbox.Sandbox{ID: id, Tenant: "a", Stage: sandbox.StageRunning, Deadline: time.Now().Add(time.Hour)}
	}
	l.boxes["sb-b"] = sandbox.Sandbox{ID: "sb-b", Tenant: "b", Stage: sandbox.StageRunning, Deadline: time.Now().Add(time.Hour)}
	l.start(change...)
	return l
}

// start is a daemon's start.
func (l *lab) start(change ...func(*Options)) {
	l.t.Helper()
	o := Options{
		Dir: filepath.Join(l.dir, "tunnel"), Store: l, Listen: "127.0.0.1:0", Domain: domain, TCPAddress: "127.0.0.1", Ports: Ports{21000, 21999},
		MaxConnections: 64, Logger: slog.New(slog.NewTextHandler(&lockedWriter{w: l.log}, &slog.HandlerOptions{Level: slog.LevelDebug})),
	}
	for _, c := range change {
		c(&o)
	}
	m, err := New(o)
	if err != nil {
		l.t.Fatal(err)
	}
	l.m = m
	l.t.Cleanup(func() { m.Close() })
	if err := m.Start(l.t.Context(), l); err != nil {
		l.t.Fatal(err)
	}
}

func (l *lab) Get(_ context.Context, tenant, ref string) (sandbox.Sandbox, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if sb, ok := l.boxes[ref]; ok && sb.Tenant == tenant {
		return sb, nil
	}
	return sandbox.Sandbox{}, sandbox.NotFound.Errorf("sandbox %s does not exist", ref)
}

func (l *lab) Dial(ctx context.Context, tenant, ref string, port uint16) (net.Conn, error) {
	if _, err := l.Get(ctx, tenant, ref); err != nil {
		return nil, err
	}
	l.mu.Lock()
	addr := l.ports[key(ref, port)]
	l.dialed++
	l.mu.Unlock()
	if addr == "" {
		return nil, sandbox.Unavailable.Errorf("nothing listens on port %d", port)
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, sandbox.Unavailable.Errorf("dial: %w", err)
	}
	l.mu.Lock()
	l.open++
	l.mu.Unlock()
	return &countedConn{TCPConn: c.(*net.TCPConn), done: sync.OnceFunc(func() {
		l.mu.Lock()
		l.open--
		l.mu.Unlock()
	})}, nil
}

func (l *lab) dials() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.dialed
}

type countedConn struct {
	*net.TCPConn
	done func()
}

func (c *countedConn) Close() error {
	c.done()
	return c.TCPConn.Close()
}

func key(id string, port uint16) string { return id + "/" + string(rune(port)) }

// inside lets a server stand for a program in a sandbox.
func (l *lab) inside(id string, port uint16, addr string) {
	l.mu.Lock()
	l.ports[key(id, port)] = addr
	l.mu.Unlock()
}

func (l *lab) serve(id string, port uint16, h http.HandlerFunc) {
	s := httptest.NewServer(h)
	l.t.Cleanup(s.Close)
	l.inside(id, port, s.Listener.Addr().String())
}

// end is what the engine does when a sandbox ends.
func (l *lab) end(id string) {
	l.mu.Lock()
	sb := l.boxes[id]
	sb.Stage = sandbox.StageEnded
	l.boxes[id] = sb
	l.mu.Unlock()
	if err := l.m.CloseSandbox(l.t.Context(), sb.Tenant, id); err != nil {
		l.t.Error(err)
	}
}

func (l *lab) Tunnels(context.Context) ([]sandbox.Tunnel, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []sandbox.Tunnel
	for _, r := range l.rows {
		out = append(out, r)
	}
	return out, nil
}

func (l *lab) PutTunnel(_ context.Context, t sandbox.Tunnel) error {
	raw, err := json.Marshal(t) // as a store does
	if err != nil {
		return err
	}
	var kept sandbox.Tunnel
	if err := json.Unmarshal(raw, &kept); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rows[t.Tenant+"/"+t.ID] = kept
	return nil
}

func (l *lab) DeleteTunnel(_ context.Context, tenant, id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.rows, tenant+"/"+id)
	return nil
}

func (l *lab) DeleteTunnels(_ context.Context, tenant, id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for k, r := range l.rows {
		if r.Tenant == tenant && r.SandboxID == id {
			delete(l.rows, k)
		}
	}
	return nil
}

// tunnel opens one.
func (l *lab) tunnel(id string, spec sandbox.TunnelSpec) sandbox.Tunnel {
	l.t.Helper()
	t, err := l.m.Open(l.t.Context(), l.boxes[id].Tenant, id, spec)
	if err != nil {
		l.t.Fatal(err)
	}
	return t
}

func (l *lab) addr() string {
	l.m.mu.RLock()
	defer l.m.mu.RUnlock()
	if l.m.front == nil {
		return ""
	}
	return l.m.front.ln.Addr().String()
}

func (l *lab) roots() *x509.CertPool {
	l.t.Helper()
	pem, err := os.ReadFile(filepath.Join(l.dir, "tunnel", CAFile))
	if err != nil {
		l.t.Fatal(err)
	}
	p := x509.NewCertPool()
	if !p.AppendCertsFromPEM(pem) {
		l.t.Fatal("no certificate in the authority's file")
	}
	return p
}

// client trusts the node's authority and nobody else, finds every name at the
// listener, keeps no connection, and follows no redirect.
func (l *lab) client(protos ...string) *http.Client {
	var p http.Protocols
	p.SetHTTP1(!slices.Contains(protos, "h2"))
	p.SetHTTP2(slices.Contains(protos, "h2"))
	t := &http.Transport{
		Protocols: &p, DisableKeepAlives: !slices.Contains(protos, "h2"), TLSClientConfig: &tls.Config{RootCAs: l.roots()},
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", l.addr())
		},
	}
	l.t.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// get sends a request and returns the answer and its body.
func (l *lab) get(c *http.Client, url string, header ...string) (*http.Response, string) {
	l.t.Helper()
	r, err := http.NewRequestWithContext(l.t.Context(), "GET", url, nil)
	if err != nil {
		l.t.Fatal(err)
	}
	return l.do(c, r, header...)
}

func (l *lab) do(c *http.Client, r *http.Request, header ...string) (*http.Response, string) {
	l.t.Helper()
	for i := 0; i < len(header); i += 2 {
		if header[i] == "Host" {
			r.Host = header[i+1]
			continue
		}
		r.Header[header[i]] = append(r.Header[header[i]], header[i+1]) // as it is spelt
	}
	res, err := c.Do(r)
	if err != nil {
		l.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		l.t.Fatal(err)
	}
	return res, string(b)
}

// seen is a program inside that keeps what came.
type seen struct {
	mu   sync.Mutex
	last *http.Request
	n    int
}

func (s *seen) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	s.last, s.n = r, s.n+1
	s.mu.Unlock()
	_, _ = w.Write(append([]byte(r.Method+" "+r.URL.RequestURI()+" "), body...))
}

func (s *seen) request() *http.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last
}

func (s *seen) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.n
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 2000 {
		if ok() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Errorf("%s: not so after 10 s", what)
}
