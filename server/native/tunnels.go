package native

import (
	"context"
	"net/netip"
	"time"

	"connectrpc.com/connect"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/api/vivarium/v1/vivariumv1connect"
	"vivarium/sandbox"
	"vivarium/server"
	"vivarium/tunnel"
)

// connectPort is where a connect token leads to when no port is said.
const connectPort = 8080

// Tunnels is what this package needs of tunnel.Manager; see there for what the
// methods promise.
type Tunnels interface {
	Open(ctx context.Context, tenant, ref string, spec sandbox.TunnelSpec) (sandbox.Tunnel, error)
	List(tenant, sandboxID string) []sandbox.Tunnel
	CloseTunnel(ctx context.Context, tenant, id string) error
	Connect(ctx context.Context, tenant, ref string, port uint16, metadata string, lifetime time.Duration) (url, token string, expires time.Time, err error)
}

var _ Tunnels = (*tunnel.Manager)(nil)

type tunnels struct {
	eng Engine
	m   Tunnels
}

var _ vivariumv1connect.TunnelServiceHandler = (*tunnels)(nil)

func (t *tunnels) there() error {
	if t.m == nil {
		return sandbox.Unsupported.Errorf("this daemon has no tunnels")
	}
	return nil
}

func (t *tunnels) Open(ctx context.Context, req *connect.Request[v1.OpenTunnelRequest]) (*connect.Response[v1.OpenTunnelResponse], error) {
	if err := firstOf(t.there(), checkRef(req.Msg.SandboxId)); err != nil {
		return nil, err
	}
	spec, err := tunnelFrom(req.Msg.Spec)
	if err != nil {
		return nil, err
	}
	x, err := t.m.Open(ctx, server.Tenant(ctx), req.Msg.SandboxId, spec)
	if err != nil {
		return nil, err
	}
	return answer(&v1.OpenTunnelResponse{Tunnel: tunnelTo(x)}), nil
}

func (t *tunnels) List(ctx context.Context, req *connect.Request[v1.ListTunnelsRequest]) (*connect.Response[v1.ListTunnelsResponse], error) {
	if err := t.there(); err != nil {
		return nil, err
	}
	id, tenant := "", server.Tenant(ctx)
	if req.Msg.SandboxId != "" {
		if err := checkRef(req.Msg.SandboxId); err != nil {
			return nil, err
		}
		sb, err := t.eng.Get(ctx, tenant, req.Msg.SandboxId)
		if err != nil {
			return nil, err
		}
		id = sb.ID
	}
	return answer(&v1.ListTunnelsResponse{Tunnels: tunnelsTo(t.m.List(tenant, id))}), nil
}

func (t *tunnels) Close(ctx context.Context, req *connect.Request[v1.CloseTunnelRequest]) (*connect.Response[v1.CloseTunnelResponse], error) {
	if err := firstOf(t.there(), checkID("the tunnel's id", req.Msg.Id)); err != nil {
		return nil, err
	}
	if err := t.m.CloseTunnel(ctx, server.Tenant(ctx), req.Msg.Id); err != nil {
		return nil, err
	}
	return answer(&v1.CloseTunnelResponse{}), nil
}

func (t *tunnels) CreateConnectToken(ctx context.Context, req *connect.Request[v1.CreateConnectTokenRequest]) (*connect.Response[v1.CreateConnectTokenResponse], error) {
	if err := firstOf(t.there(), checkRef(req.Msg.SandboxId)); err != nil {
		return nil, err
	}
	port := req.Msg.Port
	if port == 0 {
		port = connectPort
	}
	if port > 65535 {
		return nil, sandbox.Invalid.Errorf("port %d is not between 1 and 65535", port)
	}
	life, err := duration("lifetime", req.Msg.Lifetime)
	if err != nil {
		return nil, err
	}
	if req.Msg.Lifetime != nil && life < time.Second {
		return nil, sandbox.Invalid.Errorf("a lifetime of %v is less than a second", life)
	}
	url, token, expires, err := t.m.Connect(ctx, server.Tenant(ctx), req.Msg.SandboxId, uint16(port), req.Msg.Metadata, life)
	if err != nil {
		return nil, err
	}
	return answer(&v1.CreateConnectTokenResponse{Url: url, Token: token, Expires: stamp(expires)}), nil
}

// tunnelFrom turns a message into a spec; the tunnel's package checks it further.
func tunnelFrom(m *v1.TunnelSpec) (sandbox.TunnelSpec, error) {
	if m == nil {
		return sandbox.TunnelSpec{}, sandbox.Invalid.Errorf("what to open is missing")
	}
	if m.Port < 1 || m.Port > 65535 {
		return sandbox.TunnelSpec{}, sandbox.Invalid.Errorf("port %d is not between 1 and 65535", m.Port)
	}
	if len(m.Allow) > tunnel.MaxAllow {
		return sandbox.TunnelSpec{}, sandbox.Invalid.Errorf("%d networks in the allow-list of a tunnel: at most %d", len(m.Allow), tunnel.MaxAllow)
	}
	s := sandbox.TunnelSpec{Port: uint16(m.Port), Kind: m.Kind, Token: m.Token}
	for _, a := range m.Allow {
		p, err := tunnel.ParseAllow(a)
		if err != nil {
			return s, err
		}
		s.Allow = append(s.Allow, p)
	}
	return tunnel.Normalise(s)
}

func tunnelSpecsFrom(list []*v1.TunnelSpec) ([]sandbox.TunnelSpec, error) {
	if len(list) > tunnel.MaxPerSandbox {
		return nil, sandbox.Invalid.Errorf("%d tunnels: at most %d", len(list), tunnel.MaxPerSandbox)
	}
	var out []sandbox.TunnelSpec
	for i, m := range list {
		s, err := tunnelFrom(m)
		if err != nil {
			return nil, sandbox.Invalid.Errorf("tunnel %d: %w", i+1, err)
		}
		out = append(out, s)
	}
	return out, nil
}

func tunnelSpecTo(s sandbox.TunnelSpec) *v1.TunnelSpec {
	m := &v1.TunnelSpec{Port: uint32(s.Port), Kind: s.Kind, Token: s.Token}
	for _, p := range s.Allow {
		m.Allow = append(m.Allow, addrOrPrefix(p))
	}
	return m
}

func addrOrPrefix(p netip.Prefix) string {
	if p.IsSingleIP() {
		return p.Addr().String()
	}
	return p.String()
}

func tunnelTo(t sandbox.Tunnel) *v1.Tunnel {
	return &v1.Tunnel{Id: t.ID, SandboxId: t.SandboxID, Spec: tunnelSpecTo(t.Spec), Url: t.URL, Address: t.Address, Created: stamp(t.Created)}
}

func tunnelsTo(list []sandbox.Tunnel) []*v1.Tunnel {
	var out []*v1.Tunnel
	for _, t := range list {
		out = append(out, tunnelTo(t))
	}
	return out
}

// told is a sandbox with the ways in that it has now.
func (s *sandboxes) told(sb sandbox.Sandbox) *v1.Sandbox {
	m := sandboxTo(sb)
	if s.tunnels != nil && sb.Stage.Alive() {
		m.Tunnels = tunnelsTo(s.tunnels.List(sb.Tenant, sb.ID))
	}
	return m
}
