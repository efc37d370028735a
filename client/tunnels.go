package client

import (
	"context"

	"connectrpc.com/connect"

	v1 "vivarium/api/vivarium/v1"
)

// OpenTunnel opens a way in to a port of a sandbox.
func (c *Client) OpenTunnel(ctx context.Context, ref string, spec *v1.TunnelSpec) (*v1.Tunnel, error) {
	res, err := c.Tunnels.Open(ctx, connect.NewRequest(&v1.OpenTunnelRequest{SandboxId: ref, Spec: spec}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Tunnel, nil
}

// ListTunnels lists those of a sandbox; empty: of the tenant.
func (c *Client) ListTunnels(ctx context.Context, ref string) ([]*v1.Tunnel, error) {
	res, err := c.Tunnels.List(ctx, connect.NewRequest(&v1.ListTunnelsRequest{SandboxId: ref}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Tunnels, nil
}

// CloseTunnel closes a way in, with the connections on it.
func (c *Client) CloseTunnel(ctx context.Context, id string) error {
	_, err := c.Tunnels.Close(ctx, connect.NewRequest(&v1.CloseTunnelRequest{Id: id}))
	return err
}

// CreateConnectToken makes a URL and a token for a port of a sandbox.
func (c *Client) CreateConnectToken(ctx context.Context, req *v1.CreateConnectTokenRequest) (*v1.CreateConnectTokenResponse, error) {
	res, err := c.Tunnels.CreateConnectToken(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}
