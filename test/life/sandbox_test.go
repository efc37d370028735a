package life

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
)

func stages(t *testing.T, e *env) {
	sb := e.create(t, spec())
	if sb.Stage != "running" || !sb.IsReady || sb.StageDeadline != nil || sb.Started == nil || sb.ImageId == "" || sb.AppliedNetwork.GetMode() != "none" {
		t.Errorf("%v", sb)
	}
	if got := sb.Deadline.AsTime().Sub(sb.Created.AsTime()); got != 5*time.Minute {
		t.Errorf("the default timeout is %s", got)
	}
	var passed []string
	for i, s := range sb.Stages {
		passed = append(passed, s.Stage)
		if over := s.Took != nil && s.Took.AsDuration() > 0; over != (i < len(sb.Stages)-1) {
			t.Errorf("stage %s took %v", s.Stage, s.Took)
		}
	}
	if want := []string{"queued", "image", "boot", "network", "guest", "running"}; !slices.Equal(passed, want) {
		t.Errorf("stages %q", passed)
	}
	got, err := e.c.Get(t.Context(), sb.Id)
	if err != nil || got.Usage.GetMemory() <= 0 || got.Usage.GetPids() <= 0 || got.Usage.GetPeakMemory() < got.Usage.GetMemory() {
		t.Errorf("%v, %v", got.GetUsage(), err)
	}
}

