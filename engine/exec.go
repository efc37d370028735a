package engine

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"time"

	"github.com/oklog/ulid/v2"
	"golang.org/x/sys/unix"

	"vivarium/guest"
	"vivarium/guest/wire"
	"vivarium/sandbox"
	"vivarium/spool"
)

// execution is one exec: its record, its output, and, while it runs, the stream
// to the guest.
type execution struct {
	b      *box
	stdout *spool.Stream
	stderr *spool.Stream
	done   chan struct{} // closed when it has ended

	mu      sync.Mutex
	rec     sandbox.Exec      // guarded by mu
	stream  *guest.ExecStream // nil while there is none; guarded by mu
	changed chan struct{}     // closed when stream changes; guarded by mu
	rest    func()            // ends its activity
	asked   sandbox.ExecSpec  // as the caller gave it
}

func newExecution(b *box, rec sandbox.Exec) (*execution, error) {
	x := &execution{b: b, rec: rec, done: make(chan struct{}), changed: make(chan struct{}), rest: func() {}}
	var err error
	if x.stdout, x.stderr, err = b.e.spools(rec.SandboxID, rec.ID); err != nil {
		return nil, err
	}
	return x, nil
}

// spools opens the outputs of an exec.
func (e *Engine) spools(sandboxID, execID string) (stdout, stderr *spool.Stream, err error) {
	dir := filepath.Join(e.spoolDir(sandboxID), execID)
	if stdout, err = spool.Open(filepath.Join(dir, "stdout"), e.opts.SpoolExec); err != nil {
		return nil, nil, err
	}
	if stderr, err = spool.Open(filepath.Join(dir, "stderr"), e.opts.SpoolExec); err != nil {
		_ = stdout.Close()
		return nil, nil, err
	}
	return stdout, stderr, nil
}

func (x *execution) running() bool {
	select {
	case <-x.done:
		return false
	default:
		return true
	}
}

// record is the exec as it now is.
func (x *execution) record() sandbox.Exec {
	x.mu.Lock()
	defer x.mu.Unlock()
	r := x.rec
	r.StdoutFirst, r.StdoutLen = x.stdout.Bounds()
	r.StderrFirst, r.StderrLen = x.stderr.Bounds()
	if x.stream != nil {
		r.StdinLen, _ = x.stream.StdinTaken()
	}
	return r
}

// StartExec starts a command. The same id again gives the same exec; an empty
// id is chosen.
func (e *Engine) StartExec(ctx context.Context, tenant, ref, id string, spec sandbox.ExecSpec) (sandbox.Exec, error) {
	b, err := e.living(ctx, tenant, ref)
	if err != nil {
		return sandbox.Exec{}, err
	}
	chosen := id != ""
	if !chosen {
		id = "ex-" + ulid.Make().String()
	} else if !execForm.MatchString(id) {
		return sandbox.Exec{}, sandbox.Invalid.Errorf("exec id %q: want up to 128 of a-z, A-Z, 0-9, _, ., : and -, the first a letter or digit", id)
	}
	if strings.HasPrefix(id, probePrefix) {
		return sandbox.Exec{}, sandbox.Invalid.Errorf("exec id %q: %s begins the id of a probe", id, probePrefix).WithHint("use another id")
	}
	if len(spec.Argv) == 0 {
		return sandbox.Exec{}, sandbox.Invalid.Errorf("no command given")
	}
	if id == sandbox.MainExec && !wantsMain(b.record().Spec) {
		return sandbox.Exec{}, sandbox.Invalid.Errorf("exec id %q is that of the main command, and sandbox %s has none", id, b.id).WithHint("use another id")
	}
	if chosen { // it may be the id of one that only the guest knows
		b.askOnce(ctx)
	} else {
		b.askLater()
	}
	if st := b.record(); !st.Stage.Usable() {
		if st.Stage == sandbox.StageStopping || st.Stage == sandbox.StageEnded {
			return sandbox.Exec{}, b.endedError()
		}
		if _, err := e.waitBox(ctx, b, UntilRunning); err != nil {
			return sandbox.Exec{}, err
		}
	}
	x, err := b.startExec(ctx, id, spec)
	if err != nil {
		return sandbox.Exec{}, err
	}
	return x.record(), nil
}

