package engine

import (
	"context"
	"fmt"
	"sync"

	"vivarium/sandbox"
)

// room is what the node can promise. Requests of all sandboxes never add up to
// more; whoever comes when it is full waits in line, so that a large one is not
// starved by small ones.
type room struct {
	limits Limits

	mu    sync.Mutex
	cpu   int64 // promised; guarded by mu
	mem   int64 // promised; guarded by mu
	count int   // guarded by mu
	line  []*waiter
}

type waiter struct {
	cpu, mem int64
	granted  chan struct{}
}

func newRoom(l Limits) *room { return &room{limits: l} }

func (r *room) fits(cpu, mem int64) bool {
	return r.cpu+cpu <= r.limits.CPU && r.mem+mem <= r.limits.Memory &&
		(r.limits.MaxSandboxes == 0 || r.count < r.limits.MaxSandboxes)
}

func (r *room) add(cpu, mem int64) {
	r.cpu += cpu
	r.mem += mem
	r.count++
}

// take takes room, waiting until ctx ends. Exhausted if there is none by then.
func (r *room) take(ctx context.Context, cpu, mem int64) error {
	r.mu.Lock()
	if len(r.line) == 0 && r.fits(cpu, mem) {
		r.add(cpu, mem)
		r.mu.Unlock()
		return nil
	}
	if len(r.line) >= r.limits.Queue {
		defer r.mu.Unlock()
		return r.full(fmt.Sprintf("the node is full, and %d creates wait already,", r.limits.Queue), cpu, mem)
	}
	w := &waiter{cpu: cpu, mem: mem, granted: make(chan struct{})}
	r.line = append(r.line, w)
	r.mu.Unlock()
	select {
	case <-w.granted:
		return nil
	case <-ctx.Done():
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case <-w.granted: // at the same moment
		return nil
	default:
	}
	for i := range r.line {
		if r.line[i] == w {
			r.line = append(r.line[:i], r.line[i+1:]...)
			break
		}
	}
	full := r.full("the node stayed full", cpu, mem)
	r.serve() // who stood behind may fit
	return full
}

// full says what was asked for and what there is. The caller holds mu.
func (r *room) full(what string, cpu, mem int64) error {
	most := ""
	if r.limits.MaxSandboxes > 0 {
		most = fmt.Sprintf(" of at most %d", r.limits.MaxSandboxes)
	}
	return sandbox.Exhausted.Errorf("%s for %d milli-cores and %d MiB: of %d milli-cores %d are promised, of %d MiB %d, and %d sandboxes%s are alive",
		what, cpu, mem>>20, r.limits.CPU, r.cpu, r.limits.Memory>>20, r.mem>>20, r.count, most).
		WithHint("stop sandboxes, or ask for less: `viv ps` shows who holds what")
}

// force takes room that is in use already, by a sandbox found again.
func (r *room) force(cpu, mem int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.add(cpu, mem)
}

func (r *room) give(cpu, mem int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cpu -= cpu
	r.mem -= mem
	r.count--
	r.serve()
}

// serve lets in who fits, in order. The caller holds mu.
func (r *room) serve() {
	for len(r.line) > 0 && r.fits(r.line[0].cpu, r.line[0].mem) {
		w := r.line[0]
		r.line = r.line[1:]
		r.add(w.cpu, w.mem)
		close(w.granted)
	}
}
