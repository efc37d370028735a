// Package crash kills the daemon wherever it may be, and looks at what the next
// one makes of it (E4): every sandbox is either running and usable or ended with
// a reason, nothing exists twice, and nothing is left that belongs to nobody.
package crash

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	_ "modernc.org/sqlite"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
	"vivarium/test/fixture"
)

// node has no pool: its machines come and go as the steps say.
const node = "pool: {size: 0}\nreserve: {disk: 16MiB}\nnetwork: {pool: 2}\n"

// patience bounds waits for what must happen at once, on a machine that is busy.
const patience = 90 * time.Second

func none(argv ...string) *v1.SandboxSpec {
	return &v1.SandboxSpec{Image: fixture.Image, Network: &v1.NetworkPolicy{Mode: "none"}, Command: argv}
}

func create(t *testing.T, d *fixture.Daemon, spec *v1.SandboxSpec) *v1.Sandbox {
	t.Helper()
	sb, err := d.Client.Create(t.Context(), spec, client.CreateOptions{Wait: true})
	if err != nil {
		t.Fatalf("create: %v\n%s", err, d.Log())
	}
	return sb
}

// usable runs a command in a sandbox.
func usable(t *testing.T, d *fixture.Daemon, id string) {
	t.Helper()
	var out bytes.Buffer
	x, err := d.Client.RunExec(t.Context(), id, "", &v1.ExecSpec{Argv: []string{"sh", "-c", "echo alive; exit 3"}}, &out, &out)
	if err != nil || out.String() != "alive\n" || x.GetExit().GetCode() != 3 {
		t.Errorf("sandbox %s is not usable: %q, %v, %v", id, out.String(), x, err)
	}
}

// death waits for the end of a sandbox and gives its certificate.
func death(t *testing.T, d *fixture.Daemon, id string) *v1.Death {
	t.Helper()
	sb, err := d.Client.Wait(t.Context(), id, "ended", patience)
	if err != nil {
		t.Fatalf("wait for the end of %s: %v\n%s", id, err, d.Log())
	}
	if sb.Death == nil || sb.Death.Reason == "" || sb.Death.Ended == nil || sb.Death.Stage == "" {
		t.Fatalf("certificate of %s: %v", id, sb.Death)
	}
	return sb.Death
}

// row is what the store says of a sandbox that lives.
type row struct{ ID, MachineID, Slot string }

func alive(t *testing.T, d *fixture.Daemon) []row {
	t.Helper()
	db, err := sql.Open("sqlite", "file:"+filepath.Join(d.Dir, "state.db")+"?mode=ro&_pragma=busy_timeout(10000)")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	rows, err := db.Query("SELECT record FROM sandboxes WHERE alive = 1")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	var all []row
	for rows.Next() {
		var raw string
		var r row
		if err := rows.Scan(&raw); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal([]byte(raw), &r); err != nil {
			t.Fatal(err)
		}
		all = append(all, r)
	}
	return all
}

// parentOf reads the parent's pid from /proc/PID (proc_pid_stat(5)).
func parentOf(proc string) (pid int) {
	b, err := os.ReadFile(filepath.Join(proc, "stat"))
	if err != nil {
		return 0
	}
	var state string
	_, _ = fmt.Sscan(string(b[bytes.LastIndexByte(b, ')')+1:]), &state, &pid)
	return pid
}

func names(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	var l []string
	for _, e := range entries {
		l = append(l, e.Name())
	}
	return l
}

