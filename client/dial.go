package client

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"connectrpc.com/connect"

	v1 "vivarium/api/vivarium/v1"
)

// Dial connects to a TCP port inside a sandbox. The connection has CloseWrite;
// of deadlines it knows none.
func (c *Client) Dial(ctx context.Context, ref string, port uint16) (net.Conn, error) {
	sctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, cancel) // ctx is for the dialling only
	s := c.Ports.Dial(sctx)
	err := s.Send(&v1.DialRequest{SandboxId: ref, Port: uint32(port)})
	if err == nil || errors.Is(err, io.EOF) {
		_, err = s.Receive()
	}
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		cancel()
		return nil, err
	}
	return &portConn{s: s, cancel: cancel}, nil
}

type portConn struct {
	s      *connect.BidiStreamForClient[v1.DialRequest, v1.DialResponse]
	cancel context.CancelFunc
	rest   []byte
	mu     sync.Mutex // of writing
}

func (p *portConn) Read(b []byte) (int, error) {
	for len(p.rest) == 0 {
		m, err := p.s.Receive()
		if err != nil {
			return 0, err
		}
		p.rest = m.Data
	}
	n := copy(b, p.rest)
	p.rest = p.rest[n:]
	return n, nil
}

func (p *portConn) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	total := 0
	for len(b) > 0 {
		n := min(len(b), Chunk)
		if err := p.s.Send(&v1.DialRequest{Data: b[:n]}); err != nil {
			return total, err
		}
		total, b = total+n, b[n:]
	}
	return total, nil
}

func (p *portConn) CloseWrite() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.s.CloseRequest()
}

func (p *portConn) Close() error {
	// Both: net/http does not look at the context while it waits for more of the
	// request, so that the daemon would not learn of it. Without the lock, which
	// a Write that is stuck holds.
	err := p.s.CloseRequest()
	p.cancel()
	return err
}

type portAddr struct{}

func (portAddr) Network() string { return "vivarium" }
func (portAddr) String() string  { return "sandbox" }

func (p *portConn) LocalAddr() net.Addr              { return portAddr{} }
func (p *portConn) RemoteAddr() net.Addr             { return portAddr{} }
func (p *portConn) SetDeadline(time.Time) error      { return os.ErrNoDeadline }
func (p *portConn) SetReadDeadline(time.Time) error  { return os.ErrNoDeadline }
func (p *portConn) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }
