package conformance

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// place is a network namespace of the test's own. Nothing names it: it goes with
// the last descriptor and process.
type place struct {
	name string
	ns   *os.File
	h    *netlink.Handle
}

func newPlace(t testing.TB, name string) *place {
	t.Helper()
	type made struct {
		ns  *os.File
		err error
	}
	c := make(chan made, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := unix.Unshare(unix.CLONE_NEWNET)
		if err != nil {
			c <- made{nil, err}
			return
		}
		f, err := os.Open("/proc/thread-self/ns/net")
		c <- made{f, err}
	}()
	m := <-c
	ok(t, m.err)
	p := enter(t, name, m.ns)
	lo, err := p.h.LinkByName("lo")
	ok(t, err)
	ok(t, p.h.LinkSetUp(lo))
	return p
}

func enter(t testing.TB, name string, ns *os.File) *place {
	t.Helper()
	p := &place{name: name, ns: ns}
	t.Cleanup(func() { ns.Close() })
	ok(t, p.in(func() (err error) { p.h, err = netlink.NewHandle(unix.NETLINK_ROUTE); return }))
	t.Cleanup(p.h.Close)
	return p
}

// placeAt is the network namespace that is bound to a path.
func placeAt(t testing.TB, path string) *place {
	t.Helper()
	f, err := os.Open(path)
	ok(t, err)
	return enter(t, path, f)
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// in calls f on a thread in p. Sockets and processes that it makes stay in p.
func (p *place) in(f func() error) error {
	errc := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked, as above
		err := unix.Setns(int(p.ns.Fd()), unix.CLONE_NEWNET)
		if err == nil {
			err = f()
		}
		errc <- err
	}()
	return <-errc
}

// join connects two places by a veth.
func join(t testing.TB, a *place, an string, aaddr []string, b *place, bn string, baddr []string) {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = an, 1400
	ok(t, a.h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: bn, PeerNamespace: netlink.NsFd(b.ns.Fd())}))
	for _, e := range []struct {
		p     *place
		name  string
		addrs []string
	}{{a, an, aaddr}, {b, bn, baddr}} {
		for _, x := range e.addrs {
			e.p.addr(t, e.name, x)
		}
		l, err := e.p.h.LinkByName(e.name)
		ok(t, err)
		ok(t, e.p.h.LinkSetUp(l))
	}
}

func (p *place) addr(t testing.TB, link, cidr string) {
	t.Helper()
	l, err := p.h.LinkByName(link)
	ok(t, err)
	a, err := netlink.ParseAddr(cidr)
	ok(t, err)
	a.Flags |= unix.IFA_F_NODAD
	ok(t, p.h.AddrAdd(l, a))
}

func (p *place) route(t testing.TB, dst, via string) {
	t.Helper()
	_, n, err := net.ParseCIDR(dst)
	ok(t, err)
	ok(t, p.h.RouteAdd(&netlink.Route{Dst: n, Gw: net.ParseIP(via)}))
}

func (p *place) sysctl(t testing.TB, name, value string) {
	t.Helper()
	ok(t, p.in(func() error { return os.WriteFile("/proc/sys/net/"+name, []byte(value), 0) }))
}

// count reads a number below /proc/sys/net as p has it.
func (p *place) count(t testing.TB, name string) (n int) {
	t.Helper()
	ok(t, p.in(func() error {
		b, err := os.ReadFile("/proc/sys/net/" + name)
		if err == nil {
			_, err = fmt.Sscan(string(b), &n)
		}
		return err
	}))
	return n
}

func (p *place) dial(network, addr string) (c net.Conn, err error) {
	err = p.in(func() (err error) { c, err = net.DialTimeout(network, addr, 2*time.Second); return })
	return c, err
}

func (p *place) listen(t testing.TB, addr string) (ln net.Listener) {
	t.Helper()
	ok(t, p.in(func() (err error) { ln, err = net.Listen("tcp", addr); return }))
	t.Cleanup(func() { ln.Close() })
	return ln
}

