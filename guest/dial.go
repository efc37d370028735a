package guest

import (
	"context"
	"io"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// Dial connects to a TCP port inside the sandbox, on 127.0.0.1, else on ::1.
// ctx counts for the connecting only. The connection has CloseWrite.
func (c *Client) Dial(ctx context.Context, port uint16) (net.Conn, error) {
	return c.dialInside(ctx, "", "", int64(port), "tcp")
}

// DialUnix connects to a unix socket inside the sandbox as a user.
func (c *Client) DialUnix(ctx context.Context, user, path string) (net.Conn, error) {
	if path == "" {
		return nil, sandbox.Invalid.Errorf("empty path")
	}
	return c.dialInside(ctx, user, path, 0, "unix")
}

func (c *Client) dialInside(ctx context.Context, user, path string, port int64, network string) (net.Conn, error) {
	fill, err := pathOp(user, path, "", false, port)
	if err != nil {
		return nil, err
	}
	h, t, p, err := c.request(ctx, wire.TDial, fill)
	if err != nil {
		return nil, err
	}
	switch t {
	case wire.TError:
		return nil, c.answered(h, p)
	case wire.TReady:
		h.c.SetDeadline(time.Time{})
		return &portConn{c: c, h: h, addr: addr{network, path, port}}, nil
	}
	c.discard(h)
	return nil, broken("frame of type %d for a dial", t)
}

type addr struct {
	network, path string
	port          int64
}

func (a addr) Network() string { return a.network }
func (a addr) String() string {
	if a.path != "" {
		return a.path
	}
	return net.JoinHostPort("sandbox", strconv.FormatInt(a.port, 10))
}

// portConn is a connection to a port inside.
type portConn struct {
	c    *Client
	h    *hostConn
	addr addr

	rmu  sync.Mutex
	rest []byte
	err  error // what Read returns from now on

	wmu  sync.Mutex
	shut bool
	once sync.Once
	wdl  atomic.Pointer[time.Time]
}

func (p *portConn) Read(b []byte) (int, error) {
	p.rmu.Lock()
	defer p.rmu.Unlock()
	if len(b) == 0 {
		return 0, nil
	}
	for len(p.rest) == 0 {
		if p.err != nil {
			return 0, p.err
		}
		t, d, err := p.h.r.Next()
		if err != nil {
			if ne, ok := err.(net.Error); ok && ne.Timeout() {
				return 0, err // a deadline of the caller's; it may go on
			}
			p.err = p.c.failure(err)
			continue
		}
		switch t {
		case wire.TData:
			p.rest = d
		case wire.TEnd:
			dec := wire.NewDec(d)
			p.err = io.EOF
			if dec.Bool() {
				p.err = sandbox.Unavailable.Errorf("the program inside broke the connection")
			}
		default:
			p.err = broken("frame of type %d from a port", t)
		}
	}
	n := copy(b, p.rest)
	p.rest = p.rest[n:]
	return n, nil
}

func (p *portConn) Write(b []byte) (n int, err error) {
	p.wmu.Lock()
	defer p.wmu.Unlock()
	if p.shut {
		return 0, net.ErrClosed
	}
	for len(b) > 0 {
		m := min(len(b), wire.MaxChunk)
		if err := p.send(wire.TData, b[:m]); err != nil {
			p.shut = true // part of a frame may be out
			return n, p.c.failure(err)
		}
		n += m
		b = b[m:]
	}
	return n, nil
}

// CloseWrite tells the program inside that no more comes.
func (p *portConn) CloseWrite() error {
	p.wmu.Lock()
	defer p.wmu.Unlock()
	if p.shut {
		return nil
	}
	p.shut = true
	return p.send(wire.TEnd, nil)
}

func (p *portConn) Close() error {
	p.once.Do(func() { p.c.discard(p.h) })
	return nil
}

func (p *portConn) LocalAddr() net.Addr  { return addr{network: p.addr.network} }
func (p *portConn) RemoteAddr() net.Addr { return p.addr }

func (p *portConn) SetDeadline(t time.Time) error {
	p.SetWriteDeadline(t)
	return p.SetReadDeadline(t)
}

func (p *portConn) SetReadDeadline(t time.Time) error { return p.h.c.SetReadDeadline(t) }

// SetWriteDeadline also ends a write that waits.
func (p *portConn) SetWriteDeadline(t time.Time) error {
	p.wdl.Store(&t)
	return p.h.c.SetWriteDeadline(t)
}

// send sends a frame by the caller's deadline. A program may take its time:
// without one there is no bound.
func (p *portConn) send(t wire.Type, b []byte) error {
	var by time.Time
	if d := p.wdl.Load(); d != nil {
		by = *d
	}
	return p.h.dataBy(by, t, nil, b)
}
