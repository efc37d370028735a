package gvisor_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"vivarium/guest"
	"vivarium/runtime/runtimetest"
	"vivarium/sandbox"
)

// busy is a machine that does a bit of everything, with its guest.
func busy(t *testing.T, l *lab, r sandbox.Runtime) (sandbox.Machine, *guest.Client, []byte) {
	t.Helper()
	ctx := t.Context()
	m, err := r.Boot(ctx, sandbox.BootSpec{Resources: runtimetest.Resources})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Remove(context.Background()); err != nil {
			t.Error(err)
		}
	})
	key := bytes.Repeat([]byte{7}, 32)
	if err := m.Start(ctx, sandbox.StartSpec{SandboxID: "sb-x", Hostname: "h", ImagePath: common.image, Resources: runtimetest.Resources, GuestKey: key}); err != nil {
		t.Fatal(err)
	}
	c, err := guest.Connect(ctx, m.Dial, key, guest.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return m, c, key
}

func script(t *testing.T, c *guest.Client, id, text string) *guest.ExecStream {
	t.Helper()
	s, err := c.StartExec(t.Context(), id, sandbox.ExecSpec{Argv: []string{"/bin/sh", "-c", text}, Env: map[string]string{"PATH": "/bin"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func status(t *testing.T, file string) map[string]string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	m := map[string]string{}
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok {
			m[k] = strings.TrimSpace(v)
		}
	}
	return m
}

// hostDescriptors is the written list of F1: all that a sentry may hold of the
// host. Each of the files is one that this sandbox alone uses, or is read-only.
var hostDescriptors = []struct {
	target   *regexp.Regexp
	readOnly bool // opened so
	why      string
}{
	{regexp.MustCompile(`^/dev/null$`), false, "standard files of the sentry itself"},
	{regexp.MustCompile(`^anon_inode:\[event(fd|poll)\]$`), false, "its own event loop"},
	{regexp.MustCompile(`^anon_inode:seccomp notify$`), false, "system calls of its stubs"},
	{regexp.MustCompile(`^pipe:`), false, "its own"},
	{regexp.MustCompile(`^socket:`), false, "control socket, forwarded connections, the slot's interface; see below"},
	{regexp.MustCompile(`^/memfd:(memory-usage|systrap-memory|runsc-memory|gvisor-.*) \(deleted\)$`), false, "memory of the sandbox"},
	{regexp.MustCompile(`^/memfd:viv-stdio \(deleted\)$`), false, "sealed and empty: standard files of the containers"},
	{regexp.MustCompile(`/gv/m/[^/]+/panic\.log$`), false, "last words, of this machine alone"},
	{regexp.MustCompile(`/gv/m/[^/]+/upper$`), false, "what this sandbox wrote"},
	{regexp.MustCompile(`/(im-|guest-|pause-)[0-9a-f]+\.erofs$`), true, "images"},
}

// F1: the sentry and its stubs, seen from the host while the sandbox works, have
// no privilege, no view of the host's files, and no descriptor beyond the list.
func TestF01Sentry(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	r := l.open(t, runtimetest.Options{})
	t.Cleanup(func() { r.Close() })
	m, c, _ := busy(t, l, r)
	s := script(t, c, "busy", "dd if=/dev/zero of=/file bs=1M count=8 2>/dev/null; echo up; while :; do sh -c 'cat /file >/dev/null; ls -lR /proc >/dev/null 2>&1'; done")
	if _, err := s.Recv(); err != nil {
		t.Fatal(err)
	}
	pids := l.processes(t, m.ID())
	if len(pids) < 2 {
		t.Fatalf("processes %v: want a sentry and its stubs", pids)
	}
	threads, uid := 0, userOf(t, l, pids[0])
	for _, pid := range pids {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range tasks {
			if _, err := os.Stat(file); err != nil {
				continue // a stub that ended
			}
			threads++
			checkThread(t, file, uid)
		}
	}
	if threads < 4 {
		t.Errorf("looked at %d threads", threads)
	}
	pid := sentryOf(t, pids)
	checkProcess(t, pid, uid)
	checkView(t, pid)
	checkNamespaces(t, l, pid)
	checkDescriptors(t, pid)
	checkPipes(t, pids, uid)
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		t.Fatal(err)
	}
	if len(env) > 0 {
		t.Errorf("environment of the sentry: %.80q", env)
	}
	cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(cmdline, []byte("0707070707")) {
		t.Error("the guest's key is in the sentry's arguments")
	}
}

// sentryOf finds the sentry among the processes of a machine: it is process 1 of
// their namespace.
func sentryOf(t *testing.T, pids []int) int {
	t.Helper()
	for _, pid := range pids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err == nil && regexp.MustCompile(`(?m)^NSpid:.*\t1$`).Match(b) {
			return pid
		}
	}
	t.Fatalf("no sentry among the processes %v", pids)
	return 0
}

