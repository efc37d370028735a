package gvisor

import (
	"context"
	"runtime"
	"sync"
	"time"

	"vivarium/sandbox"
)

// bootTimeout bounds the boot of one pooled machine.
const bootTimeout = 30 * time.Second

// pool keeps machines that have booted and have no image yet.
type pool struct {
	r      *Runtime
	size   int
	class  sandbox.Resources
	ctx    context.Context
	cancel context.CancelFunc
	wake   chan struct{}
	done   chan struct{}

	mu    sync.Mutex
	free  []*machine // oldest first; guarded by mu
	taken time.Time  // when the last was taken; guarded by mu
}

func newPool(r *Runtime, size int, class sandbox.Resources) *pool {
	p := &pool{r: r, size: size, class: class, wake: make(chan struct{}, 1), done: make(chan struct{})}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	go p.fill()
	return p
}

// fits says whether a pooled machine can become one of this size: how many CPUs
// and how much memory it shows inside is settled when it boots, the rest can be
// set later.
func (p *pool) fits(res sandbox.Resources) bool {
	return res.MemoryLimit == p.class.MemoryLimit && cpus(res) == cpus(p.class)
}

// cpus is how many CPUs gVisor shows for a limit: never fewer than 2, never more
// than the host has.
func cpus(res sandbox.Resources) int64 {
	n := int64(runtime.NumCPU())
	if res.CPULimit > 0 {
		n = min(n, max(2, (res.CPULimit+999)/1000))
	}
	return n
}

// take gives a machine that is alive, or nil.
func (p *pool) take(res sandbox.Resources) *machine {
	if p.size == 0 || !p.fits(res) {
		return nil
	}
	defer p.poke()
	for {
		p.mu.Lock()
		if len(p.free) == 0 {
			p.mu.Unlock()
			return nil
		}
		m := p.free[0]
		p.free = p.free[1:]
		p.taken = time.Now()
		p.mu.Unlock()
		select {
		case <-m.done: // it died while it waited; the filler removes it
			p.discard(m)
			continue
		default:
		}
		return m
	}
}

func (p *pool) ready() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.free)
}

func (p *pool) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// checkEvery is how often waiting machines are checked for being alive.
const checkEvery = 5 * time.Second

// fill boots machines one at a time until the pool is full, then waits. A
// failure makes it wait longer each time, so that a broken host is not busy
// with failing.
func (p *pool) fill() {
	defer close(p.done)
	backoff := 100 * time.Millisecond
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	for p.ctx.Err() == nil {
		p.sweep()
		if p.ready() >= p.size {
			select {
			case <-p.ctx.Done():
			case <-p.wake:
			case <-tick.C:
			}
			continue
		}
		if wait := p.courtesy(); wait > 0 {
			select {
			case <-p.ctx.Done():
			case <-time.After(wait):
			}
			continue
		}
		ctx, cancel := context.WithTimeout(p.ctx, bootTimeout)
		m, err := p.r.boot(ctx, p.class, true)
		cancel()
		if err != nil {
			if p.ctx.Err() == nil {
				p.r.log.Warn("refill pool", "err", err, "retry_in", backoff)
			}
			select {
			case <-p.ctx.Done():
			case <-time.After(backoff):
			}
			backoff = min(2*backoff, 30*time.Second)
			continue
		}
		backoff = 100 * time.Millisecond
		p.mu.Lock()
		p.free = append(p.free, m)
		p.mu.Unlock()
	}
}

// quietTime is how long the pool waits after a take before it boots the next
// machine: whoever took one wants the CPU for what he took it for.
const quietTime = 80 * time.Millisecond

// courtesy is how long to wait yet; 0 when the pool runs low.
func (p *pool) courtesy() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) <= p.size/4 {
		return 0
	}
	return quietTime - time.Since(p.taken)
}

// sweep removes waiting machines that have died.
func (p *pool) sweep() {
	p.mu.Lock()
	var dead []*machine
	alive := p.free[:0:0]
	for _, m := range p.free {
		select {
		case <-m.done:
			dead = append(dead, m)
		default:
			alive = append(alive, m)
		}
	}
	p.free = alive
	p.mu.Unlock()
	for _, m := range dead {
		p.r.log.Warn("pooled machine died", "machine", m.id)
		p.discard(m)
	}
}

func (p *pool) discard(m *machine) {
	ctx, cancel := context.WithTimeout(context.Background(), killTimeout)
	defer cancel()
	if err := m.Remove(ctx); err != nil {
		p.r.log.Error("remove pooled machine", "machine", m.id, "err", err)
	}
}

// close stops filling and removes what waits.
func (p *pool) close() {
	p.cancel()
	<-p.done
	p.mu.Lock()
	free := p.free
	p.free = nil
	p.mu.Unlock()
	for _, m := range free {
		p.discard(m)
	}
}
