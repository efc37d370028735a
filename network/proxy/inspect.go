package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"vivarium/sandbox"
)

// inspect ends TLS for a name that the policy inspects, and begins it anew with
// the real server.
func (c *conn) inspect(name string, h hello) (handed bool, why string) {
	inj := c.slot.Injector()
	if inj == nil {
		c.abortWith(soft, "it is to be inspected, and nothing here can")
		return false, ""
	}
	cert, err := inj.Certificate(name)
	if err != nil || cert == nil {
		c.abortWith(soft, "no certificate to inspect it with")
		return false, ""
	}
	t := &secure{c: c, name: name}
	for _, p := range []string{"h2", "http/1.1"} {
		if slices.Contains(h.protos, p) && (p != "h2" || c.s.takeH2(c)) {
			t.protos = append(t.protos, p)
		}
	}
	if len(h.protos) > 0 && len(t.protos) == 0 {
		c.abortWith(soft, "it offers neither HTTP/1.1 nor HTTP/2, or has too many connections of HTTP/2")
		return false, ""
	}
	// The server is asked first, so that the client is offered just the protocol
	// that the server speaks. Without an answer the client is offered HTTP/1, to be
	// told so in words.
	switch t.first, err = t.dial(); {
	case err == nil && t.first.ConnectionState().NegotiatedProtocol != "":
		t.protos = []string{t.first.ConnectionState().NegotiatedProtocol}
	case slices.Contains(t.protos, "http/1.1"):
		t.protos = []string{"http/1.1"}
	}
	var p http.Protocols
	p.SetHTTP1(true)
	p.SetHTTP2(true)
	c.web = &web{transport: c.transport(&p)}
	c.web.transport.DialTLSContext = func(context.Context, string, string) (net.Conn, error) { return t.conn() }
	c.web.proxy = c.reverse("https", &injecting{t, c.web.transport})
	c.web.proxy.ModifyResponse = t.response
	c.web.name = name

	_ = c.tcp.SetReadDeadline(time.Time{})
	tc := tls.Server(c.clientConn(), &tls.Config{
		Certificates:           []tls.Certificate{*cert},
		NextProtos:             t.protos,
		MinVersion:             tls.VersionTLS12,
		SessionTicketsDisabled: true, // keys would have to outlive the connection
	})
	ctx, cancel := context.WithTimeout(c.ctx, c.s.o.PeekTimeout)
	defer cancel()
	if err := tc.HandshakeContext(ctx); err != nil {
		return false, "TLS with the sandbox: " + cause(err)
	}
	c.small()
	if !c.s.http.secure.feed.put(tc) {
		return false, "the proxy stops"
	}
	return true, ""
}

// abortWith ends a connection that was allowed and cannot be served.
func (c *conn) abortWith(m manner, why string) {
	c.refused(judgement{}, m)
	c.abort(why)
}

// secure connects to the real server of an inspected name.
type secure struct {
	c      *conn
	name   string
	protos []string

	mu    sync.Mutex
	first *tls.Conn // made before the client was answered; taken by the first request
}

func (t *secure) conn() (net.Conn, error) {
	t.mu.Lock()
	first := t.first
	t.first = nil
	t.mu.Unlock()
	if first != nil {
		return first, nil
	}
	tc, err := t.dial()
	if err != nil {
		return nil, err
	}
	return tc, nil
}

func (t *secure) dial() (*tls.Conn, error) {
	inj := t.c.slot.Injector()
	if inj == nil {
		return nil, errNoInjector
	}
	nc, err := t.c.dialHTTP()
	if err != nil {
		return nil, err
	}
	tc := tls.Client(nc, &tls.Config{ServerName: t.name, RootCAs: inj.Roots(), NextProtos: t.protos, MinVersion: tls.VersionTLS12})
	ctx, cancel := context.WithTimeout(t.c.ctx, t.c.s.o.PeekTimeout)
	defer cancel()
	if err := tc.HandshakeContext(ctx); err != nil {
		_ = nc.Close()
		return nil, err
	}
	return tc, nil
}

// serveSecure serves requests to an inspected name.
func (s *Server) serveSecure(w http.ResponseWriter, r *http.Request) {
	c := connOf(r)
	name, _, ok := hostOf(r.Host)
	switch {
	case !ok, name != c.web.name, r.URL.Scheme != "" && r.URL.Scheme != "https":
		// Domain fronting, or a client that takes one certificate for two names.
		c.refuse(name, KindTLS, "", "the request is for another host than its connection", none)
		say(w, http.StatusMisdirectedRequest, fmt.Sprintf("network policy refuses the request: this connection is for %s", c.web.name))
		return
	case r.Method == http.MethodConnect, r.Method == http.MethodTrace:
		// A TRACE is answered with the request, the secret in it included.
		c.refuse(name, KindTLS, "", r.Method+" to an inspected host", none)
		say(w, http.StatusForbidden, r.Method+" is refused here")
		return
	}
	f, j := c.admit(name, KindTLS, flowInfo{})
	if f == nil || !j.inspect {
		say(w, http.StatusForbidden, fmt.Sprintf("network policy refuses %s:%d: %s", name, c.dst.Port(), j.reason))
		return
	}
	c.forward(&finalOnly{w}, r)
}

// finalOnly keeps interim responses, which nobody looked at, from the sandbox.
type finalOnly struct{ http.ResponseWriter }

func (f *finalOnly) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		f.ResponseWriter.WriteHeader(status)
	}
}

func (f *finalOnly) Unwrap() http.ResponseWriter { return f.ResponseWriter }

// injecting passes requests by the slot's Injector.
type injecting struct {
	t    *secure
	next http.RoundTripper
}

func (i *injecting) RoundTrip(r *http.Request) (*http.Response, error) {
	scheme, host, to := r.URL.Scheme, r.URL.Host, r.Host
	inj := i.t.c.slot.Injector() // the one of now: secrets come and go
	if inj == nil {
		return nil, errNoInjector
	}
	if err := inj.Request(i.t.name, r); err != nil {
		return nil, &refusal{http.StatusForbidden, "request to " + i.t.name + " refused" + explain(err)}
	}
	r.URL.Scheme, r.URL.Host, r.Host = scheme, host, to
	return i.next.RoundTrip(r)
}

func (t *secure) response(r *http.Response) error {
	body := r.Body
	inj := t.c.slot.Injector()
	if inj == nil {
		return errNoInjector
	}
	if err := inj.Response(t.name, r); err != nil {
		return &refusal{http.StatusBadGateway, "response of " + t.name + " refused" + explain(err)}
	}
	if r.StatusCode == http.StatusSwitchingProtocols {
		r.Body = body
	}
	return own(r)
}

var errNoInjector = &refusal{http.StatusForbidden, "the host is to be inspected, and nothing here can"}

// explain shows an error that was made to be shown, and no other.
func explain(err error) string {
	var e *sandbox.Error
	if !errors.As(err, &e) {
		return ""
	}
	return ": " + e.Error()
}
