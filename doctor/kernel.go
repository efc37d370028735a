package doctor

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// minKernel has nftables in every form that the network uses; pidfds (5.3) and
// clone into a cgroup (5.7) are older.
var minKernel = [2]int{5, 10}

func (d *doctor) kernel() {
	release, err := d.read("/proc/sys/kernel/osrelease")
	v, ok := kernelVersion(release)
	switch {
	case err != nil || !ok:
		d.bad(Error, "kernel", fmt.Sprintf("its version is unknown: %q", release), "sandboxes may not start", fmt.Sprintf("use Linux %d.%d or later", minKernel[0], minKernel[1]))
	case v[0] < minKernel[0] || v[0] == minKernel[0] && v[1] < minKernel[1]:
		d.bad(Error, "kernel", release, "the network cannot be set up, and sandboxes may not start", fmt.Sprintf("use Linux %d.%d or later, as Debian 12 and Ubuntu 24.04 have", minKernel[0], minKernel[1]))
	default:
		d.ok("kernel", release)
	}
	d.seccomp()
	d.ptrace()
	d.overcommit()
}

// kernelVersion of a string such as 6.1.0-18-amd64.
func kernelVersion(release string) (v [2]int, ok bool) {
	parts := strings.SplitN(release, ".", 3)
	if len(parts) < 2 {
		return v, false
	}
	for i := range v {
		digits := parts[i]
		if n := strings.IndexFunc(digits, func(r rune) bool { return r < '0' || r > '9' }); n >= 0 {
			digits = digits[:n]
		}
		n, err := strconv.Atoi(digits)
		if err != nil {
			return v, false
		}
		v[i] = n
	}
	return v, true
}

func (d *doctor) seccomp() {
	const fix = "use a kernel with CONFIG_SECCOMP_FILTER, as every current distribution has"
	actions, err := d.read("/proc/sys/kernel/seccomp/actions_avail")
	if err != nil {
		d.bad(Error, "seccomp", err.Error(), "gVisor runs no program and has no second line of defence without it", fix)
		return
	}
	have := strings.Fields(actions)
	for _, a := range []string{"kill_process", "trap", "errno", "allow"} {
		if !slices.Contains(have, a) {
			d.bad(Error, "seccomp", "there is no action "+a+", only "+actions, "gVisor runs no program", fix)
			return
		}
	}
	d.ok("seccomp", "")
}

// ptrace is how gVisor's platform sets up the processes that run a sandbox's
// code; see Documentation/admin-guide/LSM/Yama.rst.
func (d *doctor) ptrace() {
	n, ok := d.number("/proc/sys/kernel/yama/ptrace_scope")
	if !ok {
		return // no Yama, no restriction
	}
	switch {
	case n >= 3:
		d.bad(Error, "ptrace", "kernel.yama.ptrace_scope is 3: nobody may trace until the next boot", "gVisor cannot start the processes of a sandbox",
			"set kernel.yama.ptrace_scope=1 in /etc/sysctl.d and reboot")
	case n == 2:
		d.bad(Warning, "ptrace", "kernel.yama.ptrace_scope is 2: only root may trace", "gVisor's sentry, which has no rights, may not be able to start the processes of a sandbox",
			"sysctl -w kernel.yama.ptrace_scope=1")
	default:
		d.ok("ptrace", fmt.Sprintf("kernel.yama.ptrace_scope is %d", n))
	}
}

func (d *doctor) overcommit() {
	if n, ok := d.number("/proc/sys/vm/overcommit_memory"); ok && n == 2 {
		d.bad(Error, "memory overcommit", "vm.overcommit_memory is 2", "gVisor reserves more addresses than there is memory, which this refuses: sandboxes do not start",
			"sysctl -w vm.overcommit_memory=0")
	}
}

// namespaces looks at the limits on them. The sysctls that forbid user
// namespaces to users without rights do not bind the daemon, which is root.
func (d *doctor) namespaces() {
	want := int64(d.Sandboxes)
	var few []string
	var fix []string
	for _, kind := range []string{"user", "net", "mnt", "pid", "ipc", "uts"} {
		name := "max_" + kind + "_namespaces"
		n, ok := d.number("/proc/sys/user/" + name)
		if !ok {
			continue
		}
		if n == 0 {
			d.bad(Error, kind+" namespaces", "user."+name+" is 0: they are switched off", "sandboxes do not start", "sysctl -w user."+name+"=65536")
			continue
		}
		// the pool, and one per sandbox and process that gVisor makes for it
		if n < 2*want {
			few, fix = append(few, fmt.Sprintf("user.%s is %d", name, n)), append(fix, fmt.Sprintf("user.%s=%d", name, max(65536, 4*want)))
		}
	}
	if few != nil {
		d.bad(Warning, "namespace limits", strings.Join(few, ", "), fmt.Sprintf("%d sandboxes may not start", want), "sysctl -w "+strings.Join(fix, " "))
	}
	var said []string
	if n, ok := d.number("/proc/sys/kernel/unprivileged_userns_clone"); ok && n == 0 {
		said = append(said, "kernel.unprivileged_userns_clone is 0")
	}
	if n, ok := d.number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns"); ok && n != 0 {
		said = append(said, "kernel.apparmor_restrict_unprivileged_userns is 1")
	}
	if said != nil {
		d.ok("unprivileged user namespaces", strings.Join(said, ", ")+": fine, the daemon is root")
	}
	if !d.exists("/proc/self/ns/user") {
		d.bad(Error, "user namespaces", "this kernel has none", "the sentry cannot be separated from the host's users", "use a kernel with CONFIG_USER_NS")
	}
}

// tryKernel uses what the daemon uses.
func (d *doctor) tryKernel() {
	const fix = "use Linux 5.10 or later; in a container, one whose seccomp profile allows it (--security-opt seccomp=unconfined)"
	if fd, err := unix.MemfdCreate("doctor", unix.MFD_CLOEXEC); err != nil {
		d.bad(Error, "memfd", "memfd_create: "+err.Error(), "gVisor has no memory for a sandbox", fix)
	} else {
		unix.Close(fd)
		d.ok("memfd", "")
	}
	if fd, err := unix.PidfdOpen(os.Getpid(), 0); err != nil {
		d.bad(Error, "pidfd", "pidfd_open: "+err.Error(), "the end of a sandbox cannot be seen", fix)
	} else {
		unix.Close(fd)
		d.ok("pidfd", "")
	}
	if err := tryUserNamespace(d.FirstUID); err != nil {
		d.bad(Error, "new user namespace", err.Error(), "the sentry cannot be separated from the host's users: sandboxes do not start",
			"sysctl -w user.max_user_namespaces=65536; in a container, start it with --privileged")
	} else {
		d.ok("new user namespace", "")
	}
}

// tryUserNamespace asks for a process in the namespaces that the sentry gets,
// with a program that does not exist: the namespaces were made if that is what
// it fails of.
func tryUserNamespace(user int) error {
	_, err := syscall.ForkExec("/proc/self/does-not-exist", []string{"doctor"}, &syscall.ProcAttr{
		Sys: &syscall.SysProcAttr{
			Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: user, Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: user, Size: 1}},
		},
	})
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err == nil {
		err = errors.New("a program that does not exist was started")
	}
	return err
}
