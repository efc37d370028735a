package crash

import (
	"bytes"
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
	"vivarium/test/fixture"
)

// counter writes numbered lines on both outputs for some seconds, and exits
// with 5.
const (
	counterLines = 60000
	counter      = `i=0; while [ $i -lt 60 ]; do seq $((i*1000)) $((i*1000+999)); seq $((i*10)) $((i*10+9)) >&2; sleep 0.1; i=$((i+1)); done; exit 5`
)

// numbered checks that text is the numbers below n, each once and in order.
func numbered(t *testing.T, what, text string, n int) {
	t.Helper()
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	for i, l := range lines {
		if l != fmt.Sprint(i) {
			t.Errorf("%s: line %d is %q", what, i, l)
			return
		}
	}
	if len(lines) != n {
		t.Errorf("%s: %d lines, want %d", what, len(lines), n)
	}
}

// What a command writes is delivered without a gap or anything twice, however
// often the daemon is killed meanwhile, and its status once.
func TestOutputOverKills(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, node)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	sb := create(t, d, none())
	if _, err := d.Client.StartExec(t.Context(), sb.Id, "count", &v1.ExecSpec{Argv: []string{"sh", "-c", counter}}); err != nil {
		t.Fatal(err)
	}
	// one who follows, and goes on where he was after each kill
	var followed bytes.Buffer
	follow := func() bool {
		x, err := d.Client.Output(t.Context(), &v1.ReadOutputRequest{SandboxId: sb.Id, Id: "count", StdoutOffset: int64(followed.Len()), StderrOffset: -1, Follow: true}, &followed, nil)
		return err == nil && x.State == "exited"
	}
	for range 4 {
		over := make(chan bool, 1)
		go func() { over <- follow() }()
		time.Sleep(time.Duration(r.IntN(900)) * time.Millisecond)
		d.Kill()
		<-over
		d.Run()
	}
	for i := 0; !follow(); i++ {
		if i > 100 {
			t.Fatal("the output never ends")
		}
	}
	numbered(t, "the follower's output", followed.String(), counterLines)
	var out, errs bytes.Buffer
	x, err := d.Client.Output(t.Context(), &v1.ReadOutputRequest{SandboxId: sb.Id, Id: "count", Follow: true}, &out, &errs)
	if err != nil || x.State != "exited" || x.Exit.Code != 5 {
		t.Fatalf("%v, %v", x, err)
	}
	numbered(t, "stdout", out.String(), counterLines)
	numbered(t, "stderr", errs.String(), 600)
	status(t, d, sb.Id, "count", 5)
	ends := 0
	if err := d.Client.Events(t.Context(), &v1.WatchEventsRequest{SandboxId: sb.Id, After: -1}, func(e *v1.Event) error {
		if e.Kind == "exec.ended" {
			ends++
		}
		return nil
	}); err != nil || ends != 1 {
		t.Errorf("it ended %d times, %v", ends, err)
	}
	removeAll(t, d)
}

// Input goes on by its offset: what was taken is skipped, what was not is not
// missing.
func TestStdinOverKills(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, node)
	sb := create(t, d, none())
	data := make([]byte, 400_000)
	for i := range data {
		data[i] = byte(i * 7 >> 2)
	}
	spec := &v1.ExecSpec{Argv: []string{"sha256sum"}, Stdin: "pipe"}
	if _, err := d.Client.StartExec(t.Context(), sb.Id, "sum", spec); err != nil {
		t.Fatal(err)
	}
	for off := 0; off < len(data); off += 100_000 {
		if _, err := d.Client.WriteStdin(t.Context(), sb.Id, "sum", int64(off), data[off:off+100_000], false); err != nil {
			t.Fatal(err)
		}
		d.Kill()
		d.Run()
		// not known whether it arrived: again
		if _, err := d.Client.WriteStdin(t.Context(), sb.Id, "sum", int64(off), data[off:off+100_000], false); err != nil {
			t.Fatalf("again at %d: %v", off, err)
		}
		// neither whether it was started: the same id gives the same
		if x, err := d.Client.StartExec(t.Context(), sb.Id, "sum", spec); err != nil || x.State != "running" {
			t.Fatalf("%v, %v", x, err)
		}
	}
	if _, err := d.Client.WriteStdin(t.Context(), sb.Id, "sum", int64(len(data)), nil, true); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	x, err := d.Client.Output(t.Context(), &v1.ReadOutputRequest{SandboxId: sb.Id, Id: "sum", Follow: true}, &out, nil)
	sum := sha256.Sum256(data)
	if err != nil || x.Exit.GetCode() != 0 || !strings.HasPrefix(out.String(), hex.EncodeToString(sum[:])) {
		t.Errorf("%q, %v, %v", out.String(), x, err)
	}
}

