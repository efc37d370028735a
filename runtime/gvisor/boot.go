package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/oklog/ulid/v2"

	"vivarium/cgroup"
	"vivarium/runtime/gvisor/spawn"
	"vivarium/sandbox"
)

func newID() string { return strings.ToLower(ulid.Make().String()) }

const (
	// sentryMemory is what the sentry itself may use beside what the sandbox was
	// promised: inside, MemTotal is the limit, so the host's limit is a little
	// more.
	sentryMemory = 32 << 20
	// hostThreads is how many threads the host needs per thread inside: systrap
	// has a stub thread for each and one more per process. A sandbox that
	// reaches its own limit must not make the sentry itself fail.
	hostThreads, sentryThreads = 3, 128
)

// leastWeight is the share of CPU, as thousandths of a core, that a sandbox has
// under contention if it asked for less: ten times that of a machine that boots
// for the pool.
const leastWeight, poolWeight = 20, 2

func limits(r sandbox.Resources) cgroup.Limits {
	l := cgroup.Limits{CPUWeight: max(r.CPURequest, leastWeight), CPULimit: r.CPULimit, MemoryRequest: r.MemoryRequest}
	if r.MemoryLimit > 0 {
		l.MemoryLimit = r.MemoryLimit + sentryMemory
	}
	if r.Pids > 0 {
		l.Pids = r.Pids*hostThreads + sentryThreads
	}
	return l
}

// state is what is written of a machine, so that another daemon finds it.
type state struct {
	ID      string
	Version string // of gVisor
	Sentry  string // path of its binary
	Slot    sandbox.Slot
	Pid     int
}

const stateFile, specFile = "machine.json", "config.json"

// boot starts a machine: directory, cgroup, slot, sentry, root container.
//
// One for the pool boots with a low share of CPU, which Start raises.
func (r *Runtime) boot(ctx context.Context, res sandbox.Resources, pooled bool) (_ *machine, err error) {
	id := newID()
	r.setOwn(id, true)
	m := &machine{r: r, id: id, done: make(chan struct{})}
	defer func() {
		if err != nil {
			// not ctx: what was begun must be undone even if the caller is gone
			cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), killTimeout)
			defer cancel()
			if rerr := r.remove(cctx, id, m.slot.ID); rerr != nil {
				err = errors.Join(err, rerr)
			}
		}
	}()
	if err := r.opts.Fail("boot.dir"); err != nil {
		return nil, err
	}
	if err := os.Mkdir(r.dir(id), 0o700); err != nil {
		return nil, hostError("make machine directory", err)
	}
	if err := r.opts.Fail("boot.cgroup"); err != nil {
		return nil, err
	}
	l := limits(res)
	if pooled {
		l.CPUWeight = poolWeight
	}
	if m.group, err = r.opts.Cgroups.New(id, l); err != nil {
		return nil, err
	}
	if err := r.opts.Fail("boot.slot"); err != nil {
		return nil, err
	}
	if m.slot, err = r.opts.Slots.Acquire(ctx, id); err != nil {
		return nil, err
	}
	uid, err := r.uids.take(id)
	if err != nil {
		return nil, err
	}
	spec := r.podSpec(m.slot, "vivarium", uid)
	raw, err := json.Marshal(spec)
	if err != nil {
		return nil, sandbox.Internal.Errorf("encode spec: %w", err)
	}
	if err := os.WriteFile(filepath.Join(r.dir(id), specFile), raw, 0o600); err != nil {
		return nil, hostError("write spec", err)
	}
	if err := r.opts.Fail("boot.sentry"); err != nil {
		return nil, err
	}
	if m.pid, err = r.spawner.Start(ctx, spawn.Request{
		ID: id, Bundle: r.dir(id), Sockets: filepath.Join(r.opts.Dir, "s"), PanicLog: filepath.Join(r.dir(id), "panic.log"),
		Image: r.opts.PauseImage, Cgroup: m.group.Path(), Spec: spec, UID: uid, CPULimit: res.CPULimit, MemoryLimit: res.MemoryLimit,
	}); err != nil {
		return nil, m.failure("boot", err)
	}
	if err := r.opts.Fail("boot.state"); err != nil {
		return nil, err
	}
	if err := m.save(); err != nil {
		return nil, err
	}
	if err := m.watch(); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, sandbox.Timeout.Errorf("boot: %w", ctx.Err())
	}
	return m, nil
}

