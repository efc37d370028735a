package engine

import (
	"context"

	"vivarium/sandbox"
)

// Tunnels are the ways in to sandboxes; see package tunnel.
type Tunnels interface {
	// Check says whether these can be opened here, and fills in what they leave
	// out.
	Check([]sandbox.TunnelSpec) ([]sandbox.TunnelSpec, error)
	// Ensure opens those that the sandbox does not have yet.
	Ensure(ctx context.Context, tenant, id string, specs []sandbox.TunnelSpec) error
	// CloseSandbox closes all of a sandbox that ends.
	CloseSandbox(ctx context.Context, tenant, id string) error
}

func (e *Engine) checkTunnels(s *sandbox.Spec) (err error) {
	if len(s.Tunnels) == 0 {
		return nil
	}
	if e.opts.Tunnels == nil {
		return sandbox.Unsupported.Errorf("this daemon has no tunnels")
	}
	s.Tunnels, err = e.opts.Tunnels.Check(s.Tunnels)
	return err
}

// openTunnels opens what the box was asked to be made with, before its main
// command starts: once it runs, it can be reached.
func (b *box) openTunnels() error {
	specs := b.record().Spec.Tunnels
	if len(specs) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(b.life, b.e.opts.Deadlines.Guest)
	defer cancel()
	return b.e.opts.Tunnels.Ensure(ctx, b.tenant, b.id, specs)
}

// closeTunnels closes whatever leads to the box, once nothing in it runs.
func (b *box) closeTunnels() {
	if b.e.opts.Tunnels == nil {
		return
	}
	if err := b.e.opts.Tunnels.CloseSandbox(context.Background(), b.tenant, b.id); err != nil {
		b.e.log.Error("close tunnels", "sandbox", b.id, "err", err)
	}
}
