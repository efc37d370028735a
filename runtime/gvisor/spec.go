package gvisor

import (
	"encoding/hex"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

const specVersion = "1.2.1"

// dockerCapabilities are those that Docker gives a container by default.
var dockerCapabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
	"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

// guestCapabilities are what the guest starts with beside those of its sandbox:
// what it keeps for itself, and what it needs only while it sets up
// (sethostname, umount).
func guestCapabilities() []string {
	names := []string{"CAP_SYS_ADMIN"}
	for name, n := range capabilityNumbers {
		if slices.Contains(wire.KeptCaps, n) {
			names = append(names, name)
		}
	}
	return names
}

// Capabilities are the ones that commands of a sandbox have, by name.
func Capabilities(c sandbox.Capabilities) ([]string, error) {
	names := slices.Clone(dockerCapabilities)
	for _, n := range c.Drop {
		n, err := capability(n)
		if err != nil {
			return nil, err
		}
		if n == "CAP_ALL" {
			names = nil
			continue
		}
		names = slices.DeleteFunc(names, func(s string) bool { return s == n })
	}
	for _, n := range c.Add {
		n, err := capability(n)
		if err != nil {
			return nil, err
		}
		if n == "CAP_ALL" {
			names = allCapabilities()
			continue
		}
		if !slices.Contains(names, n) {
			names = append(names, n)
		}
	}
	slices.Sort(names)
	return names, nil
}

func capability(name string) (string, error) {
	n := strings.ToUpper(name)
	if !strings.HasPrefix(n, "CAP_") {
		n = "CAP_" + n
	}
	if _, ok := capabilityNumbers[n]; !ok && n != "CAP_ALL" {
		return "", sandbox.Invalid.Errorf("capability %q is not one of capabilities(7)", name)
	}
	return n, nil
}

func allCapabilities() []string {
	var names []string
	for n := range capabilityNumbers {
		names = append(names, n)
	}
	return names
}

// podSpec is the root container of a machine.
func (r *Runtime) podSpec(slot sandbox.Slot, hostname string, uid int) *specs.Spec {
	s := &specs.Spec{
		Version:  specVersion,
		Hostname: hostname,
		Root:     &specs.Root{Path: r.opts.Dir + "/empty", Readonly: true},
		Process: &specs.Process{
			Args: []string{"/pause"}, Cwd: "/",
			User:            specs.User{UID: 65534, GID: 65534},
			Capabilities:    &specs.LinuxCapabilities{},
			NoNewPrivileges: true,
		},
		Annotations: map[string]string{
			"io.kubernetes.cri.container-type": "sandbox",
			"io.kubernetes.cri.container-name": "pause",
			"dev.gvisor.spec.rootfs.type":      "erofs",
			"dev.gvisor.spec.rootfs.source":    r.opts.PauseImage,
			uidAnnotation:                      strconv.Itoa(uid),
		},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{{Type: "pid"}, {Type: "ipc"}, {Type: "uts"}, {Type: "mount"}, {Type: "network", Path: slot.Netns}},
			Sysctl:     map[string]string{"net.ipv6.conf.all.disable_ipv6": "1"},
		},
	}
	if slot.Netns == "" {
		s.Linux.Namespaces[4].Path = ""
	}
	return s
}

// hosts is /etc/hosts (hosts(5)).
func hosts(name string, slot sandbox.Slot) string {
	h := "127.0.0.1\tlocalhost\n"
	if slot.Address.IsValid() && name != "" {
		h += slot.Address.Addr().String() + "\t" + name + "\n"
	}
	return h
}

// setup is what the guest of a sandbox does before the first command.
func setup(slot sandbox.Slot, s sandbox.StartSpec) (sandbox.GuestSetup, error) {
	caps, err := Capabilities(s.Capabilities)
	if err != nil {
		return sandbox.GuestSetup{}, err
	}
	set := sandbox.GuestSetup{
		Hostname: s.Hostname,
		Hosts:    hosts(s.Hostname, slot),
		// gVisor mounts a tmpfs on an empty /tmp: without it /tmp is on disk, as
		// in Docker, and does not use up memory
		Unmount: []string{"/tmp"},
	}
	if s.Nameserver.IsValid() {
		set.ResolvConf = "nameserver " + s.Nameserver.String() + "\n"
	}
	for _, c := range guestCapabilities() {
		if !slices.Contains(caps, c) {
			set.DropCaps = append(set.DropCaps, capabilityNumbers[c])
		}
	}
	return set, nil
}

