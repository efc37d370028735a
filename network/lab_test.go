package network

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

// A lab is a host with its surroundings, all in network namespaces of the
// test's own. No packet can leave it: none of them has a way to the real one.
//
//	slots - router - host - eth0 5.5.5.2 ---- internet: 5.5.5.1, 8.8.8.8, 203.0.113.80, ...
//	                   \--- eth1 10.0.0.1 --- private: 10.0.0.2, 169.254.169.254, resolver 10.0.0.53
type lab struct {
	t        testing.TB
	dir      string
	host     *place
	internet *place
	private  *place
	opts     Options
}

// A place is a network namespace and a thread in it.
type place struct {
	path string
	*nsThread
}

func newPlace(t testing.TB, dir, name string) *place {
	t.Helper()
	path := filepath.Join(dir, name)
	must(t, newNetns(path, func(*os.File) error { return nil }))
	t.Cleanup(func() { must(t, dropNetns(path)) })
	return enterPlace(t, path)
}

func enterPlace(t testing.TB, path string) *place {
	t.Helper()
	f, err := nsFile(path)
	must(t, err)
	th, err := startThread(f)
	must(t, err)
	f.Close()
	t.Cleanup(th.stop)
	p := &place{path, th}
	lo, err := th.h.LinkByName("lo")
	must(t, err)
	must(t, th.h.LinkSetUp(lo))
	return p
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// join connects two places by a veth with addresses.
func join(t testing.TB, a *place, an, aaddr string, b *place, bn, baddr string) {
	t.Helper()
	f, err := nsFile(b.path)
	must(t, err)
	defer f.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = an, 1400
	must(t, a.h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: bn, PeerNamespace: netlink.NsFd(f.Fd())}))
	for _, e := range []struct {
		p          *place
		name, addr string
	}{{a, an, aaddr}, {b, bn, baddr}} {
		l, err := e.p.h.LinkByName(e.name)
		must(t, err)
		e.p.addr(t, e.name, e.addr)
		must(t, e.p.h.LinkSetUp(l))
	}
}

func (p *place) addr(t testing.TB, link, cidr string) {
	t.Helper()
	l, err := p.h.LinkByName(link)
	must(t, err)
	a, err := netlink.ParseAddr(cidr)
	must(t, err)
	must(t, p.h.AddrAdd(l, a))
}

func (p *place) route(t testing.TB, dst, via string) {
	t.Helper()
	_, n, err := net.ParseCIDR(dst)
	must(t, err)
	must(t, p.h.RouteAdd(&netlink.Route{Dst: n, Gw: net.ParseIP(via)}))
}

func newLab(t testing.TB) *lab {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	l := &lab{t: t, dir: dir}
	l.host, l.internet, l.private = newPlace(t, dir, "host"), newPlace(t, dir, "internet"), newPlace(t, dir, "private")
	join(t, l.host, "eth0", "5.5.5.2/24", l.internet, "eth0", "5.5.5.1/24")
	join(t, l.host, "eth1", "10.0.0.1/24", l.private, "eth0", "10.0.0.2/24")
	for _, a := range []string{"8.8.8.8/32", "1.2.3.4/32", "203.0.113.80/32", "192.168.7.7/32"} {
		l.internet.addr(t, "lo", a)
	}
	for _, a := range []string{"169.254.169.254/32", "10.0.0.53/32", "172.16.5.5/32", "100.64.0.9/32"} {
		l.private.addr(t, "lo", a)
	}
	l.host.route(t, "0.0.0.0/0", "5.5.5.1")
	// The host can reach its private network and metadata service: only our
	// rules stand between them and a slot.
	for _, d := range []string{"169.254.169.254/32", "10.0.0.53/32", "172.16.0.0/12", "100.64.0.0/10"} {
		l.host.route(t, d, "10.0.0.2")
	}
	l.internet.route(t, "0.0.0.0/0", "5.5.5.2") // so that even unmasked replies come back
	l.private.route(t, "0.0.0.0/0", "10.0.0.1")
	b := make([]byte, 3)
	rand.Read(b)
	resolv := filepath.Join(dir, "resolv.conf")
	must(t, os.WriteFile(resolv, []byte("search example\nnameserver 10.0.0.53\n"), 0o600))
	l.opts = Options{Dir: filepath.Join(dir, "data"), Instance: hex.EncodeToString(b), HostNetns: l.host.path, ResolvConf: resolv,
		Logger: slog.New(slog.NewTextHandler(testLog{t}, &slog.HandlerOptions{Level: slog.LevelWarn}))}
	return l
}

type testLog struct{ t testing.TB }

