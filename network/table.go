package network

import (
	"errors"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"vivarium/network/policy"
)

const (
	// dialMark is on the packets of connections that the proxy makes for slots.
	// No slot can set it: a packet loses its mark on the way into the router.
	dialMark = 0x76697631
	// passMark is on packets that the router's table let through. The gate lets
	// those of slots with rules through only with it.
	passMark = 0x76697632
	// slotMark is on packets of slots from the first hook on. The slots' routing table
	// is for them alone: without the router's table there is no way out.
	slotMark = 0x76697633
	// proxyPort is where the proxy listens. Nobody reaches it but by redirection.
	proxyPort = 1
	// ipsDstNAT says that a connection was redirected (IPS_DST_NAT).
	ipsDstNAT = 1 << 5
	// ipsConfirmed says that a connection's first packet has left (IPS_CONFIRMED).
	ipsConfirmed = 1 << 3
)

// Sets of the router's table that change while it runs. They are described
// here so that an update can name them without asking the kernel.
var (
	tableRef  = &nftables.Table{Family: nftables.TableFamilyINet, Name: routerTable}
	gateRef   = &nftables.Table{Family: nftables.TableFamilyINet, Name: gateTable}
	slotsType = nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIPAddr)
	proxyType = nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIPAddr, nftables.TypeInetService)
	portType  = nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeInetService)
	flowType  = nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIPAddr, nftables.TypeInetProto, nftables.TypeInetService)
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

// setFree holds, in the gate table, the open slots that have no rules.
func setFree() *nftables.Set {
	return &nftables.Set{Table: gateRef, Name: "free", KeyType: nftables.TypeIFName}
}

// mapPolicy sends packets from an interface to the chain of its policy.
// An interface without an entry is dropped.
func mapPolicy() *nftables.Set { return verdictMap("policy") }

// The maps of policies' own limits.
func mapSlowOut() *nftables.Set { return verdictMap("slow_out") }
func mapSlowIn() *nftables.Set  { return verdictMap("slow_in") }
func mapSlowNew() *nftables.Set { return verdictMap("slow_new") }

func verdictMap(name string) *nftables.Set {
	return &nftables.Set{Table: tableRef, Name: name, KeyType: nftables.TypeIFName, DataType: nftables.TypeVerdict, IsMap: true}
}

func setHost() *nftables.Set {
	return &nftables.Set{Table: tableRef, Name: "host", KeyType: nftables.TypeIPAddr}
}

func setTCPUDP() *nftables.Set {
	return &nftables.Set{Table: tableRef, Name: "tcpudp", KeyType: nftables.TypeInetProto}
}

// setProxied holds "interface . address . port" of TCP that goes to the proxy.
func setProxied() *nftables.Set {
	return &nftables.Set{Table: tableRef, Name: "proxied", KeyType: proxyType, Concatenation: true, HasTimeout: true}
}

// setPinned holds "interface . address . protocol . port" that is open because
// our DNS server gave the address for a name.
func setPinned() *nftables.Set {
	return &nftables.Set{Table: tableRef, Name: "pinned", KeyType: flowType, Concatenation: true, HasTimeout: true}
}

// setCheckAll holds "interface . port" of TCP that goes to the proxy whatever its
// address.
func setCheckAll() *nftables.Set {
	return &nftables.Set{Table: tableRef, Name: "checkall", KeyType: portType, Concatenation: true}
}

// setUpstreamed holds the interfaces all of whose TCP goes to the proxy.
func setUpstreamed() *nftables.Set {
	return &nftables.Set{Table: tableRef, Name: "upstreamed", KeyType: nftables.TypeIFName}
}

func slotKey(s *slot) []nftables.SetElement {
	return []nftables.SetElement{{Key: append(ifname(s.veth), s.addr.AsSlice()...)}}
}

func openKey(s *slot) []nftables.SetElement { return ifElems([]string{s.veth}) }

