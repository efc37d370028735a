// Package gvisor is the default runtime: each machine is a gVisor sentry, which
// implements Linux in a userspace process of its own, without privileges,
// under seccomp. gVisor is a library here; what it re-executes is viv-sentry.
//
// A machine is a pod. Its root container is a pause program in a tiny image;
// the sandbox's image runs as a sub-container of it, with the guest as its
// init. So a pod can boot before anyone has asked for it, and a pool of them
// makes a create cost what starting the sub-container costs.
//
// The packages runsc/sandbox and runsc/boot are used below runsc/container:
// container would join the whole daemon to the pod's cgroup to start it, takes
// a file lock and rewrites a state file for every step, and spawns a gofer
// process for what the EROFS image and an upper file make unnecessary.
package gvisor

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	"gvisor.dev/gvisor/runsc/config"
	gflag "gvisor.dev/gvisor/runsc/flag"
	"gvisor.dev/gvisor/runsc/version"

	"vivarium/cgroup"
	"vivarium/runtime/gvisor/spawn"
	"vivarium/sandbox"
)

// GuestPort is where the guest listens inside.
const GuestPort = 1

// GuestPath is where the guest's image is mounted inside.
const GuestPath = "/.viv"

// Slots gives machines their place in the network.
type Slots interface {
	// Acquire takes a closed slot for owner.
	Acquire(ctx context.Context, owner string) (sandbox.Slot, error)
	Release(ctx context.Context, slot string) error
}

// Options of Open.
type Options struct {
	Dir        string // state of machines; 0700
	Sentry     string // viv-sentry; it and its parents must be executable by everyone
	Start      string // viv-start, likewise
	GuestImage string // EROFS with /viv-guest
	PauseImage string // EROFS made by PauseFiles
	Slots      Slots
	Cgroups    *cgroup.Parent
	UIDs       UIDs // that sentries run as
	PoolSize   int
	PoolClass  sandbox.Resources // size of pooled machines
	Logger     *slog.Logger
	// Fail is called before every step that could be interrupted; an error
	// makes the step fail. Tests only.
	Fail func(step string) error
}

// Runtime makes gVisor machines.
type Runtime struct {
	opts Options
	conf *config.Config
	log  *slog.Logger
	pool *pool
	uids *uids

	spawner *spawn.Spawner
	null    *os.File // standard files of the guest

	mu  sync.Mutex
	own map[string]bool // machines that this process booted; guarded by mu
}

var _ sandbox.Runtime = (*Runtime)(nil)

// maxSocketPath is what a Unix socket address holds (unix(7)), less the NUL.
const maxSocketPath = 107

// Open prepares the runtime and starts filling its pool.
func Open(opts Options) (*Runtime, error) {
	if opts.Fail == nil {
		opts.Fail = func(string) error { return nil }
	}
	for _, p := range []string{opts.Sentry, opts.Start} {
		if err := executable(p); err != nil {
			return nil, err
		}
	}
	uids, err := newUIDs(opts.UIDs)
	if err != nil {
		return nil, err
	}
	for _, d := range []string{opts.Dir, filepath.Join(opts.Dir, "m"), filepath.Join(opts.Dir, "s"), filepath.Join(opts.Dir, "empty")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, sandbox.Internal.Errorf("make state directory: %w", err)
		}
	}
	sockets := filepath.Join(opts.Dir, "s")
	if n := len(filepath.Join(sockets, "runsc-"+newID()+".sock")); n > maxSocketPath {
		return nil, sandbox.Invalid.Errorf("data directory: its path is %d bytes too long for the sockets in it", n-maxSocketPath).
			WithHint("choose a shorter --data-dir")
	}
	conf, err := newConfig(sockets, filepath.Join(opts.Dir, "m", "%ID%", "panic.log"))
	if err != nil {
		return nil, err
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, sandbox.Internal.Errorf("open %s: %w", os.DevNull, err)
	}
	r := &Runtime{opts: opts, null: null, conf: conf, uids: uids, log: opts.Logger, own: map[string]bool{}, spawner: spawn.New(opts.Sentry, opts.Start, max(2, runtime.NumCPU()), opts.Logger)}
	if err := r.holdAll(); err != nil { // before the pool starts any
		null.Close()
		return nil, err
	}
	r.pool = newPool(r, opts.PoolSize, opts.PoolClass)
	return r, nil
}

// Version of gVisor in this binary.
func Version() string { return version.Version() }

func newConfig(root, panicLog string) (*config.Config, error) {
	fs := gflag.NewFlagSet("viv", flag.ContinueOnError)
	config.RegisterFlags(fs)
	if err := fs.Parse(append(spawn.Flags(), "--root="+root, "--panic-log="+panicLog)); err != nil {
		return nil, sandbox.Internal.Errorf("set gVisor flags: %w", err)
	}
	conf, err := config.NewFromFlags(fs)
	if err != nil {
		return nil, sandbox.Internal.Errorf("configure gVisor: %w", err)
	}
	return conf, nil
}