// userOf is the user of a process, which is to be of the range of sentries.
func userOf(t *testing.T, l *lab, pid int) int {
	t.Helper()
	ids := strings.Fields(status(t, fmt.Sprintf("/proc/%d/status", pid))["Uid"])
	if len(ids) != 4 {
		t.Fatalf("users of process %d are %v", pid, ids)
	}
	n, err := strconv.Atoi(ids[0])
	if err != nil || !l.uids.Contains(n) {
		t.Fatalf("process %d is of user %s, which is not of %+v", pid, ids[0], l.uids)
	}
	return n
}

// checkThread: user and group, real, effective, saved and of files, are uid.
func checkThread(t *testing.T, file string, uid int) {
	t.Helper()
	st := status(t, file)
	for _, k := range []string{"Uid", "Gid"} {
		ids := strings.Fields(st[k])
		if len(ids) != 4 || slices.ContainsFunc(ids, func(id string) bool { return id != strconv.Itoa(uid) }) {
			t.Errorf("%s: %s %s, want %d", file, k, st[k], uid)
		}
	}
	if st["Groups"] != "" {
		t.Errorf("%s: groups %s", file, st["Groups"])
	}
	for _, k := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
		if n, err := strconv.ParseUint(st[k], 16, 64); err != nil || n != 0 {
			t.Errorf("%s: %s %s", file, k, st[k])
		}
	}
	if st["NoNewPrivs"] != "1" || st["Seccomp"] != "2" {
		t.Errorf("%s: NoNewPrivs %s, Seccomp %s", file, st["NoNewPrivs"], st["Seccomp"])
	}
}

// checkProcess: what a sentry has as a process, beside what its threads have.
func checkProcess(t *testing.T, pid, uid int) {
	t.Helper()
	proc := func(name string) string {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		if err != nil {
			t.Error(err)
		}
		return string(b)
	}
	// its user namespace knows one user and one group, and no more can be had
	for _, m := range []string{"uid_map", "gid_map"} {
		if f := strings.Fields(proc(m)); !slices.Equal(f, []string{"65534", strconv.Itoa(uid), "1"}) {
			t.Errorf("%s is %v", m, f)
		}
	}
	if g := strings.TrimSpace(proc("setgroups")); g != "deny" {
		t.Errorf("setgroups: %s", g)
	}
	// a session of its own, without a terminal (proc_pid_stat(5), from field 3 on)
	_, rest, _ := strings.Cut(proc("stat"), ") ")
	if f := strings.Fields(rest); len(f) < 5 || f[3] != strconv.Itoa(pid) || f[4] != "0" {
		t.Errorf("session and terminal of process %d: %v", pid, f[:min(5, len(f))])
	}
	st := status(t, fmt.Sprintf("/proc/%d/status", pid))
	if n, err := strconv.ParseUint(st["SigIgn"], 16, 64); err != nil || n != 0 {
		t.Errorf("it ignores signals %s", st["SigIgn"])
	}
	// a thread blocks signals now and then, but no signal is blocked by all
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	blocked := ^uint64(0)
	for _, task := range tasks {
		b, err := os.ReadFile(task)
		if err != nil {
			continue // it has ended
		}
		_, v, _ := strings.Cut(string(b), "SigBlk:")
		v, _, _ = strings.Cut(strings.TrimSpace(v), "\n")
		n, err := strconv.ParseUint(v, 16, 64)
		if err != nil {
			t.Error(err)
		}
		blocked &= n
	}
	if blocked != 0 {
		t.Errorf("all threads block signals %#x", blocked)
	}
	if st["TracerPid"] != "0" {
		t.Errorf("the sentry is traced by %s", st["TracerPid"])
	}
	// its memory, which is the sandbox's, does not go to where the host keeps dumps
	core := regexp.MustCompile(`(?m)^Max core file size +(\S+) +(\S+)`).FindStringSubmatch(proc("limits"))
	if core == nil || core[1] != "1" || core[2] != "1" {
		t.Errorf("limits of core files: %v", core)
	}
	for _, link := range []string{"cwd", "root"} {
		if to, err := os.Readlink(fmt.Sprintf("/proc/%d/%s", pid, link)); err != nil || to != "/" {
			t.Errorf("%s is %s, %v", link, to, err)
		}
	}
	if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err != nil || !strings.HasPrefix(filepath.Base(exe), "viv-sentry") {
		t.Errorf("it runs %s, %v", exe, err)
	}
}

