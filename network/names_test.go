package network

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

// echConfig is an ECHConfigList as it stands in HTTPS records (RFC 9849, one
// configuration of version 0xfe0d), made up.
const echConfig = "AEX+DQBBpQAgACBGL2e9TiFwjK/w1Zg9AvRm7mgXHz3SjffP0mTFNMxmDwAEAAEAAQASY2xvdWRmbGFyZS1lY2guY29tAAA="

// TestC6ECH: the keys of encrypted client hellos, IPv6 and addresses that would not
// be pinned are taken out of answers; records of no use without them go.
func TestC6ECH(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone(
		"x.test. 3600 IN HTTPS 1 . alpn=h2,h3 ipv4hint=8.8.8.8 ech="+echConfig+" ipv6hint=2606:4700::1",
		"x.test. 3600 IN HTTPS 2 x.test. mandatory=ech ech="+echConfig,
		"x.test. 3600 IN HTTPS 3 elsewhere.test. alpn=h2",
		"x.test. 3600 IN A 8.8.8.8",
		"pub.test. 3600 IN HTTPS 1 . alpn=h2 ipv4hint=8.8.8.8 ech="+echConfig,
	)
	n := l.open()
	s, in := l.acquireUnder(n, rules(t, modeAllow, "allow x.test"))
	p, out := l.acquire(n, modePublic)
	for range 2 { // the second from the cache
		m, err := in.lookup(s, "udp", "x.test.", dns.TypeHTTPS)
		must(t, err)
		if got := answers(m); got != `HTTPS 1 . alpn="h2,h3"` {
			t.Errorf("HTTPS: %s", got)
		}
		for _, r := range m.Answer {
			if r.Header().Ttl > 300 {
				t.Errorf("TTL %d", r.Header().Ttl)
			}
		}
		m, err = out.lookup(p, "tcp", "pub.test.", dns.TypeHTTPS)
		must(t, err)
		if got := answers(m); got != `HTTPS 1 . alpn="h2" ipv4hint="8.8.8.8"` {
			t.Errorf("HTTPS under public: %s", got)
		}
	}
}

// TestC9Tunnelling: names that no rule covers never leave, of wildcards only
// addresses are answered, whatever the spelling; refusals say why and are logged.
func TestC9Tunnelling(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	z := l.zone("a.x.test. 60 IN A 8.8.8.8", "x.test. 60 IN A 8.8.8.8", "x.test. 60 IN TXT hello", "a.x.test. 60 IN TXT secret", "any.test. 60 IN A 8.8.8.8", "weird!.x.test. 60 IN A 8.8.8.8")
	var log flowSink
	l.opts.OnFlows = log.take
	n := l.open()
	s, in := l.acquireUnder(n, rules(t, modeAllow, "allow *.x.test", "allow y.test"))
	long := strings.Repeat(strings.Repeat("a", 63)+".", 3)
	for _, c := range []struct {
		name  string
		qtype uint16
		ok    bool
	}{
		{"a.x.test.", dns.TypeA, true},
		{"A.X.TEST.", dns.TypeA, true},
		{"a.x.test.", dns.TypeAAAA, true},
		{"a.x.test.", dns.TypeTXT, false},
		{"a.x.test.", dns.TypeMX, false},
		{"a.x.test.", dns.TypeSRV, false},
		{"x.test.", dns.TypeA, false},
		{"any.test.", dns.TypeA, false},
		{"ax.test.", dns.TypeA, false},
		{"x.test.evil.test.", dns.TypeA, false},
		{long + "evil.test.", dns.TypeA, false},
		{long + "evil.test.", dns.TypeTXT, false},
		{long + "evil.test.", dns.TypeNULL, false},
		{"weird!.x.test.", dns.TypeA, false},
		{"a\\.x.test.", dns.TypeA, false},
		{"\\000.x.test.", dns.TypeA, false},
		{".", dns.TypeNS, false},
		{"test.", dns.TypeNS, false},
		{"8.8.8.8.in-addr.arpa.", dns.TypePTR, false},
	} {
		for _, network := range []string{"udp", "tcp"} {
			m, err := in.lookup(s, network, c.name, c.qtype)
			must(t, err)
			if (m.Rcode == dns.RcodeSuccess) != c.ok {
				t.Errorf("%s %s over %s: %s", c.name, dns.TypeToString[c.qtype], network, dns.RcodeToString[m.Rcode])
			}
			if !c.ok && c.qtype != dns.TypeNULL {
				o := m.IsEdns0()
				if o == nil || len(o.Option) != 1 || o.Option[0].(*dns.EDNS0_EDE).InfoCode != dns.ExtendedErrorCodeFiltered {
					t.Errorf("%s: the refusal does not say why", c.name)
				}
			}
		}
	}
	z.mu.Lock()
	for _, a := range z.asked {
		if a != "a.x.test." {
			t.Errorf("asked upstream: %s", a)
		}
	}
	z.mu.Unlock()
	log.wait(t, n, s.ID, func(d FlowDelta) bool {
		return !d.Allowed && d.Target.Protocol == "dns" && d.Target.Name == "any.test" && d.Flows == 2 && strings.Contains(d.Rule, "mode allowlist")
	})
	log.wait(t, n, s.ID, func(d FlowDelta) bool {
		return d.Allowed && d.Target.Protocol == "dns" && d.Target.Name == "a.x.test" && strings.Contains(d.Rule, "*.x.test")
	})
	// "resolve any" is asked for in so many words.
	p := rules(t, modeAllow, "allow y.test")
	p.ResolveAny = true
	s, in = l.acquireUnder(n, p)
	if got := in.resolve(t, s, "any.test."); got != nil {
		t.Errorf("an address that is of no use: %v", got)
	}
	if m, err := in.lookup(s, "udp", "x.test.", dns.TypeTXT); err != nil || answers(m) != `TXT "hello"` {
		t.Errorf("resolve any: %v, %v", m, err)
	}
}

