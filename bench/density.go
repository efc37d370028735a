package bench

import (
	"context"
	"sync"
	"time"

	"vivarium/client"
)

const (
	makers = 4 // that create at once
	askers = 8 // that exec at once
	// settleTime and idleTime: how long everything is left alone before memory
	// is read, and how long CPU time is counted.
	settleTime = 5 * time.Second
	idleTime   = 20 * time.Second
)

// density measures what an idle sandbox costs.
func (r *run) density(ctx context.Context) error {
	r.res.note("memory is the fall of MemAvailable by the number alive, after all have answered an exec; no cache is dropped")
	d := findDaemon(ctx, r.Server)
	if d == 0 {
		r.res.note("the daemon is not a process of this machine that can be looked at: its own figures are left out, and MemAvailable is this machine's")
	}
	// one sandbox before: what the first needs besides, such as the image in the
	// page cache, is not an idle sandbox's
	if _, err := r.cycle(ctx); err != nil {
		return err
	}
	if err := r.settle(ctx); err != nil {
		return err
	}
	before, err := r.memAvailable(ctx)
	if err != nil {
		return err
	}
	r.say("create %d sandboxes", r.N)
	ids := make([]string, r.N)
	start := time.Now()
	if err := parallel(ctx, makers, r.N, func(ctx context.Context, i int) error {
		sb, err := r.c.Create(ctx, r.small(), client.CreateOptions{Wait: true})
		if err == nil {
			ids[i] = sb.Id
		}
		return err
	}); err != nil {
		return err
	}
	r.res.detail("created", float64(r.N)/time.Since(start).Seconds(), "per second")
	if err := r.settle(ctx); err != nil {
		return err
	}
	fresh, err := r.memAvailable(ctx)
	if err != nil {
		return err
	}
	r.res.detail("memory_before_exec", float64(before-fresh)/float64(r.N)/1e6, "MB")

	r.say("exec in all of them")
	took, wall, err := r.execAll(ctx, ids)
	if err != nil {
		return err
	}
	r.res.latency(took)
	r.res.detail("all_answer", wall.Seconds(), "s")
	if err := r.settle(ctx); err != nil {
		return err
	}
	after, err := r.memAvailable(ctx)
	if err != nil {
		return err
	}
	r.res.value(float64(before-after)/float64(r.N)/1e6, "MB")

	r.say("leave them alone for %v", idleTime)
	if err := r.idle(ctx, ids, d); err != nil {
		return err
	}
	if d != 0 {
		if m, err := residentSize(d); err == nil {
			r.res.detail("daemon_rss", float64(m)/1e6, "MB")
		}
	}
	start = time.Now()
	if err := parallel(ctx, askers, r.N, func(ctx context.Context, i int) error { return r.remove(ctx, ids[i]) }); err != nil {
		return err
	}
	r.res.detail("removed", float64(r.N)/time.Since(start).Seconds(), "per second")
	return nil
}

// settle waits for the pool to be full again and for things to calm down.
func (r *run) settle(ctx context.Context) error {
	if err := r.ready(ctx); err != nil {
		return err
	}
	return r.pause(ctx, settleTime)
}

// execAll runs /bin/true in each.
func (r *run) execAll(ctx context.Context, ids []string) (took []time.Duration, wall time.Duration, err error) {
	var mu sync.Mutex
	start := time.Now()
	err = parallel(ctx, askers, len(ids), func(ctx context.Context, i int) error {
		t := time.Now()
		if err := r.runExec(ctx, ids[i], nothing, nil); err != nil {
			return r.why(ctx, ids[i], err)
		}
		mu.Lock()
		defer mu.Unlock()
		took = append(took, time.Since(t))
		return nil
	})
	return took, time.Since(start), err
}

// idle measures the CPU time of sandboxes and daemon while nobody asks for
// anything. The sandboxes' is what the daemon reads from the host's cgroups;
// reading it is outside of the time that is counted for the daemon.
func (r *run) idle(ctx context.Context, ids []string, daemon int) error {
	type reading struct {
		cpu    time.Duration
		at     time.Time
		memory int64
	}
	read := func() ([]reading, error) {
		out := make([]reading, len(ids))
		return out, parallel(ctx, askers, len(ids), func(ctx context.Context, i int) error {
			sb, err := r.c.Get(ctx, ids[i])
			if err != nil {
				return err
			}
			out[i] = reading{sb.GetUsage().GetCpu().AsDuration(), time.Now(), sb.GetUsage().GetMemory()}
			return nil
		})
	}
	a, err := read()
	if err != nil {
		return err
	}
	// what the reading itself set in motion, such as garbage collection
	if err := r.pause(ctx, 2*time.Second); err != nil {
		return err
	}
	d0, derr := cpuTime(daemon)
	t0 := time.Now()
	if err := r.pause(ctx, idleTime); err != nil {
		return err
	}
	d1, derr1 := cpuTime(daemon)
	window := time.Since(t0)
	b, err := read()
	if err != nil {
		return err
	}
	boxes, memory := 0.0, int64(0)
	for i := range ids {
		memory += b[i].memory
		boxes += float64(b[i].cpu-a[i].cpu) / float64(b[i].at.Sub(a[i].at))
	}
	// without the pages that it shares and the kernel's own: a check on the fall
	// of MemAvailable, which counts what others on the machine do as well
	r.res.detail("memory_in_cgroup", float64(memory)/float64(len(ids))/1e6, "MB")
	r.res.detail("idle_cpu_sandboxes", boxes*100, "% of a core")
	if daemon == 0 || derr != nil || derr1 != nil {
		return nil
	}
	own := float64(d1-d0) / float64(window)
	r.res.detail("idle_cpu_daemon", own*100, "% of a core")
	r.res.detail("idle_cpu", (boxes+own)*100, "% of a core")
	return nil
}

func (r *run) pause(ctx context.Context, d time.Duration) error {
	if r.quick {
		d = time.Millisecond
	}
	return sleep(ctx, d)
}