// checkPipes: both ends of each pipe are in the machine and nowhere else.
func checkPipes(t *testing.T, pids []int, uid int) {
	t.Helper()
	const read, write = 1, 2
	ends := map[string]int{}
	look := func(dir string, have func(to, info string)) {
		fds, _ := os.ReadDir(dir + "/fd") // it may end
		for _, fd := range fds {
			if to, err := os.Readlink(dir + "/fd/" + fd.Name()); err == nil && strings.HasPrefix(to, "pipe:") {
				have(to, dir+"/fdinfo/"+fd.Name())
			}
		}
	}
	for _, pid := range pids {
		look(fmt.Sprintf("/proc/%d", pid), func(to, info string) {
			b, err := os.ReadFile(info)
			if err != nil {
				return
			}
			_, flags, _ := strings.Cut(string(b), "flags:")
			flags, _, _ = strings.Cut(strings.TrimSpace(flags), "\n")
			n, err := strconv.ParseUint(flags, 8, 64)
			if err != nil {
				t.Errorf("%s: %v", info, err)
			}
			switch n & unix.O_ACCMODE {
			case unix.O_RDONLY:
				ends[to] |= read
			case unix.O_WRONLY:
				ends[to] |= write
			default:
				ends[to] |= read | write
			}
		})
	}
	all, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range all {
		st, err := os.ReadFile(dir + "/status")
		if err != nil || bytes.Contains(st, fmt.Appendf(nil, "\nUid:\t%d\t", uid)) {
			continue // it has ended, or is of this machine, maybe since we looked
		}
		look(dir, func(to, info string) {
			if ends[to] != 0 {
				t.Errorf("%s of the sentry is also in %s", to, dir)
			}
		})
	}
	for to, e := range ends {
		if e == read || e == write {
			t.Errorf("the sentry has one end of %s", to)
		}
	}
}

// checkView: the root is an empty read-only tmpfs, of which nothing can be
// executed, and nothing else is mounted; no mount of the host is its peer or
// master.
func checkView(t *testing.T, pid int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	// proc_pid_mountinfo(5): ids, root, mount point, options, no optional fields, type
	if len(lines) != 1 || !regexp.MustCompile(`^\d+ \d+ \S+ / / ro,nosuid,nodev,noexec,\S+ - tmpfs `).MatchString(lines[0]) {
		t.Errorf("mounts that the sentry sees:\n%s", b)
	}
	root := fmt.Sprintf("/proc/%d/root/", pid)
	var files []string
	err = filepath.WalkDir(root, func(p string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			files = append(files, strings.TrimPrefix(p, root))
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	// what Go's own time zones and resolver may read, made by gVisor
	for _, f := range files {
		if f != "etc/localtime" && f != "etc/resolv.conf" && !strings.HasPrefix(f, "proc/sys/kernel/") && f != "proc/cpuinfo" && f != "proc/meminfo" {
			t.Errorf("the sentry sees the file %s", f)
		}
	}
}

// checkNamespaces: it shares none with us, and its network is that of its slot.
func checkNamespaces(t *testing.T, l *lab, pid int) {
	t.Helper()
	for _, ns := range []string{"ipc", "mnt", "net", "pid", "user", "uts"} {
		theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, ns))
		if err != nil {
			t.Fatal(err)
		}
		// not of /proc/self, which is the first thread's: a slot may have been made
		// on that, and then it stays in it
		ours, err := os.Readlink("/proc/thread-self/ns/" + ns)
		if err != nil {
			t.Fatal(err)
		}
		if theirs == ours {
			t.Errorf("the sentry is in the host's %s namespace", ns)
		}
	}
	slots, err := filepath.Glob(l.dir + "/net/*")
	if err != nil || len(slots) != 1 {
		t.Fatalf("slots %v, %v", slots, err)
	}
	var slot, netns unix.Stat_t
	if err := unix.Stat(slots[0], &slot); err != nil {
		t.Fatal(err)
	}
	if err := unix.Stat(fmt.Sprintf("/proc/%d/ns/net", pid), &netns); err != nil {
		t.Fatal(err)
	}
	if slot.Ino != netns.Ino {
		t.Error("the sentry is not in the network namespace of its slot")
	}
}

