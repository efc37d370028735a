package conformance

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/sandbox"
)

// TestF is the ways out. F1 is in runtime/gvisor, F6 in image.
func TestF(t *testing.T) {
	l := newLab(t)
	for _, c := range []struct {
		name string
		fn   func(*testing.T, *lab)
	}{
		{"F04Traced", f04Traced}, {"F04Stopped", f04Stopped}, {"F04Killed", f04Killed}, {"F04KilledIdle", f04KilledIdle}, // the longest first
		{"F01Sentry", f01}, {"F02Descriptors", f02}, {"F03Knobs", f03}, {"F03Devices", f03Devices},
		{"F04Overwritten", f04Overwritten}, {"F04Stranger", f04Stranger}, {"F04PortTaken", f04Port},
	} {
		l.attack(t, c.name, func(t *testing.T) { c.fn(t, l) })
	}
}

// F1, in short: as the daemon starts it, no process of a sandbox has an identity,
// a capability or a view of the host. The written list of descriptors is in
// runtime/gvisor.
func f01(t *testing.T, l *lab) {
	b := l.box(t, nil)
	b.start("sh", "-c", "while :; do sh -c :; done")
	pids := b.processes()
	if len(pids) < 2 {
		t.Fatalf("processes %v", pids)
	}
	for _, p := range pids {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p))
		if err != nil {
			continue
		}
		st := fields(strings.ReplaceAll(string(raw), "\t", " "))
		for _, k := range []string{"CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"} {
			if strings.Trim(st[k], "0") != "" {
				t.Errorf("process %d: %s %s", p, k, st[k])
			}
		}
		if st["Seccomp"] != "2" || st["NoNewPrivs"] != "1" || slices.Contains(strings.Fields(st["Uid"]), "0") || slices.Contains(strings.Fields(st["Gid"]), "0") {
			t.Errorf("process %d: seccomp %s, no new privileges %s, uid %s, gid %s", p, st["Seccomp"], st["NoNewPrivs"], st["Uid"], st["Gid"])
		}
	}
}

// F2: commands have the descriptors they were given, and none, of theirs or of
// the guest, leads out.
func f02(t *testing.T, l *lab) {
	b := l.box(t, nil)
	for _, spec := range []*v1.ExecSpec{
		{}, {User: "user"}, {Stdin: "pipe"}, {Output: "separate"}, {Output: "discard"},
	} {
		spec.Argv = []string{"sh", "-c", "ls /proc/self/fd >/tmp/fds; cat /tmp/fds >&2; rm -f /tmp/fds"}
		r, err := b.run(spec)
		if err != nil || r.exit.Code != 0 {
			t.Fatalf("%v: %v, %v", spec, r, err)
		}
		if spec.Output != "discard" {
			// 3 is the directory that ls reads
			if got := strings.Fields(r.out); !slices.Equal(got, []string{"0", "1", "2", "3"}) {
				t.Errorf("%v: descriptors %v", spec, got)
			}
		}
	}
	// of everything inside, as root
	out := b.sh("attack handles")
	if strings.Contains(out, "ESCAPE") {
		t.Errorf("a way out:\n%s", out)
	}
	for line := range strings.Lines(out) {
		_, target, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.Contains(target, l.Dir) || strings.Contains(target, "/gv/") || strings.HasPrefix(target, "host:") && !strings.HasPrefix(target, "host:[") {
			t.Errorf("a descriptor of the host: %s", line)
		}
	}
	for line := range strings.Lines(out) {
		if strings.HasPrefix(line, "/proc/1/fd/") {
			t.Logf("the guest: %s", strings.TrimSpace(line)) // recorded
		}
	}
	if r := b.mustAs("user", "sh", "-c", "ls /proc/1/fd /proc/1/root/ /proc/1/cwd/ 2>&1; cat /proc/1/mem /proc/1/maps 2>&1 | head -c 300"); !strings.Contains(r.out, "denied") && !strings.Contains(r.out, "not permitted") {
		t.Errorf("another user looks into the guest: %s", r.out)
	}
	if got := fields(b.sh("attack calls"))["open_by_handle_at"]; got == "<nil>" || got == "" {
		t.Errorf("open_by_handle_at: %s", got)
	}
}

