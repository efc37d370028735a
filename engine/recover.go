package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"vivarium/guest"
	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// recover takes up what an earlier daemon left: sandboxes that run go on, those
// that were half made or half ended are finished off with a reason, and what
// belongs to nobody is removed.
func (e *Engine) recover(ctx context.Context) error {
	last, err := e.store.Meta(ctx, "boot_id")
	if err != nil {
		return err
	}
	restarted := last != "" && last != e.opts.BootID // the host
	alive, err := e.store.Alive(ctx)
	if err != nil {
		return err
	}
	var found []*box
	live := map[string]bool{}
	for _, sb := range alive {
		b := e.newBox(sb)
		e.mu.Lock()
		e.enlist(b)
		e.mu.Unlock()
		why, err := b.adopt(ctx, restarted)
		if err != nil {
			return err
		}
		if b.machine != nil {
			live[sb.MachineID] = true
		}
		if why != nil {
			// none of its execs runs any more; its end says so of each
			main := b.recall(ctx)
			switch {
			case main == nil:
			case sb.Ending == nil && sb.Stage != sandbox.StageStopping: // its end had not begun
				why = &ending{reason: sandbox.ReasonExited, exit: main}
			case why.exit == nil:
				why.exit = main
			}
			b.end(*why)
			continue
		}
		found = append(found, b)
	}
	for _, rt := range e.runtimes {
		if err := rt.Reconcile(ctx, func(id string) bool { return live[id] }); err != nil {
			e.log.Error("remove orphaned machines", "runtime", rt.Name(), "err", err)
		}
	}
	if err := e.removeOrphanSpools(ctx); err != nil {
		return err
	}
	if err := e.store.SetMeta("boot_id", e.opts.BootID).Wait(); err != nil {
		return err
	}
	for _, b := range found {
		b.resume(ctx)
	}
	return nil
}

// LiveSlots are the network slots that living sandboxes of the store have, with
// the machine that owns each: for Network.Reconcile, before the engine opens.
func LiveSlots(ctx context.Context, s interface {
	Alive(context.Context) ([]sandbox.Sandbox, error)
}) (map[string]string, error) {
	alive, err := s.Alive(ctx)
	if err != nil {
		return nil, err
	}
	slots := map[string]string{}
	for _, sb := range alive {
		if sb.Slot != "" {
			slots[sb.Slot] = sb.MachineID
		}
	}
	return slots, nil
}

// adopt finds the box's machine. It returns why the box has to end, nil if it
// goes on.
func (b *box) adopt(ctx context.Context, restarted bool) (*ending, error) {
	sb := &b.rec
	res := sb.Spec.Resources
	rt, ok := b.e.runtimes[sb.Spec.Runtime]
	before := sb.Ending
	switch {
	case restarted && before != nil:
		return resumed(before), nil
	case restarted:
		return &ending{reason: sandbox.ReasonLost, message: "the host was restarted"}, nil
	case !ok:
		return &ending{reason: sandbox.ReasonLost, message: "this daemon has no runtime " + sb.Spec.Runtime}, nil
	case sb.MachineID == "" && before != nil:
		return resumed(before), nil
	case sb.MachineID == "":
		return &ending{reason: sandbox.ReasonFailed, err: sandbox.Unavailable.Errorf("the daemon was restarted in stage %s", sb.Stage)}, nil
	}
	m, err := rt.Adopt(ctx, sb.MachineID)
	if m != nil {
		b.machine = m
		b.e.room.force(res.CPURequest, res.MemoryRequest)
		b.admitted = true
	}
	switch {
	case before != nil: // whatever has become of its machine
		return resumed(before), nil
	case errors.Is(err, sandbox.NotFound):
		return &ending{reason: sandbox.ReasonLost, message: "its machine is gone"}, nil
	case errors.Is(err, sandbox.Gone):
		return &ending{reason: sandbox.ReasonKilled, message: "its machine died while no daemon ran"}, nil
	case err != nil:
		// one sandbox that cannot be taken up is not to keep the others from it
		return &ending{reason: sandbox.ReasonLost, message: "its machine cannot be taken up: " + err.Error()}, nil
	case sb.Stage == sandbox.StageStopping:
		return &ending{reason: sandbox.ReasonStopped, message: "the daemon was restarted while it was being stopped"}, nil
	case !sb.Stage.Usable() && sb.Stage != sandbox.StageGuest:
		return &ending{reason: sandbox.ReasonFailed, err: sandbox.Unavailable.Errorf("the daemon was restarted in stage %s", sb.Stage)}, nil
	}
	// pinned again, so that nobody removes it; the machine has it open in any
	// case
	if _, release, err := b.e.opts.Images.Use(ctx, sb.Tenant, sb.ImageID); err == nil {
		b.release = release
	} else {
		b.e.log.Warn("image of a running sandbox", "sandbox", b.id, "image", sb.ImageID, "err", err)
	}
	return nil, nil
}