func checkDescriptors(t *testing.T, pid int) {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	fds, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var sockets []string
	found := map[string]bool{}
	for _, fd := range fds {
		target, err := os.Readlink(filepath.Join(dir, fd.Name()))
		if err != nil {
			continue // closed meanwhile
		}
		var listed bool
		for _, h := range hostDescriptors {
			if !h.target.MatchString(target) {
				continue
			}
			listed = true
			found[h.why] = true
			if h.readOnly && !openedReadOnly(t, pid, fd.Name()) {
				t.Errorf("descriptor %s, %s, can be written", fd.Name(), target)
			}
			break
		}
		if !listed {
			t.Errorf("descriptor %s of the sentry is %s, which is not on the list", fd.Name(), target)
		}
		if strings.HasPrefix(target, "socket:[") {
			sockets = append(sockets, strings.Trim(target[len("socket:"):], "[]"))
		}
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(dir, fd.Name()), &st); err == nil {
			switch st.Mode & unix.S_IFMT {
			case unix.S_IFDIR:
				t.Errorf("descriptor %s is a directory of the host: %s", fd.Name(), target)
			case unix.S_IFBLK:
				t.Errorf("descriptor %s is a block device: %s", fd.Name(), target)
			}
		}
		if strings.Contains(target, "viv-stdio") {
			if st.Size != 0 {
				t.Errorf("the shared standard file has %d bytes", st.Size)
			}
			if s := seals(t, filepath.Join(dir, fd.Name())); s&(unix.F_SEAL_GROW|unix.F_SEAL_SEAL) != unix.F_SEAL_GROW|unix.F_SEAL_SEAL {
				t.Errorf("seals of the shared standard file: %#x", s)
			}
		}
	}
	for _, want := range []string{"images", "what this sandbox wrote", "memory of the sandbox", "sealed and empty: standard files of the containers"} {
		if !found[want] {
			t.Errorf("no descriptor is %q: the list is out of date", want)
		}
	}
	// of the host's network it holds nothing
	for _, proto := range []string{"tcp", "tcp6", "udp", "udp6", "raw", "raw6", "icmp", "netlink", "packet"} {
		b, err := os.ReadFile("/proc/self/net/" + proto)
		if err != nil {
			continue // not on this kernel
		}
		for line := range strings.Lines(string(b)) {
			for _, s := range sockets {
				for _, f := range strings.Fields(line) {
					if f == s {
						t.Errorf("the sentry holds a %s socket of the host: %s", proto, line)
					}
				}
			}
		}
	}
}

func seals(t *testing.T, file string) int {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	n, err := unix.FcntlInt(f.Fd(), unix.F_GET_SEALS, 0)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func openedReadOnly(t *testing.T, pid int, fd string) bool {
	t.Helper()
	info := status(t, fmt.Sprintf("/proc/%d/fdinfo/%s", pid, fd))
	flags, err := strconv.ParseUint(info["flags"], 8, 64)
	if err != nil {
		t.Fatal(err)
	}
	return flags&unix.O_ACCMODE == unix.O_RDONLY
}

// F1: nor does a machine that waits in the pool have more.
func TestF01PooledSentry(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	r := l.open(t, runtimetest.Options{})
	t.Cleanup(func() { r.Close() })
	m, err := r.Boot(t.Context(), sandbox.BootSpec{Resources: runtimetest.Resources})
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range l.processes(t, m.ID()) {
		checkThread(t, fmt.Sprintf("/proc/%d/status", pid), userOf(t, l, pid))
		checkView(t, pid)
	}
	if err := m.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
}
