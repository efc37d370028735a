package network

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

// program is a policy as the packet filter has it: chains and the sets that they
// look into. It is named by its content, so that slots with one policy share it
// and what the kernel has can be compared with what it should have. Names are no
// part of it: those are pins of each slot.
type program struct {
	name   string // of the chain that decides; the others' begin with it
	chains []progChain
	sets   []progSet

	// of the router's thread alone
	refs int
	idle time.Time // since when nobody uses it
}

type progChain struct {
	name  string
	rules []exprs
}

type progSet struct {
	set   *nftables.Set
	elems []nftables.SetElement
}

// Suffixes of the chains that carry out a policy's own limits.
const (
	suffixOut = "_out"
	suffixIn  = "_in"
	suffixNew = "_new"
)

// compile makes the program of a policy; nil for one that needs none.
func (n *Network) compile(p *policy.Policy) *program {
	if p.Simple() {
		return nil
	}
	sum := sha256.New()
	draft := n.buildProgram("p", p)
	for _, c := range draft.chains {
		for _, r := range c.rules {
			sum.Write(canonicalRule(r))
		}
		sum.Write([]byte(c.name + "\n"))
	}
	for _, s := range draft.sets {
		fmt.Fprintln(sum, s.set.Name, s.set.Interval, s.set.Dynamic)
		for _, e := range s.elems {
			fmt.Fprintf(sum, "%x %v\n", e.Key, e.IntervalEnd)
		}
	}
	return n.buildProgram("p"+hex.EncodeToString(sum.Sum(nil)[:10]), p)
}

// buildProgram writes the rules of a policy. What they say is what policy.Decide
// says of a flow whose name is not known.
func (n *Network) buildProgram(name string, p *policy.Policy) *program {
	b := &progBuilder{p: &program{name: name}, sets: name + "_"}
	rules := []exprs{
		rule(daddrIn(&nftables.Set{Name: "deny"}), drop()),
		rule(daddrIn(&nftables.Set{Name: "special"}), jump("granting")),
		rule(daddrIn(setHost()), jump("granting_host")),
	}
	if p.Upstream != "" {
		rules = append(rules, gotoChain("refuse"))
	} else {
		rules = append(rules, rule(flowKey(outward, true), exprs{lookup(setPinned(), false)}, gotoChain("admit")))
		if p.CheckAll() {
			for _, port := range checkedPorts {
				rules = append(rules, rule(l4proto(unix.IPPROTO_TCP), dport(port), gotoChain("refuse")))
			}
		}
		if p.RefusesQUIC() {
			rules = append(rules, rule(l4proto(unix.IPPROTO_UDP), dport(443), gotoChain("refuse")))
		}
		rules = append(rules, jump("floor"))
		_, own, _, rest := p.AddrRules()
		public := p.Mode == sandbox.NetworkPublic
		for _, g := range groupRules(own) {
			then := gotoChain("refuse")
			if g.Allow {
				then = gotoChain("admit")
				if public && len(g.Ports) == 0 {
					then = gotoChain("direct")
				}
			}
			rules = append(rules, b.match(g, then))
		}
		if rest {
			rules = append(rules, gotoChain("direct"))
		} else {
			rules = append(rules, gotoChain("refuse"))
		}
	}
	b.p.chains = append(b.p.chains, progChain{name, rules})
	if bytes, ok := n.narrowBytes(p); ok {
		for _, c := range []struct {
			suffix string
			key    expr.MetaKey
		}{{suffixOut, expr.MetaKeyIIFNAME}, {suffixIn, expr.MetaKeyOIFNAME}} {
			s := b.limiter("bytes" + c.suffix)
			b.p.chains = append(b.p.chains, progChain{name + c.suffix, []exprs{
				rule(perIfaceKey(c.key, s, bytesOver(bytes)), drop()),
			}})
		}
	}
	if rate, ok := n.narrowConns(p); ok {
		b.p.chains = append(b.p.chains, progChain{name + suffixNew, []exprs{
			rule(perIface(b.limiter("conns"), newFlowsOver(rate)), gotoChain("busy")),
		}})
	}
	return b.p
}

// narrowBytes is the policy's own limit where it is less than the node's.
func (n *Network) narrowBytes(p *policy.Policy) (int64, bool) {
	return max(p.BytesPerSecond, minBytes), p.BytesPerSecond > 0 && p.BytesPerSecond < n.opts.BytesPerSecond
}

func (n *Network) narrowConns(p *policy.Policy) (int64, bool) {
	return p.ConnsPerSecond, p.ConnsPerSecond > 0 && p.ConnsPerSecond < n.opts.ConnsPerSecond
}

// checkedPorts are TCP's that pass the proxy under a policy that denies names.
var checkedPorts = []uint16{80, 443}

type progBuilder struct {
	p    *program
	sets string // how their names begin
}

func (b *progBuilder) set(s *nftables.Set, elems []nftables.SetElement) *nftables.Set {
	s.Name = fmt.Sprint(b.sets, len(b.p.sets))
	b.p.sets = append(b.p.sets, progSet{s, elems})
	return s
}

func (b *progBuilder) limiter(name string) *nftables.Set {
	s := &nftables.Set{Name: b.sets + name, KeyType: nftables.TypeIFName, Dynamic: true, Size: 65535, HasTimeout: true, Timeout: time.Minute}
	b.p.sets = append(b.p.sets, progSet{s, nil})
	return s
}