// resume goes on with a box whose machine runs: its execs are attached again.
// The guest is called only where there is something to ask it, so that a
// thousand idle sandboxes cost nothing.
func (b *box) resume(ctx context.Context) {
	b.reread(ctx)
	b.rebind(ctx)
	go b.watchMachine(b.machine)
	b.watchDeadline()
	b.e.events.emit(b.tenant, b.id, eventFound, "", nil)
	recs := b.execRecords(ctx)
	running := false
	b.mu.Lock()
	b.unasked = true
	for _, rec := range recs {
		if rec.State == sandbox.ExecExited || rec.State == sandbox.ExecLost {
			b.keep(rec)
			continue
		}
		running = true
		b.take(rec)
	}
	var exit *sandbox.ExitStatus
	if x, ok := b.execs[sandbox.MainExec]; ok && x.rec.State == sandbox.ExecExited {
		exit = &x.rec.Exit
	}
	// an exec may have been started just before the daemon died, and its row
	// not have been written: the guest knows it. Of an idle one it is asked when
	// somebody asks for an exec, unless what runs there keeps it alive.
	now := running || b.rec.Stage != sandbox.StageRunning || b.rec.Spec.IdleTimeout > 0
	b.rest()
	b.mu.Unlock()
	if exit != nil { // the daemon died between this and its end
		b.end(ending{reason: sandbox.ReasonExited, exit: exit})
		return
	}
	if now {
		b.e.wg.Go(b.reattach)
	}
}

// reread notes the policy that is in force, where the operator's part of it has
// changed since an earlier daemon wrote it down.
func (b *box) reread(ctx context.Context) {
	sb := b.record()
	if sb.NetworkHash == "" {
		return
	}
	if p, err := b.e.opts.Network.Compile(sb.Spec.Network); err == nil && p.Hash == sb.NetworkHash {
		return // the network had no reason to open it as another
	}
	a, err := b.e.opts.Network.ReadBack(ctx, sb.Slot)
	if err != nil {
		b.e.log.Error("read policy back", "sandbox", b.id, "err", err)
		return
	}
	if a.Hash == sb.NetworkHash {
		return
	}
	b.mu.Lock()
	b.rec.Spec.Network, b.rec.NetworkHash, b.rec.Proof = a.Policy, a.Hash, nil
	b.notify()
	b.mu.Unlock()
	b.persist()
	b.e.events.emit(b.tenant, b.id, eventNetwork, string(a.Policy.Mode), map[string]string{"hash": a.Hash, "rules": fmt.Sprint(len(a.Policy.Rules)), "by": "configuration"})
}

// resumed is the end of a box that an earlier daemon had begun.
func resumed(d *sandbox.Death) *ending {
	e := &ending{reason: d.Reason, message: d.Message, exit: d.Exit, known: d}
	if d.Kind != "" {
		k := d.Kind.Errorf("%s", d.Message)
		k.Hint = d.Hint
		e.err = k
	}
	return e
}

func (b *box) execRecords(ctx context.Context) []sandbox.Exec {
	recs, err := b.e.store.Execs(ctx, b.tenant, b.id)
	if err != nil {
		b.e.log.Error("find execs", "sandbox", b.id, "err", err)
	}
	slices.SortFunc(recs, func(x, y sandbox.Exec) int { return x.Ended.Compare(y.Ended) })
	return recs
}

// recall loads the execs of a box that is to end, and gives the status of its
// main command if there is one.
func (b *box) recall(ctx context.Context) (main *sandbox.ExitStatus) {
	recs := b.execRecords(ctx)
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, rec := range recs {
		if rec.State == sandbox.ExecExited || rec.State == sandbox.ExecLost {
			b.keep(rec)
			if rec.ID == sandbox.MainExec && rec.State == sandbox.ExecExited {
				main = &rec.Exit
			}
			continue
		}
		x, err := newExecution(b, rec)
		if err != nil {
			b.e.log.Error("find output", "sandbox", b.id, "exec", rec.ID, "err", err)
			continue
		}
		x.asked = rec.Spec
		b.execs[rec.ID] = x
		b.running++
	}
	return main
}

// collectLimit bounds how long a guest is asked about a sandbox that is to end.
const collectLimit = 5 * time.Second

