package network

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"vivarium/network/policy"

	"vivarium/sandbox"
)

func rr(s string) dns.RR {
	r, err := dns.NewRR(s)
	if err != nil {
		panic(err)
	}
	return r
}

func answers(m *dns.Msg) string {
	var out []string
	for _, a := range m.Answer {
		out = append(out, strings.Join(strings.Fields(a.String())[3:], " "))
	}
	return strings.Join(out, ", ")
}

// TestC4Rebinding: no answer carries an address that policy refuses.
func TestC4Rebinding(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	var flips, leaked atomic.Int32
	l.private.resolver(t, "10.0.0.53:53", func(q dns.Question, m *dns.Msg) {
		n := q.Name
		add := func(s string) { m.Answer = append(m.Answer, rr(n+" "+s)) }
		switch strings.ToLower(n) {
		case "private.test.":
			add("60 IN A 10.0.0.2")
		case "metadata.test.":
			m.Answer = append(m.Answer, rr(n+" 60 IN CNAME real.test."), rr("real.test. 60 IN A 169.254.169.254"))
		case "mixed.test.":
			add("60 IN A 127.0.0.1")
			add("60 IN A 8.8.8.8")
			add("60 IN A 192.168.0.1")
		case "flip.test.":
			if flips.Add(1) == 1 {
				add("0 IN A 8.8.8.8")
			} else {
				add("0 IN A 10.0.0.2")
			}
		case "granted.test.":
			add("60 IN A 203.0.113.80")
		case "https.test.":
			add("60 IN HTTPS 1 . alpn=h2 ipv4hint=10.0.0.2 ipv6hint=fd00::1")
		case "hinted.test.":
			add("60 IN HTTPS 1 . alpn=h2 ipv4hint=8.8.8.8 ipv6hint=2606:4700::1")
		case "glue.test.":
			add("60 IN MX 5 mail.glue.test.")
			m.Extra = append(m.Extra, rr("mail.glue.test. 60 IN A 10.0.0.2"))
			m.Ns = append(m.Ns, rr("glue.test. 60 IN NS ns.glue.test."))
		case "long.test.":
			for i := range 200 {
				add(fmt.Sprintf("60 IN A 8.8.%d.8", i))
			}
		case "gone.test.":
			m.Rcode = dns.RcodeNameError
			m.Ns = append(m.Ns, rr("test. 60 IN SOA a. b. 1 2 3 4 60"))
		default:
			leaked.Add(1)
			m.Rcode = dns.RcodeRefused
		}
	})
	l.opts.Grants = []policy.Grant{{Prefix: netip.MustParsePrefix("203.0.113.80/32"), Ports: []uint16{80}}}
	n := l.open()
	s, in := l.acquire(n, sandbox.NetworkPublic)
	for _, c := range []struct {
		name  string
		qtype uint16
		rcode int
		want  string
	}{
		{"private.test.", dns.TypeA, dns.RcodeRefused, ""},
		{"private.test.", dns.TypeA, dns.RcodeRefused, ""}, // from the cache
		{"metadata.test.", dns.TypeA, dns.RcodeRefused, ""},
		{"mixed.test.", dns.TypeA, dns.RcodeSuccess, "A 8.8.8.8"},
		{"flip.test.", dns.TypeA, dns.RcodeSuccess, "A 8.8.8.8"},
		{"flip.test.", dns.TypeA, dns.RcodeRefused, ""},
		{"granted.test.", dns.TypeA, dns.RcodeSuccess, "A 203.0.113.80"},
		{"GrAnTeD.test.", dns.TypeA, dns.RcodeSuccess, "A 203.0.113.80"},
		{"https.test.", dns.TypeHTTPS, dns.RcodeSuccess, `HTTPS 1 . alpn="h2"`},
		{"hinted.test.", dns.TypeHTTPS, dns.RcodeSuccess, `HTTPS 1 . alpn="h2" ipv4hint="8.8.8.8"`},
		{"glue.test.", dns.TypeMX, dns.RcodeSuccess, "MX 5 mail.glue.test."},
		{"gone.test.", dns.TypeA, dns.RcodeNameError, ""},
		// Never asked upstream:
		{"mixed.test.", dns.TypeAAAA, dns.RcodeSuccess, ""},
		{"mixed.test.", dns.TypeANY, dns.RcodeRefused, ""},
		{"test.", dns.TypeAXFR, dns.RcodeRefused, ""},
		{"x.test.", dns.TypeNULL, dns.RcodeRefused, ""},
		{"2.0.0.10.in-addr.arpa.", dns.TypePTR, dns.RcodeNameError, ""},
		{"254.169.254.169.in-addr.arpa.", dns.TypePTR, dns.RcodeNameError, ""},
		{"10.in-addr.arpa.", dns.TypeNS, dns.RcodeNameError, ""},
		{"a.localhost.", dns.TypeA, dns.RcodeNameError, ""},
	} {
		m, err := in.lookup(s, "udp", c.name, c.qtype)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if m.Rcode != c.rcode || answers(m) != c.want {
			t.Errorf("%s %s: %s %q, want %s %q", c.name, dns.TypeToString[c.qtype], dns.RcodeToString[m.Rcode], answers(m), dns.RcodeToString[c.rcode], c.want)
		}
		for _, x := range append(m.Ns, m.Extra...) {
			if _, ok := x.(*dns.A); ok {
				t.Errorf("%s: an address outside the answer: %s", c.name, x)
			}
		}
	}
	if k := leaked.Load(); k != 0 {
		t.Errorf("%d questions went upstream that must not", k)
	}
	// Too long for UDP: cut, and whole over TCP, upstream as well.
	if m, err := in.lookup(s, "udp", "long.test.", dns.TypeA); err != nil || !m.Truncated {
		t.Errorf("long answer over UDP: truncated %v, %v", m != nil && m.Truncated, err)
	}
	if m, err := in.lookup(s, "tcp", "long.test.", dns.TypeA); err != nil || len(m.Answer) != 200 {
		t.Errorf("long answer over TCP: %v", err)
	}
}