// executable checks that the sentry, whose user owns nothing, can be started.
func executable(path string) error {
	for p := path; ; p = filepath.Dir(p) {
		fi, err := os.Stat(p)
		if err != nil {
			return sandbox.Internal.Errorf("find sentry: %w", err)
		}
		if fi.Mode().Perm()&0o001 == 0 {
			return sandbox.Invalid.Errorf("the sentry %s cannot be started by its unprivileged user: %s is not executable by everyone", path, p).
				WithHint("chmod o+x %s, or choose another --data-dir", p)
		}
		if p == "/" || p == "." {
			return nil
		}
	}
}

// Name implements sandbox.Runtime.
func (r *Runtime) Name() string { return sandbox.RuntimeGVisor }

// Features implements sandbox.Runtime.
func (r *Runtime) Features() map[string]bool {
	return map[string]bool{
		sandbox.FeatureCheckpoint: false,
		sandbox.FeatureDocker:     false,
		sandbox.FeatureHotResize:  false,
	}
}

// Ready implements sandbox.Runtime.
func (r *Runtime) Ready() int { return r.pool.ready() }

// Boot implements sandbox.Runtime.
func (r *Runtime) Boot(ctx context.Context, spec sandbox.BootSpec) (sandbox.Machine, error) {
	if m := r.pool.take(spec); m != nil {
		return m, nil
	}
	m, err := r.boot(ctx, spec.Resources, false)
	if err != nil {
		return nil, err // not m: a nil *machine is not a nil Machine
	}
	return m, nil
}

// Adopt implements sandbox.Runtime.
func (r *Runtime) Adopt(ctx context.Context, id string) (sandbox.Machine, error) {
	m, err := r.load(id)
	if m == nil {
		return nil, err
	}
	r.pool.found()
	return m, err
}

// orphansAtOnce is how many orphans are removed at a time.
const orphansAtOnce = 8

// Reconcile implements sandbox.Runtime.
func (r *Runtime) Reconcile(ctx context.Context, live func(id string) bool) error {
	ids := map[string]bool{}
	entries, err := os.ReadDir(filepath.Join(r.opts.Dir, "m"))
	if err != nil {
		return sandbox.Internal.Errorf("list machines: %w", err)
	}
	for _, e := range entries {
		ids[e.Name()] = true
	}
	groups, err := r.opts.Cgroups.List()
	if err != nil {
		return err
	}
	for _, g := range groups {
		ids[g] = true
	}
	sockets, err := os.ReadDir(filepath.Join(r.opts.Dir, "s"))
	if err != nil {
		return sandbox.Internal.Errorf("list sockets: %w", err)
	}
	for _, s := range sockets {
		id := strings.TrimSuffix(strings.TrimPrefix(s.Name(), "runsc-"), ".sock")
		ids[id] = true
	}
	// several at a time: most of it is waiting for the kernel
	var (
		mu   sync.Mutex
		errs []error
		all  errgroup.Group
	)
	all.SetLimit(orphansAtOnce)
	for id := range ids {
		if live(id) || r.owns(id) {
			continue
		}
		r.log.Info("remove orphaned machine", "machine", id)
		all.Go(func() error {
			if err := r.remove(ctx, id, ""); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, fmt.Errorf("remove orphan %s: %w", id, err))
			}
			return nil
		})
	}
	_ = all.Wait()
	return errors.Join(errs...)
}

// remove ends and removes all that a machine of this id may have.
func (r *Runtime) remove(ctx context.Context, id, slot string) error {
	g, err := r.opts.Cgroups.Load(id)
	switch {
	case err == nil:
		if err := g.Kill(ctx); err != nil {
			return err
		}
		if err := r.opts.Fail("remove.cgroup"); err != nil {
			return err
		}
		if err := g.Remove(); err != nil {
			return err
		}
	case !errors.Is(err, sandbox.NotFound):
		return err
	}
	if slot != "" {
		if err := r.opts.Fail("remove.slot"); err != nil {
			return err
		}
		if err := r.opts.Slots.Release(ctx, slot); err != nil && !errors.Is(err, sandbox.NotFound) {
			return err
		}
	}
	if err := os.Remove(filepath.Join(r.opts.Dir, "s", "runsc-"+id+".sock")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return sandbox.Internal.Errorf("remove control socket: %w", err)
	}
	if err := r.opts.Fail("remove.dir"); err != nil {
		return err
	}
	if err := os.RemoveAll(r.dir(id)); err != nil {
		return sandbox.Internal.Errorf("remove machine directory: %w", err)
	}
	r.uids.drop(id)
	r.setOwn(id, false)
	return nil
}

func (r *Runtime) owns(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.own[id]
}

func (r *Runtime) setOwn(id string, own bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if own {
		r.own[id] = true
	} else {
		delete(r.own, id)
	}
}

func (r *Runtime) dir(id string) string { return filepath.Join(r.opts.Dir, "m", id) }

// Close implements sandbox.Runtime: pooled machines are removed, running ones
// stay.
func (r *Runtime) Close() error {
	r.pool.close()
	r.spawner.Close()
	return r.null.Close()
}

// NeedsSentry says whether a machine that exists was booted by this sentry
// binary.
func (r *Runtime) NeedsSentry(path string) bool {
	entries, err := os.ReadDir(filepath.Join(r.opts.Dir, "m"))
	if err != nil {
		return true
	}
	for _, e := range entries {
		st, err := r.readState(e.Name())
		if err == nil && st.Sentry == path {
			return true
		}
	}
	return false
}
