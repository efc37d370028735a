package network

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	mdnetlink "github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

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
// what was applied. Errors: NotFound, Conflict (a change of the slot does not
// end), Internal (the kernel has something else, or does not tell).
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
	got, err := n.readSlot(s)
	if err != nil {
		return sandbox.AppliedPolicy{}, sandbox.Internal.Errorf("read policy of slot %s: %w", id, err)
	}
	if got != s.Policy.Mode {
		return sandbox.AppliedPolicy{}, sandbox.Internal.Errorf("slot %s: policy is %q in the kernel, not %q", id, got, s.Policy.Mode)
	}
	return applied(s.policy), nil
}

// readSlot derives a slot's mode from rules and flags alone.
func (n *Network) readSlot(s *slot) (sandbox.NetworkMode, error) {
	mode := sandbox.NetworkNone
	err := n.router.do(func() error {
		var open, gate, registered bool
		err := n.router.withNft(func(c *nftables.Conn) error {
			es, err := c.GetSetElements(mapPolicy())
			if err != nil {
				return err
			}
			for _, e := range es {
				if bytes.Equal(e.Key, ifname(s.veth)) {
					if mode, err = verdictChain(e.Val); err != nil {
						return err
					}
				}
			}
			if open, err = contains(c, setOpen(), openKey(s)[0].Key); err != nil {
				return err
			}
			if gate, err = contains(c, setGate(), openKey(s)[0].Key); err != nil {
				return err
			}
			registered, err = contains(c, setSlots(), slotKey(s)[0].Key)
			return err
		})
		if err != nil {
			return err
		}
		if !registered || open != opens(mode) || gate != opens(mode) {
			return fmt.Errorf("the kernel is of two minds: registered %v, chain %q, open %v, gate %v", registered, mode, open, gate)
		}
		return nil
	})
	return mode, err
}

// verdictChain returns the chain of a packed verdict (NFTA_VERDICT_CODE and
// NFTA_VERDICT_CHAIN of linux/netfilter/nf_tables.h), which must be a goto.
func verdictChain(b []byte) (sandbox.NetworkMode, error) {
	ad, err := mdnetlink.NewAttributeDecoder(b)
	if err != nil {
		return "", err
	}
	ad.ByteOrder = binary.BigEndian
	var code int32
	var chain string
	for ad.Next() {
		switch ad.Type() {
		case unix.NFTA_VERDICT_CODE:
			code = int32(ad.Uint32())
		case unix.NFTA_VERDICT_CHAIN:
			chain = ad.String()
		}
	}
	if err := ad.Err(); err != nil {
		return "", err
	}
	if code != int32(expr.VerdictGoto) {
		return "", fmt.Errorf("verdict %d is not a goto", code)
	}
	return sandbox.NetworkMode(chain), nil
}

func contains(c *nftables.Conn, s *nftables.Set, key []byte) (bool, error) {
	es, err := c.GetSetElements(s)
	for _, e := range es {
		if bytes.Equal(e.Key, key) {
			return true, err
		}
	}
	return false, err
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