func (w testLog) Write(b []byte) (int, error) {
	w.t.Log(string(b))
	return len(b), nil
}

// open opens the network and destroys it at the end.
func (l *lab) open() *Network {
	l.t.Helper()
	n, err := Open(context.Background(), l.opts)
	must(l.t, err)
	l.t.Cleanup(func() {
		n.Close()
		l.destroy()
	})
	return n
}

// stopWorkers ends what goes on behind, so that the test is alone with n.
func stopWorkers(n *Network) {
	n.cancel()
	<-n.tended
	<-n.watched
	n.ctx, n.cancel = context.WithCancel(context.Background())
}

// destroy removes the network whatever state it is in.
func (l *lab) destroy() {
	l.t.Helper()
	n, err := Open(context.Background(), l.opts)
	must(l.t, err)
	must(l.t, n.Destroy(context.Background()))
}

func (l *lab) acquire(n *Network, m sandbox.NetworkMode) (*Slot, *place) {
	l.t.Helper()
	return l.acquireUnder(n, sandbox.NetworkPolicy{Mode: m})
}

func (l *lab) acquireUnder(n *Network, p sandbox.NetworkPolicy) (*Slot, *place) {
	l.t.Helper()
	s, err := n.Acquire(context.Background(), AcquireOptions{Owner: "owner", Policy: p})
	must(l.t, err)
	return s, enterPlace(l.t, s.NetnsPath)
}

// rules is a policy of rules that read "allow x.com:443".
func rules(t testing.TB, mode sandbox.NetworkMode, texts ...string) sandbox.NetworkPolicy {
	t.Helper()
	p := sandbox.NetworkPolicy{Mode: mode}
	for _, s := range texts {
		action, rest, _ := strings.Cut(s, " ")
		r, err := policy.ParseRule(sandbox.RuleAction(action), rest)
		must(t, err)
		p.Rules = append(p.Rules, r)
	}
	return p
}

// zone is a resolver that knows records such as "x.com. 60 IN A 1.2.3.4", of which
// a test may change the list.
type zone struct {
	*served
	mu      sync.Mutex
	records []string
	asked   []string
}

func (l *lab) zone(records ...string) *zone {
	z := &zone{records: records}
	z.served = l.private.resolver(l.t, "10.0.0.53:53", func(q dns.Question, m *dns.Msg) {
		z.mu.Lock()
		defer z.mu.Unlock()
		name := strings.ToLower(q.Name)
		z.asked = append(z.asked, name)
		m.Rcode = dns.RcodeNameError
		for _, s := range z.records {
			r, err := dns.NewRR(s)
			if err != nil {
				panic(err)
			}
			if strings.ToLower(r.Header().Name) != name {
				continue
			}
			m.Rcode = dns.RcodeSuccess
			if t := r.Header().Rrtype; t == q.Qtype || t == dns.TypeCNAME {
				m.Answer = append(m.Answer, r)
			}
		}
	})
	return z
}

func (z *zone) set(records ...string) {
	z.mu.Lock()
	z.records = records
	z.mu.Unlock()
}

func (z *zone) wasAsked(name string) bool {
	z.mu.Lock()
	defer z.mu.Unlock()
	return slices.Contains(z.asked, name)
}

// resolve asks for a name as a program inside would.
func (p *place) resolve(t testing.TB, s *Slot, name string) []string {
	t.Helper()
	m, err := p.lookup(s, "udp", name, dns.TypeA)
	must(t, err)
	var out []string
	for _, r := range m.Answer {
		if a, ok := r.(*dns.A); ok {
			out = append(out, a.A.String())
		}
	}
	return out
}

// reaches says whether a TCP connection is made and says hello.
func (p *place) reaches(addr string) bool {
	c, err := p.dial("tcp", addr, 3*time.Second)
	if err != nil {
		return false
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(3 * time.Second))
	_, err = bufio.NewReader(c).ReadString('\n')
	return err == nil
}

// in runs f on a thread in p that ends with it, for calls that may block.
func (p *place) in(f func() error) error {
	errc := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked
		ns, err := nsFile(p.path)
		if err == nil {
			defer ns.Close()
			err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
		}
		if err == nil {
			err = f()
		}
		errc <- err
	}()
	return <-errc
}

func (p *place) dial(network, addr string, timeout time.Duration) (c net.Conn, err error) {
	err = p.in(func() (err error) { c, err = net.DialTimeout(network, addr, timeout); return })
	return c, err
}

// serve answers on TCP and UDP at addr with the client's address, and counts.
type served struct {
	mu   sync.Mutex
	from []string
}

