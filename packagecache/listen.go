package packagecache

import (
	"io"
	"log"
	"net"
	"net/netip"
	"sync"
)

// discardLog takes what net/http says of clients that break its rules: they
// could fill a log with it.
var discardLog = log.New(io.Discard, "", 0)

// bounded closes the connections of a client that has too many.
type bounded struct {
	net.Listener
	max int

	mu sync.Mutex
	of map[netip.Addr]int
}

func (b *bounded) Accept() (net.Conn, error) {
	for {
		conn, err := b.Listener.Accept()
		if err != nil {
			return nil, err
		}
		ap, err := netip.ParseAddrPort(conn.RemoteAddr().String())
		if err != nil {
			_ = conn.Close()
			continue
		}
		a := ap.Addr().Unmap()
		b.mu.Lock()
		full := b.of[a] >= b.max
		if !full {
			b.of[a]++
		}
		b.mu.Unlock()
		if full {
			_ = conn.Close()
			continue
		}
		return &counted{Conn: conn, done: func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			if b.of[a]--; b.of[a] == 0 {
				delete(b.of, a)
			}
		}}, nil
	}
}

type counted struct {
	net.Conn
	once sync.Once
	done func()
}

func (c *counted) Close() error {
	c.once.Do(c.done)
	return c.Conn.Close()
}

// ReadFrom keeps sendfile working through the wrapping.
func (c *counted) ReadFrom(r io.Reader) (int64, error) {
	if rf, ok := c.Conn.(io.ReaderFrom); ok {
		return rf.ReadFrom(r)
	}
	return io.Copy(struct{ io.Writer }{c.Conn}, r)
}