// startLimit bounds how long a guest may take to start a command.
const startLimit = 30 * time.Second

// startExec starts a command, or gives the one that has this id.
func (b *box) startExec(ctx context.Context, id string, spec sandbox.ExecSpec) (*execution, error) {
	sb := b.record()
	now := time.Now()
	rec := sandbox.Exec{ID: id, SandboxID: b.id, Tenant: b.tenant, Spec: spec, State: sandbox.ExecStarting, Started: now}
	b.mu.Lock()
	if x, ok := b.execs[id]; ok {
		same := x.same(spec)
		b.mu.Unlock()
		if !same {
			return nil, sandbox.Exists.Errorf("exec %s exists, with another command", id).WithHint("use a new id for a new command")
		}
		return x, nil
	}
	if b.ending != nil {
		b.mu.Unlock()
		return nil, b.endedError()
	}
	if l := b.e.opts.Limits.MaxExecs; l > 0 && b.running >= l {
		b.mu.Unlock()
		return nil, sandbox.Exhausted.Errorf("%d commands are running in sandbox %s, as many as may", b.running, b.id).WithHint("wait for some of them, or end them")
	}
	x, err := newExecution(b, rec)
	if err != nil {
		b.mu.Unlock()
		return nil, err
	}
	x.asked = spec
	b.execs[id] = x
	b.running++
	b.mu.Unlock()
	x.rest = b.begin()
	// a caller that goes away does not take back a start
	sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), startLimit)
	defer cancel()
	c, err := b.guest(sctx)
	var s *guest.ExecStream
	if err == nil {
		s, err = c.StartExec(sctx, id, execSpec(&sb, b.environment(), spec))
	}
	if err != nil {
		x.abandon()
		if k := sandbox.KindOf(err); sctx.Err() != nil && (k == sandbox.Timeout || k == sandbox.Unavailable) {
			// with no command running nobody else would notice that the guest was
			// killed or stopped (F4)
			b.end(ending{reason: sandbox.ReasonKilled, message: "the guest does not answer: " + err.Error()})
		}
		if sandbox.KindOf(err) == sandbox.Unavailable && b.isEnding() { // that is why
			return nil, b.endedError()
		}
		return nil, err
	}
	x.mu.Lock()
	if x.rec.State == sandbox.ExecLost { // the sandbox's end was first, which closes s
		x.mu.Unlock()
		return nil, b.endedError()
	}
	x.rec.State, x.rec.PID = sandbox.ExecRunning, s.Started.PID
	x.stream = s
	x.mu.Unlock()
	b.e.putExec(x.record())
	b.e.events.emit(b.tenant, b.id, eventExec, spec.Argv[0], map[string]string{"exec": id})
	b.e.wg.Go(func() { x.pump(s) })
	return x, nil
}

// same says whether the exec is the one that spec asks for. Of one of which only
// the guest knew, it is not recorded what was asked for: it is now.
func (x *execution) same(spec sandbox.ExecSpec) bool {
	x.mu.Lock()
	unknown := len(x.asked.Argv) == 0
	if unknown {
		x.asked, x.rec.Spec = spec, spec
	}
	same := reflect.DeepEqual(x.asked, spec)
	x.mu.Unlock()
	if unknown {
		x.b.e.putExec(x.record())
	}
	return same
}

// spec is what was asked for; known is false if nobody knows it any more.
func (x *execution) spec() (s sandbox.ExecSpec, known bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.asked, len(x.asked.Argv) > 0
}

// abandon forgets an exec that the guest never started.
func (x *execution) abandon() {
	x.mu.Lock()
	if x.rec.State == sandbox.ExecLost { // the sandbox's end was first
		x.mu.Unlock()
		return
	}
	x.rec.State = sandbox.ExecLost
	x.mu.Unlock()
	b := x.b
	b.mu.Lock()
	delete(b.execs, x.rec.ID)
	b.running--
	b.mu.Unlock()
	close(x.done)
	x.rest()
}

func (e *Engine) putExec(x sandbox.Exec) {
	e.store.PutExec(x).Then(func(err error) {
		if err != nil {
			e.log.Error("store exec", "sandbox", x.SandboxID, "exec", x.ID, "err", err)
		}
	})
}

