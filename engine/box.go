package engine

import (
	"context"
	"sync"
	"time"

	"vivarium/guest"
	"vivarium/sandbox"
	"vivarium/secret"
	"vivarium/store"
)

// box is a living sandbox: its record, and what it holds.
type box struct {
	e       *Engine
	id      string
	tenant  string
	life    context.Context // of its creation; ended by the first end
	halt    context.CancelFunc
	created chan struct{} // closed when its creation is over; nil if it was found again
	gone    chan struct{} // closed when it has ended and nothing is left
	quit    chan struct{} // closed when the engine lets go of it

	policyMu sync.Mutex // held by whoever changes the policy; before mu
	flows    flowLog
	secrets  *secret.Binding // nil: none; guarded by mu

	mu        sync.Mutex
	rec       sandbox.Sandbox // guarded by mu
	changed   chan struct{}   // closed when rec changes; guarded by mu
	machine   sandbox.Machine // nil until booted; guarded by mu
	release   func()          // of its image; guarded by mu
	client    *guest.Client   // nil until connected; guarded by mu
	dialing   *dialing        // guarded by mu
	admitted  bool            // holds room; guarded by mu
	ending    *ending         // set by the first end; guarded by mu
	left      bool            // the engine closed; guarded by mu
	execs     map[string]*execution
	doneExecs []string // ended, oldest first; guarded by mu
	running   int      // execs; guarded by mu
	active    int      // what counts as activity now; guarded by mu
	idle      *time.Timer
	deadline  *time.Timer
	policySeq uint64 // odd while the policy is being changed, another after each change; guarded by mu
	unasked   bool   // found again, and the guest not yet asked which execs it has; guarded by mu
}

// ending is why and how a box ends.
type ending struct {
	reason  sandbox.Reason
	message string
	err     error // with ReasonFailed
	grace   time.Duration
	exit    *sandbox.ExitStatus
	known   *sandbox.Death // what an earlier daemon had measured
}

func (e *Engine) newBox(sb sandbox.Sandbox) *box {
	b := &box{
		e: e, id: sb.ID, tenant: sb.Tenant, rec: sb,
		gone: make(chan struct{}), quit: make(chan struct{}), changed: make(chan struct{}),
		execs: map[string]*execution{},
	}
	b.life, b.halt = context.WithCancel(e.ctx)
	if d := b.rec.Deadline; !d.IsZero() && d == d.Round(0) {
		// One that was read back has only wall time, with which a clock that is set
		// would move it: put it on this process's monotonic clock (E6).
		now := time.Now()
		b.rec.Deadline = now.Add(d.Sub(now))
	}
	return b
}

// record is the box's record as it now is.
func (b *box) record() sandbox.Sandbox {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.rec
}

// notify tells those who wait that rec has changed. The caller holds mu.
func (b *box) notify() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// enter moves the box to a stage that may take until limit (0: for ever).
// False if the box is ending.
func (b *box) enter(stage sandbox.Stage, limit time.Duration) bool {
	b.mu.Lock()
	if b.ending != nil && stage != sandbox.StageStopping && stage != sandbox.StageEnded {
		b.mu.Unlock()
		return false
	}
	b.setStage(stage, limit)
	b.mu.Unlock()
	b.e.events.emit(b.tenant, b.id, eventStage, string(stage), map[string]string{"stage": string(stage)})
	return true
}

// setStage is enter without its checks. The caller holds mu.
func (b *box) setStage(stage sandbox.Stage, limit time.Duration) {
	now := time.Now()
	if n := len(b.rec.Stages); n > 0 && b.rec.Stages[n-1].Took == 0 {
		// a copy: records that were handed out share the array
		st := append([]sandbox.StageTime(nil), b.rec.Stages...)
		st[n-1].Took = max(1, now.Sub(st[n-1].Entered))
		b.rec.Stages = st
	}
	b.rec.Stages = append(b.rec.Stages[:len(b.rec.Stages):len(b.rec.Stages)], sandbox.StageTime{Stage: stage, Entered: now})
	b.rec.Stage, b.rec.StageSince, b.rec.StageDeadline = stage, now, time.Time{}
	if limit > 0 {
		b.rec.StageDeadline = now.Add(limit)
	}
	b.notify()
}

// persist writes the record.
func (b *box) persist() *store.Pending {
	b.mu.Lock()
	// under the lock, so that an older record never follows a newer one
	p := b.e.store.Put(b.rec)
	b.mu.Unlock()
	p.Then(func(err error) {
		if err != nil {
			b.e.log.Error("store sandbox", "sandbox", b.id, "err", err)
		}
	})
	return p
}

// begin notes activity; the function it returns ends it.
func (b *box) begin() (end func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.active++
	if b.idle != nil {
		b.idle.Stop()
		b.idle = nil
	}
	var once sync.Once
	return func() {
		once.Do(func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.active--
			b.rest()
		})
	}
}