// An exec that was started as the daemon died is there, if the client was told
// so, and is not started twice, if it was not.
func TestStartOverKills(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, node)
	sb := create(t, d, none())
	for i := range 6 {
		id := fmt.Sprint("x", i)
		spec := &v1.ExecSpec{Argv: []string{"sh", "-c", "echo " + id + " >> /runs; exec sleep 1000"}}
		_, err := d.Client.StartExec(t.Context(), sb.Id, id, spec)
		if err != nil {
			t.Fatal(err)
		}
		d.Kill() // its row may not be written yet
		d.Run()
		if i%2 == 0 {
			if x, err := d.Client.GetExec(t.Context(), sb.Id, id); err != nil || x.State != "running" {
				t.Errorf("%s: %v, %v", id, x, err)
			}
		}
		if x, err := d.Client.StartExec(t.Context(), sb.Id, id, spec); err != nil || x.State != "running" {
			t.Errorf("%s again: %v, %v", id, x, err)
		}
	}
	var out bytes.Buffer
	if _, err := d.Client.RunExec(t.Context(), sb.Id, "", &v1.ExecSpec{Argv: []string{"cat", "/runs"}}, &out, nil); err != nil || out.String() != "x0\nx1\nx2\nx3\nx4\nx5\n" {
		t.Errorf("ran: %q, %v", out.String(), err)
	}
	if l, err := d.Client.ListExecs(t.Context(), sb.Id); err != nil || len(l) != 7 {
		t.Errorf("%d execs, %v", len(l), err)
	}
}

// What ended while no daemon ran is found.
func TestEndedMeanwhile(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, node)
	exits := create(t, d, none("sh", "-c", "echo begun; sleep 2; echo bye; exit 4"))
	waitOutput(t, d, exits.Id, "begun\n")
	ready := none("sleep", "1000")
	ready.Probe = &v1.Probe{Command: []string{"test", "-e", "/go"}}
	probed := create(t, d, ready)
	dies := create(t, d, none("sh", "-c", "echo alive; exec sleep 1000"))
	waitOutput(t, d, dies.Id, "alive\n")
	if _, err := d.Client.StartExec(t.Context(), dies.Id, "x", &v1.ExecSpec{Argv: []string{"sleep", "1000"}}); err != nil {
		t.Fatal(err)
	}
	late := none()
	late.Name = "late"
	lateID := create(t, d, late).Id
	if _, err := d.Client.Extend(t.Context(), lateID, 3*time.Second); err != nil {
		t.Fatal(err)
	}
	d.Kill()
	if err := unix.Kill(sentry(t, d, dies.Id), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	time.Sleep(3 * time.Second) // no assertion: each holds also if it ends later
	d.Run()
	if c := death(t, d, exits.Id); c.Reason != "exited" || c.Exit.GetCode() != 4 || string(c.LastOutput) != "begun\nbye\n" {
		t.Errorf("the main command's exit: %v", c)
	}
	if c := death(t, d, dies.Id); c.Reason != "killed" || c.HasExit || c.Message == "" || string(c.LastOutput) != "alive\n" {
		t.Errorf("the machine's death: %v", c)
	}
	for _, id := range []string{"main", "x"} {
		if x, err := d.Client.WaitExec(t.Context(), dies.Id, id, patience); err != nil || x.State != "lost" {
			t.Errorf("exec %s: %v, %v", id, x, err)
		}
	}
	if c := death(t, d, lateID); c.Reason != "timeout" {
		t.Errorf("the deadline: %v", c)
	}
	usable(t, d, create(t, d, late).Id) // the name is free
	// a probe goes on
	if _, err := d.Client.RunExec(t.Context(), probed.Id, "", &v1.ExecSpec{Argv: []string{"touch", "/go"}}, nil, nil); err != nil {
		t.Fatal(err)
	}
	if sb, err := d.Client.Wait(t.Context(), probed.Id, "ready", patience); err != nil || !sb.IsReady {
		t.Errorf("the probe: %v, %v", sb, err)
	}
	removeAll(t, d)
}

