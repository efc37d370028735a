package proxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"time"
)

// Bounds of what is read before a connection is decided.
const (
	firstRead   = 4 << 10
	maxHello    = 160 << 10 // records of the largest client hello that crypto/tls reads (64 KiB), cut up
	largeHello  = 16 << 10  // more than that is rare
	maxLarge    = 16        // of a slot at once
	maxLine     = 8 << 10   // of an HTTP request line that is looked at
	maxToken    = 32        // of an HTTP method
	extEncrypts = 0xfe0d    // encrypted_client_hello, RFC 9849
)

// kind of a protocol, by its first bytes.
type kind int

const (
	kindUndecided kind = iota // more bytes are needed
	kindTLS
	kindHTTP
	kindH2C // HTTP/2 with prior knowledge
	kindOther
)

// classify looks at the first bytes of a client. What a lenient server might take
// for HTTP counts as HTTP, so that it is read by rules that are strict.
func classify(b []byte) kind {
	if len(b) == 0 {
		return kindUndecided
	}
	if b[0] >= 0x14 && b[0] <= 0x18 { // a TLS record of any type
		if len(b) == 1 {
			return kindUndecided
		}
		if b[1] == 3 {
			return kindTLS
		}
		return kindOther
	}
	b = bytes.TrimLeft(b, "\r\n") // RFC 9112, section 2.2: empty lines before a request
	if len(b) == 0 {
		return kindUndecided
	}
	n := 0
	for n < len(b) && token(b[n]) {
		n++
	}
	switch {
	case n == 0 || n > maxToken:
		return kindOther
	case n == len(b):
		return kindUndecided
	case b[n] != ' ' && b[n] != '\t' && b[n] != '\v' && b[n] != '\f':
		return kindOther
	}
	method := b[:n]
	line, _, whole := bytes.Cut(b, []byte("\n"))
	if !whole && len(line) < maxLine {
		return kindUndecided
	}
	switch {
	case bytes.HasPrefix(line, []byte("PRI * HTTP/2.0")):
		return kindH2C
	case !whole && methods[strings.ToUpper(string(method))]:
		return kindHTTP // too long a line; the HTTP server will say so
	case bytes.Contains(bytes.ToUpper(line), []byte("HTTP/")), methods[strings.ToUpper(string(method))]:
		return kindHTTP
	}
	return kindOther
}

var methods = map[string]bool{
	"GET": true, "HEAD": true, "POST": true, "PUT": true, "PATCH": true,
	"DELETE": true, "OPTIONS": true, "TRACE": true, "CONNECT": true,
}

// token says whether c may be in an HTTP method (RFC 9110, section 5.6.2).
func token(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0
}

// fill reads more of what the client says first.
func (c *conn) fill(max int) error {
	if len(c.buf) >= max {
		return errTooMuch
	}
	if len(c.buf) >= largeHello && !c.large {
		if c.large = c.s.takeLarge(c.slot.ID()); !c.large {
			return errTooMuch
		}
	}
	c.buf = slices.Grow(c.buf, firstRead)
	n, err := c.tcp.Read(c.buf[len(c.buf):min(cap(c.buf), max)])
	c.buf = c.buf[:len(c.buf)+n]
	if n > 0 {
		return nil
	}
	return err
}

var (
	errTooMuch = errors.New("too many bytes before it was clear what they are")
	errPeeked  = errors.New("seen enough")
)

// hello is what a client hello says.
type hello struct {
	name   string // as sent
	protos []string
	ech    bool
}

// readHello lets crypto/tls read the client hello, and keeps its bytes in c.buf.
func (c *conn) readHello() (hello, error) {
	var h hello
	seen := false
	err := tls.Server(&helloConn{c: c}, &tls.Config{
		MinVersion: tls.VersionTLS10, // not for us to judge: nothing is negotiated here
		GetConfigForClient: func(i *tls.ClientHelloInfo) (*tls.Config, error) {
			h = hello{name: i.ServerName, protos: slices.Clone(i.SupportedProtos), ech: slices.Contains(i.Extensions, extEncrypts)}
			seen = true
			return nil, errPeeked
		},
	}).HandshakeContext(context.Background()) // bounded by the read deadline
	if seen {
		return h, nil
	}
	return h, err
}

// helloConn gives crypto/tls what was read and reads on; what it writes, an alert
// at most, goes nowhere.
type helloConn struct {
	c   *conn
	off int
}

func (h *helloConn) Read(b []byte) (int, error) {
	if h.off == len(h.c.buf) {
		if err := h.c.fill(maxHello); err != nil {
			return 0, err
		}
	}
	n := copy(b, h.c.buf[h.off:])
	h.off += n
	return n, nil
}

func (h *helloConn) Write(b []byte) (int, error)      { return len(b), nil }
func (h *helloConn) Close() error                     { return nil }
func (h *helloConn) LocalAddr() net.Addr              { return h.c.tcp.LocalAddr() }
func (h *helloConn) RemoteAddr() net.Addr             { return h.c.tcp.RemoteAddr() }
func (h *helloConn) SetDeadline(time.Time) error      { return nil }
func (h *helloConn) SetReadDeadline(time.Time) error  { return nil }
func (h *helloConn) SetWriteDeadline(time.Time) error { return nil }

// firstOf waits until one of two connections says something or ends, and stops
// reading from the other. It returns what each said.
func firstOf(a, b net.Conn, limit time.Duration) (fromA, fromB []byte, err error) {
	type said struct {
		b   []byte
		err error
	}
	deadline := time.Now().Add(limit)
	read := func(c net.Conn, out chan<- said) {
		buf := make([]byte, firstRead)
		n, err := c.Read(buf)
		out <- said{buf[:n], err}
	}
	for _, c := range []net.Conn{a, b} {
		if err := c.SetReadDeadline(deadline); err != nil {
			return nil, nil, err
		}
	}
	past := time.Unix(1, 0)
	ca, cb := make(chan said, 1), make(chan said, 1)
	go read(a, ca)
	go read(b, cb)
	var sa, sb said
	select {
	case sa = <-ca:
		_ = b.SetReadDeadline(past) // a closed one has stopped reading, too
		sb = <-cb
	case sb = <-cb:
		_ = a.SetReadDeadline(past)
		sa = <-ca
	}
	for _, c := range []net.Conn{a, b} {
		if err := c.SetReadDeadline(time.Time{}); err != nil {
			return nil, nil, err
		}
	}
	if len(sa.b)+len(sb.b) > 0 {
		return sa.b, sb.b, nil
	}
	for _, e := range []error{sa.err, sb.err} {
		if e != nil && !isTimeout(e) {
			return nil, nil, e // the end of one of them
		}
	}
	return nil, nil, errIdle
}

var errIdle = errors.New("nobody said anything")

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

var _ io.ReadWriteCloser = (*helloConn)(nil)
