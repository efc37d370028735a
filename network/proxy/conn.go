package proxy

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

const (
	maxNames   = 64 // that one HTTP connection may ask for
	maxServers = 4  // connections to servers for one from a sandbox; a second one is rare
)

// conn is a connection from a sandbox.
type conn struct {
	s        *Server
	slot     Slot
	id       string // of the slot
	tcp      *net.TCPConn
	client   netip.AddrPort
	dst      netip.AddrPort
	upstream *url.URL
	ctx      context.Context // done when the connection is over
	cancel   context.CancelFunc
	last     atomic.Int64                  // when a byte last went by, Unix seconds
	judged   atomic.Pointer[policy.Policy] // by which all flows were judged
	cur      atomic.Pointer[flow]          // that bytes are counted for
	early    atomic.Int64                  // bytes sent before there was one
	waiting  atomic.Bool                   // for the first byte, with the server connected

	// of serve alone
	buf   []byte // what the client said, unhandled
	large bool   // buf is one of few that may be large

	h2  bool // counted as such; guarded by Server.mu
	web *web // of HTTP; set before the connection is handed to its server

	mu      sync.Mutex
	ended   bool
	cut     bool
	why     string
	flows   map[string]*flow      // by name
	servers map[net.Conn]struct{} // connections of ours to where it goes
}

// flow is what one connection has to do with one name.
type flow struct {
	rec            Record    // as it began
	j              judgement // guarded by conn.mu
	raw            bool      // bytes go through untouched
	sent, received atomic.Int64
}

