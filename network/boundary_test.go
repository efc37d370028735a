package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"vivarium/network/policy"

	"vivarium/sandbox"
)

// layers are the ways in which the defences are taken apart: each must hold
// alone. The network is closed first, so that nobody repairs it meanwhile.
var layers = []struct {
	name                  string
	router, routes, hostT bool // which stay
}{
	{"all", true, true, true},
	{"router rules alone", true, false, false},
	{"routes alone", false, true, false},
	{"host rules alone", false, false, true},
}

func (l *lab) breakLayers(n *Network, router, routes, hostT bool) {
	l.t.Helper()
	uplink := n.up0.Attrs().Index
	name, gw := n.hostTable(), n.hostAddr()
	rp := enterPlace(l.t, n.routerPath())
	n.Close()
	if !router {
		delTable(l.t, rp.nsThread, routerTable)
		// Without it no packet of a slot has a route at all (TestC18NoTables); here
		// the routes are to show what they hold back by themselves. Answers, too, are
		// without the mark that goes with the table.
		r := netlink.NewRule()
		r.Family, r.Priority, r.Table = netlink.FAMILY_V4, 31, slotRoutes
		must(l.t, rp.h.RuleAdd(r))
	}
	if !hostT {
		delTable(l.t, l.host.nsThread, name)
	}
	if !routes {
		rs, err := rp.h.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: slotRoutes}, netlink.RT_FILTER_TABLE)
		must(l.t, err)
		for _, r := range rs {
			must(l.t, rp.h.RouteDel(&r))
		}
		// Slots would now use the main table, with its routes to each other.
		r := netlink.NewRule()
		r.Family, r.Priority, r.Table = netlink.FAMILY_V4, 29, unix.RT_TABLE_MAIN
		must(l.t, rp.h.RuleAdd(r))
		must(l.t, rp.h.RouteReplace(&netlink.Route{LinkIndex: uplink, Gw: gw.AsSlice(), Dst: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}}))
	}
}

func delTable(t testing.TB, th *nsThread, name string) {
	t.Helper()
	must(t, th.nft(func(c *nftables.Conn) error {
		c.DelTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: name})
		return nil
	}))
}

// TestC1SpecialRanges sends to every special-purpose range, the metadata
// address, and the host's own addresses, through each layer alone. Judges are
// taps outside and sockets on the host, none of which may see anything but the
// marker packets.
func TestC1SpecialRanges(t *testing.T) {
	for _, la := range layers {
		t.Run(la.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			hostUDP := l.host.listenUDP(t, "0.0.0.0:9000")
			n := l.open()
			_, in := l.acquire(n, sandbox.NetworkPublic)
			hostAddr := n.hostAddr()
			l.breakLayers(n, la.router, la.routes, la.hostT)

			var targets []string
			for _, p := range special {
				r := mergeRanges([]netip.Prefix{p})[0]
				for _, u := range []uint32{r.lo + 1, r.lo + (r.hi-r.lo)/2, r.hi - 1} {
					targets = append(targets, addrOf(u).String())
				}
			}
			targets = append(targets, "169.254.169.254", "10.0.0.2", "10.0.0.53", "172.16.5.5", "192.168.7.7",
				"100.64.0.9", "203.0.113.80", "255.255.255.255", "5.5.5.2", "10.0.0.1", "127.0.0.1", hostAddr.String())
			outside, inside := l.internet.tap(t, "eth0"), l.private.tap(t, "eth0")
			for _, a := range targets {
				for _, port := range []int{53, 80, 9000} {
					in.sendUDP(fmt.Sprintf("%s:%d", a, port))
				}
				in.ping(a)
			}
			in.sendUDP("8.8.8.8:9")
			if got := outside.until(t, toAddr("8.8.8.8")); len(got) != 0 {
				t.Errorf("reached the outside: %v", got)
			}
			l.host.sendUDP("10.0.0.2:9")
			if got := inside.until(t, toAddr("10.0.0.2")); len(got) != 0 {
				t.Errorf("reached the private network: %v", got)
			}
			if from := hostUDP(); from != "" {
				t.Errorf("reached a port of the host, from %s", from)
			}
		})
	}
}

