package agent

import (
	"os"
	"os/signal"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// surviveSignals sees to it that no signal from inside ends process 1. None is
// ignored in the kernel: what is ignored stays ignored in children.
//
// Signals that Go's runtime can do without get a handler that it knows nothing
// of. Whatever it handles itself, which is what signal.Notify asks for, it undoes
// in every child between fork and exec, where exec does so in any case: some
// forty system calls more for each command, half a millisecond.
func surviveSignals() {
	// struct sigaction as the kernel has it, rt_sigaction(2): the runtime's own
	// for an ordinary signal, with its flags and its way back
	var act [4]uint64
	err := sigaction(unix.SIGUSR1, nil, &act)
	act[0] = uint64(doNothingPC())
	c := make(chan os.Signal, 16)
	for s := syscall.Signal(1); s <= 64; s++ {
		switch s {
		case unix.SIGKILL, unix.SIGSTOP, unix.SIGURG, unix.SIGCHLD, unix.SIGPROF, 32, 33, 34: // the last three are of libc
		case unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGILL, unix.SIGTRAP, unix.SIGABRT, unix.SIGBUS,
			unix.SIGFPE, unix.SIGSEGV, unix.SIGTERM, unix.SIGSTKFLT, unix.SIGSYS:
			signal.Notify(c, s)
		default:
			if err != 0 {
				signal.Notify(c, s)
				continue
			}
			signal.Ignore(s) // for the runtime: it forgets its handler
			sigaction(s, &act, nil)
		}
	}
	go func() {
		for range c {
		}
	}()
}

func sigaction(s syscall.Signal, set, get *[4]uint64) syscall.Errno {
	const size = 8 // of a set of signals
	_, _, err := unix.RawSyscall6(unix.SYS_RT_SIGACTION, uintptr(s), uintptr(unsafe.Pointer(set)), uintptr(unsafe.Pointer(get)), size, 0, 0)
	return err
}

// doNothingPC is the address of a signal handler that does nothing.
func doNothingPC() uintptr
