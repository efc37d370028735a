package engine

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
	"vivarium/store"
)

// end ends the box for this reason, unless it is ending already. It returns at
// once; gone is closed when nothing is left.
func (b *box) end(why ending) {
	b.mu.Lock()
	if b.ending != nil || b.left {
		b.mu.Unlock()
		return
	}
	b.ending = &why
	for _, t := range []*time.Timer{b.idle, b.deadline} {
		if t != nil {
			t.Stop()
		}
	}
	b.mu.Unlock()
	b.e.wg.Go(func() { b.finish(&why) })
}

// stopLimit is how long the end may take beyond the grace, whatever the sandbox
// does (A13).
const stopLimit = 10 * time.Second

// finish takes everything down and writes the death certificate. It runs to its
// end also while the engine closes; what a killed daemon leaves, the next one
// finishes.
func (b *box) finish(why *ending) {
	b.mu.Lock()
	was := b.rec.Stage
	if before := b.rec.Ending; before != nil { // an earlier daemon began to end it
		was = before.Stage
	}
	b.setStage(sandbox.StageStopping, why.grace+stopLimit)
	death := sandbox.Death{
		Reason: why.reason, Stage: was, Message: why.message, Exit: why.exit,
		Created: b.rec.Created, Started: b.rec.Started,
	}
	if why.err != nil {
		death.Message, death.Kind, death.Hint = why.err.Error(), sandbox.KindOf(why.err), sandbox.HintOf(why.err)
	}
	if why.known != nil {
		death.PeakMemory, death.OOM = why.known.PeakMemory, why.known.OOM
	}
	m, client := b.machine, b.client
	b.mu.Unlock()
	noted := b.note(death) // so that whoever finishes this after a crash tells the same
	b.e.events.emit(b.tenant, b.id, eventStage, string(sandbox.StageStopping), map[string]string{"stage": string(sandbox.StageStopping), "reason": string(why.reason)})
	if why.grace > 0 && m != nil && was.Usable() {
		b.terminate(why.grace, m)
	}
	b.halt()              // ends a creation that is under way
	if b.created != nil { // a creation that is under way may only now get its machine
		<-b.created
		b.mu.Lock()
		m = b.machine
		b.mu.Unlock()
	}
	if why.known != nil && m != nil {
		b.collect(m, why)
	}
	b.mu.Lock()
	death.Exit = why.exit // a main command that took its grace may have set it
	slot := b.rec.Slot
	b.mu.Unlock()
	if m != nil {
		b.takeDown(m, &death, noted)
	} else if slot != "" { // the machine is gone without having given it back
		if err := b.e.opts.Network.Release(context.Background(), slot); err != nil {
			b.e.log.Error("release slot", "sandbox", b.id, "slot", slot, "err", err)
		}
	}
	b.closeTunnels()
	b.policyMu.Lock() // a change that is under way would write them down again
	b.unbind()
	b.policyMu.Unlock()
	death.Ended = time.Now()
	b.endExecs(&death)
	b.mu.Lock()
	if b.client != nil {
		client = b.client
	}
	release, admitted := b.release, b.admitted
	b.release, b.admitted = nil, false
	b.mu.Unlock()
	if client != nil {
		client.Fail(sandbox.Gone.Errorf("sandbox %s has ended: %s", b.id, deathText(&death)))
		_ = client.Close() // it has failed
	}
	if release != nil {
		release()
	}
	if err := b.e.opts.Fail("stop.record"); err != nil {
		b.e.log.Error("end sandbox", "sandbox", b.id, "err", err)
	}
	b.mu.Lock()
	b.setStage(sandbox.StageEnded, 0)
	b.rec.Death, b.rec.Ending = &death, nil
	b.rec.IsReady = false
	if b.rec.Spec.Remove {
		b.rec.Removed = true
	}
	rec := b.rec
	p := b.e.store.Put(rec)
	b.mu.Unlock()
	if err := p.Wait(); err != nil {
		b.e.log.Error("store death certificate", "sandbox", b.id, "err", err)
	}
	b.e.dismiss(b)
	if admitted {
		b.e.room.give(rec.Spec.Resources.CPURequest, rec.Spec.Resources.MemoryRequest)
	}
	if rec.Removed {
		if err := os.RemoveAll(b.e.spoolDir(b.id)); err != nil {
			b.e.log.Error("remove spool", "sandbox", b.id, "err", err)
		}
	}
	attrs := map[string]string{"reason": string(death.Reason), "stage": string(death.Stage)}
	b.e.events.emit(b.tenant, b.id, eventEnded, deathText(&death), attrs)
	b.e.log.Info("sandbox ended", "sandbox", b.id, "tenant", b.tenant, "reason", death.Reason, "stage", death.Stage, "message", death.Message)
	close(b.gone)
}

// note writes what is known of the end so far.
func (b *box) note(death sandbox.Death) *store.Pending {
	b.mu.Lock()
	b.rec.Ending = &death
	b.mu.Unlock()
	return b.persist()
}

