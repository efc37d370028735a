package guest

import (
	"context"
	"io"
	"math"
	"sync"
	"time"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// StdinWindow is how many bytes of stdin may be sent beyond what the command
// has taken.
const StdinWindow = 256 << 10

// ExecStream is a connection to a running or ended exec. One goroutine calls
// Recv; the other methods may be called by others at the same time.
type ExecStream struct {
	c *Client
	h *hostConn
	// Started is what the guest said first.
	Started wire.Started

	next [2]int64 // offsets that Recv expects; only Recv touches them

	mu     sync.Mutex
	seen   [2]int64 // next, for Ack
	taken  int64    // of stdin
	sent   int64    // of stdin
	shut   bool     // the command takes no more stdin
	wake   chan struct{}
	exit   *wire.Exit
	err    error // why Recv ended
	closed bool
}

// Frame is one thing that an exec sent.
type Frame struct {
	Stream sandbox.Stream // of Data; 0 where this is not output
	Off    int64          // of Data[0] in its stream
	Data   []byte         // valid until the next Recv
	// Exit is set in the last frame: the status, and the final lengths of the
	// streams, which have been received in full.
	Exit *wire.Exit
	// Stdin is set when the command took standard input: see StdinTaken.
	Stdin bool
}

// StartExec starts a command under an id that the caller chose, or, if the same
// request was made before, attaches to it from the first output that was not
// acknowledged. An exec that could not be started for a fault of its own
// (program, directory or user missing) is an exec all the same, with exit
// status 126 or 127 and the reason in it. Errors: Invalid, Exists (the id is
// that of another command), Exhausted, Unavailable, Timeout, Gone.
func (c *Client) StartExec(ctx context.Context, id string, spec sandbox.ExecSpec) (*ExecStream, error) {
	s := wire.NewStart(id, spec)
	if err := s.Check(); err != nil {
		return nil, err
	}
	return c.exec(ctx, wire.TStart, s.Append, nil)
}

// AttachExec attaches to an exec from these offsets on, which acknowledges all
// before them. Whoever was attached is cut off (Conflict). Errors: NotFound,
// Conflict (what is at the offsets is no longer, or not yet, there), and those
// of StartExec.
func (c *Client) AttachExec(ctx context.Context, id string, stdoutOff, stderrOff int64) (*ExecStream, error) {
	a := wire.Attach{ID: id, Stdout: stdoutOff, Stderr: stderrOff}
	return c.exec(ctx, wire.TAttach, a.Append, &[2]int64{stdoutOff, stderrOff})
}

func (c *Client) exec(ctx context.Context, t wire.Type, fill func([]byte) []byte, from *[2]int64) (*ExecStream, error) {
	h, rt, p, err := c.request(ctx, t, fill)
	if err != nil {
		return nil, err
	}
	switch rt {
	case wire.TError:
		return nil, c.answered(h, p)
	case wire.TStarted:
		st, err := wire.DecodeStarted(p)
		if err != nil || from != nil && [2]int64{st.Stdout, st.Stderr} != *from {
			c.discard(h)
			return nil, broken("start answered wrongly")
		}
		h.c.SetReadDeadline(time.Time{})
		s := &ExecStream{c: c, h: h, Started: st, wake: make(chan struct{})}
		s.next = [2]int64{st.Stdout, st.Stderr}
		s.seen = s.next
		s.taken, s.sent, s.shut = st.Stdin, st.Stdin, st.StdinClosed
		return s, nil
	}
	c.discard(h)
	return nil, broken("frame of type %d for a start", rt)
}

// Recv returns what comes next. After the frame with the exit it returns
// io.EOF. Any other error means that the stream is lost, not that the command
// has ended: attach again.
func (s *ExecStream) Recv() (Frame, error) {
	s.mu.Lock()
	err, exit := s.err, s.exit
	s.mu.Unlock()
	if err != nil {
		return Frame{}, err
	}
	if exit != nil {
		return Frame{}, io.EOF
	}
	t, p, err := s.h.r.Next()
	if err != nil {
		return Frame{}, s.fail(s.c.failure(err))
	}
	d := wire.NewDec(p)
	switch t {
	case wire.TStdout, wire.TStderr:
		i := int(t - wire.TStdout)
		off := d.Int()
		data := d.Rest()
		if d.Bad() || len(data) == 0 || off != s.next[i] || off > math.MaxInt64-int64(len(data)) {
			return Frame{}, s.fail(broken("output at offset %d, expected %d", off, s.next[i]))
		}
		s.next[i] += int64(len(data))
		s.mu.Lock()
		s.seen[i] = s.next[i]
		s.mu.Unlock()
		return Frame{Stream: sandbox.Stdout + sandbox.Stream(i), Off: off, Data: data}, nil
	case wire.TStdinAck:
		off, shut := d.Int(), d.Bool()
		s.mu.Lock()
		ok := d.End() == nil && off >= s.taken && off <= s.sent
		if ok {
			s.taken, s.shut = off, s.shut || shut
			close(s.wake)
			s.wake = make(chan struct{})
		}
		s.mu.Unlock()
		if !ok {
			return Frame{}, s.fail(broken("stdin acknowledged wrongly"))
		}
		return Frame{Stdin: true}, nil
	case wire.TExit:
		x, err := wire.DecodeExit(p)
		if err != nil || [2]int64{x.Stdout, x.Stderr} != s.next {
			return Frame{}, s.fail(broken("exit does not match the output"))
		}
		s.mu.Lock()
		s.exit, s.shut = &x, true
		close(s.wake)
		s.wake = make(chan struct{})
		s.mu.Unlock()
		return Frame{Exit: &x}, nil
	case wire.TTaken:
		return Frame{}, s.fail(sandbox.Conflict.Errorf("another connection attached to this exec"))
	case wire.TError:
		e, err := wire.DecodeError(d)
		if err != nil {
			return Frame{}, s.fail(lost(err))
		}
		return Frame{}, s.fail(e)
	}
	return Frame{}, s.fail(broken("frame of type %d in an exec", t))
}

// fail notes why the stream ended and frees everybody who waits.
func (s *ExecStream) fail(err error) error {
	s.mu.Lock()
	if s.err == nil {
		s.err = err
		close(s.wake)
		s.wake = make(chan struct{})
	}
	err = s.err
	s.mu.Unlock()
	s.h.close()
	return err
}

// Ack says that output before these offsets is safe: the guest drops it. It
// must not be beyond what Recv returned.
func (s *ExecStream) Ack(stdout, stderr int64) error {
	s.mu.Lock()
	ok := stdout <= s.seen[0] && stderr <= s.seen[1] && stdout >= 0 && stderr >= 0
	err, exit := s.err, s.exit
	s.mu.Unlock()
	switch {
	case err != nil:
		return err
	case !ok:
		return sandbox.Internal.Errorf("acknowledge output that was not received")
	case exit != nil:
		return nil // AckExit will do
	}
	return s.sendErr(s.h.send(wire.TAck, func(b []byte) []byte { return wire.AppendInt(wire.AppendInt(b, stdout), stderr) }))
}

func (s *ExecStream) sendErr(err error) error {
	if err == nil {
		return nil
	}
	return s.c.failure(err)
}

// AckExit says that the exit and all output are safe: the guest forgets the
// exec. The stream is closed by that.
func (s *ExecStream) AckExit() error {
	s.mu.Lock()
	if s.exit == nil || s.closed {
		s.mu.Unlock()
		return sandbox.Internal.Errorf("acknowledge an exit that was not received")
	}
	s.closed = true
	s.mu.Unlock()
	if err := s.h.send(wire.TExitAck, nil); err != nil {
		s.c.discard(s.h)
		return s.c.failure(err)
	}
	s.c.put(s.h)
	return nil
}

// StdinTaken is how many bytes of standard input the command has taken, and
// whether it takes no more.
func (s *ExecStream) StdinTaken() (int64, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.taken, s.shut
}

// WriteStdin sends standard input that belongs at offset off; what was sent
// before is skipped, so a write may be repeated. It waits while the window is
// full, which only Recv can open. With eof, the input ends after p. Where the
// command takes no more input it does nothing. It returns when all is sent, not
// when it is taken.
func (s *ExecStream) WriteStdin(ctx context.Context, off int64, p []byte, eof bool) error {
	for {
		s.mu.Lock()
		err, shut, sent, room, wake := s.err, s.shut, s.sent, s.taken+StdinWindow-s.sent, s.wake
		closed := s.closed
		if off > sent || off < 0 {
			s.mu.Unlock()
			return sandbox.Invalid.Errorf("stdin at offset %d, only %d bytes were sent", off, sent)
		}
		skip := min(sent-off, int64(len(p)))
		p, off = p[skip:], off+skip
		n := min(int64(len(p)), room, 64<<10)
		last := n == int64(len(p))
		if err == nil && !shut && !closed && (n > 0 || last) {
			s.sent += n
		}
		s.mu.Unlock()
		switch {
		case err != nil:
			return err
		case shut || closed:
			return nil
		case n > 0 || last && eof:
			err := s.h.data(wire.TStdin, func(b []byte) []byte { return wire.AppendBool(wire.AppendInt(b, off), last && eof) }, p[:n])
			if err != nil {
				return s.sendErr(err)
			}
			p, off = p[n:], off+n
			if last {
				return nil
			}
		case last:
			return nil
		default:
			select {
			case <-wake:
			case <-ctx.Done():
				return lost(context.Cause(ctx))
			}
		}
	}
}

// Resize sets the size of the terminal.
func (s *ExecStream) Resize(w sandbox.WindowSize) error {
	return s.sendErr(s.h.send(wire.TResize, func(b []byte) []byte {
		return wire.AppendUint(wire.AppendUint(b, uint64(w.Rows)), uint64(w.Cols))
	}))
}

// Signal sends a signal to the command's process group.
func (s *ExecStream) Signal(sig int) error {
	if sig < 1 || sig > 64 {
		return sandbox.Invalid.Errorf("no such signal: %d", sig)
	}
	return s.sendErr(s.h.send(wire.TSignal, func(b []byte) []byte { return wire.AppendUint(b, uint64(sig)) }))
}

// Close detaches. The command goes on, and nothing is lost: what was not
// acknowledged is sent again to whoever attaches next.
func (s *ExecStream) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	s.mu.Unlock()
	s.fail(sandbox.Unavailable.Errorf("the stream was closed"))
	s.c.discard(s.h)
	return nil
}
