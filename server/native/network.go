package native

import (
	"context"
	"net/netip"

	"connectrpc.com/connect"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/api/vivarium/v1/vivariumv1connect"
	"vivarium/engine"
	"vivarium/network/policy"
	"vivarium/sandbox"
	"vivarium/server"
)

type networks struct{ eng Engine }

var _ vivariumv1connect.NetworkServiceHandler = (*networks)(nil)

func (n *networks) Set(ctx context.Context, req *connect.Request[v1.SetNetworkRequest]) (*connect.Response[v1.SetNetworkResponse], error) {
	if err := checkRef(req.Msg.SandboxId); err != nil {
		return nil, err
	}
	p, err := policyFrom(req.Msg.Policy)
	if err != nil {
		return nil, err
	}
	tenant := server.Tenant(ctx)
	a, err := n.eng.SetNetwork(ctx, tenant, req.Msg.SandboxId, p)
	if err != nil {
		return nil, err
	}
	out := &v1.SetNetworkResponse{Applied: appliedTo(a)}
	if req.Msg.Prove {
		proof, err := n.eng.ProveNetwork(ctx, tenant, req.Msg.SandboxId)
		if err != nil {
			return nil, err
		}
		out.Proof = proofTo(&proof)
	}
	return answer(out), nil
}

func (n *networks) Get(ctx context.Context, req *connect.Request[v1.GetNetworkRequest]) (*connect.Response[v1.GetNetworkResponse], error) {
	if err := checkRef(req.Msg.SandboxId); err != nil {
		return nil, err
	}
	a, err := n.eng.Network(ctx, server.Tenant(ctx), req.Msg.SandboxId)
	if err != nil {
		return nil, err
	}
	return answer(&v1.GetNetworkResponse{Applied: appliedTo(a)}), nil
}

func (n *networks) Prove(ctx context.Context, req *connect.Request[v1.ProveNetworkRequest]) (*connect.Response[v1.ProveNetworkResponse], error) {
	if err := checkRef(req.Msg.SandboxId); err != nil {
		return nil, err
	}
	p, err := n.eng.ProveNetwork(ctx, server.Tenant(ctx), req.Msg.SandboxId)
	if err != nil {
		return nil, err
	}
	return answer(&v1.ProveNetworkResponse{Proof: proofTo(&p)}), nil
}

func (n *networks) Explain(ctx context.Context, req *connect.Request[v1.ExplainNetworkRequest]) (*connect.Response[v1.ExplainNetworkResponse], error) {
	q := engine.NetworkQuestion{Host: req.Msg.Host, Port: 443, Protocol: req.Msg.Protocol}
	switch {
	case (req.Msg.SandboxId == "") == (req.Msg.Policy == nil):
		return nil, sandbox.Invalid.Errorf("want either a sandbox or a policy")
	case req.Msg.Policy != nil:
		p, err := policyFrom(req.Msg.Policy)
		if err != nil {
			return nil, err
		}
		q.Policy = &p
	default:
		if err := checkRef(req.Msg.SandboxId); err != nil {
			return nil, err
		}
	}
	if req.Msg.Port > 65535 {
		return nil, sandbox.Invalid.Errorf("port %d is not between 1 and 65535", req.Msg.Port)
	}
	if req.Msg.Port != 0 {
		q.Port = uint16(req.Msg.Port)
	}
	if len(q.Host) > 300 {
		return nil, sandbox.Invalid.Errorf("the host is longer than 300 bytes")
	}
	x, err := n.eng.ExplainNetwork(ctx, server.Tenant(ctx), req.Msg.SandboxId, q)
	if err != nil {
		return nil, err
	}
	out := &v1.ExplainNetworkResponse{Allowed: x.Allowed, Rule: x.Rule, Via: x.Via}
	for _, a := range x.Addresses {
		out.Addresses = append(out.Addresses, &v1.ExplainedAddress{Address: a.Addr.String(), Allowed: a.Allowed, Rule: a.Rule})
	}
	return answer(out), nil
}

