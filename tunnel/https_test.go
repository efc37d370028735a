package tunnel

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/websocket"

	"vivarium/sandbox"
)

// TestC16Closed: what nobody published listens nowhere, and what was published
// can be reached by its name alone.
func TestC16Closed(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	if a := l.addr(); a != "" {
		t.Fatalf("listens on %s without a tunnel", a)
	}
	s := &seen{}
	l.serve("sb-1", 80, s.ServeHTTP)
	l.serve("sb-1", 81, s.ServeHTTP)
	tun := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 80})
	c := l.client()
	res, body := l.get(c, tun.URL+"/x?y=1")
	if res.StatusCode != 200 || body != "GET /x?y=1 " {
		t.Fatalf("%s: %q", res.Status, body)
	}
	if len(tun.Name) < 26 { // base32: 5 bits each
		t.Errorf("name %s has less than 128 bits", tun.Name)
	}
	// names that were closed and names that never were look the same
	other := l.tunnel("sb-2", sandbox.TunnelSpec{Port: 80})
	if err := l.m.CloseTunnel(t.Context(), "a", other.ID); err != nil {
		t.Fatal(err)
	}
	closed, closedBody := l.get(c, other.URL)
	never, neverBody := l.get(c, strings.Replace(other.URL, other.Name, "abcdefghijklmnopqrstuvwxyz", 1))
	closed.Header.Del("Date")
	never.Header.Del("Date")
	if closed.StatusCode != 404 || never.StatusCode != 404 || closedBody != neverBody || fmt.Sprint(closed.Header) != fmt.Sprint(never.Header) {
		t.Errorf("closed %v %q, unknown %v %q", closed, closedBody, never, neverBody)
	}
	for _, name := range []string{domain, "a.b." + domain, "evil.example"} {
		_, err := tls.Dial("tcp", l.addr(), &tls.Config{ServerName: name, RootCAs: l.roots()})
		if err == nil {
			t.Errorf("a certificate for %s", name)
		}
	}
	// another tenant neither lists nor closes it
	if n := len(l.m.List("b", "")); n != 0 {
		t.Errorf("another tenant lists %d", n)
	}
	if err := l.m.CloseTunnel(t.Context(), "b", tun.ID); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("close by another tenant: %v", err)
	}
	if _, err := l.m.Open(t.Context(), "b", "sb-1", sandbox.TunnelSpec{Port: 80}); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("open by another tenant: %v", err)
	}
	// the last one takes the listener with it
	addr := l.addr()
	if err := l.m.CloseTunnel(t.Context(), "a", tun.ID); err != nil {
		t.Fatal(err)
	}
	if c, err := net.Dial("tcp", addr); err == nil {
		c.Close()
		t.Error("listens without a tunnel")
	}
	if len(l.rows) != 0 {
		t.Errorf("kept: %v", l.rows)
	}
}

// TestC16SandboxEnds: the end of a sandbox closes its tunnels and cuts what goes
// through them; those of others stay.
func TestC16SandboxEnds(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	stuck := make(chan struct{})
	l.serve("sb-1", 80, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(200)
		_ = http.NewResponseController(w).Flush()
		close(stuck)
		<-r.Context().Done()
	})
	s := &seen{}
	l.serve("sb-2", 80, s.ServeHTTP)
	one, two := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 80}), l.tunnel("sb-2", sandbox.TunnelSpec{Port: 80})
	c := l.client()
	res, err := c.Get(one.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	<-stuck
	l.end("sb-1")
	if _, err := io.ReadAll(res.Body); err == nil {
		t.Error("the answer goes on")
	}
	if res, _ := l.get(c, one.URL); res.StatusCode != 404 {
		t.Errorf("after the end: %s", res.Status)
	}
	if res, _ := l.get(c, two.URL); res.StatusCode != 200 {
		t.Errorf("the other's: %s", res.Status)
	}
	if _, err := l.m.Open(t.Context(), "a", "sb-1", sandbox.TunnelSpec{Port: 80}); !errors.Is(err, sandbox.Gone) {
		t.Errorf("open for one that ended: %v", err)
	}
	eventually(t, "no connection to the inside", func() bool { l.mu.Lock(); defer l.mu.Unlock(); return l.open == 0 })
}

