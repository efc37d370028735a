package network

import (
	"context"
	"net/netip"
	"os"
	"testing"

	"github.com/google/nftables"
	"github.com/miekg/dns"
)

func TestCheck(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	stop := l.private.resolver(t, "10.0.0.53:53", func(q dns.Question, m *dns.Msg) {})
	before := l.inventory()
	for _, f := range Check(context.Background(), l.opts) {
		if !f.OK || f.Fix != "" || f.Effect != "" {
			t.Errorf("%+v", f)
		}
	}
	if d := diff(before, l.inventory()); d != "" {
		t.Errorf("changed:\n%s", d)
	}
	if stop.hits() == 0 {
		t.Error("the resolver was not asked")
	}

	// Now break it, a thing at a time.
	failing := func(o Options) map[string]bool {
		m := map[string]bool{}
		for _, f := range Check(context.Background(), o) {
			if !f.OK {
				m[f.Name] = true
				if f.Effect == "" || f.Fix == "" || f.Detail == "" {
					t.Errorf("not told what to do: %+v", f)
				}
			}
		}
		return m
	}
	o := l.opts
	o.Subnet = netip.MustParsePrefix("10.0.0.0/16")
	if m := failing(o); len(m) != 1 || !m["subnet"] {
		t.Errorf("subnet in use: %v", m)
	}
	must(t, l.host.nft(func(c *nftables.Conn) error {
		drop := nftables.ChainPolicyDrop
		tb := c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "filter"})
		c.AddChain(&nftables.Chain{Name: "FORWARD", Table: tb, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &drop})
		return nil
	}))
	must(t, os.WriteFile(o.ResolvConf, nil, 0o600))
	eth0, err := l.host.h.LinkByName("eth0")
	must(t, err)
	must(t, l.host.h.LinkDel(eth0))
	m := failing(l.opts)
	for _, want := range []string{"other firewalls", "resolver", "way out"} {
		if !m[want] {
			t.Errorf("%s was not found: %v", want, m)
		}
	}
	o = l.opts
	o.Instance = "BAD"
	if m := failing(o); len(m) != 1 || !m["network options"] {
		t.Errorf("bad options: %v", m)
	}
}
