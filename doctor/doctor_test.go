package doctor

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/network"
)

// good is a host on which nothing is wrong.
var good = map[string]string{
	"/proc/self/status":                      "Name:\tviv\nCapEff:\t000001ffffffffff\n",
	"/proc/sys/kernel/osrelease":             "6.1.0-18-amd64\n",
	"/proc/sys/kernel/seccomp/actions_avail": "kill_process kill_thread trap errno user_notif trace log allow\n",
	"/proc/sys/kernel/yama/ptrace_scope":     "1\n",
	"/proc/sys/kernel/pid_max":               "4194304\n",
	"/proc/sys/kernel/threads-max":           "190000\n",
	"/proc/sys/fs/file-max":                  "9223372036854775807\n",
	"/proc/sys/vm/max_map_count":             "65530\n",
	"/proc/sys/vm/overcommit_memory":         "0\n",
	"/proc/sys/user/max_user_namespaces":     "95000\n",
	"/proc/sys/user/max_net_namespaces":      "95000\n",
	"/proc/self/ns/user":                     "",
	"/proc/self/limits":                      "Limit                     Soft Limit           Hard Limit           Units     \nMax open files            1024                 1048576              files     \n",
	"/proc/meminfo":                          "MemTotal:       16000000 kB\nMemFree: 1 kB\n",
	"/proc/self/mounts":                      "/dev/vda / ext4 rw 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
	"/proc/cgroups":                          "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t0\t10\t1\nmemory\t0\t10\t0\npids\t0\t10\t1\n",
	"/sys/fs/cgroup/cgroup.controllers":      "cpuset cpu io memory hugetlb pids\n",
	"/run/systemd/system/x":                  "",
	"/etc/passwd":                            "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n",
	"/etc/group":                             "root:x:0:\nnogroup:x:65534:\n",
	"/etc/subuid":                            "user:100000:65536\n",
	"/etc/subgid":                            "user:100000:65536\n",
	"/proc/self/uid_map":                     "         0          0 4294967295\n",
	"/proc/self/gid_map":                     "         0          0 4294967295\n",
	"/dev/kvm":                               "",
}

// fakeHost writes such a host, with changes: files of other content, or without
// those that are "-".
func fakeHost(t *testing.T, changes map[string]string) *host {
	t.Helper()
	root := t.TempDir()
	files := map[string]string{}
	for k, v := range good {
		files[k] = v
	}
	for k, v := range changes {
		files[k] = v
	}
	for k, v := range files {
		if v == "-" {
			continue
		}
		p := filepath.Join(root, k)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(v), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return &host{
		root: root,
		statfs: func(string) (unix.Statfs_t, error) {
			return unix.Statfs_t{Type: unix.EXT4_SUPER_MAGIC, Bsize: 4096, Blocks: 10 << 20, Bavail: 9 << 20, Files: 1 << 20, Ffree: 1 << 19}, nil
		},
		look: func(string) (string, error) { return "/usr/bin/mmdebstrap", nil },
		now:  func() time.Time { return time.Date(2027, 1, 1, 0, 0, 0, 0, time.UTC) },
		sync: func() bool { return true },
	}
}

// dataDir is a short one that everyone may pass through, as a test's own
// temporary directory is not.
func dataDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "doc")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "data")
}

func options(t *testing.T) Options {
	t.Helper()
	return Options{DataDir: dataDir(t), CPURequest: 100, MemoryRequest: 128 << 20, ReserveMemory: 512 << 20, ReserveCPU: 200, ReserveDisk: 2 << 30}
}