// mainSpec is the sub-container that runs the guest on the sandbox's image. A
// guest that is started before its sandbox is known (warm) gets no setup yet.
func (r *Runtime) mainSpec(machine string, slot sandbox.Slot, s sandbox.StartSpec, warm bool) (*specs.Spec, error) {
	guestCaps, err := Capabilities(s.Capabilities)
	if err != nil {
		return nil, err
	}
	for _, c := range guestCapabilities() {
		if !slices.Contains(guestCaps, c) {
			guestCaps = append(guestCaps, c)
		}
	}
	var set wire.Setup
	if !warm {
		g, err := setup(slot, s)
		if err != nil {
			return nil, err
		}
		set = wire.Setup{Hostname: g.Hostname, Hosts: g.Hosts, ResolvConf: g.ResolvConf, Unmount: g.Unmount, DropCaps: g.DropCaps}
	}
	shm := max(64<<20, s.Resources.MemoryLimit/2)
	return &specs.Spec{
		Version:  specVersion,
		Hostname: s.Hostname,
		Root:     &specs.Root{Path: r.opts.Dir + "/empty"},
		Process: &specs.Process{
			Args: []string{GuestPath + "/viv-guest"},
			Env: []string{
				"GOMAXPROCS=1", // threads cost more here than they give
				"VIV_GUEST_READY=1",
				"VIV_GUEST_PORT=" + strconv.Itoa(GuestPort),
				"VIV_GUEST_KEY=" + hex.EncodeToString(s.GuestKey),
				"VIV_GUEST_SETUP=" + hex.EncodeToString(set.Append(nil)),
			},
			Cwd: "/",
			Capabilities: &specs.LinuxCapabilities{
				Bounding: guestCaps, Effective: guestCaps, Permitted: guestCaps,
			},
			Rlimits: []specs.POSIXRlimit{
				{Type: "RLIMIT_NPROC", Soft: uint64(s.Resources.Pids), Hard: uint64(s.Resources.Pids)},
				{Type: "RLIMIT_NOFILE", Soft: 65536, Hard: 1 << 20},
				{Type: "RLIMIT_CORE", Soft: 0, Hard: 0},
			},
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"ro"}},
			{Destination: "/dev", Type: "tmpfs", Source: "dev"},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "nodev", "mode=1777", "size=" + strconv.FormatInt(shm, 10)}},
			{Destination: GuestPath, Type: "erofs", Source: r.opts.GuestImage, Options: []string{"ro"}},
		},
		Annotations: map[string]string{
			"io.kubernetes.cri.container-type": "container",
			"io.kubernetes.cri.container-name": "main",
			"io.kubernetes.cri.sandbox-id":     machine,
			"dev.gvisor.spec.rootfs.type":      "erofs",
			"dev.gvisor.spec.rootfs.source":    s.ImagePath,
			"dev.gvisor.spec.rootfs.overlay":   "memory",
		},
		Linux: &specs.Linux{
			// a process namespace of its own makes the guest process 1
			Namespaces: []specs.LinuxNamespace{{Type: "pid"}, {Type: "ipc"}, {Type: "uts"}, {Type: "mount"}, {Type: "network", Path: slot.Netns}},
			Sysctl:     map[string]string{"net.ipv6.conf.all.disable_ipv6": "1"},
		},
	}, nil
}

// capabilityNumbers has the capabilities of capabilities(7).
var capabilityNumbers = map[string]int{
	"CAP_CHOWN": unix.CAP_CHOWN, "CAP_DAC_OVERRIDE": unix.CAP_DAC_OVERRIDE, "CAP_DAC_READ_SEARCH": unix.CAP_DAC_READ_SEARCH,
	"CAP_FOWNER": unix.CAP_FOWNER, "CAP_FSETID": unix.CAP_FSETID, "CAP_KILL": unix.CAP_KILL, "CAP_SETGID": unix.CAP_SETGID,
	"CAP_SETUID": unix.CAP_SETUID, "CAP_SETPCAP": unix.CAP_SETPCAP, "CAP_LINUX_IMMUTABLE": unix.CAP_LINUX_IMMUTABLE,
	"CAP_NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE, "CAP_NET_BROADCAST": unix.CAP_NET_BROADCAST, "CAP_NET_ADMIN": unix.CAP_NET_ADMIN,
	"CAP_NET_RAW": unix.CAP_NET_RAW, "CAP_IPC_LOCK": unix.CAP_IPC_LOCK, "CAP_IPC_OWNER": unix.CAP_IPC_OWNER,
	"CAP_SYS_MODULE": unix.CAP_SYS_MODULE, "CAP_SYS_RAWIO": unix.CAP_SYS_RAWIO, "CAP_SYS_CHROOT": unix.CAP_SYS_CHROOT,
	"CAP_SYS_PTRACE": unix.CAP_SYS_PTRACE, "CAP_SYS_PACCT": unix.CAP_SYS_PACCT, "CAP_SYS_ADMIN": unix.CAP_SYS_ADMIN,
	"CAP_SYS_BOOT": unix.CAP_SYS_BOOT, "CAP_SYS_NICE": unix.CAP_SYS_NICE, "CAP_SYS_RESOURCE": unix.CAP_SYS_RESOURCE,
	"CAP_SYS_TIME": unix.CAP_SYS_TIME, "CAP_SYS_TTY_CONFIG": unix.CAP_SYS_TTY_CONFIG, "CAP_MKNOD": unix.CAP_MKNOD,
	"CAP_LEASE": unix.CAP_LEASE, "CAP_AUDIT_WRITE": unix.CAP_AUDIT_WRITE, "CAP_AUDIT_CONTROL": unix.CAP_AUDIT_CONTROL,
	"CAP_SETFCAP": unix.CAP_SETFCAP, "CAP_MAC_OVERRIDE": unix.CAP_MAC_OVERRIDE, "CAP_MAC_ADMIN": unix.CAP_MAC_ADMIN,
	"CAP_SYSLOG": unix.CAP_SYSLOG, "CAP_WAKE_ALARM": unix.CAP_WAKE_ALARM, "CAP_BLOCK_SUSPEND": unix.CAP_BLOCK_SUSPEND,
	"CAP_AUDIT_READ": unix.CAP_AUDIT_READ, "CAP_PERFMON": unix.CAP_PERFMON, "CAP_BPF": unix.CAP_BPF,
	"CAP_CHECKPOINT_RESTORE": unix.CAP_CHECKPOINT_RESTORE,
}
