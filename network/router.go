package network

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	netnsDir    = "/run/netns" // where ip-netns(8) looks
	routerTable = "vivarium"
	// gateTable is a second table of the router that knows only which slots are
	// open. Should the first be gone, closed slots stay closed.
	gateTable = "vivarium_gate"
	// slotRoutes is the routing table for packets that come from slots: the
	// way out, blackholes, and no way to any other slot.
	slotRoutes = 100
)

func (n *Network) routerPath() string { return filepath.Join(netnsDir, "viv-"+n.opts.Instance) }

// ensureRouter opens the router namespace, making it if need be.
func (n *Network) ensureRouter() error {
	path := n.routerPath()
	ns, err := nsFile(path)
	if errors.Is(err, errNotNetns) || errors.Is(err, os.ErrNotExist) {
		if err := dropNetns(path); err != nil {
			return fmt.Errorf("clear router namespace: %w", err)
		}
		for range 10 { // another instance may be removing the directory
			if err = os.MkdirAll(netnsDir, 0o755); err != nil {
				return fmt.Errorf("make %s: %w", netnsDir, err)
			}
			if err = newNetns(path, func(*os.File) error { return nil }); !errors.Is(err, os.ErrNotExist) {
				break
			}
		}
		if err != nil {
			return fmt.Errorf("make router namespace: %w", err)
		}
		ns, err = nsFile(path)
	}
	if err != nil {
		return fmt.Errorf("open router namespace: %w", err)
	}
	n.routerNS = ns
	if n.router, err = startThread(ns); err != nil {
		return err
	}
	for _, t := range []**nsThread{&n.slow, &n.dialer, &n.watcher} {
		if *t, err = startThread(ns); err != nil {
			return err
		}
	}
	return nil
}

// routerSysctls apply to every interface made later, too: strict about sources, deaf to redirects, and answering ARP only
// for the address of the very interface that was asked.
func routerSysctls() error {
	if err := disableIPv6(); err != nil {
		return err
	}
	for _, kv := range [][2]string{
		{"forwarding", "1"}, {"rp_filter", "1"}, {"arp_ignore", "1"}, {"arp_announce", "2"},
		{"accept_redirects", "0"}, {"send_redirects", "0"}, {"accept_source_route", "0"}, {"proxy_arp", "0"},
	} {
		if err := setSysctl("ipv4/conf/default/"+kv[0], kv[1]); err != nil {
			return err
		}
	}
	for _, kv := range [][2]string{{"accept_redirects", "0"}, {"send_redirects", "0"}, {"accept_source_route", "0"}, {"rp_filter", "1"}, {"arp_ignore", "1"}, {"src_valid_mark", "1"}} {
		if err := setSysctl("ipv4/conf/all/"+kv[0], kv[1]); err != nil {
			return err
		}
	}
	// Refusals have a limit of their own in the rules. The kernel's would be
	// one a second, and in older kernels a budget shared with the host.
	return setSysctl("ipv4/icmp_ratemask", "0")
}