func TestProtocols(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	s := &seen{}
	l.serve("sb-1", 80, s.ServeHTTP)
	tun := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 80})
	for _, p := range []string{"h1", "h2"} {
		r, err := http.NewRequest("POST", tun.URL+"/p", strings.NewReader(strings.Repeat("x", 100_000)))
		if err != nil {
			t.Fatal(err)
		}
		res, body := l.do(l.client(p), r)
		if want := map[string]int{"h1": 1, "h2": 2}[p]; res.ProtoMajor != want || res.StatusCode != 200 || len(body) != len("POST /p ")+100_000 {
			t.Errorf("%s: %s %s, %d bytes", p, res.Proto, res.Status, len(body))
		}
		if r := s.request(); r.ProtoMajor != 1 || r.Host != strings.TrimPrefix(tun.URL, "https://") {
			t.Errorf("inside: %s, host %s", r.Proto, r.Host)
		}
	}
	// TLS 1.1 and plain HTTP are nothing here
	if _, err := tls.Dial("tcp", l.addr(), &tls.Config{ServerName: tun.Name + "." + domain, RootCAs: l.roots(), MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10}); err == nil {
		t.Error("TLS 1.1 is spoken")
	}
	n := s.count()
	raw, err := net.Dial("tcp", l.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	fmt.Fprintf(raw, "GET / HTTP/1.1\r\nHost: %s.%s\r\n\r\n", tun.Name, domain)
	b, _ := io.ReadAll(raw)
	if s.count() != n || !strings.HasPrefix(string(b), "HTTP/1.0 400 ") {
		t.Errorf("plain HTTP: %q", b)
	}
}

// TestH2Inside: a program that speaks HTTP/2 without TLS, with trailers, as gRPC
// does.
func TestH2Inside(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "Grpc-Status")
		rc := http.NewResponseController(w)
		_ = rc.Flush()
		br := bufio.NewReader(r.Body)
		for { // a conversation: each line comes back before the next is sent
			line, err := br.ReadString('\n')
			if err != nil {
				break
			}
			fmt.Fprintf(w, "%s %s", r.Proto, line)
			_ = rc.Flush()
		}
		w.Header().Set("Grpc-Status", "0")
	}))
	s.Config.Protocols = &p
	s.Start()
	t.Cleanup(s.Close)
	l.inside("sb-1", 50051, s.Listener.Addr().String())
	tun := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 50051, Kind: sandbox.TunnelH2})
	pr, pw := io.Pipe()
	r, err := http.NewRequest("POST", tun.URL+"/svc/Method", pr)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Te", "trailers")
	res, err := l.client("h2").Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	br := bufio.NewReader(res.Body)
	for _, line := range []string{"one\n", "two\n"} {
		fmt.Fprint(pw, line)
		if got, err := br.ReadString('\n'); err != nil || got != "HTTP/2.0 "+line {
			t.Fatalf("%q, %v", got, err)
		}
	}
	pw.Close()
	if _, err := io.ReadAll(br); err != nil || res.Trailer.Get("Grpc-Status") != "0" {
		t.Errorf("trailer %v, %v", res.Trailer, err)
	}
}

func TestStreaming(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	next := make(chan string)
	l.serve("sb-1", 80, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "8") // else flushed at once anyway
		for range 2 {
			fmt.Fprint(w, <-next)
			_ = http.NewResponseController(w).Flush()
		}
	})
	tun := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 80})
	go func() { next <- "one\n" }()
	res, err := l.client().Get(tun.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	br := bufio.NewReader(res.Body)
	if got, err := br.ReadString('\n'); err != nil || got != "one\n" {
		t.Fatalf("%q, %v", got, err)
	}
	next <- "two\n"
	if got, err := br.ReadString('\n'); err != nil || got != "two\n" {
		t.Fatalf("%q, %v", got, err)
	}
}

// dialWS makes a WebSocket through the listener.
func (l *lab) dialWS(tun sandbox.Tunnel, query string, header http.Header) (*websocket.Conn, error) {
	u := strings.Replace(tun.URL, "https://", "wss://", 1) + "/ws" + query
	cfg, err := websocket.NewConfig(u, tun.URL)
	if err != nil {
		return nil, err
	}
	if header != nil {
		cfg.Header = header
	}
	c, err := tls.Dial("tcp", l.addr(), &tls.Config{ServerName: tun.Name + "." + domain, RootCAs: l.roots(), NextProtos: []string{"http/1.1"}})
	if err != nil {
		return nil, err
	}
	l.t.Cleanup(func() { c.Close() })
	return websocket.NewClient(cfg, c)
}