// TestC1TCP dials what really listens, so that a pass is not for want of a server.
func TestC1TCP(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	meta := l.private.serve(t, "169.254.169.254:80")
	priv := l.private.serve(t, "10.0.0.2:443")
	host := l.host.serve(t, "0.0.0.0:2222")
	lo := l.host.serve(t, "127.0.0.1:3333")
	web := l.internet.serve(t, "8.8.8.8:80")
	n := l.open()
	_, in := l.acquire(n, sandbox.NetworkPublic)
	for _, a := range []string{"169.254.169.254:80", "10.0.0.2:443", "5.5.5.2:2222", "10.0.0.1:2222", n.hostAddr().String() + ":2222", "127.0.0.1:3333", "127.0.0.1:2222"} {
		if c, err := in.dial("tcp", a, 200*time.Millisecond); err == nil {
			c.Close()
			t.Errorf("connected to %s", a)
		}
	}
	for name, s := range map[string]*served{"metadata": meta, "private": priv, "host": host, "host loopback": lo} {
		if s.hits() != 0 {
			t.Errorf("%s was reached", name)
		}
	}
	// The same servers answer the host, and the slot reaches what it may.
	for _, a := range []string{"169.254.169.254:80", "10.0.0.2:443", "5.5.5.2:2222", "127.0.0.1:3333"} {
		c, err := l.host.dial("tcp", a, 5*time.Second)
		must(t, err)
		c.Close()
	}
	c, err := in.dial("tcp", "8.8.8.8:80", 5*time.Second)
	must(t, err)
	defer c.Close()
	if _, err := c.Read(make([]byte, 64)); err != nil || web.hits() != 1 {
		t.Error("public server was not reached")
	}
}

func TestC1Grants(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for _, a := range []string{"203.0.113.80:80", "203.0.113.80:81", "192.168.7.7:80"} {
		l.internet.serve(t, a)
	}
	l.private.serve(t, "172.16.5.5:80")
	l.private.serve(t, "100.64.0.9:80")
	for _, a := range []string{"10.0.0.1:7001", "10.0.0.1:7002", "5.5.5.2:7001"} {
		l.host.serve(t, a)
	}
	l.opts.Grants = []policy.Grant{
		{Prefix: netip.MustParsePrefix("203.0.113.80/32"), Ports: []uint16{80, 443}},
		{Prefix: netip.MustParsePrefix("172.16.0.0/12")},
		{Prefix: netip.MustParsePrefix("100.64.0.0/10")},
		{Prefix: netip.MustParsePrefix("10.0.0.1/32"), Ports: []uint16{7001}}, // of the host itself
		{Prefix: netip.MustParsePrefix("10.0.0.0/8"), Ports: []uint16{7002}},  // wide: not the host itself
	}
	l.opts.Deny = []netip.Prefix{netip.MustParsePrefix("100.64.0.0/16"), netip.MustParsePrefix("1.2.3.0/24")}
	l.internet.serve(t, "1.2.3.4:80")
	n := l.open()
	_, in := l.acquire(n, sandbox.NetworkPublic)
	for a, want := range map[string]bool{
		"203.0.113.80:80": true, "203.0.113.80:81": false, "172.16.5.5:80": true, "192.168.7.7:80": false,
		"10.0.0.1:7001": true, "10.0.0.1:7002": false, "5.5.5.2:7001": false,
		"100.64.0.9:80": false, // granted but denied
		"1.2.3.4:80":    false, // public but denied
	} {
		timeout := 200 * time.Millisecond
		if want {
			timeout = 5 * time.Second
		}
		c, err := in.dial("tcp", a, timeout)
		if err == nil {
			c.Close()
		}
		if (err == nil) != want {
			t.Errorf("%s: reached %v, want %v (%v)", a, err == nil, want, err)
		}
	}
}

