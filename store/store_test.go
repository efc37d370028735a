package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"vivarium/sandbox"
)

func open(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func sb(tenant, id, name string) sandbox.Sandbox {
	return sandbox.Sandbox{ID: id, Tenant: tenant, Stage: sandbox.StageRunning, Spec: sandbox.Spec{Name: name}, GuestKey: []byte("key of " + id), Created: time.Now()}
}

func ended(s sandbox.Sandbox, at time.Time) sandbox.Sandbox {
	s.Stage, s.Death = sandbox.StageEnded, &sandbox.Death{Reason: sandbox.ReasonStopped, Ended: at}
	return s
}

func must(t *testing.T, p *Pending) {
	t.Helper()
	if err := p.Wait(); err != nil {
		t.Fatal(err)
	}
}

func TestRoundTrip(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir)
	want := sb("a", "sb-1", "web")
	want.Spec.Tags = map[string]string{"k": "v"}
	must(t, s.Create(want, "", ""))
	if fi, err := os.Stat(filepath.Join(dir, "state.db")); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v: it holds keys", fi.Mode(), err)
	}
	// what Wait reported is there for another process, before any Close
	other := open(t, dir)
	got, err := other.Sandbox(t.Context(), "a", "sb-1")
	if err != nil || got.Spec.Name != "web" || string(got.GuestKey) != "key of sb-1" || got.Spec.Tags["k"] != "v" || !got.Created.Equal(want.Created) {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := s.Sandbox(t.Context(), "b", "sb-1"); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("another tenant's: %v", err) // E1
	}
	must(t, s.Put(ended(want, time.Now())))
	if l, err := s.Alive(t.Context()); err != nil || len(l) != 0 {
		t.Errorf("alive: %v, %v", l, err)
	}
	if l, err := s.Ended(t.Context(), "a", "", "", false, 10); err != nil || len(l) != 1 || l[0].Death.Reason != sandbox.ReasonStopped {
		t.Errorf("ended: %v, %v", l, err)
	}
	if l, _ := s.Ended(t.Context(), "b", "", "", true, 10); len(l) != 0 {
		t.Errorf("ended of another tenant: %v", l)
	}
}

