package network

import (
	"vivarium/network/proxy"
	"vivarium/sandbox"
)

// SetInjector says who stands between a slot and the names that its policy
// inspects; nil: nobody, and connections to them are refused. It lasts until the
// slot is released, and not beyond this process. Errors: NotFound, Unavailable
// (closed).
func (n *Network) SetInjector(slotID string, in proxy.Injector) error {
	if err := n.enter(); err != nil {
		return err
	}
	defer n.ops.Done()
	n.mu.Lock()
	defer n.mu.Unlock()
	s := n.slots[slotID]
	if s == nil || s.Owner == "" {
		return sandbox.NotFound.Errorf("network: no slot %q", slotID)
	}
	if in == nil {
		s.injector.Store(nil)
	} else {
		s.injector.Store(&in)
	}
	return nil
}
