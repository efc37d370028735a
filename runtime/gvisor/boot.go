package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/oklog/ulid/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	gcgroup "gvisor.dev/gvisor/runsc/cgroup"
	gsandbox "gvisor.dev/gvisor/runsc/sandbox"
	"gvisor.dev/gvisor/runsc/specutils"

	"vivarium/cgroup"
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

const stateFile = "machine.json"

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
	spec := r.podSpec(m.slot, "vivarium")
	raw, err := json.Marshal(spec)
	if err != nil {
		return nil, sandbox.Internal.Errorf("encode spec: %w", err)
	}
	if err := os.WriteFile(filepath.Join(r.dir(id), "config.json"), raw, 0o600); err != nil {
		return nil, hostError("write spec", err)
	}
	// one at a time: gVisor makes descriptors that whatever is started meanwhile
	// inherits, and a sentry must have none but its own (F1)
	select {
	case r.booting <- struct{}{}:
		defer func() { <-r.booting }()
	case <-ctx.Done():
		return nil, sandbox.Timeout.Errorf("boot: %w", ctx.Err())
	}
	if err := r.opts.Fail("boot.sentry"); err != nil {
		return nil, err
	}
	sb, err := m.spawn(spec, res)
	if err != nil {
		return nil, err
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
	if err := r.opts.Fail("boot.root"); err != nil {
		return nil, err
	}
	if err := bounded(ctx, func() error { return sb.StartRoot(r.conf, spec) }); err != nil {
		return nil, m.failure("start root container", err)
	}
	if ctx.Err() != nil {
		return nil, sandbox.Timeout.Errorf("boot: %w", ctx.Err())
	}
	return m, nil
}

// spawn starts the sentry in the machine's cgroup.
func (m *machine) spawn(spec *specs.Spec, res sandbox.Resources) (sb *gsandbox.Sandbox, err error) {
	r := m.r
	image, err := os.Open(r.opts.PauseImage)
	if err != nil {
		return nil, sandbox.Internal.Errorf("open pause image: %w", err)
	}
	// gVisor leaves its packet sockets of earlier machines open, until they are
	// collected, and without close-on-exec: it expects its process to end
	if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		image.Close()
		return nil, sandbox.Unsupported.Errorf("mark descriptors close-on-exec: %w", err).WithHint("Linux 5.11 or newer is needed")
	}
	err = m.group.Spawn(func(dir *os.File) (int, error) {
		sb, err = gsandbox.New(r.conf, &gsandbox.Args{
			ID:                m.id,
			Spec:              spec,
			BundleDir:         r.dir(m.id),
			IOFiles:           []*os.File{image}, // closed by New
			GoferMountConfs:   specutils.GoferMountConfFlags{{Lower: specutils.Erofs, Upper: specutils.NoOverlay}},
			Cgroup:            sizes{res},
			CloneIntoCgroupFD: dir,
		})
		if err != nil {
			return 0, m.failure("start sentry", err)
		}
		m.pid = sb.Getpid()
		return m.pid, nil
	})
	if err != nil && m.pid != 0 { // our child, so the pid is still its own
		_ = unix.Kill(m.pid, unix.SIGKILL)
		_, _ = unix.Wait4(m.pid, nil, 0, nil)
	}
	return sb, err
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
	if b, rerr := os.ReadFile(filepath.Join(m.r.dir(m.id), "panic.log")); rerr == nil && len(b) > 0 {
		const most = 2000
		return sandbox.Internal.Errorf("%s: %w; the sentry said: %s", what, err, b[:min(len(b), most)])
	}
	if sandbox.KindOf(err) == sandbox.Timeout {
		return sandbox.Timeout.Errorf("%s: %w", what, err)
	}
	if s, serr := m.group.Stats(); serr == nil && s.OOMKills > 0 {
		return sandbox.Exhausted.Errorf("%s: %w: out of memory", what, err).WithHint("raise the memory limit")
	}
	return sandbox.Internal.Errorf("%s: %w", what, err)
}

// bounded runs fn, which cannot be interrupted, and stops waiting when ctx
// ends. The caller then kills what fn waits for, which ends fn.
func bounded(ctx context.Context, fn func() error) error {
	done := make(chan error, 1)
	go func() { done <- fn() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return sandbox.Timeout.Errorf("no answer: %w", ctx.Err())
	}
}

// hostError gives a failure of the host's file system its kind.
func hostError(what string, err error) error {
	if isFull(err) {
		return sandbox.Exhausted.Errorf("%s: %w", what, err).WithHint("free disk space below the data directory")
	}
	return sandbox.Internal.Errorf("%s: %w", what, err)
}

// sizes tells gVisor how big the machine is; the group itself is ours.
type sizes struct{ r sandbox.Resources }

var _ gcgroup.Cgroup = sizes{}

func (s sizes) Install(*specs.LinuxResources) error { return nil }
func (s sizes) Update(*specs.LinuxResources) error  { return nil }
func (s sizes) Uninstall() error                    { return nil }
func (s sizes) Join() (func(), error)               { return func() {}, nil }
func (s sizes) CloneIntoCgroup() (*os.File, error)  { return nil, errors.ErrUnsupported }
func (s sizes) CPUQuota() (int64, error) {
	if s.r.CPULimit == 0 {
		return -1, nil
	}
	return s.r.CPULimit * 100, nil // of a period of 100,000 us
}
func (s sizes) CPUPeriod() (int64, error)    { return 100_000, nil }
func (s sizes) CPUUsage() (uint64, error)    { return 0, nil }
func (s sizes) NumCPU() (int, error)         { return runtime.NumCPU(), nil }
func (s sizes) MemoryLimit() (uint64, error) { return uint64(s.r.MemoryLimit), nil }
func (s sizes) MakePath(string) string       { return "" }
