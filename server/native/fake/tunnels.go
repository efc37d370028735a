package fake

import (
	"context"
	"log/slog"
	"sync"
	"testing"

	"vivarium/sandbox"
	"vivarium/tunnel"
)

// tunnelRows is a tunnel.Store in memory.
type tunnelRows struct {
	mu   sync.Mutex
	rows []sandbox.Tunnel
}

func (r *tunnelRows) Tunnels(context.Context) ([]sandbox.Tunnel, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]sandbox.Tunnel(nil), r.rows...), nil
}

func (r *tunnelRows) PutTunnel(_ context.Context, t sandbox.Tunnel) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.rows = append(r.rows, t)
	return nil
}

func (r *tunnelRows) drop(which func(sandbox.Tunnel) bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var keep []sandbox.Tunnel
	for _, t := range r.rows {
		if !which(t) {
			keep = append(keep, t)
		}
	}
	r.rows = keep
	return nil
}

func (r *tunnelRows) DeleteTunnel(_ context.Context, tenant, id string) error {
	return r.drop(func(t sandbox.Tunnel) bool { return t.Tenant == tenant && t.ID == id })
}

func (r *tunnelRows) DeleteTunnels(_ context.Context, tenant, id string) error {
	return r.drop(func(t sandbox.Tunnel) bool { return t.Tenant == tenant && t.SandboxID == id })
}

// newTunnels are real ones, to sandboxes of the fake engine.
func newTunnels(t testing.TB, eng *Engine, log *slog.Logger) *tunnel.Manager {
	t.Helper()
	m, err := tunnel.New(tunnel.Options{
		Dir: t.TempDir(), Store: &tunnelRows{}, Listen: "127.0.0.1:0", Domain: "viv.localhost", TCPAddress: "127.0.0.1",
		Ports: tunnel.Ports{First: 23000, Last: 23999}, MaxConnections: 16, Logger: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	if err := m.Start(context.Background(), eng); err != nil {
		t.Fatal(err)
	}
	return m
}
