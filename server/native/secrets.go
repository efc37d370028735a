package native

import (
	"context"

	"connectrpc.com/connect"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/api/vivarium/v1/vivariumv1connect"
	"vivarium/sandbox"
	"vivarium/secret"
	"vivarium/server"
)

const maxHosts = 64

// Secrets is what this package needs of secret.Vault.
type Secrets interface {
	Set(ctx context.Context, s secret.Secret, v secret.Value) (secret.Secret, error)
	List(ctx context.Context, tenant string) ([]secret.Secret, error)
	Delete(ctx context.Context, tenant, name string) error
}

var _ Secrets = (*secret.Vault)(nil)

type secrets struct{ vault Secrets }

var _ vivariumv1connect.SecretServiceHandler = (*secrets)(nil)

func (s *secrets) ready() error {
	if s.vault == nil {
		return sandbox.Unsupported.Errorf("this daemon keeps no secrets")
	}
	return nil
}

func (s *secrets) Set(ctx context.Context, req *connect.Request[v1.SetSecretRequest]) (*connect.Response[v1.SetSecretResponse], error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	m := req.Msg.Secret
	if m == nil {
		return nil, sandbox.Invalid.Errorf("the secret is missing")
	}
	if len(m.Hosts) > maxHosts {
		return nil, sandbox.Invalid.Errorf("%d hosts: at most %d", len(m.Hosts), maxHosts)
	}
	v := secret.NewValue(req.Msg.Value)
	clear(req.Msg.Value)
	defer v.Clear()
	kept, err := s.vault.Set(ctx, secret.Secret{Tenant: server.Tenant(ctx), Name: m.Name, Hosts: m.Hosts, Env: m.Env, Query: m.Query, Prefix: m.Prefix}, v)
	if err != nil {
		return nil, err
	}
	return answer(&v1.SetSecretResponse{Secret: secretTo(kept)}), nil
}

func (s *secrets) List(ctx context.Context, _ *connect.Request[v1.ListSecretsRequest]) (*connect.Response[v1.ListSecretsResponse], error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	list, err := s.vault.List(ctx, server.Tenant(ctx))
	if err != nil {
		return nil, err
	}
	out := &v1.ListSecretsResponse{}
	for _, x := range list {
		out.Secrets = append(out.Secrets, secretTo(x))
	}
	return answer(out), nil
}

func (s *secrets) Remove(ctx context.Context, req *connect.Request[v1.RemoveSecretRequest]) (*connect.Response[v1.RemoveSecretResponse], error) {
	if err := s.ready(); err != nil {
		return nil, err
	}
	if err := s.vault.Delete(ctx, server.Tenant(ctx), req.Msg.Name); err != nil {
		return nil, err
	}
	return answer(&v1.RemoveSecretResponse{}), nil
}

func secretTo(s secret.Secret) *v1.Secret {
	return &v1.Secret{Name: s.Name, Hosts: s.Hosts, Env: s.Env, Query: s.Query, Prefix: s.Prefix, Created: stamp(s.Created), Updated: stamp(s.Updated)}
}