// TestC2IPv6 tries IPv6 from a slot that turns it on again and writes raw
// frames, and IPv4-mapped addresses.
func TestC2IPv6(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	n := l.open()
	s, in := l.acquire(n, sandbox.NetworkPublic)
	v6host := rawSocket(t, l.host, n.uplinkName(), unix.ETH_P_IPV6)
	v6out := rawSocket(t, l.internet, "eth0", unix.ETH_P_IPV6)
	inside, outside := l.private.tap(t, "eth0"), l.internet.tap(t, "eth0")

	rmac := net.HardwareAddr{0x06, 0x76, s.MAC[2], s.MAC[3], s.MAC[4], s.MAC[5]}
	frame := append(append(append([]byte{}, rmac...), s.MAC...), 0x86, 0xdd)
	ip6 := make([]byte, 40+8)
	ip6[0], ip6[6], ip6[7] = 0x60, 17, 64
	binary.BigEndian.PutUint16(ip6[4:], 8)
	copy(ip6[8:], net.ParseIP("2001:db8::2"))
	copy(ip6[24:], net.ParseIP("fd00:ec2::254"))
	in.sendFrame(t, append(frame, ip6...))
	copy(ip6[24:], net.ParseIP("2606:4700::1111"))
	in.sendFrame(t, append(frame, ip6...))
	in.sendUDP("[::ffff:10.0.0.2]:80")
	in.sendUDP("[::ffff:169.254.169.254]:80")
	in.sendUDP("[::ffff:a00:2]:80")
	in.sendUDP("[::ffff:8.8.8.8]:9") // public: mapped works as IPv4

	if got := outside.until(t, toAddr("8.8.8.8")); len(got) != 0 {
		t.Errorf("reached the outside: %v", got)
	}
	l.host.sendUDP("10.0.0.2:9")
	if got := inside.until(t, toAddr("10.0.0.2")); len(got) != 0 {
		t.Errorf("reached the private network: %v", got)
	}
	for name, fd := range map[string]int{"host": v6host, "internet": v6out} {
		b := make([]byte, 2048)
		for {
			k, _, err := unix.Recvfrom(fd, b, unix.MSG_DONTWAIT)
			if err != nil {
				break
			}
			if k >= 40 && slices.Equal(b[8:24], net.ParseIP("2001:db8::2").To16()) {
				t.Errorf("an IPv6 packet of the slot reached the %s", name)
			}
		}
	}
	if v, err := os.ReadFile("/proc/sys/net/ipv6/conf/all/disable_ipv6"); err == nil && len(v) > 0 {
		for name, p := range map[string]*place{"slot": in, "router": {"", n.router}} {
			must(t, p.do(func() error {
				if v, err := getSysctl("ipv6/conf/all/disable_ipv6"); err != nil || v != "1" {
					t.Errorf("IPv6 in the %s: disable_ipv6 is %q, %v", name, v, err)
				}
				return nil
			}))
		}
	}
}

