package network

import (
	"net"
	"net/netip"
	"slices"

	"vivarium/sandbox"
)

// LocalService is something that the daemon offers to sandboxes inside the
// router, such as a cache of packages: TCP to LocalAddr, for every slot whose
// policy lets anything pass at all. It says itself, by SlotOf, who asks.
type LocalService struct {
	Name string
	Port uint16
}

// maxLocal keeps the rules few.
const maxLocal = 16

func checkLocal(ls []LocalService) error {
	if len(ls) > maxLocal {
		return sandbox.Invalid.Errorf("network: %d local services: at most %d", len(ls), maxLocal)
	}
	for i, l := range ls {
		same := func(o LocalService) bool { return o.Name == l.Name || o.Port == l.Port }
		if l.Name == "" || l.Port == 0 || slices.ContainsFunc(ls[:i], same) {
			return sandbox.Invalid.Errorf("network: local service %q on port %d: want a name and a port of its own", l.Name, l.Port)
		}
	}
	return nil
}

// LocalAddr is the address of the local services, seen from inside.
func (n *Network) LocalAddr() netip.Addr { return n.localAddr() }

// LocalListener listens for a local service. Its connections come from the
// addresses of slots. Errors: NotFound (no such service in the options),
// Conflict (somebody listens already), Unavailable (closed).
func (n *Network) LocalListener(name string) (net.Listener, error) {
	if err := n.enter(); err != nil {
		return nil, err
	}
	defer n.ops.Done()
	i := slices.IndexFunc(n.opts.Local, func(l LocalService) bool { return l.Name == name })
	if i < 0 {
		return nil, sandbox.NotFound.Errorf("network: no local service %q", name)
	}
	addr := net.TCPAddrFromAddrPort(netip.AddrPortFrom(n.localAddr(), n.opts.Local[i].Port))
	var ln net.Listener
	err := n.dialer.do(func() (err error) { ln, err = net.ListenTCP("tcp4", addr); return })
	if err != nil {
		return nil, sandbox.Conflict.Errorf("network: listen for %s: %w", name, err)
	}
	return ln, nil
}

// SlotOf is the slot in use that has an address, and its owner.
func (n *Network) SlotOf(a netip.Addr) (id, owner string, ok bool) {
	a = a.Unmap()
	n.mu.Lock()
	defer n.mu.Unlock()
	if s := n.byAddr[a]; s != nil && s.Owner != "" {
		return s.ID, s.Owner, true
	}
	return "", "", false
}
