package image

import (
	"context"
	"sync"

	"vivarium/sandbox"
)

// flights merges equal work: callers with one key wait for one run and get
// its result. The run goes on until the last of them gives up.
type flights struct {
	mu     sync.Mutex
	m      map[string]*flight // guarded by mu
	closed bool               // guarded by mu
	wg     sync.WaitGroup
}

type flight struct {
	cancel  context.CancelFunc
	done    chan struct{}
	img     *Image // valid once done is closed
	err     error  // valid once done is closed
	waiters int    // guarded by flights.mu

	// report serialises progress, so that no callback runs twice at a time or
	// after its caller returned.
	report  sync.Mutex
	watch   map[int]func(Progress) // guarded by report
	watches int                    // guarded by report
}

// do runs fn, or joins a run with the same key.
func (f *flights) do(ctx context.Context, key string, progress func(Progress), fn func(context.Context, func(Progress)) (*Image, error)) (*Image, error) {
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return nil, sandbox.Unavailable.Errorf("the image store is closed")
	}
	fl := f.m[key]
	if fl == nil {
		// The run outlives the caller that started it if others joined.
		run, cancel := context.WithCancel(context.WithoutCancel(ctx))
		fl = &flight{cancel: cancel, done: make(chan struct{}), watch: map[int]func(Progress){}}
		if f.m == nil {
			f.m = map[string]*flight{}
		}
		f.m[key] = fl
		f.wg.Go(func() {
			fl.img, fl.err = fn(run, fl.send)
			f.forget(key, fl)
			cancel()
			close(fl.done)
		})
	}
	fl.waiters++
	f.mu.Unlock()
	defer fl.listen(progress)()
	select {
	case <-fl.done:
	case <-ctx.Done():
		f.leave(key, fl)
		return nil, kinded(ctx.Err(), "wait for image")
	}
	if fl.err != nil {
		return nil, fl.err
	}
	return fl.img.clone(), nil
}

// leave gives up on a run; the last to leave ends it.
func (f *flights) leave(key string, fl *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if fl.waiters--; fl.waiters == 0 {
		fl.cancel()
		if f.m[key] == fl {
			delete(f.m, key)
		}
	}
}

func (f *flights) forget(key string, fl *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.m[key] == fl {
		delete(f.m, key)
	}
}

// stop ends all runs and waits for them.
func (f *flights) stop() {
	f.mu.Lock()
	f.closed = true
	for _, fl := range f.m {
		fl.cancel()
	}
	f.mu.Unlock()
	f.wg.Wait()
}

func (fl *flight) listen(fn func(Progress)) (stop func()) {
	if fn == nil {
		return func() {}
	}
	fl.report.Lock()
	defer fl.report.Unlock()
	n := fl.watches
	fl.watches++
	fl.watch[n] = fn
	return func() {
		fl.report.Lock()
		defer fl.report.Unlock()
		delete(fl.watch, n)
	}
}

func (fl *flight) send(p Progress) {
	fl.report.Lock()
	defer fl.report.Unlock()
	for _, fn := range fl.watch {
		fn(p)
	}
}
