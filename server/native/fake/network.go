package fake

import (
	"context"

	"vivarium/engine"
	"vivarium/network/policy"
	"vivarium/sandbox"
)

// node is the operator's part of policies.
var node policy.Node

// SetNetwork keeps the policy with the sandbox.
func (e *Engine) SetNetwork(_ context.Context, tenant, ref string, p sandbox.NetworkPolicy) (sandbox.AppliedPolicy, error) {
	c, err := node.Compile(p)
	if err != nil {
		return sandbox.AppliedPolicy{}, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	b, err := e.find(tenant, ref)
	if err != nil {
		return sandbox.AppliedPolicy{}, err
	}
	b.rec.Spec.Network, b.rec.NetworkHash = c.NetworkPolicy, c.Hash
	return sandbox.AppliedPolicy{Policy: c.NetworkPolicy, Hash: c.Hash}, nil
}

// Network gives what SetNetwork kept.
func (e *Engine) Network(_ context.Context, tenant, ref string) (sandbox.AppliedPolicy, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	b, err := e.find(tenant, ref)
	if err != nil {
		return sandbox.AppliedPolicy{}, err
	}
	return sandbox.AppliedPolicy{Policy: b.rec.Spec.Network, Hash: b.rec.NetworkHash}, nil
}

// ProveNetwork has nothing to prove with.
func (e *Engine) ProveNetwork(context.Context, string, string) (sandbox.Proof, error) {
	return sandbox.Proof{}, sandbox.Unsupported.Errorf("prove")
}

// ExplainNetwork asks the policy that is kept.
func (e *Engine) ExplainNetwork(ctx context.Context, tenant, ref string, q engine.NetworkQuestion) (sandbox.Explanation, error) {
	p := q.Policy
	if p == nil {
		a, err := e.Network(ctx, tenant, ref)
		if err != nil {
			return sandbox.Explanation{}, err
		}
		p = &a.Policy
	}
	c, err := node.Compile(*p)
	if err != nil {
		return sandbox.Explanation{}, err
	}
	v := c.Decide(policy.Flow{Name: q.Host, Port: q.Port, Protocol: sandbox.ProtocolTCP})
	return sandbox.Explanation{Allowed: v.Allowed, Rule: v.Rule}, nil
}

// Flows has none.
func (e *Engine) Flows(_ context.Context, tenant, ref string, _ int64, _ bool, _ func(sandbox.FlowRecord) error) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	_, err := e.find(tenant, ref)
	return err
}

// Presets has one.
func (e *Engine) Presets() []engine.Preset {
	return []engine.Preset{{Name: "web", Rules: []sandbox.PolicyRule{{Action: sandbox.RuleAllow, Domain: "example.com"}}}}
}
