package network

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// TestC17Cut opens flows directly, through the proxy and of UDP from outside, and
// changes the policy under them: nothing arrives afterwards, on either side.
func TestC17Cut(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone("x.test. 60 IN A 8.8.8.8", "git.test. 60 IN A 1.2.3.4")
	l.internet.serve(t, "8.8.8.8:80")
	l.internet.serve(t, "1.2.3.4:22")
	l.internet.serve(t, "8.8.8.8:7000")
	n := l.open()
	before := rules(t, modeAllow, "allow git.test:22/tcp", "allow 8.8.8.8:7000", "allow x.test:80/tcp", "allow x.test:80")
	s, in := l.acquireUnder(n, before)
	in.resolve(t, s, "x.test.")
	in.resolve(t, s, "git.test.")
	conns := map[string]net.Conn{}
	for _, a := range []string{"1.2.3.4:22", "8.8.8.8:7000", "8.8.8.8:80"} {
		c, err := in.dial("tcp", a, 3*time.Second)
		must(t, err)
		defer c.Close()
		c.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err := bufio.NewReader(c).ReadString('\n'); err != nil {
			t.Fatalf("%s: %v", a, err)
		}
		conns[a] = c
	}
	// UDP, of which the outside sends more and more
	udp, err := in.dial("udp", "8.8.8.8:7000", time.Second)
	must(t, err)
	defer udp.Close()
	udp.Write([]byte("x"))
	udp.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := udp.Read(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	push := l.internet.pusher(t, "8.8.8.8:7000")
	after := rules(t, modeAllow, "allow git.test:22/tcp")
	_, err = n.SetPolicy(context.Background(), s.ID, after)
	must(t, err)
	// From here on only git.test's flow lives.
	out, inside := l.internet.tap(t, "eth0"), in.tap(t, "eth0")
	for a, c := range conns {
		fmt.Fprintf(c, "more for %s\n", a)
	}
	udp.Write([]byte("more"))
	in.sendUDP("8.8.8.8:7000")
	// The outside goes on sending to the flows that it believes open.
	push()
	c := conns["1.2.3.4:22"]
	c.SetDeadline(time.Now().Add(5 * time.Second))
	r := bufio.NewReader(c)
	if line, err := r.ReadString('\n'); err != nil || line != "more for 1.2.3.4:22\n" {
		t.Errorf("the flow that is allowed: %q, %v", line, err)
	}
	l.host.sendUDP("8.8.8.8:9")
	out.until(t, func(ip []byte) bool {
		if !toAddr("8.8.8.8")(ip) || ip[9] == unix.IPPROTO_ICMP { // of the host itself, about what is pushed at it
			return false
		}
		if marker(ip) {
			return true
		}
		t.Errorf("a packet left after the change: protocol %d, %x", ip[9], ip[20:])
		return false
	})
	in.sendUDP("127.0.0.1:9")
	for a, c := range conns {
		if a == "1.2.3.4:22" {
			continue
		}
		c.SetDeadline(time.Now().Add(5 * time.Second))
		if _, err := c.Read(make([]byte, 100)); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("%s was not cut: %v", a, err)
		}
	}
	unix.SetsockoptTimeval(inside.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 300000})
	b := make([]byte, 2048)
	for {
		k, from, err := unix.Recvfrom(inside.fd, b, 0)
		if err != nil {
			break
		}
		if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype == unix.PACKET_OUTGOING || k < 28 {
			continue
		}
		if src, _ := netip.AddrFromSlice(b[12:16]); src == netip.MustParseAddr("8.8.8.8") && b[9] == unix.IPPROTO_UDP {
			t.Error("a datagram from outside came in after the change")
		}
	}
	a, err := n.ReadBack(context.Background(), s.ID)
	if err != nil || len(a.Policy.Rules) != 1 {
		t.Errorf("read back: %v, %v", a, err)
	}
}

// TestC18TableRemoved: with the rules gone, a slot with rules reaches nothing at all,
// though the gate and the routes alone would let it.
func TestC18TableRemoved(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone("x.test. 60 IN A 8.8.8.8")
	web := l.internet.serve(t, "8.8.8.8:80")
	n := l.open()
	s, in := l.acquireUnder(n, rules(t, modeAllow, "allow 8.8.8.8:81", "allow x.test"))
	in.resolve(t, s, "x.test.")
	_, closed := l.acquireUnder(n, rules(t, modeAllow))
	stopWorkers(n)
	delTable(t, n.router, routerTable)
	out := l.internet.tap(t, "eth0")
	for _, p := range []*place{in, closed} {
		for _, a := range []string{"8.8.8.8:80", "8.8.8.8:81", "1.2.3.4:443"} {
			if c, err := p.dial("tcp", a, 300*time.Millisecond); err == nil {
				c.Close()
				t.Errorf("connected to %s", a)
			}
			p.sendUDP(a)
		}
		p.ping("8.8.8.8")
	}
	l.host.sendUDP("8.8.8.8:9")
	if got := out.until(t, marker); len(got) != 0 || web.hits() != 0 {
		t.Errorf("reached the outside: %v", got)
	}
	if _, err := n.ReadBack(context.Background(), s.ID); !errors.Is(err, sandbox.Internal) {
		t.Errorf("read back: %v", err)
	}
	must(t, n.refresh())
	if _, err := n.ReadBack(context.Background(), s.ID); err != nil {
		t.Errorf("after the repair: %v", err)
	}
}

