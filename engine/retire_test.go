package engine

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"vivarium/guest"
	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// A11: many commands with huge environments do not fill the daemon's memory.
func TestRetireBounds(t *testing.T) {
	t.Parallel()
	e := keeper(t)
	e.opts.SpoolExec, e.opts.SpoolSandbox = 1<<20, 1<<20
	run := func(n int, spec sandbox.ExecSpec, output string) int {
		b := e.newBox(sandbox.Sandbox{ID: "sb-1", Tenant: "a", Stage: sandbox.StageRunning})
		for i := range n {
			x, err := newExecution(b, sandbox.Exec{ID: fmt.Sprint("x", i), SandboxID: b.id, Tenant: b.tenant, Spec: spec, State: sandbox.ExecExited})
			if err != nil {
				t.Fatal(err)
			}
			if err := x.stdout.Write([]byte(output)); err != nil {
				t.Fatal(err)
			}
			b.execs[x.rec.ID] = x
			b.running++
			x.over()
		}
		if _, ok := b.known(fmt.Sprint("x", n-1)); !ok || b.running != 0 {
			t.Errorf("the newest is kept: %v; %d run", ok, b.running)
		}
		return len(b.execs)
	}
	long := sandbox.ExecSpec{Argv: []string{"true", strings.Repeat("a", 100<<10)}, Env: map[string]string{"A": strings.Repeat("a", 900<<10)}}
	if n := run(20, long, ""); n != 4 {
		t.Errorf("%d of a megabyte are kept", n)
	}
	if n := run(20, sandbox.ExecSpec{Argv: []string{"true"}}, strings.Repeat("a", 100<<10)); n != 10 {
		t.Errorf("%d with output of a tenth of the bound are kept", n)
	}
	if n := run(keepExecs+20, sandbox.ExecSpec{Argv: []string{"true"}}, ""); n != keepExecs {
		t.Errorf("%d small ones are kept", n)
	}
}

// The status of a command, or the failure of its start, may come while its sandbox
// is being ended: it is told once, as lost, and ends once.
func TestExecAfterEnd(t *testing.T) {
	t.Parallel()
	e := keeper(t)
	e.opts.SpoolExec, e.opts.SpoolSandbox = 1<<20, 1<<20
	e.log = slog.New(slog.DiscardHandler)
	e.events = newEvents(e.store, e.log, 0)
	b := e.newBox(sandbox.Sandbox{ID: "sb-1", Tenant: "a", Stage: sandbox.StageRunning})
	x, err := newExecution(b, sandbox.Exec{ID: "x", SandboxID: b.id, Tenant: b.tenant, State: sandbox.ExecRunning})
	if err != nil {
		t.Fatal(err)
	}
	b.execs["x"] = x
	b.running++
	b.endExecs(&sandbox.Death{})
	x.exited(&guest.ExecStream{}, wire.Exit{Status: sandbox.ExitStatus{Code: 3}})
	x.abandon() // as of one whose start was on its way
	if r := x.record(); r.State != sandbox.ExecLost || r.Exit.Code != 0 || b.running != 0 {
		t.Errorf("%+v, %d run", r, b.running)
	}
	if err := e.store.Flush(); err != nil {
		t.Fatal(err)
	}
	l, err := e.store.Events(t.Context(), "a", "", -1, 10)
	if err != nil || len(l) != 1 || l[0].Attrs["state"] != "lost" {
		t.Errorf("%v, %v", l, err)
	}
}
