package daemon

import (
	"context"
	"errors"
	"net/netip"
	"testing"

	"vivarium/config"
	"vivarium/network/policy"
	"vivarium/sandbox"
)

// A tenant does not reach through the daemon what his sandboxes do not reach.
func TestFetchPolicy(t *testing.T) {
	t.Parallel()
	cfg := config.Default()
	cfg.Images.Mirrors = map[string][]string{"docker.io": {"http://10.1.1.1:5000/hub", "mirror.example"}}
	cfg.Images.Insecure = []string{"[fd00::5]:5000", "192.168.7.7"}
	grants := []policy.Grant{{Prefix: netip.MustParsePrefix("10.2.0.0/16"), Ports: []uint16{443}}, {Prefix: netip.MustParsePrefix("10.3.0.0/16")}}
	floor := sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic}
	for _, r := range []string{"198.41.0.4", "*.closed.example", "7.7.7.7:25"} {
		rule, err := policy.ParseRule(sandbox.RuleDeny, r)
		if err != nil {
			t.Fatal(err)
		}
		floor.Rules = append(floor.Rules, rule)
	}
	node := policy.Node{Grants: grants, Deny: []netip.Prefix{netip.MustParsePrefix("9.9.0.0/16"), netip.MustParsePrefix("10.3.3.3/32")}}
	open, err := newFetch(node)
	if err != nil {
		t.Fatal(err)
	}
	byTenant := open.forImages(cfg)
	if byTenant(DefaultTenant) != nil {
		t.Error("the operator's own pulls are bound")
	}
	node.Floor = floor
	narrow, err := newFetch(node)
	if err != nil {
		t.Fatal(err)
	}
	for addr, host := range map[string]string{"198.41.0.4:443": "a.example", "8.8.8.8:443": "x.closed.example", "7.7.7.7:25": "", "[2606:4700::1]:443": "a.example"} {
		if err := narrow.allow(t.Context(), host, addr); !errors.Is(err, sandbox.Denied) {
			t.Errorf("%s for %q under the floor: %v", addr, host, err)
		}
	}
	if err := narrow.allow(t.Context(), "a.example", "8.8.8.8:443"); err != nil {
		t.Error(err)
	}
	p := open
	p.named = nil
	p.local = func() ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr("8.1.1.1")}, nil }
	p.lookup = func(_ context.Context, _, host string) ([]netip.Addr, error) {
		if host == "mirror.example" {
			return []netip.Addr{netip.MustParseAddr("172.16.4.4")}, nil
		}
		return nil, errors.New("no such host")
	}
	for _, m := range cfg.Images.Mirrors["docker.io"] {
		p.name(m)
	}
	for _, h := range append(cfg.Images.Insecure, "gone.example") {
		p.name(h)
	}
	for addr, want := range map[string]bool{
		"8.8.8.8:443": true, "[2606:4700::1]:443": true, "[::ffff:8.8.8.8]:443": true,
		"127.0.0.1:80": false, "127.9.9.9:5000": false, "[::1]:443": false, "[::ffff:127.0.0.1]:443": false, "0.0.0.0:80": false, "[::]:80": false,
		"169.254.169.254:443": false, "[fe80::1%eth0]:443": false, "[fd00:ec2::254]:443": false, "[64:ff9b::a00:1]:443": false, "[2002:a00:1::1]:443": false,
		"10.0.0.1:443": false, "192.168.0.1:443": false, "100.64.0.1:443": false, "224.0.0.1:443": false, "[ff02::1]:443": false,
		"8.1.1.1:443": false, "9.9.9.9:443": false, "x": false,
		"10.2.5.5:443": true, "10.2.5.5:80": false, "10.3.5.5:80": true, "10.3.3.3:80": false,
		"10.1.1.1:5000": true, "10.1.1.1:443": false, "172.16.4.4:443": true, "172.16.4.5:443": false,
		"[fd00::5]:5000": true, "[fd00::5]:443": false, "192.168.7.7:80": true,
	} {
		err := p.allow(t.Context(), "", addr)
		if (err == nil) != want || err != nil && !errors.Is(err, sandbox.Denied) {
			t.Errorf("%s: %v", addr, err)
		}
	}
	if err := byTenant("a")(t.Context(), "tcp", "localhost", "127.0.0.1:80"); !errors.Is(err, sandbox.Denied) {
		t.Errorf("the host's loopback: %v", err)
	}
}
