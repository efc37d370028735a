package runtimetest

import (
	"errors"
	"strings"
	"testing"

	"vivarium/sandbox"
)

// reopen is what a daemon that was restarted does.
func (h *Harness) reopen(t testing.TB, r sandbox.Runtime, o Options) sandbox.Runtime {
	t.Helper()
	if err := r.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
	return h.open(t, o)
}

// A machine outlives the Runtime that made it: the next one finds it, its guest
// answers, and what an exec wrote meanwhile is all there.
func testAdopt(t *testing.T, h *Harness) {
	r := h.Open(t, Options{})
	b := h.start(t, r, Resources)
	ctx := within(t)
	x, err := b.guest.StartExec(ctx, "kept", sandbox.ExecSpec{Argv: []string{"/bin/sh", "-c", "echo before; until test -e /go; do sleep 0.05; done; echo after; exit 7"}})
	if err != nil {
		t.Fatal(err)
	}
	if f, err := x.Recv(); err != nil || string(f.Data) != "before\n" {
		t.Fatalf("%q, %v", f.Data, err)
	}
	// neither acknowledged nor closed in order: the daemon was killed
	b.guest.Fail(sandbox.Unavailable.Errorf("daemon was killed"))
	_ = b.guest.Close()
	r2 := h.reopen(t, r, Options{})
	m, err := r2.Adopt(ctx, b.ID())
	if err != nil {
		t.Fatalf("adopt: %v", err)
	}
	a := &box{t: t, Machine: m, key: b.key}
	t.Cleanup(func() { remove(t, m) })
	if m.ID() != b.ID() || m.Slot() != b.Slot() || m.Address() != b.Address() {
		t.Errorf("adopted %s %s %v, was %s %s %v", m.ID(), m.Slot(), m.Address(), b.ID(), b.Slot(), b.Address())
	}
	if err := r2.Reconcile(ctx, func(id string) bool { return id == b.ID() }); err != nil {
		t.Fatalf("reconcile: %v", err)
	}
	alive(t, m)
	if u := usage(t, m); u.Memory <= 0 {
		t.Errorf("usage %+v", u)
	}
	a.connect()
	if got := a.run("echo data >/go; cat /go"); got != "data" {
		t.Errorf("%q", got)
	}
	s, err := a.guest.AttachExec(ctx, "kept", 0, 0)
	if err != nil {
		t.Fatalf("attach: %v", err)
	}
	defer s.Close()
	out, st, err := finish(s)
	if err != nil || out != "before\nafter\n" || st.Code != 7 {
		t.Errorf("%q, %+v, %v", out, st, err)
	}
	if err := m.Start(ctx, h.spec(Resources, newKey())); !errors.Is(err, sandbox.Conflict) {
		t.Errorf("start an adopted machine: %v, want conflict", err)
	}
	remove(t, m)
	dead(t, m)
	dead(t, b) // who made it sees it as well
}

func testAdoptUnknown(t *testing.T, h *Harness) {
	r := h.open(t, Options{})
	m, err := r.Adopt(within(t), "01hzzzzzzzzzzzzzzzzzzzzzzz")
	if !errors.Is(err, sandbox.NotFound) || m != nil {
		t.Errorf("%v, %v, want not found", m, err)
	}
	// a store that was tampered with
	for _, id := range []string{"", ".", "..", "../x", "/etc", "a/b", "x\x00y", strings.Repeat("x", 5000)} {
		m, err := r.Adopt(within(t), id)
		if err == nil || m != nil {
			t.Errorf("adopted %.20q", id)
		}
	}
}

// A machine that died while no daemon ran: Gone, and what it used can be read.
func testAdoptDead(t *testing.T, h *Harness) {
	r := h.Open(t, Options{})
	b := h.start(t, r, Resources)
	b.run("dd if=/dev/urandom of=/data bs=1M count=8 2>/dev/null")
	before := usage(t, b)
	if err := b.Kill(within(t)); err != nil {
		t.Fatal(err)
	}
	_ = b.guest.Close()
	r2 := h.reopen(t, r, Options{})
	m, err := r2.Adopt(within(t), b.ID())
	if !errors.Is(err, sandbox.Gone) || m == nil {
		t.Fatalf("adopt what has died: %v, %v, want it and gone", m, err)
	}
	dead(t, m)
	if u := usage(t, m); u.PeakMemory < before.PeakMemory || u.Disk < 8<<20 || u.OOM {
		t.Errorf("%+v, before its death %+v", u, before)
	}
	if err := m.Kill(within(t)); err != nil {
		t.Errorf("kill: %v", err)
	}
	remove(t, m)
	for _, l := range h.Left(t, b.ID()) {
		t.Errorf("left on the host: %s", l)
	}
}

// Reconcile removes what nobody claims and nothing else, whether it is alive,
// dead or half made.
func testReconcile(t *testing.T, h *Harness) {
	r := h.Open(t, Options{})
	kept, orphan, corpse, unstarted := h.start(t, r, Resources), h.start(t, r, Resources), h.start(t, r, Resources), boot(t, r, Resources)
	if err := corpse.Kill(within(t)); err != nil {
		t.Fatal(err)
	}
	r2 := h.reopen(t, r, Options{})
	m, err := r2.Adopt(within(t), kept.ID())
	if err != nil {
		t.Fatal(err)
	}
	own := h.start(t, r2, Resources) // booted before reconciling, known to no store yet
	if err := r2.Reconcile(within(t), func(id string) bool { return id == kept.ID() }); err != nil {
		t.Fatalf("reconcile: %v", err)
	}
	h.Network(t, func(id string) bool { return id == kept.ID() || id == own.ID() })
	for _, o := range []sandbox.Machine{orphan, corpse, unstarted} {
		dead(t, o)
		for _, l := range h.Left(t, o.ID()) {
			t.Errorf("left on the host: %s", l)
		}
	}
	alive(t, m)
	alive(t, own)
	if got := kept.run("echo still"); got != "still" {
		t.Errorf("%q", got)
	}
	if got := own.run("echo still"); got != "still" {
		t.Errorf("%q", got)
	}
	remove(t, m)
	remove(t, own)
	if err := r2.Reconcile(within(t), func(string) bool { return false }); err != nil {
		t.Errorf("reconcile with nothing left: %v", err)
	}
}
