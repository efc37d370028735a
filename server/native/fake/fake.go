// Package fake is an engine for tests of the front door and of the command
// line. Its sandboxes are directories of the test, and its execs are processes
// of the test's own machine: it isolates nothing.
package fake

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"vivarium/engine"
	"vivarium/sandbox"
)

// Engine is a native.Engine. Make it with New.
type Engine struct {
	dir string

	mu     sync.Mutex
	cond   *sync.Cond
	seq    int
	boxes  map[string]*box // by id
	events []sandbox.Event
	keys   map[string]string // idempotency key to id

	// Hold keeps sandboxes in stage queued until it is closed; nil is not.
	Hold chan struct{}
	// Download replaces the archive of every download.
	Download func() []byte
	// Err is returned by Get, for tests of errors.
	Err error
}

type box struct {
	rec   sandbox.Sandbox
	execs map[string]*process
	order []string
}

// tempDir is t.TempDir for calls that may outlive the server by a moment: what
// they were writing is removed all the same.
func tempDir(t testing.TB) string {
	dir, err := os.MkdirTemp("", "fake")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for range 100 {
			if err = os.RemoveAll(dir); err == nil {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
		t.Error(err)
	})
	return dir
}

// New returns an engine whose sandboxes end with the test.
func New(t testing.TB) *Engine {
	e := &Engine{dir: tempDir(t), boxes: map[string]*box{}, keys: map[string]string{}}
	e.cond = sync.NewCond(&e.mu)
	t.Cleanup(func() {
		e.mu.Lock()
		var all []*process
		for _, b := range e.boxes {
			for _, p := range b.execs {
				all = append(all, p)
			}
		}
		e.mu.Unlock()
		for _, p := range all {
			p.kill()
			<-p.done
		}
	})
	return e
}

// wait waits until ok is true; the caller holds mu.
func (e *Engine) wait(ctx context.Context, ok func() bool) error {
	stop := context.AfterFunc(ctx, func() {
		e.mu.Lock()
		e.cond.Broadcast()
		e.mu.Unlock()
	})
	defer stop()
	for !ok() {
		if err := ctx.Err(); err != nil {
			return err
		}
		e.cond.Wait()
	}
	return nil
}

func (e *Engine) event(b *box, kind, msg string) {
	e.events = append(e.events, sandbox.Event{
		Seq: int64(len(e.events) + 1), Time: time.Now(), Tenant: b.rec.Tenant, SandboxID: b.rec.ID, Kind: kind, Message: msg,
	})
	e.cond.Broadcast()
}

func (e *Engine) find(tenant, ref string) (*box, error) {
	for _, b := range e.boxes {
		if b.rec.Tenant == tenant && (b.rec.ID == ref || b.rec.Spec.Name == ref && b.rec.Stage.Alive()) {
			return b, nil
		}
	}
	return nil, sandbox.NotFound.Errorf("no sandbox %q", ref)
}

// Create makes a sandbox. An image called "missing" does not exist.
func (e *Engine) Create(_ context.Context, tenant string, spec sandbox.Spec, o engine.CreateOptions) (sandbox.Sandbox, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if id, ok := e.keys[tenant+"/"+o.IdempotencyKey]; ok && o.IdempotencyKey != "" {
		return e.boxes[id].rec, nil
	}
	if spec.Image == "missing" {
		return sandbox.Sandbox{}, sandbox.NotFound.Errorf("no image %q", spec.Image).WithHint("pull it")
	}
	if spec.Name != "" {
		if _, err := e.find(tenant, spec.Name); err == nil {
			return sandbox.Sandbox{}, sandbox.Exists.Errorf("the name %q is taken", spec.Name)
		}
	}
	e.seq++
	b := &box{execs: map[string]*process{}, rec: sandbox.Sandbox{
		ID: fmt.Sprintf("sb-%04d", e.seq), Tenant: tenant, Spec: spec, Stage: sandbox.StageQueued, Created: time.Now(),
		Deadline: time.Now().Add(5 * time.Minute),
	}}
	e.boxes[b.rec.ID] = b
	e.keys[tenant+"/"+o.IdempotencyKey] = b.rec.ID
	e.event(b, "sandbox.created", "")
	rec := b.rec
	go e.live(b)
	return rec, nil
}

