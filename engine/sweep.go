package engine

import (
	"os"
	"time"
)

// sweepEvery is how often what has outlived its retention is removed.
const sweepEvery = time.Minute

// sweep removes death certificates, output and events that are too old.
func (e *Engine) sweep() {
	t := time.NewTicker(sweepEvery)
	defer t.Stop()
	for {
		if err := e.sweepOnce(time.Now()); err != nil {
			e.log.Error("remove what is too old", "err", err)
		}
		select {
		case <-t.C:
		case <-e.ctx.Done():
			return
		}
	}
}

func (e *Engine) sweepOnce(now time.Time) error {
	for e.opts.RetainEnded > 0 {
		old, err := e.store.EndedBefore(e.ctx, now.Add(-e.opts.RetainEnded), page)
		if err != nil {
			return err
		}
		for _, sb := range old {
			// the row last: it is what makes the rest be found again
			if err := os.RemoveAll(e.spoolDir(sb.ID)); err != nil {
				return err
			}
			if err := e.store.Forget(sb.Tenant, sb.ID).Wait(); err != nil {
				return err
			}
		}
		if len(old) < page {
			break
		}
	}
	if e.opts.RetainEvents > 0 {
		return e.store.TrimEvents(now.Add(-e.opts.RetainEvents)).Wait()
	}
	return nil
}
