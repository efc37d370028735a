package gvisor_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"context"

	"vivarium/guest"
	"vivarium/runtime/gvisor"
	"vivarium/runtime/runtimetest"
	"vivarium/sandbox"
)

// edit changes what is written of a machine.
func (l *lab) edit(t *testing.T, id string, fn func(map[string]any)) {
	t.Helper()
	file := filepath.Join(l.dir, "gv", "m", id, "machine.json")
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var st map[string]any
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	if err := d.Decode(&st); err != nil {
		t.Fatal(err)
	}
	fn(st)
	if b, err = json.Marshal(st); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// A sandbox that a daemon of another gVisor version started is reached through
// the sentry binary of that version, which is kept as long as it lives.
func TestOtherVersion(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	// a binary of its own path, as that of an earlier version is
	old := l.dir + "/old-sentry"
	copyProgram(t, common.paths.Sentry, old)
	l.sentry = old
	r := l.open(t, runtimetest.Options{})
	m, c, key := busy(t, l, r)
	script(t, c, "kept", "echo before; until test -e /go; do sleep 0.05; done; echo after; exit 3")
	c.Close()
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	l.edit(t, m.ID(), func(st map[string]any) {
		if st["Version"] != gvisor.Version() || st["Sentry"] != old {
			t.Errorf("written version %v, sentry %v", st["Version"], st["Sentry"])
		}
		st["Version"] = "release-20200101.0"
	})
	l.sentry = common.paths.Sentry
	r2 := l.open(t, runtimetest.Options{})
	t.Cleanup(func() { r2.Close() })
	if !r2.NeedsSentry(old) {
		t.Error("the old binary counts as not needed while its sandbox lives")
	}
	if r2.NeedsSentry(l.dir + "/other") {
		t.Error("a binary that nothing uses counts as needed")
	}
	m2, err := r2.Adopt(t.Context(), m.ID())
	if err != nil {
		t.Fatal(err)
	}
	c2, err := guest.Connect(t.Context(), m2.Dial, key, guest.Options{})
	if err != nil {
		t.Fatalf("connect through the other version's binary: %v", err)
	}
	t.Cleanup(func() { c2.Close() })
	if _, err := c2.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	wait(t, script(t, c2, "go", "echo >/go"), "", 0)
	s, err := c2.AttachExec(t.Context(), "kept", 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	wait(t, s, "before\nafter\n", 3)
	// it is that binary and no other: without it there is no way in
	if err := os.Rename(old, old+".gone"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if conn, err := m2.Dial(ctx); err == nil {
		conn.Close()
		t.Error("dialled without the other version's binary")
	} else if !errors.Is(err, sandbox.Unavailable) {
		t.Errorf("dial without it: %v, want unavailable", err)
	}
	// and it can be ended all the same
	if err := m2.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r2.NeedsSentry(old) {
		t.Error("the old binary counts as needed after its last sandbox")
	}
	for _, left := range l.left(t, m.ID()) {
		t.Errorf("left on the host: %s", left)
	}
}

func wait(t *testing.T, s *guest.ExecStream, want string, code int) {
	t.Helper()
	var out bytes.Buffer
	for {
		f, err := s.Recv()
		if errors.Is(err, io.EOF) {
			t.Fatal("no exit")
		}
		if err != nil {
			t.Fatal(err)
		}
		out.Write(f.Data)
		if f.Exit != nil {
			if out.String() != want || f.Exit.Status.Code != code {
				t.Errorf("%q, %+v, want %q and %d", out.String(), f.Exit.Status, want, code)
			}
			return
		}
	}
}

func copyProgram(t *testing.T, from, to string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to, b, 0o755); err != nil {
		t.Fatal(err)
	}
}

// A pid that was given to another process since is not taken for the sentry: it
// is neither watched nor killed.
func TestPidTaken(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	r := l.open(t, runtimetest.Options{})
	m, c, _ := busy(t, l, r)
	c.Close()
	if err := m.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	l.edit(t, m.ID(), func(st map[string]any) { st["Pid"] = os.Getpid() })
	r2 := l.open(t, runtimetest.Options{})
	t.Cleanup(func() { r2.Close() })
	m2, err := r2.Adopt(t.Context(), m.ID())
	if !errors.Is(err, sandbox.Gone) || m2 == nil {
		t.Fatalf("adopt: %v, %v, want gone", m2, err)
	}
	if err := m2.Kill(t.Context()); err != nil { // this test would not see its end otherwise
		t.Fatal(err)
	}
	if err := m2.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// What is written of a machine may be cut off or nonsense: it is not adopted,
// and it can be removed.
func TestStateDamaged(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{"empty": "", "cut": `{"ID":"x","Sandb`, "other": `[1,2,3]`, "nothing": `{}`, "sandbox": `{"Sandbox":7}`} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			r := l.open(t, runtimetest.Options{})
			m, err := r.Boot(t.Context(), sandbox.BootSpec{Resources: runtimetest.Resources})
			if err != nil {
				t.Fatal(err)
			}
			if err := r.Close(); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(l.dir, "gv", "m", m.ID(), "machine.json"), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			r2 := l.open(t, runtimetest.Options{})
			defer r2.Close()
			if m2, err := r2.Adopt(t.Context(), m.ID()); err == nil {
				t.Errorf("adopted %v", m2)
			}
			if err := r2.Reconcile(t.Context(), func(string) bool { return false }); err != nil {
				t.Errorf("reconcile: %v", err)
			}
			if err := l.slots.Forget(t.Context(), func(string) bool { return false }); err != nil {
				t.Error(err)
			}
			for _, left := range l.left(t, "") {
				t.Errorf("left on the host: %s", left)
			}
		})
	}
}
