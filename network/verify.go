package network

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	mdnetlink "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// What is in force is read from the kernel and compared, rule by rule and element
// by element, with what the policy compiles to. Rules are compared in the library's
// own encoding of what the kernel lists, with what is the kernel's own (handles,
// ids of sets) left out. A digest that is kept with a rule would say what somebody
// meant when he wrote it; this says what is there.

// listing is a table as the kernel should list it.
type listing struct {
	base   map[string]string                // hook, priority and policy of base chains
	chains map[string][][]byte              // rules
	sets   map[string][]nftables.SetElement // sorted; of sets that do not change
}

func newListing() listing {
	return listing{map[string]string{}, map[string][][]byte{}, map[string][]nftables.SetElement{}}
}

func (l listing) add(chain string, rules []exprs) {
	if l.chains[chain] == nil {
		l.chains[chain] = [][]byte{}
	}
	for _, r := range rules {
		l.chains[chain] = append(l.chains[chain], canonicalRule(r))
	}
}

func baseOf(c *nftables.Chain) string {
	if c.Hooknum == nil {
		return ""
	}
	// A chain without a policy accepts.
	policy := nftables.ChainPolicyAccept
	if c.Policy != nil {
		policy = *c.Policy
	}
	return fmt.Sprint(c.Type, " ", *c.Hooknum, " ", *c.Priority, " ", policy)
}

// elementsOf sorts elements by key.
func elementsOf(es []nftables.SetElement) []nftables.SetElement {
	es = slices.Clone(es)
	slices.SortFunc(es, func(a, b nftables.SetElement) int {
		if c := bytes.Compare(a.Key, b.Key); c != 0 {
			return c
		}
		return strings.Compare(fmt.Sprint(a.IntervalEnd), fmt.Sprint(b.IntervalEnd))
	})
	return es
}

// canonicalRule is a rule in bytes, with all that is the kernel's or the library's
// own left out.
func canonicalRule(es exprs) []byte {
	var out []byte
	for _, e := range es {
		switch x := e.(type) {
		case *expr.Lookup:
			k := *x
			k.SetID = 0
			e = &k
		case *expr.Dynset:
			k := *x
			k.SetID = 0
			e = &k
		case *expr.Counter:
			e = &expr.Counter{}
		case *expr.NAT: // the kernel fills the upper ends of ranges in
			k := *x
			k.RegAddrMax, k.RegProtoMax, k.Specified = k.RegAddrMin, k.RegProtoMin, false
			e = &k
		}
		b, err := expr.Marshal(byte(nftables.TableFamilyINet), e)
		if err != nil {
			b = []byte(err.Error())
		}
		out = append(out, b...)
	}
	return append(out, '\n')
}

// verifySlot says in what the kernel's rules for a slot differ from what they
// should be. The caller made the slot busy.
func (n *Network) verifySlot(s *slot) error {
	n.rules.RLock()
	defer n.rules.RUnlock()
	s.pins.change.Lock()
	defer s.pins.change.Unlock()
	return n.router.do(func() error {
		return n.router.withNft(func(c *nftables.Conn) error {
			return n.verify(c, s)
		})
	})
}

func (n *Network) verify(c *nftables.Conn, s *slot) error {
	if opens(s.Policy.Mode) != (s.kernel != nil) || s.kernel != nil && s.kernel.policy.Hash != s.policy.Hash {
		return fmt.Errorf("the policy that was installed is another")
	}
	if err := n.verifyTables(c, s); err != nil {
		return err
	}
	registered, err := elementsWith(c, setSlots(), s.veth)
	if err != nil {
		return err
	}
	if len(registered) != 1 || !bytes.Equal(registered[0].Key, slotKey(s)[0].Key) {
		return fmt.Errorf("the slot is not registered")
	}
	for _, want := range n.presence(s, s.kernel) {
		got, err := elementsWith(c, want.set, s.veth)
		if err != nil {
			return err
		}
		if !sameElements(got, want.elems) {
			return fmt.Errorf("set %s of table %s has %d elements of the slot that differ from %d", want.set.Name, want.set.Table.Name, len(got), len(want.elems))
		}
	}
	return n.verifyPins(c, s)
}

// verifyPins makes sure that the kernel has no pin that is not remembered.
func (n *Network) verifyPins(c *nftables.Conn, s *slot) error {
	known := map[string]bool{}
	s.pins.mu.Lock()
	for k := range s.pins.elems {
		known[fmt.Sprint(k.proxied, string(k.element(s.veth, 0).Key))] = true
	}
	s.pins.mu.Unlock()
	for _, proxied := range []bool{true, false} {
		got, err := elementsWith(c, pinKey{proxied: proxied}.set(), s.veth)
		if err != nil {
			return err
		}
		for _, e := range got {
			if !known[fmt.Sprint(proxied, string(e.Key))] {
				return fmt.Errorf("a pin in the kernel is not ours: %x", e.Key[unix.IFNAMSIZ:])
			}
		}
	}
	return nil
}