// TestC18ProxyGone: the daemon is there and its listener is not.
func TestC18ProxyGone(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone("x.test. 60 IN A 8.8.8.8")
	pool, _ := l.internet.web(t, "8.8.8.8:443", "x.test")
	n := l.open()
	s, in := l.acquireUnder(n, rules(t, modeAllow, "allow x.test"))
	in.resolve(t, s, "x.test.")
	_, err := in.get(pool, "x.test", "8.8.8.8:443")
	must(t, err)
	n.proxy.Close()
	out := l.internet.tap(t, "eth0")
	if _, err := in.get(pool, "x.test", "8.8.8.8:443"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("without a proxy: %v", err)
	}
	l.host.sendUDP("8.8.8.8:9")
	out.until(t, func(ip []byte) bool {
		if ip[9] == unix.IPPROTO_TCP && ip[33]&0x12 == 2 { // SYN: the ends of what was before may come late
			t.Error("a connection was begun")
		}
		return marker(ip)
	})
}

// TestC8Raw: what is no TCP through the proxy, whatever the protocol, under a list
// of names.
func TestC8Raw(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone("x.test. 60 IN A 8.8.8.8")
	n := l.open()
	s, in := l.acquireUnder(n, rules(t, modeAllow, "allow x.test"))
	in.resolve(t, s, "x.test.")
	out := l.internet.tap(t, "eth0")
	dst := netip.MustParseAddr("8.8.8.8")
	in.sendUDP("8.8.8.8:443") // QUIC
	in.sendUDP("8.8.8.8:53")
	in.ping("8.8.8.8")
	for _, proto := range []byte{1, 2, 4, 41, 47, 50, 89, 132, 136, 255} { // SCTP is 132
		in.sendProto(t, s, dst, proto)
	}
	in.sendRaw(t, s, s.Addr, dst)                         // UDP 9000 by hand
	in.sendRaw(t, s, netip.MustParseAddr("5.5.5.2"), dst) // as the host
	in.sendRaw(t, s, addrOf(u32(s.Addr)+2), dst)          // as a neighbour
	in.sendRaw(t, s, n.proxyAddr(), dst)                  // as the proxy
	l.host.sendUDP("8.8.8.8:9")
	if got := out.until(t, marker); len(got) != 0 {
		t.Errorf("reached the outside: %v", got)
	}
	// The proxy's own port is reached by redirection alone.
	for _, a := range []netip.Addr{n.proxyAddr(), n.localAddr(), s.Gateway, n.routerAddr()} {
		for _, port := range []uint16{proxyPort, 80, 443} {
			if c, err := in.dial("tcp", netip.AddrPortFrom(a, port).String(), 300*time.Millisecond); err == nil {
				c.Close()
				t.Errorf("connected to %s port %d", a, port)
			}
		}
	}
}

// TestE4FailWithRules: a slot whose policy cannot be installed is not handed out,
// wherever that fails.
func TestE4FailWithRules(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone("x.test. 60 IN A 8.8.8.8")
	l.internet.serve(t, "8.8.8.8:80")
	l.opts.Pool = 0
	n := l.open()
	stopWorkers(n)
	boom := errors.New("boom")
	p := rules(t, modeAllow, "allow 8.8.8.8:80", "allow x.test")
	var steps []string
	n.opts.failpoint = func(s string) error { steps = append(steps, s); return nil }
	s, in := l.acquireUnder(n, p)
	if len(steps) < 10 {
		t.Fatalf("steps: %q", steps)
	}
	for _, step := range steps {
		n.opts.failpoint = func(s string) error {
			if s == step {
				return boom
			}
			return nil
		}
		if _, err := n.Acquire(context.Background(), AcquireOptions{Owner: "x", Policy: p}); !errors.Is(err, boom) {
			t.Errorf("%s: %v", step, err)
		}
	}
	// A live change that fails closes.
	for _, step := range []string{"policy: rules", "policy: save"} {
		n.opts.failpoint = nil
		_, err := n.SetPolicy(context.Background(), s.ID, p)
		must(t, err)
		if !in.reaches("8.8.8.8:80") {
			t.Fatal("not open")
		}
		once := false
		n.opts.failpoint = func(s string) error {
			if s == step && !once {
				once = true
				return boom
			}
			return nil
		}
		if _, err := n.SetPolicy(context.Background(), s.ID, rules(t, modeAllow, "allow 8.8.8.8:80", "allow y.test")); !errors.Is(err, boom) {
			t.Errorf("%s: %v", step, err)
		}
		if in.reaches("8.8.8.8:80") {
			t.Errorf("%s: still open", step)
		}
		if a, err := n.ReadBack(context.Background(), s.ID); err != nil || a.Policy.Mode != sandbox.NetworkNone {
			t.Errorf("%s: %v, %v", step, a, err)
		}
	}
	// A pin that cannot be put in place: no answer that would be of no use.
	n.opts.failpoint = nil
	_, err := n.SetPolicy(context.Background(), s.ID, p)
	must(t, err)
	n.opts.failpoint = func(s string) error {
		if s == "pins: rules" {
			return boom
		}
		return nil
	}
	if got := in.resolve(t, s, "x.test."); got != nil {
		t.Errorf("an answer without its pin: %v", got)
	}
	n.opts.failpoint = nil
}