// wellFormed holds for every finding: nothing is silent.
func wellFormed(t *testing.T, all []Finding) {
	t.Helper()
	for _, f := range all {
		if f.Name == "" {
			t.Errorf("no name: %+v", f)
		}
		if f.OK && (f.Severity != "" || f.Effect != "" || f.Fix != "") {
			t.Errorf("OK, and more: %+v", f)
		}
		if !f.OK && (f.Detail == "" || f.Effect == "" || f.Fix == "" || !slices.Contains([]Severity{Error, Warning, Note}, f.Severity)) {
			t.Errorf("not OK, and not said what, why and how: %+v", f)
		}
		if strings.ContainsAny(f.Detail+f.Effect+f.Fix, "\n") || strings.Contains(f.Detail+f.Effect+f.Fix, "%!") {
			t.Errorf("text: %+v", f)
		}
	}
}

func TestGoodHost(t *testing.T) {
	t.Parallel()
	d := newDoctor(options(t), fakeHost(t, nil))
	d.static()
	wellFormed(t, d.found)
	for _, f := range d.found {
		if !f.OK {
			t.Errorf("%+v", f)
		}
	}
	if len(d.found) < 15 {
		t.Errorf("only %d findings", len(d.found))
	}
	if Failed(d.found) {
		t.Error("failed")
	}
}