func TestWebSocket(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	ws := &websocket.Server{Handler: func(c *websocket.Conn) { _, _ = io.Copy(c, c) }} // no check of the origin
	l.serve("sb-1", 80, ws.ServeHTTP)
	tun := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 80})
	c, err := l.dialWS(tun, "", nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 5)
	if _, err := io.ReadFull(c, b); err != nil || string(b) != "hello" {
		t.Fatalf("%q, %v", b, err)
	}
	if err := l.m.CloseTunnel(t.Context(), "a", tun.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(b); err == nil {
		t.Error("a closed tunnel goes on")
	}
	eventually(t, "no connection to the inside", func() bool { l.mu.Lock(); defer l.mu.Unlock(); return l.open == 0 })
}

// TestHostMismatch: the name of the connection is that of the request, so that a
// browser that shares connections, or a front before us, mixes nothing up.
func TestHostMismatch(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	s := &seen{}
	l.serve("sb-1", 80, s.ServeHTTP)
	l.serve("sb-2", 80, s.ServeHTTP)
	one, two := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 80}), l.tunnel("sb-2", sandbox.TunnelSpec{Port: 80})
	for _, p := range []string{"h1", "h2"} {
		for _, host := range []string{two.Name + "." + domain, "localhost", domain, one.Name + "." + domain + ":x", one.Name + "." + domain + "."} {
			if p == "h2" && strings.HasSuffix(host, ":x") {
				continue // net/http refuses it
			}
			res, _ := l.get(l.client(p), one.URL, "Host", host)
			if res.StatusCode != http.StatusMisdirectedRequest && res.StatusCode != http.StatusBadRequest {
				t.Errorf("%s host %s: %s", p, host, res.Status)
			}
		}
		if res, _ := l.get(l.client(p), one.URL, "Host", strings.ToUpper(one.Name)+"."+domain); res.StatusCode != 200 {
			t.Errorf("%s upper case: %s", p, res.Status)
		}
	}
	// without a server name there is no certificate
	if _, err := tls.Dial("tcp", l.addr(), &tls.Config{InsecureSkipVerify: true}); err == nil {
		t.Error("a handshake without a name works")
	}
	if n := s.count(); n != 2 {
		t.Errorf("%d requests came inside, want 2", n)
	}
}

// TestC16AllowList: the address of the connection counts, whatever headers say.
func TestC16AllowList(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	s := &seen{}
	l.serve("sb-1", 80, s.ServeHTTP)
	prefix := func(s string) netip.Prefix { return netip.MustParsePrefix(s) }
	in := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 80, Allow: []netip.Prefix{prefix("192.0.2.0/24"), prefix("127.0.0.0/8")}})
	out := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 80, Allow: []netip.Prefix{prefix("192.0.2.0/24"), prefix("2001:db8::/32")}})
	c := l.client()
	if res, _ := l.get(c, in.URL); res.StatusCode != 200 {
		t.Errorf("listed: %s", res.Status)
	}
	for _, h := range [][]string{nil, {"X-Forwarded-For", "192.0.2.1"}, {"X-Real-Ip", "192.0.2.1"}, {"Forwarded", "for=192.0.2.1"}} {
		if res, _ := l.get(c, out.URL, h...); res.StatusCode != http.StatusForbidden {
			t.Errorf("not listed, %v: %s", h, res.Status)
		}
	}
	if s.count() != 1 {
		t.Errorf("%d requests came inside, want 1", s.count())
	}
	for _, bad := range []sandbox.TunnelSpec{
		{Port: 0}, {Port: 80, Kind: "udp"}, {Port: 80, Kind: "tcp", Token: true},
		{Port: 80, Allow: []netip.Prefix{prefix("10.1.2.3/8")}}, {Port: 80, Allow: []netip.Prefix{{}}},
		{Port: 80, Allow: make([]netip.Prefix, MaxAllow+1)},
	} {
		if _, err := l.m.Open(t.Context(), "a", "sb-1", bad); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("%+v: %v", bad, err)
		}
	}
}