func (m *machine) save() error {
	raw, err := json.Marshal(state{ID: m.id, Version: Version(), Sentry: m.r.opts.Sentry, Slot: m.slot, Pid: m.pid})
	if err != nil {
		return sandbox.Internal.Errorf("encode machine state: %w", err)
	}
	// not synced: after a power cut the process is gone as well
	file := filepath.Join(m.r.dir(m.id), stateFile)
	if err := os.WriteFile(file+".new", raw, 0o600); err != nil {
		return hostError("write machine state", err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		return hostError("write machine state", err)
	}
	return nil
}

// load finds a machine that another process booted.
func (r *Runtime) load(id string) (*machine, error) {
	if id == "" || id != filepath.Base(id) {
		return nil, sandbox.Invalid.Errorf("machine id %q", id)
	}
	st, err := r.readState(id)
	if err != nil {
		return nil, err
	}
	m := &machine{r: r, id: id, slot: st.Slot, pid: st.Pid, done: make(chan struct{}), started: true}
	if st.Version != Version() {
		m.old = st.Sentry
	}
	m.group, err = r.opts.Cgroups.Load(id)
	if errors.Is(err, sandbox.NotFound) { // the host was restarted
		close(m.done)
		return m, sandbox.Gone.Errorf("machine %s has died", id)
	}
	if err != nil {
		return nil, err
	}
	if err := m.watch(); err != nil {
		return nil, err
	}
	select {
	case <-m.done:
		return m, sandbox.Gone.Errorf("machine %s has died", id)
	default:
	}
	return m, nil
}

func (r *Runtime) readState(id string) (state, error) {
	var st state
	raw, err := os.ReadFile(filepath.Join(r.dir(id), stateFile))
	if errors.Is(err, fs.ErrNotExist) {
		return st, sandbox.NotFound.Errorf("machine %s is not known", id)
	}
	if err != nil {
		return st, hostError("read machine state", err)
	}
	if err := json.Unmarshal(raw, &st); err != nil {
		return st, sandbox.Internal.Errorf("decode machine state: %w", err)
	}
	return st, nil
}

// failure adds what the sentry said before it died.
func (m *machine) failure(what string, err error) error {
	if b := head(filepath.Join(m.r.dir(m.id), "panic.log"), 2000); len(b) > 0 {
		return sandbox.Internal.Errorf("%s: %w; the sentry said: %s", what, err, b)
	}
	if sandbox.KindOf(err) == sandbox.Timeout {
		return sandbox.Timeout.Errorf("%s: %w", what, err)
	}
	if s, serr := m.group.Stats(); serr == nil && s.OOMKills > 0 {
		return sandbox.Exhausted.Errorf("%s: %w: out of memory", what, err).WithHint("raise the memory limit")
	}
	return sandbox.Internal.Errorf("%s: %w", what, err)
}

// head is how a file begins: the sentry writes it, and may be anybody's by then.
func head(name string, n int64) []byte {
	f, err := os.Open(name)
	if err != nil {
		return nil
	}
	defer f.Close()
	b, _ := io.ReadAll(io.LimitReader(f, n))
	return b
}

// hostError gives a failure of the host's file system its kind.
func hostError(what string, err error) error {
	if isFull(err) {
		return sandbox.Exhausted.Errorf("%s: %w", what, err).WithHint("free disk space below the data directory")
	}
	return sandbox.Internal.Errorf("%s: %w", what, err)
}
