package client

import (
	"context"

	"connectrpc.com/connect"

	v1 "vivarium/api/vivarium/v1"
)

// SetNetwork replaces the policy of a running sandbox and returns what is in
// force; with prove it has it tried from inside as well.
func (c *Client) SetNetwork(ctx context.Context, ref string, p *v1.NetworkPolicy, prove bool) (*v1.AppliedPolicy, *v1.Proof, error) {
	res, err := c.Networks.Set(ctx, connect.NewRequest(&v1.SetNetworkRequest{SandboxId: ref, Policy: p, Prove: prove}))
	if err != nil {
		return nil, nil, err
	}
	return res.Msg.Applied, res.Msg.Proof, nil
}

// Network reads a sandbox's policy back.
func (c *Client) Network(ctx context.Context, ref string) (*v1.AppliedPolicy, error) {
	res, err := c.Networks.Get(ctx, connect.NewRequest(&v1.GetNetworkRequest{SandboxId: ref}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Applied, nil
}

// ProveNetwork has a sandbox's policy tried from inside.
func (c *Client) ProveNetwork(ctx context.Context, ref string) (*v1.Proof, error) {
	res, err := c.Networks.Prove(ctx, connect.NewRequest(&v1.ProveNetworkRequest{SandboxId: ref}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Proof, nil
}

// ExplainNetwork asks what a policy does with a host.
func (c *Client) ExplainNetwork(ctx context.Context, req *v1.ExplainNetworkRequest) (*v1.ExplainNetworkResponse, error) {
	res, err := c.Networks.Explain(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

// Flows calls fn with every destination that a sandbox reached or was refused.
func (c *Client) Flows(ctx context.Context, req *v1.WatchFlowsRequest, fn func(*v1.FlowRecord) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.Networks.Flows(ctx, connect.NewRequest(req))
	if err != nil {
		return err
	}
	defer s.Close()
	for s.Receive() {
		if err := fn(s.Msg()); err != nil {
			return err
		}
	}
	return s.Err()
}

// Presets are the named lists of the daemon's configuration.
func (c *Client) Presets(ctx context.Context) ([]*v1.Preset, error) {
	res, err := c.Networks.Presets(ctx, connect.NewRequest(&v1.ListPresetsRequest{}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Presets, nil
}