func policyEntry(s *slot, chain string) []nftables.SetElement {
	return []nftables.SetElement{{Key: ifname(s.veth), VerdictData: &expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}}
}

func port4(p uint16) []byte { return append(binaryutil.BigEndian.PutUint16(p), 0, 0) }

// presence is what a slot with a policy has in sets and maps, besides its pins.
// The sets and their order are always the same.
func (n *Network) presence(s *slot, p *slotKernel) []change {
	var open, free, policy, checked, upstreamed, slowOut, slowIn, slowNew []nftables.SetElement
	if p != nil && opens(p.policy.Mode) {
		open = openKey(s)
		if p.program == nil {
			free, policy = openKey(s), policyEntry(s, chainPublic)
		} else {
			policy = policyEntry(s, p.program.name)
		}
		switch {
		case p.policy.Upstream != "":
			upstreamed = openKey(s)
		case p.policy.CheckAll():
			for _, port := range checkedPorts {
				checked = append(checked, nftables.SetElement{Key: append(ifname(s.veth), port4(port)...)})
			}
		}
		limit := func(suffix string) []nftables.SetElement {
			return []nftables.SetElement{{Key: ifname(s.veth), VerdictData: &expr.Verdict{Kind: expr.VerdictJump, Chain: p.program.name + suffix}}}
		}
		if _, ok := n.narrowBytes(p.policy); ok {
			slowOut, slowIn = limit(suffixOut), limit(suffixIn)
		}
		if _, ok := n.narrowConns(p.policy); ok {
			slowNew = limit(suffixNew)
		}
	}
	return []change{
		{setOpen(), open}, {mapPolicy(), policy}, {setCheckAll(), checked}, {setUpstreamed(), upstreamed},
		{mapSlowOut(), slowOut}, {mapSlowIn(), slowIn}, {mapSlowNew(), slowNew}, {setGate(), open}, {setFree(), free},
	}
}

// slotKernel is the policy that a slot has in the kernel.
type slotKernel struct {
	policy  *policy.Policy
	program *program // nil: a shared chain
}

// installRouter replaces the router's tables, with the elements of all slots, in
// one transaction. The caller holds rules for writing, or is alone.
func (n *Network) installRouter() error {
	all := n.presence(nil, nil)
	var slots []nftables.SetElement
	pins := [2][]nftables.SetElement{}
	progs := map[string]*program{}
	refs := map[string]int{}
	now := time.Now()
	for _, s := range n.slots {
		slots = append(slots, slotKey(s)...)
		if s.kernel == nil {
			continue
		}
		for i, c := range n.presence(s, s.kernel) {
			all[i].elems = append(all[i].elems, c.elems...)
		}
		if p := s.kernel.program; p != nil {
			if progs[p.name] == nil {
				progs[p.name] = p
			}
			refs[p.name]++
		}
		proxied, pinned := s.pins.elements(s, now)
		pins[0], pins[1] = append(pins[0], proxied...), append(pins[1], pinned...)
	}
	elems := func(like *nftables.Set) []nftables.SetElement {
		for _, c := range all {
			if c.set.Name == like.Name && c.set.Table.Name == like.Table.Name {
				return c.elems
			}
		}
		return nil
	}
	return n.router.do(func() error {
		var t, g *table
		err := n.router.withNft(func(c *nftables.Conn) error {
			t = replaceTable(c, routerTable)
			for _, s := range []*nftables.Set{setOpen(), setCheckAll(), setUpstreamed()} {
				t.set(s, elems(s))
			}
			t.set(setSlots(), slots)
			t.set(setProxied(), pins[0])
			t.set(setPinned(), pins[1])
			maps := []*nftables.Set{mapPolicy(), mapSlowOut(), mapSlowIn(), mapSlowNew()}
			for _, m := range maps {
				t.set(m, nil)
			}
			n.routerRules(t)
			for _, p := range progs {
				if err := p.add(c); err != nil {
					return err
				}
			}
			for _, m := range maps { // when the chains that they name are there
				if err := addElements(c, m, elems(m)); err != nil {
					return err
				}
			}
			g = replaceTable(c, gateTable)
			n.gateRules(g, elems(setGate()), elems(setFree()))
			if err := errors.Join(t.err, g.err); err != nil {
				return err
			}
			return c.Flush()
		})
		if err != nil {
			return err
		}
		n.progs = progs
		for name, p := range progs {
			p.refs = refs[name]
		}
		n.listings = map[string]listing{routerTable: t.listing, gateTable: g.listing}
		return nil
	})
}

