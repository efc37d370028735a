package native

import (
	"context"

	"connectrpc.com/connect"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/api/vivarium/v1/vivariumv1connect"
	"vivarium/sandbox"
	"vivarium/server"
)

type daemon struct {
	eng    Engine
	tokens *server.Tokens
}

var _ vivariumv1connect.DaemonServiceHandler = (*daemon)(nil)

func (d *daemon) Info(ctx context.Context, _ *connect.Request[v1.InfoRequest]) (*connect.Response[v1.InfoResponse], error) {
	i := d.eng.Info()
	tok := server.CallFrom(ctx).Token
	m := &v1.InfoResponse{
		Version: i.Version, GvisorVersion: i.GVisorVersion, Tenant: tok.Tenant, Admin: tok.Admin,
		Started: stamp(i.Started),
	}
	if tok.Admin { // how busy the node is with others is not a tenant's affair
		m.Sandboxes, m.PoolReady = int64(i.Alive), int64(i.PoolReady)
	}
	for _, r := range i.Runtimes {
		m.Runtimes = append(m.Runtimes, &v1.RuntimeInfo{Name: r.Name, Available: r.Available, Reason: r.Reason, Capabilities: r.Features})
	}
	return answer(m), nil
}

func tokenTo(t sandbox.Token) *v1.Token {
	return &v1.Token{Id: t.ID, Tenant: t.Tenant, Name: t.Name, Admin: t.Admin, Created: stamp(t.Created), LastUsed: stamp(t.LastUsed)}
}

func (d *daemon) CreateToken(ctx context.Context, req *connect.Request[v1.CreateTokenRequest]) (*connect.Response[v1.CreateTokenResponse], error) {
	if err := server.RequireAdmin(ctx); err != nil {
		return nil, err
	}
	tenant := req.Msg.Tenant
	if tenant == "" {
		tenant = server.Tenant(ctx)
	}
	if !printable(req.Msg.Name) {
		return nil, sandbox.Invalid.Errorf("the name of the token is not printable")
	}
	t, secret, err := d.tokens.Create(ctx, sandbox.Token{Tenant: tenant, Name: req.Msg.Name, Admin: req.Msg.Admin})
	if err != nil {
		return nil, err
	}
	return answer(&v1.CreateTokenResponse{Token: tokenTo(t), Secret: secret}), nil
}

func (d *daemon) ListTokens(ctx context.Context, _ *connect.Request[v1.ListTokensRequest]) (*connect.Response[v1.ListTokensResponse], error) {
	if err := server.RequireAdmin(ctx); err != nil {
		return nil, err
	}
	list, err := d.tokens.List(ctx)
	if err != nil {
		return nil, err
	}
	res := &v1.ListTokensResponse{}
	for _, t := range list {
		res.Tokens = append(res.Tokens, tokenTo(t))
	}
	return answer(res), nil
}

func (d *daemon) RevokeToken(ctx context.Context, req *connect.Request[v1.RevokeTokenRequest]) (*connect.Response[v1.RevokeTokenResponse], error) {
	if err := server.RequireAdmin(ctx); err != nil {
		return nil, err
	}
	if err := checkID("the token's id", req.Msg.Id); err != nil {
		return nil, err
	}
	if err := d.tokens.Revoke(ctx, req.Msg.Id); err != nil {
		return nil, err
	}
	return answer(&v1.RevokeTokenResponse{}), nil
}