func (n *networks) Flows(ctx context.Context, req *connect.Request[v1.WatchFlowsRequest], stream *connect.ServerStream[v1.FlowRecord]) error {
	if err := checkRef(req.Msg.SandboxId); err != nil {
		return err
	}
	return n.eng.Flows(ctx, server.Tenant(ctx), req.Msg.SandboxId, req.Msg.After, req.Msg.Follow, func(r sandbox.FlowRecord) error {
		m := &v1.FlowRecord{
			Seq: r.Seq, SandboxId: r.SandboxID, Allowed: r.Allowed, Name: r.Target.Name, Port: uint32(r.Target.Port), Protocol: r.Target.Protocol,
			Rule: r.Rule, Flows: r.Flows, BytesOut: r.BytesOut, BytesIn: r.BytesIn, First: stamp(r.First), Last: stamp(r.Last), ExecId: r.ExecID, Uncounted: r.Uncounted,
		}
		if r.Target.Addr.IsValid() {
			m.Address = r.Target.Addr.String()
		}
		return stream.Send(m)
	})
}

func (n *networks) Presets(context.Context, *connect.Request[v1.ListPresetsRequest]) (*connect.Response[v1.ListPresetsResponse], error) {
	out := &v1.ListPresetsResponse{}
	for _, p := range n.eng.Presets() {
		m := &v1.Preset{Name: p.Name}
		for _, r := range p.Rules {
			m.Rules = append(m.Rules, policy.FormatRule(r))
		}
		out.Presets = append(out.Presets, m)
	}
	return answer(out), nil
}

// policyFrom turns a message into a policy; the network checks it further.
func policyFrom(m *v1.NetworkPolicy) (sandbox.NetworkPolicy, error) {
	if m == nil {
		return sandbox.NetworkPolicy{}, nil
	}
	p := sandbox.NetworkPolicy{
		Mode: sandbox.NetworkMode(m.Mode), ResolveAny: m.ResolveAny, Upstream: m.Upstream,
		BytesPerSecond: m.BytesPerSecond, ConnsPerSecond: m.ConnsPerSecond,
	}
	switch p.Mode {
	case "", sandbox.NetworkPublic, sandbox.NetworkNone, sandbox.NetworkAllowlist:
	default:
		return p, sandbox.Invalid.Errorf("network mode %q", clip(m.Mode)).WithHint("the modes are public, none and allowlist")
	}
	if len(m.Rules) > policy.MaxRules {
		return p, sandbox.Invalid.Errorf("%d rules: at most %d", len(m.Rules), policy.MaxRules)
	}
	for i, r := range m.Rules {
		rule, err := policy.ParseRule(sandbox.RuleAction(r.GetAction()), r.GetMatch())
		if err != nil {
			return p, sandbox.Invalid.Errorf("rule %d: %w", i+1, err)
		}
		p.Rules = append(p.Rules, rule)
	}
	for _, h := range m.Headers {
		p.Headers = append(p.Headers, sandbox.HeaderRule{Domain: h.GetDomain(), Headers: h.GetHeaders()})
	}
	if m.Source != "" {
		a, err := netip.ParseAddr(m.Source)
		if err != nil {
			return p, sandbox.Invalid.Errorf("source %q is not an address", clip(m.Source))
		}
		p.Source = a
	}
	return p, nil
}

func policyTo(p sandbox.NetworkPolicy) *v1.NetworkPolicy {
	m := &v1.NetworkPolicy{
		Mode: string(p.Mode), ResolveAny: p.ResolveAny, Inspect: p.Inspect, Upstream: p.Upstream,
		BytesPerSecond: p.BytesPerSecond, ConnsPerSecond: p.ConnsPerSecond,
	}
	for _, r := range p.Rules {
		m.Rules = append(m.Rules, &v1.PolicyRule{Action: string(r.Action), Match: policy.FormatRule(r)})
	}
	for _, h := range p.Headers {
		m.Headers = append(m.Headers, &v1.HeaderRule{Domain: h.Domain, Headers: h.Headers})
	}
	if p.Source.IsValid() {
		m.Source = p.Source.String()
	}
	return m
}

func appliedTo(a sandbox.AppliedPolicy) *v1.AppliedPolicy {
	return &v1.AppliedPolicy{Policy: policyTo(a.Policy), Hash: a.Hash}
}

func proofTo(p *sandbox.Proof) *v1.Proof {
	if p == nil {
		return nil
	}
	m := &v1.Proof{Result: p.Result, Hash: p.Hash, Time: stamp(p.Time)}
	for _, c := range p.Checks {
		m.Checks = append(m.Checks, &v1.ProofCheck{What: c.What, Target: c.Target, Want: c.Want, Got: c.Got, Ok: c.OK, Detail: c.Detail})
	}
	return m
}
