package network

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"

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

// slotPolicy is what a slot's record says about its policy.
type slotPolicy struct {
	Mode sandbox.NetworkMode `json:"mode"`
	// Hash is that of the policy in policyFile; empty: it is its mode alone.
	Hash string `json:"hash,omitempty"`
}

// policyFile holds a slot's policy where it is more than its mode.
const policyFile = "policy.json"

// savePolicy writes a policy before the record that names it.
func (s *slot) savePolicy(p *policy.Policy) error {
	if p.Simple() {
		return nil
	}
	b, err := json.Marshal(p.NetworkPolicy)
	if err != nil {
		return err
	}
	return writeFile(filepath.Join(s.dir, policyFile), b)
}

// loadPolicy reads what savePolicy wrote. The operator's part may have changed
// since: then what it says now holds. A policy that is not whole, or that no
// longer compiles, is none.
func (n *Network) loadPolicy(s *slot, r slotPolicy) *policy.Policy {
	p := sandbox.NetworkPolicy{Mode: r.Mode}
	if r.Hash != "" {
		b, err := os.ReadFile(filepath.Join(s.dir, policyFile))
		if err != nil || json.Unmarshal(b, &p) != nil || p.Mode != r.Mode {
			p = sandbox.NetworkPolicy{}
		}
	}
	c, err := n.opts.Compile(p)
	if err != nil {
		n.log.Error("policy of a slot no longer holds; it is closed", "slot", s.ID, "err", err)
		return n.none
	}
	return c
}

// SetPolicy replaces the policy of a slot. It is in force for every packet
// after the return, those of open flows included. When it cannot be installed
// the slot is closed as far as the kernel allows, and an error returned.
// Errors: Invalid, NotFound, Conflict (another change of the slot is under way
// and does not end), Internal.
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
	if err := n.setPolicy(s, p); err != nil {
		if cerr := n.setPolicy(s, n.none); cerr != nil {
			err = errors.Join(err, cerr)
		}
		return sandbox.AppliedPolicy{}, sandbox.Internal.Errorf("set policy of slot %s: %w", slotID, err)
	}
	return applied(p), nil
}
