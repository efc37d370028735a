package conformance

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// TestD is processes and identity.
func TestD(t *testing.T) {
	l := newLab(t)
	for _, c := range []struct {
		name string
		fn   func(*testing.T, *lab)
	}{
		{"D01Capabilities", d01}, {"D02Setuid", d02}, {"D02UserNamespace", d02Userns}, {"D02Ptrace", d02Ptrace}, {"D03Calls", d03},
		{"D04Stop", d04Stop}, {"D04StopIgnored", d04Ignored}, {"D04Timeout", d04Timeout}, {"D04Terminal", d04Terminal}, {"D04Signals", d04Signals},
		{"D08Environment", d08}, {"D09Limits", d09}, {"D10Init", d10}, {"D11CoreDumps", d11}, {"D12ExitStatus", d12},
	} {
		l.attack(t, c.name, func(t *testing.T) { c.fn(t, l) })
	}
}

// docker is the mask of Docker's default capabilities.
const docker = 1<<unix.CAP_AUDIT_WRITE | 1<<unix.CAP_CHOWN | 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_FOWNER | 1<<unix.CAP_FSETID | 1<<unix.CAP_KILL | 1<<unix.CAP_MKNOD |
	1<<unix.CAP_NET_BIND_SERVICE | 1<<unix.CAP_NET_RAW | 1<<unix.CAP_SETFCAP | 1<<unix.CAP_SETGID | 1<<unix.CAP_SETPCAP | 1<<unix.CAP_SETUID | 1<<unix.CAP_SYS_CHROOT

// caps reads what a command of a user has.
func (b *box) caps(user string) map[string]uint64 {
	b.t.Helper()
	m := map[string]uint64{}
	for k, v := range fields(b.shAs(user, "grep Cap /proc/self/status | tr '\\t' ' '")) {
		n, err := strconv.ParseUint(v, 16, 64)
		if err != nil {
			b.t.Fatal(err)
		}
		m[k] = n
	}
	if len(m) < 4 {
		b.t.Fatalf("capabilities %v", m)
	}
	return m
}

