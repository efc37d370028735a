package guest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// Options are settings of a Client; zero values are the defaults.
type Options struct {
	// PingInterval is how often the guest is asked whether it is there while
	// streams are open; while none is, idlePings times as long: a machine that
	// dies is noticed from outside, and a thousand idle guests are not to be
	// woken for nothing. Default 10 s.
	PingInterval time.Duration
	// PingTimeout is how long its answer may take before every stream fails with
	// sandbox.Unavailable. Default 20 s.
	PingTimeout time.Duration
	// HandshakeTimeout bounds one attempt to connect. Default 3 s.
	HandshakeTimeout time.Duration
	// StartTimeout bounds the guest's answer to the start of an exec and to
	// calls. Default 30 s.
	StartTimeout time.Duration
	// TransferTimeout bounds how long a transfer of a file or an archive may wait
	// for the guest. Default 2 minutes.
	TransferTimeout time.Duration
	// Ready, if not nil, is closed (or sends) when the guest has said that it
	// listens; see package agent. Connect waits for it, but not longer than
	// 50 ms, before it tries: trying costs the sandbox time while it starts.
	Ready <-chan struct{}
	// Idle is how many connections are kept for the next exec. Default 2.
	Idle int
}

func (o *Options) defaults() {
	set := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	set(&o.PingInterval, 10*time.Second)
	set(&o.PingTimeout, 20*time.Second)
	set(&o.HandshakeTimeout, 3*time.Second)
	set(&o.StartTimeout, 30*time.Second)
	set(&o.TransferTimeout, 2*time.Minute)
	if o.Idle <= 0 {
		o.Idle = 2
	}
}

// Client talks to the guest of one sandbox. It is safe for use by many
// goroutines. Its methods return errors with a kind: sandbox.Gone when the
// sandbox has ended, sandbox.Unavailable when the guest does not answer (trying
// again may help; execs go on and can be attached to again), and what the guest
// says otherwise.
type Client struct {
	dial Dialer
	opts Options
	life context.Context
	end  context.CancelCauseFunc
	wg   sync.WaitGroup

	mu      sync.Mutex
	key     []byte
	idle    []*hostConn
	filling bool
	open    map[*hostConn]struct{} // in use by a stream
	calls   *control               // nil until needed
	// separate means that calls go over a connection of their own: one in
	// between has failed.
	separate bool
}

// Connect connects to the guest, trying again until ctx ends: a sandbox that
// was just started may refuse, or accept and close.
func Connect(ctx context.Context, dial Dialer, key []byte, o Options) (*Client, error) {
	o.defaults()
	if len(key) != wire.KeySize {
		return nil, sandbox.Internal.Errorf("guest key of %d bytes", len(key))
	}
	c := &Client{dial: dial, key: slices.Clone(key), opts: o, open: map[*hostConn]struct{}{}}
	c.life, c.end = context.WithCancelCause(context.Background())
	if o.Ready != nil {
		select {
		case <-o.Ready:
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
	h, err := c.connect(ctx)
	if err != nil {
		c.end(err)
		return nil, err
	}
	c.idle = append(c.idle, h)
	c.wg.Go(c.watch)
	return c, nil
}

// Close ends the client. Execs go on in the sandbox.
func (c *Client) Close() error {
	c.Fail(sandbox.Unavailable.Errorf("the client of the guest was closed"))
	c.wg.Wait()
	return nil
}

// Fail ends the client, and everything that waits in it, with err: for whoever
// knows that the sandbox has ended (sandbox.Gone) before the guest's silence
// tells it.
func (c *Client) Fail(err error) {
	c.end(err)
	c.drop()
}

// drop closes every connection.
func (c *Client) drop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range c.idle {
		h.close()
	}
	c.idle = nil
	for h := range c.open {
		h.close()
	}
	if c.calls != nil {
		c.calls.h.close()
	}
}

// failure makes err what the caller should see: why the client ended, if it has.
func (c *Client) failure(err error) error {
	if err == nil {
		return nil
	}
	if cause := context.Cause(c.life); cause != nil {
		return cause
	}
	return lost(err)
}

// connect makes a new authenticated connection.
func (c *Client) connect(ctx context.Context) (*hostConn, error) {
	wait := 300 * time.Microsecond
	for {
		h, err := c.try(ctx)
		if err == nil {
			return h, nil
		}
		if cause := context.Cause(c.life); cause != nil {
			return nil, cause
		}
		switch {
		case errors.Is(err, sandbox.Gone):
			return nil, err
		case errors.Is(err, wire.ErrVersion):
			return nil, sandbox.Unavailable.Errorf("connect to guest: %w", err)
		case errors.Is(err, wire.ErrAuth):
			return nil, sandbox.Denied.Errorf("connect to guest: %w", err)
		}
		select {
		case <-ctx.Done():
			k := sandbox.Unavailable
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				k = sandbox.Timeout
			}
			return nil, k.Errorf("connect to guest: %w (last: %v)", context.Cause(ctx), err)
		case <-c.life.Done():
		case <-time.After(wait):
		}
		wait = min(wait*3/2, 25*time.Millisecond)
	}
}

