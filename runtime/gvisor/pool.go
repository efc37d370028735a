package gvisor

import (
	"context"
	"crypto/rand"
	"os"
	"runtime"
	"sync"
	"time"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// bootTimeout bounds the boot of one pooled machine.
const bootTimeout = 30 * time.Second

// pool keeps machines that have booted. Most have no image yet and can become
// any sandbox of their size; where the same image is asked for again and again,
// up to half of them are warm: the guest runs on that image already.
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
	after time.Time  // machines that were found again come first until then; guarded by mu
	last  string     // image that was asked for last; guarded by mu
	hot   string     // image that warm machines are made for, "" for none; guarded by mu
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

// take gives a machine that is alive, or nil: a warm one if there is one for
// this sandbox, else one without an image.
func (p *pool) take(spec sandbox.BootSpec) *machine {
	if p.size == 0 || !p.fits(spec.Resources) {
		return nil
	}
	defer p.poke()
	for {
		m := p.pick(spec)
		if m == nil {
			return nil
		}
		if m.dead() { // while it waited
			p.discard(m)
			continue
		}
		return m
	}
}

func (p *pool) pick(spec sandbox.BootSpec) *machine {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.taken = time.Now()
	if spec.ImagePath == p.last {
		p.hot = p.last // twice in a row
	}
	p.last = spec.ImagePath
	best := -1
	for i, m := range p.free {
		if m.warm == nil {
			if best < 0 {
				best = i
			}
		} else if m.warm.suits(spec.ImagePath, spec.Resources, spec.Capabilities) {
			best = i
			break
		}
	}
	if best < 0 {
		return nil
	}
	m := p.free[best]
	p.free = append(p.free[:best:best], p.free[best+1:]...)
	return m
}

// heat makes one machine warm if there are too few for the hot image. It says
// whether it did something.
func (p *pool) heat() (bool, error) {
	p.mu.Lock()
	warm, plain := 0, -1
	for i, m := range p.free {
		if m.warm != nil && m.warm.image == p.hot {
			warm++
		} else if m.warm == nil && plain < 0 {
			plain = i
		}
	}
	if p.hot == "" || warm >= p.size/2 || plain < 0 {
		p.mu.Unlock()
		return false, nil
	}
	m := p.free[plain]
	p.free = append(p.free[:plain:plain], p.free[plain+1:]...)
	w := &warmth{image: p.hot, res: p.class, key: make([]byte, wire.KeySize)}
	p.mu.Unlock()
	rand.Read(w.key) // never fails: see its documentation
	ctx, cancel := context.WithTimeout(p.ctx, bootTimeout)
	defer cancel()
	if err := m.start(ctx, sandbox.StartSpec{ImagePath: w.image, Resources: w.res, GuestKey: w.key}, true); err != nil {
		p.discard(m)
		return true, err
	}
	m.warm = w
	p.mu.Lock()
	p.free = append(p.free, m)
	p.mu.Unlock()
	return true, nil
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
		if wait := p.courtesy(); wait > 0 {
			p.pause(wait)
			continue
		}
		if !p.low() {
			did, err := p.heat()
			if err != nil && p.ctx.Err() == nil {
				p.r.log.Warn("start guest ahead", "err", err)
				p.cool()
			}
			if did {
				continue
			}
		}
		if p.ready() >= p.size {
			select {
			case <-p.ctx.Done():
			case <-p.wake:
			case <-tick.C:
			}
			continue
		}
		ctx, cancel := context.WithTimeout(p.ctx, bootTimeout)
		m, err := p.r.boot(ctx, p.class, !p.low())
		cancel()
		if err != nil {
			if p.ctx.Err() == nil {
				p.r.log.Warn("refill pool", "err", err, "retry_in", backoff)
			}
			p.pause(backoff)
			backoff = min(2*backoff, 30*time.Second)
			continue
		}
		backoff = 100 * time.Millisecond
		p.mu.Lock()
		p.free = append(p.free, m)
		p.mu.Unlock()
	}
}

func (p *pool) pause(d time.Duration) {
	select {
	case <-p.ctx.Done():
	case <-time.After(d):
	}
}

// cool stops making warm machines until an image is asked for again.
func (p *pool) cool() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hot, p.last = "", ""
}

// low says that takers may soon have to wait: a boot is then not to be put off,
// nor to have little of the CPU.
func (p *pool) low() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.free) <= p.size/4
}

// quietTime is how long the pool waits after a take before it boots the next
// machine: whoever took one wants the CPU for what he took it for.
const quietTime = 80 * time.Millisecond

// courtesy is how long to wait yet; 0 when the pool runs low.
func (p *pool) courtesy() time.Duration {
	if p.low() {
		return 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return max(quietTime-time.Since(p.taken), min(quietTime, time.Until(p.after)))
}

const (
	// foundShare is how long the pool stays low for each machine that was found
	// again: their users wait for them, and a boot costs as much as ten of their
	// commands.
	foundShare = 10 * time.Millisecond
	foundMost  = 5 * time.Second
)

// found makes the pool wait a little longer.
func (p *pool) found() {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if p.after.Before(now) {
		p.after = now
	}
	if p.after = p.after.Add(foundShare); p.after.Sub(now) > foundMost {
		p.after = now.Add(foundMost)
	}
}

// sweep removes waiting machines that have died, and warm ones that nobody is
// likely to want: of an image that is not the hot one any more, or is gone.
func (p *pool) sweep() {
	p.mu.Lock()
	var out []*machine
	keep := p.free[:0:0]
	for _, m := range p.free {
		if m.dead() || m.warm != nil && (m.warm.image != p.hot || !exists(m.warm.image)) {
			out = append(out, m)
		} else {
			keep = append(keep, m)
		}
	}
	p.free = keep
	p.mu.Unlock()
	for _, m := range out {
		if m.dead() {
			p.r.log.Warn("pooled machine died", "machine", m.id)
		}
		p.discard(m)
	}
}

func (m *machine) dead() bool {
	select {
	case <-m.done:
		return true
	default:
		return false
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
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
