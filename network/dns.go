package network

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sync/singleflight"
	"golang.org/x/sys/unix"

	"vivarium/network/policy"
)

// Bounds of the DNS server. A slot can use its own share and no more.
const (
	dnsInFlight     = 512  // queries being answered, all slots
	dnsSlotInFlight = 64   // and of one slot
	dnsTCPConns     = 256  // TCP connections, all slots
	dnsSlotTCPConns = 8    // and of one slot
	dnsTCPQueries   = 100  // queries on one connection
	dnsMaxQuery     = 4096 // bytes
	dnsMaxUDP       = 1232 // bytes of a UDP answer (DNS flag day 2020)
	dnsIdle         = 5 * time.Second
	// dnsReadBuffer holds what all slots may send at once in a moment in which
	// the daemon does not run.
	dnsReadBuffer     = 4 << 20
	dnsAnswerDeadline = 4 * time.Second // glibc asks again after 5 s
)

// dnsClient is what the server keeps about one slot.
type dnsClient struct {
	slot            *slot
	inFlight, conns atomic.Int32

	mu     sync.Mutex
	rate   float64
	tokens float64
	last   time.Time
}

func newDNSClient(s *slot, rate int) *dnsClient {
	return &dnsClient{slot: s, rate: float64(rate), tokens: 2 * float64(rate)}
}

// allow takes a token of a bucket that holds two seconds' worth.
func (c *dnsClient) allow(now time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.last.IsZero() {
		c.tokens = min(2*c.rate, c.tokens+c.rate*now.Sub(c.last).Seconds())
	}
	c.last = now
	if c.tokens < 1 {
		return false
	}
	c.tokens--
	return true
}

// dnsServer answers the slots' queries on one address in the router namespace.
// Only slots with an open policy are heard, which nftables sees to as well.
type dnsServer struct {
	n        *Network
	filter   func(netip.Addr) bool // may a slot reach this address?
	upstream *upstream
	cache    *dnsCache
	flights  singleflight.Group
	pc       *net.UDPConn
	ln       *net.TCPListener
	ctx      context.Context
	cancel   context.CancelFunc
	wg       sync.WaitGroup
	inFlight atomic.Int32
	conns    atomic.Int32
	dropped  atomic.Uint64 // queries over a limit

	mu      sync.RWMutex
	clients map[netip.Addr]*dnsClient // only those with an open policy
}

func (n *Network) startDNS() error {
	s := &dnsServer{n: n, filter: n.opts.allows, upstream: n.newUpstream(), cache: newDNSCache(4096), clients: map[netip.Addr]*dnsClient{}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	addr := netip.AddrPortFrom(n.dnsAddr(), 53)
	// Sockets belong to the namespace of the thread that makes them; from then
	// on any thread may use them.
	err := n.router.do(func() (err error) {
		if s.pc, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(addr)); err != nil {
			return err
		}
		if s.ln, err = net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(addr)); err != nil {
			return err
		}
		return forceReadBuffer(s.pc, dnsReadBuffer)
	})
	if err != nil {
		s.cancel()
		if s.pc != nil {
			s.pc.Close()
		}
		if s.ln != nil {
			s.ln.Close()
		}
		return err
	}
	s.wg.Add(2)
	go s.serveUDP()
	go s.serveTCP()
	n.dns = s
	return nil
}

// forceReadBuffer sets a socket's receive buffer beyond net.core.rmem_max.
func forceReadBuffer(pc *net.UDPConn, bytes int) error {
	rc, err := pc.SyscallConn()
	if err != nil {
		return err
	}
	var serr error
	if err := rc.Control(func(fd uintptr) { serr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, bytes) }); err != nil {
		return err
	}
	return serr
}

func (s *dnsServer) stop() {
	s.cancel()
	s.pc.Close()
	s.ln.Close()
	s.wg.Wait()
}

func (s *dnsServer) reload() { s.upstream.reload() }

// set makes the server hear a slot, or not.
func (s *dnsServer) set(a netip.Addr, c *dnsClient, p *policy.Policy) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p != nil && opens(p.Mode) {
		s.clients[a] = c
	} else {
		delete(s.clients, a)
	}
}

