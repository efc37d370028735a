package guest

import (
	"context"
	"io"
	"net"
	"os"
	"strconv"
	"sync"
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
		return c.newPortConn(h, addr{network, path, port}), nil
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

// portConn is a connection to a port inside. A goroutine takes what comes, so
// that a user who only writes, or only reads, is not held up.
type portConn struct {
	c    *Client
	h    *hostConn
	addr addr
	flow *wire.Flow
	in   *wire.Queue
	once sync.Once

	rmu   sync.Mutex
	rest  []byte
	tally wire.Tally
	rdl   deadline

	wmu  sync.Mutex
	shut bool
	wdl  deadline
}

func (c *Client) newPortConn(h *hostConn, a addr) *portConn {
	p := &portConn{c: c, h: h, addr: a, flow: wire.NewFlow(), in: wire.NewQueue()}
	go p.receive()
	return p
}

func (p *portConn) receive() {
	var err error
	for err == nil {
		var t wire.Type
		var b []byte
		if t, b, err = p.h.r.Next(); err != nil {
			break
		}
		switch t {
		case wire.TData:
			err = p.in.Put(b)
		case wire.TCredit:
			err = p.flow.Credit(b)
		case wire.TEnd:
			d := wire.NewDec(b)
			broke := d.Bool()
			switch {
			case d.End() != nil:
				err = wire.ErrFrame
			case broke:
				p.in.End(sandbox.Unavailable.Errorf("the program inside broke the connection"))
			default:
				p.in.End(io.EOF)
			}
		default:
			err = broken("frame of type %d from a port", t)
		}
		p.h.r.Idle()
	}
	err = p.c.failure(err)
	p.in.End(err)
	p.flow.Fail(err)
}

func (p *portConn) Read(b []byte) (int, error) {
	p.rmu.Lock()
	defer p.rmu.Unlock()
	if len(b) == 0 {
		return 0, nil
	}
	if len(p.rest) == 0 {
		rest, err := p.in.TakeBy(p.rdl.get)
		if err != nil {
			return 0, err
		}
		p.rest = rest
	}
	n := copy(b, p.rest)
	p.rest = p.rest[n:]
	if total, tell := p.tally.Add(n); tell {
		p.h.send(wire.TCredit, func(b []byte) []byte { return wire.AppendInt(b, total) }) // a failure shows in the next read
	}
	return n, nil
}

func (p *portConn) Write(b []byte) (n int, err error) {
	p.wmu.Lock()
	defer p.wmu.Unlock()
	if p.shut {
		return 0, net.ErrClosed
	}
	for len(b) > 0 {
		m, err := p.flow.WaitBy(len(b), p.wdl.get)
		if err != nil {
			return n, err
		}
		if err := p.h.data(wire.TData, nil, b[:m]); err != nil {
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
	return p.h.send(wire.TEnd, nil)
}

func (p *portConn) Close() error {
	p.once.Do(func() {
		p.c.discard(p.h)
		p.in.Abort(net.ErrClosed)
		p.flow.Fail(net.ErrClosed)
	})
	return nil
}

func (p *portConn) LocalAddr() net.Addr  { return addr{network: p.addr.network} }
func (p *portConn) RemoteAddr() net.Addr { return p.addr }

func (p *portConn) SetDeadline(t time.Time) error {
	p.SetWriteDeadline(t)
	return p.SetReadDeadline(t)
}

func (p *portConn) SetReadDeadline(t time.Time) error {
	p.rdl.set(t, p.in.Wake)
	return nil
}

func (p *portConn) SetWriteDeadline(t time.Time) error {
	p.wdl.set(t, p.flow.Wake)
	return nil
}

// deadline is a time after which waiting fails.
type deadline struct {
	mu    sync.Mutex
	t     time.Time
	timer *time.Timer
}

func (d *deadline) set(t time.Time, wake func()) {
	d.mu.Lock()
	d.t = t
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	if !t.IsZero() {
		d.timer = time.AfterFunc(time.Until(t), wake)
	}
	d.mu.Unlock()
	wake()
}

// get returns an error once the time has passed.
func (d *deadline) get() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.t.IsZero() && !time.Now().Before(d.t) {
		return os.ErrDeadlineExceeded
	}
	return nil
}
