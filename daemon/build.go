package daemon

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"

	"vivarium/assets"
	"vivarium/cgroup"
	"vivarium/config"
	"vivarium/engine"
	"vivarium/image"
	"vivarium/network"
	"vivarium/network/setup"
	"vivarium/runtime/gvisor"
	"vivarium/sandbox"
	"vivarium/secret"
	"vivarium/server/native"
	"vivarium/store"
	"vivarium/version"
)

// build makes the parts that a node consists of, from the store up.
func build(ctx context.Context, cfg *config.Config, log *slog.Logger) (_ *parts, err error) {
	var closers []func() error
	closeAll := func() error {
		var errs []error
		for i := len(closers) - 1; i >= 0; i-- {
			errs = append(errs, closers[i]())
		}
		return errors.Join(errs...)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, closeAll())
		}
	}()
	host, err := readHost()
	if err != nil {
		return nil, err
	}
	fail := failpoint(log)
	programs, err := assets.Install(filepath.Join(cfg.DataDir, "bin"))
	if err != nil {
		return nil, err
	}
	st, err := store.Open(ctx, cfg.DataDir)
	if err != nil {
		return nil, err
	}
	closers = append(closers, st.Close)
	opts, err := setup.Options(cfg)
	if err != nil {
		return nil, err
	}
	opts.Logger = log
	var running atomic.Pointer[engine.Engine] // once it is there
	opts.OnFlows = func(slot string, ds []network.FlowDelta) {
		if e := running.Load(); e != nil {
			e.Flowed(slot, ds)
		}
	}
	fetch, err := newFetch(opts.Node)
	if err != nil {
		return nil, err
	}
	if cfg.Cache.Enabled {
		opts.Local = append(opts.Local, network.LocalService{Name: cacheService, Port: cachePort})
	}
	images, err := image.Open(ctx, image.Options{
		Dir: filepath.Join(cfg.DataDir, "images"), DiskBudget: int64(cfg.Images.DiskBudget), Reserve: int64(cfg.Reserve.Disk), Mirrors: cfg.Images.Mirrors, Insecure: cfg.Images.Insecure,
		Credentials: credentials, Fetch: fetch.forImages(cfg),
		Limits: image.Limits{LayerBytes: int64(cfg.Images.MaxLayerBytes), Entries: cfg.Images.MaxEntries},
	})
	if err != nil {
		return nil, err
	}
	closers = append(closers, images.Close)
	nw, err := network.Open(ctx, opts)
	if err != nil {
		return nil, err
	}
	// the network goes with the last sandbox: nothing of it is left on the host
	// once neither they nor the daemon need it. A start that fails before it knows
	// which sandboxes run must not take it from them.
	var eng *engine.Engine
	before, err := st.Alive(ctx)
	if err != nil {
		nw.Close()
		return nil, err
	}
	needed := func() bool {
		if eng == nil {
			return len(before) > 0
		}
		return eng.Info().Alive > 0
	}
	closers = append(closers, func() error {
		if needed() {
			nw.Close()
			return nil
		}
		return nw.Destroy(context.WithoutCancel(ctx))
	})
	live, err := engine.LiveSlots(ctx, st)
	if err != nil {
		return nil, err
	}
	lost, err := nw.Reconcile(ctx, live)
	if err != nil {
		return nil, err
	}
	for _, slot := range lost {
		log.Warn("a sandbox has lost its network", "slot", slot)
	}
	cpu, memory := host.cpu-int64(cfg.Reserve.CPU), host.memory-int64(cfg.Reserve.Memory)
	if cpu <= 0 || memory <= 0 {
		return nil, sandbox.Invalid.Errorf("reserve: the host has %d milli-cores and %d MiB, of which nothing is left to sandboxes", host.cpu, host.memory>>20).
			WithHint("lower reserve.cpu or reserve.memory")
	}
	group, err := cgroup.OpenParent(cfg.CgroupParent+"-"+opts.Instance, cgroup.Limits{MemoryLimit: memory})
	if err != nil {
		return nil, err
	}
	closers = append(closers, func() error {
		if needed() {
			return nil
		}
		return group.Remove()
	})
	defaults := sandbox.Resources{
		CPURequest: int64(cfg.Defaults.CPURequest), CPULimit: int64(cfg.Defaults.CPULimit),
		MemoryRequest: int64(cfg.Defaults.MemoryRequest), MemoryLimit: int64(cfg.Defaults.MemoryLimit),
		Disk: int64(cfg.Defaults.Disk), Pids: int64(cfg.Defaults.Pids),
	}
	rt, err := gvisor.Open(gvisor.Options{
		Dir: filepath.Join(cfg.DataDir, "gv"), Sentry: programs.Sentry, Start: programs.Start, GuestImage: programs.GuestImage, PauseImage: programs.PauseImage,
		Slots: slots{nw}, Cgroups: group, UIDs: gvisor.UIDs{First: cfg.UIDs.First, Count: cfg.UIDs.Count}, PoolSize: cfg.Pool.Size, PoolClass: defaults, Logger: log, Fail: fail,
	})
	if err != nil {
		return nil, err
	}
	closers = append(closers, rt.Close)
	var furnish func() engine.Furnish
	if cfg.Cache.Enabled {
		packages, err := openCache(cfg, nw, fetch, &running, log)
		if err != nil {
			return nil, err
		}
		closers = append(closers, packages.Close)
		furnish = furnishing(packages, nw.LocalAddr())
	}
	vault, err := secret.Open(ctx, cfg.DataDir, st)
	if err != nil {
		return nil, err
	}
	tunnels, err := newTunnels(cfg, st, log)
	if err != nil {
		return nil, err
	}
	eng, err = engine.Open(ctx, engine.Options{
		Dir: cfg.DataDir, Store: st, Images: images, Network: nw, Secrets: vault, Tunnels: tunnels, Furnish: furnish, Runtimes: []sandbox.Runtime{rt},
		Defaults: sandbox.Spec{
			Runtime: cfg.Defaults.Runtime, Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkMode(cfg.Defaults.Network)}, Resources: defaults,
			Timeout: time.Duration(cfg.Defaults.Timeout), IdleTimeout: time.Duration(cfg.Defaults.IdleTimeout),
		},
		Limits: engine.Limits{
			MaxTimeout: time.Duration(cfg.Limits.MaxTimeout), MaxSandboxes: cfg.Limits.MaxSandboxes, MaxPerTenant: cfg.Limits.MaxPerTenant,
			MaxPids: int64(cfg.Limits.MaxPids), MaxDisk: int64(cfg.Limits.MaxDisk), MaxExecs: cfg.Limits.MaxExecs, Queue: cfg.Limits.Queue,
			CPU: least(cpu, int64(cfg.Limits.MaxCPU)), Memory: least(memory, int64(cfg.Limits.MaxMemory)), HostCPU: host.cpu, ReserveDisk: int64(cfg.Reserve.Disk),
		},
		Deadlines: engine.Deadlines{
			Queue: time.Duration(cfg.Deadlines.Queue), Image: time.Duration(cfg.Deadlines.Image), Boot: time.Duration(cfg.Deadlines.Boot),
			Network: time.Duration(cfg.Deadlines.Network), Guest: time.Duration(cfg.Deadlines.Guest), Ready: time.Duration(cfg.Deadlines.Ready),
			Stop: time.Duration(cfg.Deadlines.Stop),
		},
		SpoolExec: int64(cfg.Spool.PerExec), SpoolSandbox: int64(cfg.Spool.PerSandbox),
		RetainEnded: time.Duration(cfg.Retention.Ended), RetainEvents: time.Duration(cfg.Retention.Events),
		Version: version.Version(), GVisorVersion: version.GVisor(), BootID: host.bootID, Logger: log, Fail: fail,
	})
	if err != nil {
		return nil, err
	}
	closers = append(closers, eng.Close)
	running.Store(eng)
	closers = append(closers, tunnels.Close) // before the engine, which they lead to
	if err := tunnels.Start(ctx, eng); err != nil {
		return nil, err
	}
	if err := assets.Prune(filepath.Join(cfg.DataDir, "bin"), programs, rt.NeedsSentry); err != nil {
		log.Warn("remove programs of earlier versions", "err", err)
	}
	return &parts{
		engine: eng, secrets: vault, tunnels: tunnels, images: images, imageInUse: eng.ImageInUse, tokens: st,
		buildBase: func(ctx context.Context, tenant string, r native.BaseRequest, progress func(image.Progress)) (*image.Image, error) {
			o := image.BaseOptions{Suite: r.Suite, Packages: r.Packages, Tag: r.Tag, Out: &packages{progress: progress}}
			if r.BuildTools {
				o.With = []string{"build"}
			}
			return images.BuildBase(ctx, tenant, o)
		},
		close: func(context.Context) error { return closeAll() },
	}, nil
}