// TestC4RebindingByName: what an allowed name resolves to later counts as little as
// what it never resolved to, be it the host's own network.
func TestC4RebindingByName(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	z := l.zone()
	priv := l.private.serve(t, "10.0.0.2:443")
	meta := l.private.serve(t, "169.254.169.254:80")
	pool, _ := l.internet.web(t, "8.8.8.8:443", "c.x.test")
	n := l.open()
	s, in := l.acquireUnder(n, rules(t, modeAllow, "allow *.x.test", "allow *.x.test:443/tcp", "allow *.x.test:1-100/udp"))
	for i, a := range []string{"10.0.0.2", "169.254.169.254", "127.0.0.1", n.proxyAddr().String(), n.dnsAddr().String(), s.Gateway.String(), "5.5.5.2", n.hostAddr().String()} {
		name := fmt.Sprintf("a%d.x.test.", i)
		z.set(name + " 0 IN A " + a)
		if got := in.resolve(t, s, name); got != nil {
			t.Errorf("%s came through: %v", a, got)
		}
		for _, port := range []uint16{80, 443} {
			if c, err := in.dial("tcp", netip.AddrPortFrom(netip.MustParseAddr(a), port).String(), 500*time.Millisecond); err == nil {
				c.Close()
				t.Errorf("connected to %s", a)
			}
		}
	}
	if priv.hits()+meta.hits() != 0 {
		t.Error("a private server was reached")
	}
	// A name that flips: its address of before counts, that of the private network not.
	z.set("c.x.test. 0 IN A 8.8.8.8")
	in.resolve(t, s, "c.x.test.")
	z.set("c.x.test. 0 IN A 10.0.0.2")
	if got := in.resolve(t, s, "c.x.test."); got != nil {
		t.Errorf("the flip came through: %v", got)
	}
	if _, err := in.get(pool, "c.x.test", "8.8.8.8:443"); err != nil {
		t.Errorf("the real address: %v", err)
	}
	if _, err := in.get(pool, "c.x.test", "10.0.0.2:443"); err == nil || priv.hits() != 0 {
		t.Errorf("the private address: %v", err)
	}
}

// TestOpaqueNames: a name rule with a protocol opens the name's addresses directly.
func TestOpaqueNames(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone("git.test. 60 IN A 8.8.8.8", "db.test. 60 IN A 203.0.113.80")
	l.opts.Grants = []policy.Grant{{Prefix: netip.MustParsePrefix("203.0.113.80/32"), Ports: []uint16{5432}}}
	for _, a := range []string{"8.8.8.8:22", "8.8.8.8:23", "203.0.113.80:5432", "203.0.113.80:22"} {
		l.internet.serve(t, a)
	}
	n := l.open()
	s, in := l.acquireUnder(n, rules(t, modeAllow, "allow git.test:22/tcp", "allow git.test:123/udp", "allow db.test:5432/tcp", "allow db.test:22/tcp"))
	if in.reaches("8.8.8.8:22") {
		t.Error("before the answer")
	}
	in.resolve(t, s, "git.test.")
	in.resolve(t, s, "db.test.")
	for a, want := range map[string]bool{"8.8.8.8:22": true, "8.8.8.8:23": false, "203.0.113.80:5432": true, "203.0.113.80:22": false} {
		if in.reaches(a) != want {
			t.Errorf("%s: want %v", a, want)
		}
	}
	tap := l.internet.tap(t, "eth0")
	in.sendUDP("8.8.8.8:124")
	in.sendUDP("8.8.8.8:22")
	in.sendUDP("8.8.8.8:123")
	if got := tap.until(t, func(ip []byte) bool { return toAddr("8.8.8.8")(ip) && ip[9] == unix.IPPROTO_UDP && ip[23] == 123 }); len(got) != 0 {
		t.Errorf("UDP to other ports: %v", got)
	}
}