// TestSlowClients: who does not finish a header loses the connection, and nobody
// takes more places than there are.
func TestSlowClients(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(o *Options) { o.MaxConnections = 2 })
	release := make(chan struct{})
	l.serve("sb-1", 80, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/slow" {
			<-release
		}
	})
	l.m.headerTimeout = 200 * time.Millisecond
	tun := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 80})
	// in the handshake
	raw, err := net.Dial("tcp", l.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	if _, err := io.ReadAll(raw); err != nil && !errors.Is(err, net.ErrClosed) && !strings.Contains(err.Error(), "reset") {
		t.Errorf("handshake: %v", err)
	}
	// in the header
	c, err := tls.Dial("tcp", l.addr(), &tls.Config{ServerName: tun.Name + "." + domain, RootCAs: l.roots()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s.%s\r\nX-Slow: ", tun.Name, domain)
	if b, _ := io.ReadAll(c); strings.HasPrefix(string(b), "HTTP/1.1 200") {
		t.Errorf("answered: %s", b)
	}
	// a header that is too large
	if res, _ := l.get(l.client(), tun.URL, "X-Large", strings.Repeat("x", maxHeader+8<<10)); res.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("large header: %s", res.Status)
	}
	// all places taken
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			res, err := l.client().Get(tun.URL + "/slow")
			if err == nil {
				res.Body.Close()
			}
		})
	}
	eventually(t, "two are inside", func() bool { l.mu.Lock(); defer l.mu.Unlock(); return l.open >= 2 })
	if res, _ := l.get(l.client(), tun.URL); res.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("over the limit: %s", res.Status)
	}
	close(release)
	wg.Wait()
	if res, _ := l.get(l.client(), tun.URL); res.StatusCode != http.StatusOK {
		t.Errorf("after it: %s", res.Status)
	}
}

func TestBoundedListener(t *testing.T) {
	t.Parallel()
	b := newBounded(nil)
	b.most, b.each = 3, 1
	one, two, own := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("127.0.0.1")
	for i, c := range []struct {
		from netip.Addr
		in   bool
	}{{one, true}, {one, false}, {two, true}, {own, true}, {own, false}} {
		if got := b.enter(c.from); got != c.in {
			t.Errorf("%d: %v lets in: %v", i, c.from, got)
		}
	}
	b.leave(one)
	if !b.enter(own) || b.enter(one) {
		t.Error("a place that was left is not given as it should be")
	}
	if len(b.of) != 2 {
		t.Errorf("counts of %d clients", len(b.of))
	}
}

// TestFailures: a program that does not answer is told as such, and nothing of
// ours is in it.
func TestFailures(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	tun := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 80})
	if res, body := l.get(l.client(), tun.URL); res.StatusCode != http.StatusBadGateway || strings.Contains(body, "sb-1") {
		t.Errorf("nothing listens: %s %q", res.Status, body)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	l.inside("sb-1", 81, ln.Addr().String())
	answers := make(chan string, 8)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = http.ReadRequest(bufio.NewReader(c))
				_, _ = io.WriteString(c, <-answers)
				c.Close()
			}()
		}
	}()
	tun = l.tunnel("sb-1", sandbox.TunnelSpec{Port: 81})
	for _, a := range []string{
		"", "nonsense\r\n\r\n", "HTTP/1.1 200 OK\r\n" + strings.Repeat("A: b\r\n", 100_000) + "\r\n",
		// a change of protocol that nobody asked for
		"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", "HTTP/1.1 101 Switching Protocols\r\n\r\n",
	} {
		answers <- a
		if res, _ := l.get(l.client(), tun.URL); res.StatusCode != http.StatusBadGateway {
			t.Errorf("%.40q: %s", a, res.Status)
		}
	}
}

