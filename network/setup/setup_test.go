package setup_test

import (
	"errors"
	"net/netip"
	"net/url"
	"reflect"
	"testing"

	"vivarium/config"
	"vivarium/network"
	"vivarium/network/policy"
	"vivarium/network/setup"
	"vivarium/sandbox"
)

func TestOptions(t *testing.T) {
	cfg := &config.Config{DataDir: "/data/viv"}
	cfg.Network.Pool = 3
	cfg.Network.Subnet = "10.200.0.0/18"
	cfg.Network.Grants = []config.Grant{{Prefix: "192.0.2.7", Ports: []int{80, 443}}, {Prefix: "198.51.100.0/24"}}
	cfg.Network.Deny = []string{"203.0.113.0/24"}
	cfg.Network.Bandwidth, cfg.Network.ConnRate, cfg.Network.DNSRate = 1<<30, 500, 200
	cfg.Network.Resolvers = []string{"192.0.2.53", "[2001:db8::1]:5353"}
	cfg.Network.Upstreams = map[string]string{"corp": "socks5://192.0.2.9:1080"}
	got, err := setup.Options(cfg)
	want := network.Options{Dir: "/data/viv", Instance: setup.Instance("/data/viv"), Pool: 3, Subnet: netip.MustParsePrefix("10.200.0.0/18")}
	want.Grants = []policy.Grant{{Prefix: netip.MustParsePrefix("192.0.2.7/32"), Ports: []uint16{80, 443}}, {Prefix: netip.MustParsePrefix("198.51.100.0/24")}}
	want.Deny = []netip.Prefix{netip.MustParsePrefix("203.0.113.0/24")}
	want.BytesPerSecond, want.ConnsPerSecond, want.DNSRate = 1<<30, 500, 200
	want.Node.Presets = got.Node.Presets // package config tests those
	want.Node.Upstreams, want.Proxies = []string{"corp"}, map[string]*url.URL{"corp": {Scheme: "socks5", Host: "192.0.2.9:1080"}}
	want.Upstream = []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53"), netip.MustParseAddrPort("[2001:db8::1]:5353")}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v, want %+v", got, err, want)
	}
	for _, n := range []config.Network{{Subnet: "x"}, {Grants: []config.Grant{{Prefix: "x"}}}, {Deny: []string{"1.2.3"}}, {Resolvers: []string{"dns"}}, {Upstreams: map[string]string{"x": "%"}}} {
		if _, err := setup.Options(&config.Config{Network: n}); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("%+v: %v", n, err)
		}
	}
}

func TestInstance(t *testing.T) {
	a, b := setup.Instance("/a"), setup.Instance("/b")
	if len(a) != 6 || a == b || setup.Instance("/x/../a/") != a {
		t.Error(a, b)
	}
}