// Names are unique among a tenant's living; a write never takes a neighbour's row.
func TestNames(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	must(t, s.Create(sb("a", "sb-1", "web"), "", ""))
	must(t, s.Create(sb("b", "sb-2", "web"), "", ""))
	must(t, s.Create(sb("a", "sb-3", ""), "", ""))
	must(t, s.Create(sb("a", "sb-4", ""), "", ""))
	for what, p := range map[string]*Pending{
		"the same name":     s.Create(sb("a", "sb-5", "web"), "", ""),
		"the same id":       s.Create(sb("a", "sb-1", "other"), "", ""),
		"a name taken over": s.Put(sb("a", "sb-3", "web")),
	} {
		if err := p.Wait(); !errors.Is(err, sandbox.Exists) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if got, err := s.Sandbox(t.Context(), "a", "sb-1"); err != nil || got.Spec.Name != "web" {
		t.Errorf("the neighbour: %+v, %v", got, err)
	}
	must(t, s.Put(ended(sb("a", "sb-1", "web"), time.Now())))
	must(t, s.Create(sb("a", "sb-6", "web"), "", ""))
	must(t, s.Put(ended(sb("a", "sb-1", "web"), time.Now()))) // the dead do not contend
	if l, err := s.Alive(t.Context()); err != nil || len(l) != 4 {
		t.Errorf("%d alive, %v", len(l), err)
	}
}

// A job that fails is undone as a whole, and alone.
func TestFailedJob(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	must(t, s.Create(sb("a", "sb-0", ""), "k", "spec"))
	bad := errors.New("bad job")
	var good, failing []*Pending
	hold := make(chan struct{})
	s.submit(func(*sql.Tx) error { <-hold; return nil }) // so that the rest shares a transaction
	for i := range 20 {
		good = append(good, s.Create(sb("a", fmt.Sprintf("sb-g%02d", i), ""), "", ""))
		failing = append(failing,
			s.submit(func(tx *sql.Tx) error {
				if _, err := tx.Exec("INSERT INTO meta (key, value) VALUES (?, '')", fmt.Sprint("left", i)); err != nil {
					return err
				}
				return bad
			}),
			// its first statement works, its second does not
			s.Create(sb("a", fmt.Sprintf("sb-x%02d", i), ""), "k", "spec"))
	}
	close(hold)
	for _, p := range good {
		must(t, p)
	}
	for i, p := range failing {
		if err := p.Wait(); i%2 == 0 && !errors.Is(err, bad) || i%2 == 1 && !errors.Is(err, sandbox.Exists) {
			t.Errorf("job %d: %v", i, err)
		}
	}
	if l, err := s.Alive(t.Context()); err != nil || len(l) != 21 {
		t.Errorf("%d alive, %v", len(l), err)
	}
	var n int
	if err := s.read.QueryRow("SELECT count(*) FROM meta").Scan(&n); err != nil || n != 0 {
		t.Errorf("%d rows of failed jobs are left, %v", n, err)
	}
	if id, _, err := s.Idempotent(t.Context(), "a", "k"); err != nil || id != "sb-0" {
		t.Errorf("the key stands for %q, %v", id, err)
	}
}

// Writes are made in the order of submission, whoever waits for them.
func TestOrder(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	const n = 2*batch + 7 // over several transactions
	var mu sync.Mutex
	var order []int
	var last *Pending
	for i := range n {
		last = s.submit(func(tx *sql.Tx) error {
			_, err := tx.Exec("INSERT OR REPLACE INTO meta (key, value) VALUES ('n', ?)", fmt.Sprint(i))
			return err
		})
		last.Then(func(err error) {
			mu.Lock()
			defer mu.Unlock()
			order = append(order, i)
		})
	}
	must(t, last)
	if v, err := s.Meta(t.Context(), "n"); err != nil || v != fmt.Sprint(n-1) {
		t.Errorf("the last write is %q, %v", v, err)
	}
	if err := s.Close(); err != nil { // ends the writer, and with it what it calls
		t.Fatal(err)
	}
	if len(order) != n || !slices.IsSorted(order) {
		t.Errorf("%d calls, sorted %v", len(order), slices.IsSorted(order))
	}
	called := false
	last.Then(func(err error) { called = err == nil })
	if !called {
		t.Error("Then after the end was not called")
	}
}

func TestConcurrent(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	const writers, each = 8, 40
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				x := sb("a", fmt.Sprintf("sb-%d-%d", w, i), "")
				if err := s.Create(x, "", "").Wait(); err != nil {
					t.Error(err)
				}
				if err := s.PutExec(sandbox.Exec{ID: "main", SandboxID: x.ID, Tenant: "a"}).Wait(); err != nil {
					t.Error(err)
				}
				// what was written is read, by whoever
				if l, err := s.Execs(context.Background(), "a", x.ID); err != nil || len(l) != 1 {
					t.Errorf("%d execs, %v", len(l), err)
				}
			}
		})
	}
	wg.Wait()
	if l, err := s.Alive(t.Context()); err != nil || len(l) != writers*each {
		t.Errorf("%d alive, %v", len(l), err)
	}
}

