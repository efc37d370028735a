package network

import (
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"vivarium/network/policy"
)

// The functions below build nftables rules from pieces that read like nft's own
// language. Register 1 is the only scratch register; concatenations also use 2.

type exprs = []expr.Any

func rule(parts ...exprs) exprs {
	var out exprs
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

func ifname(s string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, s)
	return b
}

func cmp(op expr.CmpOp, data []byte) expr.Any {
	return &expr.Cmp{Op: op, Register: 1, Data: data}
}

func iif(op expr.CmpOp, name string) exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, cmp(op, ifname(name))}
}

func oif(op expr.CmpOp, name string) exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, cmp(op, ifname(name))}
}

func iifIn(s *nftables.Set, invert bool) exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, in(s, invert)}
}

func oifIn(s *nftables.Set, invert bool) exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, in(s, invert)}
}

func oifGroup(op expr.CmpOp, group uint32) exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyOIFGROUP, Register: 1}, cmp(op, binaryutil.NativeEndian.PutUint32(group))}
}

func in(s *nftables.Set, invert bool) expr.Any {
	return &expr.Lookup{SourceRegister: 1, SetName: s.Name, SetID: s.ID, Invert: invert}
}

func notIPv4() exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, cmp(expr.CmpOpNeq, []byte{unix.NFPROTO_IPV4})}
}

func l4proto(p byte) exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, cmp(expr.CmpOpEq, []byte{p})}
}

func saddr() expr.Any { return ipField(12, 1) }
func daddr() expr.Any { return ipField(16, 1) }

func ipField(offset, reg uint32) expr.Any {
	return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4}
}

func daddrIn(s *nftables.Set) exprs { return exprs{daddr(), in(s, false)} }

func daddrIs(a netip.Addr) exprs { return exprs{daddr(), cmp(expr.CmpOpEq, a.AsSlice())} }

func saddrIs(a netip.Addr) exprs { return exprs{saddr(), cmp(expr.CmpOpEq, a.AsSlice())} }

// within masks the address in register 1 and compares it with the network.
func within(field expr.Any, op expr.CmpOp, p netip.Prefix) exprs {
	mask := make([]byte, 4)
	binary.BigEndian.PutUint32(mask, ^uint32(0)<<(32-p.Bits()))
	if p.Bits() == 0 {
		mask = make([]byte, 4)
	}
	return exprs{
		field,
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: mask, Xor: make([]byte, 4)},
		cmp(op, p.Addr().AsSlice()),
	}
}

// transport loads a port, or what else is two bytes of the transport header.
func transport(offset, reg uint32) expr.Any {
	return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 2}
}

func dport(port uint16) exprs {
	return exprs{
		transport(2, 1),
		cmp(expr.CmpOpEq, binaryutil.BigEndian.PutUint16(port)),
	}
}

func icmpType(t byte) exprs {
	return rule(l4proto(unix.IPPROTO_ICMP), exprs{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 1},
		cmp(expr.CmpOpEq, []byte{t}),
	})
}

// tcpReset matches a TCP segment with the RST flag.
func tcpReset() exprs {
	return exprs{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{0x04}, Xor: []byte{0}},
		cmp(expr.CmpOpNeq, []byte{0}),
	}
}

// ctState matches when any of the given expr.CtStateBit flags is set.
func ctState(bits uint32) exprs {
	return exprs{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		cmp(expr.CmpOpNeq, make([]byte, 4)),
	}
}

func verdict(k expr.VerdictKind) exprs { return exprs{&expr.Verdict{Kind: k}} }

func accept() exprs { return verdict(expr.VerdictAccept) }
func drop() exprs   { return verdict(expr.VerdictDrop) }

func gotoChain(name string) exprs {
	return exprs{&expr.Verdict{Kind: expr.VerdictGoto, Chain: name}}
}

func jump(name string) exprs {
	return exprs{&expr.Verdict{Kind: expr.VerdictJump, Chain: name}}
}

// lookup is for a key that begins in register 1.
func lookup(s *nftables.Set, invert bool) expr.Any { return in(s, invert) }

// verdictOf continues where a map says, if it says anything.
func verdictOf(key expr.MetaKey, m *nftables.Set) exprs {
	return exprs{&expr.Meta{Key: key, Register: 1}, &expr.Lookup{SourceRegister: 1, DestRegister: 0, IsDestRegSet: true, SetName: m.Name, SetID: m.ID}}
}

// ctStatus matches when any of the given IPS_* bits (nf_conntrack_common.h) is set.
func ctStatus(bits uint32) exprs {
	return exprs{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		cmp(expr.CmpOpNeq, make([]byte, 4)),
	}
}

// firstPacket matches the packet that begins a flow. To the kernel, datagrams that
// nobody has answered yet are all new.
func firstPacket() exprs {
	return rule(ctState(expr.CtStateBitNEW), exprs{
		&expr.Ct{Key: expr.CtKeySTATUS, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(ipsConfirmed), Xor: make([]byte, 4)},
		cmp(expr.CmpOpEq, make([]byte, 4)),
	})
}

func markIs(m uint32) exprs {
	return exprs{&expr.Meta{Key: expr.MetaKeyMARK, Register: 1}, cmp(expr.CmpOpEq, binaryutil.NativeEndian.PutUint32(m))}
}

func setMark(m uint32) exprs {
	return exprs{
		&expr.Immediate{Register: 1, Data: binaryutil.NativeEndian.PutUint32(m)},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1, SourceRegister: true},
	}
}

// way says which end of a packet is the far one.
type way bool

const (
	outward way = false
	inward  way = true
)

