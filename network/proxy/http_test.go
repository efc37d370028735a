package proxy

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"vivarium/sandbox"
)

// C6, C7: every request is for an allowed host, however it says so, and the server
// sees the host that was judged.
func TestRequests(t *testing.T) {
	t.Parallel()
	l := newLab(t, allow, []string{"allow good.example", "allow also.example"})
	var mu sync.Mutex
	var hosts []string
	web := serveHTTP(t, nil, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		hosts = append(hosts, r.Host)
		mu.Unlock()
		echoHost(w, r)
	})
	l.host(at(addrA, 80), web.addr)
	l.slot.pin(addrA, "good.example", "also.example", "evil.example")
	for _, c := range []struct {
		name, text string
		status     int
		want       string
	}{
		{"plain", "GET /a?b=c;d HTTP/1.1\r\nHost: good.example\r\n\r\n", 200, "GET /a?b=c;d host=good.example body="},
		{"case, dot and port", "GET / HTTP/1.1\r\nHost: GOOD.example.:80\r\n\r\n", 200, "host=good.example:80"},
		{"absolute", "GET http://good.example/x HTTP/1.1\r\nHost: good.example\r\n\r\n", 200, "GET /x host=good.example"},
		{"absolute, other Host", "GET http://good.example/x HTTP/1.1\r\nHost: evil.example\r\n\r\n", 200, "host=good.example"},
		{"absolute to another", "GET http://evil.example/x HTTP/1.1\r\nHost: good.example\r\n\r\n", 403, "refuses evil.example:80"},
		{"absolute https", "GET https://good.example/x HTTP/1.1\r\nHost: good.example\r\n\r\n", 400, "Host"},
		{"user in it", "GET http://good.example@evil.example/x HTTP/1.1\r\nHost: good.example\r\n\r\n", 403, "refuses evil.example"},
		{"other Host", "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403, "(policy: mode allowlist)"},
		{"two Hosts", "GET / HTTP/1.1\r\nHost: good.example\r\nHost: evil.example\r\n\r\n", 400, ""},
		{"no Host", "GET / HTTP/1.1\r\n\r\n", 400, "missing required Host header"},
		{"HTTP/1.0 without", "GET / HTTP/1.0\r\n\r\n", 403, "claims no name"},
		{"empty Host", "GET / HTTP/1.1\r\nHost:\r\n\r\n", 403, "claims no name"},
		{"address", "GET / HTTP/1.1\r\nHost: 93.184.216.34\r\n\r\n", 403, "claims no name"},
		{"IPv6", "GET / HTTP/1.1\r\nHost: [::1]\r\n\r\n", 403, "claims no name"},
		{"CONNECT", "CONNECT good.example:80 HTTP/1.1\r\nHost: good.example\r\n\r\n", 403, "CONNECT is refused"},
		{"space before colon", "GET / HTTP/1.1\r\nHost : evil.example\r\nHost: good.example\r\n\r\n", 400, ""},
		{"folded", "GET / HTTP/1.1\r\nX: a\r\n Host: evil.example\r\nHost: good.example\r\n\r\n", 200, "host=good.example"},
		{"OPTIONS *", "OPTIONS * HTTP/1.1\r\nHost: good.example\r\n\r\n", 200, "OPTIONS * host=good.example"},
		{"large headers", "GET / HTTP/1.1\r\nHost: good.example\r\nX: " + strings.Repeat("a", 200<<10) + "\r\n\r\n", 431, ""},
		{"escapes", "GET /%2e%2F/a%20b//c?q=%zz&x HTTP/1.1\r\nHost: good.example\r\n\r\n", 200, "GET /%2e%2F/a%20b//c?q=%zz&x host=good.example"},
	} {
		t.Run(c.name, func(t *testing.T) {
			nc := l.dial(at(addrA, 80))
			go func() { _, _ = io.WriteString(nc, c.text) }() // the server may answer before the end
			method, _, _ := strings.Cut(c.text, " ")
			r, err := http.ReadResponse(bufio.NewReader(nc), &http.Request{Method: method})
			must(t, err)
			b, _ := io.ReadAll(r.Body)
			if r.StatusCode != c.status || !strings.Contains(string(b), c.want) {
				t.Errorf("got %d %s, want %d and %q", r.StatusCode, b, c.status, c.want)
			}
			_ = nc.Close()
		})
	}
	mu.Lock()
	defer mu.Unlock()
	for _, h := range hosts {
		if h != "good.example" && h != "good.example:80" {
			t.Errorf("a request for %q arrived", h)
		}
	}
}

