package engine

import (
	"context"
	"time"

	"github.com/oklog/ulid/v2"

	"vivarium/sandbox"
)

// probe tries until the sandbox is ready, it ends, or limit passes.
func (b *box) probe(p *sandbox.Probe, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(b.life, limit)
	defer cancel()
	tick := time.NewTicker(p.Interval)
	defer tick.Stop()
	var last error
	for {
		err := b.try(ctx, p)
		if err == nil {
			break
		}
		if last == nil || ctx.Err() == nil { // not the one that the end of the wait cut off
			last = err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			if b.life.Err() != nil {
				return b.life.Err()
			}
			return sandbox.Timeout.Errorf("not ready after %s: %w", limit, last)
		}
	}
	b.mu.Lock()
	if b.ending != nil {
		b.mu.Unlock()
		return context.Canceled
	}
	b.rec.IsReady = true
	b.setStage(sandbox.StageRunning, 0)
	b.rest()
	b.mu.Unlock()
	b.persist()
	b.e.events.emit(b.tenant, b.id, eventReady, "", nil)
	return nil
}

// probePrefix begins the ids of probes, which are no execs of the caller's.
const probePrefix = "probe-"

// try probes once. Nil is ready.
func (b *box) try(ctx context.Context, p *sandbox.Probe) error {
	ctx, cancel := context.WithTimeout(ctx, p.Timeout)
	defer cancel()
	c, err := b.guest(ctx)
	if err != nil {
		return err
	}
	if p.TCPPort != 0 {
		ok, err := c.ProbePort(ctx, p.TCPPort)
		if err != nil {
			return err
		}
		if !ok {
			return sandbox.Unavailable.Errorf("nothing listens on port %d", p.TCPPort)
		}
		return nil
	}
	sb := b.record()
	s, err := c.StartExec(ctx, probePrefix+ulid.Make().String(), execSpec(&sb, b.environment(), sandbox.ExecSpec{Argv: p.Command, Output: sandbox.OutputDiscard, Timeout: p.Timeout}))
	if err != nil {
		return err
	}
	defer s.Close()
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	for {
		f, err := s.Recv()
		if err != nil {
			return err
		}
		if f.Exit == nil {
			continue
		}
		st := f.Exit.Status
		if err := s.AckExit(); err != nil {
			return err
		}
		if st.Error != "" {
			return sandbox.Invalid.Errorf("probe command: %s", st.Error)
		}
		if st.Code != 0 {
			return sandbox.Unavailable.Errorf("probe command exited with %d", st.Code)
		}
		return nil
	}
}
