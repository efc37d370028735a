package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"vivarium/sandbox"

	"vivarium/network/policy"
)

// uplinkGroup marks the host's end of every instance's uplink, so that the
// tables of several instances know each other's interfaces.
const uplinkGroup = 0x766976

// routerUplink is the router's end of the uplink.
const routerUplink = "up0"

func (n *Network) uplinkName() string { return "viv" + n.opts.Instance }
func (n *Network) hostTable() string  { return "vivarium_" + n.opts.Instance }

// hostFacts is what the host's network looks like to us.
type hostFacts struct {
	egress []string     // interfaces that lead to public addresses or grants, sorted
	addrs  []netip.Addr // the host's own addresses, sorted
	mtu    int          // smallest MTU of egress, bytes
	taken  []netip.Prefix
	others int // uplinks of other instances
}

// readHost looks at the host namespace, changing nothing.
func (n *Network) readHost() (hostFacts, error) {
	var f hostFacts
	h := n.host.h
	links, err := dump(h.LinkList)
	if err != nil {
		return f, fmt.Errorf("list host links: %w", err)
	}
	byIndex := map[int]netlink.Link{}
	for _, l := range links {
		byIndex[l.Attrs().Index] = l
		if l.Attrs().Group == uplinkGroup && l.Attrs().Name != n.uplinkName() {
			f.others++
		}
	}
	addrs, err := dump(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_V4) })
	if err != nil {
		return f, fmt.Errorf("list host addresses: %w", err)
	}
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP.To4())
		if !ok {
			continue
		}
		if l := byIndex[a.LinkIndex]; l != nil && l.Attrs().Name == n.uplinkName() {
			continue
		}
		f.addrs = append(f.addrs, ip)
		if p, ok := prefixOf(a.IPNet); ok {
			f.taken = append(f.taken, p)
		}
	}
	routes, err := dump(func() ([]netlink.Route, error) {
		return h.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return f, fmt.Errorf("list host routes: %w", err)
	}
	egress := map[string]int{}
	use := func(index int) {
		l := byIndex[index]
		if l == nil || l.Attrs().Flags&net.FlagLoopback != 0 || l.Attrs().Group == uplinkGroup || l.Attrs().Name == n.uplinkName() {
			return
		}
		egress[l.Attrs().Name] = l.Attrs().MTU
	}
	for _, r := range routes {
		if l := byIndex[r.LinkIndex]; l != nil && l.Attrs().Name == n.uplinkName() {
			continue
		}
		dst := netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if r.Dst != nil {
			p, ok := prefixOf(r.Dst)
			if !ok {
				continue
			}
			dst = p
		}
		if dst.Bits() > 0 {
			f.taken = append(f.taken, dst)
		}
		if r.Type != unix.RTN_UNICAST || containedIn(special, dst) {
			continue
		}
		use(r.LinkIndex)
		for _, nh := range r.MultiPath {
			use(nh.LinkIndex)
		}
	}
	for _, g := range n.opts.Grants {
		rs, err := h.RouteGet(net.IP(g.Prefix.Addr().AsSlice()))
		if err != nil {
			continue // no route now; the next look may find one
		}
		for _, r := range rs {
			use(r.LinkIndex)
		}
	}
	for name, mtu := range egress {
		f.egress = append(f.egress, name)
		if f.mtu == 0 || mtu < f.mtu {
			f.mtu = mtu
		}
	}
	if f.mtu == 0 || f.mtu > 65535 {
		f.mtu = 1500
	}
	slices.Sort(f.egress)
	slices.SortFunc(f.addrs, netip.Addr.Compare)
	f.addrs = slices.Compact(f.addrs)
	return f, nil
}

// boundConns sets the default of MaxConns.
func (n *Network) boundConns() {
	if n.opts.MaxConns != 0 {
		return
	}
	n.opts.MaxConns = 4096
	_ = n.host.do(func() error {
		v, err := getSysctl("netfilter/nf_conntrack_max")
		if err != nil {
			return err // not loaded yet: the default will do
		}
		if k, err := strconv.ParseUint(v, 10, 32); err == nil {
			n.opts.MaxConns = uint32(min(max(k/64, 512), 4096))
		}
		return nil
	})
}