func (s *served) hit(a net.Addr) {
	s.mu.Lock()
	s.from = append(s.from, a.String())
	s.mu.Unlock()
}

func (s *served) hits() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.from)
}

func (p *place) serve(t testing.TB, addr string) *served {
	t.Helper()
	s := &served{}
	must(t, p.do(func() error {
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			return err
		}
		pc, err := net.ListenPacket("udp", addr)
		if err != nil {
			return err
		}
		t.Cleanup(func() { ln.Close(); pc.Close() })
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				s.hit(c.RemoteAddr())
				go func() {
					defer c.Close()
					fmt.Fprintf(c, "%s\n", c.RemoteAddr())
					io.Copy(c, c)
				}()
			}
		}()
		go func() {
			b := make([]byte, 2048)
			for {
				k, a, err := pc.ReadFrom(b)
				if err != nil {
					return
				}
				s.hit(a)
				pc.WriteTo(b[:k], a)
			}
		}()
		return nil
	}))
	return s
}

// A tap records the IPv4 packets that arrive at one interface.
type tap struct {
	fd int
}

func (p *place) tap(t testing.TB, ifc string) *tap {
	t.Helper()
	tp := &tap{}
	must(t, p.do(func() error {
		l, err := net.InterfaceByName(ifc)
		if err != nil {
			return err
		}
		const proto = unix.ETH_P_IP>>8&0xff | unix.ETH_P_IP&0xff<<8 // network byte order
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, proto)
		if err != nil {
			return err
		}
		tp.fd = fd
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5})
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: proto, Ifindex: l.Index})
	}))
	t.Cleanup(func() { unix.Close(tp.fd) })
	return tp
}

// until returns the destinations of incoming packets up to the first one for
// which stop holds, which is how a test knows that all earlier ones are in.
func (tp *tap) until(t testing.TB, stop func(ip []byte) bool) (dsts []netip.Addr) {
	t.Helper()
	b := make([]byte, 65536)
	for {
		k, from, err := unix.Recvfrom(tp.fd, b, 0)
		if err != nil {
			t.Fatalf("wait for marker packet: %v", err)
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype == unix.PACKET_OUTGOING || k < 20 {
			continue
		}
		if stop(b[:k]) {
			return dsts
		}
		a, _ := netip.AddrFromSlice(b[16:20])
		dsts = append(dsts, a)
	}
}

func toAddr(a string) func([]byte) bool {
	want := netip.MustParseAddr(a).As4()
	return func(ip []byte) bool { return [4]byte(ip[16:20]) == want }
}

// marker is the datagram that a test sends last: to 8.8.8.8, port 9.
func marker(ip []byte) bool {
	return toAddr("8.8.8.8")(ip) && ip[9] == unix.IPPROTO_UDP && ip[22] == 0 && ip[23] == 9
}

// resolver is an upstream DNS server whose answers a function makes.
func (p *place) resolver(t testing.TB, addr string, h func(q dns.Question, m *dns.Msg)) *served {
	t.Helper()
	s := &served{}
	must(t, p.do(func() error {
		pc, err := net.ListenPacket("udp", addr)
		if err != nil {
			return err
		}
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			return err
		}
		handler := dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
			s.hit(w.RemoteAddr())
			m := new(dns.Msg)
			m.SetReply(r)
			h(r.Question[0], m)
			if w.RemoteAddr().Network() == "udp" {
				m.Truncate(512)
			}
			w.WriteMsg(m)
		})
		for _, srv := range []*dns.Server{{PacketConn: pc, Handler: handler}, {Listener: ln, Handler: handler}} {
			go srv.ActivateAndServe()
		}
		t.Cleanup(func() { pc.Close(); ln.Close() })
		return nil
	}))
	return s
}

// lookup asks the slot's DNS server over network, over UDP up to three times,
// as every stub resolver does: a busy machine may lose a packet.
func (p *place) lookup(s *Slot, network, name string, qtype uint16) (m *dns.Msg, err error) {
	for range 3 {
		if m, err = p.lookupOnce(s, network, name, qtype); err == nil || network != "udp" {
			break
		}
	}
	return m, err
}

func (p *place) lookupOnce(s *Slot, network, name string, qtype uint16) (*dns.Msg, error) {
	c, err := p.dial(network, netip.AddrPortFrom(s.DNS, 53).String(), 2*time.Second)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	m := new(dns.Msg)
	m.SetQuestion(name, qtype)
	m.SetEdns0(1232, false)
	cl := &dns.Client{Net: network, Timeout: 6 * time.Second} // the server takes at most 4
	r, _, err := cl.ExchangeWithConn(m, &dns.Conn{Conn: c})
	return r, err
}
