package proxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"vivarium/network/policy"
)

// httpServers serve what turned out to be HTTP: three servers, for three mixes of
// protocols.
type httpServers struct {
	plain, h2c, secure *httpServer
}

type httpServer struct {
	srv  *http.Server
	feed *feed
}

func (s *Server) startHTTP() {
	start := func(h http.HandlerFunc, protocols ...func(*http.Protocols, bool)) *httpServer {
		var p http.Protocols
		for _, set := range protocols {
			set(&p, true)
		}
		srv := &http.Server{
			Handler:                      h,
			Protocols:                    &p,
			HTTP2:                        h2Config(),
			DisableGeneralOptionsHandler: true,
			ReadHeaderTimeout:            s.o.PeekTimeout,
			IdleTimeout:                  s.o.RequestIdle,
			MaxHeaderBytes:               s.o.MaxHeaderBytes,
			ErrorLog:                     log.New(io.Discard, "", 0), // it tells of what clients do wrong
			ConnContext: func(ctx context.Context, nc net.Conn) context.Context {
				if t, ok := nc.(*tls.Conn); ok {
					nc = t.NetConn()
				}
				return context.WithValue(ctx, connKey{}, nc.(*clientConn).c)
			},
		}
		hs := &httpServer{srv, &feed{conns: make(chan net.Conn), done: make(chan struct{}), addr: s.o.Listener.Addr()}}
		s.wg.Go(func() { _ = srv.Serve(hs.feed) }) // ends when it is closed
		return hs
	}
	s.http.plain = start(s.servePlain, (*http.Protocols).SetHTTP1)
	s.http.h2c = start(s.servePlain, (*http.Protocols).SetUnencryptedHTTP2)
	s.http.secure = start(s.serveSecure, (*http.Protocols).SetHTTP1, (*http.Protocols).SetHTTP2)
}

func (h *httpServers) close() {
	for _, s := range []*httpServer{h.plain, h.h2c, h.secure} {
		_ = s.srv.Close()
	}
}

// h2Config bounds what HTTP/2 buffers; its floods of frames are bounded by net/http.
func h2Config() *http.HTTP2Config {
	return &http.HTTP2Config{
		MaxConcurrentStreams:          128,
		MaxReadFrameSize:              64 << 10,
		MaxReceiveBufferPerConnection: 1 << 20, // see maxH2
		MaxReceiveBufferPerStream:     1 << 20,
		SendPingTimeout:               5 * time.Minute,
		PingTimeout:                   time.Minute,
		WriteByteTimeout:              10 * time.Minute,
	}
}

type connKey struct{}

// feed is a listener for connections that were accepted elsewhere.
type feed struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
	addr  net.Addr
}

func (f *feed) Accept() (net.Conn, error) {
	select {
	case c := <-f.conns:
		return c, nil
	case <-f.done:
		return nil, net.ErrClosed
	}
}

func (f *feed) put(c net.Conn) bool {
	select {
	case f.conns <- c:
		return true
	case <-f.done:
		return false
	}
}

func (f *feed) Close() error   { f.once.Do(func() { close(f.done) }); return nil }
func (f *feed) Addr() net.Addr { return f.addr }

// clientConn is a connection from a sandbox as an HTTP or TLS server sees it: from
// its first byte on, counted, and finished when it is closed.
type clientConn struct {
	*net.TCPConn
	c *conn
	b []byte // what was read before
}

func (c *conn) clientConn() *clientConn {
	cc := &clientConn{c.tcp, c, c.buf}
	c.buf = nil
	return cc
}

func (cc *clientConn) Read(b []byte) (n int, err error) {
	if len(cc.b) > 0 {
		n = copy(b, cc.b)
		if cc.b = cc.b[n:]; len(cc.b) == 0 {
			cc.b = nil
		}
	} else {
		n, err = cc.TCPConn.Read(b)
	}
	if n > 0 {
		cc.c.touch()
		cc.c.count(n, 0)
	}
	return n, err
}

func (cc *clientConn) Write(b []byte) (int, error) {
	n, err := cc.TCPConn.Write(b)
	cc.c.touch()
	cc.c.count(0, n)
	return n, err
}

func (cc *clientConn) Close() error {
	cc.c.finish("")
	return nil
}