// TestDNSFailure: resolvers that are silent, refuse or lie give SERVFAIL.
func TestDNSFailure(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	silent := l.private.listenUDP(t, "10.0.0.53:53")
	n := l.open()
	s, in := l.acquire(n, sandbox.NetworkPublic)
	if m, err := in.lookup(s, "udp", "a.test.", dns.TypeA); err != nil || m.Rcode != dns.RcodeServerFailure {
		t.Errorf("silent resolver: %v, %v", m, err)
	}
	if silent() == "" {
		t.Error("the resolver was not asked")
	}
}

func TestDNSSecondResolver(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.opts.Upstream = []netip.AddrPort{netip.MustParseAddrPort("10.0.0.2:53"), netip.MustParseAddrPort("10.0.0.53:53"), netip.MustParseAddrPort("172.16.5.5:53")}
	// The first refuses the connection, the second answers another question,
	// the third is right.
	l.private.resolver(t, "10.0.0.53:53", func(q dns.Question, m *dns.Msg) {
		m.Question[0].Name = "other.test."
		m.Answer = append(m.Answer, rr("other.test. 60 IN A 1.1.1.1"))
	})
	l.private.resolver(t, "172.16.5.5:53", func(q dns.Question, m *dns.Msg) {
		m.Answer = append(m.Answer, rr(q.Name+" 60 IN A 8.8.8.8"))
	})
	n := l.open()
	s, in := l.acquire(n, sandbox.NetworkPublic)
	if m, err := in.lookup(s, "udp", "a.test.", dns.TypeA); err != nil || answers(m) != "A 8.8.8.8" {
		t.Errorf("%v, %v", m, err)
	}
}

