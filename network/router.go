package network

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
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
	n.slow, err = startThread(ns)
	return err
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
	for _, kv := range [][2]string{{"accept_redirects", "0"}, {"send_redirects", "0"}, {"accept_source_route", "0"}, {"rp_filter", "1"}, {"arp_ignore", "1"}} {
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
	if err := h.AddrReplace(lo, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(n.dnsAddr(), 32))}); err != nil {
		return fmt.Errorf("set DNS address: %w", err)
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
// from outside to the main table, all others to the slots' table, and nothing
// past it.
func (n *Network) ensureRules() error {
	have, err := dump(func() ([]netlink.Rule, error) { return n.router.h.RuleList(netlink.FAMILY_V4) })
	if err != nil {
		return fmt.Errorf("list routing rules: %w", err)
	}
	prios := map[int]bool{}
	for _, r := range have {
		prios[r.Priority] = true
	}
	for _, w := range []struct {
		prio  int
		iif   string
		table int
		typ   uint8
	}{
		{40, "", 0, unix.RTN_BLACKHOLE},
		{30, "", slotRoutes, unix.RTN_UNICAST},
		{20, routerUplink, unix.RT_TABLE_MAIN, unix.RTN_UNICAST},
		{10, "lo", unix.RT_TABLE_MAIN, unix.RTN_UNICAST},
	} {
		if prios[w.prio] {
			continue
		}
		r := netlink.NewRule()
		r.Family, r.Priority, r.IifName, r.Type = netlink.FAMILY_V4, w.prio, w.iif, w.typ
		if w.table != 0 {
			r.Table = w.table
		}
		if err := n.router.h.RuleAdd(r); err != nil {
			return fmt.Errorf("add routing rule %d: %w", w.prio, err)
		}
	}
	return nil
}

// Sets of the router's table that change while it runs. They are described
// here so that an update can name them without asking the kernel.
var (
	tableRef  = &nftables.Table{Family: nftables.TableFamilyINet, Name: routerTable}
	gateRef   = &nftables.Table{Family: nftables.TableFamilyINet, Name: gateTable}
	slotsType = nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIPAddr)
)

// setSlots holds "interface . source address" of every slot that exists: what
// does not match is spoofed, and dropped before connection tracking.
func setSlots() *nftables.Set {
	return &nftables.Set{Table: tableRef, Name: "slots", KeyType: slotsType, Concatenation: true}
}

// setOpen holds the interfaces of slots whose policy lets anything pass at all.
func setOpen() *nftables.Set {
	return &nftables.Set{Table: tableRef, Name: "open", KeyType: nftables.TypeIFName}
}

// setGate is setOpen's twin in the gate table.
func setGate() *nftables.Set {
	return &nftables.Set{Table: gateRef, Name: "open", KeyType: nftables.TypeIFName}
}

// mapPolicy sends packets from an interface to the chain of its policy.
// An interface without an entry is dropped.
func mapPolicy() *nftables.Set {
	return &nftables.Set{Table: tableRef, Name: "policy", KeyType: nftables.TypeIFName, DataType: nftables.TypeVerdict, IsMap: true}
}

func setHost() *nftables.Set {
	return &nftables.Set{Table: tableRef, Name: "host", KeyType: nftables.TypeIPAddr}
}

func slotKey(s *slot) []nftables.SetElement {
	return []nftables.SetElement{{Key: append(ifname(s.veth), s.addr.AsSlice()...)}}
}

func openKey(s *slot) []nftables.SetElement { return ifElems([]string{s.veth}) }

func policyEntry(s *slot, chain string) []nftables.SetElement {
	return []nftables.SetElement{{Key: ifname(s.veth), VerdictData: &expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}}
}

