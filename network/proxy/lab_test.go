package proxy

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"runtime/pprof"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

// TestMain fails if the tests leave a goroutine of the proxy.
func TestMain(m *testing.M) {
	code := m.Run()
	if code == 0 {
		for i := 0; ; i++ {
			left := ours()
			if left == "" {
				break
			}
			if i == 100 {
				fmt.Fprintf(os.Stderr, "goroutines left:\n%s\n", left)
				code = 1
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
	os.Exit(code)
}

// ours are the stacks that have code of this package, or of net/http, in them.
func ours() string {
	var b strings.Builder
	_ = pprof.Lookup("goroutine").WriteTo(&b, 2)
	var out []string
	for _, g := range strings.Split(b.String(), "\n\n") {
		if (strings.Contains(g, "network/proxy.") || strings.Contains(g, "net/http.")) && !strings.Contains(g, "proxy.TestMain") {
			out = append(out, g)
		}
	}
	return strings.Join(out, "\n\n")
}

// Addresses of the internet of these tests. They are public; who listens there is
// on loopback.
var (
	addrA = netip.MustParseAddr("93.184.216.34")
	addrB = netip.MustParseAddr("151.101.1.69")
)

func at(a netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a, port) }

// fakeSlot is a slot whose every part the test sets.
type fakeSlot struct {
	id   string
	node *policy.Node

	mu       sync.Mutex
	pol      *policy.Policy
	names    map[netip.Addr][]string
	inj      Injector
	upstream *url.URL
}

func (s *fakeSlot) ID() string { return s.id }
func (s *fakeSlot) Names(a netip.Addr) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.names[a]
}
func (s *fakeSlot) Policy() *policy.Policy {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pol
}
func (s *fakeSlot) Decide(f policy.Flow) policy.Verdict { return s.Policy().Decide(f) }
func (s *fakeSlot) Injector() Injector {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.inj
}
func (s *fakeSlot) Upstream() *url.URL {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.upstream
}

func (s *fakeSlot) pin(a netip.Addr, names ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.names[a] = names
}

// lab is a proxy with one slot, and an internet.
type lab struct {
	t    testing.TB
	srv  *Server
	slot *fakeSlot
	at   string // of the proxy

	mu      sync.Mutex
	moved   *sync.Cond
	dsts    map[netip.AddrPort]netip.AddrPort // client -> where it was going
	always  netip.AddrPort                    // where clients that say nothing are going
	hosts   map[netip.AddrPort]string         // public -> loopback
	dialled []netip.AddrPort
	records []Record
}

func newLab(t testing.TB, mode sandbox.NetworkMode, rules []string, change ...func(*lab, *Options)) *lab {
	t.Helper()
	l := &lab{
		t: t, dsts: map[netip.AddrPort]netip.AddrPort{}, hosts: map[netip.AddrPort]string{},
		slot: &fakeSlot{id: "s1", node: &policy.Node{}, names: map[netip.Addr][]string{}},
	}
	l.moved = sync.NewCond(&l.mu)
	must(t, l.slot.node.Check())
	l.policy(mode, rules...)
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	must(t, err)
	l.at = ln.Addr().String()
	o := Options{
		Listener: ln, Log: l.log, OriginalDst: l.originalDst,
		Slot: func(a netip.Addr) Slot { return l.slot },
		Dial: func(ctx context.Context, _ Slot, dst netip.AddrPort) (net.Conn, error) {
			l.mu.Lock()
			to := l.hosts[dst]
			l.dialled = append(l.dialled, dst)
			l.mu.Unlock()
			if to == "" {
				return nil, &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
			}
			var d net.Dialer
			return d.DialContext(ctx, "tcp4", to)
		},
		PeekTimeout: 5 * time.Second, ServerFirst: 50 * time.Millisecond,
	}
	for _, f := range change {
		f(l, &o)
	}
	l.srv, err = Serve(o)
	must(t, err)
	t.Cleanup(func() { must(t, l.srv.Close()) })
	return l
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (l *lab) log(r Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.records = append(l.records, r)
	l.moved.Broadcast()
}

func (l *lab) originalDst(c net.Conn) (netip.AddrPort, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	from := addrPort(c.RemoteAddr())
	for {
		if d, ok := l.dsts[from]; ok {
			return d, nil
		}
		if l.always.IsValid() {
			return l.always, nil
		}
		l.moved.Wait()
	}
}

// policy puts a policy in force. Rules are as in "allow x.com:443"; "inspect x.com"
// is not a rule.
func (l *lab) policy(mode sandbox.NetworkMode, rules ...string) {
	l.t.Helper()
	p := sandbox.NetworkPolicy{Mode: mode}
	for _, s := range rules {
		action, rest, _ := strings.Cut(s, " ")
		if action == "inspect" {
			p.Inspect = append(p.Inspect, rest)
			continue
		}
		r, err := policy.ParseRule(sandbox.RuleAction(action), rest)
		must(l.t, err)
		p.Rules = append(p.Rules, r)
	}
	c, err := l.slot.node.Compile(p)
	must(l.t, err)
	l.slot.mu.Lock()
	l.slot.pol = c
	l.slot.mu.Unlock()
}

// dial connects through the proxy as if to dst.
func (l *lab) dial(dst netip.AddrPort) *net.TCPConn {
	l.t.Helper()
	c, err := l.tryDial(dst)
	must(l.t, err)
	l.t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	return c
}

func (l *lab) tryDial(dst netip.AddrPort) (*net.TCPConn, error) {
	nc, err := net.Dial("tcp4", l.at)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	l.dsts[addrPort(nc.LocalAddr())] = dst
	l.moved.Broadcast()
	l.mu.Unlock()
	return nc.(*net.TCPConn), nil
}

// host lets something listen at a public address.
func (l *lab) host(dst netip.AddrPort, to string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hosts[dst] = to
}

// record waits for one that fits.
func (l *lab) record(what string, fits func(Record) bool) Record {
	l.t.Helper()
	deadline := time.AfterFunc(20*time.Second, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.moved.Broadcast()
	})
	defer deadline.Stop()
	end := time.Now().Add(20 * time.Second)
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		for _, r := range l.records {
			if fits(r) {
				return r
			}
		}
		if time.Now().After(end) {
			l.t.Fatalf("no record of %s among %d:\n%+v", what, len(l.records), l.records)
		}
		l.moved.Wait()
	}
}