func (s *dnsServer) drop(a netip.Addr) { s.set(a, nil, nil) }

func (s *dnsServer) client(a netip.Addr) *dnsClient {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.clients[a.Unmap()]
}

func (s *dnsServer) serveUDP() {
	defer s.wg.Done()
	buf := make([]byte, dnsMaxQuery)
	for {
		k, from, err := s.pc.ReadFromUDPAddrPort(buf)
		if err != nil {
			if s.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			continue // an ICMP error that an earlier answer met
		}
		c := s.client(from.Addr())
		if c == nil || k < 12 || !c.allow(time.Now()) {
			s.dropped.Add(1)
			continue
		}
		if !s.begin(c) {
			s.dropped.Add(1)
			s.refuse(buf[:k], from)
			continue
		}
		q := append([]byte(nil), buf[:k]...)
		s.wg.Add(1)
		go func() {
			defer s.wg.Done()
			defer s.end(c)
			if out := s.answer(c, q, dnsMaxUDP); out != nil {
				// A full socket buffer loses an answer, as a network would.
				_, _ = s.pc.WriteToUDPAddrPort(out, from)
			}
		}()
	}
}

// begin reserves a place among the queries in flight.
func (s *dnsServer) begin(c *dnsClient) bool {
	if s.inFlight.Add(1) > dnsInFlight {
		s.inFlight.Add(-1)
		return false
	}
	if c.inFlight.Add(1) > dnsSlotInFlight {
		s.end(c)
		return false
	}
	return true
}

func (s *dnsServer) end(c *dnsClient) {
	c.inFlight.Add(-1)
	s.inFlight.Add(-1)
}

// refuse answers SERVFAIL at next to no cost: the header alone.
func (s *dnsServer) refuse(q []byte, to netip.AddrPort) {
	if q[2]&0x80 != 0 {
		return // not a query
	}
	h := make([]byte, 12)
	copy(h, q[:2])
	h[2] = 0x80 | q[2]&0x79 // response, opcode and RD as asked
	h[3] = 0x80 | dns.RcodeServerFailure
	_, _ = s.pc.WriteToUDPAddrPort(h, to)
}

func (s *dnsServer) serveTCP() {
	defer s.wg.Done()
	for {
		conn, err := s.ln.AcceptTCP()
		if err != nil {
			if s.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			select { // out of descriptors, perhaps
			case <-s.ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		from, _ := netip.ParseAddrPort(conn.RemoteAddr().String())
		c := s.client(from.Addr())
		if c == nil || !s.admit(c) {
			s.dropped.Add(1)
			_ = conn.SetLinger(0)
			conn.Close()
			continue
		}
		s.wg.Add(1)
		go func() {
			defer s.wg.Done()
			defer s.leave(c)
			defer conn.Close()
			stop := context.AfterFunc(s.ctx, func() { conn.Close() })
			defer stop()
			s.serveConn(conn, c, from.Addr())
		}()
	}
}

func (s *dnsServer) admit(c *dnsClient) bool {
	if s.conns.Add(1) > dnsTCPConns {
		s.conns.Add(-1)
		return false
	}
	if c.conns.Add(1) > dnsSlotTCPConns {
		s.leave(c)
		return false
	}
	return true
}

func (s *dnsServer) leave(c *dnsClient) {
	c.conns.Add(-1)
	s.conns.Add(-1)
}

func (s *dnsServer) serveConn(conn net.Conn, c *dnsClient, from netip.Addr) {
	var size [2]byte
	buf := make([]byte, dnsMaxQuery)
	for range dnsTCPQueries {
		// One deadline for the whole query: a byte now and then buys nothing.
		if conn.SetReadDeadline(time.Now().Add(dnsIdle)) != nil {
			return
		}
		if _, err := io.ReadFull(conn, size[:]); err != nil {
			return
		}
		k := int(binary.BigEndian.Uint16(size[:]))
		if k < 12 || k > len(buf) {
			return
		}
		if _, err := io.ReadFull(conn, buf[:k]); err != nil {
			return
		}
		// The policy may have changed since the connection was made.
		if s.client(from) != c || !c.allow(time.Now()) || !s.begin(c) {
			s.dropped.Add(1)
			return
		}
		out := s.answer(c, buf[:k], dns.MaxMsgSize)
		s.end(c)
		if out == nil {
			return
		}
		if conn.SetWriteDeadline(time.Now().Add(dnsIdle)) != nil {
			return
		}
		if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(out))), out...)); err != nil {
			return
		}
	}
}