// TestA17Flood: a slot that asks as fast as it can, for names whose resolver is
// silent, takes its share and no more; its neighbour is served meanwhile.
func TestA17Flood(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.private.resolver(t, "10.0.0.53:53", func(q dns.Question, m *dns.Msg) {
		if strings.HasSuffix(q.Name, ".flood.") {
			time.Sleep(time.Second) // the resolver's own handler, one each
			m.Rcode = dns.RcodeServerFailure
			return
		}
		m.Answer = append(m.Answer, rr(q.Name+" 0 IN A 8.8.8.8"))
	})
	n := l.open()
	s, bad := l.acquire(n, sandbox.NetworkPublic)
	sg, good := l.acquire(n, sandbox.NetworkPublic)
	server := netip.AddrPortFrom(s.DNS, 53).String()

	// TCP connections beyond the slot's share are closed, not queued.
	var conns []net.Conn
	for range 3 * dnsSlotTCPConns {
		c, err := bad.dial("tcp", server, 2*time.Second)
		if err != nil {
			continue
		}
		defer c.Close()
		conns = append(conns, c)
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	var sent atomic.Int64
	wg.Add(1)
	go func() {
		defer wg.Done()
		c, err := bad.dial("udp", server, time.Second)
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			default:
			}
			m := new(dns.Msg)
			m.SetQuestion(fmt.Sprintf("n%d.flood.", i), dns.TypeA)
			b, _ := m.Pack()
			c.Write(b)
			sent.Add(1)
		}
	}()
	for sent.Load() < 20000 {
		time.Sleep(time.Millisecond)
	}
	var most, mostConns int32
	for i := range 50 {
		m, err := good.lookup(sg, "udp", fmt.Sprintf("g%d.ok.", i), dns.TypeA)
		if err != nil || answers(m) != "A 8.8.8.8" {
			t.Errorf("the neighbour was not served: %v, %v", m, err)
		}
		most, mostConns = max(most, n.dns.inFlight.Load()), max(mostConns, n.dns.conns.Load())
	}
	close(done)
	wg.Wait()
	if most > dnsSlotInFlight+2 {
		t.Errorf("%d queries in flight", most)
	}
	if mostConns > dnsSlotTCPConns+1 {
		t.Errorf("%d connections", mostConns)
	}
	if most == 0 || len(conns) == 0 {
		t.Error("there was no flood")
	}
	if k := n.Stats().DNSCached; k > 4096 {
		t.Errorf("%d cache entries", k)
	}
}

func TestDNSCache(t *testing.T) {
	t.Parallel()
	c := newDNSCache(3)
	now := time.Now()
	put := func(name string, ttl int) {
		r := &reply{}
		r.Answer = []dns.RR{rr(fmt.Sprintf("%s %d IN A 8.8.8.8", name, ttl))}
		c.put(cacheKey{name, dns.TypeA}, r, now)
	}
	put("a.", 100)
	put("zero.", 0)
	if c.get(cacheKey{"zero.", dns.TypeA}, now) != nil {
		t.Error("a TTL of zero was kept")
	}
	r := c.get(cacheKey{"a.", dns.TypeA}, now.Add(40*time.Second))
	if r == nil || r.Answer[0].Header().Ttl != 60 {
		t.Errorf("after 40 s: %v", r)
	}
	if c.get(cacheKey{"a.", dns.TypeA}, now.Add(100*time.Second)) != nil {
		t.Error("kept beyond its TTL")
	}
	for i := range 10 {
		put(fmt.Sprintf("n%d.", i), 100)
	}
	if len(c.entries) != 3 || c.lru.Len() != 3 {
		t.Errorf("%d entries, want 3", len(c.entries))
	}
	if c.get(cacheKey{"n9.", dns.TypeA}, now) == nil || c.get(cacheKey{"n0.", dns.TypeA}, now) != nil {
		t.Error("the wrong ones were forgotten")
	}
	put("long.", 1<<30)
	if c.get(cacheKey{"long.", dns.TypeA}, now.Add(cacheMaxTTL)) != nil {
		t.Error("kept longer than the bound")
	}
}

