package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"vivarium/sandbox"
)

func rule(t testing.TB, text string) sandbox.PolicyRule {
	t.Helper()
	action, rest, _ := strings.Cut(text, " ")
	r, err := ParseRule(sandbox.RuleAction(action), rest)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func list(t testing.TB, mode sandbox.NetworkMode, texts ...string) sandbox.NetworkPolicy {
	p := sandbox.NetworkPolicy{Mode: mode}
	for _, s := range texts {
		p.Rules = append(p.Rules, rule(t, s))
	}
	return p
}

// flow reads name@address:port/protocol, either of name and address left out.
func flow(t testing.TB, s string) Flow {
	t.Helper()
	var f Flow
	rest, proto, _ := strings.Cut(s, "/")
	f.Protocol = proto
	if i := strings.LastIndexByte(rest, ':'); i >= 0 {
		if _, err := fmt.Sscan(rest[i+1:], &f.Port); err != nil {
			t.Fatal(err)
		}
		rest = rest[:i]
	}
	name, addr, ok := strings.Cut(rest, "@")
	if !ok {
		name, addr = "", rest
	}
	f.Name = name
	if addr != "" {
		f.Addr = netip.MustParseAddr(addr)
	}
	return f
}

// The truth table of docs/network.md (C11, C12).
func TestTruthTable(t *testing.T) {
	t.Parallel()
	node := &Node{
		Grants: []Grant{{Prefix: netip.MustParsePrefix("10.9.0.0/24"), Ports: []uint16{5432}}, {Prefix: netip.MustParsePrefix("203.0.113.7/32")}},
		Deny:   []netip.Prefix{netip.MustParsePrefix("198.41.0.0/24")},
		Presets: map[string][]sandbox.PolicyRule{
			"debian": {rule(t, "allow deb.example.org"), rule(t, "allow security.example.org:80")},
		},
	}
	if err := node.Check(); err != nil {
		t.Fatal(err)
	}
	const public, none, allow = sandbox.NetworkPublic, sandbox.NetworkNone, sandbox.NetworkAllowlist
	host := netip.MustParseAddr("5.5.5.2")
	for _, c := range []struct {
		name       string
		policy     sandbox.NetworkPolicy
		yes, no    []string // flows
		resolves   []string
		unresolved []string
	}{
		{"zero", sandbox.NetworkPolicy{}, nil, []string{"8.8.8.8:443/tcp", "x.com@8.8.8.8:443/tcp", "8.8.8.8/icmp"}, nil, []string{"x.com"}},
		{"none", list(t, none), nil, []string{"8.8.8.8:443/tcp", "10.9.0.1:5432/tcp"}, nil, []string{"x.com"}},
		{"public", list(t, public),
			[]string{"8.8.8.8:443/tcp", "8.8.8.8:123/udp", "8.8.8.8/icmp", "x.com@8.8.8.8:22/tcp", "10.9.0.1:5432/tcp", "203.0.113.7:1/udp", "203.0.113.7/icmp"},
			[]string{"10.0.0.1:80/tcp", "169.254.169.254:80/tcp", "127.0.0.1:80/tcp", "100.64.0.1:80/tcp", "224.0.0.1:1/udp", "255.255.255.255:1/udp", "10.9.0.1:80/tcp", "10.9.0.1/icmp", "198.41.0.4:53/udp", "5.5.5.2:22/tcp", "::ffff:10.0.0.1:80/tcp", "2001:db8::1:80/tcp",
				"8.8.8.8:53/udp", "8.8.8.8:53/tcp", "8.8.8.8:853/tcp", "8.8.8.8:853/udp", "x.com@8.8.8.8:53/udp", "203.0.113.7:53/udp"},
			[]string{"x.com", "com"}, nil},
		{"C10 another resolver that a rule names", list(t, public, "allow 8.8.8.8:53,853", "allow 9.9.9.9", "allow ns.x.com:53/udp"),
			[]string{"8.8.8.8:53/udp", "8.8.8.8:53/tcp", "8.8.8.8:853/tcp", "9.9.9.9:80/tcp", "ns.x.com@1.1.1.1:53/udp"}, []string{"9.9.9.9:53/udp", "1.1.1.1:53/udp", "1.1.1.1:853/tcp", "ns.x.com@1.1.1.1:53/tcp"}, nil, nil},
		{"C10 another resolver under an allow-list", list(t, allow, "allow 9.9.9.9", "allow dns.x.com"), []string{"9.9.9.9:53/udp", "dns.x.com@8.8.8.8:443/tcp"}, []string{"8.8.8.8:53/udp", "8.8.8.8:853/tcp", "dns.x.com@8.8.8.8:853/tcp"}, nil, nil},
		{"empty allow-list is nothing", list(t, allow), nil, []string{"8.8.8.8:443/tcp", "x.com@8.8.8.8:443/tcp", "10.9.0.1:5432/tcp", "8.8.8.8/icmp", "8.8.8.8:53/udp"}, nil, []string{"x.com"}},
		{"address", list(t, allow, "allow 8.8.8.0/24:53,443"),
			[]string{"8.8.8.8:443/tcp", "8.8.8.8:53/udp", "x.com@8.8.8.8:53/tcp"}, []string{"8.8.8.8:80/tcp", "8.8.8.8/icmp", "8.8.9.8:443/tcp"}, nil, []string{"x.com"}},
		{"address with protocol", list(t, allow, "allow 8.8.8.8/udp", "allow 1.1.1.1/icmp"),
			[]string{"8.8.8.8:1/udp", "1.1.1.1/icmp"}, []string{"8.8.8.8:1/tcp", "8.8.8.8/icmp", "1.1.1.1:443/tcp"}, nil, nil},
		{"name", list(t, allow, "allow x.com"),
			[]string{"x.com@8.8.8.8:443/tcp", "x.com@8.8.8.8:80/tcp"},
			[]string{"8.8.8.8:443/tcp", "x.com@8.8.8.8:22/tcp", "x.com@8.8.8.8:443/udp", "x.com@8.8.8.8/icmp", "a.x.com@8.8.8.8:443/tcp", "ax.com@8.8.8.8:443/tcp", "com@8.8.8.8:443/tcp",
				"x.com@10.0.0.1:443/tcp", "x.com@169.254.169.254:80/tcp", "x.com@198.41.0.4:443/tcp"},
			[]string{"x.com"}, []string{"a.x.com", "com", "ax.com", "x.com.evil.com"}},
		{"C11 wildcard is below, not the apex", list(t, allow, "allow *.x.com:8443"),
			[]string{"a.x.com@8.8.8.8:8443/tcp", "a.b.x.com@8.8.8.8:8443/tcp"}, []string{"x.com@8.8.8.8:8443/tcp", "a.x.com@8.8.8.8:443/tcp", "ax.com@8.8.8.8:8443/tcp"},
			[]string{"a.x.com", "a.b.x.com"}, []string{"x.com", "yx.com"}},
		{"C11 spelling", list(t, allow, "allow BÜCHER.Example.", "allow X.COM."), []string{"xn--bcher-kva.example@8.8.8.8:443/tcp", "x.com@8.8.8.8:443/tcp"}, nil, nil, nil},
		{"opaque name", list(t, allow, "allow git.x.com:22/tcp", "allow ntp.x.com:123/udp"),
			[]string{"git.x.com@8.8.8.8:22/tcp", "ntp.x.com@8.8.8.8:123/udp"}, []string{"git.x.com@8.8.8.8:443/tcp", "8.8.8.8:22/tcp", "ntp.x.com@8.8.8.8:123/tcp"}, []string{"git.x.com"}, nil},
		{"name into a grant", list(t, allow, "allow db.x.com:5432/tcp"), []string{"db.x.com@10.9.0.1:5432/tcp"}, []string{"10.9.0.1:5432/tcp", "db.x.com@10.8.0.1:5432/tcp"}, nil, nil},
		{"a range needs grant and rule", list(t, allow, "allow 10.0.0.0/8"), []string{"10.9.0.1:5432/tcp"}, []string{"10.9.0.1:80/tcp", "10.0.0.1:5432/tcp"}, nil, nil},
		{"C12 first match: deny all, then allow", list(t, allow, "deny *", "allow x.com"), nil, []string{"x.com@8.8.8.8:443/tcp"}, nil, []string{"x.com"}},
		{"C12 first match: allow, then deny all", list(t, allow, "allow x.com", "deny *"), []string{"x.com@8.8.8.8:443/tcp"}, []string{"y.com@8.8.8.8:443/tcp"}, []string{"x.com"}, []string{"y.com"}},
		{"exception before wildcard", list(t, allow, "deny a.x.com", "allow *.x.com"), []string{"b.x.com@8.8.8.8:443/tcp"}, []string{"a.x.com@8.8.8.8:443/tcp"}, []string{"b.x.com"}, []string{"a.x.com"}},
		{"address before name", list(t, allow, "deny 8.8.8.0/24", "allow x.com"), []string{"x.com@1.1.1.1:443/tcp"}, []string{"x.com@8.8.8.8:443/tcp"}, []string{"x.com"}, nil},
		{"name before address", list(t, allow, "allow x.com", "deny 8.8.8.0/24"), []string{"x.com@8.8.8.8:443/tcp"}, []string{"8.8.8.8:443/tcp"}, nil, nil},
		{"public less an address", list(t, public, "deny 8.8.8.8:53"), []string{"8.8.8.8:443/tcp", "8.8.8.8/icmp"}, []string{"8.8.8.8:53/udp", "8.8.8.8:53/tcp", "9.9.9.9:53/tcp"}, nil, nil},
		{"public less a name", list(t, public, "deny *.bad.com", "deny bad.com"), []string{"8.8.8.8:443/tcp", "x.com@8.8.8.8:443/tcp"}, []string{"bad.com@8.8.8.8:443/tcp", "a.bad.com@8.8.8.8:9/udp"}, []string{"x.com"}, []string{"bad.com", "a.bad.com"}},
		{"C8 QUIC where names are checked", list(t, public, "deny bad.com", "allow h3.com:443/udp"), []string{"8.8.8.8:443/tcp", "8.8.8.8:444/udp", "h3.com@8.8.8.8:443/udp"}, []string{"8.8.8.8:443/udp", "x.com@8.8.8.8:443/udp"}, nil, nil},
		{"C8 QUIC where requests are read", sandbox.NetworkPolicy{Mode: public, Inspect: []string{"api.com"}}, []string{"api.com@8.8.8.8:443/tcp", "8.8.8.8:443/tcp"}, []string{"api.com@8.8.8.8:443/udp", "8.8.8.8:443/udp"}, nil, nil},
		{"public less a port of a name", list(t, public, "deny x.com:25"), []string{"x.com@8.8.8.8:443/tcp"}, []string{"x.com@8.8.8.8:25/tcp"}, []string{"x.com"}, nil},
		{"preset", list(t, allow, "allow preset:debian"), []string{"deb.example.org@8.8.8.8:443/tcp", "security.example.org@8.8.8.8:80/tcp"}, []string{"security.example.org@8.8.8.8:443/tcp"}, []string{"deb.example.org"}, []string{"example.org"}},
		{"preset denied", list(t, public, "deny preset:debian"), []string{"x.com@8.8.8.8:443/tcp"}, []string{"deb.example.org@8.8.8.8:443/tcp"}, nil, []string{"deb.example.org"}},
		{"resolve any", sandbox.NetworkPolicy{Mode: allow, ResolveAny: true, Rules: []sandbox.PolicyRule{rule(t, "allow 8.8.8.8")}}, []string{"x.com@8.8.8.8:443/tcp"}, []string{"x.com@1.1.1.1:443/tcp"}, []string{"x.com"}, nil},
	} {
		p, err := node.Compile(c.policy)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		for _, s := range c.yes {
			if v := p.Decide(flow(t, s), host); !v.Allowed {
				t.Errorf("%s: %s is denied by %s", c.name, s, v.Rule)
			}
		}
		for _, s := range c.no {
			if v := p.Decide(flow(t, s), host); v.Allowed {
				t.Errorf("%s: %s is allowed by %s", c.name, s, v.Rule)
			} else if v.Rule == "" {
				t.Errorf("%s: %s: no rule is named", c.name, s)
			}
		}
		for _, s := range c.resolves {
			if ok, _, by := p.Resolves(s); !ok {
				t.Errorf("%s: %s does not resolve: %s", c.name, s, by)
			}
		}
		for _, s := range c.unresolved {
			if ok, _, by := p.Resolves(s); ok {
				t.Errorf("%s: %s resolves: %s", c.name, s, by)
			}
		}
	}
}

// A sandbox's policy can only narrow what the operator's floor leaves.
func TestFloor(t *testing.T) {
	t.Parallel()
	node := &Node{Floor: list(t, sandbox.NetworkPublic, "deny 9.9.9.0/24", "deny *.bad.com", "deny 8.8.8.8:25")}
	if err := node.Check(); err != nil {
		t.Fatal(err)
	}
	for _, p := range []sandbox.NetworkPolicy{list(t, sandbox.NetworkPublic), list(t, sandbox.NetworkAllowlist, "allow 0.0.0.0/0", "allow *", "allow *:1-100/udp")} {
		c, err := node.Compile(p)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range []string{"9.9.9.9:443/tcp", "x.com@9.9.9.9:443/tcp", "a.bad.com@8.8.8.8:443/tcp", "8.8.8.8:25/tcp"} {
			if v := c.Decide(flow(t, s)); v.Allowed || !strings.HasPrefix(v.Rule, "floor rule") {
				t.Errorf("%s: %+v", s, v)
			}
		}
		if !c.Decide(flow(t, "8.8.8.8:443/tcp")).Allowed {
			t.Error("the floor takes too much")
		}
		if ok, _, _ := c.Resolves("a.bad.com"); ok {
			t.Error("a name that the floor denies resolves")
		}
		if !c.CheckAll() {
			t.Error("a denied name is not looked for in what address rules allow")
		}
	}
	// an allow-list as floor: names of both
	node = &Node{Floor: list(t, sandbox.NetworkAllowlist, "allow *.corp.com")}
	if err := node.Check(); err != nil {
		t.Fatal(err)
	}
	c, err := node.Compile(list(t, sandbox.NetworkPublic))
	if err != nil {
		t.Fatal(err)
	}
	if v := c.Decide(flow(t, "a.corp.com@8.8.8.8:443/tcp")); !v.Allowed || !v.Checked {
		t.Errorf("%+v: what the floor allows by name alone must be checked", v)
	}
	if c.Decide(flow(t, "8.8.8.8:443/tcp")).Allowed {
		t.Error("an address passes a floor of names")
	}
}

func TestInvalid(t *testing.T) {
	t.Parallel()
	for _, s := range []string{"", "10.0.0.1/33", "10.0.0.1/8", "300.1.1.1", "010.0.0.1", "0x7f.1", "2130706433", "1.2.3", "::1", "[::1]:80", "::ffff:1.2.3.4", "fd00::/8",
		"a..b", ".x", "x.*.com", "*x.com", "**.x", "a b.com", "x.com:0", "x.com:70000", "x.com:9-1", "x.com/sctp", "x.com/icmp", "1.2.3.4:80/icmp", "preset:", "preset:A", strings.Repeat("a", 64) + ".com",
		strings.Repeat("a.", 130) + "com", "http://x.com", "x.com/path", "x\x00.com", "x.com:", "x.com:80,"} {
		r, err := ParseRule(sandbox.RuleAllow, s)
		if err == nil {
			t.Errorf("%q is taken for %+v", s, r)
			continue
		}
		if !errors.Is(err, sandbox.Invalid) || s != "" && len(s) < 60 && !strings.Contains(err.Error(), strings.SplitN(s, "\x00", 2)[0]) {
			t.Errorf("%q: the error does not name it: %v", s, err)
		}
	}
	node := &Node{}
	for _, p := range []sandbox.NetworkPolicy{
		{Mode: "open"},
		list(t, sandbox.NetworkNone, "allow x.com"),
		{Mode: sandbox.NetworkAllowlist, Rules: []sandbox.PolicyRule{{Action: "maybe", Domain: "x.com"}}},
		{Mode: sandbox.NetworkAllowlist, Rules: []sandbox.PolicyRule{{Action: "allow", Domain: "x.com", Preset: "a"}}},
		{Mode: sandbox.NetworkAllowlist, Rules: []sandbox.PolicyRule{{Action: "allow"}}},
		{Mode: sandbox.NetworkAllowlist, Rules: make([]sandbox.PolicyRule, MaxRules+1)},
		{Mode: sandbox.NetworkPublic, Headers: []sandbox.HeaderRule{{Domain: "*", Headers: map[string]string{"A": "b"}}}},
		{Mode: sandbox.NetworkPublic, Headers: []sandbox.HeaderRule{{Domain: "x.com", Headers: map[string]string{"Host": "b"}}}},
		{Mode: sandbox.NetworkPublic, Headers: []sandbox.HeaderRule{{Domain: "x.com", Headers: map[string]string{"A": "b\r\nC: d"}}}},
		{Mode: sandbox.NetworkPublic, BytesPerSecond: -1},
	} {
		if _, err := node.Normalise(p); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("%+v: %v", p, err)
		}
	}
	for _, p := range []sandbox.NetworkPolicy{
		list(t, sandbox.NetworkAllowlist, "allow preset:nope"),
		{Mode: sandbox.NetworkPublic, Upstream: "nope"},
		{Mode: sandbox.NetworkPublic, Source: netip.MustParseAddr("1.2.3.4")},
	} {
		if _, err := node.Normalise(p); !errors.Is(err, sandbox.NotFound) {
			t.Errorf("%+v: %v", p, err)
		}
	}
}