// rest starts the idle timer if there is no activity. The caller holds mu.
func (b *box) rest() {
	d := b.rec.Spec.IdleTimeout
	if d <= 0 || b.active > 0 || b.ending != nil || b.left || !b.rec.Stage.Usable() {
		return
	}
	if b.idle != nil {
		b.idle.Stop()
	}
	var t *time.Timer
	t = time.AfterFunc(d, func() {
		b.mu.Lock()
		// another timer: something came and went while this one was on its way
		still := b.active == 0 && b.idle == t
		b.mu.Unlock()
		if still {
			b.end(ending{reason: sandbox.ReasonIdle, message: "idle for " + d.String()})
		}
	})
	b.idle = t
}

// watchDeadline ends the box when its timeout passes.
func (b *box) watchDeadline() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.deadline != nil {
		b.deadline.Stop()
	}
	if b.rec.Deadline.IsZero() || b.ending != nil || b.left {
		return
	}
	b.deadline = time.AfterFunc(time.Until(b.rec.Deadline), func() {
		b.mu.Lock()
		due := !time.Now().Before(b.rec.Deadline)
		limit := b.rec.Deadline.Sub(b.rec.Created)
		b.mu.Unlock()
		if due {
			b.end(ending{reason: sandbox.ReasonTimeout, message: "timeout after " + limit.Round(time.Millisecond).String(), grace: timeoutGrace})
		}
	})
}

// timeoutGrace is what a sandbox that has timed out gets between SIGTERM and
// SIGKILL.
const timeoutGrace = 2 * time.Second

// detach lets go of the box when the engine closes: it goes on running.
func (b *box) detach() {
	b.mu.Lock()
	if b.left {
		b.mu.Unlock()
		return
	}
	b.left = true
	for _, t := range []*time.Timer{b.idle, b.deadline} {
		if t != nil {
			t.Stop()
		}
	}
	c := b.client
	close(b.quit)
	b.mu.Unlock()
	b.halt()
	if c != nil {
		c.Fail(sandbox.Unavailable.Errorf("the daemon is stopping"))
		_ = c.Close() // it has failed; what it says is the line above
	}
}

// dialing is a connection to the guest in the making, shared by all who wait.
type dialing struct {
	done chan struct{}
	err  error
}

// guest gives the connection to the guest, making it if need be.
func (b *box) guest(ctx context.Context) (*guest.Client, error) {
	for {
		b.mu.Lock()
		switch {
		case b.left:
			b.mu.Unlock()
			return nil, sandbox.Unavailable.Errorf("the daemon is stopping")
		case b.life.Err() != nil: // not as soon as it is ending: its commands get their SIGTERM this way
			b.mu.Unlock()
			return nil, b.endedError()
		case b.client != nil:
			c := b.client
			b.mu.Unlock()
			return c, nil
		case b.machine == nil:
			stage := b.rec.Stage
			b.mu.Unlock()
			return nil, sandbox.Conflict.Errorf("sandbox %s is in stage %s", b.id, stage).WithHint("wait until it is running: `viv wait --until running`")
		}
		d := b.dialing
		if d == nil {
			d = &dialing{done: make(chan struct{})}
			b.dialing = d
			m, key := b.machine, b.rec.GuestKey
			go b.dial(d, m, key)
		}
		b.mu.Unlock()
		select {
		case <-d.done:
			if d.err != nil {
				return nil, d.err
			}
		case <-ctx.Done():
			return nil, sandbox.Timeout.Errorf("connect to guest: %w", ctx.Err())
		}
	}
}

func (b *box) dial(d *dialing, m sandbox.Machine, key []byte) {
	ctx, cancel := context.WithTimeout(b.life, b.e.opts.Deadlines.Guest)
	defer cancel()
	go func() { // a machine that dies ends the wait
		select {
		case <-m.Done():
			cancel()
		case <-ctx.Done():
		}
	}()
	c, err := guest.Connect(ctx, m.Dial, key, guest.Options{Idle: 4})
	b.mu.Lock()
	b.dialing = nil
	if err == nil {
		b.client = c
	}
	left := b.left
	b.mu.Unlock()
	if err == nil && left {
		_ = c.Close()
	}
	d.err = err
	close(d.done)
}

// isEnding says whether the box is ending or will, its machine being dead.
func (b *box) isEnding() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ending != nil {
		return true
	}
	if b.machine == nil {
		return false
	}
	select {
	case <-b.machine.Done():
		return true
	default:
		return false
	}
}

// endedError says that the box has ended, and why.
func (b *box) endedError() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	why := "it is being stopped"
	if d := b.rec.Death; d != nil {
		why = deathText(d)
	} else if b.ending != nil {
		why = string(b.ending.reason)
	}
	return sandbox.Gone.Errorf("sandbox %s has ended: %s", b.id, why)
}

func deathText(d *sandbox.Death) string {
	s := string(d.Reason)
	if d.Message != "" {
		s += ": " + d.Message
	}
	return s
}