// ReadFrom hides that of TCPConn, which counts nothing.
func (cc *clientConn) ReadFrom(r io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{cc}, r)
}

// WriteTo hides that of TCPConn.
func (cc *clientConn) WriteTo(w io.Writer) (int64, error) {
	return io.Copy(w, struct{ io.Reader }{cc})
}

// count adds to the flow that is being served. What comes before there is one is
// kept for it.
func (c *conn) count(sent, received int) {
	f := c.cur.Load()
	if f == nil {
		c.early.Add(int64(sent))
		return
	}
	f.sent.Add(int64(sent) + c.early.Swap(0))
	f.received.Add(int64(received))
}

// web is what an HTTP connection needs to send requests on.
type web struct {
	transport *http.Transport
	proxy     *httputil.ReverseProxy
	name      string // of TLS that is inspected
}

func (c *conn) handHTTP(h2c bool) bool {
	var p http.Protocols
	hs := c.s.http.plain
	if h2c {
		hs = c.s.http.h2c
		p.SetUnencryptedHTTP2(true)
	} else {
		p.SetHTTP1(true)
	}
	c.web = &web{transport: c.transport(&p)}
	c.web.transport.DialContext = func(context.Context, string, string) (net.Conn, error) { return c.dialHTTP() }
	c.web.proxy = c.reverse("http", c.web.transport)
	return hs.feed.put(c.clientConn())
}

// transport is one connection's own: it shares no connection with another slot, and
// whatever address it is asked for, its dialer knows just one.
func (c *conn) transport(p *http.Protocols) *http.Transport {
	return &http.Transport{
		Protocols:              p,
		HTTP2:                  h2Config(),
		DisableCompression:     true, // it would ask for gzip where the client did not
		MaxConnsPerHost:        maxServers,
		MaxIdleConns:           maxServers / 2,
		MaxIdleConnsPerHost:    maxServers / 2,
		IdleConnTimeout:        90 * time.Second,
		ExpectContinueTimeout:  time.Second,
		MaxResponseHeaderBytes: int64(c.s.o.MaxHeaderBytes),
	}
}

// serverConn takes itself off the conn's list when it is closed.
type serverConn struct {
	net.Conn
	key net.Conn
	c   *conn
}

func (s *serverConn) Close() error {
	s.c.mu.Lock()
	delete(s.c.servers, s.key)
	s.c.mu.Unlock()
	return s.Conn.Close()
}

func (s *serverConn) CloseWrite() error { return closeWrite(s.Conn) }

// ReadFrom is how net/http sends the body of a request.
func (s *serverConn) ReadFrom(r io.Reader) (int64, error) {
	b := bufferPool{}.Get()
	defer bufferPool{}.Put(b)
	return io.CopyBuffer(struct{ io.Writer }{s.Conn}, struct{ io.Reader }{r}, b)
}

func (c *conn) dialHTTP() (net.Conn, error) {
	nc, err := c.dial()
	if err != nil {
		return nil, err
	}
	return &serverConn{nc, nc, c}, nil
}

// reverse sends requests on as they are, but for what HTTP says is between two
// neighbours, and with the host that was judged.
func (c *conn) reverse(scheme string, rt http.RoundTripper) *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Transport:     rt,
		FlushInterval: -1,
		BufferPool:    bufferPool{},
		ErrorLog:      log.New(io.Discard, "", 0),
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme = scheme
			r.Out.URL.Host = c.hostFor(r.In)
			r.Out.Host = r.Out.URL.Host
			r.Out.URL.User = nil
			r.Out.URL.RawQuery = r.In.URL.RawQuery // ReverseProxy drops what it cannot parse
			r.Out.Trailer = r.In.Trailer           // filled when the body has ended
			for _, k := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
				if v, ok := r.In.Header[k]; ok { // the sandbox's own; we add none
					r.Out.Header[k] = v
				}
			}
			if !upgrades[strings.ToLower(r.Out.Header.Get("Upgrade"))] || len(r.In.Header["Upgrade"]) != 1 {
				r.Out.Header.Del("Upgrade")
				r.Out.Header.Del("Connection")
				r.Out.Header.Del("Http2-Settings")
			}
		},
		ModifyResponse: own,
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			var no *refusal
			if errors.As(err, &no) {
				say(w, no.status, no.text)
				return
			}
			say(w, http.StatusBadGateway, fmt.Sprintf("cannot get an answer from %s: %s", r.URL.Host, cause(err)))
		},
	}
}