// TestRestart: a tunnel has its URL, its port and its tokens again when the daemon
// comes back; that of a sandbox which ended meanwhile is gone.
func TestRestart(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	s := &seen{}
	l.serve("sb-1", 80, s.ServeHTTP)
	l.serve("sb-2", 80, s.ServeHTTP)
	one, two := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 80}), l.tunnel("sb-2", sandbox.TunnelSpec{Port: 80})
	raw := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 80, Kind: sandbox.TunnelTCP})
	_, token, _, err := l.m.Connect(t.Context(), "a", "sb-1", 80, "me", 0)
	if err != nil {
		t.Fatal(err)
	}
	addr, roots := l.addr(), l.roots()
	if err := l.m.Close(); err != nil {
		t.Fatal(err)
	}
	for _, a := range []string{addr, raw.Address} {
		if c, err := net.Dial("tcp", a); err == nil {
			c.Close()
			t.Errorf("%s listens after the stop", a)
		}
	}
	if _, err := l.m.Open(t.Context(), "a", "sb-1", sandbox.TunnelSpec{Port: 80}); !errors.Is(err, sandbox.Unavailable) {
		t.Errorf("open after the stop: %v", err)
	}
	sb := l.boxes["sb-2"]
	sb.Stage = sandbox.StageEnded
	l.boxes["sb-2"] = sb
	blocker, err := net.Listen("tcp", raw.Address) // somebody was quicker
	if err != nil {
		t.Fatal(err)
	}
	l.start(func(o *Options) { o.Listen = addr })
	if !l.roots().Equal(roots) {
		t.Error("another authority after a restart")
	}
	list := l.m.List("a", "sb-1")
	if len(list) != 3 || list[0].URL != one.URL || list[1].Address != raw.Address {
		t.Fatalf("after the restart: %+v", list)
	}
	if res, _ := l.get(l.client(), one.URL); res.StatusCode != 200 {
		t.Errorf("after the restart: %s", res.Status)
	}
	if res, _ := l.get(l.client(), two.URL); res.StatusCode != 404 {
		t.Errorf("of a sandbox that ended: %s", res.Status)
	}
	if res, _ := l.get(l.client(), list[2].URL, "Authorization", "Bearer "+token); res.StatusCode != 200 {
		t.Errorf("token after the restart: %s", res.Status)
	}
	blocker.Close()
	eventually(t, "the raw port is open again", func() bool {
		c, err := net.Dial("tcp", raw.Address)
		if err != nil {
			return false
		}
		defer c.Close()
		fmt.Fprint(c, "GET / HTTP/1.0\r\n\r\n")
		b, _ := io.ReadAll(c)
		return strings.HasPrefix(string(b), "HTTP/1.0 200")
	})
}

func TestEnsure(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	specs, err := l.m.Check([]sandbox.TunnelSpec{{Port: 80}, {Port: 80}, {Port: 90, Kind: "tcp"}})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time there is nothing to do
		if err := l.m.Ensure(t.Context(), "a", "sb-1", specs); err != nil {
			t.Fatal(err)
		}
		if n := len(l.m.List("a", "sb-1")); n != 3 {
			t.Errorf("%d tunnels, want 3", n)
		}
	}
	for range MaxPerSandbox - 3 {
		l.tunnel("sb-1", sandbox.TunnelSpec{Port: 1})
	}
	if _, err := l.m.Open(t.Context(), "a", "sb-1", sandbox.TunnelSpec{Port: 1}); !errors.Is(err, sandbox.Exhausted) {
		t.Errorf("one too many: %v", err)
	}
}

// TestOpenWhileItEnds: a tunnel that is opened while its sandbox ends does not
// stay.
func TestOpenWhileItEnds(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.m.opts.Store = putThen{l, func() {
		l.mu.Lock()
		sb := l.boxes["sb-1"]
		sb.Stage = sandbox.StageStopping
		l.boxes["sb-1"] = sb
		l.mu.Unlock()
	}}
	if _, err := l.m.Open(t.Context(), "a", "sb-1", sandbox.TunnelSpec{Port: 80}); !errors.Is(err, sandbox.Gone) {
		t.Errorf("%v", err)
	}
	if len(l.rows) != 0 || len(l.m.List("a", "")) != 0 || l.addr() != "" {
		t.Errorf("left: %v", l.rows)
	}
}

type putThen struct {
	*lab
	then func()
}

func (p putThen) PutTunnel(ctx context.Context, t sandbox.Tunnel) error {
	defer p.then()
	return p.lab.PutTunnel(ctx, t)
}