// C6: a second request on a connection is judged like the first, sent after it,
// with it, or inside what looks like its body.
func TestSecondRequest(t *testing.T) {
	t.Parallel()
	l := newLab(t, allow, []string{"allow good.example", "allow also.example"})
	web := serveHTTP(t, nil, func(w http.ResponseWriter, r *http.Request) {
		if u := r.Header["Upgrade"]; u != nil {
			t.Errorf("the server was asked to change the protocol to %q", u)
		}
		echoHost(w, r)
	})
	l.host(at(addrA, 80), web.addr)
	l.slot.pin(addrA, "good.example", "also.example", "evil.example")
	get := func(host string) string { return "GET / HTTP/1.1\r\nHost: " + host + "\r\n\r\n" }
	c := l.dial(at(addrA, 80))
	_, err := io.WriteString(c, get("good.example")+get("evil.example")+get("also.example")) // pipelined
	must(t, err)
	br := bufio.NewReader(c)
	for _, want := range []int{200, 403, 200} {
		r, err := http.ReadResponse(br, nil)
		must(t, err)
		_, _ = io.Copy(io.Discard, r.Body)
		if r.StatusCode != want {
			t.Errorf("status %d, want %d", r.StatusCode, want)
		}
	}
	if n := len(l.srv.Active("s1")); n != 2 {
		t.Errorf("%d flows, want one for each name", n)
	}
	smuggled := get("evil.example")
	for _, text := range []string{
		"POST / HTTP/1.1\r\nHost: good.example\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled,
		"POST / HTTP/1.1\r\nHost: good.example\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + smuggled,
		"POST / HTTP/1.1\r\nHost: good.example\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + smuggled,
		"POST / HTTP/1.1\r\nHost: good.example\r\nContent-Length: 0\r\nContent-Length: 5\r\n\r\n" + smuggled,
		"GET / HTTP/1.1\r\nHost: good.example\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n\r\n" + smuggled,
		"GET / HTTP/1.1\r\nHost: good.example\r\nUpgrade: TLS/1.2\r\nConnection: Upgrade\r\n\r\n" + smuggled,
		"GET / HTTP/1.1\r\nHost: good.example\r\nUpgrade: websocket\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n" + smuggled,
	} {
		c := l.dial(at(addrA, 80))
		_, err := io.WriteString(c, text+"GET /end HTTP/1.1\r\nHost: good.example\r\nConnection: close\r\n\r\n")
		must(t, err)
		b, err := io.ReadAll(c)
		if isTimeout(err) {
			t.Errorf("%q: no end", text)
		}
		if strings.Contains(string(b), "host=evil.example") {
			t.Errorf("%q got past: %q", text, b)
		}
		if strings.Contains(string(b), " 101 ") {
			t.Errorf("%q changed the protocol", text)
		}
	}
}

// Headers are the sandbox's own, and the server's.
func TestHeaders(t *testing.T) {
	t.Parallel()
	l := newLab(t, allow, []string{"allow good.example"})
	var got http.Header
	l.host(at(addrA, 80), serveHTTP(t, nil, func(w http.ResponseWriter, r *http.Request) {
		got = r.Header
		w.Header()["Date"] = nil
		w.Header()["Content-Type"] = nil
		w.Header().Set("Proxy-Authenticate", "x")
		w.Header().Set("X-A", "b")
		w.Header().Set(RefusalHeader, "1")
		_, _ = io.WriteString(w, "<html>")
	}).addr)
	l.slot.pin(addrA, "good.example")
	c := l.dial(at(addrA, 80))
	b, err := raw(t, c, "GET / HTTP/1.1\r\nHost: good.example\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\nX-Forwarded-For: 9.9.9.9\r\nProxy-Authorization: Basic eA==\r\nX-Mine: 1\r\n\r\n")
	must(t, err)
	var names []string
	for k := range got {
		names = append(names, k)
	}
	slices.Sort(names)
	if want := []string{"X-Forwarded-For", "X-Mine"}; !slices.Equal(names, want) || got.Get("X-Forwarded-For") != "9.9.9.9" {
		t.Errorf("the server got %v, want %v", got, want)
	}
	if strings.Contains(b, "Date:") || strings.Contains(b, "Content-Type:") || strings.Contains(b, "Proxy-Auth") || strings.Contains(b, RefusalHeader) || !strings.Contains(b, "X-A: b") {
		t.Errorf("the client got %q", b)
	}
}

