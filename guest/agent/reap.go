package agent

import (
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// reaper waits for every child of process 1, those that were started here and
// those that were orphaned onto it (A12). It alone waits, so that a status is
// taken exactly once.
type reaper struct {
	// mu is held while a child is started and entered, so that a status that
	// arrives at once finds its owner.
	mu    sync.Mutex
	owner map[int]func(unix.WaitStatus)
	wake  chan struct{}
	// orphans counts the others that were reaped.
	orphans int64
}

func newReaper() *reaper {
	return &reaper{owner: map[int]func(unix.WaitStatus){}, wake: make(chan struct{}, 1)}
}

// start starts a child by fork and enters done, which is called with its
// status. A failed start leaves a child that nobody owns.
func (r *reaper) start(fork func() (int, error), done func(unix.WaitStatus)) (int, error) {
	r.mu.Lock()
	pid, err := fork()
	if err == nil {
		r.owner[pid] = done
	}
	r.mu.Unlock()
	if err != nil {
		return 0, err
	}
	r.poke()
	return pid, nil
}

// poke makes the loop look again when there were no children.
func (r *reaper) poke() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// loop reaps for ever. It blocks a thread of its own in wait4, which is quicker
// than a signal through the runtime.
func (r *reaper) loop() {
	for {
		var st unix.WaitStatus
		pid, err := unix.Wait4(-1, &st, unix.WALL, nil)
		switch {
		case err == unix.EINTR:
		case err == unix.ECHILD:
			// No children. Only something put into the namespace from outside
			// could leave an orphan now, so look again once in a while.
			select {
			case <-r.wake:
			case <-time.After(time.Minute):
			}
		case err != nil:
			time.Sleep(10 * time.Millisecond) // cannot happen; do not spin if it does
		case st.Exited() || st.Signaled():
			r.mu.Lock()
			done := r.owner[pid]
			delete(r.owner, pid)
			if done == nil {
				r.orphans++
			}
			r.mu.Unlock()
			if done != nil {
				done(st)
			}
		}
	}
}