// A name's addresses are opened port by port, so a rule for very many is refused
// rather than cut short.
func TestNamePorts(t *testing.T) {
	t.Parallel()
	for text, ok := range map[string]bool{"allow x.com:1-128/tcp": true, "allow x.com:1-129/tcp": false, "allow *.x.com:1-65535": false, "allow *:1-1000/udp": false, "deny x.com:1-65535": true, "allow 8.8.8.8:1-65535": true} {
		_, err := (&Node{}).Compile(list(t, sandbox.NetworkAllowlist, text))
		if ok != (err == nil) || err != nil && !errors.Is(err, sandbox.Invalid) {
			t.Errorf("%s: %v", text, err)
		}
	}
	if _, err := (&Node{}).Compile(list(t, sandbox.NetworkAllowlist, "allow x.com:1-100/tcp", "allow *.com:101-200/tcp")); !errors.Is(err, sandbox.Invalid) {
		t.Errorf("too many together: %v", err)
	}
	node := &Node{Floor: list(t, sandbox.NetworkAllowlist, "allow *:1-65535/tcp", "allow *")}
	if err := node.Check(); err != nil {
		t.Fatal(err)
	}
	if _, err := node.Compile(list(t, sandbox.NetworkAllowlist, "allow x.com")); err != nil {
		t.Errorf("a wide floor: %v", err)
	}
}