// D1: Docker's capabilities unless asked otherwise, and never the guest's own.
func d01(t *testing.T, l *lab) {
	for _, c := range []struct {
		name      string
		add, drop []string
		want      uint64
	}{
		{"default", nil, nil, docker},
		{"add", []string{"CAP_NET_ADMIN", "sys_ptrace"}, nil, docker | 1<<unix.CAP_NET_ADMIN | 1<<unix.CAP_SYS_PTRACE},
		{"drop", nil, []string{"NET_RAW", "CAP_MKNOD"}, docker &^ (1<<unix.CAP_NET_RAW | 1<<unix.CAP_MKNOD)},
		{"none", nil, []string{"ALL"}, 0},
		{"only", []string{"CAP_CHOWN"}, []string{"ALL"}, 1 << unix.CAP_CHOWN},
		{"admin", []string{"SYS_ADMIN"}, nil, docker | 1<<unix.CAP_SYS_ADMIN},
	} {
		b := l.box(t, func(s *v1.SandboxSpec) { s.Capabilities = &v1.Capabilities{Add: c.add, Drop: c.drop} })
		got := b.caps("")
		for _, set := range []string{"CapEff", "CapPrm", "CapBnd"} {
			if got[set] != c.want {
				t.Errorf("%s: %s %x, want %x", c.name, set, got[set], c.want)
			}
		}
		if got["CapInh"] != 0 || got["CapAmb"] != 0 {
			t.Errorf("%s: inheritable %x, ambient %x", c.name, got["CapInh"], got["CapAmb"])
		}
		// also where nothing inside may change its user: the guest does it
		user := b.caps("user")
		if user["CapEff"] != 0 || user["CapPrm"] != 0 || user["CapAmb"] != 0 || user["CapBnd"] != c.want {
			t.Errorf("%s: another user has %x", c.name, user)
		}
		// a setuid program gives root's identity and no more than root has
		b.sh("cp /bin/attack /bin/s && chmod 4755 /bin/s")
		if got := b.shAs("user", "s suid; s caps"); got != fmt.Sprintf("1000 0\nCapEff %x\nCapPrm %x\nCapBnd %x", c.want, c.want, c.want) {
			t.Errorf("%s: setuid root: %q", c.name, got)
		}
		if err := b.write("/tmp/made", "user", "x"); err != nil {
			t.Errorf("%s: write a user's file: %v", c.name, err)
		}
		if got := b.sh("stat -c %U /tmp/made"); got != "user" {
			t.Errorf("%s: a user's file belongs to %s", c.name, got)
		}
	}
	for _, bad := range []string{"CAP_EVERYTHING", "", "CAP_"} {
		sb, err := l.Client.Create(within(t), &v1.SandboxSpec{Image: image, Capabilities: &v1.Capabilities{Add: []string{bad}}}, waitRunning)
		if err == nil {
			_ = l.Client.Remove(within(t), sb.Id, true)
		}
		if !errors.Is(err, sandbox.Invalid) {
			t.Errorf("capability %q: %v, want invalid", bad, err)
		}
	}
	b := l.box(t, nil)
	// the sentry is the boundary, so that sudo works inside: as Docker without
	// its --security-opt
	if got := b.sh("grep -E 'NoNewPrivs|Seccomp:' /proc/self/status | tr '\\t' ' '"); strings.Contains(got, "NoNewPrivs: 1") {
		t.Errorf("%s", got)
	}
	// process 1 keeps nothing that it was only given to set up, and of what the
	// sandbox has not only what it needs to start commands
	for _, drop := range [][]string{nil, {"ALL"}} {
		b := l.box(t, func(s *v1.SandboxSpec) { s.Capabilities = &v1.Capabilities{Drop: drop} })
		raw := b.sh("grep CapPrm /proc/1/status | tr '\\t' ' '")
		n, err := strconv.ParseUint(fields(raw)["CapPrm"], 16, 64)
		most := uint64(0)
		if drop == nil {
			most = docker
		}
		for _, c := range wire.KeptCaps {
			most |= 1 << c
		}
		if err != nil || n != most {
			t.Errorf("the guest, without %v: %s, %v, want %x", drop, raw, err, most)
		}
	}
}

// D2: a setuid program gives its owner's identity, inside, and no more.
func d02(t *testing.T, l *lab) {
	b := l.box(t, nil)
	b.sh("cp /bin/attack /bin/s; chmod 4755 /bin/s; cp /bin/attack /bin/u; chown user /bin/u; chmod 4755 /bin/u")
	if got := b.shAs("user", "s suid"); got != "1000 0" {
		t.Errorf("setuid root: %s", got)
	}
	if got := b.shAs("nobody", "u suid"); got != "65534 1000" {
		t.Errorf("setuid user: %s", got)
	}
	// on the host it is nobody still
	b.start("s", "fds", "eventfd", "1")
	for _, p := range b.processes() {
		if uid := statusNumber(t, p, "Uid"); uid == 0 {
			t.Errorf("process %d of the sandbox is root on the host", p)
		}
	}
}

// D2: a user namespace is as much one inside; what it allows ends there.
func d02Userns(t *testing.T, l *lab) {
	b := l.box(t, nil)
	before := b.sh("cat /proc/mounts")
	for _, user := range []string{"", "user"} {
		r := b.mustAs(user, "attack", "userns")
		t.Logf("user namespaces as %q: %v", user, strings.Fields(r.out)[:2]) // recorded
		for _, call := range []string{"reboot", "init_module", "kexec_load", "settimeofday", "swapon", "iopl"} {
			if fields(r.out)[call] == "<nil>" {
				t.Errorf("%s succeeds in a user namespace of %q", call, user)
			}
		}
	}
	if after := b.sh("cat /proc/mounts; hostname"); !strings.HasPrefix(after, before) || strings.HasSuffix(after, "evil") {
		t.Errorf("outside the namespace it changed to %s", after)
	}
	b.alive()
}

