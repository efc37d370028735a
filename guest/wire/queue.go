package wire

import (
	"errors"
	"io"
	"sync"
)

// Window is how many bytes of data may be on the way in one direction of an
// upload or a port connection beyond what the receiver has said (TCredit) that
// it has dealt with.
//
// It makes the two directions independent of each other, and it must stay well
// below the send buffer of gVisor's netstack (1 MiB): its port-forward drops
// what a full send buffer does not take of a write.
const Window = 512 << 10

// CreditStep is how many bytes a receiver deals with before it says so.
const CreditStep = Window / 4

var errWindow = errors.New("more data than the window allows")

// Queue holds received bytes, at most Window, until they are dealt with. The
// receiving side of a connection puts into it without ever waiting.
type Queue struct {
	mu   sync.Mutex
	cond sync.Cond
	buf  []byte
	err  error // after the bytes
	gone bool  // nobody takes any more
	idle []byte
}

// NewQueue returns an empty Queue.
func NewQueue() *Queue {
	q := &Queue{}
	q.cond.L = &q.mu
	return q
}

// Put appends a copy of p. More than Window bytes are an error.
func (q *Queue) Put(p []byte) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.gone || q.err != nil {
		return nil
	}
	if len(q.buf)+len(p) > Window {
		return errWindow
	}
	q.buf = append(q.buf, p...)
	q.cond.Broadcast()
	return nil
}

// End makes Take return err once the bytes are taken. Only the first End
// counts.
func (q *Queue) End(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err == nil {
		q.err = err
		q.cond.Broadcast()
	}
}

// Abort drops the bytes and ends the queue with err at once.
func (q *Queue) Abort(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.buf, q.idle, q.gone = nil, nil, true
	if q.err == nil || q.err == io.EOF {
		q.err = err
	}
	q.cond.Broadcast()
}

// Take waits for bytes and returns all that are there. They are valid until the
// next Take. There must be one taker at a time.
func (q *Queue) Take() ([]byte, error) { return q.TakeBy(nil) }

// TakeBy is Take that gives up when late, asked before each wait, returns an
// error. Wake makes it be asked again.
func (q *Queue) TakeBy(late func() error) ([]byte, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.buf) == 0 {
		if q.err != nil {
			return nil, q.err
		}
		if late != nil {
			if err := late(); err != nil {
				return nil, err
			}
		}
		q.cond.Wait()
	}
	p := q.buf
	q.buf, q.idle = q.idle[:0], p
	return p, nil
}

// Wake makes TakeBy look at its deadline.
func (q *Queue) Wake() {
	q.mu.Lock()
	q.cond.Broadcast()
	q.mu.Unlock()
}

// Flow counts what may be sent.
type Flow struct {
	mu   sync.Mutex
	cond sync.Cond
	sent int64
	told int64 // dealt with by the other side
	err  error
}

// NewFlow returns a Flow with a full window.
func NewFlow() *Flow {
	f := &Flow{}
	f.cond.L = &f.mu
	return f
}

// Wait waits until bytes may be sent, and takes as many as it may of n.
func (f *Flow) Wait(n int) (int, error) { return f.WaitBy(n, nil) }

// WaitBy is Wait that gives up when late, asked before each wait, returns an
// error. Wake makes it be asked again.
func (f *Flow) WaitBy(n int, late func() error) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for {
		if f.err != nil {
			return 0, f.err
		}
		if room := f.told + Window - f.sent; room > 0 {
			n = min(n, int(room), MaxChunk)
			f.sent += int64(n)
			return n, nil
		}
		if late != nil {
			if err := late(); err != nil {
				return 0, err
			}
		}
		f.cond.Wait()
	}
}

// Wake makes WaitBy look at its deadline.
func (f *Flow) Wake() {
	f.mu.Lock()
	f.cond.Broadcast()
	f.mu.Unlock()
}

// Credit takes the payload of a TCredit frame.
func (f *Flow) Credit(p []byte) error {
	d := NewDec(p)
	told := d.Int()
	f.mu.Lock()
	defer f.mu.Unlock()
	if d.End() != nil || told < f.told || told > f.sent {
		return ErrFrame
	}
	f.told = told
	f.cond.Broadcast()
	return nil
}

// Fail ends every Wait with err.
func (f *Flow) Fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		f.err = err
	}
	f.cond.Broadcast()
}

// Tally counts what was dealt with, and says when the sender is to be told.
type Tally struct{ n, said int64 }

// Add counts n bytes. Where tell is true, a TCredit frame with total is due.
func (t *Tally) Add(n int) (total int64, tell bool) {
	t.n += int64(n)
	if t.n-t.said < CreditStep {
		return 0, false
	}
	t.said = t.n
	return t.n, true
}
