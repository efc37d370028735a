package engine

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"vivarium/sandbox"
	"vivarium/store"
)

// keeper is an engine with a store, and nothing that runs.
func keeper(t *testing.T) *Engine {
	t.Helper()
	dir := t.TempDir()
	s, err := store.Open(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return &Engine{ctx: t.Context(), store: s, opts: Options{Dir: dir, Store: s, RetainEnded: time.Hour, RetainEvents: time.Hour}}
}

func (e *Engine) put(t *testing.T, id string, ended time.Time, removed bool) {
	t.Helper()
	sb := sandbox.Sandbox{ID: id, Tenant: "a", Stage: sandbox.StageRunning, Removed: removed}
	if !ended.IsZero() {
		sb.Stage, sb.Death = sandbox.StageEnded, &sandbox.Death{Reason: sandbox.ReasonStopped, Ended: ended}
	}
	if err := e.store.Create(sb, "key of "+id, "").Wait(); err != nil {
		t.Fatal(err)
	}
	if err := e.store.PutExec(sandbox.Exec{ID: "main", SandboxID: id, Tenant: "a"}).Wait(); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(e.spoolDir(id), "main"), 0o700); err != nil {
		t.Fatal(err)
	}
}

func (e *Engine) spooled(t *testing.T) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(e.opts.Dir, "spool"))
	if err != nil {
		t.Fatal(err)
	}
	var l []string
	for _, d := range entries {
		l = append(l, d.Name())
	}
	return l
}

// What ended is kept for its time, and then goes with all that belongs to it;
// what lives stays, however old.
func TestSweep(t *testing.T) {
	t.Parallel()
	e := keeper(t)
	now := time.Now()
	e.put(t, "sb-alive", time.Time{}, false)
	e.put(t, "sb-new", now.Add(-59*time.Minute), false)
	e.put(t, "sb-old", now.Add(-61*time.Minute), false)
	e.put(t, "sb-removed", now.Add(-61*time.Minute), true)
	for i, at := range []time.Duration{-2 * time.Hour, -2 * time.Hour, -time.Minute} {
		if err := e.store.AddEvent(sandbox.Event{Seq: int64(i + 1), Time: now.Add(at), Tenant: "a"}).Wait(); err != nil {
			t.Fatal(err)
		}
	}
	if err := e.sweepOnce(now); err != nil {
		t.Fatal(err)
	}
	if got := e.spooled(t); !slices.Equal(got, []string{"sb-alive", "sb-new"}) {
		t.Errorf("output of %q", got)
	}
	for id, kept := range map[string]bool{"sb-alive": true, "sb-new": true, "sb-old": false, "sb-removed": false} {
		_, err := e.store.Sandbox(t.Context(), "a", id)
		_, _, kerr := e.store.Idempotent(t.Context(), "a", "key of "+id)
		execs, xerr := e.store.Execs(t.Context(), "a", id)
		if kept != (err == nil) || kept != (kerr == nil) || kept != (len(execs) == 1) || xerr != nil || !kept && !errors.Is(err, sandbox.NotFound) {
			t.Errorf("%s: %v, %v, %v", id, err, kerr, execs)
		}
	}
	if l, err := e.store.Events(t.Context(), "a", "", 0, 10); err != nil || len(l) != 1 || l[0].Seq != 3 {
		t.Errorf("events %v, %v", l, err)
	}
	// more than one page of them
	var last *store.Pending
	for i := range page + 3 {
		sb := sandbox.Sandbox{ID: "sb-" + itoa(i), Tenant: "a", Stage: sandbox.StageEnded, Death: &sandbox.Death{Ended: now.Add(-2 * time.Hour)}}
		last = e.store.Put(sb)
	}
	if err := last.Wait(); err != nil {
		t.Fatal(err)
	}
	if err := e.sweepOnce(now); err != nil {
		t.Fatal(err)
	}
	if ids, err := e.store.IDs(t.Context()); err != nil || len(ids) != 2 {
		t.Errorf("%d are left, %v", len(ids), err)
	}
}

func TestOrphanSpools(t *testing.T) {
	t.Parallel()
	e := keeper(t)
	e.put(t, "sb-alive", time.Time{}, false)
	e.put(t, "sb-ended", time.Now(), false)
	e.put(t, "sb-removed", time.Now(), true)
	if err := os.MkdirAll(filepath.Join(e.spoolDir("sb-unknown"), "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := e.removeOrphanSpools(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := e.spooled(t); !slices.Equal(got, []string{"sb-alive", "sb-ended"}) {
		t.Errorf("output of %q", got)
	}
}
