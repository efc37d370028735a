package launch

import (
	"os"

	"golang.org/x/sys/unix"
)

// newRoot is where the root is built. Any directory will do: the mount namespace
// is this process's own.
const newRoot = "/tmp"

const noExec = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// makeRoot makes a root that has nothing but the host's time zone and, until the
// sentry has started, so much of /proc as it needs for that, and enters it. Its
// parts are those that gVisor's sentry expects (runsc/cmd/sentry/sentrycmd,
// setUpChroot).
func makeRoot() error {
	const proc = newRoot + "/proc"
	mount := func(what, source, target, fstype string, flags uintptr) func() step {
		return func() step { return step{what, unix.Mount(source, target, fstype, flags, "")} }
	}
	mkdir := func(dir string) func() step {
		return func() step { return step{"make directory", os.Mkdir(dir, 0o755)} }
	}
	link := func(to, name string) func() step {
		return func() step { return step{"link", os.Symlink(to, name)} }
	}
	var submount string
	return do(
		mount("stop propagation", "", "/", "", unix.MS_SLAVE|unix.MS_REC),
		mount("mount root", "viv-root", newRoot, "tmpfs", noExec),
		mkdir(newRoot+"/etc"),
		func() step { // without it, times are UTC
			_ = copyFile(newRoot+"/etc/localtime", "/etc/localtime")
			return step{}
		},
		mkdir(proc),
		mount("mount tmpfs for proc", "viv-proc", proc, "tmpfs", noExec),
		func() (s step) { submount, s.err = mountProc(proc); s.what = "mount proc"; return s },
		mkdir(proc+"/sys"), mkdir(proc+"/sys/kernel"), mkdir(proc+"/sys/vm"),
		func() step {
			const f = "/proc/sys/vm/mmap_min_addr"
			return step{"copy " + f, copyFile(newRoot+f, f)}
		},
		func() step {
			const f = "/proc/sys/kernel/cap_last_cap"
			return step{"copy " + f, copyFile(newRoot+f, f)}
		},
		func() step { return link(submount+"/self", proc+"/self")() },
		func() step { return link(submount+"/cpuinfo", proc+"/cpuinfo")() },
		func() step { return step{"close proc", os.Chmod(proc, 0o111)} },
		// a remount takes away the flags that it does not name
		mount("make root read-only", "", newRoot, "", unix.MS_REMOUNT|unix.MS_RDONLY|unix.MS_BIND|noExec),
		func() step { return step{"go to root", unix.Chdir(newRoot)} },
		// onto itself, so that the old one lies on top and can be taken away
		// (pivot_root(2), NOTES)
		func() step { return step{"enter root", unix.PivotRoot(".", ".")} },
		func() step { return step{"leave the old root", unix.Unmount(".", unix.MNT_DETACH)} },
	)
}

// mountProc mounts proc in a directory below dir and gives its name. A host
// that has mounts in its own /proc, as one that is a container itself, lets
// nobody mount a new one; then it is that one, with what covers it.
func mountProc(dir string) (string, error) {
	own, host := "sandbox-proc", "host-proc"
	if err := os.Mkdir(dir+"/"+own, 0o755); err != nil {
		return "", err
	}
	if err := unix.Mount("proc", dir+"/"+own, "proc", noExec|unix.MS_RDONLY, ""); err == nil {
		return own, nil
	}
	if err := os.Mkdir(dir+"/"+host, 0o755); err != nil {
		return "", err
	}
	return host, unix.Mount("/proc", dir+"/"+host, "", unix.MS_BIND|unix.MS_REC|noExec|unix.MS_RDONLY, "")
}

func copyFile(to, from string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o644)
}