// answer returns the packed answer to the packed query q, at most limit bytes,
// or nil when q deserves none. q is hostile.
func (s *dnsServer) answer(c *dnsClient, q []byte, limit int) []byte {
	if q[2]&0x80 != 0 {
		return nil // answering answers would let two servers talk for ever
	}
	var req dns.Msg
	if err := req.Unpack(q); err != nil {
		return nil
	}
	resp := s.resolve(c, &req)
	resp.Id, resp.Response, resp.Opcode = req.Id, true, req.Opcode
	resp.RecursionDesired, resp.RecursionAvailable = req.RecursionDesired, true
	resp.Authoritative, resp.AuthenticatedData, resp.CheckingDisabled = false, false, false
	resp.Question = req.Question
	if limit < dns.MaxMsgSize {
		limit = dns.MinMsgSize
		if o := req.IsEdns0(); o != nil {
			limit = min(max(int(o.UDPSize()), dns.MinMsgSize), dnsMaxUDP)
		}
	}
	if o := req.IsEdns0(); o != nil {
		ede := resp.filtered
		resp.SetEdns0(dnsMaxUDP, false)
		if ede {
			opt := resp.IsEdns0()
			opt.Option = append(opt.Option, &dns.EDNS0_EDE{InfoCode: dns.ExtendedErrorCodeFiltered, ExtraText: "not allowed by policy"})
		}
	}
	resp.Compress = true
	resp.Truncate(limit)
	out, err := resp.Pack()
	if err != nil {
		return nil
	}
	return out
}

// reply is an answer before its header is filled in.
type reply struct {
	dns.Msg
	filtered bool // all of its addresses were taken out, or the name is not allowed
}

func failure(rcode int) *reply {
	r := &reply{}
	r.Rcode = rcode
	return r
}

// resolve finds the answer to a slot's query, without a valid header.
func (s *dnsServer) resolve(c *dnsClient, req *dns.Msg) *reply {
	if req.Opcode != dns.OpcodeQuery {
		return failure(dns.RcodeNotImplemented)
	}
	if len(req.Question) != 1 || len(req.Answer) > 0 || len(req.Ns) > 0 || len(req.Extra) > 2 {
		return failure(dns.RcodeFormatError)
	}
	q := req.Question[0]
	q.Name = dns.CanonicalName(q.Name)
	if r := localAnswer(q); r != nil {
		return r
	}
	// Each time under the policy that is then in force.
	for range 4 {
		r, err := s.resolveUnder(c.slot, c.slot.pol.Load(), q)
		if err == nil {
			return r
		}
		if !errors.Is(err, errPolicyChanged) {
			s.n.log.Warn("answer query", "slot", c.slot.ID, "err", err)
			break
		}
	}
	return failure(dns.RcodeServerFailure)
}

// shared is the answer that all slots have in common.
func (s *dnsServer) shared(q dns.Question) *reply {
	key := cacheKey{q.Name, q.Qtype}
	if r := s.cache.get(key, time.Now()); r != nil {
		return r
	}
	ch := s.flights.DoChan(fmt.Sprintf("%d %s", q.Qtype, q.Name), func() (any, error) {
		ctx, cancel := context.WithTimeout(s.ctx, dnsAnswerDeadline)
		defer cancel()
		m, err := s.upstream.ask(ctx, q)
		r := failure(dns.RcodeServerFailure)
		if err == nil {
			r = sanitise(q, m, s.filter)
		}
		s.cache.put(key, r, time.Now())
		return r, nil
	})
	res := <-ch // bounded by the deadline inside
	r := res.Val.(*reply)
	// Several queries may share the result.
	return &reply{Msg: *r.Copy(), filtered: r.filtered}
}