// TestSwitchedOff: a node without a listener or ports says so at once.
func TestSwitchedOff(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(o *Options) { o.Listen, o.Ports = "", Ports{} })
	for _, kind := range []string{"https", "h2", "tcp"} {
		if _, err := l.m.Check([]sandbox.TunnelSpec{{Port: 80, Kind: kind}}); !errors.Is(err, sandbox.Unsupported) || sandbox.HintOf(err) == "" {
			t.Errorf("%s: %v", kind, err)
		}
		if _, err := l.m.Open(t.Context(), "a", "sb-1", sandbox.TunnelSpec{Port: 80, Kind: kind}); !errors.Is(err, sandbox.Unsupported) {
			t.Errorf("%s: %v", kind, err)
		}
	}
	// a listener that another has is told when it is needed
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	l = newLab(t, func(o *Options) { o.Listen = taken.Addr().String() })
	if _, err := l.m.Open(t.Context(), "a", "sb-1", sandbox.TunnelSpec{Port: 80}); !errors.Is(err, sandbox.Conflict) || len(l.rows) != 0 {
		t.Errorf("taken: %v", err)
	}
}

func TestCheckDomain(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		domain, api string
		ok          bool
	}{
		{"viv.localhost", "127.0.0.1", true},
		{"viv.localhost", "localhost", true}, // a site of its own
		{"viv.localhost", "", true},
		{"tunnels.example.com", "api.example.net", true},
		{"tunnels.example.com", "tunnels.example.com", false},
		{"tunnels.example.com", "example.com", false},
		{"tunnels.example.com", "api.tunnels.example.com", false},
		{"tunnels.example.com", "api.example.com", false}, // one site to browsers
		{"tunnels.example.com", "API.Example.com.", false},
		{"box.github.io", "other.github.io", true}, // github.io is a public suffix
		{"localhost", "127.0.0.1", false},          // no certificate for *.localhost is taken
		{"127.0.0.1", "", false},
		{"*.example.com", "", false},
		{"Tunnels.example.com", "", false},
		{"a..b", "", false},
		{"tunnels.example.com.", "", false},
	} {
		if err := CheckDomain(c.domain, c.api); (err == nil) != c.ok || err != nil && !errors.Is(err, sandbox.Invalid) {
			t.Errorf("%s with the API at %q: %v", c.domain, c.api, err)
		}
	}
}

// TestLocalAuthority: its key is root's alone, and what it signs counts nowhere
// else.
func TestLocalAuthority(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	now := time.Now()
	clock := func() time.Time { return now }
	c, err := openCA(dir, domain, clock)
	if err != nil {
		t.Fatal(err)
	}
	for f, mode := range map[string]os.FileMode{"ca.key": 0o600, CAFile: 0o644} {
		if fi, err := os.Stat(filepath.Join(dir, f)); err != nil || fi.Mode() != mode {
			t.Errorf("%s: %v, %v", f, fi.Mode(), err)
		}
	}
	first, err := c.certificate()
	if err != nil {
		t.Fatal(err)
	}
	if again, err := c.certificate(); err != nil || again != first {
		t.Errorf("another certificate at once: %v", err)
	}
	now = now.Add(leafLife - renewLeft + time.Minute)
	if again, err := c.certificate(); err != nil || again == first || !again.Leaf.NotAfter.After(first.Leaf.NotAfter) {
		t.Errorf("not renewed: %v", err)
	}
	if again, err := openCA(dir, domain, clock); err != nil || !again.cert.Equal(c.cert) {
		t.Errorf("not found again: %v", err)
	}
	if other, err := openCA(dir, "other.example.test", clock); err != nil || other.cert.Equal(c.cert) {
		t.Errorf("for another domain: %v", err)
	}
	for _, break_ := range []func() error{
		func() error { return os.Remove(filepath.Join(dir, "ca.key")) },
		func() error { return os.WriteFile(filepath.Join(dir, CAFile), []byte("x"), 0o644) },
	} {
		before, err := openCA(dir, domain, clock)
		if err != nil {
			t.Fatal(err)
		}
		if err := break_(); err != nil {
			t.Fatal(err)
		}
		if after, err := openCA(dir, domain, clock); err != nil || after.cert.Equal(before.cert) {
			t.Errorf("broken: %v", err)
		}
	}
}
