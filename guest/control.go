package guest

import (
	"context"
	"errors"
	"sync"
	"time"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// control is the connection for calls. A failed one is replaced by the next
// call.
type control struct {
	h  *hostConn
	mu sync.Mutex
	// waiting holds who waits for the reply to a call; nil once it has failed.
	waiting map[uint64]chan reply
	last    uint64
	err     error
}

type reply struct {
	p   []byte
	err error
}

// call makes a control call and returns the payload of the reply. It does with
// a connection that is there already where it can: a new one costs the sandbox
// more than most calls.
func (c *Client) call(ctx context.Context, m wire.Method, fill func([]byte) []byte) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, c.opts.StartTimeout)
	defer cancel()
	if h := c.spare(); h != nil {
		p, err := h.callOnce(ctx, m, fill)
		var said *sandbox.Error
		if err == nil || errors.As(err, &said) {
			c.put(h)
			return p, err
		}
		c.discard(h)
		if ctx.Err() != nil || c.life.Err() != nil {
			return nil, c.failure(err)
		}
		// it was dead, or the guest is older than such calls
		c.flush()
		c.mu.Lock()
		c.separate = true
		c.mu.Unlock()
	}
	for try := 0; ; try++ {
		k, fresh, err := c.controlConn(ctx)
		if err != nil {
			return nil, err
		}
		p, err := k.call(ctx, m, fill)
		if err == nil {
			return p, nil
		}
		var said *sandbox.Error
		if errors.As(err, &said) {
			return nil, err
		}
		if fresh || try > 0 || ctx.Err() != nil || c.life.Err() != nil {
			return nil, c.failure(err)
		}
	}
}

// spare takes an idle connection for a call; nil if there is none, or one that
// is for calls.
func (c *Client) spare() *hostConn {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.separate || c.calls != nil && c.calls.alive() || c.life.Err() != nil {
		return nil
	}
	for n := len(c.idle); n > 0; n = len(c.idle) {
		h := c.idle[n-1]
		c.idle = c.idle[:n-1]
		if h.alive() {
			c.open[h] = struct{}{}
			return h
		}
		h.close()
	}
	return nil
}

// callOnce makes a call as the only one on its connection. An error that is not
// a *sandbox.Error leaves the connection of no more use.
func (h *hostConn) callOnce(ctx context.Context, m wire.Method, fill func([]byte) []byte) ([]byte, error) {
	const id = 1
	if err := h.send(wire.TCall, func(b []byte) []byte {
		b = wire.AppendUint(wire.AppendUint(b, id), uint64(m))
		if fill != nil {
			b = fill(b)
		}
		return b
	}); err != nil {
		return nil, err
	}
	t, p, err := h.next(ctx, 0)
	if err != nil {
		return nil, err
	}
	d := wire.NewDec(p)
	if d.Uint(1<<62) != id || d.Bad() {
		return nil, wire.ErrFrame
	}
	switch t {
	case wire.TReply:
		return append([]byte(nil), d.Rest()...), nil
	case wire.TFail:
		said, err := wire.DecodeError(d)
		if err != nil {
			return nil, wire.ErrFrame
		}
		return nil, said
	}
	return nil, wire.ErrFrame
}

func (c *Client) controlConn(ctx context.Context) (*control, bool, error) {
	c.mu.Lock()
	k := c.calls
	c.mu.Unlock()
	if k != nil && k.alive() {
		return k, false, nil
	}
	h, err := c.connect(ctx)
	if err != nil {
		return nil, false, err
	}
	if err := h.send(wire.TControl, nil); err != nil {
		h.close()
		return nil, false, c.failure(err)
	}
	n := &control{h: h, waiting: map[uint64]chan reply{}}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.life.Err() != nil {
		h.close()
		return nil, false, context.Cause(c.life)
	}
	if c.calls != nil && c.calls.alive() {
		h.close() // somebody was quicker
		return c.calls, false, nil
	}
	c.calls = n
	c.wg.Go(n.read)
	return n, true, nil
}

func (k *control) alive() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.err == nil
}

const maxCalls = 1024

func (k *control) call(ctx context.Context, m wire.Method, fill func([]byte) []byte) ([]byte, error) {
	ch := make(chan reply, 1)
	k.mu.Lock()
	if k.err != nil {
		defer k.mu.Unlock()
		return nil, k.err
	}
	if len(k.waiting) >= maxCalls {
		k.mu.Unlock()
		return nil, sandbox.Exhausted.Errorf("more than %d calls wait for the guest", maxCalls)
	}
	k.last++
	id := k.last
	k.waiting[id] = ch
	k.mu.Unlock()
	err := k.h.send(wire.TCall, func(b []byte) []byte {
		b = wire.AppendUint(wire.AppendUint(b, id), uint64(m))
		if fill != nil {
			b = fill(b)
		}
		return b
	})
	if err != nil {
		k.fail(err)
	}
	select {
	case r := <-ch:
		return r.p, r.err
	case <-ctx.Done():
		k.mu.Lock()
		delete(k.waiting, id)
		k.mu.Unlock()
		return nil, lost(context.Cause(ctx))
	}
}

// read hands out replies until the connection fails. A reply to nobody is one
// whose caller has left.
func (k *control) read() {
	for {
		t, p, err := k.h.r.Next()
		if err != nil {
			k.fail(err)
			return
		}
		d := wire.NewDec(p)
		id := d.Uint(1 << 62)
		var r reply
		switch t {
		case wire.TReply:
			r.p = append([]byte(nil), d.Rest()...)
		case wire.TFail:
			var said *sandbox.Error
			if said, err = wire.DecodeError(d); err == nil {
				r.err = said
			}
		default:
			err = wire.ErrFrame
		}
		if d.Bad() || err != nil {
			k.fail(wire.ErrFrame)
			return
		}
		k.mu.Lock()
		ch := k.waiting[id]
		delete(k.waiting, id)
		k.mu.Unlock()
		if ch != nil {
			ch <- r
		}
	}
}

func (k *control) fail(err error) {
	k.h.close()
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.err == nil {
		k.err = err
	}
	for id, ch := range k.waiting {
		ch <- reply{err: k.err}
		delete(k.waiting, id)
	}
}

// idlePings is how many intervals pass between two pings of an idle guest.
const idlePings = 30

// watch asks the guest now and then whether it is there. When it is not, every
// stream fails, so that nobody waits for a sandbox that has vanished.
func (c *Client) watch() {
	for n := 1; ; n++ {
		select {
		case <-c.life.Done():
			return
		case <-time.After(c.opts.PingInterval):
		}
		c.mu.Lock()
		busy := len(c.open) > 0
		c.mu.Unlock()
		if !busy && n%idlePings != 0 {
			continue
		}
		ctx, cancel := context.WithTimeout(c.life, c.opts.PingTimeout)
		_, err := c.Ping(ctx)
		cancel()
		if err != nil && c.life.Err() == nil {
			if errors.Is(err, sandbox.Gone) {
				c.Fail(err)
				return
			}
			c.drop()
		}
	}
}
