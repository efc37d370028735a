package agent

import (
	"bytes"
	"crypto/sha256"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

const (
	// maxUnproved is how many connections may be in the handshake; one more
	// drops the oldest, so that a process inside cannot keep the host out.
	maxUnproved = 32
	// handshakeTime is how long a connection may be in it.
	handshakeTime = 5 * time.Second
	// maxExecs is how many execs are known, ended ones that the host has not
	// acknowledged included.
	maxExecs = 4096
)

var past = time.Unix(1, 0)

// Agent is the guest.
type Agent struct {
	reaper *reaper
	files  *fileRunner
	bootID string
	groups bool // process 1 has supplementary groups, which a command must not inherit
	boot   time.Time

	mu       sync.Mutex
	key      []byte
	execs    map[string]*execution
	unproved []*conn // oldest first
	trimming bool    // memory will be given back soon
}

// accept takes connections for ever.
func (a *Agent) accept(l *listener) error {
	for n := 0; ; n++ {
		fd, err := l.accept()
		switch err {
		case nil:
		case unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.ENOBUFS:
			a.dropOldest()
			time.Sleep(5 * time.Millisecond)
			continue
		default:
			return err
		}
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) // fails on a unix socket
		c, err := newConn(fd)
		if err != nil {
			unix.Close(fd)
			continue
		}
		a.mu.Lock()
		var old *conn
		if len(a.unproved) >= maxUnproved {
			old, a.unproved = a.unproved[0], a.unproved[1:]
		}
		a.unproved = append(a.unproved, c)
		a.mu.Unlock()
		if old != nil {
			old.close()
		}
		go a.handle(c)
		if n == 0 {
			time.AfterFunc(spareAfter, spareThreads)
		}
	}
}

func (a *Agent) dropOldest() {
	a.mu.Lock()
	var old *conn
	if len(a.unproved) > 0 {
		old, a.unproved = a.unproved[0], a.unproved[1:]
	}
	a.mu.Unlock()
	if old != nil {
		old.close()
	}
}

// proved takes c off the list of those in the handshake.
func (a *Agent) proved(c *conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for i, o := range a.unproved {
		if o == c {
			a.unproved = append(a.unproved[:i], a.unproved[i+1:]...)
			return
		}
	}
}

// handle serves a connection until it ends.
func (a *Agent) handle(c *conn) {
	defer c.close()
	c.deadline(handshakeTime)
	a.mu.Lock()
	key := a.key
	a.mu.Unlock()
	err := wire.GuestHandshake(c.f, key)
	a.proved(c)
	if err != nil {
		return
	}
	c.deadline(0)
	c.r = wire.NewReader(c.f, wire.GuestLimit)
	defer c.r.Release()
	for {
		t, p, err := c.r.Next()
		if err != nil {
			return
		}
		c.settle() // a host that begins something new has the answer to the last
		free := a.first(c, t, p)
		if c.moved.Swap(0) > trimBytes {
			a.trim()
		}
		if !free {
			return
		}
		c.r.Idle()
	}
}

// first acts on a first frame. True means that the connection is free again.
func (a *Agent) first(c *conn, t wire.Type, p []byte) bool {
	switch t {
	case wire.TCredit: // of a transfer that is over
		return true
	case wire.TStart:
		e, created, err := a.start(p)
		if err != nil {
			return c.fail(err) == nil
		}
		e.mu.Lock()
		out, errs := e.out[0].ring.base, e.out[1].ring.base
		e.mu.Unlock()
		return e.serve(c, created, out, errs)
	case wire.TAttach:
		at, err := wire.DecodeAttach(p)
		if err != nil {
			return false
		}
		a.mu.Lock()
		e := a.execs[at.ID]
		a.mu.Unlock()
		if e != nil {
			e.ready.Wait()
		}
		if e == nil || e.failed != nil {
			return c.fail(sandbox.NotFound.Errorf("no exec %q in the sandbox", at.ID)) == nil
		}
		e.mu.Lock()
		for i, off := range [2]int64{at.Stdout, at.Stderr} {
			if r := &e.out[i].ring; err == nil && (off < r.base || off > r.end) {
				err = sandbox.Conflict.Errorf("output at offset %d is not held: %d to %d is", off, r.base, r.end)
			}
		}
		e.mu.Unlock()
		if err != nil {
			return c.fail(err) == nil
		}
		return e.serve(c, false, at.Stdout, at.Stderr)
	case wire.TControl:
		a.control(c)
		return false
	case wire.TCall: // one, on a connection that is for other things as well
		return a.once(c, p)
	case wire.TRead:
		return a.readFile(c, p) == nil
	case wire.TWrite:
		return a.writeFile(c, bytes.Clone(p)) == nil
	case wire.TList:
		return a.list(c, p) == nil
	case wire.TTarOut:
		return a.tarOut(c, p) == nil
	case wire.TTarIn:
		return a.tarIn(c, bytes.Clone(p)) == nil
	case wire.TWatch:
		return a.watch(c, p) == nil
	case wire.TDial:
		return a.dialPort(c, p) == nil
	}
	return false
}

// start starts an exec, or finds the one that the same request started.
func (a *Agent) start(p []byte) (*execution, bool, error) {
	s, err := wire.DecodeStart(p)
	if err != nil {
		if sandbox.KindOf(err) != sandbox.Invalid {
			err = sandbox.Invalid.Errorf("request to start: %w", err)
		}
		return nil, false, err
	}
	sum := sha256.Sum256(p)
	a.mu.Lock()
	e := a.execs[s.ID]
	if e != nil {
		a.mu.Unlock()
		if e.sum != sum {
			return nil, false, sandbox.Exists.Errorf("exec %q was started with another command", s.ID)
		}
		e.ready.Wait()
		if e.failed != nil {
			return nil, false, e.failed
		}
		return e, false, nil
	}
	if len(a.execs) >= maxExecs {
		a.mu.Unlock()
		return nil, false, sandbox.Exhausted.Errorf("%d execs are running or not yet collected", maxExecs).WithHint("end some of them")
	}
	e = &execution{a: a, id: s.ID, sum: sum}
	e.cond.L = &e.mu
	e.ready.Add(1)
	a.execs[s.ID] = e
	a.mu.Unlock()
	if e.failed = e.spawn(s); e.failed != nil {
		a.forget(e)
	}
	e.ready.Done()
	return e, true, e.failed
}

// forget drops an exec that the host knows all about.
func (a *Agent) forget(e *execution) {
	a.mu.Lock()
	if a.execs[e.id] == e {
		delete(a.execs, e.id)
	}
	a.mu.Unlock()
	e.out[0].ring.free()
	e.out[1].ring.free()
}

// spareAfter is when that is done: not while the host waits for the first
// output.
const spareAfter = 20 * time.Millisecond

// spareThreads makes the runtime create threads while it still can: once the
// sandbox is at its limit of processes (A1, A8), a runtime that needs another
// one dies, and with it the sandbox. Idle threads are never given back.
func spareThreads() {
	const n = 12
	var all sync.WaitGroup
	all.Add(n)
	leave := make(chan struct{})
	for range n {
		go func() {
			runtime.LockOSThread()
			all.Done()
			<-leave
			runtime.UnlockOSThread()
		}()
	}
	all.Wait()
	close(leave)
}