// TestC14Neighbours tries to reach one slot from another, by its address and
// with spoofed sources and ARP, through rules alone and routes alone.
func TestC14Neighbours(t *testing.T) {
	for _, la := range layers[:3] {
		t.Run(la.name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			n := l.open()
			sa, a := l.acquire(n, sandbox.NetworkPublic)
			sb, b := l.acquire(n, sandbox.NetworkPublic)
			udp := b.listenUDP(t, "0.0.0.0:9000")
			tapB, outside := b.tap(t, "eth0"), l.internet.tap(t, "eth0")
			router := enterPlace(t, n.routerPath())
			l.breakLayers(n, la.router, la.routes, la.hostT)

			a.sendUDP(netip.AddrPortFrom(sb.Addr, 9000).String())
			a.ping(sb.Addr.String())
			for _, src := range []netip.Addr{sb.Addr, sb.Gateway, n.dnsAddr(), n.hostAddr(), netip.MustParseAddr("8.8.4.4"), netip.MustParseAddr("127.0.0.1")} {
				a.sendRaw(t, sa, src, netip.MustParseAddr("8.8.8.8"))
				a.sendRaw(t, sa, src, sb.Addr)
			}
			// Claim the neighbour's and the gateway's addresses.
			mac := sa.MAC
			for _, claim := range []netip.Addr{sb.Addr, sb.Gateway, sa.Gateway, n.routerAddr()} {
				a.sendFrame(t, arpFrame(mac, 2, claim, sa.Gateway))
				a.sendFrame(t, arpFrame(mac, 1, claim, claim))
			}
			a.sendUDP("8.8.8.8:9")
			if got := outside.until(t, fromAndTo(l, "8.8.8.8", la.hostT, sa.Addr)); len(got) != 0 {
				t.Errorf("spoofed packets reached the outside: %v", got)
			}
			if from := udp(); from != "" {
				t.Errorf("the neighbour was reached from %s", from)
			}
			// The neighbour's own traffic is the marker: its reply comes back,
			// so the ARP claims changed nothing.
			web := l.internet.serve(t, "8.8.8.8:81")
			if la.hostT {
				c, err := b.dial("tcp", "8.8.8.8:81", 5*time.Second)
				must(t, err)
				defer c.Close()
				if _, err := c.Read(make([]byte, 64)); err != nil || web.hits() != 1 {
					t.Error("the neighbour lost its network")
				}
				got := tapB.until(t, func(ip []byte) bool { return ip[9] == unix.IPPROTO_TCP })
				if len(got) != 0 {
					t.Errorf("packets arrived at the neighbour: %v", got)
				}
			}
			neighs, err := router.h.NeighList(0, netlink.FAMILY_V4)
			must(t, err)
			for _, ne := range neighs {
				if ip, _ := netip.AddrFromSlice(ne.IP.To4()); ip == sb.Addr && !slices.Equal(ne.HardwareAddr, sb.MAC) {
					t.Errorf("the neighbour's entry is now %s", ne.HardwareAddr)
				}
			}
		})
	}
}

// fromAndTo matches the marker packet to dst, which must carry a true source.
func fromAndTo(l *lab, dst string, masked bool, slot netip.Addr) func([]byte) bool {
	want := slot.As4()
	if masked {
		want = [4]byte{5, 5, 5, 2}
	}
	to := toAddr(dst)
	return func(ip []byte) bool {
		return to(ip) && [4]byte(ip[12:16]) == want && ip[9] == unix.IPPROTO_UDP && binary.BigEndian.Uint16(ip[22:]) == 9
	}
}

// TestC14ARP asks the router for addresses that are not the slot's business.
func TestC14ARP(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	n := l.open()
	sa, a := l.acquire(n, sandbox.NetworkPublic)
	sb, _ := l.acquire(n, sandbox.NetworkPublic)
	fd := rawSocket(t, a, "eth0", unix.ETH_P_ARP)
	for _, who := range []netip.Addr{sb.Addr, sb.Gateway, n.routerAddr(), n.dnsAddr(), n.hostAddr(), netip.MustParseAddr("10.0.0.1"), sa.Gateway} {
		a.sendFrame(t, arpFrame(sa.MAC, 1, sa.Addr, who))
	}
	unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5})
	buf := make([]byte, 128)
	for {
		k, from, err := unix.Recvfrom(fd, buf, 0)
		must(t, err)
		if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype == unix.PACKET_OUTGOING || k < 28 {
			continue
		}
		who, _ := netip.AddrFromSlice(buf[14:18])
		if who == sa.Gateway {
			return // asked for last, and the only one to be answered
		}
		t.Errorf("the router answers for %s", who)
	}
}