// routerRules writes all chains but those of programs.
func (n *Network) routerRules(t *table) {
	deny := t.rangeSet("deny", append([]netip.Prefix{n.subnet}, n.opts.Deny...))
	spec := t.rangeSet("special", special)
	host := t.set(setHost(), addrElems(n.facts.addrs))
	tcpudp := t.fixed(setTCPUDP(), []nftables.SetElement{{Key: []byte{unix.IPPROTO_TCP}}, {Key: []byte{unix.IPPROTO_UDP}}})
	slotSet, openSet := setSlots(), setOpen()
	limiter := func(name string, timeout time.Duration) *nftables.Set {
		return t.set(&nftables.Set{Name: name, KeyType: nftables.TypeIFName, Dynamic: true, Size: 65535, HasTimeout: timeout > 0, Timeout: timeout}, nil)
	}
	conns, dnsRate, refusals := limiter("conns", 0), limiter("dnsrate", time.Minute), limiter("refusals", time.Minute)
	newRate, bytesOut, bytesIn := limiter("newrate", time.Minute), limiter("bytes_out", time.Minute), limiter("bytes_in", time.Minute)
	dns, prox, local := n.dnsAddr(), n.proxyAddr(), n.localAddr()

	ch := t.chains(chainPublic, "admit", "direct", "granting", "granting_host", "floor", "opening", "busy", "from_outside", "dns", "refuse", "early",
		"to_local", "from_local", "dialled", "slow_out", "slow_in")
	flowLogRules(t)

	// Who is refused is told so at once, the same for every address, up to
	// a rate that makes no flood of its own.
	t.rules(ch["refuse"], append(logRefused(tcpudp),
		rule(perIface(refusals, &expr.Limit{Type: expr.LimitTypePkts, Rate: 200, Unit: expr.LimitTimeSecond, Burst: 400, Over: true}), drop()),
		rule(l4proto(unix.IPPROTO_TCP), exprs{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}}),
		exprs{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_PORT_UNREACH}},
	))
	t.rules(ch["early"], append(grantRules(n.opts.Grants, accept()), gotoChain("refuse")))
	// Who is granted goes on where he came from.
	back := verdict(expr.VerdictReturn)
	t.rules(ch["granting"], append(grantRules(n.opts.Grants, back), drop()))
	t.rules(ch["granting_host"], append(grantRules(n.hostGrants(), back), drop()))
	t.rules(ch[chainPublic], []exprs{
		rule(daddrIn(deny), drop()),
		rule(daddrIn(spec), jump("granting")),
		rule(daddrIn(host), jump("granting_host")),
		gotoChain("direct"),
	})
	// What mode public lets pass, other resolvers excepted.
	direct := grantRules(n.resolverGrants(), gotoChain("admit"))
	for _, proto := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		for _, port := range resolverPorts {
			direct = append(direct, rule(l4proto(proto), dport(port), gotoChain("refuse")))
		}
	}
	t.rules(ch["direct"], append(direct, gotoChain("admit")))
	n.floorRules(t, ch["floor"])

	t.rules(ch["opening"], []exprs{
		rule(perIface(conns, &expr.Connlimit{Count: n.opts.MaxConns, Flags: expr.NFT_CONNLIMIT_F_INV}), gotoChain("busy")),
		verdictOf(expr.MetaKeyIIFNAME, mapSlowNew()),
		rule(perIface(newRate, newFlowsOver(n.opts.ConnsPerSecond)), gotoChain("busy")),
	})
	t.rules(ch["busy"], append(logRefused(tcpudp), drop()))
	t.rules(ch["slow_out"], []exprs{
		verdictOf(expr.MetaKeyIIFNAME, mapSlowOut()),
		rule(perIface(bytesOut, bytesOver(n.opts.BytesPerSecond)), drop()),
	})
	t.rules(ch["slow_in"], []exprs{
		verdictOf(expr.MetaKeyOIFNAME, mapSlowIn()),
		rule(perIfaceKey(expr.MetaKeyOIFNAME, bytesIn, bytesOver(n.opts.BytesPerSecond)), drop()),
	})
	admit := []exprs{
		rule(ctState(expr.CtStateBitINVALID), drop()),
		rule(firstPacket(), jump("opening")),
		jump("slow_out"),
	}
	t.rules(ch["admit"], append(admit,
		rule(exprs{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, in(tcpudp, false)}, gotoChain("log_out")),
		rule(icmpType(8), gotoChain("log_out0")), // echo request
		rule(ctState(expr.CtStateBitRELATED), pass()),
		gotoChain("refuse"),
	))
	t.rules(ch["from_outside"], []exprs{
		rule(oifIn(openSet, true), drop()),
		rule(ctState(expr.CtStateBitRELATED), accept()),
		rule(ctState(expr.CtStateBitESTABLISHED), jump("slow_in")),
		rule(ctState(expr.CtStateBitESTABLISHED), exprs{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, in(tcpudp, false)}, gotoChain("log_in")),
		rule(ctState(expr.CtStateBitESTABLISHED), gotoChain("log_in0")),
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
	// To the proxy, and to local services.
	t.rules(ch["to_local"], []exprs{
		rule(ctState(expr.CtStateBitINVALID), drop()),
		rule(firstPacket(), jump("opening")),
		jump("slow_out"),
		accept(),
	})
	t.rules(ch["from_local"], []exprs{jump("slow_in"), accept()})
	// What the proxy dials is judged once more, here, in the routes and on the host.
	t.rules(ch["dialled"], []exprs{
		rule(daddrIn(deny), drop()),
		rule(daddrIn(spec), jump("granting")),
		rule(daddrIn(host), jump("granting_host")),
		accept(),
	})
	prerouting := []exprs{
		rule(notIPv4(), drop()),
		// marked as well: where an answer comes from is looked up as if a slot sent there
		rule(iif(expr.CmpOpEq, routerUplink), setMark(slotMark), accept()),
		rule(ifaceAndSource(), exprs{in(slotSet, true)}, drop()),
		// DNS needs no connection tracking, and a flood of it would fill it.
		rule(daddrIs(dns), exprs{&expr.Notrack{}}, accept()),
		rule(setMark(slotMark), accept()),
	}
	t.hook("prerouting", nftables.ChainHookPrerouting, *nftables.ChainPriorityRaw, nftables.ChainPolicyDrop, prerouting...)
	// What follows only spares a sandbox the wait for an answer that will
	// not come: without it the same packets are dropped without a word,
	// by the routes or in the forward hook.
	refusing := []exprs{
		rule(iif(expr.CmpOpEq, routerUplink), accept()),
		rule(iifIn(openSet, true), gotoChain("refuse")),
		rule(daddrIs(dns), accept()),
	}
	if len(n.opts.Local) > 0 {
		refusing = append(refusing, rule(daddrIs(local), accept()))
	}
	t.hook("refusing", nftables.ChainHookPrerouting, *nftables.ChainPriorityMangle, nftables.ChainPolicyAccept, append(refusing,
		rule(daddrIn(deny), gotoChain("refuse")),
		rule(daddrIn(spec), gotoChain("early")),
		rule(daddrIn(host), gotoChain("early")),
	)...)
	// TCP that is to be checked goes to the proxy. The first packet decides for
	// the whole connection; that it is still to go on is seen to by the proxy.
	redirect := exprs{
		&expr.Immediate{Register: 1, Data: prox.AsSlice()},
		&expr.Immediate{Register: 2, Data: binaryutil.BigEndian.PutUint16(proxyPort)},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1, RegProtoMin: 2},
	}
	nat := []exprs{
		rule(iif(expr.CmpOpEq, routerUplink), accept()),
		rule(exprs{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, cmp(expr.CmpOpNeq, []byte{unix.IPPROTO_TCP})}, accept()),
	}
	if len(n.opts.Local) > 0 {
		nat = append(nat, rule(daddrIs(local), accept()))
	}
	ifaceAndPort := exprs{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, transport(2, reg2a)}
	ifaceAddrPort := exprs{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, ipField(16, reg2a), transport(2, reg2b)}
	t.base("redirecting", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, *nftables.ChainPriorityNATDest, nftables.ChainPolicyAccept, append(nat,
		rule(iifIn(setUpstreamed(), false), redirect),
		rule(ifaceAndPort, exprs{lookup(setCheckAll(), false)}, redirect),
		rule(ifaceAddrPort, exprs{lookup(setProxied(), false)}, redirect),
	)...)
	t.hook("raw_output", nftables.ChainHookOutput, *nftables.ChainPriorityRaw, nftables.ChainPolicyAccept,
		rule(notIPv4(), drop()),
		rule(saddrIs(dns), exprs{&expr.Notrack{}}),
	)
	input := []exprs{
		rule(notIPv4(), drop()),
		rule(iifIn(openSet, false), daddrIs(dns), l4proto(unix.IPPROTO_UDP), dport(53), gotoChain("dns")),
		rule(iifIn(openSet, false), daddrIs(dns), l4proto(unix.IPPROTO_TCP), dport(53), gotoChain("dns")),
		rule(iifIn(openSet, false), daddrIs(prox), l4proto(unix.IPPROTO_TCP), dport(proxyPort), ctStatus(ipsDstNAT), gotoChain("to_local")),
	}
	for _, l := range n.opts.Local {
		input = append(input, rule(iifIn(openSet, false), daddrIs(local), l4proto(unix.IPPROTO_TCP), dport(l.Port), gotoChain("to_local")))
	}
	t.hook("input", nftables.ChainHookInput, *nftables.ChainPriorityFilter, nftables.ChainPolicyDrop, append(input,
		rule(iif(expr.CmpOpEq, routerUplink), ctState(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept()),
		rule(iif(expr.CmpOpNeq, routerUplink), gotoChain("refuse")),
	)...)
	output := []exprs{
		rule(notIPv4(), drop()),
		rule(oifIn(openSet, false), saddrIs(dns), accept()),
		rule(oifIn(openSet, false), saddrIs(prox), l4proto(unix.IPPROTO_TCP), ctStatus(ipsDstNAT), gotoChain("from_local")),
	}
	if len(n.opts.Local) > 0 {
		output = append(output, rule(oifIn(openSet, false), saddrIs(local), l4proto(unix.IPPROTO_TCP), ctState(expr.CtStateBitESTABLISHED), gotoChain("from_local")))
	}
	t.hook("output", nftables.ChainHookOutput, *nftables.ChainPriorityFilter, nftables.ChainPolicyDrop, append(output,
		rule(oifIn(openSet, false), ctState(expr.CtStateBitRELATED), accept()),
		rule(oif(expr.CmpOpEq, routerUplink), ctState(expr.CtStateBitRELATED), accept()),
		rule(oif(expr.CmpOpEq, routerUplink), l4proto(unix.IPPROTO_TCP), markIs(dialMark), gotoChain("dialled")),
		// Refusals. Nothing but the kernel and our servers send here.
		rule(oif(expr.CmpOpNeq, routerUplink), icmpType(3), accept()),
		rule(oif(expr.CmpOpNeq, routerUplink), l4proto(unix.IPPROTO_TCP), tcpReset(), accept()),
	)...)
	t.hook("forward", nftables.ChainHookForward, *nftables.ChainPriorityFilter, nftables.ChainPolicyDrop,
		rule(notIPv4(), drop()),
		rule(iif(expr.CmpOpEq, routerUplink), gotoChain("from_outside")),
		rule(oif(expr.CmpOpNeq, routerUplink), drop()), // slot to slot
		verdictOf(expr.MetaKeyIIFNAME, mapPolicy()),
	)
}

// gateRules write the second table. Its chain comes after that of the first.
func (n *Network) gateRules(g *table, open, free []nftables.SetElement) {
	gate, freeSet := g.set(setGate(), open), g.set(setFree(), free)
	g.hook("forward", nftables.ChainHookForward, *nftables.ChainPriorityFilter+10, nftables.ChainPolicyDrop,
		rule(notIPv4(), drop()),
		rule(iif(expr.CmpOpEq, routerUplink), oifIn(gate, false), accept()),
		rule(oif(expr.CmpOpEq, routerUplink), iifIn(freeSet, false), accept()),
		rule(oif(expr.CmpOpEq, routerUplink), iifIn(gate, false), markIs(passMark), accept()),
	)
}

// floorRules write the operator's rules by address: what they let pass returns.
func (n *Network) floorRules(t *table, ch *nftables.Chain) {
	floor, _, rest, _ := n.none.AddrRules()
	b := &progBuilder{p: &program{}, sets: "floor_"}
	var rules []exprs
	for _, g := range groupRules(floor) {
		then := gotoChain("refuse")
		if g.Allow {
			then = verdict(expr.VerdictReturn)
		}
		rules = append(rules, b.match(g, then))
	}
	if !rest {
		rules = append(rules, gotoChain("refuse"))
	}
	for _, s := range b.p.sets {
		t.fixed(s.set, s.elems)
	}
	t.rules(ch, rules)
}

// resolverPorts are those that mode public alone does not open.
var resolverPorts = policy.ResolverPorts()

// resolverGrants are grants that name such a port, for that port alone.
func (n *Network) resolverGrants() []policy.Grant {
	var out []policy.Grant
	for _, g := range n.opts.Grants {
		var ports []uint16
		for _, p := range g.Ports {
			if slices.Contains(resolverPorts, p) {
				ports = append(ports, p)
			}
		}
		if len(ports) > 0 {
			out = append(out, policy.Grant{Prefix: g.Prefix, Ports: ports})
		}
	}
	return out
}

// bytesOver matches when more than a rate of bytes a second has gone by. The
// kernel's bucket holds a second's worth besides the burst.
func bytesOver(rate int64) expr.Any {
	return &expr.Limit{Type: expr.LimitTypePktBytes, Rate: uint64(rate), Unit: expr.LimitTimeSecond, Burst: 64 << 10, Over: true}
}

func newFlowsOver(rate int64) expr.Any {
	return &expr.Limit{Type: expr.LimitTypePkts, Rate: uint64(rate), Unit: expr.LimitTimeSecond, Burst: uint32(2 * rate), Over: true}
}

// ifaceAndSource loads "interface . source address" into registers 1 and 2.
func ifaceAndSource() exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, ipField(12, 2)}
}

// perIface matches when e, kept once per interface, matches.
func perIface(s *nftables.Set, e expr.Any) exprs { return perIfaceKey(expr.MetaKeyIIFNAME, s, e) }

func perIfaceKey(key expr.MetaKey, s *nftables.Set, e expr.Any) exprs {
	op := uint32(unix.NFT_DYNSET_OP_ADD)
	if s.HasTimeout {
		op = unix.NFT_DYNSET_OP_UPDATE
	}
	return exprs{
		&expr.Meta{Key: key, Register: 1},
		&expr.Dynset{SrcRegKey: 1, SetName: s.Name, SetID: s.ID, Operation: op, Exprs: []expr.Any{e}},
	}
}