func TestHash(t *testing.T) {
	t.Parallel()
	node := &Node{Presets: map[string][]sandbox.PolicyRule{"p": {rule(t, "allow x.com")}}}
	seen := map[string]sandbox.NetworkPolicy{}
	for _, p := range []sandbox.NetworkPolicy{
		{}, list(t, sandbox.NetworkPublic), list(t, sandbox.NetworkAllowlist), list(t, sandbox.NetworkAllowlist, "allow x.com"), list(t, sandbox.NetworkAllowlist, "deny x.com"),
		list(t, sandbox.NetworkAllowlist, "allow x.com", "allow y.com"), list(t, sandbox.NetworkAllowlist, "allow y.com", "allow x.com"), {Mode: sandbox.NetworkPublic, BytesPerSecond: 1},
	} {
		c, err := node.Compile(p)
		if err != nil {
			t.Fatal(err)
		}
		if o, ok := seen[c.Hash]; ok {
			t.Errorf("%+v and %+v have one hash", o, p)
		}
		seen[c.Hash] = p
	}
	same := func(a, b sandbox.NetworkPolicy) {
		ca, err := node.Compile(a)
		cb, err2 := node.Compile(b)
		if err != nil || err2 != nil || ca.Hash != cb.Hash {
			t.Errorf("%+v and %+v: %v %v", a, b, err, err2)
		}
	}
	same(list(t, sandbox.NetworkAllowlist, "allow X.com."), list(t, sandbox.NetworkAllowlist, "allow preset:p"))
	same(list(t, sandbox.NetworkAllowlist, "allow x.com:443,80,81"), list(t, sandbox.NetworkAllowlist, "allow x.com:80-81,443"))
}