// sentry is the process of a sandbox's machine.
func sentry(t *testing.T, d *fixture.Daemon, id string) int {
	t.Helper()
	for _, r := range alive(t, d) {
		if r.ID != id {
			continue
		}
		b, err := os.ReadFile(filepath.Join(d.Dir, "gv", "m", r.MachineID, "machine.json"))
		if err != nil {
			t.Fatal(err)
		}
		var m struct{ Pid int }
		if err := json.Unmarshal(b, &m); err != nil || m.Pid <= 1 {
			t.Fatalf("%q: %v", b, err)
		}
		return m.Pid
	}
	t.Fatalf("%s is not alive", id)
	return 0
}

// After the host was started again, as its boot id tells, nothing runs.
func TestReboot(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, node)
	s := none("sh", "-c", "echo words; exec sleep 1000")
	s.Name = "reboot"
	sb := create(t, d, s)
	waitOutput(t, d, sb.Id, "words\n")
	ended := create(t, d, none("sh", "-c", "exit 8"))
	death(t, d, ended.Id)
	d.Kill()
	edit(t, d, "UPDATE meta SET value = 'another boot' WHERE key = 'boot_id'")
	d.Run()
	if c := death(t, d, sb.Id); c.Reason != "lost" || !strings.Contains(c.Message, "restarted") || string(c.LastOutput) != "words\n" {
		t.Errorf("certificate %v", c)
	}
	if c := death(t, d, ended.Id); c.Reason != "exited" || c.Exit.GetCode() != 8 {
		t.Errorf("one that had ended: %v", c)
	}
	clean(t, d)
	usable(t, d, create(t, d, s).Id)
	d.Kill()
	d.Run() // the same boot now
	if l := withName(t, d, "reboot"); len(l) != 2 {
		t.Errorf("%d of the name", len(l))
	}
	removeAll(t, d)
}

// edit changes the store of a daemon that does not run.
func edit(t *testing.T, d *fixture.Daemon, query string, args ...any) {
	t.Helper()
	db, err := sql.Open("sqlite", filepath.Join(d.Dir, "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.Exec(query, args...); err != nil {
		t.Fatal(err)
	}
}

// SIGTERM and kills, again and again, lose nothing.
func TestRestarts(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, node)
	var ids []string
	for range 4 {
		sb := create(t, d, none("sh", "-c", "echo words; exec sleep 1000"))
		if _, err := d.Client.StartExec(t.Context(), sb.Id, "bg", &v1.ExecSpec{Argv: []string{"sleep", "1000"}}); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, sb.Id)
	}
	before := alive(t, d)
	for i := range 5 {
		if i%2 == 0 {
			d.Stop()
		} else {
			d.Kill()
		}
		d.Run()
		for _, id := range ids {
			usable(t, d, id)
			for _, x := range []string{"main", "bg"} {
				if got, err := d.Client.GetExec(t.Context(), id, x); err != nil || got.State != "running" {
					t.Errorf("start %d: exec %s: %v, %v", i, x, got, err)
				}
			}
		}
	}
	after := alive(t, d)
	if len(after) != len(before) {
		t.Errorf("%d are alive, and were %d", len(after), len(before))
	}
	clean(t, d)
	// what room they take is known: the node promises it to nobody else
	if i, err := d.Client.Info(t.Context()); err != nil || i.Sandboxes != 4 {
		t.Errorf("%v, %v", i, err)
	}
	removeAll(t, d)
}