func TestFindings(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		files    map[string]string
		host     func(*host)
		opts     func(*Options)
		finding  string
		severity Severity
		says     string // in detail, effect or fix
	}{
		{name: "no root", host: func(h *host) { h.euid = 1000 }, finding: "root", severity: Error, says: "sudo"},
		{name: "capability", files: map[string]string{"/proc/self/status": "CapEff:\t000001fffeffefff\n"}, finding: "capabilities", severity: Error, says: "--cap-add NET_ADMIN"},
		{name: "no status", files: map[string]string{"/proc/self/status": "-"}, finding: "capabilities", severity: Error, says: "mount -t proc"},
		{name: "odd status", files: map[string]string{"/proc/self/status": "CapEff:\tzz\n"}, finding: "capabilities", severity: Error},
		{name: "sys_resource", files: map[string]string{"/proc/self/status": "CapEff:\t000001fffeffffff\n"}, finding: "CAP_SYS_RESOURCE", severity: Note, says: "open files"},
		{name: "a user's", files: map[string]string{"/etc/passwd": "root:x:0:0::/:/bin/sh\nanna:x:2046820352:100::/:/bin/sh\n"}, finding: "users of sentries", severity: Warning, says: `"anna" has 2046820352 (/etc/passwd)`},
		{name: "a group's", files: map[string]string{"/etc/group": "staff:x:2046885887:\n"}, finding: "users of sentries", severity: Warning, says: `"staff" has 2046885887`},
		{name: "subordinate users", files: map[string]string{"/etc/subuid": "# x\nbob:1:1\nanna:2046754817:65536\n"}, finding: "users of sentries", severity: Warning, says: "2046754817 to 2046820352 (/etc/subuid)"},
		{name: "subordinate groups", files: map[string]string{"/etc/subgid": "anna:5000:65536\n"}, opts: func(o *Options) { o.FirstUID, o.UIDs = 70_535, 1000 }, finding: "users of sentries", severity: Warning, says: "uids.first"},
		{name: "few users here", files: map[string]string{"/proc/self/uid_map": "0 100000 65536\n"}, finding: "users of sentries", severity: Error, says: "0 100000 65536"},
		{name: "old kernel", files: map[string]string{"/proc/sys/kernel/osrelease": "5.4.0-42-generic\n"}, finding: "kernel", severity: Error, says: "5.10"},
		{name: "odd kernel", files: map[string]string{"/proc/sys/kernel/osrelease": "x\n"}, finding: "kernel", severity: Error},
		{name: "no seccomp", files: map[string]string{"/proc/sys/kernel/seccomp/actions_avail": "-"}, finding: "seccomp", severity: Error, says: "CONFIG_SECCOMP_FILTER"},
		{name: "less seccomp", files: map[string]string{"/proc/sys/kernel/seccomp/actions_avail": "kill_process allow"}, finding: "seccomp", severity: Error, says: "trap"},
		{name: "ptrace 3", files: map[string]string{"/proc/sys/kernel/yama/ptrace_scope": "3\n"}, finding: "ptrace", severity: Error, says: "reboot"},
		{name: "ptrace 2", files: map[string]string{"/proc/sys/kernel/yama/ptrace_scope": "2\n"}, finding: "ptrace", severity: Warning, says: "sysctl -w kernel.yama.ptrace_scope=1"},
		{name: "overcommit", files: map[string]string{"/proc/sys/vm/overcommit_memory": "2\n"}, finding: "memory overcommit", severity: Error, says: "sysctl -w vm.overcommit_memory=0"},
		{name: "userns off", files: map[string]string{"/proc/sys/user/max_user_namespaces": "0\n"}, finding: "user namespaces", severity: Error, says: "sysctl -w user.max_user_namespaces="},
		{name: "userns none", files: map[string]string{"/proc/self/ns/user": "-"}, finding: "user namespaces", severity: Error, says: "CONFIG_USER_NS"},
		{name: "few netns", files: map[string]string{"/proc/sys/user/max_net_namespaces": "150\n"}, finding: "namespace limits", severity: Warning, says: "user.max_net_namespaces=65536"},
		{name: "no cgroups", files: map[string]string{"/sys/fs/cgroup/cgroup.controllers": "-"}, finding: "cgroup controllers", severity: Error, says: "mount -t cgroup2"},
		{name: "memory off", files: map[string]string{"/sys/fs/cgroup/cgroup.controllers": "cpu pids"}, finding: "cgroup controllers", severity: Error, says: "cgroup_enable=memory"},
		{name: "pids elsewhere", files: map[string]string{"/sys/fs/cgroup/cgroup.controllers": "cpu memory"}, finding: "cgroup controllers", severity: Error, says: "systemd.unified_cgroup_hierarchy=1"},
		{name: "v1 without", files: map[string]string{"/sys/fs/cgroup/cgroup.controllers": "-", "/sys/fs/cgroup/cpu/x": "", "/sys/fs/cgroup/cpuacct/x": "", "/sys/fs/cgroup/memory/x": ""},
			finding: "cgroup controllers", severity: Error, says: "mount -t cgroup -o pids cgroup /sys/fs/cgroup/pids"},
		{name: "kernel without", files: map[string]string{"/sys/fs/cgroup/cgroup.controllers": "cpu memory", "/proc/cgroups": "cpu\t0\t1\t1\n"}, finding: "cgroup controllers", severity: Error, says: "CONFIG_CGROUP_PIDS"},
		{name: "long path", opts: func(o *Options) { o.DataDir = "/tmp/" + strings.Repeat("d", 90) }, finding: "data directory path", severity: Error, says: "shorter"},
		{name: "long socket", opts: func(o *Options) { o.UnixSocket = "/tmp/" + strings.Repeat("d", 110) }, finding: "data directory path", severity: Error, says: "8 bytes"},
		{name: "noexec", host: func(h *host) { flags(h, stNoExec) }, finding: "noexec", severity: Error, says: "remount,exec /"},
		{name: "read only", host: func(h *host) { flags(h, stReadOnly) }, finding: "file system", severity: Error, says: "remount,rw /"},
		{name: "nfs", host: func(h *host) { magic(h, unix.NFS_SUPER_MAGIC) }, finding: "file system", severity: Error, says: "local disk"},
		{name: "tmpfs", host: func(h *host) { magic(h, unix.TMPFS_MAGIC) }, finding: "file system", severity: Warning, says: "lost"},
		{name: "no statfs", host: func(h *host) {
			h.statfs = func(string) (unix.Statfs_t, error) { return unix.Statfs_t{}, errors.New("gone") }
		}, finding: "file system", severity: Error, says: "gone"},
		{name: "full", host: func(h *host) { space(h, 1<<10, 1<<19) }, finding: "disk space", severity: Error, says: "free space on /"},
		{name: "nearly full", host: func(h *host) { space(h, 2<<20, 1<<19) }, finding: "disk space", severity: Warning},
		{name: "inodes", host: func(h *host) { space(h, 9<<20, 100) }, finding: "inodes", severity: Error},
		{name: "few inodes", host: func(h *host) { space(h, 9<<20, 10_000) }, finding: "inodes", severity: Warning},
		{name: "pid_max", files: map[string]string{"/proc/sys/kernel/pid_max": "32768\n"}, opts: func(o *Options) { o.Sandboxes = 1600 }, finding: "process ids", severity: Warning, says: "sysctl -w kernel.pid_max="},
		{name: "threads", files: map[string]string{"/proc/sys/kernel/threads-max": "4000\n"}, finding: "threads", severity: Warning, says: "kernel.threads-max="},
		{name: "maps", files: map[string]string{"/proc/sys/vm/max_map_count": "1000\n"}, finding: "memory maps", severity: Warning, says: "vm.max_map_count="},
		{name: "nofile", files: map[string]string{"/proc/self/limits": "Max open files            1024                 1024                 files     \n"}, finding: "open files of a process", severity: Warning, says: "LimitNOFILE"},
		{name: "little memory", files: map[string]string{"/proc/meminfo": "MemTotal: 600000 kB\n"}, finding: "memory", severity: Error},
		{name: "memory for few", opts: func(o *Options) { o.Sandboxes = 2000 }, finding: "memory", severity: Note},
		{name: "clock", host: func(h *host) { h.now = func() time.Time { return time.Unix(0, 0) } }, finding: "clock", severity: Error, says: "set-ntp"},
		{name: "no ntp", host: func(h *host) { h.sync = func() bool { return false } }, finding: "clock", severity: Note},
		{name: "no tool", host: func(h *host) { h.look = func(string) (string, error) { return "", errors.New("none") } }, finding: "base images", severity: Note, says: "apt-get install mmdebstrap"},
		{name: "no systemd", files: map[string]string{"/run/systemd/system/x": "-"}, finding: "systemd", severity: Note},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			h, o := fakeHost(t, c.files), options(t)
			if c.host != nil {
				c.host(h)
			}
			if c.opts != nil {
				c.opts(&o)
			}
			d := newDoctor(o, h)
			d.static()
			wellFormed(t, d.found)
			var bad []Finding
			for _, f := range d.found {
				if !f.OK {
					bad = append(bad, f)
				}
			}
			i := slices.IndexFunc(bad, func(f Finding) bool { return f.Name == c.finding })
			if i < 0 {
				t.Fatalf("no such finding: %+v", bad)
			}
			f := bad[i]
			if f.Severity != c.severity || !strings.Contains(f.Detail+" "+f.Effect+" "+f.Fix, c.says) {
				t.Errorf("%+v", f)
			}
			if Failed(d.found) != (c.severity == Error) {
				t.Errorf("failed: %v, with %+v", Failed(d.found), bad)
			}
		})
	}
}

