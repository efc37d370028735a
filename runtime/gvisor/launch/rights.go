package launch

import (
	"errors"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// nobody is the only user of the sentry's user namespace.
const nobody = 65534

// startUmounter starts the process that takes /proc away when a byte comes out
// of the descriptor that is returned: the sentry sends it right before its
// seccomp filter, without the right to do it itself, and waits for the end.
func startUmounter() (int, error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return 0, err
	}
	_, err := syscall.ForkExec("/proc/self/exe", []string{"viv-start", umounter}, &syscall.ProcAttr{
		Files: []uintptr{0, 1, 2, uintptr(p[0])},
	})
	unix.Close(p[0])
	if err != nil {
		return 0, err
	}
	// for the sentry
	if _, err := unix.FcntlInt(uintptr(p[1]), unix.F_SETFD, 0); err != nil {
		return 0, err
	}
	return p[1], nil
}

// umount is the umounter.
func umount() error {
	const in = 3
	// the sentry's, which have no close-on-exec
	if err := unix.CloseRange(in+1, ^uint(0)>>33, 0); err != nil {
		return step{"close descriptors", err}
	}
	var b [1]byte
	n, err := unix.Read(in, b[:])
	if err == nil && n != 1 {
		err = errors.New("the sentry has ended")
	}
	if err != nil {
		return step{"wait for the sentry", err}
	}
	if err := unix.Unmount("/proc", unix.MNT_DETACH); err != nil {
		return step{"unmount proc", err}
	}
	return nil
}

// noCore sees to it that the memory of a sentry, which is that of what runs in
// it, is not written to where the host keeps core dumps when the kernel ends it
// for breaking its seccomp filter. A limit of 1 also holds for dumps to a program
// (core(5), "Piping core dumps to a program"), as 0 does not.
func noCore() error {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_CORE, &l); err != nil {
		return err
	}
	l.Max = min(l.Max, 1)
	l.Cur = l.Max
	return unix.Setrlimit(unix.RLIMIT_CORE, &l)
}

// heedSignals takes back that a signal is ignored: whoever started the daemon may
// have said so (nohup(1), the C library's posix_spawn), and it would be inherited.
func heedSignals() error {
	type action struct { // of the kernel, see rt_sigaction(2)
		handler, flags, restorer uintptr
		mask                     uint64
	}
	const ignore, size, last = 1, 8, 64
	for sig := uintptr(1); sig <= last; sig++ {
		if sig == uintptr(unix.SIGKILL) || sig == uintptr(unix.SIGSTOP) {
			continue
		}
		var a action
		if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, sig, 0, uintptr(unsafe.Pointer(&a)), size, 0, 0); e != 0 {
			return e
		}
		if a.handler != ignore {
			continue
		}
		a = action{}
		if _, _, e := unix.RawSyscall6(unix.SYS_RT_SIGACTION, sig, uintptr(unsafe.Pointer(&a)), 0, size, 0, 0); e != 0 {
			return e
		}
	}
	return nil
}

// giveUp leaves this thread, and so the program that it executes, no capability
// and none to gain.
func giveUp() error {
	ruid, euid, suid := unix.Getresuid()
	rgid, egid, sgid := unix.Getresgid()
	for _, id := range []int{ruid, euid, suid, rgid, egid, sgid} {
		if id != nobody {
			return errors.New("run as " + strconv.Itoa(euid) + ":" + strconv.Itoa(egid))
		}
	}
	for c := uintptr(0); c <= unix.CAP_LAST_CAP+32; c++ {
		err := unix.Prctl(unix.PR_CAPBSET_DROP, c, 0, 0, 0)
		if err == unix.EINVAL && c > 0 { // one more than the kernel has
			break
		}
		if err != nil {
			return step{"drop from the bounding set", err}
		}
	}
	if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0); err != nil {
		return step{"clear ambient capabilities", err}
	}
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none, have [2]unix.CapUserData
	if err := unix.Capset(&h, &none[0]); err != nil {
		return step{"drop capabilities", err}
	}
	if err := unix.Capget(&h, &have[0]); err != nil {
		return step{"read capabilities", err}
	}
	if have != none {
		return errors.New("capabilities are left")
	}
	return nil
}

// execveat executes an open program without an environment (execveat(2),
// AT_EMPTY_PATH).
func execveat(fd int, argv []*byte) error {
	var empty [1]byte
	var env [1]*byte
	_, _, e := syscall.RawSyscall6(unix.SYS_EXECVEAT, uintptr(fd), uintptr(unsafe.Pointer(&empty[0])),
		uintptr(unsafe.Pointer(&argv[0])), uintptr(unsafe.Pointer(&env[0])), unix.AT_EMPTY_PATH, 0)
	return e
}