// configureRouter gives the router its addresses, routes and rules.
func (n *Network) configureRouter() error {
	h := n.router.h
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find loopback in router: %w", err)
	}
	own := []netip.Addr{n.dnsAddr(), n.proxyAddr()}
	if len(n.opts.Local) > 0 {
		own = append(own, n.localAddr())
	}
	for _, a := range own {
		if err := h.AddrReplace(lo, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(a, 32))}); err != nil {
			return fmt.Errorf("set address %s of router: %w", a, err)
		}
	}
	if err := h.LinkSetUp(lo); err != nil {
		return fmt.Errorf("bring loopback up in router: %w", err)
	}
	if err := h.AddrReplace(n.up0, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(n.routerAddr(), 30))}); err != nil {
		return fmt.Errorf("set router address: %w", err)
	}
	if err := n.slow.do(func() error { return enableGRO(routerUplink) }); err != nil {
		return err
	}
	if err := h.LinkSetUp(n.up0); err != nil {
		return fmt.Errorf("bring uplink up in router: %w", err)
	}
	// The main table serves the router itself and packets from outside, the
	// slots' table serves packets from slots.
	out := netlink.Route{LinkIndex: n.up0.Attrs().Index, Gw: n.hostAddr().AsSlice()}
	all := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	want := map[string]netlink.Route{}
	add := func(table int, dst netip.Prefix, r netlink.Route) {
		r.Table, r.Dst = table, ipNet(dst)
		want[fmt.Sprint(table, dst)] = r
	}
	hole := netlink.Route{Type: unix.RTN_BLACKHOLE}
	add(unix.RT_TABLE_MAIN, all, out)
	add(unix.RT_TABLE_MAIN, n.subnet, hole)
	add(slotRoutes, all, out)
	for _, p := range special {
		add(slotRoutes, p, hole)
	}
	for _, a := range n.facts.addrs {
		add(slotRoutes, netip.PrefixFrom(a, 32), hole)
	}
	for _, g := range n.opts.Grants {
		add(slotRoutes, g.Prefix, out)
	}
	for _, p := range n.opts.Deny {
		add(slotRoutes, p, hole)
	}
	add(slotRoutes, n.subnet, hole)

	// Blackholes before ways out, and stale routes go before any rule changes.
	var ways []netlink.Route
	for _, r := range want {
		if r.Type != unix.RTN_BLACKHOLE {
			ways = append(ways, r)
			continue
		}
		if err := h.RouteReplace(&r); err != nil {
			return fmt.Errorf("add blackhole route %s: %w", r.Dst, err)
		}
	}
	for _, r := range ways {
		if err := h.RouteReplace(&r); err != nil {
			return fmt.Errorf("add route %s: %w", r.Dst, err)
		}
	}
	old, err := dump(func() ([]netlink.Route, error) {
		return h.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: slotRoutes}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return fmt.Errorf("list router routes: %w", err)
	}
	for _, r := range old {
		dst := all
		if r.Dst != nil {
			dst, _ = prefixOf(r.Dst)
		}
		if w, ok := want[fmt.Sprint(slotRoutes, dst)]; ok && (w.Type == unix.RTN_BLACKHOLE) == (r.Type == unix.RTN_BLACKHOLE) {
			continue
		}
		if err := h.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("remove stale route %s: %w", dst, err)
		}
	}
	return n.ensureRules()
}

// ensureRules sends packets by where they come from: the router's own and those
// from outside to the main table, those that our rules know as a slot's to the
// slots' table, and nothing past it. What the proxy dials for a slot takes the
// slots' table as well.
func (n *Network) ensureRules() error {
	have, err := dump(func() ([]netlink.Rule, error) { return n.router.h.RuleList(netlink.FAMILY_V4) })
	if err != nil {
		return fmt.Errorf("list routing rules: %w", err)
	}
	prios := map[int]netlink.Rule{}
	for _, r := range have {
		prios[r.Priority] = r
	}
	for _, w := range []struct {
		prio  int
		iif   string
		table int
		typ   uint8
		mark  uint32
	}{
		{40, "", 0, unix.RTN_BLACKHOLE, 0},
		{30, "", slotRoutes, unix.RTN_UNICAST, slotMark},
		{20, routerUplink, unix.RT_TABLE_MAIN, unix.RTN_UNICAST, 0},
		{10, "lo", unix.RT_TABLE_MAIN, unix.RTN_UNICAST, 0},
		{6, "lo", 0, unix.RTN_BLACKHOLE, dialMark},
		{5, "lo", slotRoutes, unix.RTN_UNICAST, dialMark},
	} {
		if old, ok := prios[w.prio]; ok {
			if old.Mark == w.mark {
				continue
			}
			// an earlier version's
			if err := n.router.h.RuleDel(&old); err != nil {
				return fmt.Errorf("remove routing rule %d: %w", w.prio, err)
			}
		}
		r := netlink.NewRule()
		r.Family, r.Priority, r.IifName, r.Type = netlink.FAMILY_V4, w.prio, w.iif, w.typ
		if w.table != 0 {
			r.Table = w.table
		}
		r.Mark = w.mark
		if err := n.router.h.RuleAdd(r); err != nil {
			return fmt.Errorf("add routing rule %d: %w", w.prio, err)
		}
	}
	return nil
}

// hasTables says whether tables of those names are in the thread's namespace.
func (t *nsThread) hasTables(names ...string) (bool, error) {
	found := 0
	err := t.do(func() error {
		return t.withNft(func(c *nftables.Conn) error {
			ts, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
			for _, t := range ts {
				if slices.Contains(names, t.Name) {
					found++
				}
			}
			return err
		})
	})
	return found == len(names), err
}