// webSocket is enough of one for a test: it upgrades and echoes.
func webSocket(w http.ResponseWriter, r *http.Request) {
	if r.Header.Get("Upgrade") != "websocket" {
		http.Error(w, "no upgrade", http.StatusBadRequest)
		return
	}
	c, brw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer c.Close()
	_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-Secret: "+r.Header.Get("Authorization")+"\r\n\r\n")
	_, _ = io.Copy(c, brw)
}

func tryWebSocket(t *testing.T, c net.Conn, host string) {
	t.Helper()
	_, err := io.WriteString(c, "GET /ws HTTP/1.1\r\nHost: "+host+"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nAuthorization: PLACEHOLDER\r\n\r\n")
	must(t, err)
	br := bufio.NewReader(c)
	r, err := http.ReadResponse(br, nil)
	must(t, err)
	if r.StatusCode != 101 {
		t.Fatalf("status %d", r.StatusCode)
	}
	for _, s := range []string{"one\n", "two\n"} {
		_, err = io.WriteString(c, s)
		must(t, err)
		back, err := br.ReadString('\n')
		if err != nil || back != s {
			t.Fatalf("got %q %v", back, err)
		}
	}
}

func TestWebSocket(t *testing.T) {
	t.Parallel()
	l := newLab(t, allow, []string{"allow good.example"})
	l.host(at(addrA, 80), serveHTTP(t, nil, webSocket).addr)
	l.slot.pin(addrA, "good.example")
	c := l.dial(at(addrA, 80))
	tryWebSocket(t, c, "good.example")
	l.policy(allow)
	if n := l.srv.Reevaluate("s1"); n != 1 { // C17
		t.Errorf("cut %d", n)
	}
	_, err := c.Read(make([]byte, 1))
	wantReset(t, err)
}

// fakeInjector puts a value in the place of a placeholder, and takes it out again.
type fakeInjector struct {
	ca    *authority // of the sandbox
	roots *x509.CertPool
	mu    sync.Mutex
	saw   []string
}

func (i *fakeInjector) Certificate(host string) (*tls.Certificate, error) { return i.ca.leaf(host) }
func (i *fakeInjector) Request(host string, r *http.Request) error {
	i.mu.Lock()
	i.saw = append(i.saw, host+" "+r.URL.String())
	i.mu.Unlock()
	if r.TLS == nil || r.URL.Scheme != "https" {
		return errors.New("in the clear")
	}
	switch r.URL.Path {
	case "/refuse":
		return sandbox.Denied.Errorf("secret of another host")
	case "/fault":
		return errors.New("VALUE is wrong")
	case "/move":
		r.Host, r.URL.Host, r.URL.Scheme = "evil.example", "evil.example", "http"
	}
	if r.Header.Get("Authorization") == "PLACEHOLDER" {
		r.Header.Set("Authorization", "VALUE")
	}
	return nil
}

func (i *fakeInjector) Response(host string, r *http.Response) error {
	for _, vs := range r.Header {
		for k := range vs {
			vs[k] = strings.ReplaceAll(vs[k], "VALUE", "PLACEHOLDER")
		}
	}
	return nil
}
func (i *fakeInjector) Roots() *x509.CertPool { return i.roots }

// inspected is a lab whose policy inspects api.example.
func inspected(t testing.TB, h http.HandlerFunc) (*lab, *fakeInjector, *authority) {
	t.Helper()
	outside := newAuthority(t, "the internet")
	inj := &fakeInjector{ca: newAuthority(t, "the sandbox"), roots: outside.pool}
	l := newLab(t, allow, []string{"allow api.example", "allow cdn.example", "inspect api.example"})
	l.slot.inj = inj
	l.slot.pin(addrA, "api.example", "cdn.example")
	l.host(at(addrA, 443), serveHTTP(t, outside.mustLeaf(t, "api.example", "cdn.example"), h).addr)
	l.host(at(addrA, 80), serveHTTP(t, nil, h).addr)
	return l, inj, outside
}