// takeDown kills and removes the machine, and reads from the host what it was.
// noted is the write of why, which a crash after the kill must find.
func (b *box) takeDown(m sandbox.Machine, death *sandbox.Death, noted *store.Pending) {
	ctx, cancel := context.WithTimeout(context.Background(), stopLimit)
	defer cancel()
	// what the commands said of their end is to outlive the daemon: the guest, who
	// would say it again, dies now
	if err := b.e.store.Flush(); err != nil {
		b.e.log.Error("store the last exits", "sandbox", b.id, "err", err)
	}
	if err := b.e.opts.Fail("stop.kill"); err != nil {
		b.e.log.Error("end sandbox", "sandbox", b.id, "err", err)
	}
	if err := m.Kill(ctx); err != nil {
		b.e.log.Error("kill machine", "sandbox", b.id, "machine", m.ID(), "err", err)
	}
	if u, err := m.Usage(); err == nil {
		death.PeakMemory, death.OOM = u.PeakMemory, u.OOM
		if u.OOM && death.Reason == sandbox.ReasonKilled || death.Reason == sandbox.ReasonOOM {
			death.Reason = sandbox.ReasonOOM
			death.Message = "out of memory"
			death.Hint = "raise the memory limit"
		}
	} else if !errors.Is(err, sandbox.Gone) {
		b.e.log.Warn("read usage", "sandbox", b.id, "err", err)
	}
	b.note(*death)   // with its group, what was measured goes
	_ = noted.Wait() // it logs its error
	if err := b.e.opts.Fail("stop.remove"); err != nil {
		b.e.log.Error("end sandbox", "sandbox", b.id, "err", err)
	}
	if err := m.Remove(ctx); err != nil {
		b.e.log.Error("remove machine", "sandbox", b.id, "machine", m.ID(), "err", err)
	}
}

// terminate sends SIGTERM to the commands and waits until they have ended, at
// most for grace.
func (b *box) terminate(grace time.Duration, m sandbox.Machine) {
	b.mu.Lock()
	var running []*execution
	main := b.execs[sandbox.MainExec]
	for _, x := range b.execs {
		if x.running() {
			running = append(running, x)
		}
	}
	b.mu.Unlock()
	if main != nil && main.running() {
		running = []*execution{main} // what it started is its own to end
	}
	limit := time.NewTimer(grace)
	defer limit.Stop()
	ctx, cancel := context.WithTimeout(b.life, grace)
	defer cancel()
	var sent sync.WaitGroup
	for _, x := range running {
		// one that cannot be reached, or does not take it, is killed with the rest
		sent.Go(func() { _ = x.signal(ctx, int(unix.SIGTERM)) })
	}
	sent.Wait()
	for _, x := range running {
		select {
		case <-x.done:
		case <-m.Done():
			return
		case <-limit.C:
			return
		}
	}
	if main != nil {
		if st := main.record(); st.State == sandbox.ExecExited {
			b.mu.Lock()
			if b.ending.exit == nil {
				b.ending.exit = &st.Exit
			}
			b.mu.Unlock()
		}
	}
}

// Stop ends a sandbox: SIGTERM to its main command, SIGKILL to everything after
// grace. It returns when it has ended. Idempotent.
func (e *Engine) Stop(ctx context.Context, tenant, ref string, grace time.Duration) (sandbox.Sandbox, error) {
	b, sb, err := e.find(ctx, tenant, ref)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if b == nil {
		return sb, nil
	}
	b.end(ending{reason: sandbox.ReasonStopped, grace: max(0, min(grace, e.opts.Deadlines.Stop))})
	if err := b.waitGone(ctx); err != nil {
		return sandbox.Sandbox{}, err
	}
	return b.record(), nil
}

func (b *box) waitGone(ctx context.Context) error {
	select {
	case <-b.gone:
		return nil
	case <-b.quit:
		return sandbox.Unavailable.Errorf("the daemon is stopping")
	case <-ctx.Done():
		return sandbox.Timeout.Errorf("wait for the end of sandbox %s: %w", b.id, ctx.Err())
	}
}

// Remove forgets a sandbox that ended, but for its death certificate; with force
// it is killed first.
func (e *Engine) Remove(ctx context.Context, tenant, ref string, force bool) error {
	b, sb, err := e.find(ctx, tenant, ref)
	if err != nil {
		return err
	}
	if b != nil {
		if !force {
			return sandbox.Conflict.Errorf("sandbox %s is alive, in stage %s", b.id, sb.Stage).WithHint("stop it first, or use --force")
		}
		b.mu.Lock()
		b.rec.Spec.Remove = true
		b.mu.Unlock()
		b.end(ending{reason: sandbox.ReasonStopped})
		if err := b.waitGone(ctx); err != nil {
			return err
		}
		sb = b.record()
	}
	if err := e.opts.Fail("remove.record"); err != nil {
		return err
	}
	if !sb.Removed {
		sb.Removed = true
		if err := e.store.Put(sb).Wait(); err != nil {
			return err
		}
	}
	if err := e.opts.Fail("remove.spool"); err != nil {
		return err
	}
	if err := os.RemoveAll(e.spoolDir(sb.ID)); err != nil {
		return sandbox.Internal.Errorf("remove output of %s: %w", sb.ID, err)
	}
	e.events.emit(tenant, sb.ID, eventRemoved, "", nil)
	return nil
}