// knobs are files through which root of a container has become root of a host.
var knobs = []string{
	"/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hotplug", "/proc/sys/vm/panic_on_oom", "/proc/sys/fs/binfmt_misc/register",
	"/proc/sysrq-trigger", "/proc/sys/kernel/sysrq", "/sys/kernel/uevent_helper", "/sys/kernel/vmcoreinfo", "/proc/sys/kernel/randomize_va_space", "/proc/sys/kernel/hostname",
	"/proc/sys/kernel/poweroff_cmd", "/proc/sys/kernel/ns_last_pid", "/sys/fs/cgroup/release_agent", "/sys/module/kernel/parameters/panic", "/proc/self/oom_score_adj", "/proc/1/oom_score_adj",
}

// F3: no knob of the host can be turned from inside, with every capability that
// a sandbox can be given.
func f03(t *testing.T, l *lab) {
	read := func() map[string]string {
		m := map[string]string{}
		for _, k := range knobs {
			if strings.Contains(k, "trigger") || strings.Contains(k, "register") || strings.Contains(k, "ns_last_pid") || strings.Contains(k, "self") {
				continue
			}
			if raw, err := os.ReadFile(k); err == nil {
				m[k] = string(raw)
			}
		}
		return m
	}
	before := read()
	for _, add := range [][]string{nil, {"ALL"}} {
		b := l.box(t, func(s *v1.SandboxSpec) { s.Capabilities = &v1.Capabilities{Add: add} })
		b.sh("for f in " + strings.Join(knobs, " ") + `; do echo "|/tmp/evil" >$f; echo 1 >$f; done 2>/dev/null
			mkdir -p /tmp/cg /tmp/sys /tmp/proc; mount -t cgroup -o memory cgroup /tmp/cg; mount -t cgroup2 none /tmp/cg; mount -t sysfs sys /tmp/sys; mount -t proc proc /tmp/proc; mount -t debugfs none /tmp/sys; mount -t binfmt_misc none /tmp/sys
			find / -xdev -name release_agent -o -name notify_on_release 2>/dev/null | while read f; do echo 1 >$f; echo /evil >$f; done
			for f in /tmp/proc/sys/kernel/core_pattern /tmp/sys/kernel/uevent_helper /tmp/proc/sysrq-trigger; do echo "|/evil" >$f; done
			mount -o remount,rw /sys; echo 1 >/sys/kernel/uevent_helper; true`)
		b.alive()
		if add != nil { // of its own, it can change what is its own
			b.must("hostname", "evil")
		}
	}
	for k, v := range read() {
		if v != before[k] {
			t.Errorf("%s of the host went from %q to %q", k, before[k], v)
		}
	}
}

// F3: the devices inside are harmless ones, and others cannot be made to work.
func f03Devices(t *testing.T, l *lab) {
	for _, add := range [][]string{nil, {"ALL"}} {
		b := l.box(t, func(s *v1.SandboxSpec) { s.Capabilities = &v1.Capabilities{Add: add} })
		if got := b.sh("attack devices"); got != "done" {
			t.Errorf("capabilities %v: %s", add, got)
		}
		allowed := map[string]bool{}
		for _, d := range strings.Fields("char fd full fuse net null ptmx pts random shm stderr stdin stdout tty urandom zero net/tun") {
			allowed[d] = true
		}
		// char has links to the others
		for _, d := range strings.Fields(b.sh("ls /dev; find /dev/char /dev/net /dev/shm ! -type l ! -type d | sed s,/dev/,,")) {
			if !allowed[d] {
				t.Errorf("capabilities %v: /dev/%s", add, d)
			}
		}
		if got := b.sh("cat /proc/partitions 2>/dev/null | wc -l; ls /sys/block 2>/dev/null | wc -l"); strings.TrimSpace(got) != "0\n0" {
			t.Errorf("block devices: %s", got)
		}
	}
}