// insideClient is an HTTP client inside.
func insideClient(t testing.TB, l *lab, ca *authority, h2 bool) *http.Client {
	var p http.Protocols
	p.SetHTTP1(!h2)
	p.SetHTTP2(h2)
	tr := &http.Transport{
		Protocols:       &p,
		TLSClientConfig: &tls.Config{RootCAs: ca.pool},
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			_, port, _ := net.SplitHostPort(addr)
			if port == "80" {
				return l.tryDial(at(addrA, 80))
			}
			return l.tryDial(at(addrA, 443))
		},
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 30 * time.Second, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// C19: a secret goes to its host, over TLS that was verified, and nowhere else.
func TestInspect(t *testing.T) {
	t.Parallel()
	l, inj, outside := inspected(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Echo", r.Header.Get("Authorization"))
		w.Header().Set("X-Proto", r.Proto)
		w.Header().Set(RefusalHeader, "1")
		if r.URL.Path == "/hints" {
			w.Header().Set("Link", r.Header.Get("Authorization"))
			w.WriteHeader(http.StatusEarlyHints)
		}
		if r.Header.Get("Authorization") == "VALUE" {
			w.Header().Set("X-Right", "yes")
		}
		echoHost(w, r)
	})
	do := func(c *http.Client, method, url, host string) (*http.Response, string) {
		t.Helper()
		ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
			if code != http.StatusContinue {
				t.Errorf("an interim response that nobody looked at: %d %v", code, h)
			}
			return nil
		}})
		req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader("b"))
		must(t, err)
		req.Header.Set("Authorization", "PLACEHOLDER")
		if host != "" {
			req.Host = host
		}
		r, err := c.Do(req)
		must(t, err)
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		must(t, err)
		return r, string(b)
	}
	for _, h2 := range []bool{false, true} {
		c := insideClient(t, l, inj.ca, h2)
		r, body := do(c, "POST", "https://api.example/x?y", "")
		want := map[bool]string{false: "HTTP/1.1", true: "HTTP/2.0"}[h2]
		if r.StatusCode != 200 || r.Header.Get(RefusalHeader) != "" || r.Header.Get("X-Right") != "yes" || r.Header.Get("X-Echo") != "PLACEHOLDER" || r.Header.Get("X-Proto") != want || r.Proto != want ||
			body != "POST /x?y host=api.example body=b" {
			t.Errorf("h2 %v: %d %s %v %s", h2, r.StatusCode, r.Proto, r.Header, body)
		}
		if r, body = do(c, "GET", "https://api.example/hints", ""); r.StatusCode != 200 || r.Header.Get("Link") != "PLACEHOLDER" {
			t.Errorf("h2 %v: early hints: %d %v %s", h2, r.StatusCode, r.Header, body)
		}
		// C6: fronting
		if r, body = do(c, "GET", "https://api.example/", "cdn.example"); r.StatusCode != http.StatusMisdirectedRequest || !strings.Contains(body, "this connection is for api.example") {
			t.Errorf("h2 %v: fronting: %d %s", h2, r.StatusCode, body)
		}
		if r, body = do(c, "TRACE", "https://api.example/", ""); r.StatusCode != 403 {
			t.Errorf("h2 %v: TRACE: %d %s", h2, r.StatusCode, body)
		}
		if r, body = do(c, "GET", "https://api.example/refuse", ""); r.StatusCode != 403 || !strings.Contains(body, "secret of another host") {
			t.Errorf("h2 %v: refused: %d %s", h2, r.StatusCode, body)
		}
		if r, body = do(c, "GET", "https://api.example/fault", ""); r.StatusCode != 403 || strings.Contains(body, "VALUE") {
			t.Errorf("h2 %v: fault: %d %s", h2, r.StatusCode, body)
		}
		if r, body = do(c, "GET", "https://api.example/move", ""); r.StatusCode != 200 || !strings.Contains(body, "host=api.example") {
			t.Errorf("h2 %v: moved: %d %s", h2, r.StatusCode, body)
		}
	}
	// In the clear, and to another name, the placeholder stays what it is.
	before := len(inj.saw)
	r, _ := do(insideClient(t, l, outside, false), "GET", "http://api.example/", "")
	if r.StatusCode != 200 || r.Header.Get("X-Echo") != "PLACEHOLDER" || r.Header.Get("X-Right") != "" {
		t.Errorf("in the clear: %d %v", r.StatusCode, r.Header)
	}
	r, _ = do(insideClient(t, l, outside, true), "GET", "https://cdn.example/", "")
	if r.StatusCode != 200 || r.Header.Get("X-Echo") != "PLACEHOLDER" {
		t.Errorf("another name: %d %v", r.StatusCode, r.Header)
	}
	if len(inj.saw) != before {
		t.Errorf("the injector saw %v", inj.saw[before:])
	}
	for _, rec := range l.srv.Active("") {
		if rec.Inspected != (rec.Name == "api.example" && rec.Kind == KindTLS) {
			t.Errorf("record %+v", rec)
		}
	}
	// A change of policy is seen by the next request, told of or not.
	c := insideClient(t, l, inj.ca, true)
	do(c, "GET", "https://api.example/", "")
	l.policy(allow, "allow cdn.example")
	l.srv.Reevaluate("s1")
	if _, err := c.Get("https://api.example/"); err == nil {
		t.Error("a request after the policy changed was answered")
	}
}