// The registers of 4 bytes that follow the 16 of register 1: NFT_REG32_04, which
// is also register 2, and on.
const (
	reg2a = 2
	reg2b = 13
	reg2c = 14
)

// flowKey loads "interface of the slot . far address . protocol . far port" from
// register 1 on; without ports, the port is 0.
func flowKey(w way, ports bool) exprs {
	key, offset, port := expr.MetaKeyIIFNAME, uint32(16), uint32(2)
	if w == inward {
		key, offset, port = expr.MetaKeyOIFNAME, 12, 0
	}
	out := exprs{
		&expr.Meta{Key: key, Register: 1},
		ipField(offset, reg2a),
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg2b},
	}
	if ports {
		return append(out, transport(port, reg2c))
	}
	return append(out, &expr.Immediate{Register: reg2c, Data: make([]byte, 4)})
}

// table collects a whole table and commits it in one transaction with the
// removal of its predecessor, so that there is no moment without rules.
type table struct {
	c    *nftables.Conn
	t    *nftables.Table
	sets uint32 // ids given so far
	err  error
	// listing is what the kernel should list: rules by chain, elements of sets
	// that do not change by set.
	listing listing
}

func replaceTable(c *nftables.Conn, name string) *table {
	t := &nftables.Table{Family: nftables.TableFamilyINet, Name: name}
	c.AddTable(t) // so that the removal cannot fail
	c.DelTable(t)
	return &table{c: c, t: c.AddTable(t), listing: newListing()}
}

func (t *table) hook(name string, h *nftables.ChainHook, prio nftables.ChainPriority, policy nftables.ChainPolicy, rules ...exprs) {
	t.base(name, nftables.ChainTypeFilter, h, prio, policy, rules...)
}

func (t *table) base(name string, typ nftables.ChainType, h *nftables.ChainHook, prio nftables.ChainPriority, policy nftables.ChainPolicy, rules ...exprs) {
	c := t.c.AddChain(&nftables.Chain{Name: name, Table: t.t, Type: typ, Hooknum: h, Priority: &prio, Policy: &policy})
	t.listing.base[name] = baseOf(c)
	t.rules(c, rules)
}

// chains adds empty chains first, so that rules may jump in any order.
func (t *table) chains(names ...string) map[string]*nftables.Chain {
	m := map[string]*nftables.Chain{}
	for _, n := range names {
		m[n] = t.c.AddChain(&nftables.Chain{Name: n, Table: t.t})
		t.rules(m[n], nil)
	}
	return m
}

func (t *table) rules(c *nftables.Chain, rules []exprs) {
	t.listing.add(c.Name, rules)
	for _, r := range rules {
		t.c.AddRule(&nftables.Rule{Table: t.t, Chain: c, Exprs: r})
	}
}

func (t *table) set(s *nftables.Set, elems []nftables.SetElement) *nftables.Set {
	s.Table = t.t
	// Ids matter within one transaction only. Left to the library they come
	// from a counter that it does not guard.
	t.sets++
	s.ID = t.sets
	if t.err == nil {
		t.err = t.c.AddSet(s, nil)
	}
	if t.err == nil {
		t.err = addElements(t.c, s, elems)
	}
	return s
}

// fixed adds a set whose elements stay as they are.
func (t *table) fixed(s *nftables.Set, elems []nftables.SetElement) *nftables.Set {
	t.listing.sets[s.Name] = elementsOf(elems)
	return t.set(s, elems)
}

// addElements adds elements in pieces: one netlink attribute holds 64 KiB.
func addElements(c *nftables.Conn, s *nftables.Set, elems []nftables.SetElement) error {
	for len(elems) > 0 {
		n := min(len(elems), 256)
		if err := c.SetAddElements(s, elems[:n]); err != nil {
			return err
		}
		elems = elems[n:]
	}
	return nil
}

// rangeSet is an interval set of addresses.
func (t *table) rangeSet(name string, ps []netip.Prefix) *nftables.Set {
	return t.fixed(&nftables.Set{Name: name, KeyType: nftables.TypeIPAddr, Interval: true}, rangeElems(mergeRanges(ps)))
}

func rangeElems(rs []addrRange) []nftables.SetElement {
	var elems []nftables.SetElement
	for _, r := range rs {
		elems = append(elems, nftables.SetElement{Key: addrOf(r.lo).AsSlice()})
		if r.hi != ^uint32(0) {
			elems = append(elems, nftables.SetElement{Key: addrOf(r.hi + 1).AsSlice(), IntervalEnd: true})
		}
	}
	return elems
}

func addrElems(as []netip.Addr) []nftables.SetElement {
	var elems []nftables.SetElement
	for _, a := range as {
		elems = append(elems, nftables.SetElement{Key: a.AsSlice()})
	}
	return elems
}

func ifElems(names []string) []nftables.SetElement {
	var elems []nftables.SetElement
	for _, n := range names {
		elems = append(elems, nftables.SetElement{Key: ifname(n)})
	}
	return elems
}

// grantRules matches each grant and continues with then.
func grantRules(gs []policy.Grant, then exprs) []exprs {
	var out []exprs
	for _, g := range gs {
		to := within(daddr(), expr.CmpOpEq, g.Prefix)
		if len(g.Ports) == 0 {
			out = append(out, rule(to, then))
			continue
		}
		for _, proto := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
			for _, p := range g.Ports {
				out = append(out, rule(to, l4proto(proto), dport(p), then))
			}
		}
		// Errors about a granted flow, such as "too big", must pass too.
		out = append(out, rule(to, l4proto(unix.IPPROTO_ICMP), ctState(expr.CtStateBitRELATED), then))
	}
	return out
}
