// Package engine is the life of sandboxes on one node: stages, deadlines,
// capacity, execs and their output, recovery. It is the one place that decides;
// front doors ask it, runtimes, network and images serve it.
package engine

import (
	"context"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"vivarium/image"
	"vivarium/network"
	"vivarium/sandbox"
	"vivarium/secret"
	"vivarium/store"
)

// Deadlines of the stages.
type Deadlines struct{ Queue, Image, Boot, Network, Guest, Ready, Stop time.Duration }

// Limits of the node. 0 is no limit, except where said.
type Limits struct {
	MaxTimeout   time.Duration
	MaxSandboxes int
	MaxPerTenant int
	MaxPids      int64
	MaxDisk      int64
	MaxExecs     int // running at once in one sandbox
	Queue        int // creates that wait for room
	// What all sandboxes together may be promised, and one may have at most.
	// Required.
	CPU    int64 // thousandths of a core
	Memory int64 // bytes
	// HostCPU is what the host has, in thousandths of a core: a limit above it
	// would promise what cannot be.
	HostCPU int64
	// ReserveDisk is what must be free below Dir for a create.
	ReserveDisk int64
}

// Options of Open.
type Options struct {
	Dir     string // spools live in Dir/spool
	Store   *store.Store
	Images  *image.Store
	Network *network.Network
	Secrets *secret.Vault // nil: none are kept
	Tunnels Tunnels       // nil: none can be opened
	// Furnish is what every sandbox with a network gets; nil: nothing.
	Furnish   func() Furnish
	Runtimes  []sandbox.Runtime
	Defaults  sandbox.Spec // resources, timeouts, runtime and network of specs that leave them out
	Limits    Limits
	Deadlines Deadlines
	// SpoolExec bounds what is kept of each output of an exec, SpoolSandbox
	// what is kept of a sandbox's ended execs together; bytes.
	SpoolExec, SpoolSandbox int64
	// RetainEnded is how long a death certificate is kept, RetainEvents how long
	// an event is.
	RetainEnded, RetainEvents time.Duration
	Version                   string
	GVisorVersion             string
	BootID                    string // of the host: tells its restart from the daemon's
	Logger                    *slog.Logger
	// Fail is called before each step that a crash could interrupt; an error
	// makes the step fail. Tests only.
	Fail func(step string) error
}

// Engine runs the sandboxes of one node.
type Engine struct {
	opts     Options
	log      *slog.Logger
	store    *store.Store
	runtimes map[string]sandbox.Runtime
	room     *room
	events   *events
	started  time.Time
	ctx      context.Context // ends when the engine is closed
	cancel   context.CancelFunc
	wg       sync.WaitGroup

	mu      sync.Mutex
	boxes   map[string]*box   // living, by id; guarded by mu
	slots   map[string]*box   // living, by network slot; guarded by mu
	names   map[string]string // tenant/name of the living to id; guarded by mu
	tenants map[string]int    // how many are alive; guarded by mu
	keys    map[string]*creation
}

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
	// Removed is, with Ended, also those that were removed: of them their death
	// certificate is left.
	Removed bool
	Limit   int
	After   string // id
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

// Open takes up the sandboxes of an earlier daemon, removes what nobody owns,
// and starts the engine.
func Open(ctx context.Context, opts Options) (*Engine, error) {
	if opts.Fail == nil {
		opts.Fail = func(string) error { return nil }
	}
	last, err := opts.Store.LastEvent(ctx)
	if err != nil {
		return nil, err
	}
	e := &Engine{
		opts: opts, log: opts.Logger, store: opts.Store,
		runtimes: map[string]sandbox.Runtime{},
		room:     newRoom(opts.Limits),
		events:   newEvents(opts.Store, opts.Logger, last),
		started:  time.Now(),
		boxes:    map[string]*box{}, slots: map[string]*box{}, names: map[string]string{}, tenants: map[string]int{}, keys: map[string]*creation{},
	}
	for _, r := range opts.Runtimes {
		e.runtimes[r.Name()] = r
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	if err := e.recover(ctx); err != nil {
		e.cancel()
		return nil, err
	}
	e.wg.Go(e.sweep)
	e.wg.Go(e.guardDisk)
	return e, nil
}

// Close stops deciding. Running sandboxes go on; those half-made are finished
// off when the next engine finds them.
func (e *Engine) Close() error {
	e.cancel()
	e.mu.Lock()
	boxes := slices.Collect(maps.Values(e.boxes))
	e.mu.Unlock()
	for _, b := range boxes {
		b.detach()
	}
	e.wg.Wait()
	return nil
}

// Info says what the node is and has.
func (e *Engine) Info() Info {
	e.mu.Lock()
	n := len(e.boxes)
	e.mu.Unlock()
	i := Info{Version: e.opts.Version, GVisorVersion: e.opts.GVisorVersion, Alive: n, Started: e.started}
	for _, name := range []string{sandbox.RuntimeGVisor, sandbox.RuntimeVM} {
		r, ok := e.runtimes[name]
		if !ok {
			i.Runtimes = append(i.Runtimes, RuntimeInfo{Name: name, Reason: "not part of this version"})
			continue
		}
		i.PoolReady += r.Ready()
		i.Runtimes = append(i.Runtimes, RuntimeInfo{Name: name, Available: true, Features: r.Features()})
	}
	return i
}

// ImageInUse says whether a living sandbox needs an image.
func (e *Engine) ImageInUse(id string) bool {
	e.mu.Lock()
	boxes := slices.Collect(maps.Values(e.boxes))
	e.mu.Unlock()
	for _, b := range boxes {
		if b.record().ImageID == id {
			return true
		}
	}
	return false
}

func (e *Engine) spoolDir(sandboxID string) string {
	return filepath.Join(e.opts.Dir, "spool", sandboxID)
}
