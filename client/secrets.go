package client

import (
	"context"

	"connectrpc.com/connect"

	v1 "vivarium/api/vivarium/v1"
)

// SetSecret keeps a value, or replaces the one of that name.
func (c *Client) SetSecret(ctx context.Context, s *v1.Secret, value []byte) (*v1.Secret, error) {
	res, err := c.Secrets.Set(ctx, connect.NewRequest(&v1.SetSecretRequest{Secret: s, Value: value}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Secret, nil
}

// ListSecrets lists the tenant's secrets; their values are shown nowhere.
func (c *Client) ListSecrets(ctx context.Context) ([]*v1.Secret, error) {
	res, err := c.Secrets.List(ctx, connect.NewRequest(&v1.ListSecretsRequest{}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Secrets, nil
}

// RemoveSecret forgets a value.
func (c *Client) RemoveSecret(ctx context.Context, name string) error {
	_, err := c.Secrets.Remove(ctx, connect.NewRequest(&v1.RemoveSecretRequest{Name: name}))
	return err
}