// TestC11DenyNames: under public, a denied name neither resolves nor passes the
// proxy at an address known otherwise; QUIC is refused.
func TestC11DenyNames(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone("good.test. 60 IN A 8.8.8.8", "bad.test. 60 IN A 8.8.8.8", "a.evil.test. 60 IN A 8.8.8.8")
	pool, hits := l.internet.web(t, "8.8.8.8:443", "good.test", "bad.test", "a.evil.test")
	l.internet.serve(t, "8.8.8.8:22")
	n := l.open()
	s, in := l.acquireUnder(n, rules(t, modePublic, "deny bad.test", "deny *.evil.test"))
	for name, want := range map[string]bool{"good.test.": true, "bad.test.": false, "BAD.test.": false, "a.evil.test.": false, "b.a.evil.test.": false} {
		if got := in.resolve(t, s, name); (got != nil) != want {
			t.Errorf("%s: %v", name, got)
		}
	}
	if _, err := in.get(pool, "good.test", "8.8.8.8:443"); err != nil {
		t.Errorf("good: %v", err)
	}
	was := hits.hits()
	for _, name := range []string{"bad.test", "a.evil.test", "BAD.test"} {
		if b, err := in.get(pool, name, "8.8.8.8:443"); err == nil {
			t.Errorf("%s: %q", name, b)
		}
	}
	if hits.hits() != was {
		t.Error("a denied name was served")
	}
	if !in.reaches("8.8.8.8:22") {
		t.Error("another port")
	}
	tap := l.internet.tap(t, "eth0")
	in.sendUDP("8.8.8.8:443")
	in.sendUDP("8.8.8.8:9")
	tap.until(t, func(ip []byte) bool {
		if ip[9] != unix.IPPROTO_UDP {
			return false
		}
		port := binary.BigEndian.Uint16(ip[22:])
		if port == 443 {
			t.Error("QUIC passed")
		}
		return port == 9
	})
}

// TestPinsSurvive: the pins of a slot outlive the daemon, under the policy that then
// holds.
func TestPinsSurvive(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone("x.test. 60 IN A 8.8.8.8", "y.test. 60 IN A 8.8.8.8", "git.test. 60 IN A 1.2.3.4")
	pool, _ := l.internet.web(t, "8.8.8.8:443", "x.test", "y.test")
	l.internet.serve(t, "1.2.3.4:22")
	n := l.open()
	s, in := l.acquireUnder(n, rules(t, modeAllow, "allow x.test", "allow y.test", "allow git.test:22/tcp"))
	for _, name := range []string{"x.test.", "y.test.", "git.test."} {
		in.resolve(t, s, name)
	}
	c, err := in.dial("tcp", "1.2.3.4:22", 3*time.Second)
	must(t, err)
	defer c.Close()
	n.Close()
	if _, err := in.get(pool, "x.test", "8.8.8.8:443"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("C18: without a daemon: %v", err)
	}
	l.opts.Floor = rules(t, modePublic, "deny y.test", "deny 1.2.3.4:80")
	n2, err := Open(context.Background(), l.opts)
	must(t, err)
	defer n2.Close()
	if _, err := in.get(pool, "x.test", "8.8.8.8:443"); err != nil {
		t.Errorf("x.test after a restart: %v", err)
	}
	if got := in.resolve(t, s, "x.test."); len(got) != 1 {
		t.Errorf("x.test is %v after a restart", got)
	}
	if got := in.resolve(t, s, "y.test."); got != nil {
		t.Errorf("y.test is %v after a restart", got)
	}
	if _, err := in.get(pool, "y.test", "8.8.8.8:443"); err == nil {
		t.Error("y.test passes a floor that denies it")
	}
	fmt.Fprintln(c, "still there?")
	c.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := c.Read(make([]byte, 64)); err != nil {
		t.Errorf("an open flow: %v", err)
	}
	a, err := n2.ReadBack(context.Background(), s.ID)
	must(t, err)
	if a.Hash == s.Applied.Hash {
		t.Error("another floor, the same hash")
	}
	// A narrower floor cuts what is open.
	n2.Close()
	l.opts.Floor = rules(t, modePublic, "deny 1.2.3.4")
	n3, err := Open(context.Background(), l.opts)
	must(t, err)
	defer n3.Close()
	if in.reaches("1.2.3.4:22") {
		t.Error("the floor does not hold for a slot that was there")
	}
}