func flags(h *host, f int64) { change(h, func(st *unix.Statfs_t) { st.Flags = f }) }
func magic(h *host, m int64) { change(h, func(st *unix.Statfs_t) { st.Type = m }) }
func space(h *host, blocks, files uint64) {
	change(h, func(st *unix.Statfs_t) { st.Bavail, st.Ffree = blocks, files })
}

func change(h *host, fn func(*unix.Statfs_t)) {
	inner := h.statfs
	h.statfs = func(p string) (unix.Statfs_t, error) {
		st, err := inner(p)
		fn(&st)
		return st, err
	}
}

// Root without rights over user namespaces is fine: those sysctls are about
// others.
func TestUnprivilegedSysctlsAreNoFault(t *testing.T) {
	t.Parallel()
	d := newDoctor(options(t), fakeHost(t, map[string]string{
		"/proc/sys/kernel/unprivileged_userns_clone":             "0\n",
		"/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n",
	}))
	d.namespaces()
	i := slices.IndexFunc(d.found, func(f Finding) bool { return f.Name == "unprivileged user namespaces" })
	if i < 0 || !d.found[i].OK || !strings.Contains(d.found[i].Detail, "apparmor") || !strings.Contains(d.found[i].Detail, "unprivileged_userns_clone") {
		t.Errorf("%+v", d.found)
	}
}

