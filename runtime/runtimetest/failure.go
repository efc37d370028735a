package runtimetest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"vivarium/sandbox"
)

// steps are the steps of a life, in order, by running through one.
type steps struct {
	mu     sync.Mutex
	names  []string
	fail   map[string]bool
	failed []string
}

var errStep = errors.New("the test wants this step to fail")

func (s *steps) hook(step string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Contains(s.names, step) {
		s.names = append(s.names, step)
	}
	if s.fail[step] {
		s.failed = append(s.failed, step)
		return errStep
	}
	return nil
}

// set makes exactly these steps fail.
func (s *steps) set(names ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail, s.failed = map[string]bool{}, nil
	for _, n := range names {
		s.fail[n] = true
	}
}

// phases runs one life through and says which steps its phases have.
func (h *Harness) phases(t *testing.T, r sandbox.Runtime, s *steps) (booting, starting, removing []string) {
	t.Helper()
	since := func(n int) []string { return slices.Clone(s.names[n:]) }
	m := boot(t, r, Resources)
	booting = since(0)
	if err := m.Start(within(t), h.spec(Resources, newKey())); err != nil {
		t.Fatal(err)
	}
	starting = since(len(booting))
	remove(t, m)
	removing = since(len(booting) + len(starting))
	if len(booting) == 0 || len(starting) == 0 || len(removing) == 0 {
		t.Fatalf("steps %v, %v, %v: each phase must have one", booting, starting, removing)
	}
	return booting, starting, removing
}

func (h *Harness) nothing(t testing.TB, when string) {
	t.Helper()
	for _, l := range h.Left(t, "") {
		t.Errorf("%s: left on the host: %s", when, l)
	}
}

// A boot that fails at any step leaves nothing.
func testBootFails(t *testing.T, h *Harness) {
	s := new(steps)
	r := h.open(t, Options{Fail: s.hook})
	booting, _, _ := h.phases(t, r, s)
	for _, step := range booting {
		s.set(step)
		m, err := r.Boot(within(t), sandbox.BootSpec{Resources: Resources})
		if !errors.Is(err, errStep) || m != nil {
			t.Errorf("fail at %s: %v, %v", step, m, err)
		}
		h.nothing(t, "fail at "+step)
	}
	s.set()
	remove(t, boot(t, r, Resources))
}

// A start that fails at any step leaves a machine that Remove removes.
func testStartFails(t *testing.T, h *Harness) {
	s := new(steps)
	r := h.open(t, Options{Fail: s.hook})
	_, starting, _ := h.phases(t, r, s)
	for _, step := range starting {
		s.set()
		m := boot(t, r, Resources)
		s.set(step)
		if err := m.Start(within(t), h.spec(Resources, newKey())); !errors.Is(err, errStep) {
			t.Errorf("fail at %s: %v", step, err)
		}
		s.set()
		if err := m.Start(within(t), h.spec(Resources, newKey())); !errors.Is(err, sandbox.Conflict) {
			t.Errorf("start again after %s: %v, want conflict", step, err)
		}
		remove(t, m)
		h.nothing(t, "fail at "+step)
	}
}

// A Remove that fails says so, leaves a dead machine, and can be repeated.
func testRemoveFails(t *testing.T, h *Harness) {
	s := new(steps)
	r := h.open(t, Options{Fail: s.hook})
	_, _, removing := h.phases(t, r, s)
	for _, step := range removing {
		s.set()
		b := h.start(t, r, Resources)
		s.set(step)
		if err := b.Remove(within(t)); !errors.Is(err, errStep) {
			t.Errorf("fail at %s: %v", step, err)
		}
		dead(t, b)
		if len(h.Left(t, b.ID())) == 0 {
			t.Errorf("fail at %s: nothing is left, so the step is none", step)
		}
		s.set()
		remove(t, b)
		h.nothing(t, "fail at "+step)
	}
}

// What neither a boot nor its undoing could finish, the next daemon's Reconcile
// removes.
func testBootAndUndoFail(t *testing.T, h *Harness) {
	s := new(steps)
	r := h.Open(t, Options{Fail: s.hook})
	booting, _, removing := h.phases(t, r, s)
	for _, undo := range removing {
		s.set(booting[len(booting)-1], undo)
		if m, err := r.Boot(within(t), sandbox.BootSpec{Resources: Resources}); err == nil {
			t.Errorf("fail at %s: booted %s", undo, m.ID())
		}
	}
	s.set()
	if len(h.Left(t, "")) == 0 {
		t.Error("nothing was left to reconcile")
	}
	if p := h.Processes(t, ""); len(p) > 0 {
		t.Errorf("processes %v are left although they can be killed", p)
	}
	r2 := h.reopen(t, r, Options{})
	if err := r2.Reconcile(within(t), func(string) bool { return false }); err != nil {
		t.Fatalf("reconcile: %v", err)
	}
	h.Network(t, func(string) bool { return false })
}

// A caller that goes away during a boot gets either an error and nothing, or a
// machine.
func testBootCancelled(t *testing.T, h *Harness) {
	r := h.open(t, Options{})
	for _, after := range []time.Duration{0, time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond, 60 * time.Millisecond, 150 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(context.Background(), after)
		m, err := r.Boot(ctx, sandbox.BootSpec{Resources: Resources})
		cancel()
		switch {
		case err == nil:
			remove(t, m)
		case m != nil:
			t.Errorf("cancelled after %v: a machine with %v", after, err)
		default:
			kinded(t, err)
		}
		h.nothing(t, "cancelled after "+after.String())
	}
}

// A caller that goes away during a start leaves a machine that can be removed.
func testStartCancelled(t *testing.T, h *Harness) {
	r := h.open(t, Options{})
	for _, after := range []time.Duration{0, time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond, 80 * time.Millisecond} {
		m := boot(t, r, Resources)
		ctx, cancel := context.WithTimeout(context.Background(), after)
		if err := m.Start(ctx, h.spec(Resources, newKey())); err != nil {
			kinded(t, err)
		}
		cancel()
		remove(t, m)
		h.nothing(t, "cancelled after "+after.String())
	}
}