// installRouter replaces the router's tables, with the elements of all slots, in
// one transaction.
func (n *Network) installRouter() error {
	var slots, open, policy []nftables.SetElement
	for _, s := range n.slots {
		slots = append(slots, slotKey(s)...)
		if opens(s.Policy.Mode) {
			open = append(open, openKey(s)...)
			policy = append(policy, policyEntry(s, chainPublic)...)
		}
	}
	dns := n.dnsAddr()
	return n.router.nft(func(c *nftables.Conn) error {
		t := replaceTable(c, routerTable)
		deny := t.rangeSet("deny", append([]netip.Prefix{n.subnet}, n.opts.Deny...))
		spec := t.rangeSet("special", special)
		host := t.set(setHost(), addrElems(n.facts.addrs))
		slotSet := t.set(setSlots(), slots)
		openSet := t.set(setOpen(), open)
		conns := t.set(&nftables.Set{Name: "conns", KeyType: nftables.TypeIFName, Dynamic: true, Size: 65535}, nil)
		dnsRate := t.set(&nftables.Set{Name: "dnsrate", KeyType: nftables.TypeIFName, Dynamic: true, Size: 65535, HasTimeout: true, Timeout: time.Minute}, nil)

		refusals := t.set(&nftables.Set{Name: "refusals", KeyType: nftables.TypeIFName, Dynamic: true, Size: 65535, HasTimeout: true, Timeout: time.Minute}, nil)

		ch := t.chains(chainPublic, "granted", "admit", "from_outside", "dns", "refuse", "early")
		// Who is refused is told so at once, the same for every address, up to
		// a rate that makes no flood of its own.
		t.rules(ch["refuse"], []exprs{
			rule(perIface(refusals, &expr.Limit{Type: expr.LimitTypePkts, Rate: 200, Unit: expr.LimitTimeSecond, Burst: 400, Over: true}), drop()),
			rule(l4proto(unix.IPPROTO_TCP), exprs{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}}),
			exprs{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH}},
		})
		t.rules(ch["early"], append(grantRules(n.opts.Grants, accept()), gotoChain("refuse")))
		t.rules(ch[chainPublic], []exprs{
			rule(daddrIn(deny), drop()),
			rule(daddrIn(spec), gotoChain("granted")),
			rule(daddrIn(host), gotoChain("granted")),
			gotoChain("admit"),
		})
		t.rules(ch["granted"], append(grantRules(n.opts.Grants, gotoChain("admit")), drop()))
		t.rules(ch["admit"], []exprs{
			rule(ctState(expr.CtStateBitINVALID), drop()),
			rule(ctState(expr.CtStateBitNEW), perIface(conns, &expr.Connlimit{Count: n.opts.MaxConns, Flags: expr.NFT_CONNLIMIT_F_INV}), drop()),
			rule(l4proto(unix.IPPROTO_TCP), accept()),
			rule(l4proto(unix.IPPROTO_UDP), accept()),
			rule(icmpType(8), accept()), // echo request
			rule(ctState(expr.CtStateBitRELATED), accept()),
			drop(),
		})
		t.rules(ch["from_outside"], []exprs{
			rule(oifIn(openSet, false), ctState(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept()),
			drop(),
		})
		// A flood is cut here, before it costs the daemon anything or fills the
		// socket that all slots share. The server counts queries once more, those
		// that come many to a TCP segment.
		rate := uint64(n.opts.DNSRate)
		t.rules(ch["dns"], []exprs{
			rule(perIface(dnsRate, &expr.Limit{Type: expr.LimitTypePkts, Rate: rate, Unit: expr.LimitTimeSecond, Burst: uint32(2 * rate), Over: true}), drop()),
			accept(),
		})
		t.hook("prerouting", nftables.ChainHookPrerouting, *nftables.ChainPriorityRaw, nftables.ChainPolicyDrop,
			rule(notIPv4(), drop()),
			rule(iif(expr.CmpOpEq, routerUplink), accept()),
			rule(ifaceAndSource(), exprs{in(slotSet, true)}, drop()),
			// DNS needs no connection tracking, and a flood of it would fill it.
			rule(daddrIs(dns), exprs{&expr.Notrack{}}, accept()),
			accept(),
		)
		// What follows only spares a sandbox the wait for an answer that will
		// not come: without it the same packets are dropped without a word,
		// by the routes or in the forward hook.
		t.hook("refusing", nftables.ChainHookPrerouting, *nftables.ChainPriorityMangle, nftables.ChainPolicyAccept,
			rule(iif(expr.CmpOpEq, routerUplink), accept()),
			rule(iifIn(openSet, true), gotoChain("refuse")),
			rule(daddrIs(dns), accept()),
			rule(daddrIn(deny), gotoChain("refuse")),
			rule(daddrIn(spec), gotoChain("early")),
			rule(daddrIn(host), gotoChain("early")),
		)
		t.hook("raw_output", nftables.ChainHookOutput, *nftables.ChainPriorityRaw, nftables.ChainPolicyAccept,
			rule(notIPv4(), drop()),
			rule(saddrIs(dns), exprs{&expr.Notrack{}}),
		)
		t.hook("input", nftables.ChainHookInput, *nftables.ChainPriorityFilter, nftables.ChainPolicyDrop,
			rule(notIPv4(), drop()),
			rule(iifIn(openSet, false), daddrIs(dns), l4proto(unix.IPPROTO_UDP), dport(53), gotoChain("dns")),
			rule(iifIn(openSet, false), daddrIs(dns), l4proto(unix.IPPROTO_TCP), dport(53), gotoChain("dns")),
			rule(iif(expr.CmpOpNeq, routerUplink), gotoChain("refuse")),
		)
		t.hook("output", nftables.ChainHookOutput, *nftables.ChainPriorityFilter, nftables.ChainPolicyDrop,
			rule(notIPv4(), drop()),
			rule(oifIn(openSet, false), saddrIs(dns), accept()),
			rule(oifIn(openSet, false), ctState(expr.CtStateBitRELATED), accept()),
			rule(oif(expr.CmpOpEq, routerUplink), ctState(expr.CtStateBitRELATED), accept()),
			// Refusals. Nothing but the kernel and our DNS server sends here.
			rule(oif(expr.CmpOpNeq, routerUplink), icmpType(3), accept()),
			rule(oif(expr.CmpOpNeq, routerUplink), l4proto(unix.IPPROTO_TCP), tcpReset(), accept()),
		)
		vmap := t.set(mapPolicy(), policy)
		t.hook("forward", nftables.ChainHookForward, *nftables.ChainPriorityFilter, nftables.ChainPolicyDrop,
			rule(notIPv4(), drop()),
			rule(iif(expr.CmpOpEq, routerUplink), gotoChain("from_outside")),
			rule(oif(expr.CmpOpNeq, routerUplink), drop()), // slot to slot
			exprs{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Lookup{SourceRegister: 1, DestRegister: 0, IsDestRegSet: true, SetName: vmap.Name, SetID: vmap.ID}},
		)
		g := replaceTable(c, gateTable)
		gate := g.set(setGate(), open)
		g.hook("forward", nftables.ChainHookForward, *nftables.ChainPriorityFilter-10, nftables.ChainPolicyDrop,
			rule(notIPv4(), drop()),
			rule(iif(expr.CmpOpEq, routerUplink), oifIn(gate, false), accept()),
			rule(oif(expr.CmpOpEq, routerUplink), iifIn(gate, false), accept()),
		)
		return errors.Join(t.err, g.err)
	})
}

// ifaceAndSource loads "interface . source address" into registers 1 and 2.
func ifaceAndSource() exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, ipField(12, 2)}
}

// perIface matches when e, kept once per interface, matches.
func perIface(s *nftables.Set, e expr.Any) exprs {
	op := uint32(unix.NFT_DYNSET_OP_ADD)
	if s.HasTimeout {
		op = unix.NFT_DYNSET_OP_UPDATE
	}
	return exprs{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Dynset{SrcRegKey: 1, SetName: s.Name, SetID: s.ID, Operation: op, Exprs: []expr.Any{e}},
	}
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