// A server that cannot be verified gets nothing, and the sandbox is told why.
func TestInspectUnverified(t *testing.T) {
	t.Parallel()
	l, inj, outside := inspected(t, echoHost)
	web := serveHTTP(t, outside.mustLeaf(t, "other.example"), echoHost)
	for _, c := range []struct{ what, to, want string }{
		{"a certificate of another name", web.addr, "not api.example"},
		{"an unknown authority", serveHTTP(t, newAuthority(t, "nobody").mustLeaf(t, "api.example"), echoHost).addr, "unknown authority"},
		{"nobody", "127.0.0.1:1", "connection refused"},
	} {
		l.host(at(addrA, 443), c.to)
		for _, h2 := range []bool{false, true} {
			r, err := insideClient(t, l, inj.ca, h2).Get("https://api.example/")
			must(t, err)
			b, _ := io.ReadAll(r.Body)
			_ = r.Body.Close()
			if r.StatusCode != 502 || !strings.Contains(string(b), c.want) {
				t.Errorf("%s: %d %s", c.what, r.StatusCode, b)
			}
		}
	}
	if web.requests.Load() != 0 {
		t.Error("a request arrived")
	}
	// no injector, and no pin: refused
	l.slot.mu.Lock()
	l.slot.inj = nil
	l.slot.mu.Unlock()
	tc := tls.Client(l.dial(at(addrA, 443)), &tls.Config{ServerName: "api.example", InsecureSkipVerify: true})
	if err := tc.Handshake(); err == nil || !strings.Contains(err.Error(), "access denied") {
		t.Errorf("without an injector: %v", err)
	}
	l.slot.inj = inj
	l.slot.pin(addrA)
	l.policy(public, "deny x.example", "inspect api.example")
	tc = tls.Client(l.dial(at(addrA, 443)), &tls.Config{ServerName: "api.example", InsecureSkipVerify: true})
	if err := tc.Handshake(); err == nil || !strings.Contains(err.Error(), "access denied") {
		t.Errorf("without a pin: %v", err)
	}
}

