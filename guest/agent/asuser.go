package agent

import (
	"runtime"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// File operations run with the credentials of the user that they are for, so
// that the kernel decides what that user may do. Linux has credentials per
// thread: a few threads are kept for it, with the user's groups, group and
// effective user id, and the rest of the process is untouched. (setfsuid would
// do, but gVisor does not have it.) The real and saved ids stay root's, so that
// nobody else may signal or trace the thread and it can change back.

const (
	fileThreads = 4
	// rootOps bounds how many of root's file operations, which need no such
	// thread, may wait in the kernel at a time.
	rootOps = 6
)

type fileJob struct {
	who  *account
	fn   func() error
	done chan error
	real bool // with the real ids too, for this job only
}

type fileRunner struct {
	once sync.Once
	jobs chan fileJob
	root chan struct{}
}

func newFileRunner() *fileRunner {
	return &fileRunner{jobs: make(chan fileJob), root: make(chan struct{}, rootOps)}
}

// as runs fn as who. fn must not wait for anything but the kernel.
func (r *fileRunner) as(who *account, fn func() error) error {
	if who.uid == 0 && who.gid == 0 && len(who.groups) == 0 {
		r.root <- struct{}{}
		defer func() { <-r.root }()
		return fn()
	}
	return r.run(fileJob{who: who, fn: fn})
}

// asReal is as with the real ids too, which decide about looking into another
// process: without CAP_SYS_PTRACE root may do so only as that process's user.
func (r *fileRunner) asReal(uid, gid uint32, fn func() error) error {
	return r.run(fileJob{who: &account{uid: uid, gid: gid}, fn: fn, real: true})
}

func (r *fileRunner) run(j fileJob) error {
	r.once.Do(func() {
		for range fileThreads {
			go r.work()
		}
	})
	j.done = make(chan error, 1)
	r.jobs <- j
	return <-j.done
}

// work never unlocks its thread: its credentials are not those of the others.
func (r *fileRunner) work() {
	runtime.LockOSThread()
	var last *account
	for j := range r.jobs {
		if j.real {
			last = nil
			err := setIDs(j.who.uid, j.who.gid)
			if err == nil {
				err = j.fn()
			}
			if e := setIDs(0, 0); e != nil {
				// A thread that cannot change back must not be used again: it ends
				// with its goroutine.
				go r.work()
				j.done <- e
				return
			}
			j.done <- err
			continue
		}
		if last == nil || !same(last, j.who) {
			if err := become(j.who); err != nil {
				last = nil
				j.done <- sandbox.Internal.Errorf("become user %d: %w", j.who.uid, err)
				continue
			}
			last = j.who
		}
		j.done <- j.fn()
	}
}

// setIDs sets the real and effective ids of this thread; root's stay the saved
// ones.
func setIDs(uid, gid uint32) error {
	const keep = ^uintptr(0)
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, 0, 0, keep); e != 0 {
		return e
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(gid), uintptr(gid), keep); e != 0 {
		return e
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), keep); e != 0 {
		return e
	}
	return nil
}

func same(a, b *account) bool {
	if a.uid != b.uid || a.gid != b.gid || len(a.groups) != len(b.groups) {
		return false
	}
	for i := range a.groups {
		if a.groups[i] != b.groups[i] {
			return false
		}
	}
	return true
}

// become changes this thread only: these are the bare system calls, not the
// runtime's, which change every thread.
func become(a *account) error {
	const keep = ^uintptr(0)
	call := func(nr, x, y, z uintptr) error {
		if _, _, e := unix.RawSyscall(nr, x, y, z); e != 0 {
			return e
		}
		return nil
	}
	if err := call(unix.SYS_SETRESUID, keep, 0, keep); err != nil {
		return err
	}
	var p unsafe.Pointer
	if len(a.groups) > 0 {
		p = unsafe.Pointer(&a.groups[0])
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(a.groups)), uintptr(p), 0); e != 0 {
		return e
	}
	if err := call(unix.SYS_SETRESGID, keep, uintptr(a.gid), keep); err != nil {
		return err
	}
	return call(unix.SYS_SETRESUID, keep, uintptr(a.uid), keep)
}
