package engine

import (
	"fmt"
	"strings"
	"testing"

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
