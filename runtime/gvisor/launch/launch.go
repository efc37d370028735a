// Package launch is what a sentry is before it is one: it enters its cgroup,
// shuts itself into an empty root, gives all privileges up, and becomes
// viv-sentry. gVisor would do this in the sentry's own binary, which it starts
// three times for it, some 7 ms of CPU each; without gVisor in it, a program
// starts in 1 ms.
//
// It is called with the arguments that gVisor has for the sentry, in namespaces
// of its own, as user 65534 of one of them with the capabilities that
// runsc/sandbox gives. What runs in the sandbox begins long after it.
package launch

import (
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

const (
	// setupRoot is the argument by which gVisor tells a sentry to do what is
	// done here.
	setupRoot = "--setup-root"
	// ours names a descriptor for this program, in a flag of gVisor's that is
	// not used else: first the sentry's program, then the tasks files of its
	// groups in cgroup v1, of which there may be none.
	ours = "--sink-fds="
	// panicLog names the descriptor of the log that the daemon shows when a
	// sentry does not start.
	panicLog = "--panic-log-fd="

	umounter = "umount"
)

// Main does not return.
func Main() {
	// what follows is about this thread, which is the one that will be left
	runtime.LockOSThread()
	var err error
	if len(os.Args) == 2 && os.Args[1] == umounter {
		err = umount()
	} else {
		err = start()
	}
	if err != nil {
		complain(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// step says which step failed.
type step struct {
	what string
	err  error
}

func (s step) Error() string { return s.what + ": " + s.err.Error() }

// do runs steps until one fails.
func do(steps ...func() step) error {
	for _, f := range steps {
		if s := f(); s.err != nil {
			return s
		}
	}
	return nil
}

func start() error {
	args := arguments(os.Args)
	if len(args.files) == 0 {
		return step{"find the sentry", unix.EBADF}
	}
	if !args.found { // gVisor means to run it in another way, of which nothing is known here
		return step{"find " + setupRoot, unix.EINVAL}
	}
	for _, fd := range args.files {
		unix.CloseOnExec(fd)
	}
	enterGroup(args.files[1:])
	flags := hostFacts()
	return do(
		func() step { return step{"make root", makeRoot()} },
		func() step {
			w, err := startUmounter()
			flags = append(flags, setupRoot+"=false", "--proc-mount-sync-fd="+strconv.Itoa(w))
			return step{"start umounter", err}
		},
		func() step { return step{"bound core files", noCore()} },
		func() step { return step{"heed signals", heedSignals()} },
		func() step { return step{"give up privileges", giveUp()} },
		func() step { return step{"start sentry", execSentry(args.files[0], args.with(flags))} },
	)
}

// parsed are gVisor's arguments.
type parsed struct {
	before, after []string // the sentry's: what we say goes between, in command boot's flags
	files         []int
	found         bool // setupRoot
}

func arguments(args []string) parsed {
	var p parsed
	for _, a := range args {
		if n, ok := strings.CutPrefix(a, ours); ok {
			if fd, err := strconv.Atoi(n); err == nil {
				p.files = append(p.files, fd)
			}
			continue
		}
		switch {
		case a == setupRoot && !p.found:
			p.found = true
		case p.found:
			p.after = append(p.after, a)
		default:
			p.before = append(p.before, a)
		}
	}
	return p
}

func (p parsed) with(flags []string) []string { return slices.Concat(p.before, flags, p.after) }

// hostFacts are what gVisor reads of the host before it cannot any more.
func hostFacts() []string {
	var out []string
	add := func(flag, file string, of func(string) string) {
		if b, err := os.ReadFile(file); err == nil {
			if v := of(strings.TrimSpace(string(b))); v != "" {
				out = append(out, flag+"="+v)
			}
		}
	}
	add("--product-name", "/sys/devices/virtual/dmi/id/product_name", func(s string) string { return s })
	add("--host-thp-shmem-enabled", "/sys/kernel/mm/transparent_hugepage/shmem_enabled", chosen)
	add("--host-thp-defrag", "/sys/kernel/mm/transparent_hugepage/defrag", chosen)
	return out
}

// chosen is the word in brackets of "always [madvise] never".
func chosen(s string) string {
	_, s, _ = strings.Cut(s, "[")
	s, _, ok := strings.Cut(s, "]")
	if !ok {
		return ""
	}
	return s
}

// enterGroup brings this thread, and with it the program that it executes, into
// the groups whose tasks files are open. That a thread moves itself costs the
// kernel nothing, while to be moved as a process stops every fork and exit on
// the host (cgroup_procs_write_start in kernel/cgroup/cgroup.c). Kernels before
// 5.16 do not let it, for they ask what this process may do, not who opened the
// file: then package cgroup does it.
func enterGroup(tasks []int) {
	for _, fd := range tasks {
		if _, err := unix.Write(fd, []byte("0")); err != nil {
			return
		}
	}
}

func complain(err error) {
	for _, a := range os.Args {
		if n, ok := strings.CutPrefix(a, panicLog); ok {
			if fd, aerr := strconv.Atoi(n); aerr == nil {
				_, _ = unix.Write(fd, []byte("viv-start: "+err.Error()+"\n"))
			}
		}
	}
}

// execSentry makes this process the sentry. It has no environment.
func execSentry(fd int, args []string) error {
	argv, err := syscall.SlicePtrFromStrings(args)
	if err != nil {
		return err
	}
	return execveat(fd, argv)
}