// live takes a sandbox through its life.
func (e *Engine) live(b *box) {
	if e.Hold != nil {
		<-e.Hold
	}
	e.mu.Lock()
	if !b.rec.Stage.Alive() {
		e.mu.Unlock()
		return
	}
	spec := b.rec.Spec
	id := b.rec.ID
	e.mu.Unlock()
	argv := append(slices.Clone(spec.Entrypoint), spec.Command...)
	var p *process
	if len(argv) > 0 {
		es := sandbox.ExecSpec{Argv: argv, Env: spec.Env, Workdir: spec.Workdir, PTY: spec.PTY}
		if spec.Stdin {
			es.Stdin = sandbox.StdinPipe
		}
		p = e.spawn(id, sandbox.MainExec, es)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if p != nil {
		b.execs[sandbox.MainExec] = p
		b.order = append(b.order, sandbox.MainExec)
		go func() {
			<-p.done
			exit := p.status()
			e.end(b, sandbox.ReasonExited, &exit)
		}()
	}
	b.rec.Stage, b.rec.Started, b.rec.IsReady = sandbox.StageRunning, time.Now(), true
	e.event(b, "sandbox.stage", "running")
}

func (e *Engine) end(b *box, reason sandbox.Reason, exit *sandbox.ExitStatus) {
	e.mu.Lock()
	if !b.rec.Stage.Alive() {
		e.mu.Unlock()
		return
	}
	d := &sandbox.Death{Reason: reason, Stage: b.rec.Stage, Exit: exit, Created: b.rec.Created, Started: b.rec.Started, Ended: time.Now()}
	b.rec.Stage, b.rec.Death = sandbox.StageEnded, d
	e.event(b, "sandbox.ended", string(reason))
	var left []*process
	for _, p := range b.execs {
		left = append(left, p)
	}
	e.mu.Unlock()
	for _, p := range left {
		p.kill()
	}
}

// End ends a sandbox as the host would, for a reason.
func (e *Engine) End(id string, d sandbox.Death) {
	e.mu.Lock()
	b := e.boxes[id]
	b.rec.Stage, b.rec.Death = sandbox.StageEnded, &d
	var left []*process
	for _, p := range b.execs {
		p.lose()
		left = append(left, p)
	}
	e.event(b, "sandbox.ended", string(d.Reason))
	e.mu.Unlock()
	for _, p := range left {
		p.kill()
	}
}

// Boxes are the sandboxes there are.
func (e *Engine) Boxes() []sandbox.Sandbox {
	e.mu.Lock()
	defer e.mu.Unlock()
	var out []sandbox.Sandbox
	for _, id := range slices.Sorted(maps.Keys(e.boxes)) {
		out = append(out, e.boxes[id].rec)
	}
	return out
}

// Get implements native.Engine.
func (e *Engine) Get(_ context.Context, tenant, ref string) (sandbox.Sandbox, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.Err != nil {
		return sandbox.Sandbox{}, e.Err
	}
	b, err := e.find(tenant, ref)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	return b.rec, nil
}

// List implements native.Engine.
func (e *Engine) List(_ context.Context, tenant string, f engine.Filter) ([]sandbox.Sandbox, error) {
	var out []sandbox.Sandbox
	for _, rec := range e.Boxes() {
		ok := rec.Tenant == tenant && (f.Name == "" || rec.Spec.Name == f.Name) && (f.Ended || rec.Stage.Alive()) &&
			(len(f.Stages) == 0 || slices.Contains(f.Stages, rec.Stage)) && rec.ID > f.After
		for k, v := range f.Tags {
			ok = ok && rec.Spec.Tags[k] == v
		}
		if ok && len(out) < f.Limit {
			out = append(out, rec)
		}
	}
	return out, nil
}

// Wait implements native.Engine.
func (e *Engine) Wait(ctx context.Context, tenant, ref string, until engine.Until) (sandbox.Sandbox, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	b, err := e.find(tenant, ref)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	err = e.wait(ctx, func() bool {
		return b.rec.Stage == sandbox.StageEnded || until != engine.UntilEnded && b.rec.Stage == sandbox.StageRunning
	})
	if err == nil && until != engine.UntilEnded && b.rec.Started.IsZero() {
		err = sandbox.Gone.Errorf("the sandbox ended before it ran")
	}
	return b.rec, err
}

// Stop implements native.Engine.
func (e *Engine) Stop(_ context.Context, tenant, ref string, _ time.Duration) (sandbox.Sandbox, error) {
	e.mu.Lock()
	b, err := e.find(tenant, ref)
	e.mu.Unlock()
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	e.end(b, sandbox.ReasonStopped, nil)
	e.mu.Lock()
	defer e.mu.Unlock()
	return b.rec, nil
}

// Remove implements native.Engine.
func (e *Engine) Remove(_ context.Context, tenant, ref string, force bool) error {
	e.mu.Lock()
	b, err := e.find(tenant, ref)
	if err == nil && b.rec.Stage.Alive() && !force {
		err = sandbox.Conflict.Errorf("sandbox %s still runs", ref).WithHint("stop it first, or use force")
	}
	e.mu.Unlock()
	if err != nil {
		return err
	}
	e.end(b, sandbox.ReasonKilled, nil)
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.boxes, b.rec.ID)
	e.event(b, "sandbox.removed", "")
	return nil
}