func prefixOf(p *net.IPNet) (netip.Prefix, bool) {
	a, ok := netip.AddrFromSlice(p.IP.To4())
	if !ok {
		return netip.Prefix{}, false
	}
	ones, _ := p.Mask.Size()
	return netip.PrefixFrom(a, ones).Masked(), true
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), 32)}
}

// chooseSubnet finds a free subnet, starting at a place that depends on the
// instance so that two hosts' or instances' choices rarely meet. The caller
// holds the registry.
func (n *Network) chooseSubnet(f hostFacts) (netip.Prefix, error) {
	taken := slices.Clone(f.taken)
	for _, g := range n.opts.Grants {
		if g.Prefix.Bits() > 10 {
			taken = append(taken, g.Prefix)
		}
	}
	for _, u := range n.upstreams() {
		taken = append(taken, netip.PrefixFrom(u.Addr(), u.Addr().BitLen()))
	}
	if p := n.opts.Subnet; p.IsValid() {
		if overlapsAny(taken, p) {
			return p, sandbox.Conflict.Errorf("network: subnet %s overlaps an address, route, grant or resolver of the host", p).
				WithHint("choose another subnet in the configuration, or leave it out to have one chosen")
		}
		return p, nil
	}
	start := uint32(0)
	for _, c := range n.opts.Instance {
		start = start*31 + uint32(c)
	}
	for i := range uint32(256) {
		p := netip.PrefixFrom(addrOf(10<<24|192<<16|(start+i)%256<<14), 18)
		if !overlapsAny(taken, p) {
			return p, nil
		}
	}
	return netip.Prefix{}, sandbox.Exhausted.Errorf("network: no free /18 in 10.192.0.0/10").
		WithHint("set a subnet in the configuration")
}

// Addresses in the subnet.
func (n *Network) hostAddr() netip.Addr   { return n.addr(1) }
func (n *Network) routerAddr() netip.Addr { return n.addr(2) }
func (n *Network) dnsAddr() netip.Addr    { return n.addr(5) }
func (n *Network) proxyAddr() netip.Addr  { return n.addr(6) }
func (n *Network) localAddr() netip.Addr  { return n.addr(7) }

func (n *Network) addr(i uint32) netip.Addr { return addrOf(u32(n.subnet.Addr()) + i) }

// ensureUplink makes or repairs the veth between host and router, both ends
// down or as they were. An uplink whose other end is not in our router is of a
// router that is gone.
func (n *Network) ensureUplink() error {
	name := n.uplinkName()
	hl, err := n.host.h.LinkByName(name)
	if err != nil && !isNotFound(err) {
		return fmt.Errorf("find uplink: %w", err)
	}
	rl, rerr := n.router.h.LinkByName(routerUplink)
	if rerr != nil && !isNotFound(rerr) {
		return fmt.Errorf("find uplink in router: %w", rerr)
	}
	if err == nil && (rerr != nil || hl.Attrs().ParentIndex != rl.Attrs().Index) {
		if hl.Type() != "veth" {
			return sandbox.Conflict.Errorf("network: interface %s exists and is not ours", name).
				WithHint("choose another instance name")
		}
		if err := n.host.h.LinkDel(hl); err != nil {
			return fmt.Errorf("remove stale uplink: %w", err)
		}
		hl = nil
	}
	if err != nil || hl == nil {
		if rerr == nil {
			if err := n.router.h.LinkDel(rl); err != nil && !isNotFound(err) {
				return fmt.Errorf("remove stale uplink in router: %w", err)
			}
		}
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.Group = name, n.mtu, uplinkGroup
		if err := n.host.h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: routerUplink, PeerNamespace: netlink.NsFd(n.routerNS.Fd())}); err != nil {
			return fmt.Errorf("make uplink: %w", err)
		}
		if hl, err = n.host.h.LinkByName(name); err != nil {
			return fmt.Errorf("find new uplink: %w", err)
		}
		if rl, err = n.router.h.LinkByName(routerUplink); err != nil {
			return fmt.Errorf("find new uplink in router: %w", err)
		}
	}
	if hl.Attrs().Group != uplinkGroup {
		// The group may not be taken at creation by older kernels.
		if err := n.host.h.LinkSetGroup(hl, uplinkGroup); err != nil {
			return fmt.Errorf("mark uplink: %w", err)
		}
	}
	n.uplink, n.up0 = hl, rl
	if hl.Attrs().MTU == n.mtu && rl.Attrs().MTU == n.mtu {
		return nil
	}
	if err := errors.Join(n.host.h.LinkSetMTU(hl, n.mtu), n.router.h.LinkSetMTU(rl, n.mtu)); err != nil {
		return fmt.Errorf("set MTU of uplink: %w", err)
	}
	return nil
}