// strays names what is there without a sandbox that lives (or, of output, that
// is still listed). The daemon must have no pool.
func strays(t *testing.T, d *fixture.Daemon) []string {
	t.Helper()
	machines := map[string]bool{}
	for _, r := range alive(t, d) {
		machines[r.MachineID] = true
	}
	var l []string
	for _, m := range names(t, filepath.Join(d.Dir, "gv", "m")) {
		if !machines[m] {
			l = append(l, "machine "+m)
		}
	}
	for _, s := range names(t, filepath.Join(d.Dir, "gv", "s")) {
		if !machines[strings.TrimSuffix(strings.TrimPrefix(s, "runsc-"), ".sock")] {
			l = append(l, "socket "+s)
		}
	}
	groups, err := filepath.Glob("/sys/fs/cgroup/*/vivarium-" + d.Instance() + "/*")
	if err != nil {
		t.Fatal(err)
	}
	v2, _ := filepath.Glob("/sys/fs/cgroup/vivarium-" + d.Instance() + "/*")
	for _, g := range append(groups, v2...) {
		if fi, err := os.Stat(g); err == nil && fi.IsDir() && !machines[filepath.Base(g)] {
			l = append(l, "cgroup "+g)
		}
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, p := range procs {
		b, err := os.ReadFile(p)
		if err != nil || !bytes.Contains(b, []byte(d.Dir+"/")) || bytes.Contains(b, []byte("\x00serve\x00")) {
			continue
		}
		if bytes.Contains(b, []byte("\x00spawn\x00")) && parentOf(filepath.Dir(p)) == d.Pid() {
			continue // a helper of the daemon that runs
		}
		mine := false
		for m := range machines {
			mine = mine || m != "" && bytes.Contains(b, []byte(m))
		}
		if !mine {
			l = append(l, "process "+strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
	for _, s := range names(t, filepath.Join(d.Dir, "net", "slots")) {
		b, err := os.ReadFile(filepath.Join(d.Dir, "net", "slots", s, "meta.json"))
		if err != nil {
			continue // on its way out
		}
		var m struct{ Owner string }
		if json.Unmarshal(b, &m) == nil && m.Owner != "" && !machines[m.Owner] {
			l = append(l, "slot "+s+" of machine "+m.Owner)
		}
	}
	listed := map[string]bool{}
	all, err := d.Client.List(t.Context(), &v1.ListSandboxesRequest{Ended: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range all {
		listed[sb.Id] = true
	}
	for _, s := range names(t, filepath.Join(d.Dir, "spool")) {
		if !listed[s] {
			l = append(l, "output of "+s)
		}
	}
	for _, f := range names(t, filepath.Join(d.Dir, "images", "tmp")) {
		l = append(l, "file images/tmp/"+f)
	}
	return l
}

// clean waits until there are no strays.
func clean(t *testing.T, d *fixture.Daemon) {
	t.Helper()
	var l []string
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if l = strays(t, d); len(l) == 0 {
			return
		}
	}
	t.Errorf("left behind:\n  %s", strings.Join(l, "\n  "))
}

// removeAll removes every sandbox and looks for what is left.
func removeAll(t *testing.T, d *fixture.Daemon) {
	t.Helper()
	all, err := d.Client.List(t.Context(), &v1.ListSandboxesRequest{Ended: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range all {
		if err := d.Client.Remove(t.Context(), sb.Id, true); err != nil {
			t.Errorf("remove %s: %v", sb.Id, err)
		}
	}
	if l := alive(t, d); len(l) > 0 {
		t.Errorf("alive after all were removed: %v", l)
	}
	clean(t, d)
}

// armed starts the daemon so that it dies before a step.
func armed(d *fixture.Daemon, step string) {
	d.T.Helper()
	d.Stop()
	d.Run("VIV_FAILPOINT=" + step)
}

// dies waits for the failpoint.
func dies(t *testing.T, d *fixture.Daemon, step string) {
	t.Helper()
	if !d.WaitKilled(patience) {
		t.Fatalf("the daemon has never come to step %s\n%s", step, d.Log())
	}
}

// withNames finds the sandboxes of a name, living or not.
func withName(t *testing.T, d *fixture.Daemon, name string) []*v1.Sandbox {
	t.Helper()
	l, err := d.Client.List(t.Context(), &v1.ListSandboxesRequest{Name: name, Ended: true})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// half checks what a daemon made of a create that was cut off.
func half(t *testing.T, d *fixture.Daemon, sb *v1.Sandbox) {
	t.Helper()
	got, err := d.Client.Wait(t.Context(), sb.Id, "running", patience)
	if err == nil && got.Stage == "running" {
		usable(t, d, sb.Id)
		return
	}
	c := death(t, d, sb.Id)
	if c.Reason != "failed" || c.Message == "" || c.ErrorKind != string(sandbox.Unavailable) {
		t.Errorf("certificate of a create that was cut off: %v", c)
	}
}

func TestCreate(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, node)
	for _, step := range steps[inCreate] {
		t.Run(step, func(t *testing.T) {
			name := "c-" + strings.ReplaceAll(step, ".", "-")
			spec := none("sleep", "1000")
			spec.Name = name
			o := client.CreateOptions{IdempotencyKey: "key of " + step, Wait: true}
			armed(d, step)
			done := make(chan error, 1)
			go func() {
				_, err := d.Client.Create(context.Background(), spec, o)
				done <- err
			}()
			dies(t, d, step)
			if err := <-done; err == nil {
				t.Error("the create of a daemon that died went well")
			}
			d.Run()
			before := withName(t, d, name)
			if len(before) > 1 {
				t.Fatalf("it exists %d times", len(before))
			}
			for _, sb := range before {
				half(t, d, sb)
			}
			clean(t, d)
			// The client tries again (E5): no second one.
			o.Wait = false
			again, err := d.Client.Create(t.Context(), spec, o)
			if err != nil {
				t.Fatalf("the create again: %v", err)
			}
			if len(before) == 1 && again.Id != before[0].Id {
				t.Errorf("the same key gave %s and %s", before[0].Id, again.Id)
			}
			if len(before) == 0 {
				if _, err := d.Client.Wait(t.Context(), again.Id, "running", patience); err != nil {
					t.Error(err)
				}
				usable(t, d, again.Id)
			}
			if l := withName(t, d, name); len(l) != 1 {
				t.Errorf("it exists %d times", len(l))
			}
			removeAll(t, d)
			// the name is free
			usable(t, d, create(t, d, spec).Id)
			removeAll(t, d)
		})
	}
}

// obedient ends with 7 when it is told to.
var obedient = []string{"sh", "-c", `echo last words; trap "exit 7" TERM; while :; do sleep 1 & wait; done`}

func TestStop(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, node)
	for _, step := range steps[inStop] {
		t.Run("stop/"+step, func(t *testing.T) {
			sb := create(t, d, none(obedient...))
			waitOutput(t, d, sb.Id, "last words\n")
			armed(d, step)
			go d.Client.Stop(context.Background(), sb.Id, time.Minute)
			dies(t, d, step)
			d.Run()
			// cut off before the stop was written down: it runs, and may be stopped
			// again
			if _, err := d.Client.Stop(t.Context(), sb.Id, time.Minute); err != nil {
				t.Error(err)
			}
			c := death(t, d, sb.Id)
			if c.Reason != "stopped" && !(step == "stop.kill" && c.Reason == "exited") || !c.HasExit || c.Exit.Code != 7 || c.Stage != "running" || string(c.LastOutput) != "last words\n" {
				t.Errorf("certificate: %v", c)
			}
			status(t, d, sb.Id, "main", 7)
			clean(t, d)
			removeAll(t, d)
		})
		t.Run("exit/"+step, func(t *testing.T) {
			spec := none("sh", "-c", "echo waiting; read x; exit 9")
			spec.Stdin = true
			sb := create(t, d, spec)
			waitOutput(t, d, sb.Id, "waiting\n")
			armed(d, step)
			if _, err := d.Client.WriteStdin(t.Context(), sb.Id, "main", 0, []byte("go\n"), true); err != nil && sandbox.KindOf(err) != sandbox.Unavailable {
				t.Error(err)
			}
			dies(t, d, step)
			d.Run()
			c := death(t, d, sb.Id)
			if c.Reason != "exited" || !c.HasExit || c.Exit.Code != 9 || c.Stage != "running" || string(c.LastOutput) != "waiting\n" {
				t.Errorf("certificate: %v", c)
			}
			status(t, d, sb.Id, "main", 9)
			removeAll(t, d)
		})
	}
}

func TestRemove(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, node)
	for _, step := range steps[inRemove] {
		t.Run("ended/"+step, func(t *testing.T) {
			sb := create(t, d, none("sh", "-c", "echo words; exit 1"))
			death(t, d, sb.Id)
			armed(d, step)
			go d.Client.Remove(context.Background(), sb.Id, false)
			dies(t, d, step)
			d.Run()
			if err := d.Client.Remove(t.Context(), sb.Id, false); err != nil {
				t.Errorf("again: %v", err)
			}
			gone(t, d, sb.Id)
			clean(t, d)
		})
	}
	for _, step := range append(append([]string(nil), steps[inStop]...), steps[inRemove]...) {
		t.Run("force/"+step, func(t *testing.T) {
			sb := create(t, d, none("sleep", "1000"))
			armed(d, step)
			done := make(chan error, 1)
			go func() { done <- d.Client.Remove(context.Background(), sb.Id, true) }()
			if step == "remove.record" || step == "remove.spool" {
				// its end has removed it already: these are passed, or not come to
				select {
				case err := <-done:
					if err != nil && sandbox.KindOf(err) != sandbox.Unavailable {
						t.Error(err)
					}
				case <-time.After(patience):
					t.Error("the remove does not end")
				}
			} else {
				dies(t, d, step)
			}
			d.Stop()
			d.Run()
			if got, err := d.Client.Get(t.Context(), sb.Id); err == nil && got.Stage == "running" && step == "stop.kill" {
				// cut off before it was written down
				usable(t, d, sb.Id)
				if err := d.Client.Remove(t.Context(), sb.Id, true); err != nil {
					t.Error(err)
				}
			}
			death(t, d, sb.Id)
			// asked for before the crash, and done without being asked again
			gone(t, d, sb.Id)
			clean(t, d)
		})
	}
}

// gone checks that of a removed sandbox the certificate is all that is left.
func gone(t *testing.T, d *fixture.Daemon, id string) {
	t.Helper()
	sb, err := d.Client.Get(t.Context(), id)
	if err != nil || !sb.Removed || sb.Death == nil {
		t.Errorf("removed: %v, %v", sb, err)
	}
	l, err := d.Client.List(t.Context(), &v1.ListSandboxesRequest{Ended: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, sb := range l {
		if sb.Id == id {
			t.Error("a removed sandbox is listed")
		}
	}
}

// status checks that an exec has one status, however often it is asked for.
func status(t *testing.T, d *fixture.Daemon, sb, id string, code int32) {
	t.Helper()
	for range 2 {
		x, err := d.Client.WaitExec(t.Context(), sb, id, patience)
		if err != nil || x.State != "exited" || x.Exit.GetCode() != code {
			t.Errorf("exec %s: %v, %v", id, x, err)
		}
	}
}

// waitOutput waits until the main command has written this.
func waitOutput(t *testing.T, d *fixture.Daemon, sb, want string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var got bytes.Buffer
	w := writerFunc(func(p []byte) (int, error) {
		got.Write(p)
		if strings.HasPrefix(got.String(), want) {
			return 0, errSeen
		}
		return len(p), nil
	})
	if _, err := d.Client.Output(ctx, &v1.ReadOutputRequest{SandboxId: sb, Id: "main", StderrOffset: -1, Follow: true}, w, nil); err != errSeen {
		t.Fatalf("output is %q, %v", got.String(), err)
	}
}

var errSeen = fmt.Errorf("seen")

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