// WebSocket, streams both ways at once and trailers go through inspected TLS.
func TestInspectStreams(t *testing.T) {
	t.Parallel()
	rpc := connect.NewBidiStreamHandler("/a.B/C", func(_ context.Context, s *connect.BidiStream[wrapperspb.StringValue, wrapperspb.StringValue]) error {
		for {
			m, err := s.Receive()
			if errors.Is(err, io.EOF) {
				s.ResponseTrailer().Set("X-Last", "word")
				return connect.NewError(connect.CodeAborted, errors.New("done: "+s.RequestHeader().Get("Authorization")))
			}
			if err != nil {
				return err
			}
			if err := s.Send(wrapperspb.String("re: " + m.GetValue())); err != nil {
				return err
			}
		}
	})
	l, inj, _ := inspected(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/ws":
			webSocket(w, r)
		case "/a.B/C":
			rpc.ServeHTTP(w, r)
		case "/trailers":
			_, _ = io.Copy(io.Discard, r.Body)
			w.Header().Set("Trailer", "X-T")
			fmt.Fprintf(w, "got %s", r.Trailer.Get("X-Q"))
			w.Header().Set("X-T", "end")
		}
	})
	tc := tls.Client(l.dial(at(addrA, 443)), &tls.Config{ServerName: "api.example", RootCAs: inj.ca.pool, NextProtos: []string{"http/1.1"}})
	tryWebSocket(t, tc, "api.example")

	// gRPC
	hc := insideClient(t, l, inj.ca, true)
	s := connect.NewClient[wrapperspb.StringValue, wrapperspb.StringValue](hc, "https://api.example/a.B/C", connect.WithGRPC()).CallBidiStream(t.Context())
	s.RequestHeader().Set("Authorization", "PLACEHOLDER")
	for _, m := range []string{"one", "two"} {
		must(t, s.Send(wrapperspb.String(m)))
		got, err := s.Receive()
		must(t, err)
		if got.GetValue() != "re: "+m {
			t.Errorf("got %q", got.GetValue())
		}
	}
	must(t, s.CloseRequest())
	_, err := s.Receive()
	if connect.CodeOf(err) != connect.CodeAborted || !strings.Contains(err.Error(), "done: VALUE") { // bodies and trailers are the injector's to scrub
		t.Errorf("got %v", err)
	}
	_ = s.CloseResponse()
	if s.ResponseTrailer().Get("X-Last") != "word" {
		t.Errorf("trailers %v", s.ResponseTrailer())
	}

	for _, h2 := range []bool{false, true} {
		req, err := http.NewRequest("POST", "https://api.example/trailers", io.MultiReader(strings.NewReader("abc"))) // no length: chunked
		must(t, err)
		req.Trailer = http.Header{"X-Q": {"asked"}}
		r, err := insideClient(t, l, inj.ca, h2).Do(req)
		must(t, err)
		b, _ := io.ReadAll(r.Body)
		_ = r.Body.Close()
		if string(b) != "got asked" || r.Trailer.Get("X-T") != "end" {
			t.Errorf("h2 %v: %q, trailers %v", h2, b, r.Trailer)
		}
	}
}

// HTTP/1 with bodies both ways at once, in the clear.
func TestFullDuplex(t *testing.T) {
	t.Parallel()
	l := newLab(t, allow, []string{"allow good.example"})
	l.host(at(addrA, 80), serveHTTP(t, nil, func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		_ = rc.EnableFullDuplex()
		w.WriteHeader(200)
		_ = rc.Flush()
		b := make([]byte, 100)
		for {
			n, err := r.Body.Read(b)
			_, _ = w.Write(b[:n])
			_ = rc.Flush()
			if err != nil {
				return
			}
		}
	}).addr)
	l.slot.pin(addrA, "good.example")
	c := l.dial(at(addrA, 80))
	_, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: good.example\r\nTransfer-Encoding: chunked\r\n\r\n")
	must(t, err)
	br := bufio.NewReader(c)
	r, err := http.ReadResponse(br, nil)
	must(t, err)
	for _, s := range []string{"one", "two"} {
		_, err = fmt.Fprintf(c, "%x\r\n%s\r\n", len(s), s)
		must(t, err)
		b := make([]byte, 3)
		_, err = io.ReadFull(r.Body, b)
		must(t, err)
		if string(b) != s {
			t.Errorf("got %q", b)
		}
	}
	_, err = io.WriteString(c, "0\r\n\r\n")
	must(t, err)
	if b, err := io.ReadAll(r.Body); err != nil || len(b) > 0 {
		t.Errorf("got %q %v", b, err)
	}
}

// curl through inspected TLS, HTTP/2 and 1.1.
func TestInspectTools(t *testing.T) {
	t.Parallel()
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Skip("no curl")
	}
	l, inj, _ := inspected(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%s %s", r.Proto, r.Header.Get("Authorization"))
	})
	l.mu.Lock()
	l.always = at(addrA, 443)
	l.mu.Unlock()
	ca := t.TempDir() + "/ca.pem"
	writePEM(t, ca, inj.ca.cert)
	for flag, want := range map[string]string{"--http1.1": "HTTP/1.1 VALUE", "--http2": "HTTP/2.0 VALUE"} {
		cmd := exec.Command(curl, "-qsS", "--max-time", "20", flag, "--cacert", ca, "-H", "Authorization: PLACEHOLDER", "--connect-to", "::"+l.at, "https://api.example/")
		cmd.Env = []string{"PATH=/usr/bin:/bin"}
		if out, err := cmd.CombinedOutput(); string(out) != want {
			t.Errorf("%s: %s %v", flag, out, err)
		}
	}
}