const (
	// ackEvery is how much output is taken before the guest is told that it may
	// forget it.
	ackEvery = 128 << 10
	// freeRate is how fast output is taken, in bytes a second, that nobody reads
	// and that pushes older output out: a flood is not to keep the daemon busy.
	freeRate = 64 << 20
	// readerPatience is how long a reader that does not move can hold up the
	// command that writes to it.
	readerPatience = 30 * time.Second
)

// pump takes the output of an exec until it ends, attaching again when the
// connection is lost.
func (x *execution) pump(s *guest.ExecStream) {
	wait := 10 * time.Millisecond
	var lost time.Time
	for {
		if s != nil {
			st, err := x.drain(s)
			if err == nil {
				x.exited(s, st)
				return
			}
			_ = s.Close()
			x.setStream(nil)
			if sandbox.KindOf(err) == sandbox.Exhausted { // the host's disk is full
				x.b.e.log.Error("keep output", "sandbox", x.b.id, "exec", x.rec.ID, "err", err)
			}
		}
		if lost.IsZero() {
			lost = time.Now()
		}
		select {
		case <-x.b.gone:
			return // endExecs has marked it
		case <-x.b.quit:
			return
		case <-x.done:
			return
		case <-time.After(wait):
		}
		wait = min(2*wait, time.Second)
		next, err := x.attach()
		switch {
		case err == nil:
			s, lost = next, time.Time{}
			wait = 10 * time.Millisecond
		case errors.Is(err, sandbox.NotFound), errors.Is(err, sandbox.Conflict):
			x.b.e.log.Warn("exec is lost", "sandbox", x.b.id, "exec", x.rec.ID, "err", err)
			x.lose()
			return
		case errors.Is(err, sandbox.Gone):
			s = nil
		default:
			s = nil
			if time.Since(lost) > guestPatience {
				x.b.end(ending{reason: sandbox.ReasonKilled, message: "the guest does not answer: " + err.Error()})
			}
		}
	}
}

// guestPatience is how long a guest may be out of reach while a command runs.
const guestPatience = 20 * time.Second

func (x *execution) attach() (*guest.ExecStream, error) {
	ctx, cancel := context.WithTimeout(x.b.life, startLimit)
	defer cancel()
	c, err := x.b.guest(ctx)
	if err != nil {
		return nil, err
	}
	_, out := x.stdout.Bounds()
	_, serr := x.stderr.Bounds()
	s, err := c.AttachExec(ctx, x.rec.ID, out, serr)
	if err != nil {
		return nil, err
	}
	x.setStream(s)
	return s, nil
}

func (x *execution) setStream(s *guest.ExecStream) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.stream = s
	close(x.changed)
	x.changed = make(chan struct{})
}

// drain takes output until the exit, or the stream is lost.
func (x *execution) drain(s *guest.ExecStream) (wire.Exit, error) {
	var pending int
	var off [2]int64
	_, off[0] = x.stdout.Bounds()
	_, off[1] = x.stderr.Bounds()
	for {
		f, err := s.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return wire.Exit{}, err
		}
		switch {
		case f.Exit != nil:
			return *f.Exit, nil
		case f.Stdin:
			continue
		}
		to, i := x.stdout, 0
		if f.Stream == sandbox.Stderr {
			to, i = x.stderr, 1
		}
		if err := x.room(to, len(f.Data)); err != nil {
			return wire.Exit{}, err
		}
		if err := to.Write(f.Data); err != nil {
			return wire.Exit{}, err
		}
		off[i] += int64(len(f.Data))
		if pending += len(f.Data); pending >= ackEvery {
			pending = 0
			if err := s.Ack(off[0], off[1]); err != nil {
				return wire.Exit{}, err
			}
		}
	}
}

// room waits until writing n bytes pushes nothing out that a reader has yet to
// get.
func (x *execution) room(to *spool.Stream, n int) error {
	patience := time.NewTimer(readerPatience)
	defer patience.Stop()
	for {
		lag, readers, changed := to.Lag()
		if readers == 0 {
			if _, length := to.Bounds(); length > to.Cap() {
				time.Sleep(time.Duration(n) * time.Second / freeRate)
			}
			return nil
		}
		if lag+int64(n) <= to.Cap() {
			return nil
		}
		select {
		case <-changed:
		case <-patience.C:
			return nil // the reader will be told what it missed
		case <-x.b.gone:
			return sandbox.Gone.Errorf("sandbox has ended")
		case <-x.b.quit:
			return sandbox.Unavailable.Errorf("the daemon is stopping")
		}
	}
}

