// Package life tests what becomes of sandboxes and commands between create and
// the end, through the API and with the real daemon.
package life

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
	"vivarium/test/fixture"
)

// patience bounds waits for what must happen, on a machine that is busy.
const patience = 60 * time.Second

// spoolSize is how much of an exec's output the daemons here keep.
const spoolSize = 256 << 10

const config = `
pool: {size: 2}
reserve: {disk: 16MiB, memory: 64MiB, cpu: 100m}
defaults: {cpu_request: 10m, memory_request: 32MiB, memory_limit: 256MiB, network: none}
limits: {max_timeout: 2h, max_execs: 20}
spool: {per_exec: 256KiB, per_sandbox: 1MiB}
network: {pool: 4}
`

// TestLife runs them all beside each other on one daemon.
func TestLife(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, config)
	t.Run("with", func(t *testing.T) { // returns when all have
		for name, fn := range map[string]func(*testing.T, *env){
			"stages": stages, "list": list, "names": names, "names at once": namesAtOnce, "tags": tags, "timeout": timeout, "timeout grace": timeoutGrace,
			"idle": idle, "idle connection": idleConnection, "probe by port": probePort, "probe by command": probeCommand,
			"idempotency": idempotency, "stop": stop, "stop while it is made": stopEarly, "kill after grace": killAfterGrace, "remove": remove,
			"certificates": certificates, "oom": oom, "killed": killed, "last output": lastOutput, "events": events, "wait": wait,

			"exec ids": execIDs, "output again": outputAgain, "output is bounded": outputBounded, "old output": oldOutput, "stdin": stdin, "attach": attach,
			"client goes away": clientGoesAway, "signals": signals, "exit codes": exitCodes, "resize": resize, "exec timeout": execTimeout,
			"exec environment": execEnvironment, "exec bad input": execBadInput, "exec limit": execLimit, "output modes": outputModes,
			"image config": imageConfig,

			"bad input": badInput, "injection": injection, "starts meet end": startsMeetEnd, "other tenants": otherTenants, "private pulls": privatePulls, "tokens": tokens,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				fn(t, &env{Daemon: d, c: d.Client})
			})
		}
	})
}

// env is what a test works with.
type env struct {
	*fixture.Daemon
	c *client.Client
}

// tenant gives an env of a new tenant, which has the image too.
func (e *env) tenant(t *testing.T, name string) *env {
	t.Helper()
	c := e.NewTenant(name)
	if _, err := c.LoadImage(t.Context(), &v1.LoadImageRequest{Tag: fixture.Image, Format: "rootfs", Config: &v1.ImageConfig{Cmd: []string{"sh"}, Env: []string{"PATH=/bin:/sbin"}}}, bytes.NewReader(fixture.Busybox(t))); err != nil {
		t.Fatal(err)
	}
	return &env{Daemon: e.Daemon, c: c}
}

func spec(argv ...string) *v1.SandboxSpec {
	return &v1.SandboxSpec{Image: fixture.Image, Command: argv}
}

func sh(script string) []string { return []string{"sh", "-c", script} }

func dur(d time.Duration) *durationpb.Duration { return durationpb.New(d) }

// create makes a sandbox that runs, and removes it when the test ends.
func (e *env) create(t *testing.T, s *v1.SandboxSpec) *v1.Sandbox {
	t.Helper()
	sb, err := e.c.Create(t.Context(), s, client.CreateOptions{Wait: true})
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	e.removeLater(t, sb.Id)
	return sb
}

func (e *env) removeLater(t *testing.T, id string) {
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := e.c.Remove(ctx, id, true); err != nil {
			t.Errorf("remove %s: %v", id, err)
		}
	})
}

// run runs a command to its end.
func (e *env) run(t *testing.T, sb string, argv ...string) (stdout string, exit *v1.ExitStatus) {
	t.Helper()
	return e.runSpec(t, sb, &v1.ExecSpec{Argv: argv})
}

func (e *env) runSpec(t *testing.T, sb string, x *v1.ExecSpec) (stdout string, exit *v1.ExitStatus) {
	t.Helper()
	var out, errs bytes.Buffer
	got, err := e.c.RunExec(t.Context(), sb, "", x, &out, &errs)
	if err != nil {
		t.Fatalf("%q: %v", x.Argv, err)
	}
	if got.State != "exited" {
		t.Errorf("%q: state %s", x.Argv, got.State)
	}
	return out.String() + errs.String(), got.Exit
}

// death waits for the end and checks that the certificate is whole.
func (e *env) death(t *testing.T, id string) *v1.Death {
	t.Helper()
	sb, err := e.c.Wait(t.Context(), id, "ended", patience)
	if err != nil {
		t.Fatalf("wait for the end: %v", err)
	}
	if sb.Stage != "ended" || sb.Death.GetReason() == "" || sb.Death.Stage == "" || sb.Death.Created == nil || sb.Death.Ended == nil {
		t.Fatalf("ended: %v", sb)
	}
	return sb.Death
}

// is checks an error's kind, that it tells what it is about, and, if hint is
// set, that it says what to do.
func is(t *testing.T, what string, err error, kind sandbox.Kind, says string, hint bool) {
	t.Helper()
	switch {
	case err == nil:
		t.Errorf("%s: no error", what)
	case !errors.Is(err, kind) || !strings.Contains(err.Error(), says):
		t.Errorf("%s: %v (%s), want %s about %q", what, err, sandbox.KindOf(err), kind, says)
	case hint && sandbox.HintOf(err) == "":
		t.Errorf("%s: %v: without a hint", what, err)
	}
}

// eventually waits until a condition holds.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("never: %s", what)
}

// until reads the output of an exec from its begin until it holds text.
func (e *env) until(t *testing.T, sb, id, text string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	w := &finder{text: text}
	if _, err := e.c.Output(ctx, &v1.ReadOutputRequest{SandboxId: sb, Id: id, Follow: true}, w, w); err != errFound {
		t.Fatalf("exec %s never wrote %q but %q: %v", id, text, w.all.String(), err)
	}
}

var errFound = errors.New("found")

type finder struct {
	text string
	all  bytes.Buffer
}

func (f *finder) Write(p []byte) (int, error) {
	f.all.Write(p)
	if strings.Contains(f.all.String(), f.text) {
		return 0, errFound
	}
	return len(p), nil
}

// sentry is the process of the only machine whose address is this.
func (e *env) sentry(t *testing.T, address string) (pid int) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(e.Dir, "gv", "m", "*", "machine.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // just removed
		}
		if p, ok := pidOf(b, address); ok {
			return p
		}
	}
	t.Fatalf("no machine has the address %s", address)
	return 0
}

func newRequest[T any](m *T) *connect.Request[T] { return connect.NewRequest(m) }

func setConfig(t *testing.T, d *fixture.Daemon, yaml string) {
	t.Helper()
	if err := os.WriteFile(d.Config, []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
}