// A start that fails takes nothing from the sandboxes that run.
func TestFailedStarts(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, node)
	s := none("nc", "-ll", "-p", "80", "-e", "echo", "here")
	s.Network = &v1.NetworkPolicy{Mode: "public"}
	sb := create(t, d, s)
	good, err := os.ReadFile(d.Config)
	if err != nil {
		t.Fatal(err)
	}
	still := func(when string) {
		t.Helper()
		if l := d.Leftovers(); len(l) < 4 {
			t.Errorf("%s: of the sandbox there is left only %q", when, l)
		}
		if err := unix.Kill(sentry(t, d, sb.Id), 0); err != nil {
			t.Errorf("%s: its sentry: %v", when, err)
		}
	}

	// a second daemon is refused, and the first one not disturbed
	other := exec.Command(fixture.Viv(t), "serve", "--config", d.Config, "--data-dir", d.Dir, "--listen", "127.0.0.1:0")
	if out, err := other.CombinedOutput(); err == nil || !bytes.Contains(out, []byte("another daemon")) {
		t.Errorf("a second daemon: %v\n%s", err, out)
	}
	usable(t, d, sb.Id)
	d.Stop()
	still("stopped")

	for name, bad := range map[string]string{
		"no room is left":    string(good) + "\ndefaults: {memory_request: 32MiB}\nlimits: {max_sandboxes: 10}\n" + "# reserve is above\n",
		"a setting is wrong": "pool: {size: many}\n",
	} {
		if name == "no room is left" {
			bad = strings.Replace(string(good), "disk: 16MiB", "disk: 16MiB, memory: 1TiB", 1)
		}
		if err := os.WriteFile(d.Config, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := d.TryRun(); err == nil {
			t.Errorf("%s, and it starts", name)
			d.Stop()
		}
		still(name)
	}
	if err := os.WriteFile(d.Config, good, 0o600); err != nil {
		t.Fatal(err)
	}
	var version int
	db, err := sql.Open("sqlite", filepath.Join(d.Dir, "state.db"))
	if err != nil {
		t.Fatal(err)
	}
	if err := db.QueryRow("PRAGMA user_version").Scan(&version); err != nil {
		t.Fatal(err)
	}
	db.Close()
	edit(t, d, "PRAGMA user_version = 999")
	if err := d.TryRun(); err == nil || !strings.Contains(d.Log(), "newer version") {
		t.Errorf("a newer store: %v", err)
	}
	still("a newer store")
	edit(t, d, fmt.Sprintf("PRAGMA user_version = %d", version))
	d.Run()
	usable(t, d, sb.Id)
	// and its network is whole
	var out bytes.Buffer
	if _, err := d.Client.RunExec(t.Context(), sb.Id, "", &v1.ExecSpec{Argv: []string{"sh", "-c", "nc 127.0.0.1 80; ip route"}}, &out, nil); err != nil || !strings.Contains(out.String(), "default") {
		t.Errorf("%q, %v", out.String(), err)
	}
	removeAll(t, d)
}

// A machine whose record cannot be read costs one sandbox, not the node.
func TestUnreadableMachine(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, node)
	bad, good := create(t, d, none()), create(t, d, none())
	var machine string
	for _, r := range alive(t, d) {
		if r.ID == bad.Id {
			machine = r.MachineID
		}
	}
	d.Kill()
	if err := os.WriteFile(filepath.Join(d.Dir, "gv", "m", machine, "machine.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	d.Run()
	if c := death(t, d, bad.Id); c.Reason != "lost" || c.Message == "" {
		t.Errorf("certificate %v", c)
	}
	usable(t, d, good.Id)
	clean(t, d)
}

// A copy of the store taken while it is in use can be put back: what it knows is
// found, what it does not know is an orphan.
func TestBackup(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, node)
	known := create(t, d, none("sleep", "1000"))
	copied := filepath.Join(t.TempDir(), "state.db")
	edit(t, d, "VACUUM INTO ?", copied)
	unknown := create(t, d, none("sleep", "1000"))
	d.Stop()
	for _, f := range []string{"state.db", "state.db-wal", "state.db-shm"} {
		if err := os.Remove(filepath.Join(d.Dir, f)); err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(copied)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(d.Dir, "state.db"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	d.Run()
	usable(t, d, known.Id)
	if _, err := d.Client.Get(t.Context(), unknown.Id); sandbox.KindOf(err) != sandbox.NotFound {
		t.Errorf("one that the copy does not know: %v", err)
	}
	clean(t, d)
	removeAll(t, d)
}

// slow gives what it has a little at a time, and does not end before ctx does.
type slow struct {
	ctx context.Context
	r   io.Reader
}

func (s slow) Read(p []byte) (int, error) {
	n, err := s.r.Read(p[:min(len(p), 64<<10)])
	if err == io.EOF {
		<-s.ctx.Done()
		return 0, s.ctx.Err()
	}
	return n, err
}

func TestImageLoad(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, node)
	before, err := d.Client.ListImages(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() {
			_, err := d.Client.LoadImage(ctx, &v1.LoadImageRequest{Tag: "half:1", Format: "rootfs"}, slow{ctx, bytes.NewReader(fixture.Busybox(t))})
			done <- err
		}()
		for end := time.Now().Add(patience); len(names(t, filepath.Join(d.Dir, "images", "tmp"))) == 0 && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		d.Kill()
		cancel()
		if err := <-done; err == nil {
			t.Error("a load that was cut off went well")
		}
		d.Run()
	}
	after, err := d.Client.ListImages(t.Context())
	if err != nil || len(after) != len(before) || after[0].Id != before[0].Id {
		t.Errorf("images before %v, after %v, %v", before, after, err)
	}
	clean(t, d)
	usable(t, d, create(t, d, none()).Id)
}

// With a pool, machines that nobody has yet are boots that may be cut off too.
func TestPool(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, strings.Replace(node, "size: 0", "size: 2", 1))
	sb := create(t, d, none())
	for _, step := range []string{"boot.dir", "boot.cgroup", "boot.slot", "boot.sentry", "boot.state"} {
		d.Stop()
		_ = d.TryRun("VIV_FAILPOINT=" + step) // may die before it answers
		dies(t, d, step)
		d.Run()
		usable(t, d, sb.Id)
	}
	for range 4 {
		usable(t, d, create(t, d, none()).Id)
		d.Kill()
		d.Run()
	}
	// without one, what the pool had is gone
	d.Stop()
	if err := os.WriteFile(d.Config, []byte(node), 0o600); err != nil {
		t.Fatal(err)
	}
	d.Run()
	clean(t, d)
	removeAll(t, d)
}