// E5
func TestIdempotent(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	if _, _, err := s.Idempotent(t.Context(), "a", "k"); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("unknown key: %v", err)
	}
	must(t, s.Create(sb("a", "sb-1", ""), "k", "spec one"))
	must(t, s.Create(sb("b", "sb-2", ""), "k", "spec two")) // another tenant's key
	if err := s.Create(sb("a", "sb-3", ""), "k", "spec one").Wait(); !errors.Is(err, sandbox.Exists) {
		t.Errorf("the same key: %v", err)
	}
	if _, err := s.Sandbox(t.Context(), "a", "sb-3"); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("the sandbox of the refused create: %v", err)
	}
	id, spec, err := s.Idempotent(t.Context(), "a", "k")
	if err != nil || id != "sb-1" || spec != "spec one" {
		t.Errorf("%q, %q, %v", id, spec, err)
	}
	must(t, s.Put(ended(sb("a", "sb-1", ""), time.Now())))
	if id, _, err := s.Idempotent(t.Context(), "a", "k"); err != nil || id != "sb-1" {
		t.Errorf("after its end: %q, %v", id, err)
	}
	must(t, s.PutExec(sandbox.Exec{ID: "x", SandboxID: "sb-1", Tenant: "a"}))
	must(t, s.Forget("a", "sb-1"))
	if _, _, err := s.Idempotent(t.Context(), "a", "k"); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("after it was forgotten: %v", err)
	}
	if l, _ := s.Execs(t.Context(), "a", "sb-1"); len(l) != 0 {
		t.Errorf("execs are left: %v", l)
	}
	if id, _, _ := s.Idempotent(t.Context(), "b", "k"); id != "sb-2" {
		t.Errorf("the other tenant's is %q", id)
	}
}

func TestEvents(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir)
	old, now := time.Now().Add(-time.Hour), time.Now()
	for i := range int64(10) {
		e := sandbox.Event{Seq: i + 1, Time: old, Tenant: "a", SandboxID: "sb-1", Kind: "k", Attrs: map[string]string{"i": fmt.Sprint(i)}}
		if i%2 == 1 {
			e.Tenant, e.SandboxID = "b", "sb-2"
		}
		must(t, s.AddEvent(e))
	}
	if err := s.AddEvent(sandbox.Event{Seq: 10, Time: now}).Wait(); !errors.Is(err, sandbox.Exists) {
		t.Errorf("a number twice: %v", err)
	}
	l, err := s.Events(t.Context(), "a", "", 2, 3)
	if err != nil || len(l) != 3 || l[0].Seq != 3 || l[2].Seq != 7 || l[0].Attrs["i"] != "2" {
		t.Errorf("%+v, %v", l, err)
	}
	if l, _ := s.Events(t.Context(), "a", "sb-2", 0, 100); len(l) != 0 {
		t.Errorf("events of another tenant's sandbox: %v", l)
	}
	// the newest stays, however old: its number is not given out again
	must(t, s.TrimEvents(now))
	if seq, err := s.LastEvent(t.Context()); err != nil || seq != 10 {
		t.Errorf("last is %d, %v", seq, err)
	}
	if l, _ := s.Events(t.Context(), "a", "", 0, 100); len(l) != 0 {
		t.Errorf("too old, and there: %v", l)
	}
}

// Reading the events of one sandbox does not mean to read those of all.
func TestEventsOfOneUseTheirIndex(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	var id, parent, unused int
	var plan string
	if err := s.read.QueryRowContext(t.Context(), "EXPLAIN QUERY PLAN "+eventsOfOne, "a", "sb-1", 0, 10).Scan(&id, &parent, &unused, &plan); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(plan, "event_sandbox (tenant=? AND sandbox=? AND seq>?)") {
		t.Errorf("the plan is %q", plan)
	}
}

func TestEndedBefore(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	now := time.Now()
	must(t, s.Create(sb("a", "sb-1", ""), "", ""))
	must(t, s.Put(ended(sb("a", "sb-2", ""), now.Add(-2*time.Hour))))
	must(t, s.Put(ended(sb("b", "sb-3", ""), now.Add(-2*time.Hour))))
	must(t, s.Put(ended(sb("a", "sb-4", ""), now)))
	removed := ended(sb("a", "sb-5", ""), now)
	removed.Removed = true
	must(t, s.Put(removed))
	l, err := s.EndedBefore(t.Context(), now.Add(-time.Hour), 10)
	if err != nil || len(l) != 2 {
		t.Errorf("%v, %v", l, err)
	}
	for _, c := range []struct {
		name, after string
		removed     bool
		want        []string
	}{
		{"", "", false, []string{"sb-2", "sb-4"}}, {"", "", true, []string{"sb-2", "sb-4", "sb-5"}},
		{"", "sb-2", false, []string{"sb-4"}}, {"", "sb-4", false, nil}, {"other", "", true, nil},
	} {
		l, err := s.Ended(t.Context(), "a", c.name, c.after, c.removed, 10)
		var got []string
		for _, x := range l {
			got = append(got, x.ID)
		}
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%+v: %q, %v", c, got, err)
		}
	}
	ids, err := s.IDs(t.Context())
	if err != nil || len(ids) != 4 || ids["sb-5"] {
		t.Errorf("whose output is kept: %v, %v", ids, err)
	}
}

