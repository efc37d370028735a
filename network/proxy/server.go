package proxy

import (
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"vivarium/sandbox"
)

// sweepEvery bounds how long a change of policy goes unseen that nobody tells of.
const sweepEvery = 250 * time.Millisecond

// Server is a running proxy.
type Server struct {
	o    Options
	http httpServers
	ids  atomic.Uint64
	stop chan struct{}
	wg   sync.WaitGroup // the server's own goroutines and every connection

	mu     sync.Mutex
	closed bool
	total  int
	slots  map[string]*slotConns
}

// slotConns are the connections of a slot.
type slotConns struct {
	conns map[*conn]struct{}
	large int // of them, those that hold a large client hello
	h2    int // of them, those that speak HTTP/2 with us
}

// Serve starts a proxy and returns at once. Errors: Invalid.
func Serve(o Options) (*Server, error) {
	if o.Listener == nil || o.Slot == nil || o.Dial == nil {
		return nil, sandbox.Invalid.Errorf("a proxy needs a listener, slots and a way to dial")
	}
	o.defaults()
	s := &Server{o: o, stop: make(chan struct{}), slots: map[string]*slotConns{}}
	s.startHTTP()
	s.wg.Go(s.accept)
	s.wg.Go(s.sweep)
	return s, nil
}

// Close stops accepting, resets every connection and waits until all is over.
func (s *Server) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		s.wg.Wait()
		return nil
	}
	s.closed = true
	s.mu.Unlock()
	close(s.stop)
	err := s.o.Listener.Close()
	for _, c := range s.list("") {
		c.abort("the proxy stops")
	}
	s.http.close()
	s.wg.Wait()
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return sandbox.Internal.Errorf("close listener: %w", err)
	}
	return nil
}

// Reevaluate judges the connections of a slot again and resets those that its
// policy no longer allows. It returns when that is done, and how many there were.
func (s *Server) Reevaluate(slotID string) int {
	n := 0
	for _, c := range s.list(slotID) {
		if !c.recheck() {
			n++
		}
	}
	return n
}

// Drop resets all connections of a slot and returns how many there were.
func (s *Server) Drop(slotID string) int {
	cs := s.list(slotID)
	for _, c := range cs {
		c.abort("the slot is closed")
	}
	return len(cs)
}

// Active are the flows that are open now, with the bytes so far; those of one
// slot, or with "" of all.
func (s *Server) Active(slotID string) []Record {
	var out []Record
	for _, c := range s.list(slotID) {
		out = append(out, c.records()...)
	}
	return out
}

// list returns the connections of a slot, or with "" of all.
func (s *Server) list(id string) []*conn {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*conn
	for k, sc := range s.slots {
		if id == "" || id == k {
			for c := range sc.conns {
				out = append(out, c)
			}
		}
	}
	return out
}

func (s *Server) accept() {
	pause := time.Duration(0)
	for {
		nc, err := s.o.Listener.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return
			}
			// Out of file descriptors or the like: what is open goes on.
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			select {
			case <-s.stop:
				return
			case <-time.After(pause):
			}
			continue
		}
		pause = 0
		if c := s.take(nc); c != nil {
			go c.serve()
		}
	}
}

// take registers a connection, or resets it.
func (s *Server) take(nc net.Conn) *conn {
	tcp, ok := nc.(*net.TCPConn)
	if !ok {
		_ = nc.Close()
		return nil
	}
	client := addrPort(tcp.RemoteAddr())
	slot := s.o.Slot(client.Addr())
	if slot == nil {
		reset(tcp)
		return nil
	}
	dst, err := s.o.OriginalDst(nc)
	dst = netip.AddrPortFrom(dst.Addr().Unmap(), dst.Port())
	if err != nil || !dst.IsValid() || dst == addrPort(tcp.LocalAddr()) || dst == addrPort(s.o.Listener.Addr()) {
		reset(tcp)
		return nil
	}
	c := newConn(s, slot, tcp, client, dst)
	if reason := s.add(c); reason != "" {
		c.cancel()
		now := time.Now()
		s.o.Log(Record{ID: s.ids.Add(1), Slot: c.id, Client: client, Addr: dst.Addr(), Port: dst.Port(), Kind: KindTCP, Reason: reason, Start: now, End: now})
		reset(tcp)
		return nil
	}
	// A slot that was dropped meanwhile was dropped without this connection.
	if again := s.o.Slot(client.Addr()); again == nil || again.ID() != c.id {
		c.abort("the slot is closed")
		c.finish("")
		return nil
	}
	return c
}

func (s *Server) add(c *conn) (reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sc := s.slots[c.id]
	n := 0
	if sc != nil {
		n = len(sc.conns)
	}
	switch {
	case s.closed:
		return "the proxy stops"
	case n >= s.o.MaxConnsPerSlot:
		return "too many connections of this sandbox"
	case s.total >= s.o.MaxConns && n >= s.o.Reserved:
		return "too many connections of all sandboxes"
	}
	if sc == nil {
		sc = &slotConns{conns: map[*conn]struct{}{}}
		s.slots[c.id] = sc
	}
	sc.conns[c] = struct{}{}
	s.total++
	s.wg.Add(1)
	return ""
}

func (s *Server) remove(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sc := s.slots[c.id]
	delete(sc.conns, c)
	if c.h2 {
		sc.h2--
	}
	if len(sc.conns) == 0 {
		delete(s.slots, c.id)
	}
	s.total--
	s.wg.Done()
}

func (s *Server) takeLarge(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	sc := s.slots[id]
	if sc == nil || sc.large >= maxLarge {
		return false
	}
	sc.large++
	return true
}

func (s *Server) giveLarge(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sc := s.slots[id]; sc != nil {
		sc.large--
	}
}

// maxH2 bounds the connections of a slot that speak HTTP/2 with us, which may buffer
// a megabyte or more each. A client has one for each host, as a rule.
const maxH2 = 64

func (s *Server) takeH2(c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sc := s.slots[c.id]; sc != nil && !c.h2 && sc.h2 < maxH2 {
		sc.h2++
		c.h2 = true
	}
	return c.h2
}

// sweep looks for connections that are idle, and for policies that changed.
func (s *Server) sweep() {
	t := time.NewTicker(sweepEvery)
	defer t.Stop()
	for {
		select {
		case <-s.stop:
			return
		case now := <-t.C:
			for _, c := range s.list("") {
				if now.Unix()-c.last.Load() > int64(s.o.IdleTimeout/time.Second) {
					c.abort("idle for " + s.o.IdleTimeout.String())
				} else if c.slot.Policy() != c.judged.Load() {
					c.recheck()
				}
			}
		}
	}
}

func addrPort(a net.Addr) netip.AddrPort {
	t, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	ap := t.AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