// exited notes the status, and lets the guest forget the exec once that is
// durable.
func (x *execution) exited(s *guest.ExecStream, st wire.Exit) {
	x.mu.Lock()
	if x.rec.State == sandbox.ExecLost { // the sandbox's end was first, which closes s
		x.mu.Unlock()
		return
	}
	x.rec.State, x.rec.Exit, x.rec.Ended = sandbox.ExecExited, st.Status, time.Now()
	x.rec.StdinLen, _ = s.StdinTaken()
	x.stream = nil
	x.mu.Unlock()
	rec := x.record()
	p := x.b.e.store.PutExec(rec)
	if rec.Exit.Signal == int(unix.SIGKILL) && !rec.Exit.TimedOut {
		x.b.checkOOM(rec)
	}
	x.over()
	x.b.e.events.emit(x.b.tenant, x.b.id, eventExit, "", exitAttrs(rec))
	if err := p.Wait(); err != nil {
		x.b.e.log.Error("store exec", "sandbox", x.b.id, "exec", rec.ID, "err", err)
		_ = s.Close() // not acknowledged: the guest keeps it
		return
	}
	// a connection that broke meanwhile costs the guest one ended exec
	_ = s.AckExit()
}

// checkOOM ends a box that has run out of memory. The host's kernel may have
// killed a process inside, and not the machine.
func (b *box) checkOOM(killed sandbox.Exec) {
	b.mu.Lock()
	m := b.machine
	b.mu.Unlock()
	if m == nil {
		return
	}
	if u, err := m.Usage(); err != nil || !u.OOM {
		return
	}
	why := ending{reason: sandbox.ReasonOOM}
	if killed.ID == sandbox.MainExec {
		why.exit = &killed.Exit
	}
	b.end(why)
}

// lose marks an exec whose status nobody will ever know.
func (x *execution) lose() {
	x.mu.Lock()
	if x.rec.State == sandbox.ExecExited || x.rec.State == sandbox.ExecLost {
		x.mu.Unlock()
		return
	}
	x.rec.State, x.rec.Ended, x.stream = sandbox.ExecLost, time.Now(), nil
	x.mu.Unlock()
	rec := x.record()
	x.b.e.putExec(rec)
	x.over()
	x.b.e.events.emit(x.b.tenant, x.b.id, eventExit, "", exitAttrs(rec))
}

// over is called once when the exec has ended.
func (x *execution) over() {
	for _, s := range []*spool.Stream{x.stdout, x.stderr} {
		if err := s.Close(); err != nil {
			x.b.e.log.Error("close spool", "sandbox", x.b.id, "exec", x.rec.ID, "err", err)
		}
	}
	close(x.done)
	x.rest()
	x.b.retire(x)
}

const (
	// keepExecs is how many ended execs of a living sandbox are kept.
	keepExecs = 1000
	// keepSpecs is how many bytes their commands and environments may have
	// together: they are held in memory, and one may be two megabytes long.
	keepSpecs = 4 << 20
)

func specSize(s sandbox.ExecSpec) (n int64) {
	for _, a := range s.Argv {
		n += int64(len(a))
	}
	for k, v := range s.Env {
		n += int64(len(k) + len(v))
	}
	return n
}