// F4: the guest program cannot be changed, and what is in the way of its files
// is the sandbox's own loss.
func f04Overwritten(t *testing.T, l *lab) {
	b := l.box(t, nil)
	sum := b.sh("md5sum </.viv/viv-guest")
	b.sh("(echo x >/.viv/viv-guest; rm -rf /.viv; mv /.viv /x; dd if=/dev/zero of=/proc/1/exe; ln -sf /bin/sh /.viv/viv-guest; chmod 777 /.viv; mount --bind /tmp /.viv) 2>/dev/null; true")
	if got := b.sh("md5sum </.viv/viv-guest"); got != sum {
		t.Error("the guest program was changed")
	}
	// the whole of the image goes
	b.start("sh", "-c", "cp /bin/busybox /tmp/busybox; rm -rf /bin /etc /home /root /usr /var; exec /tmp/busybox sleep 1000")
	eventually(t, "everything is gone", func() bool {
		r, err := b.run(&v1.ExecSpec{Argv: []string{"/tmp/busybox", "ls", "/"}})
		return err == nil && !strings.Contains(r.out, "etc\n") && r.exit.Code == 0
	})
	if err := b.write("/tmp/api", "0", "works"); err != nil {
		t.Errorf("write: %v", err)
	}
	if got, err := b.read("/tmp/api", "0"); err != nil || got != "works" {
		t.Errorf("%q, %v", got, err)
	}
	// a neighbour of the same image has it whole
	if got := l.box(t, nil).sh("ls -d /etc /bin/attack"); got != "/bin/attack\n/etc" {
		t.Errorf("a new sandbox: %s", got)
	}
	b.stop(0)
}

// F4: whoever connects to the guest's port without the key gets nothing, however
// often and with whatever bytes, and does not keep the host out.
func f04Stranger(t *testing.T, l *lab) {
	b := l.box(t, nil)
	const port = "127.0.0.1:1"
	for _, user := range []string{"user", ""} {
		for _, kind := range []string{"silence", "noise", "zeros", "ones"} {
			r := b.mustAs(user, "attack", "connect", port, kind, "50")
			if !strings.Contains(r.out, "answers of") {
				t.Errorf("%s: %s", kind, r.out)
			}
			t.Logf("%s as %q: %s", kind, user, strings.ReplaceAll(strings.TrimSpace(r.out), "\n", "; "))
			if got := b.sh("echo works"); got != "works" {
				t.Errorf("after %s: %q", kind, got)
			}
		}
	}
	// connections that are held open, all the time
	for i := range 3 {
		x, err := l.Client.StartExec(within(t), b.id, fmt.Sprint("hold", i), &v1.ExecSpec{Argv: []string{"attack", "connect", port, "silence", "400", "hold"}, User: "user", Stdin: "pipe", Output: "merged"})
		if err != nil {
			t.Fatal(err)
		}
		b.says(x.Id, "connected")
	}
	for range 5 {
		if got := b.sh("echo works"); got != "works" {
			t.Errorf("while connections are held: %q", got)
		}
		if err := b.write("/f", "", "x"); err != nil {
			t.Errorf("write meanwhile: %v", err)
		}
	}
	b.alive()
}

// F4: nobody listens in the guest's place, with whatever options.
func f04Port(t *testing.T, l *lab) {
	b := l.box(t, nil)
	for _, user := range []string{"", "user"} {
		x, err := l.Client.StartExec(within(t), b.id, "", &v1.ExecSpec{Argv: []string{"attack", "listen", "1"}, User: user, Stdin: "pipe", Output: "merged"})
		if err != nil {
			t.Fatal(err)
		}
		b.says(x.Id, "tried")
		var out bytes.Buffer
		if _, err := l.Client.Output(within(t), &v1.ReadOutputRequest{SandboxId: b.id, Id: x.Id}, &out, nil); err != nil {
			t.Fatal(err)
		}
		// the other address may be had: it is not the one that the host dials
		if got := fields(out.String())["127.0.0.1"]; !strings.Contains(got, "in use") && !strings.Contains(got, "denied") {
			t.Errorf("listening on the guest's port as %q: %s", user, out.String())
		}
		for range 10 {
			if got := b.sh("echo works"); got != "works" {
				t.Errorf("meanwhile: %q", got)
			}
		}
	}
}