// collect gets the status of commands that ended while an earlier daemon was
// ending their sandbox, and that it could not write down any more.
func (b *box) collect(m sandbox.Machine, why *ending) {
	b.mu.Lock()
	open := map[string]*execution{}
	for id, x := range b.execs {
		if x.running() {
			open[id] = x
		}
	}
	key := b.rec.GuestKey
	b.mu.Unlock()
	if len(open) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), collectLimit)
	defer cancel()
	defer context.AfterFunc(b.e.ctx, cancel)()
	c, err := guest.Connect(ctx, m.Dial, key, guest.Options{})
	if err != nil {
		b.e.log.Warn("ask guest for its last words", "sandbox", b.id, "err", err)
		return
	}
	defer c.Close()
	known, err := c.ListExecs(ctx)
	if err != nil {
		b.e.log.Warn("ask guest for its last words", "sandbox", b.id, "err", err)
		return
	}
	for _, k := range known {
		x := open[k.ID]
		if x == nil || !k.Exited {
			continue
		}
		if err := x.collect(ctx, c); err != nil {
			b.e.log.Warn("get status of exec", "sandbox", b.id, "exec", k.ID, "err", err)
			continue
		}
		if k.ID == sandbox.MainExec {
			st := x.record().Exit
			b.mu.Lock()
			why.exit = &st
			b.mu.Unlock()
		}
	}
}

func (x *execution) collect(ctx context.Context, c *guest.Client) error {
	_, out := x.stdout.Bounds()
	_, serr := x.stderr.Bounds()
	s, err := c.AttachExec(ctx, x.rec.ID, out, serr)
	if err != nil {
		return err
	}
	defer s.Close()
	defer context.AfterFunc(ctx, func() { _ = s.Close() })()
	st, err := x.drain(s)
	if err != nil {
		return err
	}
	x.exited(s, st)
	return nil
}

// keep makes an ended execution of a record. The caller holds mu.
func (b *box) keep(rec sandbox.Exec) {
	x, err := b.e.ended(b.rec, rec)
	if err != nil {
		b.e.log.Error("find output", "sandbox", b.id, "exec", rec.ID, "err", err)
		return
	}
	x.b, x.asked = b, rec.Spec
	b.execs[rec.ID] = x
	b.doneExecs = append(b.doneExecs, rec.ID)
}

// take makes a running execution of a record. The caller holds mu.
func (b *box) take(rec sandbox.Exec) {
	x, err := newExecution(b, rec)
	if err != nil {
		b.e.log.Error("find output", "sandbox", b.id, "exec", rec.ID, "err", err)
		return
	}
	x.asked = rec.Spec
	b.execs[rec.ID] = x
	b.running++
	b.active++
	x.rest = func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.active--
		b.rest()
	}
	b.e.wg.Go(func() { x.pump(nil) })
	if rec.ID == sandbox.MainExec {
		go func() {
			select {
			case <-x.done:
				if st := x.record(); st.State == sandbox.ExecExited {
					b.end(ending{reason: sandbox.ReasonExited, exit: &st.Exit})
				}
			case <-b.quit:
			}
		}()
	}
}

// askOnce lets a box that was found again learn of execs that only its guest
// knows. False if that is not needed or not possible now.
func (b *box) askOnce(ctx context.Context) bool {
	b.mu.Lock()
	unasked := b.unasked && b.ending == nil
	b.mu.Unlock()
	if !unasked {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, b.e.opts.Deadlines.Guest)
	defer cancel()
	if err := b.ask(ctx); err != nil {
		b.e.log.Warn("ask for execs", "sandbox", b.id, "err", err)
		return false
	}
	return true
}

// askAfter is how long a box that was found again and is used is not asked for
// execs that only its guest knows: others that were found wait for their turn.
const askAfter = 3 * time.Second

// askLater is askOnce for those who need no answer now.
func (b *box) askLater() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.unasked || b.ending != nil || b.left {
		return
	}
	b.e.wg.Go(func() {
		select {
		case <-time.After(askAfter):
			b.askOnce(b.life)
		case <-b.quit:
		case <-b.gone:
		}
	})
}

// ask compares the execs with what the guest knows.
func (b *box) ask(ctx context.Context) error {
	c, err := b.guest(ctx)
	if err != nil {
		return err
	}
	known, err := c.ListExecs(ctx)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.unasked { // somebody else was quicker
		return nil
	}
	b.unasked = false
	for _, k := range known {
		if _, ok := b.execs[k.ID]; ok || strings.HasPrefix(k.ID, probePrefix) || b.ending != nil {
			continue
		}
		b.take(orphanExec(b, k))
	}
	b.rest()
	return nil
}