// retire counts an ended exec, and forgets the oldest ones beyond what is kept.
func (b *box) retire(x *execution) {
	b.mu.Lock()
	b.running--
	b.doneExecs = append(b.doneExecs, x.rec.ID)
	var held, specs int64
	var drop []*execution
	for i := len(b.doneExecs) - 1; i >= 0; i-- {
		o := b.execs[b.doneExecs[i]]
		f1, l1 := o.stdout.Bounds()
		f2, l2 := o.stderr.Bounds()
		held += l1 - f1 + l2 - f2
		specs += specSize(o.rec.Spec)
		if over := len(b.doneExecs)-i > keepExecs || held > b.e.opts.SpoolSandbox || specs > keepSpecs; over && o != x && o.rec.ID != sandbox.MainExec {
			drop = append(drop, o)
			delete(b.execs, o.rec.ID)
			b.doneExecs = append(b.doneExecs[:i], b.doneExecs[i+1:]...)
		}
	}
	b.mu.Unlock()
	for _, o := range drop {
		if err := os.RemoveAll(filepath.Join(b.e.spoolDir(b.id), o.rec.ID)); err != nil {
			b.e.log.Error("remove spool", "sandbox", b.id, "exec", o.rec.ID, "err", err)
		}
		b.e.store.ForgetExec(b.tenant, b.id, o.rec.ID)
	}
}

// endExecs marks what still runs as lost, and takes the tail of the main
// command's output.
func (b *box) endExecs(death *sandbox.Death) {
	b.mu.Lock()
	all := make([]*execution, 0, len(b.execs))
	for _, x := range b.execs {
		all = append(all, x)
	}
	b.mu.Unlock()
	for _, x := range all {
		if x.rec.ID == sandbox.MainExec {
			death.LastOutput = x.tail()
		}
		if x.running() {
			x.lose()
		}
	}
}

// tailSize is how much of the main command's output a death certificate holds.
const tailSize = 4 << 10

func (x *execution) tail() []byte {
	for _, s := range []*spool.Stream{x.stderr, x.stdout} {
		_, length := s.Bounds()
		if length == 0 {
			continue
		}
		b := make([]byte, min(length, tailSize))
		n, at, err := s.ReadAt(b, length-int64(len(b)))
		if err != nil {
			x.b.e.log.Warn("read last output", "sandbox", x.b.id, "err", err)
			continue
		}
		m := 0
		if next := at + int64(n); n < len(b) && next < length { // the ring wraps here
			if m, _, err = s.ReadAt(b[n:], next); err != nil {
				m = 0
			}
		}
		return b[:n+m]
	}
	return nil
}

func exitAttrs(x sandbox.Exec) map[string]string {
	a := map[string]string{"exec": x.ID, "state": string(x.State)}
	if x.State == sandbox.ExecExited {
		a["code"] = itoa(x.Exit.Code)
		if x.Exit.Signal != 0 {
			a["signal"] = itoa(x.Exit.Signal)
		}
		if x.Exit.TimedOut {
			a["timed_out"] = "true"
		}
	}
	return a
}

// withStream gives the stream of a running exec, waiting while it is being
// attached again.
func (x *execution) withStream(ctx context.Context) (*guest.ExecStream, error) {
	for {
		x.mu.Lock()
		s, changed := x.stream, x.changed
		x.mu.Unlock()
		if s != nil {
			return s, nil
		}
		select {
		case <-x.done:
			return nil, sandbox.Conflict.Errorf("exec %s has ended", x.rec.ID)
		case <-changed:
		case <-x.b.quit:
			return nil, sandbox.Unavailable.Errorf("the daemon is stopping")
		case <-ctx.Done():
			return nil, sandbox.Timeout.Errorf("reach exec %s: %w", x.rec.ID, ctx.Err())
		}
	}
}

func (x *execution) signal(ctx context.Context, sig int) error {
	s, err := x.withStream(ctx)
	if err != nil {
		return err
	}
	return s.Signal(sig)
}

// GetExec finds an exec, also of a sandbox that has ended.
func (e *Engine) GetExec(ctx context.Context, tenant, ref, id string) (sandbox.Exec, error) {
	x, err := e.exec(ctx, tenant, ref, id)
	if err != nil {
		return sandbox.Exec{}, err
	}
	return x.record(), nil
}

// exec finds an exec: of a living sandbox the one in memory, else one read back.
func (e *Engine) exec(ctx context.Context, tenant, ref, id string) (*execution, error) {
	b, sb, err := e.find(ctx, tenant, ref)
	if err != nil {
		return nil, err
	}
	if b != nil {
		x, ok := b.known(id)
		if !ok && b.askOnce(ctx) {
			x, ok = b.known(id)
		}
		if !ok {
			return nil, sandbox.NotFound.Errorf("exec %q does not exist in sandbox %s", id, b.id)
		}
		return x, nil
	}
	all, err := e.store.Execs(ctx, tenant, sb.ID)
	if err != nil {
		return nil, err
	}
	for _, rec := range all {
		if rec.ID == id {
			return e.ended(sb, rec)
		}
	}
	return nil, sandbox.NotFound.Errorf("exec %q does not exist in sandbox %s", id, sb.ID)
}