// ruleGroup is a run of rules by address that differ in nothing else.
type ruleGroup struct {
	policy.AddrRule
	prefixes []netip.Prefix
}

// groupRules joins neighbours, for a set is as fast as one rule. Their order among
// themselves is of no consequence, since they say the same.
func groupRules(rs []policy.AddrRule) []ruleGroup {
	var out []ruleGroup
	for _, r := range rs {
		if k := len(out); k > 0 {
			if o := &out[k-1]; o.Allow == r.Allow && o.Protocol == r.Protocol && slices.Equal(o.Ports, r.Ports) {
				o.prefixes = append(o.prefixes, r.Prefix)
				continue
			}
		}
		out = append(out, ruleGroup{r, []netip.Prefix{r.Prefix}})
	}
	return out
}

// match is a rule for a group.
func (b *progBuilder) match(g ruleGroup, then exprs) exprs {
	var out exprs
	switch rs := mergeRanges(g.prefixes); {
	case len(rs) == 1 && rs[0] == addrRange{0, ^uint32(0)}:
	case len(g.prefixes) == 1:
		out = within(daddr(), expr.CmpOpEq, g.prefixes[0])
	default:
		s := b.set(&nftables.Set{KeyType: nftables.TypeIPAddr, Interval: true}, rangeElems(rs))
		out = daddrIn(s)
	}
	switch {
	case g.Protocol != "":
		out = append(out, l4proto(protoNumber(g.Protocol))...)
	case len(g.Ports) > 0:
		out = append(out, &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, lookup(setTCPUDP(), false))
	}
	switch {
	case len(g.Ports) == 1 && g.Ports[0].Lo == g.Ports[0].Hi:
		out = append(out, dport(g.Ports[0].Lo)...)
	case len(g.Ports) > 0:
		var elems []nftables.SetElement
		for _, r := range g.Ports { // sorted and disjoint, see policy.Normalise
			elems = append(elems, nftables.SetElement{Key: binaryutil.BigEndian.PutUint16(r.Lo)})
			if r.Hi < 65535 {
				elems = append(elems, nftables.SetElement{Key: binaryutil.BigEndian.PutUint16(r.Hi + 1), IntervalEnd: true})
			}
		}
		s := b.set(&nftables.Set{KeyType: nftables.TypeInetService, Interval: true}, elems)
		out = append(out, transport(2, 1), lookup(s, false))
	}
	return rule(out, then)
}

func protoNumber(p string) byte {
	switch p {
	case sandbox.ProtocolUDP:
		return unix.IPPROTO_UDP
	case sandbox.ProtocolICMP:
		return unix.IPPROTO_ICMP
	}
	return unix.IPPROTO_TCP
}

// add queues what makes the program be there. Ids matter within one transaction
// only; ids of the table's own sets are far below.
func (p *program) add(c *nftables.Conn) error {
	for i, s := range p.sets {
		s.set.Table, s.set.ID = tableRef, uint32(1000+i)
		if err := c.AddSet(s.set, nil); err != nil {
			return err
		}
		if err := addElements(c, s.set, s.elems); err != nil {
			return err
		}
	}
	for _, ch := range p.chains {
		k := c.AddChain(&nftables.Chain{Name: ch.name, Table: tableRef})
		c.FlushChain(k) // it may be there, when the end of a transaction was not heard of
		for _, r := range ch.rules {
			c.AddRule(&nftables.Rule{Table: tableRef, Chain: k, Exprs: r})
		}
	}
	return nil
}

func (p *program) remove(c *nftables.Conn) {
	for _, ch := range p.chains {
		k := &nftables.Chain{Name: ch.name, Table: tableRef}
		c.FlushChain(k)
		c.DelChain(k)
	}
	for _, s := range p.sets {
		c.DelSet(s.set)
	}
}

// Programs that nobody uses stay for a while: the next sandbox is often like the
// last one.
const (
	idleProgram  = 30 * time.Second
	idlePrograms = 64
)

// usePrograms notes, on the router's thread and after the transaction, that a slot
// has program b and no longer a; either may be nil.
func (n *Network) usePrograms(a, b *program) {
	if b != nil {
		if n.progs[b.name] == nil {
			n.progs[b.name] = b
		}
		n.progs[b.name].refs++
	}
	if a != nil {
		if o := n.progs[a.name]; o != nil {
			o.refs--
			o.idle = time.Now()
		}
	}
}

// dropPrograms removes programs that have been of no use for a while.
func (n *Network) dropPrograms() error {
	return n.router.do(func() error {
		var idle []*program
		for _, p := range n.progs {
			if p.refs <= 0 {
				idle = append(idle, p)
			}
		}
		slices.SortFunc(idle, func(a, b *program) int { return a.idle.Compare(b.idle) })
		var gone []*program
		for i, p := range idle {
			if time.Since(p.idle) > idleProgram || len(idle)-i > idlePrograms {
				gone = append(gone, p)
			}
		}
		if len(gone) == 0 {
			return nil
		}
		err := n.router.withNft(func(c *nftables.Conn) error {
			for _, p := range gone {
				p.remove(c)
			}
			return c.Flush()
		})
		if err == nil {
			for _, p := range gone {
				delete(n.progs, p.name)
			}
		}
		return err
	})
}