// D2: one user cannot trace another's process, nor any the guest.
func d02Ptrace(t *testing.T, l *lab) {
	b := l.box(t, nil)
	root := b.start("sh", "-c", "echo $$; exec sleep 1000")
	b.says(root, "\n")
	e, err := l.Client.GetExec(within(t), b.id, root)
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range []string{"1", strconv.Itoa(int(e.Pid))} {
		r := b.mustAs("user", "attack", "trace", pid)
		if strings.Contains(r.out, "attached") || strings.Contains(r.out, "mem <nil>") {
			t.Errorf("a user traced process %s: %s", pid, r.out)
		}
	}
	// its own it may
	x, err := l.Client.StartExec(within(t), b.id, "", &v1.ExecSpec{Argv: []string{"sleep", "1000"}, User: "user"})
	if err != nil {
		t.Fatal(err)
	}
	r := b.mustAs("user", "attack", "trace", strconv.Itoa(int(x.Pid)))
	t.Logf("a user traces his own process: %s", strings.TrimSpace(r.out)) // recorded
	b.sh("echo works")
}

// refused are the system calls that Docker's capabilities do not cover: none may
// succeed as root inside.
var refused = []string{"mount_tmpfs", "mount_proc", "mount_bind", "remount", "umount", "umount_guest", "pivot_root", "unshare_mount", "unshare_net", "unshare_pid", "unshare_uts", "unshare_ipc",
	"setns", "sethostname", "settimeofday", "reboot", "swapon", "init_module", "kexec_load", "iopl", "bpf", "perf_event_open", "open_by_handle_at", "fanotify", "syslog", "acct", "quotactl", "fsopen", "rlimit"}

// D3: mounts, namespaces and what else root of a host does are refused.
func d03(t *testing.T, l *lab) {
	b := l.box(t, nil)
	for _, user := range []string{"", "user"} {
		got := fields(b.shAs(user, "attack calls"))
		for _, call := range refused {
			if got[call] == "" {
				t.Errorf("%s was not tried", call)
			} else if got[call] == "<nil>" {
				t.Errorf("%s succeeds as %q", call, user)
			}
		}
		t.Logf("as %q: %v", user, got) // A19: io_uring and userfaultfd are recorded
	}
	if got := b.sh("hostname; cat /.viv/viv-guest | wc -c"); strings.HasPrefix(got, "evil") || strings.HasSuffix(got, "\n0") {
		t.Errorf("%s", got)
	}
	// with the capability it is the sandbox's own business
	a := l.box(t, func(s *v1.SandboxSpec) { s.Capabilities = &v1.Capabilities{Add: []string{"ALL"}} })
	got := fields(a.sh("attack calls; true"))
	if got["mount_tmpfs"] != "<nil>" {
		t.Errorf("mount with all capabilities: %s", got["mount_tmpfs"])
	}
	for _, call := range []string{"reboot", "init_module", "kexec_load", "swapon", "iopl", "settimeofday", "bpf"} {
		if got[call] == "<nil>" {
			t.Logf("%s succeeds with all capabilities", call) // inside: the host is looked at below
		}
	}
	if name, err := os.Hostname(); err != nil || name == "evil" {
		t.Errorf("the host is now called %s, %v", name, err)
	}
	if time.Now().Year() < 2000 {
		t.Error("the host's clock was set")
	}
}

// D4: stop is SIGTERM to the main command, whose status is then the sandbox's.
func d04Stop(t *testing.T, l *lab) {
	b := l.box(t, func(s *v1.SandboxSpec) {
		s.Command = []string{"sh", "-c", "trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.1; done"}
	})
	b.says(sandbox.MainExec, "up")
	d := b.stop(10 * time.Second)
	if d.Reason != string(sandbox.ReasonStopped) || !d.HasExit || d.Exit.Code != 3 || len(d.LastOutput) == 0 {
		t.Errorf("%v", d)
	}
	// what it wrote can be read after the end
	var out bytes.Buffer
	x, err := l.Client.Output(within(t), &v1.ReadOutputRequest{SandboxId: b.id, Id: sandbox.MainExec, Follow: true}, &out, nil)
	if err != nil || x.GetExit().GetCode() != 3 || out.String() != "up\nbye\n" {
		t.Errorf("%q, %v, %v", out.String(), x, err)
	}
}