// TestPinRaces changes a policy back and forth while its DNS is asked all the time:
// no pin of the one may be there under the other.
func TestPinRaces(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone("x.test. 0 IN A 8.8.8.8", "y.test. 0 IN A 1.2.3.4")
	n := l.open()
	s, in := l.acquireUnder(n, rules(t, modeAllow, "allow x.test:22/tcp"))
	stop := make(chan struct{})
	var asked atomic.Int32
	var wg sync.WaitGroup
	for _, name := range []string{"x.test.", "y.test."} {
		for range 2 {
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
						if m, err := in.lookupOnce(s, "udp", name, dns.TypeA); err == nil && m.Rcode == dns.RcodeSuccess {
							asked.Add(1)
						}
					}
				}
			})
		}
	}
	policies := []sandbox.NetworkPolicy{rules(t, modeAllow, "allow y.test:22/tcp"), rules(t, modeAllow, "allow x.test:22/tcp"), rules(t, modeAllow, "allow y.test"), rules(t, modeAllow), {Mode: modePublic}}
	for i := range 30 {
		p := policies[i%len(policies)]
		a, err := n.SetPolicy(context.Background(), s.ID, p)
		must(t, err)
		c, err := n.Compile(p)
		must(t, err)
		if got, err := n.ReadBack(context.Background(), s.ID); err != nil || got.Hash != a.Hash {
			t.Fatalf("%v: %v", texts(p), err)
		}
		must(t, n.router.do(func() error {
			return n.router.withNft(func(conn *nftables.Conn) error {
				for _, set := range []*nftables.Set{setPinned(), setProxied()} {
					es, err := elementsWith(conn, set, s.HostVeth)
					if err != nil {
						return err
					}
					for _, e := range es {
						addr, _ := netip.AddrFromSlice(e.Key[16:20])
						name := map[string]string{"8.8.8.8": "x.test", "1.2.3.4": "y.test"}[addr.String()]
						if ok, _, _ := c.Resolves(name); !ok {
							t.Errorf("%v: a pin of %s", texts(p), name)
						}
					}
				}
				return nil
			})
		}))
	}
	close(stop)
	wg.Wait()
	if asked.Load() == 0 {
		t.Error("nothing was answered")
	}
}

// TestPinsBounded: answers without end cost neither memory nor kernel without end.
func TestPinsBounded(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	n := l.open()
	s, _ := l.acquireUnder(n, rules(t, modeAllow, "allow *", "allow *:1-128/udp"))
	sl := n.slots[s.ID]
	pol := sl.pol.Load()
	a := u32(netip.MustParseAddr("8.0.0.0"))
	for i := range uint32(100) {
		addrs := map[netip.Addr]time.Duration{}
		for j := range uint32(24) {
			addrs[addrOf(a+i*24+j)] = minPin
		}
		must(t, n.pin(sl, pol, fmt.Sprintf("a%d.test", i%40), addrs))
	}
	sl.pins.mu.Lock()
	elems, addrs := len(sl.pins.elems), len(sl.pins.names)
	sl.pins.mu.Unlock()
	if elems > maxPinElems || elems < maxPinElems/4 || addrs > maxPinAddrs {
		t.Errorf("%d elements, %d addresses", elems, addrs)
	}
	if _, err := n.ReadBack(context.Background(), s.ID); err != nil {
		t.Error(err)
	}
	for i := range 100 {
		sl.pins.note(netip.MustParseAddr("9.9.9.9"), fmt.Sprintf("n%d.test", i), time.Now().Add(time.Minute))
	}
	if k := len(sl.pins.of(netip.MustParseAddr("9.9.9.9"))); k != maxPinNames {
		t.Errorf("%d names of one address", k)
	}
	if err := n.pin(sl, n.none, "x.test", map[netip.Addr]time.Duration{netip.MustParseAddr("8.8.8.8"): minPin}); !errors.Is(err, errPolicyChanged) {
		t.Errorf("a pin of another policy: %v", err)
	}
}