func TestPorts(t *testing.T) {
	t.Parallel()
	p, err := (&Node{}).Compile(list(t, sandbox.NetworkAllowlist, "allow *.x.com", "allow a.x.com:22/tcp", "allow a.x.com:53/udp", "allow big.com:1-100"))
	if err != nil {
		t.Fatal(err)
	}
	tcp, udp := p.Ports("a.x.com", 64)
	if !slices.Equal(tcp, []uint16{22, 80, 443}) || !slices.Equal(udp, []uint16{53}) {
		t.Errorf("%v %v", tcp, udp)
	}
	if tcp, _ := p.Ports("big.com", 64); len(tcp) != 64 {
		t.Errorf("%d ports", len(tcp))
	}
}

func FuzzParseRule(f *testing.F) {
	for _, s := range []string{"x.com", "*.x.com:443", "10.0.0.0/8:80,90-99/tcp", "preset:a", "BÜCHER.example", "0x7f.1", "a/icmp"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := ParseRule(sandbox.RuleAllow, s)
		if err != nil {
			return
		}
		again, err := ParseRule(sandbox.RuleAllow, FormatRule(r))
		if err != nil || FormatRule(again) != FormatRule(r) {
			t.Fatalf("%q is %q, which is %q: %v", s, FormatRule(r), FormatRule(again), err)
		}
		if r.Domain != "" {
			if _, err := netip.ParseAddr(strings.TrimPrefix(r.Domain, "*.")); err == nil {
				t.Fatalf("%q: an address became a name", s)
			}
		}
	})
}

