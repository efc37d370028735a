package network

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/google/nftables"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

// opens says whether anything at all passes under m.
func opens(m sandbox.NetworkMode) bool { return m != sandbox.NetworkNone }

// chainPublic carries out the policy public where it is nothing more.
const chainPublic = "public"

// Compile checks a policy against what the operator configured and makes it
// ready to decide. Errors: Invalid, NotFound; they name the offending entry.
func (n *Network) Compile(p sandbox.NetworkPolicy) (*policy.Policy, error) { return n.opts.Compile(p) }

// Presets are the operator's named lists.
func (n *Network) Presets() map[string][]sandbox.PolicyRule { return n.opts.Node.Presets }

func applied(p *policy.Policy) sandbox.AppliedPolicy {
	return sandbox.AppliedPolicy{Policy: p.NetworkPolicy, Hash: p.Hash}
}

// SetPolicy replaces the policy of a slot. When it returns, the new one is in force
// for every packet, those of open flows included, and what it does not allow is
// cut, on both sides. When it cannot be installed the slot is closed as far as the
// kernel allows, and an error returned. Errors: Invalid, NotFound, Conflict
// (another change of the slot is under way and does not end), Internal.
func (n *Network) SetPolicy(ctx context.Context, slotID string, np sandbox.NetworkPolicy) (sandbox.AppliedPolicy, error) {
	p, err := n.Compile(np)
	if err != nil {
		return sandbox.AppliedPolicy{}, err
	}
	if err := n.enter(); err != nil {
		return sandbox.AppliedPolicy{}, err
	}
	defer n.ops.Done()
	s, err := n.hold(ctx, slotID)
	if err != nil {
		return sandbox.AppliedPolicy{}, err
	}
	defer n.letGo(s)
	n.mu.Lock()
	opened := s.opened
	n.mu.Unlock()
	err = n.setPolicy(s, p)
	if err == nil && opened { // otherwise there is nothing to cut, and looking for it is slow
		err = n.cut(s)
	}
	if err != nil {
		if cerr := n.setPolicy(s, n.none); cerr != nil {
			err = errors.Join(err, cerr)
		}
		n.proxy.Drop(s.ID)
		return sandbox.AppliedPolicy{}, sandbox.Internal.Errorf("set policy of slot %s: %w", slotID, err)
	}
	return applied(p), nil
}

// setPolicy puts policy p in force for a busy slot: kernel, record, DNS and proxy.
// On error the slot may be in any state that is not more open than before, and
// DNS and proxy refuse it everything.
func (n *Network) setPolicy(s *slot, p *policy.Policy) (err error) {
	prog := n.compile(p)
	n.rules.RLock()
	defer n.rules.RUnlock()
	s.pins.change.Lock()
	defer s.pins.change.Unlock()
	defer func() {
		if err != nil {
			s.pol.Store(nil)
			n.dns.drop(s.addr)
		}
	}()
	file := ""
	set := func(p *policy.Policy) error {
		n.mu.Lock()
		s.use(p)
		s.Policy.File = file
		n.mu.Unlock()
		return s.saveMeta()
	}
	// The record is never more open than the kernel: a daemon that dies in
	// between comes back to the narrower of the two.
	if opens(s.Policy.Mode) {
		if err := set(n.none); err != nil {
			return fmt.Errorf("save slot: %w", err)
		}
	}
	if file, err = n.savePolicy(p); err != nil {
		return fmt.Errorf("save policy: %w", err)
	}
	if err := n.setSource(s, p.Source); err != nil {
		return fmt.Errorf("set source address: %w", err)
	}
	if err := n.install(s, p, prog); err != nil {
		return fmt.Errorf("install policy: %w", err)
	}
	err = set(p)
	if err == nil {
		err = n.opts.reach("policy: save")
	}
	if err != nil {
		return fmt.Errorf("save slot: %w", err)
	}
	if !opens(p.Mode) {
		s.pol.Store(nil)
		n.dns.drop(s.addr)
		s.pins.clear()
		return nil
	}
	s.pins.forget(p)
	s.pol.Store(p)
	n.dns.set(s.addr, s.dns, p)
	return nil
}

// install changes the kernel's rules for s, pins included, in one transaction.
// What is added may be there already and what is removed is added first, so that
// the outcome does not depend on what was before; only a missing table is an error.
// It takes no lock that the making or removal of interfaces holds for long.
func (n *Network) install(s *slot, p *policy.Policy, prog *program) error {
	var next *slotKernel
	now := time.Now()
	want := map[pinKey]time.Time{}
	if opens(p.Mode) {
		next = &slotKernel{p, prog}
		want = s.pins.evaluate(p, n.hostAddrs(), now)
	}
	d := s.pins.diff(want)
	err := n.transact(s, next, &d, now)
	if err == nil {
		d.done(s.pins)
		return n.opts.reach("policy: rules")
	}
	// A table is missing, or what is in it is not what was put there: have it
	// looked at now, and close what can be closed.
	n.raise()
	if next == nil {
		n.closeByForce(s)
		s.pins.shut()
		if n.transact(s, nil, &pinDiff{}, now) == nil {
			return nil
		}
	}
	return err
}

// transact is the one transaction of install. The slot's former state in the kernel
// is what memory says it is, or, when an earlier transaction has failed, unknown.
func (n *Network) transact(s *slot, next *slotKernel, d *pinDiff, now time.Time) error {
	return n.router.do(func() error {
		var prog *program
		if next != nil {
			prog = next.program
		}
		err := n.router.withNft(func(c *nftables.Conn) error {
			if prog != nil && n.progs[prog.name] == nil {
				if err := prog.add(c); err != nil {
					return err
				}
			}
			old := n.presence(s, s.kernel)
			for i, e := range n.presence(s, next) {
				if err := e.replace(c, old[i]); err != nil {
					return err
				}
			}
			if next == nil { // whatever the kernel has, and an error if it has no tables
				for _, set := range []*nftables.Set{setOpen(), setGate()} {
					if err := (change{set, openKey(s)}).apply(c, false); err != nil {
						return err
					}
				}
			}
			if err := d.queue(c, s, now); err != nil {
				return err
			}
			return c.Flush()
		})
		if err != nil {
			s.next = next
			return err
		}
		if s.kernel != nil {
			n.usePrograms(s.kernel.program, nil)
		}
		n.usePrograms(nil, prog)
		s.kernel, s.next = next, nil
		return nil
	})
}

// setSource makes the host give the slot's packets, and what the proxy dials for
// it, a source address; invalid: the host decides.
func (n *Network) setSource(s *slot, a netip.Addr) error {
	if s.source == a {
		return nil
	}
	err := n.host.nft(func(c *nftables.Conn) error {
		m := n.mapSources()
		if s.source.IsValid() {
			if err := (change{m, sourceElems(s, s.source)}).apply(c, false); err != nil {
				return err
			}
		}
		if !a.IsValid() {
			return nil
		}
		return addElements(c, m, sourceElems(s, a))
	})
	if err == nil {
		s.source = a
	}
	return err
}

// reevaluate makes what the slots' records say ready to be installed, when a
// network is opened.
func (n *Network) reevaluate() error {
	now := time.Now()
	for _, s := range n.slots {
		s.kernel = nil
		if !opens(s.policy.Mode) {
			continue
		}
		s.kernel = &slotKernel{s.policy, n.compile(s.policy)}
		s.source = s.policy.Source
		s.pins.forget(s.policy)
		want := s.pins.evaluate(s.policy, n.hostAddrs(), now)
		d := s.pins.diff(want)
		d.done(s.pins)
		s.pol.Store(s.policy)
	}
	return nil
}
