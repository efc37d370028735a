package tunnel

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"vivarium/sandbox"
)

// Bounds of the TLS listener.
const (
	readHeaderTimeout = 10 * time.Second // from accept to the end of the header, the handshake included
	idleTimeout       = 2 * time.Minute  // of a connection without requests
	maxHeader         = 64 << 10         // bytes
	maxStreams        = 250              // of one HTTP/2 connection
	stopTimeout       = 3 * time.Second
)

const notFoundText = "there is no such tunnel"

// front is the TLS listener, which all tunnels share. It is there while there
// are tunnels that need it.
type front struct {
	m  *Manager
	ln net.Listener
	hs *http.Server
}

func (m *Manager) listenFront() (*front, error) {
	l, err := net.Listen("tcp", m.opts.Listen)
	if err != nil {
		return nil, sandbox.Conflict.Errorf("listen for tunnels: %w", err).WithHint("is it another daemon's? set tunnel.listen in the configuration to another address")
	}
	f := &front{m: m, ln: l}
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	f.hs = &http.Server{
		Handler:           f,
		ReadHeaderTimeout: m.headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		Protocols:         &protocols,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxStreams, SendPingTimeout: 30 * time.Second, PingTimeout: 15 * time.Second},
		TLSConfig: &tls.Config{
			MinVersion:     tls.VersionTLS12,
			NextProtos:     append([]string{"h2", "http/1.1"}, m.certs.protocols()...),
			GetCertificate: f.certificate,
		},
		ErrorLog: slog.NewLogLogger(m.log.Handler(), slog.LevelDebug),
	}
	go func() { _ = f.hs.ServeTLS(newBounded(l), "", "") }() // ends when it is stopped
	return f, nil
}

// stop ends the listener and every connection on it.
func (f *front) stop(wait time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	_ = f.ln.Close() // it may not have begun to serve
	if wait == 0 || f.hs.Shutdown(ctx) != nil {
		_ = f.hs.Close() // what is left is cut
	}
}

func (f *front) certificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	host := strings.ToLower(hello.ServerName)
	if _, ok := within(host, f.m.opts.Domain); !ok {
		return nil, sandbox.NotFound.Errorf("no certificate for that name")
	}
	return f.m.certs.get(hello, host)
}

// ServeHTTP finds the tunnel of a request. What it answers tells a name that was
// closed from one that never was to nobody.
func (f *front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	host, ok := hostOf(r.Host)
	if !ok || r.TLS == nil || host != strings.ToLower(r.TLS.ServerName) {
		// a browser may use one connection for all names of a certificate; now it
		// makes one for this name (RFC 9110 section 15.5.20)
		fail(w, http.StatusMisdirectedRequest, "the host is not the one that the connection was made for")
		return
	}
	if r.Method == http.MethodConnect {
		fail(w, http.StatusMethodNotAllowed, "this is no proxy")
		return
	}
	l := f.m.find(host)
	if l == nil {
		fail(w, http.StatusNotFound, notFoundText)
		return
	}
	// looked at for each request: a connection may outlive what it was made for
	if from, err := netip.ParseAddrPort(r.RemoteAddr); err != nil || !allows(l.t.Spec, from.Addr()) {
		fail(w, http.StatusForbidden, "your address is not in the tunnel's allow-list")
		return
	}
	user := ""
	if l.t.Spec.Token {
		token, k, how := f.m.tokens.authenticate(l.t.ID, r)
		if how == byNone {
			w.Header().Set("WWW-Authenticate", "Bearer")
			w.Header().Set("Cache-Control", "no-store")
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		if how == byQuery && (r.Method == http.MethodGet || r.Method == http.MethodHead) && !isWebSocket(r) {
			f.m.tokens.remember(w, r, r.Host, token, k)
			return
		}
		user = k.user
	}
	l.front.serve(w, r, user)
}

// hostOf is the host of a Host header, in lower case and without its port.
func hostOf(s string) (string, bool) {
	host, port := s, ""
	if i := strings.LastIndexByte(s, ':'); i >= 0 {
		host, port = s[:i], s[i+1:]
		if port == "" || len(port) > 5 || strings.Trim(port, "0123456789") != "" {
			return "", false
		}
	}
	if host == "" || len(host) > 253 || strings.Trim(host, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-.") != "" {
		return "", false
	}
	return strings.ToLower(host), true
}