// reattach asks the guest. Of a box that was not yet running it finds out how
// far its creation had come.
func (b *box) reattach() {
	ctx, cancel := context.WithTimeout(b.life, b.e.opts.Deadlines.Guest)
	defer cancel()
	fail := func(err error) {
		if b.e.ctx.Err() == nil {
			b.end(ending{reason: sandbox.ReasonFailed, err: sandbox.Unavailable.Errorf("the daemon was restarted, and the guest does not answer: %w", err)})
		}
	}
	if err := b.ask(ctx); err != nil {
		fail(err)
		return
	}
	if err := b.setUpAgain(ctx); err != nil {
		fail(err)
		return
	}
	b.mu.Lock()
	stage, spec := b.rec.Stage, b.rec.Spec
	_, hasMain := b.execs[sandbox.MainExec]
	b.mu.Unlock()
	if stage == sandbox.StageRunning {
		return
	}
	if stage == sandbox.StageGuest && wantsMain(spec) && !hasMain {
		b.end(ending{reason: sandbox.ReasonFailed, err: sandbox.Unavailable.Errorf("the daemon was restarted before the main command was started")})
		return
	}
	if err := b.finishCreation(); err != nil && b.e.ctx.Err() == nil {
		b.end(ending{reason: sandbox.ReasonFailed, err: err})
	}
}

// setUpAgain tells the guest of a box that was still being made which sandbox it
// is in, puts into it what it is to have, and has its policy proven where that was
// asked for: how far the earlier daemon came is not known.
func (b *box) setUpAgain(ctx context.Context) error {
	b.mu.Lock()
	sb := b.rec
	w, ok := b.machine.(sandbox.Warm)
	b.mu.Unlock()
	if sb.Stage != sandbox.StageGuest {
		return nil
	}
	if ok {
		if err := b.setUp(ctx, w, b.startSpec("")); err != nil {
			return err
		}
	}
	img, release, err := b.e.opts.Images.Use(ctx, b.tenant, sb.ImageID)
	if err != nil {
		return err
	}
	defer release()
	if err := b.outfit(ctx, img); err != nil {
		return err
	}
	if sb.Spec.Prove && sb.Proof == nil {
		return b.proven(ctx)
	}
	return nil
}

// finishCreation brings a box whose main command runs to stage running.
func (b *box) finishCreation() error {
	if err := b.openTunnels(); err != nil {
		return err
	}
	spec := b.record().Spec
	if spec.Probe != nil {
		if !b.enter(sandbox.StageReady, b.e.opts.Deadlines.Ready) {
			return nil
		}
		return b.probe(spec.Probe, b.e.opts.Deadlines.Ready)
	}
	b.mu.Lock()
	if b.rec.Started.IsZero() {
		b.rec.Started = time.Now()
	}
	if b.ending != nil {
		b.mu.Unlock()
		return nil
	}
	b.rec.IsReady = true
	b.setStage(sandbox.StageRunning, 0)
	b.rest()
	b.mu.Unlock()
	b.persist()
	b.e.events.emit(b.tenant, b.id, eventStage, string(sandbox.StageRunning), map[string]string{"stage": string(sandbox.StageRunning)})
	b.e.events.emit(b.tenant, b.id, eventReady, "", nil)
	return nil
}

// wantsMain says whether the sandbox has a main command.
func wantsMain(s sandbox.Spec) bool {
	return len(s.Command) > 0 || s.RunImageCommand || len(s.Entrypoint) > 0 && s.Entrypoint[0] != ""
}

// orphanExec is the record of an exec of which only the guest knows.
func orphanExec(b *box, k wire.ExecInfo) sandbox.Exec {
	return sandbox.Exec{ID: k.ID, SandboxID: b.id, Tenant: b.tenant, State: sandbox.ExecRunning, PID: k.PID, Started: time.Now()}
}

// removeOrphanSpools removes output of sandboxes that nobody knows.
func (e *Engine) removeOrphanSpools(ctx context.Context) error {
	dir := filepath.Join(e.opts.Dir, "spool")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return sandbox.Internal.Errorf("make spool directory: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return sandbox.Internal.Errorf("list spools: %w", err)
	}
	ids, err := e.store.IDs(ctx)
	if err != nil {
		return err
	}
	for _, d := range entries {
		if ids[d.Name()] {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, d.Name())); err != nil {
			return sandbox.Internal.Errorf("remove orphaned spool: %w", err)
		}
	}
	return nil
}
