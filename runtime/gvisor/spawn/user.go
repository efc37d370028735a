package spawn

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// gVisor maps the sentry, which inside its user namespace is always 65534, to the
// same user outside, so that all sentries of a host have one user; or, if it is
// told that it is rootless, to the real user of its caller. That is how ours get
// one each: the thread that starts a sentry has that user as its real one, and
// stays root by its effective one.
//
// The sentry itself must not hear that it is rootless: it would keep what it
// needed to shut itself in, because the caller of one has nothing to lose. So the
// flag is taken out of its arguments, and it starts like any other.

// rootless is gVisor's flag for that, as Config.ToFlags writes it.
const rootless = "--rootless"

// SentryArgs are the arguments for the sentry without what is meant for its
// starter alone.
func SentryArgs(args []string) []string {
	return slices.DeleteFunc(slices.Clone(args), func(a string) bool {
		return a == rootless || strings.HasPrefix(a, rootless+"=")
	})
}

// as runs fn on a thread whose real user and group are id: the thread's alone,
// where os.Setuid would change all, and stop them for it, at every boot. Its
// effective and saved ones stay root's, and with them its capabilities
// (capabilities(7), effect of user id changes); so does what makes the process
// dumpable, and what it may do with files.
//
// The real user would let processes of that user signal this one (kill(2)), if
// they could name it, and count it to their RLIMIT_NPROC. It ends with fn.
func as(id int, fn func() error) error {
	if id <= 0 {
		return sandbox.Internal.Errorf("a sentry cannot run as user %d", id)
	}
	runtime.LockOSThread() // new threads are not made from a locked one
	defer runtime.UnlockOSThread()
	defer func() {
		if err := setReal(0); err != nil {
			panic(err) // never go on with a thread of a sentry's user
		}
	}()
	if err := setReal(id); err != nil {
		// EINVAL in a container that has no such user; viv doctor says so
		return sandbox.Internal.Errorf("become user %d, of uids in the configuration: %w", id, err)
	}
	if uid, gid := os.Getuid(), os.Getgid(); uid != id || gid != id || os.Geteuid() != 0 {
		return sandbox.Internal.Errorf("become user %d: am %d:%d, effectively %d", id, uid, gid, os.Geteuid())
	}
	return fn()
}

// setReal sets the thread's real group and user (setresuid(2)).
func setReal(id int) error {
	const keep = ^uintptr(0)
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(id), keep, keep); e != 0 {
		return fmt.Errorf("set real group: %w", e)
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(id), keep, keep); e != 0 {
		return fmt.Errorf("set real user: %w", e)
	}
	return nil
}