func newConn(s *Server, slot Slot, tcp *net.TCPConn, client, dst netip.AddrPort) *conn {
	c := &conn{
		s: s, slot: slot, id: slot.ID(), tcp: tcp, client: client, dst: dst,
		flows: map[string]*flow{}, servers: map[net.Conn]struct{}{},
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.judged.Store(slot.Policy())
	c.upstream = slot.Upstream()
	c.touch()
	_ = tcp.SetKeepAliveConfig(keepAlive) // fails only if the connection is gone
	return c
}

// keepAlive finds out that a peer is gone, and bears with a sandbox that is paused
// for some minutes.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 2 * time.Minute, Interval: 30 * time.Second, Count: 10}

func (c *conn) touch() { c.last.Store(time.Now().Unix()) }

// serve decides what the connection is and what becomes of it.
func (c *conn) serve() {
	handed, why := c.route()
	if !handed {
		c.finish(why)
	}
}

// route returns true if an HTTP server has the connection now and will close it.
func (c *conn) route() (handed bool, why string) {
	open := judge(c.slot, "", c.dst, false)
	wait := c.s.o.PeekTimeout
	if open.allowed {
		wait = c.s.o.ServerFirst
	}
	_ = c.tcp.SetReadDeadline(time.Now().Add(wait))
	err := c.fill(firstRead)
	var server net.Conn
	var early []byte // what the server said before the client said anything
	if err != nil && open.allowed && isTimeout(err) {
		// It may wait for the server to speak first, as that of SMTP does. Nothing
		// is said to the server until the client speaks, so it is still all one
		// whether the client will claim a name.
		c.waiting.Store(true)
		if server, err = c.dial(); err != nil {
			return false, c.refuse("", KindTCP, open.rule, "connect: "+cause(err), hard)
		}
		var said []byte
		said, early, err = firstOf(c.tcp, server, c.s.o.IdleTimeout)
		c.buf = append(c.buf, said...)
		if err != nil && !errors.Is(err, io.EOF) {
			return false, c.refuse("", KindTCP, open.rule, cause(err), hard)
		}
	}
	if len(c.buf) == 0 {
		if !open.allowed {
			reason := "it says nothing, and its address is not allowed"
			if err == nil || !errors.Is(err, io.EOF) && !isTimeout(err) {
				reason = cause(err)
			}
			return false, c.refuse("", KindTCP, open.rule, reason, hard)
		}
		return false, c.bytes("", KindTCP, "", server, early)
	}
	_ = c.tcp.SetReadDeadline(time.Now().Add(c.s.o.PeekTimeout))
	k := classify(c.buf)
	for err = nil; k == kindUndecided && err == nil; k = classify(c.buf) {
		err = c.fill(2 * maxLine)
	}
	// Where the address is allowed and no name is denied, names are of interest only.
	free := open.allowed && !open.strict
	switch k {
	case kindTLS:
		return c.tls(free, server, early)
	case kindHTTP, kindH2C:
		if free {
			return false, c.bytes("", KindHTTP, c.hint(), server, early)
		}
		if server != nil {
			c.drop(server)
		}
		_ = c.tcp.SetReadDeadline(time.Time{})
		if k == kindH2C && !c.s.takeH2(c) {
			return false, c.refuse("", KindHTTP, "", "too many HTTP/2 connections of this sandbox", hard)
		}
		return c.handHTTP(k == kindH2C), "the proxy stops"
	case kindUndecided:
		if !free {
			return false, c.refuse("", KindTCP, open.rule, "its first bytes are unclear: "+cause(err), hard)
		}
	}
	return false, c.bytes("", KindTCP, "", server, early)
}

// tls handles a connection that begins with a TLS record.
func (c *conn) tls(free bool, server net.Conn, early []byte) (handed bool, why string) {
	h, err := c.readHello()
	if err != nil {
		if free {
			return false, c.bytes("", KindTCP, "", server, early)
		}
		return false, c.refuse("", KindTLS, "", "client hello: "+cause(err), hard)
	}
	name := ""
	if _, err := netip.ParseAddr(h.name); h.name != "" && err != nil {
		n, ok := policy.Name(h.name)
		switch {
		case ok && strings.EqualFold(n, h.name):
			name = n
		case !free:
			return false, c.refuse("", KindTLS, "", "the TLS server name is not a host name in its ASCII spelling", soft)
		}
	}
	f, j := c.admit(name, KindTLS, flowInfo{ech: h.ech, raw: true})
	if f == nil {
		return false, c.refused(j, soft)
	}
	if j.inspect {
		if server != nil {
			c.drop(server)
		}
		return c.inspect(name, h)
	}
	return false, c.splice(f, server, early)
}

// bytes lets a connection through that is decided by its address.
func (c *conn) bytes(name, kind, hint string, server net.Conn, early []byte) (why string) {
	f, j := c.admit(name, kind, flowInfo{hint: hint, raw: true})
	if f == nil {
		return c.refused(j, hard)
	}
	return c.splice(f, server, early)
}

// hint is the name in a request that is not checked.
func (c *conn) hint() string {
	r, err := http.ReadRequest(newReader(c.buf))
	if err != nil {
		return ""
	}
	name, _, _ := hostOf(r.Host)
	return name
}

// splice moves bytes both ways until both ends have ended.
func (c *conn) splice(f *flow, server net.Conn, early []byte) (why string) {
	_ = c.tcp.SetReadDeadline(time.Time{})
	if server == nil {
		var err error
		if server, err = c.dial(); err != nil {
			c.abort("connect: " + cause(err))
			return ""
		}
	}
	buf := c.buf
	c.buf = nil
	c.small()
	if p, ok := server.(*prefixed); ok {
		early = append(early, p.b...)
		server = p.Conn
	}
	down := make(chan struct{})
	go func() {
		defer close(down)
		_, err := c.tcp.Write(early)
		f.received.Add(int64(len(early)))
		if err == nil {
			err = pump(c.tcp, server, &f.received, c.touch)
		}
		switch {
		case err == nil && closeWrite(c.tcp) == nil:
		case pending(c.tcp):
			// What the server said before it failed is still on its way.
			_ = closeWrite(c.tcp)
			_ = c.tcp.SetReadDeadline(time.Now().Add(lastWords))
		default:
			c.abort("")
		}
	}()
	_, err := server.Write(buf)
	f.sent.Add(int64(len(buf)))
	if err == nil {
		err = pump(server, c.tcp, &f.sent, c.touch)
	}
	if err == nil {
		err = closeWrite(server)
	}
	if src := (*sourceError)(nil); errors.As(err, &src) {
		c.abort("") // the client is gone
	} else if err != nil {
		// The server is gone, but its last words may be unread; or the client, while
		// the kernel moved its bytes.
		_ = server.SetReadDeadline(time.Now().Add(lastWords))
	}
	<-down
	return ""
}

// lastWords bounds how long one direction outlives a failure of the other.
const lastWords = 5 * time.Second

// flowInfo is what is known of a flow besides its name.
type flowInfo struct {
	hint string
	ech  bool
	raw  bool
}

// admit judges a name and, if it is allowed, makes the flow known, so that it is
// judged again when the policy changes. It returns nil if it is refused.
func (c *conn) admit(name, kind string, info flowInfo) (*flow, judgement) {
	var f *flow
	for range 4 {
		j := judge(c.slot, name, c.dst, false)
		if j.allowed && info.raw && kind == KindHTTP && j.strict {
			j.allowed, j.reason = false, "the policy is being changed"
		}
		if !j.allowed {
			c.log(c.record(name, kind, j, info, time.Now()))
			return nil, j
		}
		fresh := false
		c.mu.Lock()
		switch {
		case c.ended || c.cut:
			c.mu.Unlock()
			return nil, judgement{reason: "cut"}
		case c.flows[name] != nil:
			f = c.flows[name]
			f.j = j
		case len(c.flows) >= maxNames:
			c.mu.Unlock()
			j = judgement{reason: "too many names on one connection"}
			c.log(c.record(name, kind, j, info, time.Now()))
			return nil, j
		default:
			fresh = true
			f = &flow{j: j, raw: info.raw && !j.inspect, rec: c.record(name, kind, j, info, time.Time{})}
			c.flows[name] = f
		}
		c.mu.Unlock()
		if fresh {
			c.s.o.Log(f.rec)
		}
		c.cur.Store(f)
		// A change that came before the flow was known did not see it.
		if c.slot.Policy() == j.pol {
			return f, j
		}
	}
	return nil, judgement{reason: "the policy is being changed"}
}

// recheck judges all flows again, and resets the connection if one is no longer
// as it should be.
func (c *conn) recheck() bool {
	p := c.slot.Policy()
	c.mu.Lock()
	fs := make(map[string]*flow, len(c.flows))
	pinned := make(map[string]bool, len(c.flows))
	for n, f := range c.flows {
		fs[n], pinned[n] = f, f.j.pinned
	}
	c.mu.Unlock()
	for name, f := range fs {
		j := judge(c.slot, name, c.dst, pinned[name])
		why := ""
		switch {
		case !j.allowed:
			why = "the policy changed: " + j.reason
		case f.rec.Kind == KindTLS && j.inspect != f.rec.Inspected:
			why = "the policy changed: what is inspected"
		case f.rec.Kind == KindHTTP && f.raw && j.strict:
			why = "the policy changed: requests are to be checked"
		default:
			c.mu.Lock()
			f.j = j
			c.mu.Unlock()
			continue
		}
		c.abort(why)
		return false
	}
	if len(fs) == 0 && c.waiting.Load() {
		if j := judge(c.slot, "", c.dst, false); !j.allowed {
			c.abort("the policy changed: " + j.reason)
			return false
		}
	}
	if u := c.slot.Upstream(); text(u) != text(c.upstream) {
		c.abort("the policy changed: another upstream proxy")
		return false
	}
	c.judged.Store(p)
	return true
}

func text(u *url.URL) string {
	if u == nil {
		return ""
	}
	return u.String()
}

func (c *conn) record(name, kind string, j judgement, info flowInfo, end time.Time) Record {
	r := Record{
		ID: c.s.ids.Add(1), Slot: c.id, Client: c.client, Name: name, Addr: c.dst.Addr(), Port: c.dst.Port(),
		Kind: kind, ECH: info.ech, Upstream: c.upstream != nil,
		Allowed: j.allowed, Inspected: j.allowed && j.inspect && kind == KindTLS, Rule: j.rule, Reason: j.reason, Start: time.Now(), End: end,
	}
	if name == "" {
		r.Name = info.hint
	}
	return r
}

func (c *conn) log(r Record) { c.s.o.Log(r) }

// records are the flows with their bytes so far.
func (c *conn) records() []Record {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := make([]Record, 0, len(c.flows))
	for _, f := range c.flows {
		r := f.rec
		r.Sent, r.Received = f.sent.Load(), f.received.Load()
		out = append(out, r)
	}
	return out
}

// manner of a refusal.
type manner int

const (
	hard manner = iota // TCP reset
	soft               // TLS alert
	none               // whoever asks will answer
)

// refuse logs and refuses a connection that was not judged by name.
func (c *conn) refuse(name, kind, rule, reason string, m manner) (why string) {
	c.log(c.record(name, kind, judgement{rule: rule, reason: reason}, flowInfo{}, time.Now()))
	return c.refused(judgement{}, m)
}

// refused refuses a connection that admit has logged.
func (c *conn) refused(_ judgement, m manner) (why string) {
	switch m {
	case soft:
		c.alert()
	case hard:
		reset(c.tcp)
	}
	return ""
}

// alert says "access denied" in TLS (RFC 8446, section 6.2), which clients show to
// their users, and waits a little for the client to end, for a reset would overtake
// it.
func (c *conn) alert() {
	_ = c.tcp.SetDeadline(time.Now().Add(time.Second))
	if _, err := c.tcp.Write([]byte{21, 3, 3, 0, 2, 2, 49}); err != nil {
		return
	}
	if closeWrite(c.tcp) == nil {
		_, _ = io.CopyN(io.Discard, c.tcp, 64<<10)
	}
}

// dial connects to where the connection was going. The conn closes it at its end.
func (c *conn) dial() (net.Conn, error) {
	ctx, cancel := context.WithTimeout(c.ctx, c.s.o.DialTimeout)
	defer cancel()
	var nc net.Conn
	var err error
	if c.upstream != nil {
		nc, err = c.dialUpstream(ctx)
	} else {
		nc, err = c.s.o.Dial(ctx, c.slot, c.dst)
	}
	if err != nil {
		return nil, err
	}
	if t, ok := nc.(*net.TCPConn); ok {
		_ = t.SetKeepAliveConfig(keepAlive)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended || c.cut {
		_ = nc.Close()
		return nil, sandbox.Unavailable.Errorf("connection is over")
	}
	if len(c.servers) >= maxServers {
		_ = nc.Close()
		return nil, sandbox.Exhausted.Errorf("too many connections to servers for one from a sandbox")
	}
	c.servers[nc] = struct{}{}
	return nc, nil
}

// drop closes a connection of ours.
func (c *conn) drop(nc net.Conn) {
	c.mu.Lock()
	delete(c.servers, nc)
	c.mu.Unlock()
	_ = nc.Close()
}

// abort resets both sides. Whoever serves the connection then finishes it.
func (c *conn) abort(why string) {
	c.mu.Lock()
	if c.ended || c.cut {
		c.mu.Unlock()
		return
	}
	c.cut, c.why = true, why
	servers := c.servers
	c.servers = map[net.Conn]struct{}{}
	c.mu.Unlock()
	c.cancel()
	reset(c.tcp)
	for nc := range servers {
		if p, ok := nc.(*prefixed); ok {
			nc = p.Conn
		}
		reset(nc)
	}
}

// finish ends the connection and everything that belongs to it, once.
func (c *conn) finish(why string) {
	c.mu.Lock()
	if c.ended {
		c.mu.Unlock()
		return
	}
	c.ended = true
	if !c.cut {
		c.why = why
	}
	why = c.why
	servers := c.servers
	c.servers = nil
	c.mu.Unlock()
	c.cancel()
	_ = c.tcp.Close()
	for nc := range servers {
		_ = nc.Close()
	}
	if c.web != nil {
		c.web.transport.CloseIdleConnections()
	}
	now := time.Now()
	for _, r := range c.records() {
		r.End, r.Reason = now, why
		c.log(r)
	}
	c.small()
	c.s.remove(c)
}

// small says that no large hello is held any more.
func (c *conn) small() {
	if c.large {
		c.large = false
		c.s.giveLarge(c.id)
	}
}