// TestManyRules: a thousand names and as many rules as there may be.
func TestManyRules(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone("h999.test. 60 IN A 8.8.8.8")
	pool, _ := l.internet.web(t, "8.8.8.8:443", "h999.test")
	l.internet.serve(t, "1.2.3.4:80")
	n := l.open()
	p := sandbox.NetworkPolicy{Mode: modeAllow}
	for i := range 1000 {
		p.Rules = append(p.Rules, rules(t, modeAllow, fmt.Sprintf("allow h%d.test", i)).Rules...)
	}
	s, in := l.acquireUnder(n, p)
	in.resolve(t, s, "h999.test.")
	if _, err := in.get(pool, "h999.test", "8.8.8.8:443"); err != nil {
		t.Error(err)
	}
	var texts []string
	for i := range policy.MaxRules - 1 { // no two neighbours alike
		texts = append(texts, fmt.Sprintf("%s 8.%d.%d.0/24:%d", []string{"allow", "deny"}[i%2], i/256, i%256, 1+i%7))
	}
	if _, err := n.SetPolicy(context.Background(), s.ID, rules(t, modeAllow, append(texts, "allow 1.2.3.4:80")...)); err != nil {
		t.Fatal(err)
	}
	if !in.reaches("1.2.3.4:80") || in.reaches("8.8.8.8:443") {
		t.Error("the last of many rules")
	}
	if _, err := n.ReadBack(context.Background(), s.ID); err != nil {
		t.Error(err)
	}
}

// TestC2MappedAndC3Spellings: what looks like something else is judged as what it is.
func TestC2MappedAndC3Spellings(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone()
	l.internet.serve(t, "8.8.8.8:80")
	web := l.internet.serve(t, "1.2.3.4:80")
	n := l.open()
	s, in := l.acquireUnder(n, rules(t, modeAllow, "allow 8.8.8.8"))
	must(t, in.do(func() error { // a sandbox may turn IPv6 on in its own stack
		return errors.Join(setSysctl("ipv6/conf/all/disable_ipv6", "0"), setSysctl("ipv6/conf/lo/disable_ipv6", "0"))
	}))
	var mapped error
	must(t, in.in(func() error {
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		a := netip.MustParseAddr("::ffff:1.2.3.4").As16()
		mapped = unix.Connect(fd, &unix.SockaddrInet6{Port: 80, Addr: a})
		return nil
	}))
	if !errors.Is(mapped, unix.ECONNREFUSED) {
		t.Errorf("IPv4-mapped: %v", mapped)
	}
	for _, name := range []string{"0x01020304.", "16909060.", "001.002.003.004.", "1.2.3.4.", "1.2.772."} {
		if got := in.resolve(t, s, name); got != nil {
			t.Errorf("%s: %v", name, got)
		}
	}
	if web.hits() != 0 {
		t.Error("reached")
	}
}

// TestC7Connect: an HTTP proxy's CONNECT through an allowed name leads nowhere
// else, for what the proxy of an allowed host does is the host's business; but a name
// in a request for another host is refused.
func TestC7AbsoluteForm(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone("x.test. 60 IN A 8.8.8.8")
	_, hits := l.internet.web(t, "8.8.8.8:80")
	n := l.open()
	s, in := l.acquireUnder(n, rules(t, modeAllow, "allow x.test"))
	in.resolve(t, s, "x.test.")
	for _, req := range []string{
		"GET http://y.test/ HTTP/1.1\r\nHost: x.test\r\n\r\n",
		"CONNECT y.test:443 HTTP/1.1\r\nHost: x.test\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: x.test\r\nHost: y.test\r\n\r\n",
		"GET / HTTP/1.0\r\n\r\n",
	} {
		c, err := in.dial("tcp", "8.8.8.8:80", 3*time.Second)
		must(t, err)
		fmt.Fprint(c, req)
		c.SetDeadline(time.Now().Add(5 * time.Second))
		b := make([]byte, 4096)
		k, _ := c.Read(b)
		if strings.Contains(string(b[:k]), " 200 ") {
			t.Errorf("%q: %q", req, b[:k])
		}
		c.Close()
	}
	if hits.hits() != 0 {
		t.Errorf("%d requests arrived", hits.hits())
	}
	// no SNI, and TLS to the HTTP port
	if c, err := in.dial("tcp", "8.8.8.8:80", time.Second); err == nil {
		tc := tls.Client(c, &tls.Config{InsecureSkipVerify: true})
		tc.SetDeadline(time.Now().Add(5 * time.Second))
		if tc.Handshake() == nil {
			t.Error("TLS without a name")
		}
		c.Close()
	}
}
