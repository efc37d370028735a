package doctor

import (
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// needed are the capabilities that the daemon cannot do without.
var needed = []struct {
	bit  uint
	name string
	why  string
}{
	{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN", "namespaces and mounts"},
	{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN", "the sandboxes' network"},
	{unix.CAP_SYS_CHROOT, "CAP_SYS_CHROOT", "shutting the sentry in"},
	{unix.CAP_SYS_PTRACE, "CAP_SYS_PTRACE", "looking after processes of other users"},
	{unix.CAP_SETUID, "CAP_SETUID", "running each sentry as a user of its own"},
	{unix.CAP_SETGID, "CAP_SETGID", "running each sentry as a user of its own"},
	{unix.CAP_SETPCAP, "CAP_SETPCAP", "taking capabilities from the sentry"},
	{unix.CAP_CHOWN, "CAP_CHOWN", "files of images"},
	{unix.CAP_FOWNER, "CAP_FOWNER", "files of images"},
	{unix.CAP_DAC_OVERRIDE, "CAP_DAC_OVERRIDE", "files of images"},
	{unix.CAP_KILL, "CAP_KILL", "ending sandboxes"},
}

func (d *doctor) rights() {
	if d.euid != 0 {
		d.bad(Error, "root", "run by user "+strconv.Itoa(d.euid), "the daemon cannot make namespaces, control groups or a network; what needs root was not tried here",
			"sudo viv doctor, and sudo viv serve")
		return
	}
	d.ok("root", "")
	status, err := d.read("/proc/self/status")
	if err != nil {
		d.bad(Error, "capabilities", err.Error(), "nothing that the daemon does works without /proc", "mount -t proc proc /proc")
		return
	}
	caps, ok := capEff(status)
	if !ok {
		d.bad(Error, "capabilities", "/proc/self/status has no CapEff", "whether the daemon has the rights it needs is unknown", "mount -t proc proc /proc")
		return
	}
	var missing, why, flags []string
	for _, c := range needed {
		if caps&(1<<c.bit) == 0 {
			missing, why = append(missing, c.name), append(why, c.why)
			flags = append(flags, "--cap-add "+strings.TrimPrefix(c.name, "CAP_"))
		}
	}
	if missing != nil {
		d.bad(Error, "capabilities", "root lacks "+strings.Join(missing, ", "), "not possible: "+strings.Join(why, ", "),
			"if this is a container, start it with --privileged, or with "+strings.Join(flags, " "))
	} else {
		d.ok("capabilities", "all that are needed")
	}
	if caps&(1<<unix.CAP_SYS_RESOURCE) == 0 {
		d.bad(Note, "CAP_SYS_RESOURCE", "root lacks it", "the daemon cannot raise its limit of open files nor protect itself from the out-of-memory killer; all else works",
			"none is needed; in a container, --cap-add SYS_RESOURCE")
	}
}

// capEff is the effective set of proc_pid_status(5).
func capEff(status string) (uint64, bool) {
	for line := range strings.Lines(status) {
		if rest, ok := strings.CutPrefix(line, "CapEff:"); ok {
			n, err := strconv.ParseUint(strings.TrimSpace(rest), 16, 64)
			return n, err == nil
		}
	}
	return 0, false
}