// gone waits for the end of a sandbox whose guest no longer works: with a reason,
// and not with the sandbox's own timeout.
func (b *box) gone(why string) {
	b.t.Helper()
	d := b.ended()
	if d.Reason != string(sandbox.ReasonKilled) || d.Message == "" {
		b.t.Errorf("%s: ended with %v", why, d)
	}
	if p := b.processes(); len(p) > 0 {
		b.t.Errorf("%s: host processes %v are left", why, p)
	}
}

// tryExec runs a command in a sandbox that may have ended: it must come back.
func (b *box) tryExec() error {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()
	var out bytes.Buffer
	_, err := b.l.Client.RunExec(ctx, b.id, "", &v1.ExecSpec{Argv: []string{"echo", "x"}}, &out, &out)
	if ctx.Err() != nil {
		b.t.Errorf("a command hangs: %v", err)
	}
	return err
}

// F4: root with every capability kills process 1: the sandbox ends, or goes on.
func f04Killed(t *testing.T, l *lab) {
	b := l.box(t, func(s *v1.SandboxSpec) { s.Capabilities = &v1.Capabilities{Add: []string{"ALL"}} })
	x := b.start("sh", "-c", "sleep 1; kill -KILL 1; echo not killed; sleep 1000") // after its start was answered
	time.Sleep(2 * time.Second)
	if err := b.tryExec(); err == nil {
		b.alive() // process 1 is out of reach, as it should be
		t.Logf("SIGKILL does not reach process 1")
		return
	}
	b.gone("killed")
	e, err := l.Client.GetExec(within(t), b.id, x)
	if err != nil || e.State != string(sandbox.ExecLost) {
		t.Errorf("its command: %v, %v", e, err)
	}
}

// F4: the same with nothing running, so that no stream breaks.
func f04KilledIdle(t *testing.T, l *lab) {
	b := l.box(t, func(s *v1.SandboxSpec) { s.Capabilities = &v1.Capabilities{Add: []string{"ALL"}} })
	// the command ends itself with the guest, or before it
	_, _ = b.run(&v1.ExecSpec{Argv: []string{"sh", "-c", "(sleep 1; kill -KILL 1) >/dev/null 2>&1 & exit 0"}})
	time.Sleep(2 * time.Second) // the attack's own time
	if err := b.tryExec(); err == nil {
		b.alive()
		return
	}
	b.gone("killed while idle")
}

// F4: process 1 is stopped: while a command runs the sandbox ends by itself.
func f04Stopped(t *testing.T, l *lab) {
	b := l.box(t, nil)
	b.start("sleep", "1000")
	b.start("sh", "-c", "sleep 1; kill -STOP 1; sleep 1000") // after its start was answered
	time.Sleep(2 * time.Second)
	if err := b.tryExec(); err == nil {
		b.alive()
		t.Log("SIGSTOP does not reach process 1")
		return
	}
	b.gone("stopped")
}

// F4: process 1 is traced and held by root with the capability for it.
func f04Traced(t *testing.T, l *lab) {
	b := l.box(t, func(s *v1.SandboxSpec) { s.Capabilities = &v1.Capabilities{Add: []string{"SYS_PTRACE"}} })
	x := b.start("sh", "-c", "sleep 1; exec attack trace 1 hold") // after its start was answered
	time.Sleep(2 * time.Second)
	if err := b.tryExec(); err == nil {
		b.alive()
		var out bytes.Buffer
		_, _ = l.Client.Output(within(t), &v1.ReadOutputRequest{SandboxId: b.id, Id: x}, &out, &out)
		t.Logf("tracing process 1: %s", strings.TrimSpace(out.String()))
		return
	}
	b.gone("traced")
}