// D4: what does not take SIGTERM gets SIGKILL, with everything that it started.
func d04Ignored(t *testing.T, l *lab) {
	b := l.box(t, func(s *v1.SandboxSpec) {
		s.Command = []string{"sh", "-c", "trap '' TERM INT HUP; (trap '' TERM; setsid sleep 1000) & echo up; while :; do sleep 0.1; done"}
	})
	b.start("setsid", "sh", "-c", "trap '' TERM; sleep 1000")
	b.says(sandbox.MainExec, "up")
	d := b.stop(time.Second)
	if d.Reason != string(sandbox.ReasonStopped) || d.HasExit && d.Exit.Code == 0 {
		t.Errorf("%v", d)
	}
	m, err := l.Client.GetExec(within(t), b.id, sandbox.MainExec)
	if err != nil || m.State != string(sandbox.ExecLost) {
		t.Errorf("%v, %v: want it lost", m, err)
	}
}

// D4: the timeout of a command kills all that it started, wherever it hid.
func d04Timeout(t *testing.T, l *lab) {
	b := l.box(t, nil)
	r, err := b.run(&v1.ExecSpec{
		Argv: []string{"sh", "-c", `trap '' TERM HUP INT
			sleep 7771 & setsid sleep 7772 & (setsid sh -c 'trap "" TERM; sleep 7773 & sleep 7774' &) 
			nohup sleep 7775 >/dev/null 2>&1 &
			(cd /; exec setsid sh -c 'exec 0<&- 1>&- 2>&-; sleep 7776') &
			echo up; while :; do sleep 7777; done`},
		Timeout: durationpb.New(1500 * time.Millisecond),
	})
	if err != nil || !r.exit.TimedOut || r.exit.Code != 137 || r.exit.Signal != int32(unix.SIGKILL) || !strings.HasPrefix(r.out, "up") {
		t.Errorf("%v, %v, %q", r.exit, err, r.out)
	}
	if got := b.sh("ps -o args | grep '[s]leep 777'; true"); got != "" {
		t.Errorf("still there: %s", got)
	}
	// and nothing else
	b.start("sleep", "8888")
	if r, err := b.run(&v1.ExecSpec{Argv: []string{"sleep", "100"}, Timeout: durationpb.New(200 * time.Millisecond)}); err != nil || !r.exit.TimedOut {
		t.Errorf("%v, %v", r.exit, err)
	}
	if got := b.sh("ps -o args | grep -c '[s]leep 8888'; true"); got != "1" {
		t.Error("another command was killed with it")
	}
}

