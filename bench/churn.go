package bench

import (
	"context"
	"sync"
	"time"

	"vivarium/client"
)

const (
	churnClients = 8
	// churnTime bounds a churn, however many were asked for.
	churnTime = 2 * time.Minute
)

// churn measures how many times a second a sandbox is created, used and
// removed.
func (r *run) churn(ctx context.Context) error {
	r.res.note("%d clients, each: create until it runs, /bin/true, remove until it is gone", churnClients)
	for range warm {
		if _, err := r.cycle(ctx); err != nil {
			return err
		}
	}
	var mu sync.Mutex
	var took []time.Duration
	start := time.Now()
	if err := parallel(ctx, churnClients, r.N, func(ctx context.Context, _ int) error {
		if time.Since(start) > churnTime {
			return nil
		}
		d, err := r.cycle(ctx)
		mu.Lock()
		defer mu.Unlock()
		took = append(took, d)
		return err
	}); err != nil {
		return err
	}
	r.res.N = len(took)
	r.res.latency(took)
	r.res.value(float64(len(took))/time.Since(start).Seconds(), "per second")
	return nil
}

func (r *run) cycle(ctx context.Context) (time.Duration, error) {
	start := time.Now()
	sb, err := r.c.Create(ctx, r.spec(), client.CreateOptions{Wait: true})
	if err != nil {
		return 0, err
	}
	if err := r.runExec(ctx, sb.Id, nothing, nil); err != nil {
		return 0, r.why(ctx, sb.Id, err)
	}
	if err := r.remove(ctx, sb.Id); err != nil {
		return 0, err
	}
	return time.Since(start), nil
}
