package tunnel

import (
	"net"
	"net/netip"
	"sync"
)

// Bounds of the TLS listener. A client that is over them is cut off at once.
const (
	maxConns     = 4096 // connections
	maxPerClient = 512  // connections of one address, loopback apart
)

// bounded is a listener that lets in so many connections, and so many of one
// client, that nobody can take all of them.
type bounded struct {
	net.Listener
	most, each int

	mu  sync.Mutex
	all int                // guarded by mu
	of  map[netip.Addr]int // guarded by mu
}

func newBounded(l net.Listener) *bounded {
	return &bounded{Listener: l, most: maxConns, each: maxPerClient, of: map[netip.Addr]int{}}
}

func (b *bounded) Accept() (net.Conn, error) {
	for {
		c, err := b.Listener.Accept()
		if err != nil {
			return nil, err
		}
		a := peer(c.RemoteAddr())
		if b.enter(a) {
			return &boundedConn{Conn: c, leave: sync.OnceFunc(func() { b.leave(a) })}, nil
		}
		refuse(c)
	}
}

func (b *bounded) enter(a netip.Addr) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.all >= b.most || b.of[a] >= b.each && !a.IsLoopback() {
		return false
	}
	b.all++
	b.of[a]++
	return true
}

func (b *bounded) leave(a netip.Addr) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all--
	if b.of[a]--; b.of[a] == 0 {
		delete(b.of, a)
	}
}

type boundedConn struct {
	net.Conn
	leave func()
}

func (c *boundedConn) Close() error {
	c.leave()
	return c.Conn.Close()
}

// peer is the address that a connection comes from, which no header can change.
func peer(a net.Addr) netip.Addr {
	if t, ok := a.(*net.TCPAddr); ok {
		return t.AddrPort().Addr().Unmap().WithZone("")
	}
	return netip.Addr{}
}

// refuse ends a connection with a reset.
func refuse(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	_ = c.Close() // it is of no use to anybody
}
