package network

import (
	"context"

	"vivarium/sandbox"
)

// Slot returns a slot in use, with the policy that was last applied.
// Errors: NotFound, Unavailable (closed).
func (n *Network) Slot(id string) (*Slot, error) {
	if err := n.enter(); err != nil {
		return nil, err
	}
	defer n.ops.Done()
	n.mu.Lock()
	defer n.mu.Unlock()
	s := n.slots[id]
	if s == nil || s.Owner == "" {
		return nil, sandbox.NotFound.Errorf("network: no slot %q", id)
	}
	return n.export(s), nil
}

// ReadBack asks the kernel what is in force for a slot, and returns it if it is
// what was applied. If it is not, the rules are replaced soon after. Errors:
// NotFound, Conflict (a change of the slot does not end), Internal (the kernel has
// something else, or does not tell).
func (n *Network) ReadBack(ctx context.Context, id string) (sandbox.AppliedPolicy, error) {
	if err := n.enter(); err != nil {
		return sandbox.AppliedPolicy{}, err
	}
	defer n.ops.Done()
	s, err := n.hold(ctx, id)
	if err != nil {
		return sandbox.AppliedPolicy{}, err
	}
	defer n.letGo(s)
	if err := n.verifySlot(s); err != nil {
		n.altered.Store(true)
		n.raise()
		return sandbox.AppliedPolicy{}, sandbox.Internal.Errorf("read policy of slot %s: %w", id, err)
	}
	return applied(s.policy), nil
}

// Stats are counts of now.
type Stats struct {
	Pool, InUse, Ending int    // slots ready, handed out, being destroyed
	Capacity            int    // slots that the subnet has room for
	DNSInFlight         int    // queries being answered
	DNSDropped          uint64 // queries over a slot's limits since the daemon started
	DNSCached           int    // answers in the cache
}

// Stats returns counts of now; zero after Close.
func (n *Network) Stats() Stats {
	if n.enter() != nil {
		return Stats{}
	}
	defer n.ops.Done()
	n.mu.Lock()
	st := Stats{Pool: len(n.pool), InUse: len(n.slots) - len(n.pool), Capacity: int(n.maxSlots())}
	st.Ending = len(n.used) - len(n.slots)
	n.mu.Unlock()
	st.DNSInFlight, st.DNSDropped = int(n.dns.inFlight.Load()), n.dns.dropped.Load()
	n.dns.cache.mu.Lock()
	st.DNSCached = len(n.dns.cache.entries)
	n.dns.cache.mu.Unlock()
	return st
}
