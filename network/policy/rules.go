package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"vivarium/sandbox"
)

// rules is one list, indexed so that a thousand names cost no more than ten.
type rules struct {
	mode        sandbox.NetworkMode
	resolveAny  bool
	list        []sandbox.PolicyRule
	addrs       []int            // of rules by address, in order
	exact       map[string][]int // name -> rules, in order
	below       map[string][]int // x -> rules for *.x
	any         []int            // rules for *
	deniesNames bool
	allowsAddrs bool
}

func newRules(p sandbox.NetworkPolicy) *rules {
	r := &rules{mode: p.Mode, resolveAny: p.ResolveAny, list: p.Rules, exact: map[string][]int{}, below: map[string][]int{}}
	r.allowsAddrs = p.Mode == sandbox.NetworkPublic
	for i, e := range p.Rules {
		switch {
		case e.Domain == "":
			r.addrs = append(r.addrs, i)
			if e.Action == sandbox.RuleAllow {
				r.allowsAddrs = true
			}
			continue
		case e.Domain == "*":
			r.any = append(r.any, i)
		case strings.HasPrefix(e.Domain, "*."):
			r.below[e.Domain[2:]] = append(r.below[e.Domain[2:]], i)
		default:
			r.exact[e.Domain] = append(r.exact[e.Domain], i)
		}
		if e.Action == sandbox.RuleDeny {
			r.deniesNames = true
		}
	}
	return r
}

// named calls fn with the rules about a name, not in order of the list, until
// fn returns false for a group.
func (r *rules) named(name string, fn func(is []int)) {
	if name == "" {
		return
	}
	fn(r.exact[name])
	for rest := name; ; {
		_, parent, ok := strings.Cut(rest, ".")
		if !ok {
			break
		}
		fn(r.below[parent])
		rest = parent
	}
	fn(r.any)
}

func (r *rules) decide(f Flow) decision {
	if r.mode == sandbox.NetworkNone {
		return decision{rule: -1}
	}
	best := len(r.list)
	first := func(is []int) {
		for _, i := range is {
			if i >= best {
				return
			}
			if covers(r.list[i], f) {
				best = i
				return
			}
		}
	}
	r.named(f.Name, first)
	if f.Addr.IsValid() {
		first(r.addrs)
	}
	if best == len(r.list) {
		return decision{allowed: r.mode == sandbox.NetworkPublic, rule: -1}
	}
	e := r.list[best]
	d := decision{allowed: e.Action == sandbox.RuleAllow, byName: e.Domain != "", rule: best}
	d.checked = d.allowed && d.byName && e.Protocol == ""
	return d
}

// covers says whether the rest of a rule, its address, ports and protocol,
// matches. The name does already.
func covers(e sandbox.PolicyRule, f Flow) bool {
	if e.Domain == "" {
		if !e.Prefix.Contains(f.Addr) {
			return false
		}
		if e.Protocol != "" && e.Protocol != f.Protocol {
			return false
		}
		return len(e.Ports) == 0 || f.Protocol != sandbox.ProtocolICMP && InPorts(e.Ports, f.Port)
	}
	if e.Action == sandbox.RuleDeny {
		// a name that is denied is denied wholly, unless said otherwise
		return (e.Protocol == "" || e.Protocol == f.Protocol) && (len(e.Ports) == 0 || InPorts(e.Ports, f.Port))
	}
	want := e.Protocol
	if want == "" {
		want = sandbox.ProtocolTCP
	}
	return want == f.Protocol && InPorts(NamePorts(e), f.Port)
}

// namesPort says whether a rule has ports of its own; rules by name always do.
func (r *rules) namesPort(i int) bool {
	return i >= 0 && (len(r.list[i].Ports) > 0 || r.list[i].Domain != "")
}

// NamePorts are the ports of an allow rule by name.
func NamePorts(e sandbox.PolicyRule) []sandbox.PortRange {
	if len(e.Ports) == 0 {
		return webPorts
	}
	return e.Ports
}

var webPorts = []sandbox.PortRange{{Lo: 80, Hi: 80}, {Lo: 443, Hi: 443}}

// InPorts says whether a port is in one of the ranges.
func InPorts(ps []sandbox.PortRange, port uint16) bool {
	return slices.ContainsFunc(ps, func(p sandbox.PortRange) bool { return p.Lo <= port && port <= p.Hi })
}

// resolves finds the first rule about the name, whatever its ports.
func (r *rules) resolves(name string) (ok, onlyWild bool, rule int) {
	if r.mode == sandbox.NetworkNone {
		return false, false, -1
	}
	best := len(r.list)
	r.named(name, func(is []int) {
		for _, i := range is {
			e := r.list[i]
			// a rule that denies some ports leaves the name to the others
			if e.Action == sandbox.RuleDeny && (len(e.Ports) > 0 || e.Protocol != "") {
				continue
			}
			best = min(best, i)
			return
		}
	})
	if best == len(r.list) {
		return r.mode == sandbox.NetworkPublic || r.resolveAny, false, -1
	}
	if r.list[best].Action == sandbox.RuleDeny {
		return false, false, best
	}
	if r.mode == sandbox.NetworkPublic || r.resolveAny {
		return true, false, best
	}
	exact := slices.ContainsFunc(r.exact[name], func(i int) bool { return r.list[i].Action == sandbox.RuleAllow })
	return true, !exact, best
}