func TestReverseOfSpecial(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]bool{
		"1.0.0.10.in-addr.arpa.": true, "10.in-addr.arpa.": true, "8.8.8.8.in-addr.arpa.": false,
		"254.169.in-addr.arpa.": true, "31.172.in-addr.arpa.": true, "32.172.in-addr.arpa.": false,
		"172.in-addr.arpa.": true, // holds a private range
		"in-addr.arpa.":     false, "x.ip6.arpa.": true, "a.b.10.in-addr.arpa.": true, "1.2.3.4.5.in-addr.arpa.": false,
		"example.com.": false,
	} {
		if got := reverseOfSpecial(name); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestResolvConf(t *testing.T) {
	t.Parallel()
	got := parseResolvConf([]byte("# x\nsearch a b\nnameserver 10.0.0.1\n nameserver\t fe80::1%eth0 trailing\nnameserver nonsense\nnameserver ::1\nnameserver 1.1.1.1\nnameserver 2.2.2.2\n"))
	if s := fmt.Sprint(got); s != "[10.0.0.1:53 [fe80::1%eth0]:53 [::1]:53 1.1.1.1:53]" {
		t.Error(s)
	}
}

// fuzzServer answers without sockets.
func fuzzServer() *dnsServer {
	o := Options{}
	n := &Network{flows: newFlowLog()}
	n.hosts.Store(&[]netip.Addr{})
	s := &dnsServer{n: n, filter: o.allows, cache: newDNSCache(16), clients: map[netip.Addr]*dnsClient{}}
	s.upstream = &upstream{}
	s.ctx = context.Background()
	return s
}

// FuzzDNSQuery gives the server hostile packets from a slot.
func FuzzDNSQuery(f *testing.F) {
	m := new(dns.Msg)
	m.SetQuestion("a.example.", dns.TypeA)
	m.SetEdns0(4096, true)
	b, _ := m.Pack()
	f.Add(b)
	f.Add([]byte("\x00\x01\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\xc0\x0c\x00\x01\x00\x01"))
	s := fuzzServer()
	var slots []*slot
	for _, p := range []sandbox.NetworkPolicy{{Mode: sandbox.NetworkPublic}, {Mode: sandbox.NetworkAllowlist, Rules: []sandbox.PolicyRule{{Action: sandbox.RuleAllow, Domain: "*.example"}}}} {
		sl := &slot{pins: newPins()}
		c, err := (&policy.Node{}).Compile(p)
		must(f, err)
		sl.pol.Store(c)
		slots = append(slots, sl)
	}
	f.Fuzz(func(t *testing.T, q []byte) {
		if len(q) < 12 || len(q) > dnsMaxQuery {
			return
		}
		out := s.answer(newDNSClient(slots[int(q[0])%2], 1), q, dnsMaxUDP)
		if out == nil {
			return
		}
		if len(out) > dnsMaxUDP {
			t.Fatalf("answer of %d bytes", len(out))
		}
		if binary.BigEndian.Uint16(out) != binary.BigEndian.Uint16(q) || out[2]&0x80 == 0 {
			t.Fatal("not an answer to this query")
		}
	})
}

// FuzzDNSAnswer gives the filter hostile answers from upstream.
func FuzzDNSAnswer(f *testing.F) {
	m := new(dns.Msg)
	m.SetQuestion("a.example.", dns.TypeA)
	m.Answer = []dns.RR{rr("a.example. 1 IN A 10.0.0.1"), rr("a.example. 1 IN HTTPS 1 . ipv4hint=8.8.8.8"), rr("a.example. 1 IN AAAA ::1")}
	b, _ := m.Pack()
	f.Add(b)
	o := Options{}
	f.Fuzz(func(t *testing.T, b []byte) {
		var m dns.Msg
		if m.Unpack(b) != nil {
			return
		}
		q := dns.Question{Name: "a.example.", Qtype: dns.TypeA, Qclass: dns.ClassINET}
		r := sanitise(q, &m, o.allows)
		newDNSCache(2).put(cacheKey{q.Name, q.Qtype}, r, time.Now())
		for _, x := range append(append(r.Answer, r.Ns...), r.Extra...) {
			switch v := x.(type) {
			case *dns.A:
				if a, ok := netip.AddrFromSlice(v.A.To4()); !ok || !o.allows(a) {
					t.Fatalf("%s passed", v)
				}
			case *dns.AAAA:
				t.Fatalf("%s passed", v)
			}
		}
	})
}