// D4: a terminal: Ctrl-C and Ctrl-\ reach the foreground, Ctrl-D ends the input,
// the size is told.
func d04Terminal(t *testing.T, l *lab) {
	b := l.box(t, nil)
	terminal := func(script string) (*v1.Exec, func(in string), func(want string), func() (*v1.Exec, string)) {
		t.Helper()
		a, err := l.Client.Attach(within(t), &v1.AttachRequest{SandboxId: b.id, Spec: &v1.ExecSpec{Argv: []string{"sh", "-c", script}, Pty: &v1.WindowSize{Rows: 33, Cols: 77}, Stdin: "pipe"}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(a.Close)
		var out bytes.Buffer
		var last *v1.Exec
		next := func() bool {
			m, err := a.Receive()
			if errors.Is(err, io.EOF) {
				return false
			}
			if err != nil {
				t.Fatalf("%v after %q", err, out.String())
			}
			if m.Exec != nil {
				last = m.Exec
			}
			out.Write(m.Stdout)
			return true
		}
		next()
		send := func(in string) {
			if err := a.Send(&v1.AttachRequest{Stdin: []byte(in)}); err != nil {
				t.Fatal(err)
			}
		}
		see := func(want string) {
			t.Helper()
			for !strings.Contains(out.String(), want) {
				if !next() {
					t.Fatalf("ended without %q: %q", want, out.String())
				}
			}
		}
		end := func() (*v1.Exec, string) {
			for next() {
			}
			return last, out.String()
		}
		t.Cleanup(func() { _ = last })
		return last, send, see, end
	}
	_, send, see, end := terminal("trap 'echo interrupted; exit 9' INT; stty size; echo ready; while :; do sleep 0.1; done")
	see("ready")
	see("33 77")
	send("\x03")
	if x, out := end(); x.GetExit().GetCode() != 9 || !strings.Contains(out, "interrupted") {
		t.Errorf("Ctrl-C: %v, %q", x.GetExit(), out)
	}
	_, send, see, end = terminal("echo ready; cat; echo end of input")
	see("ready")
	send("line\n")
	see("line")
	send("\x04")
	if x, out := end(); x.GetExit().GetCode() != 0 || !strings.Contains(out, "end of input") {
		t.Errorf("Ctrl-D: %v, %q", x.GetExit(), out)
	}
	_, send, see, end = terminal("echo ready; exec sleep 1000")
	see("ready")
	send("\x1c") // Ctrl-\, SIGQUIT
	if x, _ := end(); x.GetExit().GetSignal() != int32(unix.SIGQUIT) {
		t.Errorf("Ctrl-\\: %v", x.GetExit())
	}
	_, _, see, end = terminal("sh -c 'trap \"echo hung up >/hup; exit 0\" HUP; echo ready; while :; do sleep 0.1; done'")
	see("ready")
	list, err := l.Client.ListExecs(within(t), b.id)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range list {
		if x.State == string(sandbox.ExecRunning) {
			if err := l.Client.Signal(within(t), b.id, x.Id, int(unix.SIGHUP)); err != nil {
				t.Error(err)
			}
		}
	}
	_, _ = end()
	eventually(t, "the hang-up arrives", func() bool { return b.sh("cat /hup 2>/dev/null; true") == "hung up" })
}

// D4: signals are as a program expects to find them, and reach it.
func d04Signals(t *testing.T, l *lab) {
	b := l.box(t, nil)
	if got := b.sh("yes | head -1"); got != "y" { // SIGPIPE, or yes would never end
		t.Errorf("%s", got)
	}
	for _, sig := range []unix.Signal{unix.SIGHUP, unix.SIGINT, unix.SIGQUIT, unix.SIGUSR1, unix.SIGPIPE, unix.SIGTERM, unix.SIGKILL} {
		x := b.start("sleep", "1000")
		if err := l.Client.Signal(within(t), b.id, x, int(sig)); err != nil {
			t.Fatal(err)
		}
		e, err := l.Client.WaitExec(within(t), b.id, x, limit)
		if err != nil || e.GetExit().GetSignal() != int32(sig) || e.GetExit().GetCode() != int32(128+sig) {
			t.Errorf("signal %d: %v, %v", sig, e.GetExit(), err)
		}
		if err := l.Client.Signal(within(t), b.id, x, int(sig)); err != nil { // as good as done
			t.Errorf("signal %d to a command that has ended: %v", sig, err)
		}
	}
	x := b.start("sleep", "1000")
	for _, bad := range []int{-1, 0, 65, 1000} {
		if err := l.Client.Signal(within(t), b.id, x, bad); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("signal %d: %v, want invalid", bad, err)
		}
	}
}

// D8: the environment of one user's command is not another's to read, nor that
// of the guest anybody's.
func d08(t *testing.T, l *lab) {
	b := l.box(t, nil)
	x, err := l.Client.StartExec(within(t), b.id, "", &v1.ExecSpec{Argv: []string{"sleep", "1000"}, Env: map[string]string{"SECRET": "hush-hush"}})
	if err != nil {
		t.Fatal(err)
	}
	if x.Pid <= 1 {
		t.Fatalf("pid %d", x.Pid)
	}
	look := "cat /proc/[0-9]*/environ /proc/[0-9]*/task/*/environ 2>/dev/null | tr '\\0' '\\n'; true"
	if got := b.shAs("user", look); strings.Contains(got, "hush-hush") {
		t.Error("another user reads it")
	}
	if got := b.shAs("", look); !strings.Contains(got, "hush-hush") || strings.Contains(got, "GUEST_KEY") {
		t.Error("root does not see it, or sees the guest's key")
	}
}

// D9: what is seen inside are the limits.
func d09(t *testing.T, l *lab) {
	for _, r := range []*v1.Resources{{CpuLimitMilli: 500, MemoryLimit: 100 * mib, Disk: 64 * mib, Pids: 50}, {CpuLimitMilli: 2000, MemoryLimit: 512 * mib, Disk: 2048 * mib, Pids: 500}} {
		b := l.box(t, small(r))
		if n := b.sh("nproc"); n != strconv.FormatInt(max(2, (r.CpuLimitMilli+999)/1000), 10) {
			t.Errorf("nproc %s with %d milli-cores", n, r.CpuLimitMilli)
		}
		if got := b.sh("awk '/^MemTotal/{print $2*1024}' /proc/meminfo; df -k / | awk 'END{print $(NF-4)*1024}'; df -k /tmp | awk 'END{print $(NF-4)*1024}'; ulimit -u"); got != fmt.Sprintf("%d\n%d\n%d\n%d", r.MemoryLimit, r.Disk, r.Disk, r.Pids) {
			t.Errorf("inside %q, limits %v", got, r)
		}
	}
	for name, r := range map[string]*v1.Resources{
		"beyond the host's memory": {MemoryLimit: 1 << 50}, "beyond its CPUs": {CpuLimitMilli: 1_000_000}, "negative": {MemoryLimit: -1}, "negative disk": {Disk: -1},
		"request over limit": {CpuRequestMilli: 1500, CpuLimitMilli: 100}, "too many pids": {Pids: 1 << 40}, "tiny": {MemoryLimit: 1},
	} {
		sb, err := l.Client.Create(within(t), &v1.SandboxSpec{Image: image, Resources: r}, waitRunning)
		if err == nil {
			_ = l.Client.Remove(within(t), sb.Id, true)
		}
		if k := sandbox.KindOf(err); k != sandbox.Invalid && k != sandbox.Exhausted {
			t.Errorf("%s: %v (%s), want invalid or exhausted", name, err, k)
		}
	}
}

// D10: process 1 is the guest: nothing inside ends it by a signal that it does
// not take, and it is the parent of whoever lost his.
func d10(t *testing.T, l *lab) {
	b := l.box(t, nil)
	if got := b.sh("tr '\\0' ' ' </proc/1/cmdline"); !strings.Contains(got, "viv-guest") {
		t.Errorf("process 1 is %s", got)
	}
	for _, sig := range []string{"TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "PIPE", "ALRM", "CHLD", "SEGV"} {
		b.must("kill", "-"+sig, "1")
		if got := b.sh("echo after"); got != "after" {
			t.Errorf("after SIG%s: %s", sig, got)
		}
	}
	b.alive()
	if got := b.sh("(sh -c 'sh -c \"sleep 0.3; grep PPid /proc/self/status >/ppid\" & ') ; sleep 1; tr '\\t' ' ' </ppid"); got != "PPid: 1" && !strings.HasPrefix(got, "PPid:") {
		t.Errorf("%s", got)
	}
	if got := b.sh("(sleep 50 & echo $! >/orphan); sleep 0.2; grep PPid /proc/$(cat /orphan)/status | tr '\\t' ' '"); got != "PPid: 1" {
		t.Errorf("an orphan's parent: %s", got)
	}
	b.must("kill", "-KILL", "-1") // everything that it may
	eventually(t, "the sandbox goes on", func() bool {
		r, err := b.run(&v1.ExecSpec{Argv: []string{"echo", "after"}})
		return err == nil && r.out == "after\n"
	})
}

// D11: a crash leaves its core inside, if anywhere.
func d11(t *testing.T, l *lab) {
	pattern, err := os.ReadFile("/proc/sys/kernel/core_pattern")
	if err != nil {
		t.Fatal(err)
	}
	b := l.box(t, nil)
	for _, script := range []string{"attack crash", "ulimit -c unlimited; kill -SEGV $$", "cd /tmp; ulimit -c unlimited; sleep 100 & kill -ABRT $!; wait $!"} {
		r := b.must("sh", "-c", script)
		if r.exit.Code == 0 {
			t.Errorf("%s: %v %s", script, r.exit, r.out)
		}
	}
	if got := b.sh("ulimit -c"); got != "0" {
		t.Errorf("core limit %s", got)
	}
	wd, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{wd, "/", "/tmp", l.Dir, filepath.Join(l.Dir, "gv", "m", b.machine), fmt.Sprintf("/proc/%d/cwd", l.Pid()), "/var/lib/systemd/coredump", "/var/crash"} {
		found, err := filepath.Glob(dir + "/core*")
		if err != nil {
			t.Fatal(err)
		}
		if i := slices.IndexFunc(found, func(f string) bool {
			fi, err := os.Stat(f)
			return err == nil && fi.Mode().IsRegular()
		}); i >= 0 {
			t.Errorf("a core on the host: %s", found[i])
		}
	}
	if after, err := os.ReadFile("/proc/sys/kernel/core_pattern"); err != nil || !bytes.Equal(after, pattern) {
		t.Errorf("core_pattern is now %q, %v", after, err)
	}
	for _, p := range b.processes() {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", p))
		if err != nil {
			continue
		}
		// 1 is less than any core file has, and also keeps the kernel from giving one
		// to a program (core(5))
		if !strings.Contains(string(raw), "Max core file size        0 ") && !strings.Contains(string(raw), "Max core file size        1 ") {
			t.Errorf("process %d of the sandbox may dump core on the host", p)
		}
	}
}

// D12: the status of a command, through the API, is the one it had; all 256 and
// every signal are in the runtime's suite.
func d12(t *testing.T, l *lab) {
	b := l.box(t, nil)
	for _, c := range []int{0, 1, 2, 42, 126, 127, 128, 129, 137, 254, 255} {
		if r := b.must("sh", "-c", "exit "+strconv.Itoa(c)); r.exit.Code != int32(c) || r.exit.Signal != 0 || r.exit.Error != "" {
			t.Errorf("exit %d: %v", c, r.exit)
		}
	}
	for _, s := range []int{1, 2, 6, 9, 11, 15, 31} {
		if r := b.must("sh", "-c", "kill -"+strconv.Itoa(s)+" $$; sleep 10"); r.exit.Code != int32(128+s) || r.exit.Signal != int32(s) {
			t.Errorf("signal %d: %v", s, r.exit)
		}
	}
	for _, c := range []struct {
		spec *v1.ExecSpec
		code int32
	}{
		{&v1.ExecSpec{Argv: []string{"no-such-program"}}, 127}, {&v1.ExecSpec{Argv: []string{"/etc/passwd"}}, 126}, {&v1.ExecSpec{Argv: []string{"/etc"}}, 126},
		{&v1.ExecSpec{Argv: []string{"true"}, Workdir: "/missing"}, -1}, {&v1.ExecSpec{Argv: []string{"true"}, User: "missing"}, -1}, {&v1.ExecSpec{Argv: []string{"true"}, User: "4294967296"}, -1},
	} {
		r, err := b.run(c.spec)
		switch {
		case err != nil:
			if k := sandbox.KindOf(err); k == sandbox.Internal || k == sandbox.Unavailable {
				t.Errorf("%v: %v", c.spec, err)
			}
		case r.exit.Error == "" || r.exit.ErrorKind == "" || c.code > 0 && r.exit.Code != c.code || r.exit.Code != 126 && r.exit.Code != 127:
			t.Errorf("%v: %v", c.spec, r.exit)
		}
	}
}
