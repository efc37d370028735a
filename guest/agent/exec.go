package agent

import (
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

const (
	// stdinWindow is how many bytes of stdin the host may be ahead of the
	// command.
	stdinWindow = 256 << 10
	// graceFirst is when the output of an ended command that is still held open
	// is looked at; graceAll is how long it is taken.
	graceFirst = 10 * time.Millisecond
	graceAll   = 200 * time.Millisecond
	pipeSize   = 1 << 20
)

// execution is one command.
type execution struct {
	a       *Agent
	id      string
	sum     [32]byte // of the request that started it
	pid     int
	pty     bool
	started time.Time
	ready   sync.WaitGroup // until it was started, or failed is set
	failed  error

	mu   sync.Mutex
	cond sync.Cond // any change below
	out  [2]output // stdout, stderr
	in   *input    // nil without stdin

	gen    int   // which attached connection counts
	conn   *conn // the attached connection
	grace  *time.Timer
	over   bool // the grace has passed
	exited bool // the process was reaped
	timed  bool // its timeout killed it
	done   bool // exited, and all output that counts is in
	status sandbox.ExitStatus
	ended  time.Time
	timer  *time.Timer // timeout
}

// output is one of the streams of an execution.
type output struct {
	f      *os.File // nil: no such stream
	ring   ring
	eof    bool
	target int64 // once exited: all that the command itself wrote is before it; -1 unknown
	big    bool  // the pipe was enlarged
}

// input is the standard input of an execution.
type input struct {
	f      *os.File
	buf    []byte // received, not yet being written
	got    int64  // bytes received
	taken  int64  // bytes written to the command
	eof    bool   // no more is to come after buf
	closed bool
}

func (e *execution) have(i int) bool { return e.out[i].f != nil }

// read takes output stream i until its end.
func (e *execution) read(i int) {
	o := &e.out[i]
	raw, err := o.f.SyscallConn()
	if err != nil {
		e.mu.Lock()
		e.endOutput(o)
		e.mu.Unlock()
		return
	}
	var trash []byte
	var flow pace
	poll := poller{fd: -1}
	defer poll.close()
	for {
		flow.wait()
		e.mu.Lock()
		var p []byte
		for {
			if e.exited && o.target < 0 && e.over {
				o.target = o.ring.end + int64(poll.pending(raw))
				e.check()
			}
			if e.done {
				if trash == nil {
					trash = make([]byte, 16<<10)
				}
				p = trash
				break
			}
			if p = o.ring.space(); len(p) > 0 {
				break
			}
			e.cond.Wait()
		}
		if len(p) > wire.MaxChunk {
			p = p[:wire.MaxChunk]
		}
		e.mu.Unlock()

		n, err := poll.read(o.f, p)
		if err == errIdle {
			if poll.rest() {
				continue
			}
			// too long without a byte to go on looking: wait for it again
			e.mu.Lock()
			o.f, raw, err = poll.leave()
			e.mu.Unlock()
			if err == nil {
				continue
			}
		}

		e.mu.Lock()
		if n > 0 && !e.done {
			o.ring.end += int64(n)
			if flow.took(n, len(p), e.exited) && !o.big && !e.pty {
				o.big = true
				o.ring.widen()
				raw.Control(func(fd uintptr) { unix.FcntlInt(fd, unix.F_SETPIPE_SZ, pipeSize) })
			}
			if flow.rest && !e.pty {
				poll.enter(o.f, raw)
			}
			e.check()
			e.cond.Broadcast()
		}
		switch {
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded):
			o.f.SetReadDeadline(time.Time{})
		default:
			// The end; of a terminal that nobody holds any more it is EIO.
			e.endOutput(o)
			e.mu.Unlock()
			return
		}
		e.mu.Unlock()
	}
}

// pace makes the reads of a fast stream of small writes larger: a program that
// writes much in little pieces would otherwise wake us for each of them, which
// costs more than the copying. Its pipe is large by then, so it does not wait.
type pace struct {
	since time.Time
	bytes int
	rest  bool
}

const (
	paceSpan  = 20 * time.Millisecond
	paceBytes = 256 << 10 // in a span: a fast stream
	paceRead  = 192 << 10 // reads of that size are large enough
	paceNap   = 1500 * time.Microsecond
)

// took counts a read of n bytes into room for so many, and says whether the
// stream is a fast one. A read that filled the room left more behind: no rest.
func (p *pace) took(n, room int, ended bool) bool {
	now := time.Now()
	if now.Sub(p.since) > paceSpan {
		p.since, p.bytes = now, 0
	}
	p.bytes += n
	fast := p.bytes >= paceBytes
	p.rest = fast && n < paceRead && n < room && !ended
	return fast
}

func (p *pace) wait() {
	if p.rest {
		p.rest = false
		time.Sleep(paceNap)
	}
}

// endOutput notes the end of a stream. e.mu is held.
func (e *execution) endOutput(o *output) {
	o.eof = true
	if !e.pty {
		o.f.Close()
	}
	e.check()
	e.cond.Broadcast()
}