// Extend implements native.Engine.
func (e *Engine) Extend(_ context.Context, tenant, ref string, d time.Duration) (sandbox.Sandbox, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	b, err := e.find(tenant, ref)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	b.rec.Deadline = time.Now().Add(d)
	return b.rec, nil
}

// SetTags implements native.Engine.
func (e *Engine) SetTags(_ context.Context, tenant, ref string, tags map[string]string) (sandbox.Sandbox, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	b, err := e.find(tenant, ref)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	b.rec.Spec.Tags = tags
	return b.rec, nil
}

// Usage implements native.Engine.
func (e *Engine) Usage(context.Context, string, string) (sandbox.Usage, error) {
	return sandbox.Usage{Memory: 1 << 20, CPU: time.Second}, nil
}

// Events implements native.Engine.
func (e *Engine) Events(ctx context.Context, tenant, ref string, after int64, follow bool, fn func(sandbox.Event) error) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	id := ""
	if ref != "" {
		b, err := e.find(tenant, ref)
		if err != nil {
			return err
		}
		id = b.rec.ID
	}
	next := max(int(after), 0)
	if after == 0 {
		next = len(e.events)
	}
	for {
		for ; next < len(e.events); next++ {
			ev := e.events[next]
			if ev.Tenant != tenant || id != "" && ev.SandboxID != id {
				continue
			}
			e.mu.Unlock()
			err := fn(ev)
			e.mu.Lock()
			if err != nil {
				return err
			}
		}
		if !follow {
			return nil
		}
		if err := e.wait(ctx, func() bool { return next < len(e.events) }); err != nil {
			return err
		}
	}
}

// Dial implements native.Engine: port 7 echoes, others take no connections.
func (e *Engine) Dial(_ context.Context, tenant, ref string, port uint16) (net.Conn, error) {
	e.mu.Lock()
	_, err := e.find(tenant, ref)
	e.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if port != 7 {
		return nil, sandbox.Unavailable.Errorf("connect to port %d: connection refused", port)
	}
	return echo()
}

// Info implements native.Engine.
func (e *Engine) Info() engine.Info {
	return engine.Info{Version: "fake", GVisorVersion: "none", Alive: len(e.Boxes()), PoolReady: 3, Started: time.Now()}
}