// configureHost gives the host's end its address, flags and route.
func (n *Network) configureHost() error {
	name := n.uplinkName()
	err := n.host.do(func() error {
		if err := setSysctl("ipv6/conf/"+name+"/disable_ipv6", "1"); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		for _, kv := range [][2]string{{"accept_redirects", "0"}, {"send_redirects", "0"}, {"rp_filter", "1"}} {
			if err := setSysctl("ipv4/conf/"+name+"/"+kv[0], kv[1]); err != nil {
				return err
			}
		}
		return enableGRO(name)
	})
	if err != nil {
		return fmt.Errorf("configure uplink: %w", err)
	}
	if err := n.host.h.AddrReplace(n.uplink, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(n.hostAddr(), 30))}); err != nil {
		return fmt.Errorf("set uplink address: %w", err)
	}
	if err := n.host.h.LinkSetUp(n.uplink); err != nil {
		return fmt.Errorf("bring uplink up: %w", err)
	}
	err = n.host.h.RouteReplace(&netlink.Route{LinkIndex: n.uplink.Attrs().Index, Dst: ipNet(n.subnet), Gw: n.routerAddr().AsSlice()})
	if err != nil {
		return fmt.Errorf("route subnet to router: %w", err)
	}
	return nil
}

// installHost puts our table into the host namespace. Its base chains accept
// what does not come from or go to our uplink, except that an interface which
// forwards only because one of us said so (lent) forwards only to us.
func (n *Network) installHost(f hostFacts, lent []string) error {
	up := n.uplinkName()
	var chosen []nftables.SetElement
	n.mu.Lock()
	for _, s := range n.slots {
		if s.source.IsValid() {
			chosen = append(chosen, sourceElems(s, s.source)...)
		}
	}
	n.mu.Unlock()
	return n.host.nft(func(c *nftables.Conn) error {
		t := replaceTable(c, n.hostTable())
		deny := t.rangeSet("deny", n.opts.Deny)
		spec := t.rangeSet("special", special)
		lentSet := t.set(&nftables.Set{Name: "lent", KeyType: nftables.TypeIFName}, ifElems(lent))
		sources := t.set(n.mapSources(), chosen)
		egress := t.set(&nftables.Set{Name: "egress", KeyType: nftables.TypeIFName}, ifElems(f.egress))
		ch := t.chains("granted", "own", "from_slots", "to_slots")

		t.rules(ch["granted"], append(grantRules(n.opts.Grants, accept()), drop()))
		t.rules(ch["own"], append(grantRules(n.hostGrants(), accept()), drop()))
		t.rules(ch["from_slots"], []exprs{
			rule(notIPv4(), drop()),
			// what belongs to no connection is not translated either: it would
			// leave with the slot's own address
			rule(ctState(expr.CtStateBitINVALID), drop()),
			rule(oifIn(egress, true), drop()),
			rule(daddrIn(deny), drop()),
			rule(daddrIn(spec), gotoChain("granted")),
			accept(),
		})
		t.rules(ch["to_slots"], []exprs{
			rule(notIPv4(), drop()),
			rule(ctState(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), accept()),
			drop(),
		})
		// Before connection tracking and before any destination NAT of the
		// host, which could otherwise turn a host port into something allowed.
		t.hook("prerouting", nftables.ChainHookPrerouting, *nftables.ChainPriorityRaw, nftables.ChainPolicyAccept,
			rule(iif(expr.CmpOpNeq, up), accept()),
			rule(notIPv4(), drop()),
			rule(within(saddr(), expr.CmpOpNeq, n.subnet), drop()),
			rule(daddrIn(deny), drop()),
			rule(daddrType(expr.CmpOpEq, unix.RTN_LOCAL), gotoChain("own")),
			rule(daddrType(expr.CmpOpNeq, unix.RTN_UNICAST), drop()),
			rule(daddrIn(spec), gotoChain("granted")),
		)
		t.hook("input", nftables.ChainHookInput, *nftables.ChainPriorityFilter, nftables.ChainPolicyAccept,
			rule(iif(expr.CmpOpNeq, up), accept()),
			rule(notIPv4(), drop()),
			gotoChain("own"),
		)
		t.hook("output", nftables.ChainHookOutput, *nftables.ChainPriorityFilter, nftables.ChainPolicyAccept,
			rule(oif(expr.CmpOpNeq, up), accept()),
			gotoChain("to_slots"),
		)
		t.hook("forward", nftables.ChainHookForward, *nftables.ChainPriorityFilter, nftables.ChainPolicyAccept,
			rule(iif(expr.CmpOpEq, up), gotoChain("from_slots")),
			rule(oif(expr.CmpOpEq, up), gotoChain("to_slots")),
			rule(iifIn(lentSet, false), oifGroup(expr.CmpOpNeq, uplinkGroup), drop()),
		)
		t.base("postrouting", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, *nftables.ChainPriorityNATSource, nftables.ChainPolicyAccept,
			// the address that a policy chose, where it did
			rule(oif(expr.CmpOpNeq, up), exprs{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, cmp(expr.CmpOpEq, []byte{unix.NFPROTO_IPV4})},
				within(saddr(), expr.CmpOpEq, n.subnet), exprs{saddr(),
					&expr.Lookup{SourceRegister: 1, DestRegister: 1, IsDestRegSet: true, SetName: sources.Name, SetID: sources.ID},
					&expr.NAT{Type: expr.NATTypeSourceNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1},
				}),
			rule(oif(expr.CmpOpNeq, up), exprs{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, cmp(expr.CmpOpEq, []byte{unix.NFPROTO_IPV4})},
				within(saddr(), expr.CmpOpEq, n.subnet), exprs{&expr.Masq{}}),
		)
		return t.err
	})
}

