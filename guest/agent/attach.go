package agent

import (
	"sync"
	"time"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// serve drives the connection c of execution e until the host has taken its
// status (true: the connection can be used for something else) or is gone.
// Output goes from the given offsets on; what is before them counts as
// acknowledged.
func (e *execution) serve(c *conn, created bool, stdout, stderr int64) bool {
	e.mu.Lock()
	if old := e.conn; old != nil {
		old.f.SetReadDeadline(past) // its reader leaves
		old.f.SetWriteDeadline(time.Now().Add(time.Second))
	}
	e.gen++
	gen := e.gen
	e.conn = c
	e.out[0].ring.ack(stdout)
	e.out[1].ring.ack(stderr)
	e.cond.Broadcast() // the old sender leaves, and there may be room
	e.mu.Unlock()

	s := &sender{e: e, c: c, gen: gen, created: created}
	s.sent = [2]int64{stdout, stderr}
	s.written, s.acked = s.sent, s.sent
	var wg sync.WaitGroup
	wg.Go(s.run)
	reuse := e.receive(c, s)
	e.mu.Lock()
	taken := e.gen != gen
	if !taken {
		e.conn = nil
		e.gen++
		if reuse {
			e.a.forget(e)
		}
	}
	e.cond.Broadcast()
	e.mu.Unlock()
	if !reuse && !taken {
		c.close() // ends a sender that is blocked
	}
	wg.Wait()
	return reuse && !taken
}

// receive takes the host's frames.
func (e *execution) receive(c *conn, s *sender) bool {
	for {
		t, p, err := c.r.Next()
		if err != nil {
			return false
		}
		d := wire.NewDec(p)
		switch t {
		case wire.TStdin:
			off, eof := d.Int(), d.Bool()
			data := d.Rest()
			if d.Bad() {
				return false
			}
			if err = e.stdin(off, eof, data); err != nil {
				c.fail(err)
				return false
			}
			c.r.Idle()
		case wire.TAck:
			stdout, stderr := d.Int(), d.Int()
			if d.End() != nil || !s.ack(stdout, stderr) {
				return false
			}
		case wire.TResize:
			w := sandbox.WindowSize{Rows: uint16(d.Uint(1<<16 - 1)), Cols: uint16(d.Uint(1<<16 - 1))}
			if d.End() != nil {
				return false
			}
			e.resize(w)
		case wire.TSignal:
			sig := int(d.Uint(64))
			if d.End() != nil {
				return false
			}
			e.kill(sig)
		case wire.TExitAck:
			if d.End() != nil {
				return false
			}
			e.mu.Lock()
			ok := s.finished
			e.mu.Unlock()
			if ok {
				c.settle()
			}
			return ok
		default:
			return false
		}
	}
}

// sender sends an execution's output over one connection.
type sender struct {
	e       *execution
	c       *conn
	gen     int
	created bool
	// Guarded by e.mu:
	sent     [2]int64 // handed to the connection, per stream
	written  [2]int64 // taken by the connection: only that can be dropped
	acked    [2]int64 // acknowledged, perhaps before the write has returned
	finished bool     // the exit was handed to the connection
}

// ack drops what the host has made safe.
func (s *sender) ack(stdout, stderr int64) bool {
	e := s.e
	e.mu.Lock()
	defer e.mu.Unlock()
	for i, o := range [2]int64{stdout, stderr} {
		if o > s.sent[i] {
			return false
		}
		// While a frame is being written its bytes must stay where they are.
		s.acked[i] = max(s.acked[i], o)
		e.out[i].ring.ack(min(s.acked[i], s.written[i]))
	}
	e.cond.Broadcast()
	return true
}

func (s *sender) run() {
	e := s.e
	var inSent int64 = -1
	inClosed := false
	head := make([]byte, 0, 32)
	err := s.c.frame(wire.TStarted, func(b []byte) []byte {
		e.mu.Lock()
		defer e.mu.Unlock()
		st := wire.Started{PID: e.pid, Stdout: s.sent[0], Stderr: s.sent[1], Created: s.created, At: e.started}
		if e.in != nil {
			inSent, inClosed = e.in.taken, e.in.closed
			st.Stdin, st.StdinClosed = inSent, inClosed
		} else {
			st.StdinClosed = true
		}
		return st.Append(b)
	})
	if err != nil {
		s.c.close()
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for {
		if e.gen != s.gen {
			if e.conn != nil {
				e.mu.Unlock()
				s.c.frame(wire.TTaken, nil)
				s.c.close()
				e.mu.Lock()
			}
			return
		}
		if e.in != nil && (inClosed != e.in.closed || e.in.taken >= inSent+stdinWindow/4 || e.in.taken > inSent && len(e.in.buf) == 0) {
			inSent, inClosed = e.in.taken, e.in.closed
			off, closed := inSent, inClosed
			if !s.unlocked(func() error {
				return s.c.frame(wire.TStdinAck, func(b []byte) []byte { return wire.AppendBool(wire.AppendInt(b, off), closed) })
			}) {
				return
			}
			continue
		}
		i := 0
		for i < 2 && s.sent[i] >= e.out[i].ring.end {
			i++
		}
		// Not more than gVisor's TCP takes in at once: where port forwarding has
		// missed that there is something (see nudgeAfter), a nudge must still get
		// through to it.
		room := wire.Window - (s.sent[0] - s.acked[0]) - (s.sent[1] - s.acked[1])
		if i < 2 && room > 0 {
			o := &e.out[i]
			p := o.ring.at(s.sent[i])
			p = p[:min(int64(len(p)), wire.MaxChunk, room)]
			off := s.sent[i]
			s.sent[i] += int64(len(p))
			t := wire.TStdout
			if i == 1 {
				t = wire.TStderr
			}
			ok := s.unlocked(func() error {
				head = append(head[:0], 0, 0, 0, 0)
				head = wire.AppendInt(head, off)
				wire.PutHeader(head, t, len(head)-wire.HeaderSize+len(p))
				return s.c.send(head, p)
			})
			if !ok {
				return
			}
			s.written[i] = s.sent[i]
			if s.acked[i] > o.ring.base && e.gen == s.gen {
				o.ring.ack(min(s.acked[i], s.written[i]))
				e.cond.Broadcast()
			}
			continue
		}
		if i == 2 && e.done && !s.finished {
			s.finished = true
			x := wire.Exit{Status: e.status, Stdout: e.out[0].ring.end, Stderr: e.out[1].ring.end, At: e.ended}
			s.unlocked(func() error { return s.c.frame(wire.TExit, x.Append) })
			return
		}
		e.cond.Wait()
	}
}

// unlocked calls send without e.mu; false means that the connection is gone.
func (s *sender) unlocked(send func() error) bool {
	s.e.mu.Unlock()
	err := send()
	if err != nil {
		s.c.close()
	}
	s.e.mu.Lock()
	return err == nil
}