func (b *box) known(id string) (*execution, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	x, ok := b.execs[id]
	return x, ok
}

// ended makes an execution of the record of one that has ended.
func (e *Engine) ended(sb sandbox.Sandbox, rec sandbox.Exec) (*execution, error) {
	x, err := newExecution(&box{e: e, id: sb.ID, tenant: sb.Tenant, gone: closed, quit: make(chan struct{})}, rec)
	if err != nil {
		return nil, err
	}
	close(x.done)
	return x, errors.Join(x.stdout.Close(), x.stderr.Close())
}

var closed = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// ListExecs lists those of a sandbox that are kept.
func (e *Engine) ListExecs(ctx context.Context, tenant, ref string) ([]sandbox.Exec, error) {
	b, sb, err := e.find(ctx, tenant, ref)
	if err != nil {
		return nil, err
	}
	if b == nil {
		recs, err := e.store.Execs(ctx, tenant, sb.ID)
		sortExecs(recs)
		return recs, err
	}
	b.askOnce(ctx)
	b.mu.Lock()
	all := make([]*execution, 0, len(b.execs))
	for _, x := range b.execs {
		all = append(all, x)
	}
	b.mu.Unlock()
	recs := make([]sandbox.Exec, len(all))
	for i, x := range all {
		recs[i] = x.record()
	}
	sortExecs(recs)
	return recs, nil
}

// WaitExec returns when the exec has exited or is lost.
func (e *Engine) WaitExec(ctx context.Context, tenant, ref, id string) (sandbox.Exec, error) {
	x, err := e.exec(ctx, tenant, ref, id)
	if err != nil {
		return sandbox.Exec{}, err
	}
	select {
	case <-x.done:
		return x.record(), nil
	case <-x.b.quit:
		return sandbox.Exec{}, sandbox.Unavailable.Errorf("the daemon is stopping")
	case <-ctx.Done():
		return x.record(), sandbox.Timeout.Errorf("wait for exec %s: %w", id, ctx.Err())
	}
}

// WriteStdin gives bytes to an exec's standard input. Offset is that of the
// first byte; what was sent before is skipped, so a write may be repeated. It
// returns how many bytes were sent in all.
func (e *Engine) WriteStdin(ctx context.Context, tenant, ref, id string, offset int64, p []byte, eof bool) (int64, error) {
	x, err := e.exec(ctx, tenant, ref, id)
	if err != nil {
		return 0, err
	}
	if asked, known := x.spec(); known && asked.Stdin != sandbox.StdinPipe && asked.PTY == nil {
		return 0, sandbox.Conflict.Errorf("exec %s has no standard input", id).WithHint("start it with stdin: pipe")
	}
	s, err := x.withStream(ctx)
	if err != nil {
		return 0, err
	}
	end := x.b.begin()
	defer end()
	if err := s.WriteStdin(ctx, offset, p, eof); err != nil {
		return 0, err
	}
	return offset + int64(len(p)), nil
}

// SignalExec sends a signal to an exec's process group. One that has ended is no
// error.
func (e *Engine) SignalExec(ctx context.Context, tenant, ref, id string, signal int) error {
	x, err := e.exec(ctx, tenant, ref, id)
	if err != nil {
		return err
	}
	if !x.running() {
		return nil
	}
	return x.signal(ctx, signal)
}

// ResizeExec sets the size of an exec's terminal.
func (e *Engine) ResizeExec(ctx context.Context, tenant, ref, id string, size sandbox.WindowSize) error {
	x, err := e.exec(ctx, tenant, ref, id)
	if err != nil {
		return err
	}
	if asked, known := x.spec(); known && asked.PTY == nil {
		return sandbox.Conflict.Errorf("exec %s has no terminal", id)
	}
	s, err := x.withStream(ctx)
	if err != nil {
		return err
	}
	return s.Resize(size)
}