func (r *rules) tell(who string, i int) string {
	if i < 0 {
		return fmt.Sprintf("%s: mode %s", who, r.mode)
	}
	return fmt.Sprintf("%s rule %d: %s %s", who, i+1, r.list[i].Action, FormatRule(r.list[i]))
}

// AddrRule is a rule by address as a packet filter wants it.
type AddrRule struct {
	Allow    bool
	Prefix   netip.Prefix
	Ports    []sandbox.PortRange
	Protocol string
}

// AddrRules are the floor's and the policy's rules by address, in order, and
// whether what none of them matches passes. A flow must pass both lists; one
// that is allowed by name is decided before them.
func (p *Policy) AddrRules() (floor, own []AddrRule, floorRest, ownRest bool) {
	get := func(r *rules) (out []AddrRule) {
		for _, i := range r.addrs {
			e := r.list[i]
			out = append(out, AddrRule{e.Action == sandbox.RuleAllow, e.Prefix, e.Ports, e.Protocol})
		}
		return out
	}
	return get(p.floor), get(p.own), p.floor.mode == sandbox.NetworkPublic, p.own.mode == sandbox.NetworkPublic
}

// ByName says whether any rule of floor or policy is about names.
func (p *Policy) ByName() bool {
	for _, r := range []*rules{p.own, p.floor} {
		if len(r.exact)+len(r.below)+len(r.any) > 0 {
			return true
		}
	}
	return false
}

// maxProbes bounds how many ports ReachesSome looks at.
const maxProbes = 512

// ReachesSome says whether a name's (canonical) address may be reached at all,
// by any protocol on any port: what is not is of no use in an answer. The ports
// at which some rule's opinion changes stand for all of them.
func (p *Policy) ReachesSome(name string, a netip.Addr, hosts ...netip.Addr) bool {
	try := func(proto string, port uint16) bool {
		return p.Decide(Flow{Name: name, Addr: a, Port: port, Protocol: proto}, hosts...).Allowed
	}
	for _, port := range []uint16{443, 80, 22, 1} {
		if try(sandbox.ProtocolTCP, port) {
			return true
		}
	}
	if try(sandbox.ProtocolUDP, 1) || try(sandbox.ProtocolICMP, 0) {
		return true
	}
	ports := map[uint16]bool{54: true, 854: true}
	add := func(ps []sandbox.PortRange) {
		for _, q := range ps {
			if len(ports) < maxProbes {
				ports[q.Lo] = true
				if q.Hi < 65535 {
					ports[q.Hi+1] = true
				}
			}
		}
	}
	for _, g := range p.node.Grants {
		if g.Prefix.Contains(a) {
			for _, q := range g.Ports {
				add([]sandbox.PortRange{{Lo: q, Hi: q}})
			}
		}
	}
	for _, r := range []*rules{p.own, p.floor} {
		r.named(name, func(is []int) {
			for _, i := range is {
				add(NamePorts(r.list[i]))
			}
		})
		for _, i := range r.addrs {
			if r.list[i].Prefix.Contains(a) {
				add(r.list[i].Ports)
			}
		}
	}
	for q := range ports {
		if try(sandbox.ProtocolTCP, q) || try(sandbox.ProtocolUDP, q) {
			return true
		}
	}
	return false
}

// Ports are the ports and protocols that some rule by name may open for a name
// (canonical): what is to be pinned when the name was resolved, at most limit
// ports. The web's ports are among them when the policy inspects the name.
func (p *Policy) Ports(name string, limit int) (tcp, udp []uint16) {
	seen := map[string]map[uint16]bool{sandbox.ProtocolTCP: {}, sandbox.ProtocolUDP: {}}
	add := func(proto string, ps []sandbox.PortRange) {
		for _, pr := range ps {
			for q := int(pr.Lo); q <= int(pr.Hi) && len(seen[proto]) < limit; q++ {
				seen[proto][uint16(q)] = true
			}
		}
	}
	lists := []*rules{p.own}
	if p.own.allowsAddrs { // then it may be the floor alone that is about names
		lists = append(lists, p.floor)
	}
	for _, r := range lists {
		r.named(name, func(is []int) {
			for _, i := range is {
				if e := r.list[i]; e.Action == sandbox.RuleAllow {
					proto := e.Protocol
					if proto == "" {
						proto = sandbox.ProtocolTCP
					}
					add(proto, NamePorts(e))
				}
			}
		})
	}
	if p.Inspects(name) {
		add(sandbox.ProtocolTCP, webPorts)
	}
	for q := range seen[sandbox.ProtocolTCP] {
		tcp = append(tcp, q)
	}
	for q := range seen[sandbox.ProtocolUDP] {
		udp = append(udp, q)
	}
	slices.Sort(tcp)
	slices.Sort(udp)
	return tcp, udp
}