func (l *lab) dials() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.dialled)
}

// A listener for raw servers; handle gets every connection.
func serveTCP(t testing.TB, handle func(net.Conn)) string {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	must(t, err)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var all []net.Conn
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			all = append(all, c)
			mu.Unlock()
			wg.Go(func() {
				defer c.Close()
				handle(c)
			})
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		mu.Lock()
		for _, c := range all {
			_ = c.Close()
		}
		mu.Unlock()
		wg.Wait()
	})
	return ln.Addr().String()
}

// A server that says what it got.
type webServer struct {
	addr     string
	requests atomic.Int64
}

func serveHTTP(t testing.TB, cert *tls.Certificate, h http.HandlerFunc) *webServer {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	must(t, err)
	w := &webServer{addr: ln.Addr().String()}
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetHTTP2(true)
	p.SetUnencryptedHTTP2(cert == nil)
	srv := &http.Server{Protocols: &p, ErrorLog: quiet, DisableGeneralOptionsHandler: true, Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.requests.Add(1)
		h(rw, r)
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if cert != nil {
			srv.TLSConfig = &tls.Config{Certificates: []tls.Certificate{*cert}}
			_ = srv.ServeTLS(ln, "", "")
			return
		}
		_ = srv.Serve(ln)
	}()
	t.Cleanup(func() { _ = srv.Close(); <-done })
	return w
}

// echoHost answers with what matters of a request.
func echoHost(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	fmt.Fprintf(w, "%s %s host=%s body=%s", r.Method, r.RequestURI, r.Host, b)
}

// authority makes certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
}

func newAuthority(t testing.TB, cn string) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: cn}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	must(t, err)
	c, err := x509.ParseCertificate(der)
	must(t, err)
	a := &authority{c, key, x509.NewCertPool()}
	a.pool.AddCert(c)
	return a
}

func (a *authority) leaf(names ...string) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: names[0]}, DNSNames: names,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, &key.PublicKey, a.key)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

func (a *authority) mustLeaf(t testing.TB, names ...string) *tls.Certificate {
	t.Helper()
	c, err := a.leaf(names...)
	must(t, err)
	return c
}

// raw sends text and reads until the end or an error.
func raw(t testing.TB, c net.Conn, text string) (string, error) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		return "", err
	}
	b, err := io.ReadAll(c)
	return string(b), err
}

// exchange sends one HTTP request as text and reads one answer.
func exchange(t testing.TB, c net.Conn, br *bufio.Reader, text string) (int, string) {
	t.Helper()
	_, err := io.WriteString(c, text)
	must(t, err)
	method, _, _ := strings.Cut(text, " ")
	r, err := http.ReadResponse(br, &http.Request{Method: method})
	must(t, err)
	b, err := io.ReadAll(r.Body)
	must(t, err)
	return r.StatusCode, string(b)
}

func wantReset(t testing.TB, err error) {
	t.Helper()
	if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
		t.Errorf("got %v, want a reset", err)
	}
}