// pending is how many bytes wait in a pipe or terminal.
func pending(raw syscall.RawConn) (n int) {
	raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	return max(n, 0)
}

// reaped takes the status of the command's process.
func (e *execution) reaped(st unix.WaitStatus) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.exited, e.ended = true, time.Now()
	if st.Signaled() {
		e.status.Signal = int(st.Signal())
		e.status.Code = 128 + e.status.Signal
	} else {
		e.status.Code = st.ExitStatus()
	}
	e.status.TimedOut = e.timed
	if e.timer != nil {
		e.timer.Stop()
	}
	if e.check(); e.done {
		return
	}
	e.grace = time.AfterFunc(graceFirst, func() {
		// The output is held by others: find out how much of it is there now.
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.done {
			return
		}
		e.over = true
		for i := range e.out {
			if o := &e.out[i]; o.f != nil && !o.eof {
				o.f.SetReadDeadline(time.Unix(1, 0))
			}
		}
		e.cond.Broadcast()
		e.grace = time.AfterFunc(graceAll-graceFirst, func() {
			e.mu.Lock()
			defer e.mu.Unlock()
			e.grace = nil
			e.check()
			e.cond.Broadcast()
		})
	})
}

// check finds out whether the execution is done. e.mu is held.
func (e *execution) check() {
	if !e.exited || e.done {
		return
	}
	for i := range e.out {
		o := &e.out[i]
		if o.f == nil || o.eof {
			continue
		}
		if e.grace != nil || !e.over || o.target < 0 || o.ring.end < o.target {
			return
		}
	}
	e.done = true
	if e.grace != nil {
		e.grace.Stop()
	}
	if e.in != nil {
		e.closeInput()
	}
	if e.pty {
		e.out[0].f.Close() // hangs up
	}
	e.cond.Broadcast()
}

// write feeds the command's standard input until its end.
func (e *execution) write() {
	in := e.in
	var spare []byte
	e.mu.Lock()
	defer e.mu.Unlock()
	for {
		for len(in.buf) == 0 && !in.eof && !in.closed {
			e.cond.Wait()
		}
		if in.closed {
			return
		}
		if len(in.buf) == 0 {
			if e.pty {
				// A terminal's input has no end: say it the way a person does.
				e.mu.Unlock()
				in.f.Write([]byte{4})
				e.mu.Lock()
				in.closed = true
				e.cond.Broadcast()
				return
			}
			e.closeInput()
			return
		}
		p := in.buf
		whole := p
		in.buf = spare[:0]
		for len(p) > 0 {
			e.mu.Unlock()
			n, err := in.f.Write(p[:min(len(p), 64<<10)])
			e.mu.Lock()
			in.taken += int64(n)
			p = p[n:]
			if err != nil || in.closed {
				e.closeInput()
				return
			}
			e.cond.Broadcast()
		}
		if spare = whole[:0]; cap(spare) > 64<<10 {
			spare = nil
		}
	}
}

// closeInput ends standard input: whatever else comes is dropped. e.mu is held.
func (e *execution) closeInput() {
	if e.in.closed {
		return
	}
	e.in.closed = true
	e.in.buf = nil
	if !e.pty {
		e.in.f.Close()
	}
	e.cond.Broadcast()
}

// stdin takes bytes from the host. What was received before is skipped.
func (e *execution) stdin(off int64, eof bool, p []byte) error {
	in := e.in
	if in == nil {
		return sandbox.Invalid.Errorf("this command was started without stdin")
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if in.closed {
		return nil
	}
	have := in.got
	switch {
	case off > have:
		return sandbox.Invalid.Errorf("stdin at offset %d, have %d bytes", off, have)
	case off+int64(len(p)) < have:
		return nil // an old one again
	}
	p = p[have-off:]
	if len(p) > 0 && in.eof {
		return sandbox.Invalid.Errorf("stdin after its end")
	}
	if have+int64(len(p))-in.taken > stdinWindow {
		return sandbox.Invalid.Errorf("stdin beyond the window")
	}
	in.buf = append(in.buf, p...)
	in.got += int64(len(p))
	in.eof = in.eof || eof
	e.cond.Broadcast()
	return nil
}

// kill sends a signal to the command's process group.
func (e *execution) kill(sig int) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.exited || e.pid == 0 {
		return nil
	}
	err := unix.Kill(-e.pid, unix.Signal(sig))
	if err == unix.ESRCH {
		err = unix.Kill(e.pid, unix.Signal(sig))
	}
	if err != nil && err != unix.ESRCH {
		return sandbox.Invalid.Errorf("send signal %d: %w", sig, err)
	}
	return nil
}

func (e *execution) resize(w sandbox.WindowSize) error {
	if !e.pty {
		return sandbox.Conflict.Errorf("this command has no terminal")
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.done {
		return nil
	}
	return setSize(e.out[0].f, w)
}

// timeout ends the command and everything that it started.
func (e *execution) timeout() {
	e.mu.Lock()
	if e.exited {
		e.mu.Unlock()
		return
	}
	e.timed = true
	pid := e.pid
	e.mu.Unlock()
	e.a.killTree(pid, e.id)
}