// verifyTables compares chains, rules and sets that hold for all slots, and the
// program of this one.
func (n *Network) verifyTables(c *nftables.Conn, s *slot) error {
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return fmt.Errorf("list chains: %w", err)
	}
	for name, want := range n.listings {
		want := listing{want.base, maps.Clone(want.chains), maps.Clone(want.sets)}
		if name == routerTable {
			want.sets[setHost().Name] = elementsOf(addrElems(n.hostAddrs()))
			if s.kernel != nil && s.kernel.program != nil {
				p := s.kernel.program
				for _, ch := range p.chains {
					want.add(ch.name, ch.rules)
				}
				for _, ps := range p.sets {
					if !ps.set.Dynamic {
						want.sets[ps.set.Name] = elementsOf(ps.elems)
					}
				}
			}
		}
		if err := verifyTable(c, name, chains, want); err != nil {
			return fmt.Errorf("table %s: %w", name, err)
		}
	}
	return nil
}

func verifyTable(c *nftables.Conn, table string, chains []*nftables.Chain, want listing) error {
	ref := &nftables.Table{Family: nftables.TableFamilyINet, Name: table}
	found := 0
	for _, ch := range chains {
		if ch.Table.Name != table {
			continue
		}
		rules, ok := want.chains[ch.Name]
		base := baseOf(ch)
		if base != want.base[ch.Name] {
			return fmt.Errorf("chain %s is %q, not %q", ch.Name, base, want.base[ch.Name])
		}
		if !ok {
			continue // a program of others
		}
		found++
		got, err := c.GetRules(ref, ch)
		if err != nil {
			return fmt.Errorf("list rules of %s: %w", ch.Name, err)
		}
		if len(got) != len(rules) {
			return fmt.Errorf("chain %s has %d rules, not %d", ch.Name, len(got), len(rules))
		}
		for i, r := range got {
			if !bytes.Equal(canonicalRule(r.Exprs), rules[i]) {
				return fmt.Errorf("chain %s: rule %d is another", ch.Name, i+1)
			}
		}
	}
	if found != len(want.chains) {
		return fmt.Errorf("%d chains of %d", found, len(want.chains))
	}
	for name, es := range want.sets {
		got, err := c.GetSetElements(&nftables.Set{Table: ref, Name: name})
		if err != nil {
			return fmt.Errorf("list set %s: %w", name, err)
		}
		if !sameElements(got, es) {
			return fmt.Errorf("set %s has other elements", name)
		}
	}
	return nil
}

// sameElements compares keys, ends of intervals and where they lead.
func sameElements(got, want []nftables.SetElement) bool {
	got, want = elementsOf(got), elementsOf(want)
	return slices.EqualFunc(got, want, func(g, w nftables.SetElement) bool {
		if !bytes.Equal(g.Key, w.Key) || g.IntervalEnd != w.IntervalEnd {
			return false
		}
		if w.VerdictData == nil {
			return true
		}
		kind, chain, err := unpackVerdict(g.Val)
		return err == nil && kind == w.VerdictData.Kind && chain == w.VerdictData.Chain
	})
}

// elementsWith are those of an interface.
func elementsWith(c *nftables.Conn, s *nftables.Set, veth string) ([]nftables.SetElement, error) {
	es, err := c.GetSetElements(s)
	if err != nil {
		return nil, fmt.Errorf("list set %s: %w", s.Name, err)
	}
	name := ifname(veth)
	return slices.DeleteFunc(es, func(e nftables.SetElement) bool { return !bytes.HasPrefix(e.Key, name) }), nil
}

// unpackVerdict reads NFTA_VERDICT_CODE and NFTA_VERDICT_CHAIN of
// linux/netfilter/nf_tables.h.
func unpackVerdict(b []byte) (expr.VerdictKind, string, error) {
	ad, err := mdnetlink.NewAttributeDecoder(b)
	if err != nil {
		return 0, "", err
	}
	ad.ByteOrder = binary.BigEndian
	var code int32
	var chain string
	for ad.Next() {
		switch ad.Type() {
		case unix.NFTA_VERDICT_CODE:
			code = int32(ad.Uint32())
		case unix.NFTA_VERDICT_CHAIN:
			chain = ad.String()
		}
	}
	return expr.VerdictKind(code), chain, ad.Err()
}
