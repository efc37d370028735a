package engine

import (
	"bytes"
	"context"
	"crypto/tls"
	"net"
	"net/netip"
	"slices"
	"testing"

	"vivarium/network"
	"vivarium/network/policy"
	"vivarium/sandbox"
)

func TestClientHello(t *testing.T) {
	t.Parallel()
	b, err := clientHello("a.example.com")
	if err != nil {
		t.Fatal(err)
	}
	here, there := net.Pipe()
	defer here.Close()
	seen := make(chan string, 1)
	go func() {
		defer there.Close()
		tls.Server(there, &tls.Config{GetConfigForClient: func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			seen <- h.ServerName
			return nil, context.Canceled
		}}).Handshake()
	}()
	go func() { _, _ = here.Write(b) }()
	if got := <-seen; got != "a.example.com" || !bytes.Contains(b, []byte("a.example.com")) {
		t.Errorf("%q", got)
	}
}

// What a policy leads the canary to try.
func TestCanaryNames(t *testing.T) {
	t.Parallel()
	rule := func(a sandbox.RuleAction, d string, ports ...uint16) sandbox.PolicyRule {
		r := sandbox.PolicyRule{Action: a, Domain: d}
		for _, p := range ports {
			r.Ports = append(r.Ports, sandbox.PortRange{Lo: p, Hi: p})
		}
		return r
	}
	for _, c := range []struct {
		mode            sandbox.NetworkMode
		rules           []sandbox.PolicyRule
		denied, allowed string
		ports           []uint16
	}{
		{sandbox.NetworkNone, nil, "canary.vivarium.invalid", "", nil},
		{sandbox.NetworkPublic, nil, "", "", nil},
		{sandbox.NetworkPublic, []sandbox.PolicyRule{rule(sandbox.RuleDeny, "bad.com")}, "bad.com", "", nil},
		{sandbox.NetworkAllowlist, []sandbox.PolicyRule{rule(sandbox.RuleAllow, "*.x.com"), rule(sandbox.RuleAllow, "y.com")}, "canary.vivarium.invalid", "y.com", []uint16{443, 80}},
		{sandbox.NetworkAllowlist, []sandbox.PolicyRule{rule(sandbox.RuleDeny, "y.com"), rule(sandbox.RuleAllow, "y.com")}, "y.com", "", nil},
		{sandbox.NetworkAllowlist, []sandbox.PolicyRule{rule(sandbox.RuleAllow, "y.com", 8443)}, "canary.vivarium.invalid", "y.com", []uint16{8443}},
	} {
		p, err := (&network.Network{}).Compile(sandbox.NetworkPolicy{Mode: c.mode, Rules: c.rules})
		if err != nil {
			t.Fatal(err)
		}
		if got := deniedName(p); got != c.denied {
			t.Errorf("%v: denied %q, want %q", c.rules, got, c.denied)
		}
		if name, ports := allowedName(p); name != c.allowed || !slices.Equal(ports, c.ports) {
			t.Errorf("%v: allowed %q %v, want %q %v", c.rules, name, ports, c.allowed, c.ports)
		}
	}
}

// Explain does not tell what private addresses the host's resolver knows.
func TestExplainAddrs(t *testing.T) {
	t.Parallel()
	p, err := (&network.Network{}).Compile(sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic})
	if err != nil {
		t.Fatal(err)
	}
	public, private, own := netip.MustParseAddr("1.2.3.4"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("5.5.5.2")
	for _, c := range []struct {
		addrs   []netip.Addr
		allowed bool
		rule    string
		told    []netip.Addr
	}{
		{nil, true, "policy: mode public", nil},
		{[]netip.Addr{public, private}, true, "policy: mode public", []netip.Addr{public}},
		{[]netip.Addr{private}, false, "special-purpose range 10.0.0.0/8, not granted", nil},
		{[]netip.Addr{own}, false, "address of the host, not granted", []netip.Addr{own}},
	} {
		f := policy.Flow{Name: "a.com", Port: 443, Protocol: sandbox.ProtocolTCP}
		v := p.Decide(f)
		x := sandbox.Explanation{Allowed: v.Allowed, Rule: v.Rule}
		explainAddrs(&x, p, f, v, c.addrs, []netip.Addr{own})
		var told []netip.Addr
		for _, a := range x.Addresses {
			told = append(told, a.Addr)
		}
		if x.Allowed != c.allowed || x.Rule != c.rule || !slices.Equal(told, c.told) {
			t.Errorf("%v: %+v", c.addrs, x)
		}
	}
}
