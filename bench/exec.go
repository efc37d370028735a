package bench

import (
	"context"
	"time"

	"vivarium/client"
)

// nothing is the command whose round trip is measured.
var nothing = []string{"/bin/true"}

// exec measures a round trip in a sandbox that runs.
func (r *run) exec(ctx context.Context) error {
	r.res.note("start, output to its end and exit status of /bin/true in one call; peers in a container that runs")
	peers, err := r.openPeers(ctx)
	if err != nil {
		return err
	}
	defer peers.close()
	sb, err := r.c.Create(ctx, r.spec(), client.CreateOptions{Wait: true})
	if err != nil {
		return err
	}
	if err := peers.each(ctx, func(p peer, ctx context.Context) (time.Duration, error) { return 0, p.keep(ctx) }, nil); err != nil {
		return err
	}
	var ours []time.Duration
	theirs := samples{}
	every := max(1, r.N/peerRuns)
	for i := range warm + r.N {
		start := time.Now()
		if err := r.runExec(ctx, sb.Id, nothing, nil); err != nil {
			return err
		}
		if i >= warm {
			ours = append(ours, time.Since(start))
		}
		if i%every != 0 {
			continue
		}
		into := theirs
		if i < warm {
			into = nil
		}
		if err := peers.each(ctx, peer.exec, into); err != nil {
			return err
		}
	}
	r.res.latency(ours)
	for k, v := range theirs {
		r.res.compare(k, v)
	}
	return r.remove(ctx, sb.Id)
}