// credentials are those that a tenant's pulls have by themselves: the first
// tenant's is the host's own operator, with Docker's keychain; others bring
// theirs with each pull, and never use root's.
func credentials(tenant string) authn.Keychain {
	if tenant == DefaultTenant {
		return authn.DefaultKeychain
	}
	return authn.NewMultiKeychain()
}

// least is the lower of the two, where 0 is no limit.
func least(n, limit int64) int64 {
	if limit > 0 {
		return min(n, limit)
	}
	return n
}

// slots gives the runtime its places in the network.
type slots struct{ n *network.Network }

func (s slots) Acquire(ctx context.Context, owner string) (sandbox.Slot, error) {
	sl, err := s.n.Acquire(ctx, network.AcquireOptions{Owner: owner}) // closed until the engine opens it
	if err != nil {
		return sandbox.Slot{}, err
	}
	return sandbox.Slot{ID: sl.ID, Netns: sl.NetnsPath, Address: netip.PrefixFrom(sl.Addr, sl.Bits), Gateway: sl.Gateway, DNS: sl.DNS}, nil
}

func (s slots) Release(ctx context.Context, id string) error { return s.n.Release(ctx, id) }

type hostFacts struct {
	cpu    int64 // thousandths of a core
	memory int64 // bytes
	bootID string
}

func readHost() (hostFacts, error) {
	h := hostFacts{cpu: int64(runtime.NumCPU()) * 1000}
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return h, sandbox.Unsupported.Errorf("read the host's boot id: %w", err)
	}
	h.bootID = strings.TrimSpace(string(b))
	h.memory, err = memTotal("/proc/meminfo")
	return h, err
}

// packages turns the output of the tool that makes a base image into progress:
// each line counts as a step done.
type packages struct {
	progress func(image.Progress)
	n        int64
}

func (p *packages) Write(b []byte) (int, error) {
	if p.progress == nil {
		return len(b), nil
	}
	p.n += int64(bytes.Count(b, []byte{'\n'}))
	p.progress(image.Progress{Stage: "install", Done: p.n})
	return len(b), nil
}