func events(t *testing.T, e *env) {
	sb := e.create(t, spec("sh", "-c", "exit 4"))
	e.death(t, sb.Id)
	var got []string
	var last int64
	// the certificate is there before its event is
	eventually(t, "its end is an event", func() bool {
		got, last = nil, 0
		if err := e.c.Events(t.Context(), &v1.WatchEventsRequest{SandboxId: sb.Id, After: -1}, func(ev *v1.Event) error {
			if ev.Seq <= last || ev.SandboxId != sb.Id || ev.Time == nil {
				t.Errorf("event %v after %d", ev, last)
			}
			last = ev.Seq
			s := ev.Kind
			if st := ev.Attrs["stage"]; ev.Kind == "sandbox.stage" {
				s = st
			}
			got = append(got, s)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return slices.Contains(got, "sandbox.ended")
	})
	at := -1
	for _, want := range []string{"sandbox.created", "image", "boot", "network", "guest", "running", "stopping", "sandbox.ended"} {
		i := slices.Index(got, want)
		if i <= at {
			t.Errorf("event %q is at %d of %q", want, i, got)
		}
		at = i
	}
	for _, want := range []string{"exec.started", "exec.ended"} {
		if !slices.Contains(got, want) {
			t.Errorf("no event %q in %q", want, got)
		}
	}
	// all that happens on a node is numbered without gaps; a tenant sees its own
	other := e.tenant(t, "events")
	if err := other.c.Events(t.Context(), &v1.WatchEventsRequest{After: -1}, func(ev *v1.Event) error {
		if ev.SandboxId == sb.Id {
			t.Errorf("another tenant's event %v", ev)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

func list(t *testing.T, e *env) {
	e = e.tenant(t, "list")
	var all []string
	for i := range 5 {
		s := spec()
		s.Name = fmt.Sprint("n", i)
		s.Tags = map[string]string{"parity": fmt.Sprint(i % 2), "all": "x"}
		all = append(all, e.create(t, s).Id)
	}
	if !slices.IsSorted(all) {
		t.Errorf("ids are not in the order of creation: %q", all)
	}
	if _, err := e.c.Stop(t.Context(), "n4", 0); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		req  *v1.ListSandboxesRequest
		want []string
	}{
		"alive":           {&v1.ListSandboxesRequest{}, all[:4]},
		"all":             {&v1.ListSandboxesRequest{Ended: true}, all},
		"by name":         {&v1.ListSandboxesRequest{Name: "n2"}, all[2:3]},
		"name that ended": {&v1.ListSandboxesRequest{Name: "n4"}, nil},
		"name, ended":     {&v1.ListSandboxesRequest{Name: "n4", Ended: true}, all[4:]},
		"by tag":          {&v1.ListSandboxesRequest{Tags: map[string]string{"parity": "1"}}, []string{all[1], all[3]}},
		"by two tags":     {&v1.ListSandboxesRequest{Tags: map[string]string{"parity": "0", "all": "x"}}, []string{all[0], all[2]}},
		"no such value":   {&v1.ListSandboxesRequest{Tags: map[string]string{"parity": "2"}}, nil},
		"no such tag":     {&v1.ListSandboxesRequest{Tags: map[string]string{"none": ""}}, nil},
		"running":         {&v1.ListSandboxesRequest{Stages: []string{"running"}, Ended: true}, all[:4]},
		"ended":           {&v1.ListSandboxesRequest{Stages: []string{"ended"}}, all[4:]},
		"first page":      {&v1.ListSandboxesRequest{Limit: 2, Ended: true}, all[:2]},
		"second page":     {&v1.ListSandboxesRequest{Limit: 2, Ended: true, After: all[1]}, all[2:4]},
		"last page":       {&v1.ListSandboxesRequest{Limit: 2, Ended: true, After: all[3]}, all[4:]},
	} {
		l, err := e.c.List(t.Context(), c.req)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		var got []string
		for _, sb := range l {
			got = append(got, sb.Id)
			if sb.Tenant != "list" {
				t.Errorf("%s: a sandbox of tenant %q", name, sb.Tenant)
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func names(t *testing.T, e *env) {
	s := spec()
	s.Name = "unique"
	sb := e.create(t, s)
	if got, err := e.c.Get(t.Context(), "unique"); err != nil || got.Id != sb.Id {
		t.Errorf("by name: %v, %v", got, err)
	}
	_, err := e.c.Create(t.Context(), s, client.CreateOptions{})
	is(t, "a name that is taken", err, sandbox.Exists, sb.Id, true)
	// each tenant has names of its own
	other := e.tenant(t, "names")
	if o := other.create(t, s); o.Id == sb.Id {
		t.Error("two tenants share a sandbox")
	}
	if _, err := e.c.Stop(t.Context(), "unique", 0); err != nil {
		t.Fatal(err)
	}
	// free as soon as the stop has returned
	if again := e.create(t, s); again.Id == sb.Id {
		t.Error("the one that ended is back")
	}
	if got, err := e.c.Get(t.Context(), sb.Id); err != nil || got.Death == nil {
		t.Errorf("the first by its id: %v, %v", got, err)
	}
}

func namesAtOnce(t *testing.T, e *env) {
	s := spec()
	s.Name = "race"
	var mu sync.Mutex
	var ids []string
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			sb, err := e.c.Create(t.Context(), s, client.CreateOptions{})
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				ids = append(ids, sb.Id)
			} else if sandbox.KindOf(err) != sandbox.Exists {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if len(ids) != 1 {
		t.Errorf("%d have the name", len(ids))
	}
	for _, id := range ids {
		e.removeLater(t, id)
	}
}

func tags(t *testing.T, e *env) {
	s := spec()
	s.Tags = map[string]string{"tags-test": "1", "old": "x"}
	sb := e.create(t, s)
	got, err := e.c.SetTags(t.Context(), sb.Id, map[string]string{"tags-test": "2", "new": "ünïcode"})
	if err != nil || len(got.Spec.Tags) != 2 || got.Spec.Tags["new"] != "ünïcode" {
		t.Errorf("%v, %v", got, err)
	}
	if l, err := e.c.List(t.Context(), &v1.ListSandboxesRequest{Tags: map[string]string{"tags-test": "2"}}); err != nil || len(l) != 1 || l[0].Id != sb.Id {
		t.Errorf("%v, %v", l, err)
	}
	if l, _ := e.c.List(t.Context(), &v1.ListSandboxesRequest{Tags: map[string]string{"old": "x"}}); len(l) != 0 {
		t.Errorf("the old tags are there: %v", l)
	}
	many := map[string]string{}
	for i := range 65 {
		many[fmt.Sprint("k", i)] = ""
	}
	_, err = e.c.SetTags(t.Context(), sb.Id, many)
	is(t, "too many", err, sandbox.Invalid, "64", false)
	if _, err := e.c.Stop(t.Context(), sb.Id, 0); err != nil {
		t.Fatal(err)
	}
	_, err = e.c.SetTags(t.Context(), sb.Id, nil)
	is(t, "tags of one that ended", err, sandbox.Gone, "stopped", false)
}

func timeout(t *testing.T, e *env) {
	sb := e.create(t, spec())
	short, err := e.c.Extend(t.Context(), sb.Id, 5*time.Second)
	if err != nil || short.Deadline.AsTime().After(sb.Deadline.AsTime()) {
		t.Fatalf("shorter: %v, %v", short, err)
	}
	long, err := e.c.Extend(t.Context(), sb.Id, time.Hour)
	if err != nil || !long.Deadline.AsTime().After(sb.Deadline.AsTime()) {
		t.Fatalf("longer: %v, %v", long, err)
	}
	_, err = e.c.Extend(t.Context(), sb.Id, 3*time.Hour)
	is(t, "beyond the most", err, sandbox.Invalid, "2h", false)
	_, err = e.c.Wait(t.Context(), sb.Id, "ended", 7*time.Second) // the short one would have passed
	is(t, "wait for one that was extended", err, sandbox.Timeout, "running", false)
	if _, err := e.c.Extend(t.Context(), sb.Id, time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if c := e.death(t, sb.Id); c.Reason != "timeout" || c.Stage != "running" || !strings.Contains(c.Message, "timeout") {
		t.Errorf("certificate %v", c)
	}
	_, err = e.c.Extend(t.Context(), sb.Id, time.Hour)
	is(t, "extend one that ended", err, sandbox.Gone, "timeout", false)
}

func timeoutGrace(t *testing.T, e *env) {
	sb := e.create(t, spec(sh(`trap "echo bye; exit 5" TERM; echo up; while :; do sleep 1 & wait; done`)...))
	e.until(t, sb.Id, "main", "up")
	if _, err := e.c.Extend(t.Context(), sb.Id, time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if c := e.death(t, sb.Id); c.Reason != "timeout" || !c.HasExit || c.Exit.Code != 5 || string(c.LastOutput) != "up\nbye\n" {
		t.Errorf("certificate %v", c)
	}
}

func idle(t *testing.T, e *env) {
	s := spec()
	s.IdleTimeout = dur(time.Second)
	sb := e.create(t, s)
	// a command that takes longer than the idle timeout is not cut off
	if out, exit := e.run(t, sb.Id, sh("sleep 3; echo done")...); out != "done\n" || exit.Code != 0 {
		t.Errorf("%q, %v", out, exit)
	}
	if c := e.death(t, sb.Id); c.Reason != "idle" || c.HasExit {
		t.Errorf("certificate %v", c)
	}
	// with a main command there is always one that runs
	m := spec("sleep", "1000")
	m.IdleTimeout = dur(100 * time.Millisecond)
	main := e.create(t, m)
	_, err := e.c.Wait(t.Context(), main.Id, "ended", 2*time.Second)
	is(t, "wait for one with a main command", err, sandbox.Timeout, "running", false)
}

func idleConnection(t *testing.T, e *env) {
	s := spec()
	s.IdleTimeout = dur(2 * time.Second)
	sb := e.create(t, s)
	if _, exit := e.run(t, sb.Id, sh("setsid nc -ll -p 8080 -e cat </dev/null >/dev/null 2>&1 &")...); exit.Code != 0 {
		t.Fatal(exit)
	}
	var c net.Conn
	var err error
	for range 50 { // until it listens
		if c, err = e.c.Dial(t.Context(), sb.Id, 8080); err == nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err != nil {
		t.Fatal(err)
	}
	_, err = e.c.Wait(t.Context(), sb.Id, "ended", 5*time.Second)
	is(t, "wait for one with a connection", err, sandbox.Timeout, "running", false)
	if _, err := c.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4)
	if _, err := io.ReadFull(c, b); err != nil || string(b) != "ping" {
		t.Errorf("%q, %v", b, err)
	}
	c.Close()
	if d := e.death(t, sb.Id); d.Reason != "idle" {
		t.Errorf("certificate %v", d)
	}
}

func probePort(t *testing.T, e *env) {
	s := spec(sh("while ! [ -e /tmp/go ]; do sleep 0.1; done; exec nc -ll -p 8080 -e true")...)
	s.Probe = &v1.Probe{TcpPort: 8080}
	sb := e.create(t, s) // runs, and is not ready
	if sb.Stage != "ready" || sb.IsReady || sb.StageDeadline == nil || !sb.StageDeadline.AsTime().After(sb.StageSince.AsTime()) {
		t.Errorf("before: %v", sb)
	}
	_, err := e.c.Wait(t.Context(), sb.Id, "ready", 300*time.Millisecond)
	is(t, "wait for one that is not ready", err, sandbox.Timeout, "stage ready", false)
	if _, exit := e.run(t, sb.Id, "touch", "/tmp/go"); exit.Code != 0 { // it is usable
		t.Fatal(exit)
	}
	got, err := e.c.Wait(t.Context(), sb.Id, "ready", patience)
	if err != nil || got.Stage != "running" || !got.IsReady || got.StageDeadline != nil {
		t.Errorf("after: %v, %v", got, err)
	}
}

func probeCommand(t *testing.T, e *env) {
	s := spec()
	s.Probe = &v1.Probe{Command: []string{"test", "-e", "/tmp/go"}, Interval: dur(20 * time.Millisecond)}
	sb := e.create(t, s)
	if sb.Stage != "ready" {
		t.Errorf("%v", sb)
	}
	if _, exit := e.run(t, sb.Id, "touch", "/tmp/go"); exit.Code != 0 {
		t.Fatal(exit)
	}
	if _, err := e.c.Wait(t.Context(), sb.Id, "ready", patience); err != nil {
		t.Error(err)
	}
	// probes are no execs of anybody's
	l, err := e.c.ListExecs(t.Context(), sb.Id)
	if err != nil || len(l) != 1 {
		t.Errorf("%v, %v", l, err)
	}
}

// E5
func idempotency(t *testing.T, e *env) {
	s := spec("sleep", "1000")
	s.Tags = map[string]string{"test": "idempotency"}
	o := client.CreateOptions{IdempotencyKey: "a/b ü", Wait: true}
	var mu sync.Mutex
	ids := map[string]bool{}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			sb, err := e.c.Create(t.Context(), s, o)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			ids[sb.Id] = true
		})
	}
	wg.Wait()
	if len(ids) != 1 {
		t.Fatalf("one key, and %d sandboxes", len(ids))
	}
	var id string
	for id = range ids {
		e.removeLater(t, id)
	}
	if l, err := e.c.List(t.Context(), &v1.ListSandboxesRequest{Tags: s.Tags, Ended: true}); err != nil || len(l) != 1 {
		t.Errorf("%d are there, %v", len(l), err)
	}
	other := spec("sleep", "1001")
	_, err := e.c.Create(t.Context(), other, o)
	is(t, "the key with another spec", err, sandbox.Conflict, "a/b", true)
	if _, err := e.c.Stop(t.Context(), id, 0); err != nil {
		t.Fatal(err)
	}
	o.Wait = false
	if sb, err := e.c.Create(t.Context(), s, o); err != nil || sb.Id != id || sb.Stage != "ended" {
		t.Errorf("after its end: %v, %v", sb, err)
	}
	_, err = e.c.Create(t.Context(), other, o)
	is(t, "another spec after its end", err, sandbox.Conflict, "a/b", true)
	// another tenant's keys are its own
	sb, err := e.tenant(t, "keys").c.Create(t.Context(), s, o)
	if err != nil || sb.Id == id {
		t.Errorf("another tenant: %v, %v", sb, err)
	}
}

func stop(t *testing.T, e *env) {
	sb := e.create(t, spec(sh(`trap "echo bye >&2; exit 7" TERM; echo up; while :; do sleep 1 & wait; done`)...))
	e.until(t, sb.Id, "main", "up")
	got, err := e.c.Stop(t.Context(), sb.Id, patience)
	if err != nil || got.Stage != "ended" {
		t.Fatalf("%v, %v", got, err)
	}
	if c := got.Death; c.Reason != "stopped" || !c.HasExit || c.Exit.Code != 7 || c.Exit.Signal != 0 || c.Stage != "running" || c.PeakMemory <= 0 || c.Oom || string(c.LastOutput) != "bye\n" {
		t.Errorf("certificate %v", c)
	}
	// again is no error, and changes nothing (report 11)
	again, err := e.c.Stop(t.Context(), sb.Id, 0)
	if err != nil || again.Death.Exit.GetCode() != 7 {
		t.Errorf("again: %v, %v", again, err)
	}
	x, err := e.c.GetExec(t.Context(), sb.Id, "main")
	if err != nil || x.State != "exited" || x.Exit.Code != 7 {
		t.Errorf("the main command: %v, %v", x, err)
	}
	_, err = e.c.StartExec(t.Context(), sb.Id, "", &v1.ExecSpec{Argv: []string{"true"}})
	is(t, "exec in one that ended", err, sandbox.Gone, "stopped", false)
	_, err = e.c.Stat(t.Context(), sb.Id, "/", "", true)
	is(t, "files of one that ended", err, sandbox.Gone, "stopped", false)
	_, err = e.c.Dial(t.Context(), sb.Id, 80)
	is(t, "dial one that ended", err, sandbox.Gone, "stopped", false)
}

// Without a main command the grace is that of the commands that run.
func stopEarly(t *testing.T, e *env) {
	for range 3 {
		sb, err := e.c.Create(t.Context(), spec(), client.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		got, err := e.c.Stop(t.Context(), sb.Id, time.Second)
		if err != nil || got.Death.GetReason() != "stopped" {
			t.Errorf("%v, %v", got, err)
		}
		_, err = e.c.Wait(t.Context(), sb.Id, "running", patience)
		if got.Started == nil {
			is(t, "wait for it to run", err, sandbox.Gone, "stopped", false)
		}
	}
}

func killAfterGrace(t *testing.T, e *env) {
	sb := e.create(t, spec(sh(`trap "" TERM; echo up; while :; do sleep 1; done`)...))
	e.until(t, sb.Id, "main", "up")
	got, err := e.c.Stop(t.Context(), sb.Id, 500*time.Millisecond)
	// what its own status was nobody knows, and it is not made up (report 7)
	if err != nil || got.Death.GetReason() != "stopped" || got.Death.HasExit {
		t.Errorf("%v, %v", got, err)
	}
	if x, err := e.c.GetExec(t.Context(), sb.Id, "main"); err != nil || x.State != "lost" {
		t.Errorf("%v, %v", x, err)
	}
}

func remove(t *testing.T, e *env) {
	sb, err := e.c.Create(t.Context(), spec(sh("echo words; exec sleep 1000")...), client.CreateOptions{Wait: true})
	if err != nil {
		t.Fatal(err)
	}
	err = e.c.Remove(t.Context(), sb.Id, false)
	is(t, "remove a living one", err, sandbox.Conflict, "alive", true)
	if err := e.c.Remove(t.Context(), sb.Id, true); err != nil {
		t.Fatal(err)
	}
	if err := e.c.Remove(t.Context(), sb.Id, false); err != nil { // report 11
		t.Errorf("again: %v", err)
	}
	got, err := e.c.Get(t.Context(), sb.Id)
	if err != nil || !got.Removed || got.Death.GetReason() != "stopped" {
		t.Errorf("its certificate: %v, %v", got, err)
	}
	l, err := e.c.List(t.Context(), &v1.ListSandboxesRequest{Ended: true})
	if err != nil || slices.ContainsFunc(l, func(x *v1.Sandbox) bool { return x.Id == sb.Id }) {
		t.Errorf("it is listed, %v", err)
	}
	l, err = e.c.List(t.Context(), &v1.ListSandboxesRequest{Ended: true, Removed: true})
	if err != nil || !slices.ContainsFunc(l, func(x *v1.Sandbox) bool { return x.Id == sb.Id && x.Removed }) {
		t.Errorf("its certificate is not listed, %v", err)
	}
	// on request by itself, once it has ended
	s := spec("true")
	s.Remove = true
	sb, err = e.c.Create(t.Context(), s, client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if c := e.death(t, sb.Id); c.Reason != "exited" {
		t.Errorf("certificate %v", c)
	}
	if got, err := e.c.Get(t.Context(), sb.Id); err != nil || !got.Removed {
		t.Errorf("%v, %v", got, err)
	}
	err = e.c.Remove(t.Context(), "sb-01ARZ3NDEKTSV4RRFFQ69G5FAV", true)
	is(t, "remove what never was", err, sandbox.NotFound, "sb-01ARZ", true)
}

func certificates(t *testing.T, e *env) {
	for name, c := range map[string]struct {
		argv         []string
		code, signal int32
	}{
		"success": {[]string{"true"}, 0, 0},
		"failure": {sh("exit 255"), 255, 0},
		"signal":  {sh("kill -9 $$"), 137, 9},
	} {
		sb := e.create(t, spec(c.argv...))
		d := e.death(t, sb.Id)
		if d.Reason != "exited" || !d.HasExit || d.Exit.Code != c.code || d.Exit.Signal != c.signal || d.PeakMemory <= 0 || d.Started == nil {
			t.Errorf("%s: certificate %v", name, d)
		}
	}
	// that there is no such command is the main command's status
	sb := e.create(t, spec("no-such-command"))
	if d := e.death(t, sb.Id); d.Reason != "exited" || d.Exit.GetCode() != 127 || d.Exit.Error == "" || d.Exit.ErrorKind != "not_found" {
		t.Errorf("certificate %v", d)
	}
	bad := spec()
	bad.Image, bad.Pull = "no-such-image:1", "never"
	_, err := e.c.Create(t.Context(), bad, client.CreateOptions{Wait: true})
	is(t, "an unknown image", err, sandbox.NotFound, "no-such-image", true)
	sb, err = e.c.Create(t.Context(), bad, client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if d := e.death(t, sb.Id); d.Reason != "failed" || d.Stage != "image" || d.ErrorKind != "not_found" || d.Hint == "" || d.HasExit || d.Started != nil {
		t.Errorf("certificate %v", d)
	}
}

// A2 as far as the certificate goes.
func oom(t *testing.T, e *env) {
	s := spec(sh(`echo up; x=a; while :; do x=$x$x$x; done`)...)
	const limit = 64 << 20
	s.Resources = &v1.Resources{MemoryLimit: limit}
	sb := e.create(t, s)
	d := e.death(t, sb.Id)
	if d.Reason != "oom" || !d.Oom || d.PeakMemory < limit || d.Hint == "" || d.Stage != "running" || string(d.LastOutput) != "up\n" {
		t.Errorf("certificate %v", d)
	}
}

func pidOf(b []byte, address string) (int, bool) {
	var m struct {
		Pid  int
		Slot struct{ Address string }
	}
	if json.Unmarshal(b, &m) != nil || !strings.HasPrefix(m.Slot.Address, address+"/") {
		return 0, false
	}
	return m.Pid, true
}

func killed(t *testing.T, e *env) {
	sb := e.create(t, spec(sh("echo up; exec sleep 1000")...))
	e.until(t, sb.Id, "main", "up")
	done := make(chan error, 1)
	go func() {
		_, err := e.c.RunExec(t.Context(), sb.Id, "long", &v1.ExecSpec{Argv: []string{"sleep", "1000"}}, nil, nil)
		done <- err
	}()
	eventually(t, "the command runs", func() bool {
		x, err := e.c.GetExec(t.Context(), sb.Id, "long")
		return err == nil && x.State == "running"
	})
	if err := unix.Kill(e.sentry(t, sb.Address), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if d := e.death(t, sb.Id); d.Reason != "killed" || d.Oom || d.HasExit || d.Message == "" || string(d.LastOutput) != "up\n" {
		t.Errorf("certificate %v", d)
	}
	// who follows a command is told, and does not wait for ever (report 2)
	select {
	case <-done:
	case <-time.After(patience):
		t.Error("a client that follows a command is not told")
	}
	if x, err := e.c.WaitExec(t.Context(), sb.Id, "long", patience); err != nil || x.State != "lost" || x.Exit.GetCode() != 0 && x.Exit != nil {
		t.Errorf("%v, %v", x, err)
	}
}

func lastOutput(t *testing.T, e *env) {
	sb := e.create(t, spec(sh("seq 1 200000; exit 1")...))
	d := e.death(t, sb.Id)
	if n := len(d.LastOutput); n == 0 || n > 4096 || !strings.HasSuffix(string(d.LastOutput), "\n199999\n200000\n") {
		t.Errorf("%d bytes, %.40q", n, d.LastOutput)
	}
}

func wait(t *testing.T, e *env) {
	sb := e.create(t, spec("true"))
	e.death(t, sb.Id)
	// it ran, and is over
	if got, err := e.c.Wait(t.Context(), sb.Id, "running", patience); err != nil || got.Stage != "ended" {
		t.Errorf("%v, %v", got, err)
	}
	_, err := e.c.Wait(t.Context(), sb.Id, "soon", patience)
	is(t, "wait for what is no stage", err, sandbox.Invalid, "soon", false)
	_, err = e.c.Wait(t.Context(), "nobody", "ended", patience)
	is(t, "wait for nobody", err, sandbox.NotFound, "nobody", true)
}
