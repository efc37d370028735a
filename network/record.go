package network

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

// slotPolicy is what a slot's record says about its policy.
type slotPolicy struct {
	Mode sandbox.NetworkMode `json:"mode"`
	// File is the name of the policy among the saved ones; empty: it is its mode
	// alone.
	File string `json:"file,omitempty"`
}

// Policies that are more than their mode are kept in a directory, each in a file
// that is named by its content: slots with the same policy share it, and a new slot
// with a policy that is known costs no file.
func (n *Network) policyDir() string { return filepath.Join(n.dir, "policies") }

// maxSaved is how many policies may lie there before those of no use are removed.
const maxSaved = 512

// savedPolicies are the files that are there.
type savedPolicies struct {
	mu    sync.Mutex
	names map[string]bool
}

// savePolicy writes a policy before the record that names it. It is not synced: what
// takes unwritten pages away takes the kernel's side of a slot away as well.
func (n *Network) savePolicy(p *policy.Policy) (file string, err error) {
	if p.Simple() {
		return "", nil
	}
	b, err := json.Marshal(p.NetworkPolicy)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(b)
	file = hex.EncodeToString(sum[:])
	n.saved.mu.Lock()
	defer n.saved.mu.Unlock()
	if n.saved.names[file] {
		return file, nil
	}
	if err := replaceFile(filepath.Join(n.policyDir(), file), b); err != nil {
		return "", err
	}
	n.saved.names[file] = true
	return file, nil
}

// openPolicies finds what an earlier daemon saved.
func (n *Network) openPolicies() error {
	if err := os.MkdirAll(n.policyDir(), 0o700); err != nil {
		return err
	}
	es, err := os.ReadDir(n.policyDir())
	if err != nil {
		return err
	}
	n.saved.names = map[string]bool{}
	for _, e := range es {
		n.saved.names[e.Name()] = true
	}
	return nil
}

// dropPolicies removes files that no slot names, when there are many.
func (n *Network) dropPolicies() error {
	n.saved.mu.Lock()
	many := len(n.saved.names) > maxSaved
	n.saved.mu.Unlock()
	if !many {
		return nil
	}
	n.rules.Lock() // nobody is between saving a policy and naming it
	defer n.rules.Unlock()
	n.saved.mu.Lock()
	defer n.saved.mu.Unlock()
	used := map[string]bool{}
	n.mu.Lock()
	for _, s := range n.slots {
		used[s.Policy.File] = true
	}
	n.mu.Unlock()
	for f := range n.saved.names {
		if used[f] {
			continue
		}
		if err := os.Remove(filepath.Join(n.policyDir(), f)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		delete(n.saved.names, f)
	}
	return nil
}

// loadPolicy reads what savePolicy wrote. The operator's part may have changed
// since: then what it says now holds. A policy that is not whole, or that no
// longer compiles, is none.
func (n *Network) loadPolicy(s *slot, r slotPolicy) *policy.Policy {
	p := sandbox.NetworkPolicy{Mode: r.Mode}
	if r.File != "" {
		b, err := os.ReadFile(filepath.Join(n.policyDir(), filepath.Base(r.File)))
		sum := sha256.Sum256(b)
		if err != nil || hex.EncodeToString(sum[:]) != r.File || json.Unmarshal(b, &p) != nil || p.Mode != r.Mode {
			n.log.Error("policy of a slot is lost; it is closed", "slot", s.ID, "err", err)
			return n.none
		}
	}
	c, err := n.opts.Compile(p)
	if err != nil {
		n.log.Error("policy of a slot no longer holds; it is closed", "slot", s.ID, "err", err)
		return n.none
	}
	return c
}
