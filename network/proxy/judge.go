package proxy

import (
	"net/netip"
	"slices"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

// judgement on a name at an address.
type judgement struct {
	allowed bool
	rule    string
	reason  string // of a refusal
	pinned  bool   // our DNS server gave the address as an answer for the name
	inspect bool   // the policy wants to read what is sent to the name
	strict  bool   // some name is denied, so bytes that hide theirs are suspect
	pol     *policy.Policy
}

// judge decides whether something that claims name may go to dst; an empty name is
// none. wasPinned says that the pin was seen when the flow began: a flow outlives
// its pin, but not its policy.
func judge(s Slot, name string, dst netip.AddrPort, wasPinned bool) judgement {
	for range 4 {
		p := s.Policy()
		if p == nil {
			return judgement{reason: "no policy is in force"}
		}
		j := judgeBy(p, s, name, dst, wasPinned)
		if s.Policy() == p {
			return j
		}
	}
	return judgement{reason: "the policy is being changed"}
}

func judgeBy(p *policy.Policy, s Slot, name string, dst netip.AddrPort, wasPinned bool) judgement {
	j := judgement{pol: p, strict: p.CheckAll(), inspect: p.Inspects(name)}
	flow := policy.Flow{Addr: dst.Addr(), Port: dst.Port(), Protocol: sandbox.ProtocolTCP}
	names := s.Names(dst.Addr())
	open := s.Decide(flow)
	if !open.Allowed {
		// A rule for a name with /tcp opens the name's addresses to any bytes.
		for _, n := range names {
			flow.Name = n
			if v := s.Decide(flow); v.Allowed && !v.Checked {
				open = v
				break
			}
		}
	}
	if name == "" {
		j.allowed, j.rule = open.Allowed, open.Rule
		if !j.allowed {
			j.reason = "it claims no name, and its address is not allowed"
		}
		return j
	}
	j.pinned = wasPinned || slices.Contains(names, name)
	flow.Name = name
	v := s.Decide(flow)
	j.rule = v.Rule
	switch {
	case !v.Allowed && open.Allowed && open.ByName && !v.ByName:
		// nothing is said about this name, and another name's rule opens the address
		j.allowed, j.rule = true, open.Rule
	case !v.Allowed:
		j.reason = "not allowed"
		return j
	case !j.pinned && !open.Allowed:
		j.reason = "the name was not resolved to this address"
		return j
	default:
		j.allowed = true
	}
	if j.inspect && !j.pinned {
		// nothing of value is sent to an address that only the sandbox says is N's
		j.allowed, j.reason = false, "the name was not resolved to this address, and it is inspected"
	}
	return j
}
