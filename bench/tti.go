package bench

import (
	"context"
	"errors"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
)

const (
	// block is how many of ours come in a row, at the rate asked for, before the
	// peers have their turn: twice the default pool, so that its refilling is
	// part of what is measured.
	block = 16
	// warm runs are not counted.
	warm = 3
	// peerRuns is how often a peer is run at most.
	peerRuns = 100
)

// hello is what every runner is asked for.
var hello = []string{"/bin/echo", "hi"}

// tti measures from create to the first byte of output.
func (r *run) tti(ctx context.Context) error {
	r.res.note("create until it runs, then exec %s: two calls, measured to be quicker than following the output of a main command", hello[0])
	if r.Rate > 0 {
		r.res.note("%g arrivals per second, in blocks of %d between which the peers run; each is removed after its first output", r.Rate, block)
	} else {
		r.res.note("one after the other; each is removed after its first output")
	}
	if r.PoolOff {
		r.res.note("pool off: machines of a size that the pool does not hold")
	}
	peers, err := r.openPeers(ctx)
	if err != nil {
		return err
	}
	defer peers.close()
	for range warm {
		if _, _, err := r.firstByte(ctx); err != nil {
			return err
		}
		if err := peers.each(ctx, peer.run, nil); err != nil {
			return err
		}
	}
	var ours []time.Duration
	stages := map[string][]time.Duration{}
	theirs := samples{}
	peerShare := min(1, float64(peerRuns)/float64(r.N))
	for done := 0; done < r.N; done += block {
		n := min(block, r.N-done)
		if err := r.ready(ctx); err != nil {
			return err
		}
		took, st, err := r.arrivals(ctx, n)
		if err != nil {
			return err
		}
		ours = append(ours, took...)
		for k, v := range st {
			stages[k] = append(stages[k], v...)
		}
		for i := range n {
			// spread evenly where not every one of ours has its peer
			if int(float64(done+i+1)*peerShare) == int(float64(done+i)*peerShare) {
				continue
			}
			if err := peers.each(ctx, peer.run, theirs); err != nil {
				return err
			}
		}
	}
	r.res.latency(ours)
	for k, v := range stages {
		r.res.Stage[k] = Stage{ms(percentile(v, 50))}
	}
	for k, v := range theirs {
		r.res.compare(k, v)
	}
	return nil
}

// ready waits a moment for the pool to be as full as it was at the beginning:
// the peers' turn is not what should empty or fill it.
func (r *run) ready(ctx context.Context) error {
	for range 50 {
		i, err := r.c.Info(ctx)
		if err != nil {
			return err
		}
		if i.PoolReady >= r.info.PoolReady {
			return nil
		}
		if err := sleep(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// arrivals starts n at the rate, whether or not those before are done; at a rate
// of 0 one after the other.
func (r *run) arrivals(ctx context.Context, n int) ([]time.Duration, map[string][]time.Duration, error) {
	var (
		mu     sync.Mutex
		took   []time.Duration
		stages = map[string][]time.Duration{}
	)
	one := func(ctx context.Context) error {
		d, st, err := r.firstByte(ctx)
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		took = append(took, d)
		for _, s := range st {
			stages[s.Stage] = append(stages[s.Stage], s.Took.AsDuration())
		}
		return nil
	}
	if r.Rate == 0 {
		for range n {
			if err := one(ctx); err != nil {
				return nil, nil, err
			}
		}
		return took, stages, nil
	}
	g, gctx := errgroup.WithContext(ctx)
	start := time.Now()
	for i := range n {
		at := start.Add(time.Duration(float64(i) / r.Rate * float64(time.Second)))
		if sleep(gctx, time.Until(at)) != nil {
			break
		}
		g.Go(func() error { return one(gctx) })
	}
	if err := g.Wait(); err != nil {
		return nil, nil, err
	}
	return took, stages, ctx.Err() // stopped between two arrivals, where nothing fails
}

// errFirst ends the reading of output.
var errFirst = errors.New("first byte")

type firstWriter struct{ at time.Time }

func (w *firstWriter) Write(p []byte) (int, error) {
	w.at = time.Now()
	return 0, errFirst
}

// firstByte makes a sandbox, times its first output and removes it. The stages
// are those that had ended by then.
func (r *run) firstByte(ctx context.Context) (time.Duration, []*v1.StageTime, error) {
	spec := r.spec()
	start := time.Now()
	sb, err := r.c.Create(ctx, spec, client.CreateOptions{Wait: true})
	if err != nil {
		return 0, nil, err
	}
	var w firstWriter
	_, err = r.c.RunExec(ctx, sb.Id, "", &v1.ExecSpec{Argv: hello}, &w, nil)
	if err == nil {
		err = sandbox.Internal.Errorf("%s wrote nothing", hello[0])
	}
	if !errors.Is(err, errFirst) {
		return 0, nil, r.why(ctx, sb.Id, err)
	}
	took := w.at.Sub(start)
	got, err := r.c.Get(ctx, sb.Id)
	if err != nil {
		return 0, nil, err
	}
	var stages []*v1.StageTime
	for _, s := range got.Stages {
		if s.Took != nil && s.Stage != "running" && s.Stage != "stopping" && s.Stage != "ended" {
			stages = append(stages, s)
		}
	}
	return took, stages, r.remove(ctx, sb.Id)
}

// why adds how a sandbox ended to an error that came of it.
func (r *run) why(ctx context.Context, id string, err error) error {
	sb, gerr := r.c.Get(ctx, id)
	if gerr != nil || sb.Death == nil {
		return err
	}
	return sandbox.KindOf(err).Errorf("%w (%s in stage %s: %s)", err, sb.Death.Reason, sb.Death.Stage, sb.Death.Message).WithHint("%s", sb.Death.Hint)
}