func (c *Client) try(ctx context.Context) (*hostConn, error) {
	ctx, cancel := context.WithTimeout(ctx, c.opts.HandshakeTimeout)
	defer cancel()
	stopLife := context.AfterFunc(c.life, cancel)
	defer stopLife()
	nc, err := c.dial(ctx)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	key := c.key
	c.mu.Unlock()
	stop := interrupt(ctx, nc)
	err = wire.HostHandshake(nc, key)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		nc.Close()
		return nil, err
	}
	return &hostConn{c: nc, r: wire.NewReader(nc, wire.HostLimit)}, nil
}

// take returns a connection that is ready for a first frame, and whether it is
// an old one, which may turn out to be dead.
func (c *Client) take(ctx context.Context) (h *hostConn, old bool, err error) {
	c.mu.Lock()
	for n := len(c.idle); n > 0 && !c.idle[n-1].alive(); n = len(c.idle) {
		c.idle[n-1].close()
		c.idle = c.idle[:n-1]
	}
	if n := len(c.idle); n > 0 {
		h, c.idle = c.idle[n-1], c.idle[:n-1]
		c.open[h] = struct{}{}
	}
	fill := len(c.idle) == 0 && !c.filling && c.life.Err() == nil
	if fill {
		c.filling = true
		c.wg.Go(c.fill)
	}
	c.mu.Unlock()
	if h != nil {
		return h, true, nil
	}
	h, err = c.connect(ctx)
	if err != nil {
		return nil, false, err
	}
	c.mu.Lock()
	c.open[h] = struct{}{}
	c.mu.Unlock()
	if c.life.Err() != nil {
		c.discard(h)
		return nil, false, context.Cause(c.life)
	}
	return h, false, nil
}

// fillAfter is how long a spare connection is put off: the sandbox has better
// things to do at the start of a command, and short ones give theirs back.
const fillAfter = 200 * time.Millisecond

// fill makes one spare connection, in the background, where there is none by
// then.
func (c *Client) fill() {
	select {
	case <-c.life.Done():
	case <-time.After(fillAfter):
	}
	c.mu.Lock()
	enough := len(c.idle) > 0 || c.life.Err() != nil
	if enough {
		c.filling = false
	}
	c.mu.Unlock()
	if enough {
		return
	}
	ctx, cancel := context.WithTimeout(c.life, c.opts.HandshakeTimeout)
	defer cancel()
	h, err := c.connect(ctx)
	c.mu.Lock()
	c.filling = false
	c.mu.Unlock()
	if err == nil {
		c.put(h)
	}
}

// put gives a connection back on which nothing is outstanding.
func (c *Client) put(h *hostConn) {
	h.c.SetDeadline(time.Time{})
	h.r.Idle()
	c.mu.Lock()
	delete(c.open, h)
	keep := c.life.Err() == nil && len(c.idle) < c.opts.Idle && h.r.Buffered() == 0
	if keep {
		c.idle = append(c.idle, h)
	}
	c.mu.Unlock()
	if !keep {
		h.close()
	}
}

// discard closes a connection that was taken.
func (c *Client) discard(h *hostConn) {
	h.close()
	c.mu.Lock()
	delete(c.open, h)
	c.mu.Unlock()
}

// request sends a first frame and returns the first answer, on a new
// connection if the one that was kept turns out to be dead. The request must
// be one that can be made twice.
func (c *Client) request(ctx context.Context, t wire.Type, fill func([]byte) []byte) (*hostConn, wire.Type, []byte, error) {
	for {
		h, old, err := c.take(ctx)
		if err != nil {
			return nil, 0, nil, err
		}
		err = h.send(t, fill)
		var rt wire.Type
		var p []byte
		if err == nil {
			rt, p, err = h.next(ctx, c.opts.StartTimeout)
		}
		if err == nil {
			return h, rt, p, nil
		}
		c.discard(h)
		if old && ctx.Err() == nil && !errors.Is(err, wire.ErrFrame) && sandbox.KindOf(lost(err)) == sandbox.Unavailable && c.life.Err() == nil {
			c.flush()
			continue
		}
		return nil, 0, nil, c.failure(err)
	}
}

// flush drops the idle connections: one of them was dead, so all may be.
func (c *Client) flush() {
	c.mu.Lock()
	idle := c.idle
	c.idle = nil
	c.mu.Unlock()
	for _, h := range idle {
		h.close()
	}
}

// answered gives the connection back after an answer of type TError, whose
// error it returns.
func (c *Client) answered(h *hostConn, p []byte) error {
	e, err := wire.DecodeError(wire.NewDec(p))
	if err != nil {
		c.discard(h)
		return lost(err)
	}
	c.put(h)
	return e
}