// mapSources holds the source addresses that policies chose, in the host's table.
func (n *Network) mapSources() *nftables.Set {
	t := &nftables.Table{Family: nftables.TableFamilyINet, Name: n.hostTable()}
	return &nftables.Set{Table: t, Name: "sources", KeyType: nftables.TypeIPAddr, DataType: nftables.TypeIPAddr, IsMap: true}
}

// sourceElems are for the slot's own packets and for what the proxy dials for it.
func sourceElems(s *slot, a netip.Addr) []nftables.SetElement {
	return []nftables.SetElement{{Key: s.addr.AsSlice(), Val: a.AsSlice()}, {Key: s.gw.AsSlice(), Val: a.AsSlice()}}
}

// hostGrants are those that may open an address of the host itself.
func (n *Network) hostGrants() []policy.Grant {
	var out []policy.Grant
	for _, g := range n.opts.Grants {
		if g.Prefix.Bits() == 32 {
			out = append(out, g)
		}
	}
	return out
}

func daddrType(op expr.CmpOp, typ byte) exprs {
	return exprs{
		&expr.Fib{Register: 1, FlagDADDR: true, ResultADDRTYPE: true},
		cmp(op, []byte{typ, 0, 0, 0}),
	}
}

// ensureForwarding makes the uplink and the egress interfaces forward. Linux
// looks only at the flag of the interface a packet came in on, so the global
// one stays as it is. It returns the interfaces that forward for our sake.
func (n *Network) ensureForwarding(r *registry, egress []string) ([]string, error) {
	var lent []string
	err := n.host.do(func() error {
		if v, err := getSysctl("ipv4/conf/all/forwarding"); err == nil && v == "1" && len(r.Lent) > 0 {
			// The administrator has since made the host a router: not our
			// business any more, neither to restrict nor to set back.
			clear(r.Lent)
			if err := r.save(); err != nil {
				return err
			}
		}
		for _, ifc := range egress {
			v, err := getSysctl("ipv4/conf/" + ifc + "/forwarding")
			if errors.Is(err, os.ErrNotExist) {
				continue // gone meanwhile
			}
			if err != nil {
				return err
			}
			if v == "1" {
				continue
			}
			if !r.Lent[ifc] {
				r.Lent[ifc] = true
				if err := r.save(); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read forwarding: %w", err)
	}
	for ifc := range r.Lent {
		lent = append(lent, ifc)
	}
	slices.Sort(lent)
	return lent, nil
}

// forward sets the flags; the table must stand already.
func (n *Network) forward(egress []string) error {
	return n.host.do(func() error {
		for _, ifc := range append([]string{n.uplinkName()}, egress...) {
			name := "ipv4/conf/" + ifc + "/forwarding"
			if v, err := getSysctl(name); err == nil && v == "1" {
				continue
			}
			if err := setSysctl(name, "1"); err != nil && !(errors.Is(err, os.ErrNotExist) && ifc != n.uplinkName()) {
				return fmt.Errorf("turn forwarding on: %w", err)
			}
		}
		return nil
	})
}

// removeHost takes everything of ours out of the host namespace and, if no
// other instance is left there, sets forwarding back.
func (n *Network) removeHost(ctx context.Context) error {
	r, err := lockRegistry(ctx, n.cookie)
	if err != nil {
		return err
	}
	var errs []error
	if l, err := n.host.h.LinkByName(n.uplinkName()); err == nil {
		if err := n.host.h.LinkDel(l); err != nil && !isNotFound(err) {
			errs = append(errs, fmt.Errorf("remove uplink: %w", err))
		}
	} else if !isNotFound(err) {
		errs = append(errs, fmt.Errorf("find uplink: %w", err))
	}
	f, err := n.readHost()
	if err != nil {
		r.unlock()
		return errors.Join(append(errs, err)...)
	}
	if f.others == 0 {
		err := n.host.do(func() error {
			if v, err := getSysctl("ipv4/conf/all/forwarding"); err != nil || v == "1" {
				return err
			}
			for ifc := range r.Lent {
				if err := setSysctl("ipv4/conf/"+ifc+"/forwarding", "0"); err != nil && !errors.Is(err, os.ErrNotExist) {
					return err
				}
			}
			return nil
		})
		if err != nil {
			errs = append(errs, fmt.Errorf("set forwarding back: %w", err))
		}
	}
	// The table goes last: until here a lent interface forwards only to us.
	err = n.host.nft(func(c *nftables.Conn) error {
		t := &nftables.Table{Family: nftables.TableFamilyINet, Name: n.hostTable()}
		c.AddTable(t)
		c.DelTable(t)
		return nil
	})
	if err != nil {
		errs = append(errs, fmt.Errorf("remove host table: %w", err))
	}
	if f.others == 0 && len(errs) == 0 {
		r.remove()
	} else {
		r.unlock()
	}
	return errors.Join(errs...)
}

func isNotFound(err error) bool {
	var nf netlink.LinkNotFoundError
	return errors.As(err, &nf) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOENT)
}
