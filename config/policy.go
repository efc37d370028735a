package config

import (
	"net/netip"
	"strings"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

// rule reads "allow TARGET" or "deny TARGET".
func (Floor) rule(s string) (sandbox.PolicyRule, error) {
	action, target, ok := strings.Cut(strings.TrimSpace(s), " ")
	if !ok {
		return sandbox.PolicyRule{}, sandbox.Invalid.Errorf("%q is not a rule such as \"deny *.example.com\"", s)
	}
	return policy.ParseRule(sandbox.RuleAction(action), strings.TrimSpace(target))
}

// Node is the operator's part of every policy. Errors are Invalid; a
// configuration that was validated has none.
func (n *Network) Node() (policy.Node, error) {
	var p policy.Node
	for _, g := range n.Grants {
		prefix, err := network(g.Prefix)
		if err != nil {
			return p, sandbox.Invalid.Errorf("network.grants: %w", err)
		}
		grant := policy.Grant{Prefix: prefix}
		for _, port := range g.Ports {
			grant.Ports = append(grant.Ports, uint16(port))
		}
		p.Grants = append(p.Grants, grant)
	}
	for _, d := range n.Deny {
		prefix, err := network(d)
		if err != nil {
			return p, sandbox.Invalid.Errorf("network.deny: %w", err)
		}
		p.Deny = append(p.Deny, prefix)
	}
	p.Floor = sandbox.NetworkPolicy{Mode: sandbox.NetworkMode(n.Floor.Mode), ResolveAny: n.Floor.ResolveAny}
	for _, r := range n.Floor.Rules {
		rule, err := n.Floor.rule(r)
		if err != nil {
			return p, sandbox.Invalid.Errorf("network.floor: %w", err)
		}
		p.Floor.Rules = append(p.Floor.Rules, rule)
	}
	p.Presets = map[string][]sandbox.PolicyRule{}
	for name, rules := range n.Presets {
		for _, r := range rules {
			rule, err := policy.ParseRule(sandbox.RuleAllow, r)
			if err != nil {
				return p, sandbox.Invalid.Errorf("network.presets.%s: %w", name, err)
			}
			p.Presets[name] = append(p.Presets[name], rule)
		}
	}
	for name := range n.Upstreams {
		p.Upstreams = append(p.Upstreams, name)
	}
	for _, s := range n.Sources {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return p, sandbox.Invalid.Errorf("network.sources: %w", err)
		}
		p.Sources = append(p.Sources, a)
	}
	return p, nil
}
