package tunnel

import (
	"context"
	"net"
	"sync"
	"time"

	"vivarium/sandbox"
)

// dialTimeout bounds how long a program inside may take to accept.
const dialTimeout = 10 * time.Second

// live is an open tunnel.
type live struct {
	m      *Manager
	t      sandbox.Tunnel
	host   string // of all but TunnelTCP
	ctx    context.Context
	cancel context.CancelFunc

	front *proxy       // of all but TunnelTCP
	tcp   net.Listener // of TunnelTCP; nil while its port is taken; guarded by Manager.mu

	certified bool // guarded by Manager.op
	missed    bool // its port was taken; guarded by Manager.op

	mu    sync.Mutex
	used  int                   // requests and connections now; guarded by mu
	conns map[net.Conn]struct{} // to the inside, and raw ones from outside; guarded by mu
	shut  bool                  // guarded by mu
}

func (m *Manager) newLive(t sandbox.Tunnel) *live {
	l := &live{m: m, t: t, conns: map[net.Conn]struct{}{}}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	if t.Spec.Kind != sandbox.TunnelTCP {
		l.host = t.Name + "." + m.opts.Domain
		l.front = newProxy(l)
	}
	return l
}

// enter takes one of the tunnel's places; false if none is left.
func (l *live) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.shut || l.used >= l.m.opts.MaxConnections {
		return false
	}
	l.used++
	return true
}

func (l *live) leave() {
	l.mu.Lock()
	l.used--
	l.mu.Unlock()
}

// hold keeps a connection so that closing the tunnel cuts it; false if it is
// closed already.
func (l *live) hold(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.shut {
		return false
	}
	l.conns[c] = struct{}{}
	return true
}

func (l *live) drop(c net.Conn) {
	l.mu.Lock()
	delete(l.conns, c)
	l.mu.Unlock()
}

// dial connects to the port inside, which counts as activity of the sandbox as
// long as the connection is open.
func (l *live) dial(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	defer context.AfterFunc(l.ctx, cancel)()
	c, err := l.m.sandboxes.Dial(ctx, l.t.Tenant, l.t.SandboxID, l.t.Spec.Port)
	if err != nil {
		return nil, err
	}
	h := &heldConn{Conn: c, l: l}
	if !l.hold(h) {
		_ = c.Close()
		return nil, sandbox.Gone.Errorf("the tunnel is closed")
	}
	return h, nil
}

type heldConn struct {
	net.Conn
	l *live
}

func (c *heldConn) Close() error {
	c.l.drop(c)
	return c.Conn.Close()
}

func (c *heldConn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return sandbox.Unsupported.Errorf("close one direction of %T", c.Conn)
}

// end cuts everything that goes through the tunnel.
func (l *live) end() {
	l.cancel()
	l.mu.Lock()
	l.shut = true
	conns := l.conns
	l.conns = map[net.Conn]struct{}{}
	l.mu.Unlock()
	for c := range conns {
		_ = c.Close() // of no use any more
	}
	if l.front != nil {
		l.front.transport.CloseIdleConnections()
	}
}