// Killed at any moment under load.
func TestRandomKills(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, strings.Replace(node, "size: 0", "size: 1", 1))
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var mu sync.Mutex
	made := map[string]bool{} // by idempotency key: the create was answered
	for w := range 3 {
		c, err := client.New(d.Addr, d.Token)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				key := fmt.Sprintf("w%d-%d", w, i)
				s := none("sleep", "1000")
				s.Name = key
				var sb *v1.Sandbox
				for ctx.Err() == nil { // until it is there, as a client would
					var err error
					if sb, err = c.Create(ctx, s, client.CreateOptions{IdempotencyKey: key}); err == nil {
						break
					}
					switch sandbox.KindOf(err) {
					case sandbox.Unavailable, sandbox.Denied, sandbox.Internal:
						time.Sleep(20 * time.Millisecond)
					default:
						if ctx.Err() == nil {
							t.Errorf("create %s: %v", key, err)
						}
						return
					}
				}
				if sb == nil {
					return
				}
				mu.Lock()
				made[key] = true
				mu.Unlock()
				_, _ = c.RunExec(ctx, sb.Id, "x", &v1.ExecSpec{Argv: []string{"sh", "-c", "echo x; exit 1"}}, nil, nil)
				if i%3 > 0 {
					_ = c.Remove(ctx, sb.Id, true)
				}
			}
		})
	}
	for range 8 {
		time.Sleep(time.Duration(50+r.IntN(900)) * time.Millisecond)
		d.Kill()
		d.Run()
	}
	stop()
	wg.Wait()
	all, err := d.Client.List(t.Context(), &v1.ListSandboxesRequest{Ended: true})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	for _, sb := range all {
		seen[sb.Spec.Name]++
		got, err := d.Client.Wait(t.Context(), sb.Id, "running", patience)
		if err == nil && got.Stage == "running" {
			usable(t, d, sb.Id)
			continue
		}
		if c := death(t, d, sb.Id); c.Message == "" && c.Reason != "stopped" {
			t.Errorf("%s ended without a word: %v", sb.Spec.Name, c)
		}
	}
	for name, n := range seen {
		if n > 1 {
			t.Errorf("%s exists %d times", name, n)
		}
	}
	t.Logf("%d were made, %d are listed", len(made), len(all))
	// what happened is numbered without gaps, over all starts
	next := int64(1)
	if err := d.Client.Events(t.Context(), &v1.WatchEventsRequest{After: -1}, func(e *v1.Event) error {
		if e.Seq != next {
			t.Errorf("event %d comes after %d", e.Seq, next-1)
		}
		next = e.Seq + 1
		return nil
	}); err != nil || next == 1 {
		t.Errorf("events until %d, %v", next, err)
	}
	d.Stop()
	if err := os.WriteFile(d.Config, []byte(node), 0o600); err != nil {
		t.Fatal(err)
	}
	d.Run() // without a pool, so that all that is left is somebody's
	clean(t, d)
	removeAll(t, d)
}