// TestC15RouterPorts dials ports of the router and of the host's end of the
// uplink, where something listens, and an abstract socket of the host.
func TestC15RouterPorts(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	n := l.open()
	s, in := l.acquire(n, sandbox.NetworkPublic)
	router := enterPlace(t, n.routerPath())
	rs := router.serve(t, "0.0.0.0:7000")
	hs := l.host.serve(t, "0.0.0.0:7000")
	var abstract net.Listener
	must(t, l.host.do(func() (err error) { abstract, err = net.Listen("unix", "@vivtest-"+l.opts.Instance); return }))
	defer abstract.Close()
	for _, a := range []netip.Addr{s.Gateway, s.DNS, n.routerAddr(), n.hostAddr(), netip.MustParseAddr("5.5.5.2")} {
		if c, err := in.dial("tcp", netip.AddrPortFrom(a, 7000).String(), 150*time.Millisecond); err == nil {
			c.Close()
			t.Errorf("connected to %s", a)
		}
		in.sendUDP(netip.AddrPortFrom(a, 7000).String())
	}
	if rs.hits()+hs.hits() != 0 {
		t.Errorf("router reached %d times, host %d times", rs.hits(), hs.hits())
	}
	if c, err := in.dial("unix", "@vivtest-"+l.opts.Instance, time.Second); err == nil {
		c.Close()
		t.Error("connected to an abstract socket of the host")
	}
	// Nor can the host's users reach into the slot.
	ss := in.serve(t, "0.0.0.0:7000")
	if c, err := l.host.dial("tcp", netip.AddrPortFrom(s.Addr, 7000).String(), 150*time.Millisecond); err == nil {
		c.Close()
		t.Error("the host connected to the slot")
	}
	if ss.hits() != 0 {
		t.Error("the slot was reached from the host")
	}
}

// TestC16Inbound sends from outside to a slot's address and to the host for others.
func TestC16Inbound(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	n := l.open()
	s, in := l.acquire(n, sandbox.NetworkPublic)
	udp := in.listenUDP(t, "0.0.0.0:9000")
	inside := l.private.tap(t, "eth0")
	// The host forwards from eth0 for our sake; nobody else may use that.
	l.internet.sendUDP(netip.AddrPortFrom(s.Addr, 9000).String())
	l.internet.sendUDP("10.0.0.2:80")
	l.internet.sendUDP("172.16.5.5:80")
	l.host.sendUDP("10.0.0.2:9")
	got := inside.until(t, func(ip []byte) bool { return toAddr("10.0.0.2")(ip) && binary.BigEndian.Uint16(ip[22:]) == 9 })
	if len(got) != 0 {
		t.Errorf("the host became a router for others: %v", got)
	}
	if from := udp(); from != "" {
		t.Errorf("the slot was reached from %s", from)
	}
}

func TestNoneReachesNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	r := l.private.resolver(t, "10.0.0.53:53", nil)
	n := l.open()
	s, in := l.acquire(n, sandbox.NetworkNone)
	_, other := l.acquire(n, sandbox.NetworkPublic)
	outside := l.internet.tap(t, "eth0")
	in.sendUDP("8.8.8.8:7")
	in.ping("8.8.8.8")
	q := []byte{0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 'x', 0, 0, 1, 0, 1}
	in.sendUDPData(netip.AddrPortFrom(s.DNS, 53).String(), q)
	other.sendUDP("8.8.8.8:9")
	if got := outside.until(t, toAddr("8.8.8.8")); len(got) != 0 {
		t.Errorf("reached the outside: %v", got)
	}
	if r.hits() != 0 || n.dns.dropped.Load() != 0 {
		t.Error("a DNS query got through")
	}
}

// TestRefusalIsQuick: what is denied fails at once, not after a timeout.
func TestRefusalIsQuick(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.opts.Grants = []policy.Grant{{Prefix: netip.MustParsePrefix("203.0.113.80/32"), Ports: []uint16{80}}}
	n := l.open()
	s, pub := l.acquire(n, sandbox.NetworkPublic)
	none, closed := l.acquire(n, sandbox.NetworkNone)
	for a, p := range map[string]*place{
		"169.254.169.254:80": pub, "10.0.0.2:443": pub, "5.5.5.2:22": pub, "203.0.113.80:81": pub,
		netip.AddrPortFrom(none.Addr, 1).String(): pub, netip.AddrPortFrom(s.Gateway, 22).String(): pub,
		netip.AddrPortFrom(s.DNS, 22).String(): pub,
		"8.8.8.8:80":                           closed, "10.0.0.2:80": closed,
		netip.AddrPortFrom(none.DNS, 53).String(): closed,
	} {
		if c, err := p.dial("tcp", a, 30*time.Second); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("TCP to %s: %v", a, err)
			if err == nil {
				c.Close()
			}
		}
		c, err := p.dial("udp", a, time.Second)
		must(t, err)
		c.Write([]byte("x"))
		c.SetReadDeadline(time.Now().Add(30 * time.Second))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("UDP to %s: %v", a, err)
		}
		c.Close()
	}
}