func TestClose(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir)
	hold := make(chan struct{})
	s.submit(func(*sql.Tx) error { <-hold; return nil })
	p := s.Create(sb("a", "sb-1", ""), "", "")
	closed := make(chan error, 2)
	go func() { closed <- s.Close() }()
	for { // until it takes nothing more
		q := s.SetMeta("x", "y")
		s.mu.Lock()
		c := s.closed
		s.mu.Unlock()
		if c && errors.Is(func() error { q2 := s.SetMeta("x", "z"); return q2.Wait() }(), sandbox.Unavailable) {
			break
		}
		_ = q
		time.Sleep(time.Millisecond)
	}
	close(hold)
	if err := <-closed; err != nil {
		t.Error(err)
	}
	must(t, p) // what was queued is written
	if err := s.Close(); err != nil {
		t.Errorf("again: %v", err)
	}
	if _, err := open(t, dir).Sandbox(t.Context(), "a", "sb-1"); err != nil {
		t.Error(err)
	}
}

func TestNewerVersion(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir)
	if _, err := s.write.Exec(fmt.Sprintf("PRAGMA user_version = %d", len(schema)+1)); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if _, err := Open(t.Context(), dir); !errors.Is(err, sandbox.Conflict) || sandbox.HintOf(err) == "" {
		t.Errorf("a newer store: %v", err)
	}
}

func TestBroken(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "state.db"), []byte("this is no database, and long enough to be looked at"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), dir); sandbox.KindOf(err) != sandbox.Internal {
		t.Errorf("got %v", err)
	}
	if _, err := Open(t.Context(), filepath.Join(dir, "missing")); err == nil {
		t.Error("a directory that is not there")
	}
}

// A copy by VACUUM INTO while it is written to is whole.
func TestBackup(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir)
	for i := range 50 {
		must(t, s.Create(sb("a", fmt.Sprint("sb-", i), ""), "", ""))
	}
	to := t.TempDir()
	tool, err := sql.Open("sqlite", filepath.Join(dir, "state.db")) // as the tool sqlite3 would
	if err != nil {
		t.Fatal(err)
	}
	defer tool.Close()
	if _, err := tool.Exec("VACUUM INTO ?", filepath.Join(to, "state.db")); err != nil {
		t.Fatal(err)
	}
	if l, err := open(t, to).Alive(t.Context()); err != nil || len(l) != 50 {
		t.Errorf("%d alive, %v", len(l), err)
	}
}

func TestTokens(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	h := sandbox.TokenHash{1}
	if err := s.CreateToken(t.Context(), sandbox.Token{ID: "t1", Tenant: "a", Created: time.Now()}, h); err != nil {
		t.Fatal(err)
	}
	if err := s.CreateToken(t.Context(), sandbox.Token{ID: "t2", Tenant: "b"}, h); !errors.Is(err, sandbox.Exists) {
		t.Errorf("the same secret: %v", err)
	}
	if tok, _, err := s.LookupToken(t.Context(), h); err != nil || tok.Tenant != "a" {
		t.Errorf("%+v, %v", tok, err)
	}
	if err := s.RevokeToken(t.Context(), "t1"); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.LookupToken(t.Context(), h); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("revoked: %v", err)
	}
	if err := s.RevokeToken(t.Context(), "t1"); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("revoked again: %v", err)
	}
}