func BenchmarkDecide(b *testing.B) {
	for _, n := range []int{10, 1000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			p := sandbox.NetworkPolicy{Mode: sandbox.NetworkAllowlist}
			for i := range n {
				p.Rules = append(p.Rules, rule(b, fmt.Sprintf("allow host%d.example.com", i)))
			}
			c, err := (&Node{}).Compile(p)
			if err != nil {
				b.Fatal(err)
			}
			f := flow(b, fmt.Sprintf("host%d.example.com@8.8.8.8:443/tcp", n-1))
			for b.Loop() {
				if !c.Decide(f).Allowed {
					b.Fatal("denied")
				}
			}
		})
	}
}

func TestReachesSome(t *testing.T) {
	t.Parallel()
	node := &Node{Grants: []Grant{{Prefix: netip.MustParsePrefix("10.9.0.0/24"), Ports: []uint16{5432}}}}
	for _, c := range []struct {
		p    sandbox.NetworkPolicy
		name string
		addr string
		want bool
	}{
		{list(t, sandbox.NetworkPublic), "x.com", "8.8.8.8", true},
		{list(t, sandbox.NetworkPublic), "x.com", "10.0.0.1", false},
		{list(t, sandbox.NetworkPublic), "x.com", "10.9.0.1", true},
		{list(t, sandbox.NetworkPublic, "deny 8.8.8.0/24"), "x.com", "8.8.8.8", false},
		{list(t, sandbox.NetworkPublic, "deny 8.8.8.0/24:1-500", "deny 8.8.8.0/24:502-65535", "deny 8.8.8.0/24/icmp"), "x.com", "8.8.8.8", true},
		{list(t, sandbox.NetworkPublic, "deny 8.8.8.0/24:1-500", "deny 8.8.8.0/24:501-65535", "deny 8.8.8.0/24/icmp"), "x.com", "8.8.8.8", false},
		{list(t, sandbox.NetworkAllowlist, "allow x.com:7777/udp"), "x.com", "8.8.8.8", true},
		{list(t, sandbox.NetworkAllowlist, "allow x.com"), "y.com", "8.8.8.8", false},
		{list(t, sandbox.NetworkAllowlist, "allow db.com:5432/tcp"), "db.com", "10.9.0.1", true},
		{list(t, sandbox.NetworkAllowlist, "allow db.com:5433/tcp"), "db.com", "10.9.0.1", false},
	} {
		p, err := node.Compile(c.p)
		if err != nil {
			t.Fatal(err)
		}
		if got := p.ReachesSome(c.name, netip.MustParseAddr(c.addr)); got != c.want {
			t.Errorf("%v: %s at %s: %v", c.p, c.name, c.addr, got)
		}
	}
}