func (p *place) listenUDP(t testing.TB, addr string) (pc net.PacketConn) {
	t.Helper()
	ok(t, p.in(func() (err error) { pc, err = net.ListenPacket("udp", addr); return }))
	t.Cleanup(func() { pc.Close() })
	return pc
}

// packet is what a judge notes of a frame that arrived.
type packet struct {
	ether    uint16 // EtherType
	src, dst netip.Addr
	proto    uint8
	port     uint16 // destination's, of TCP and UDP
	srcMAC   string
}

func (p packet) String() string {
	return fmt.Sprintf("%04x %v > %v protocol %d port %d from %s", p.ether, p.src, p.dst, p.proto, p.port, p.srcMAC)
}

// tap notes every frame that arrives at an interface: the judge of what must not.
type tap struct {
	fd      int
	ended   chan struct{}
	mu      sync.Mutex
	packets map[packet]int
}

// maxSeen bounds a tap; floods differ in ports, which are the attacker's.
const maxSeen = 200_000

func (p *place) tap(t testing.TB, ifc string) *tap {
	t.Helper()
	tp := &tap{ended: make(chan struct{}), packets: map[packet]int{}}
	ok(t, p.in(func() error {
		l, err := net.InterfaceByName(ifc)
		if err != nil {
			return err
		}
		const all = unix.ETH_P_ALL << 8 // network byte order
		if tp.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all); err != nil {
			return err
		}
		_ = unix.SetsockoptInt(tp.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20)
		if err := unix.SetsockoptTimeval(tp.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}); err != nil {
			return err
		}
		return unix.Bind(tp.fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: l.Index})
	}))
	stop := make(chan struct{})
	go func() {
		defer close(tp.ended)
		b := make([]byte, 128)
		for {
			n, from, err := unix.Recvfrom(tp.fd, b, 0)
			if err != nil {
				select {
				case <-stop:
					return
				default:
				}
				if err == unix.EAGAIN || err == unix.EINTR {
					continue
				}
				return // the interface is gone
			}
			if ll, isLL := from.(*unix.SockaddrLinklayer); isLL && ll.Pkttype != unix.PACKET_OUTGOING && n >= 14 {
				tp.note(b[:n])
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		<-tp.ended
		if st, err := unix.GetsockoptTpacketStats(tp.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS); err != nil || st.Drops > 0 {
			t.Errorf("the tap on %s %s did not see everything: %+v, %v", p.name, ifc, st, err)
		}
		unix.Close(tp.fd)
	})
	return tp
}

func (tp *tap) note(b []byte) {
	p := packet{ether: binary.BigEndian.Uint16(b[12:]), srcMAC: net.HardwareAddr(b[6:12]).String()}
	b = b[14:]
	head := 0
	switch {
	case p.ether == unix.ETH_P_IP && len(b) >= 20:
		p.src, _ = netip.AddrFromSlice(b[12:16])
		p.dst, _ = netip.AddrFromSlice(b[16:20])
		p.proto, head = b[9], int(b[0]&15)*4
	case p.ether == unix.ETH_P_IPV6 && len(b) >= 40:
		p.src, _ = netip.AddrFromSlice(b[8:24])
		p.dst, _ = netip.AddrFromSlice(b[24:40])
		p.proto, head = b[6], 40
	}
	if (p.proto == unix.IPPROTO_TCP || p.proto == unix.IPPROTO_UDP) && head > 0 && len(b) >= head+4 {
		p.port = binary.BigEndian.Uint16(b[head+2:])
	}
	tp.mu.Lock()
	defer tp.mu.Unlock()
	if len(tp.packets) < maxSeen || tp.packets[p] > 0 {
		tp.packets[p]++
	}
}

// seen are the packets so far for which like holds.
func (tp *tap) seen(like func(packet) bool) (out []packet) {
	tp.mu.Lock()
	defer tp.mu.Unlock()
	for p := range tp.packets {
		if like(p) {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b packet) int { return strings.Compare(a.String(), b.String()) })
	return out
}

// saw is whether a packet for addr arrived.
func (tp *tap) saw(addr string) bool {
	a := netip.MustParseAddr(addr)
	return len(tp.seen(func(p packet) bool { return p.dst == a })) > 0
}
