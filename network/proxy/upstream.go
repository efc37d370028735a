package proxy

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"

	"golang.org/x/net/proxy"

	"vivarium/sandbox"
)

// maxProxyAnswer is the most that an upstream proxy may say before the tunnel.
const maxProxyAnswer = 16 << 10

// dialUpstream connects through the slot's upstream proxy. The proxy is told the
// address, never the name: it is the address that was judged. Errors: Denied (the
// proxy refuses), Unavailable, Timeout.
func (c *conn) dialUpstream(ctx context.Context) (net.Conn, error) {
	u := c.upstream
	if c.s.o.DialUpstream == nil {
		return nil, sandbox.Unavailable.Errorf("no way to the upstream proxy")
	}
	nc, err := c.s.o.DialUpstream(ctx, c.slot, u)
	if err != nil {
		return nil, sandbox.Unavailable.Errorf("connect to upstream proxy: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() })
	var out net.Conn
	switch u.Scheme {
	case "socks5", "socks5h":
		out, err = c.socks(ctx, nc)
	case "http", "https":
		out = nc
		if u.Scheme == "https" {
			t := tls.Client(nc, &tls.Config{ServerName: u.Hostname(), MinVersion: tls.VersionTLS12})
			err = t.HandshakeContext(ctx)
			out = t
		}
		if err == nil {
			out, err = c.connect(ctx, out)
		}
	default:
		err = sandbox.Invalid.Errorf("upstream proxy of kind %q", u.Scheme)
	}
	if !stop() && err == nil {
		err = sandbox.Timeout.Errorf("upstream proxy: %w", ctx.Err())
	}
	if err != nil {
		_ = nc.Close()
		return nil, err
	}
	return out, nil
}

// connect asks an HTTP proxy for a tunnel (RFC 9110, section 9.3.6).
func (c *conn) connect(ctx context.Context, nc net.Conn) (net.Conn, error) {
	if d, ok := ctx.Deadline(); ok {
		_ = nc.SetDeadline(d)
	}
	auth := ""
	if u := c.upstream.User; u != nil {
		pass, _ := u.Password()
		auth = "Proxy-Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte(u.Username()+":"+pass)) + "\r\n"
	}
	if _, err := fmt.Fprintf(nc, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n%s\r\n", c.dst, c.dst, auth); err != nil {
		return nil, sandbox.Unavailable.Errorf("ask upstream proxy: %w", err)
	}
	br := bufio.NewReader(io.LimitReader(nc, maxProxyAnswer))
	r, err := http.ReadResponse(br, &http.Request{Method: http.MethodConnect})
	if err != nil {
		return nil, sandbox.Unavailable.Errorf("read answer of upstream proxy: %w", err)
	}
	if r.StatusCode/100 != 2 {
		return nil, sandbox.Denied.Errorf("upstream proxy answered %d", r.StatusCode)
	}
	_ = nc.SetDeadline(time.Time{})
	if n := br.Buffered(); n > 0 { // the server speaks first, and did so at once
		b, err := br.Peek(n)
		if err != nil {
			return nil, sandbox.Internal.Errorf("read answer of upstream proxy: %w", err)
		}
		return &prefixed{nc, b}, nil
	}
	return nc, nil
}

// socks asks a SOCKS5 proxy for a tunnel (RFC 1928, RFC 1929).
func (c *conn) socks(ctx context.Context, nc net.Conn) (net.Conn, error) {
	var auth *proxy.Auth
	if u := c.upstream.User; u != nil {
		pass, _ := u.Password()
		auth = &proxy.Auth{User: u.Username(), Password: pass}
	}
	d, err := proxy.SOCKS5("tcp", c.upstream.Host, auth, given{nc})
	if err != nil {
		return nil, sandbox.Internal.Errorf("prepare upstream proxy: %w", err)
	}
	if _, err := d.(proxy.ContextDialer).DialContext(ctx, "tcp", c.dst.String()); err != nil {
		return nil, sandbox.Unavailable.Errorf("ask upstream proxy: %w", err)
	}
	return nc, nil // it has read no byte too many
}

// given is a dialer of a connection that is there.
type given struct{ nc net.Conn }

func (g given) Dial(string, string) (net.Conn, error) { return g.nc, nil }

func (g given) DialContext(context.Context, string, string) (net.Conn, error) { return g.nc, nil }

// prefixed is a connection of which some bytes were read already.
type prefixed struct {
	net.Conn
	b []byte
}

func (p *prefixed) Read(b []byte) (int, error) {
	if len(p.b) > 0 {
		n := copy(b, p.b)
		p.b = p.b[n:]
		return n, nil
	}
	return p.Conn.Read(b)
}

func (p *prefixed) CloseWrite() error { return closeWrite(p.Conn) }

// cause says why in a few words, without addresses of ours, credentials or
// whatever else an error may carry.
func cause(err error) string {
	var errno syscall.Errno
	var cert *tls.CertificateVerificationError
	var alert tls.AlertError
	var e *sandbox.Error
	switch {
	case err == nil:
		return "nothing came"
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded), isTimeout(err):
		return "it takes too long"
	case errors.As(err, &errno):
		return errno.Error()
	case errors.As(err, &cert):
		return cert.Error()
	case errors.As(err, &alert):
		return alert.Error()
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return "it ended early"
	case errors.Is(err, context.Canceled), errors.Is(err, net.ErrClosed):
		return "it was cut"
	case errors.Is(err, errTooMuch), errors.Is(err, errIdle):
		return err.Error()
	case errors.As(err, &e) && e.Err == nil:
		return e.Msg
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "remote error" { // a TLS alert
		return op.Err.Error()
	}
	return "it is not as it should be"
}