// Attackers' tools. Errors in sending are the defence at work, not the test's.

func (p *place) sendUDP(addr string) { p.sendUDPData(addr, []byte("attack")) }

func (p *place) sendUDPData(addr string, b []byte) {
	p.do(func() error {
		c, err := net.Dial("udp", addr)
		if err != nil {
			return err
		}
		defer c.Close()
		// Broadcast needs to be asked for.
		if rc, err := c.(*net.UDPConn).SyscallConn(); err == nil {
			rc.Control(func(fd uintptr) { unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_BROADCAST, 1) })
		}
		_, err = c.Write(b)
		return err
	})
}

func (p *place) ping(addr string) {
	p.do(func() error {
		c, err := net.Dial("ip4:icmp", addr)
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.Write([]byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0})
		return err
	})
}

// listenUDP returns a function that tells who has sent something until now.
func (p *place) listenUDP(t testing.TB, addr string) func() string {
	t.Helper()
	var pc net.PacketConn
	must(t, p.do(func() (err error) { pc, err = net.ListenPacket("udp4", addr); return }))
	t.Cleanup(func() { pc.Close() })
	return func() string {
		pc.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
		b := make([]byte, 64)
		_, a, err := pc.ReadFrom(b)
		if err != nil {
			return ""
		}
		return a.String()
	}
}

// sendRaw writes a whole frame to the router, whatever the slot's kernel thinks
// of the source: a UDP packet from src to dst, port 9.
func (p *place) sendRaw(t testing.TB, s *Slot, src, dst netip.Addr) {
	t.Helper()
	ip := make([]byte, 28)
	ip[0], ip[8], ip[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(ip[2:], 28)
	copy(ip[12:], src.AsSlice())
	copy(ip[16:], dst.AsSlice())
	sum := uint32(0)
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	sum = sum&0xffff + sum>>16
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum&0xffff+sum>>16))
	binary.BigEndian.PutUint16(ip[20:], 4000)
	binary.BigEndian.PutUint16(ip[22:], 9000)
	binary.BigEndian.PutUint16(ip[24:], 8)
	rmac := []byte{0x06, 0x76, s.MAC[2], s.MAC[3], s.MAC[4], s.MAC[5]}
	p.sendFrame(t, append(append(append(rmac, s.MAC...), 0x08, 0x00), ip...))
}

func (p *place) sendFrame(t testing.TB, frame []byte) {
	t.Helper()
	must(t, p.do(func() error {
		l, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: l.Index, Halen: 6})
	}))
}

// arpFrame asks (op 1) for target, or claims (op 2) sender, by broadcast.
func arpFrame(mac net.HardwareAddr, op byte, sender, target netip.Addr) []byte {
	f := []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	f = append(f, mac...)
	f = append(f, 0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, op)
	f = append(f, mac...)
	f = append(f, sender.AsSlice()...)
	f = append(f, 0, 0, 0, 0, 0, 0)
	return append(f, target.AsSlice()...)
}

func rawSocket(t testing.TB, p *place, ifc string, proto int) int {
	t.Helper()
	var fd int
	be := proto>>8&0xff | proto&0xff<<8
	must(t, p.do(func() error {
		l, err := net.InterfaceByName(ifc)
		if err != nil {
			return err
		}
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, be); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: uint16(be), Ifindex: l.Index})
	}))
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}
