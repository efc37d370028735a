// Package engine is the life of sandboxes on one node: stages, deadlines,
// capacity, execs and their output, recovery. It is the one place that decides;
// front doors ask it, runtimes, network and images serve it.
package engine

import (
	"context"
	"net"
	"time"

	"vivarium/sandbox"
)

// Engine runs the sandboxes of one node.
type Engine struct{}

// CreateOptions are what a create carries besides the spec.
type CreateOptions struct {
	// IdempotencyKey: a second create of the tenant with the same key gives the
	// sandbox of the first.
	IdempotencyKey string
}

// Filter selects sandboxes. Empty fields select all.
type Filter struct {
	Name   string
	Tags   map[string]string
	Stages []sandbox.Stage
	Ended  bool // also those that ended
	Limit  int
	After  string // id
}

// Until says what Wait waits for.
type Until string

const (
	UntilEnded   Until = "ended"
	UntilRunning Until = "running" // its main command was started; it may not be ready
	UntilReady   Until = "ready"   // its probe has passed
)

// Offsets into the outputs of an exec; -1 leaves a stream out.
type Offsets struct{ Stdout, Stderr int64 }

// Output is one piece of an exec's output. Data is valid until the callback
// that got it returns.
type Output struct {
	Stream  sandbox.Stream
	Offset  int64 // of the first byte of Data
	Data    []byte
	Dropped bool // bytes before Offset are gone from the bounded spool
}

// Info is what the node says of itself.
type Info struct {
	Version, GVisorVersion string
	Alive, PoolReady       int
	Started                time.Time
	Runtimes               []RuntimeInfo
}

// RuntimeInfo tells whether a runtime works here and what it can do.
type RuntimeInfo struct {
	Name      string
	Available bool
	Reason    string
	Features  map[string]bool
}

var todo = sandbox.Unsupported.Errorf("not built yet")

// Create records a sandbox and starts its life. It returns at once with the
// sandbox in stage queued; use Wait to follow it.
func (e *Engine) Create(ctx context.Context, tenant string, spec sandbox.Spec, opts CreateOptions) (sandbox.Sandbox, error) {
	return sandbox.Sandbox{}, todo
}

// Get finds a sandbox by id, or a living one by name.
func (e *Engine) Get(ctx context.Context, tenant, ref string) (sandbox.Sandbox, error) {
	return sandbox.Sandbox{}, todo
}

func (e *Engine) List(ctx context.Context, tenant string, f Filter) ([]sandbox.Sandbox, error) {
	return nil, todo
}

// Wait returns when the sandbox has got that far; Gone or the error of its
// death certificate if it ends before that; Timeout when ctx ends.
func (e *Engine) Wait(ctx context.Context, tenant, ref string, until Until) (sandbox.Sandbox, error) {
	return sandbox.Sandbox{}, todo
}

// Stop ends a sandbox: SIGTERM to its main command, SIGKILL to everything after
// grace. It returns when it has ended. Idempotent.
func (e *Engine) Stop(ctx context.Context, tenant, ref string, grace time.Duration) (sandbox.Sandbox, error) {
	return sandbox.Sandbox{}, todo
}

// Remove forgets a sandbox that ended; with force it is killed first.
func (e *Engine) Remove(ctx context.Context, tenant, ref string, force bool) error { return todo }

// Extend sets the sandbox's deadline to timeout from now.
func (e *Engine) Extend(ctx context.Context, tenant, ref string, timeout time.Duration) (sandbox.Sandbox, error) {
	return sandbox.Sandbox{}, todo
}

func (e *Engine) SetTags(ctx context.Context, tenant, ref string, tags map[string]string) (sandbox.Sandbox, error) {
	return sandbox.Sandbox{}, todo
}

func (e *Engine) Usage(ctx context.Context, tenant, ref string) (sandbox.Usage, error) {
	return sandbox.Usage{}, todo
}

// Events calls fn with the tenant's events after seq (-1: from the oldest
// kept, 0: from now on), of one sandbox or all, in order.
func (e *Engine) Events(ctx context.Context, tenant, ref string, after int64, follow bool, fn func(sandbox.Event) error) error {
	return todo
}

// StartExec starts a command. The same id again gives the same exec; an empty
// id is chosen.
func (e *Engine) StartExec(ctx context.Context, tenant, ref, id string, spec sandbox.ExecSpec) (sandbox.Exec, error) {
	return sandbox.Exec{}, todo
}

func (e *Engine) GetExec(ctx context.Context, tenant, ref, id string) (sandbox.Exec, error) {
	return sandbox.Exec{}, todo
}

func (e *Engine) ListExecs(ctx context.Context, tenant, ref string) ([]sandbox.Exec, error) {
	return nil, todo
}

// WaitExec returns when the exec has exited or is lost.
func (e *Engine) WaitExec(ctx context.Context, tenant, ref, id string) (sandbox.Exec, error) {
	return sandbox.Exec{}, todo
}

// Output calls fn with the output of an exec from the given offsets: with
// follow until the exec has ended and all was delivered, else with what there
// is. It returns the exec as it then stands.
func (e *Engine) Output(ctx context.Context, tenant, ref, id string, from Offsets, follow bool, fn func(Output) error) (sandbox.Exec, error) {
	return sandbox.Exec{}, todo
}

// WriteStdin gives bytes to an exec's standard input. Offset is that of the
// first byte; what was taken before is skipped. It returns how many bytes were
// taken in all, when they were taken.
func (e *Engine) WriteStdin(ctx context.Context, tenant, ref, id string, offset int64, p []byte, eof bool) (int64, error) {
	return 0, todo
}

func (e *Engine) SignalExec(ctx context.Context, tenant, ref, id string, signal int) error {
	return todo
}

func (e *Engine) ResizeExec(ctx context.Context, tenant, ref, id string, size sandbox.WindowSize) error {
	return todo
}

// Files of a running sandbox. Every use counts as activity.
func (e *Engine) Files(ctx context.Context, tenant, ref string) (sandbox.Files, error) {
	return nil, todo
}

// Dial connects to a TCP port inside.
func (e *Engine) Dial(ctx context.Context, tenant, ref string, port uint16) (net.Conn, error) {
	return nil, todo
}

func (e *Engine) Info() Info { return Info{} }