func TestDataDir(t *testing.T) {
	t.Parallel()
	h, o := fakeHost(t, nil), options(t)
	closed := o.DataDir
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	// its own mode is the daemon's affair, that of what is above it is not
	d := newDoctor(o, h)
	d.dataDir()
	if Failed(d.found) {
		t.Errorf("%+v", d.found)
	}
	o.DataDir = filepath.Join(closed, "a", "b")
	d = newDoctor(o, h)
	d.dataDir()
	i := slices.IndexFunc(d.found, func(f Finding) bool { return f.Name == "data directory access" })
	if i < 0 || d.found[i].Severity != Error || !strings.Contains(d.found[i].Fix, "chmod o+x "+closed) {
		t.Errorf("%+v", d.found)
	}
	file := filepath.Join(closed, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	o.DataDir = file
	d = newDoctor(o, h)
	d.dataDir()
	if !Failed(d.found) || !strings.Contains(d.found[0].Detail, "not a directory") {
		t.Errorf("%+v", d.found)
	}
}

func TestInUse(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if inUse(dir) {
		t.Error("no daemon, and in use")
	}
	f, err := os.Create(filepath.Join(dir, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if inUse(dir) {
		t.Error("not locked, and in use")
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if !inUse(dir) {
		t.Error("locked, and not in use")
	}
}

func TestMountPoint(t *testing.T) {
	t.Parallel()
	d := newDoctor(Options{}, fakeHost(t, map[string]string{"/proc/self/mounts": "a / ext4 rw 0 0\nb /var/lib ext4 rw 0 0\nc /var/my\\040disk ext4 rw 0 0\nbroken\n"}))
	for path, want := range map[string]string{"/var/lib/x": "/var/lib", "/var/lib": "/var/lib", "/var/library": "/", "/var/my disk/x": "/var/my disk"} {
		if got := d.mountPoint(path); got != want {
			t.Errorf("%s is on %s, want %s", path, got, want)
		}
	}
}

func TestKernelVersion(t *testing.T) {
	t.Parallel()
	for s, want := range map[string][2]int{"6.1.0-18-amd64": {6, 1}, "6.18.44-fc": {6, 18}, "5.15+": {5, 15}, "10.0-rc1": {10, 0}} {
		if got, ok := kernelVersion(s); !ok || got != want {
			t.Errorf("%s: %v %v", s, got, ok)
		}
	}
	for _, s := range []string{"", "6", "x.y", ".1", "6.x"} {
		if _, ok := kernelVersion(s); ok {
			t.Errorf("%q is a version", s)
		}
	}
}

// The machine that the tests run on, for real: every try up to a boot. What it
// finds depends on the machine; that it is whole and leaves nothing does not.
func TestThisMachine(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	o := options(t)
	if err := os.Mkdir(o.DataDir, 0o711); err != nil {
		t.Fatal(err)
	}
	o.Network = network.Options{Dir: o.DataDir}
	all := Run(t.Context(), o)
	wellFormed(t, all)
	for _, name := range []string{"root", "memfd", "pidfd", "new user namespace", "cgroup limits", "network namespaces", "boot of a machine"} {
		if !slices.ContainsFunc(all, func(f Finding) bool { return f.Name == name }) {
			t.Errorf("%s was not looked at", name)
		}
	}
	for _, f := range all {
		b, err := json.Marshal(f)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s", b)
	}
	left, err := os.ReadDir(o.DataDir)
	if err != nil || len(left) > 0 {
		t.Errorf("left in the data directory: %v %v", left, err)
	}
	for _, dir := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids"} {
		left, err := filepath.Glob(filepath.Join(dir, "viv-doctor-*"))
		if err != nil || len(left) > 0 {
			t.Errorf("left: %v %v", left, err)
		}
	}
}