// upgrades are the protocols that a connection may turn to. HTTP/2 and TLS are not
// among them: what comes after would be requests for whatever host.
var upgrades = map[string]bool{"websocket": true, "spdy/3.1": true, "tcp": true}

// own keeps a server from answering in the proxy's name.
func own(r *http.Response) error {
	r.Header.Del(RefusalHeader)
	r.Trailer.Del(RefusalHeader)
	return nil
}

// refusal is an answer of ours.
type refusal struct {
	status int
	text   string
}

func (r *refusal) Error() string { return r.text }

// RefusalHeader is in every answer that is the proxy's own and no server's.
const RefusalHeader = "Vivarium-Refused"

// say answers with one line.
func say(w http.ResponseWriter, status int, text string) {
	h := w.Header()
	clear(h)
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set(RefusalHeader, "1")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, "vivarium: "+text+"\n") // the client may be gone
}

func connOf(r *http.Request) *conn { return r.Context().Value(connKey{}).(*conn) }

// servePlain serves requests in the clear.
func (s *Server) servePlain(w http.ResponseWriter, r *http.Request) {
	c := connOf(r)
	if r.Method == http.MethodConnect {
		c.refuse("", KindHTTP, "", "CONNECT: this is not a proxy that is asked to connect", none)
		say(w, http.StatusForbidden, "CONNECT is refused: connect to the address itself")
		return
	}
	name, _, ok := hostOf(r.Host)
	if !ok || r.URL.Scheme != "" && r.URL.Scheme != "http" {
		c.refuse("", KindHTTP, "", "the Host is not one", none)
		say(w, http.StatusBadRequest, "the Host is not one")
		return
	}
	f, j := c.admit(name, KindHTTP, flowInfo{})
	if f == nil {
		target := name
		if target == "" {
			target = c.dst.Addr().String()
		}
		text := fmt.Sprintf("network policy refuses %s:%d: %s", target, c.dst.Port(), j.reason)
		if j.rule != "" {
			text += " (" + j.rule + ")"
		}
		say(w, http.StatusForbidden, text)
		return
	}
	c.forward(w, r)
}

func (c *conn) forward(w http.ResponseWriter, r *http.Request) {
	if r.ProtoMajor == 1 {
		// Bodies go both ways at once, as they do without us.
		_ = http.NewResponseController(w).EnableFullDuplex()
	}
	// The server's own answer, without what net/http would add where it is silent.
	w.Header()["Date"] = nil
	w.Header()["Content-Type"] = nil
	c.web.proxy.ServeHTTP(w, r)
}

// hostFor is the host of a request that was judged: its name in the one spelling,
// and the port as the client wrote it.
func (c *conn) hostFor(r *http.Request) string {
	name, port, _ := hostOf(r.Host)
	switch {
	case name == "" && r.Host == "":
		return c.dst.String()
	case name == "":
		return r.Host
	case port == "":
		return name
	}
	return name + ":" + port
}

// hostOf splits a Host header, or :authority. The name is canonical, and empty for
// an address or for no host at all; ok is false for what is neither.
func hostOf(host string) (name, port string, ok bool) {
	if host == "" {
		return "", "", true
	}
	h := host
	if i := strings.LastIndexByte(h, ':'); i >= 0 && !strings.HasSuffix(h, "]") {
		h, port = h[:i], h[i+1:]
		if _, err := strconv.ParseUint(port, 10, 16); err != nil || len(port) > 5 {
			return "", "", false
		}
	}
	if b, found := strings.CutPrefix(h, "["); found {
		a, err := netip.ParseAddr(strings.TrimSuffix(b, "]"))
		return "", port, err == nil && a.Is6() && strings.HasSuffix(h, "]")
	}
	if a, err := netip.ParseAddr(h); err == nil {
		return "", port, a.Is4()
	}
	name, ok = policy.Name(h)
	if !ok || !ascii(h) {
		return "", "", false
	}
	return name, port, true
}

func ascii(s string) bool {
	for i := range len(s) {
		if s[i] >= 0x80 {
			return false
		}
	}
	return true
}

func newReader(b []byte) *bufio.Reader { return bufio.NewReader(bytes.NewReader(b)) }
