package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/sandbox"
)

// TestA is the exhaustion of resources.
func TestA(t *testing.T) {
	l := newLab(t)
	for _, c := range []struct {
		name string
		fn   func(*testing.T, *lab)
	}{
		{"A11Execs", a11}, {"A12Orphans", a12}, // the longest first
		{"A01ForkBomb", a01}, {"A02MemoryBomb", a02}, {"A03SharedMemory", a03}, {"A04PageCache", a04}, {"A05DiskFill", a05},
		{"A06Inodes", a06}, {"A07Descriptors", a07}, {"A08Threads", a08}, {"A09CPU", a09}, {"A10LogFlood", a10}, {"A10SlowReader", a10Slow},
		{"A13Stopped", a13}, {"A13FrozenSentry", a13Sentry}, {"A14DeepDirectories", a14}, {"A14Names", a14Names},
	} {
		l.attack(t, c.name, func(t *testing.T) { c.fn(t, l) })
	}
}

// A1: a fork bomb reaches its limit, on the host too, and the sandbox can be
// stopped.
func a01(t *testing.T, l *lab) {
	const pids = 64
	b := l.box(t, small(&v1.Resources{Pids: pids}))
	b.start("sh", "-c", "b() { b | b & }; while :; do b; done 2>/dev/null")
	b.start("sh", "-c", "while :; do sleep 1000 & done 2>/dev/null")
	eventually(t, "the bomb is at its limit", func() bool { return b.usage().Pids >= pids })
	for range 5 {
		// 3 host threads for one inside, and the sentry's own
		if n := b.usage().Pids; n > 3*pids+128 {
			t.Errorf("%d processes and threads on the host, with a limit of %d", n, pids)
		}
		// a command may be refused now, but not hang
		if r, err := b.run(&v1.ExecSpec{Argv: []string{"echo", "here"}}); err == nil && r.exit.Code == 0 && r.out != "here\n" {
			t.Errorf("%q", r.out)
		}
	}
	b.alive()
	if d := b.stop(time.Second); d.Reason != string(sandbox.ReasonStopped) || d.Oom {
		t.Errorf("%v", d)
	}
}

// A2: a memory bomb ends its sandbox, which says why and with what peak.
func a02(t *testing.T, l *lab) {
	const mem = 96 * mib
	b := l.box(t, small(&v1.Resources{MemoryLimit: mem}))
	x := b.start("sh", "-c", "dd if=/dev/zero of=/dev/null bs=1000M count=1")
	d := b.ended()
	if d.Reason != string(sandbox.ReasonOOM) || !d.Oom || d.PeakMemory < mem*3/4 || d.PeakMemory > mem+64*mib || d.Hint == "" {
		t.Errorf("%v", d)
	}
	e, err := l.Client.GetExec(within(t), b.id, x)
	if err != nil || e.State != string(sandbox.ExecLost) || e.Exit.GetCode() != 0 {
		t.Errorf("the exec that did it: %v, %v; want it lost, without a made-up status", e, err)
	}
	if _, err := b.run(&v1.ExecSpec{Argv: []string{"true"}}); !errors.Is(err, sandbox.Gone) {
		t.Errorf("exec after the end: %v, want gone", err)
	}
}

// A3: what is written to /dev/shm, or any tmpfs, counts as memory.
func a03(t *testing.T, l *lab) {
	const mem = 160 * mib
	b := l.box(t, small(&v1.Resources{MemoryLimit: mem}))
	before := b.usage().Memory
	b.sh("dd if=/dev/zero of=/dev/shm/x bs=1M count=48 2>/dev/null")
	if after := b.usage().Memory; after < before+40*mib {
		t.Errorf("memory went from %d to %d with 48 MiB in /dev/shm", before, after)
	}
	out := b.must("dd", "if=/dev/zero", "of=/dev/shm/y", "bs=1M").out
	if !strings.Contains(out, "No space left") {
		t.Errorf("fill /dev/shm: %s", out)
	}
	b.alive()
	// /dev is memory as well; with it the limit is reached
	b.start("sh", "-c", "dd if=/dev/zero of=/dev/bomb bs=1M count=1000; dd if=/dev/zero of=/dev/null bs=200M count=1")
	if d := b.ended(); d.Reason != string(sandbox.ReasonOOM) || d.PeakMemory > mem+64*mib {
		t.Errorf("%v", d)
	}
}

// A4: a file larger than the memory fits on a disk that is large enough, and can
// be read.
func a04(t *testing.T, l *lab) {
	const mem = 96
	b := l.box(t, small(&v1.Resources{MemoryLimit: mem * mib, Disk: 512 * mib}))
	b.sh("dd if=/dev/zero of=/big bs=1M count=" + strconv.Itoa(2*mem) + " 2>/dev/null")
	if got := b.sh("wc -c </big"); got != strconv.Itoa(2*mem*mib) {
		t.Errorf("%s bytes", got)
	}
	b.sh("cat /big >/dev/null; sed -n 1p /bin/busybox >/dev/null")
	b.alive()
	if u := b.usage(); u.Disk < 2*mem*mib || u.PeakMemory > (mem+64)*mib {
		t.Errorf("%v", u)
	}
}

// A5: a disk that is full says so; the sandbox goes on and can be stopped.
func a05(t *testing.T, l *lab) {
	const disk = 64 * mib
	b := l.box(t, small(&v1.Resources{Disk: disk, MemoryLimit: 128 * mib}))
	out := b.must("dd", "if=/dev/urandom", "of=/full", "bs=1M").out
	if !strings.Contains(out, "No space left") {
		t.Errorf("fill the disk: %s", out)
	}
	_, err := l.Client.WriteFile(within(t), &v1.WriteFileRequest{SandboxId: b.id, Path: []byte("/more")}, bytes.NewReader(make([]byte, mib)))
	if !errors.Is(err, sandbox.Exhausted) {
		t.Errorf("write to a full disk: %v, want exhausted", err)
	}
	if u := b.usage(); u.Disk > disk+8*mib {
		t.Errorf("%d bytes on a disk of %d", u.Disk, disk)
	}
	if got := b.sh("echo works; ls /more 2>/dev/null; true"); got != "works" {
		t.Errorf("on a full disk: %q", got)
	}
	b.sh("rm /full; echo again >/again")
	b.start("sh", "-c", "while :; do dd if=/dev/zero of=/full bs=1M; rm /full; done 2>/dev/null")
	b.stop(0)
}

// A6: empty files take memory, which ends that sandbox if anything does.
func a06(t *testing.T, l *lab) {
	b := l.box(t, small(&v1.Resources{MemoryLimit: 96 * mib, Disk: 64 * mib}))
	r, err := b.run(&v1.ExecSpec{Argv: []string{"attack", "inodes", "/i", "150000"}})
	switch {
	case err != nil, r.exit.Signal != 0:
		if d := b.ended(); d.Reason != string(sandbox.ReasonOOM) {
			t.Errorf("%v; %v", d, err)
		}
	case strings.Contains(r.out, "no space left"), r.out == "150000 made\n":
		b.alive()
		b.sh("echo works")
	default:
		t.Errorf("%v %q", r.exit, r.out)
	}
}

// A7: descriptors inside are bounded, and whatever is opened there, the sentry
// holds few of the host's.
func a07(t *testing.T, l *lab) {
	b := l.box(t, small(&v1.Resources{MemoryLimit: 512 * mib}))
	base := countFDs(t, b.sentry())
	for _, kind := range []string{"file", "image", "pipe", "socket", "unix", "eventfd", "epoll", "inotify", "timerfd", "memfd", "packet", "netlink", "proc", "pty"} {
		const most = 2000
		x, err := l.Client.StartExec(within(t), b.id, "fds-"+kind, &v1.ExecSpec{Argv: []string{"attack", "fds", kind, strconv.Itoa(most)}, Stdin: "pipe", Output: "merged"})
		if err != nil {
			t.Fatal(err)
		}
		b.says(x.Id, "\n")
		if n := countFDs(t, b.sentry()); n > base+200 {
			t.Errorf("%s: the sentry holds %d host descriptors, %d before", kind, n, base)
		}
		if _, err := l.Client.WriteStdin(within(t), b.id, x.Id, 0, nil, true); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Client.WaitExec(within(t), b.id, x.Id, 0); err != nil {
			t.Fatal(err)
		}
	}
	// more than a process may have
	if got := b.sh("ulimit -Hn"); got != "1048576" {
		t.Errorf("hard limit of descriptors: %s", got)
	}
	r := b.must("sh", "-c", "ulimit -n 5000; attack fds eventfd 6000 </dev/null")
	if !strings.Contains(r.out, "too many open files") {
		t.Errorf("no limit: %q", r.out)
	}
	b.sh("echo works")
	eventually(t, "the sentry's descriptors go back", func() bool { return countFDs(t, b.sentry()) <= base+20 })
}

// A8: threads are processes as far as the limit goes.
func a08(t *testing.T, l *lab) {
	const pids = 96
	b := l.box(t, small(&v1.Resources{Pids: pids}))
	for _, user := range []string{"", "user"} {
		r := b.mustAs(user, "attack", "threads", "20000")
		if strings.Contains(r.out, "made") {
			t.Errorf("user %q made 20000 threads", user)
		}
		if n := b.usage().Pids; n > 3*pids+128 {
			t.Errorf("%d processes and threads on the host", n)
		}
		eventually(t, "the sandbox works again", func() bool {
			r, err := b.run(&v1.ExecSpec{Argv: []string{"echo", "works"}})
			return err == nil && r.out == "works\n"
		})
	}
	b.alive()
}

// A9: spinning takes the share that the limit gives, by the kernel's own count
// of the periods of the quota.
func a09(t *testing.T, l *lab) {
	const milli = 500
	b := l.box(t, small(&v1.Resources{CpuLimitMilli: milli}))
	for range 6 {
		b.start("sh", "-c", "while :; do :; done")
	}
	stat := func() (periods, throttled, used int64) {
		t.Helper()
		f := b.cgroup("cpu.stat")
		raw, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		m := fields(string(raw))
		periods, _ = strconv.ParseInt(m["nr_periods"], 10, 64)
		throttled, _ = strconv.ParseInt(m["nr_throttled"], 10, 64)
		return periods, throttled, b.usage().Cpu.AsDuration().Microseconds()
	}
	p0, t0, u0 := stat()
	var p1, t1, u1 int64
	eventually(t, "30 periods have passed", func() bool { p1, t1, u1 = stat(); return p1 >= p0+30 })
	if t1 <= t0 {
		t.Errorf("never throttled in %d periods", p1-p0)
	}
	const period = 100_000 // us
	// two periods more: the counters are not read at one instant
	if most := (p1 - p0 + 2) * period * milli / 1000 * 11 / 10; u1-u0 > most {
		t.Errorf("used %d us in %d periods, at most %d", u1-u0, p1-p0, most)
	}
	b.stop(0)
}

// spoolSize is what the outputs of a sandbox take on the host's disk.
func (b *box) spoolSize() int64 {
	var n int64
	err := filepath.WalkDir(b.l.Dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.Contains(p, b.id) {
			return nil // files come and go
		}
		var st unix.Stat_t
		if unix.Stat(p, &st) == nil {
			n += st.Blocks * 512
		}
		return nil
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

// A10: a flood that nobody reads is bounded on disk and in memory, and what was
// dropped is marked.
func a10(t *testing.T, l *lab) {
	b := l.box(t, nil)
	before := statusNumber(t, l.Pid(), "VmRSS")
	const flood = 96 * mib
	x := b.start("sh", "-c", "head -c "+strconv.Itoa(flood)+" /dev/zero; echo; echo END")
	e, err := l.Client.WaitExec(within(t), b.id, x, limit)
	if err != nil || e.Exit == nil {
		t.Fatalf("%v, %v", e, err)
	}
	if e.StdoutLen != flood+5 || e.StdoutFirst < flood/2 {
		t.Errorf("wrote %d, kept from %d", e.StdoutLen, e.StdoutFirst)
	}
	if n := b.spoolSize(); n > 4*mib {
		t.Errorf("the spool takes %d bytes", n)
	}
	var out bytes.Buffer
	dropped := false
	s, err := l.Client.Execs.Output(within(t), request(&v1.ReadOutputRequest{SandboxId: b.id, Id: x, StderrOffset: -1}))
	if err != nil {
		t.Fatal(err)
	}
	for s.Receive() {
		m := s.Msg()
		dropped = dropped || m.Dropped && m.Offset > 0
		out.Write(m.Stdout)
	}
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
	if !dropped || !strings.HasSuffix(out.String(), "END\n") || out.Len() > 2*mib {
		t.Errorf("dropped is marked: %v; %d bytes", dropped, out.Len())
	}
	// endless floods on both outputs, while the daemon is to stay small
	for range 3 {
		b.start("sh", "-c", "yes & yes >&2")
	}
	for range 20 {
		b.usage()
		time.Sleep(100 * time.Millisecond) // the flood's time, not a measure
	}
	if after := statusNumber(t, l.Pid(), "VmRSS"); after > before+96<<10 {
		t.Errorf("the daemon's memory went from %d to %d KiB", before, after)
	}
	b.stop(0)
}

// A10: with a reader that is slow, the command is slowed down and nothing is
// lost or piled up.
func a10Slow(t *testing.T, l *lab) {
	b := l.box(t, nil)
	before := statusNumber(t, l.Pid(), "VmRSS")
	const lines = 600_000 // about 4 MB: four times what is kept
	w := &slowWriter{}
	x, err := l.Client.RunExec(within(t), b.id, "", &v1.ExecSpec{Argv: []string{"seq", "1", strconv.Itoa(lines)}}, w, nil)
	if err != nil || x.Exit == nil || x.Exit.Code != 0 {
		t.Fatalf("%v, %v", x, err)
	}
	var want bytes.Buffer
	for i := range lines {
		fmt.Fprintln(&want, i+1)
	}
	if !bytes.Equal(w.Bytes(), want.Bytes()) {
		t.Errorf("%d bytes, want %d: not what was written", w.Len(), want.Len())
	}
	// one that does not read at all
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	s, err := l.Client.Execs.Run(ctx, request(&v1.RunExecRequest{SandboxId: b.id, Spec: &v1.ExecSpec{Argv: []string{"yes"}}}))
	if err != nil {
		t.Fatal(err)
	}
	if !s.Receive() {
		t.Fatal(s.Err())
	}
	for range 20 {
		b.sh("echo another command is not held up")
	}
	if after := statusNumber(t, l.Pid(), "VmRSS"); after > before+96<<10 {
		t.Errorf("the daemon's memory went from %d to %d KiB", before, after)
	}
}

type slowWriter struct {
	bytes.Buffer
	n int
}

func (w *slowWriter) Write(p []byte) (int, error) {
	if w.n++; w.n < 40 {
		time.Sleep(20 * time.Millisecond)
	}
	return w.Buffer.Write(p)
}

// A11: many tiny commands leave nothing: no descriptor, thread, cgroup or
// namespace on the host, no process or descriptor inside.
func a11(t *testing.T, l *lab) {
	total := 2000
	if os.Getenv("VIV_TEST_LONG") != "" {
		total = 20_000
	}
	b := l.box(t, nil)
	run := func(n int) {
		t.Helper()
		var wg sync.WaitGroup
		work := make(chan struct{}, n)
		for range n {
			work <- struct{}{}
		}
		close(work)
		for range 16 {
			wg.Go(func() {
				for range work {
					x, err := l.Client.RunExec(within(t), b.id, "", &v1.ExecSpec{Argv: []string{"true"}}, nil, nil)
					if err != nil || x.GetExit().GetCode() != 0 || x.State != string(sandbox.ExecExited) {
						t.Errorf("%v, %v", x, err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
	inside := func() string {
		return b.sh("set -- /proc/[0-9]*; echo $#; set -- /proc/1/fd/*; echo $#")
	}
	run(100)
	groups := func() int {
		m, err := filepath.Glob("/sys/fs/cgroup/*/vivarium-*/" + b.machine + "*")
		if err != nil {
			t.Fatal(err)
		}
		return len(m)
	}
	fds, procs, group, in := countFDs(t, l.Pid()), len(b.processes()), groups(), inside()
	run(total)
	// other tests use the same daemon meanwhile: what 2000 leaks would be is far
	// beyond what they hold
	eventually(t, fmt.Sprintf("the daemon's descriptors go back to about %d", fds), func() bool { return countFDs(t, l.Pid()) < fds+300 })
	if n := statusNumber(t, l.Pid(), "Threads"); n > 200 {
		t.Errorf("the daemon has %d threads", n)
	}
	eventually(t, fmt.Sprintf("the host processes of the sandbox go back to about %d", procs), func() bool { return len(b.processes()) < procs+20 })
	if n := groups(); n != group {
		t.Errorf("%d cgroups, %d before", n, group)
	}
	var p0, f0 int
	fmt.Sscan(in, &p0, &f0)
	eventually(t, "inside it is as before: "+in, func() bool {
		var p, f int
		fmt.Sscan(inside(), &p, &f)
		return p <= p0+2 && f <= f0+20
	})
	list, err := l.Client.ListExecs(within(t), b.id)
	if err != nil || len(list) > 1100 {
		t.Errorf("%d execs are kept, %v", len(list), err)
	}
}

// A12: orphans become the guest's children and are reaped.
func a12(t *testing.T, l *lab) {
	b := l.box(t, nil)
	if got := b.sh("attack orphans 5000"); got != "made" {
		t.Fatalf("%s", got)
	}
	eventually(t, "every orphan is reaped", func() bool {
		return b.sh("grep -l '^State:.*Z' /proc/[0-9]*/status 2>/dev/null | wc -l; set -- /proc/[0-9]*; test $# -lt 8 && echo few") == "0\nfew"
	})
}

// A13: nothing inside that stops, or refuses to end, holds up the end.
func a13(t *testing.T, l *lab) {
	b := l.box(t, func(s *v1.SandboxSpec) {
		s.Command = []string{"sh", "-c", "trap '' TERM INT HUP; echo up; while :; do sleep 1; done"}
	})
	b.says(sandbox.MainExec, "up")
	b.start("sh", "-c", "trap '' TERM; kill -STOP $$")
	b.start("sh", "-c", "sleep 1; kill -STOP 1; kill -STOP -1; kill -STOP $$") // once its start was answered; gVisor lets root stop even process 1
	time.Sleep(2 * time.Second)                                                // the attack's own time
	if d := b.stop(time.Second); d.Reason != string(sandbox.ReasonStopped) {
		t.Errorf("%v", d)
	}
}

// A13: the sentry itself does not run: stop works all the same.
func a13Sentry(t *testing.T, l *lab) {
	b := l.box(t, nil)
	b.start("sleep", "1000")
	for _, p := range b.processes() {
		if err := unix.Kill(p, unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	// the API of this sandbox must end with an error, not with this test
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if _, err := l.Client.RunExec(ctx, b.id, "", &v1.ExecSpec{Argv: []string{"true"}}, nil, nil); err == nil {
		t.Error("a frozen sandbox ran a command")
	}
	if d := b.stop(time.Second); d.Reason != string(sandbox.ReasonStopped) {
		t.Errorf("%v", d)
	}
}

// A14: directories 4000 levels deep can be made, looked at, taken out and
// removed.
func a14(t *testing.T, l *lab) {
	b := l.box(t, nil)
	b.sh("mkdir /deep; attack deep /deep 4000")
	r, err := l.Client.Download(within(t), b.id, "/deep", "")
	if err != nil {
		t.Fatal(err)
	}
	entries, err := countTar(r)
	r.Close()
	if err == nil && entries < 4000 {
		t.Errorf("%d entries, and no error", entries)
	} else if err != nil && sandbox.KindOf(err) == sandbox.Internal {
		t.Errorf("download: %v", err)
	}
	long := "/deep" + strings.Repeat("/d", 4000) + "/bottom"
	if _, err := l.Client.Stat(within(t), b.id, long, "", false); err == nil || sandbox.KindOf(err) == sandbox.Internal {
		t.Errorf("stat a path of %d bytes: %v, want an error of its own kind", len(long), err)
	}
	if err := l.Client.RemoveFile(within(t), b.id, "/deep", "", true); err != nil {
		t.Errorf("remove: %v", err)
	}
	if got := b.sh("test -e /deep || echo gone"); got != "gone" {
		t.Errorf("%s", got)
	}
}

// A14: names are bytes.
func a14Names(t *testing.T, l *lab) {
	b := l.box(t, nil)
	c := l.Client
	for _, name := range []string{strings.Repeat("n", 255), "\xff\xfe\x80", "new\nline", "-rf", "*", "\x01\x1b[31m", " ", "a\\b", "\u202egpj.exe", "$(id)", ";id", "'\""} {
		path := "/names/" + name
		if _, err := c.WriteFile(within(t), &v1.WriteFileRequest{SandboxId: b.id, Path: []byte(path), Parents: true}, strings.NewReader("data of "+name)); err != nil {
			t.Errorf("write %q: %v", name, err)
			continue
		}
		r, _, err := c.ReadFile(within(t), &v1.ReadFileRequest{SandboxId: b.id, Path: []byte(path)})
		if err != nil {
			t.Errorf("read %q: %v", name, err)
			continue
		}
		if got := readAll(t, r); got != "data of "+name {
			t.Errorf("read %q: %q", name, got)
		}
		found := false
		if err := c.ListFiles(within(t), b.id, "/names", "", func(l []*v1.FileInfo) error {
			for _, f := range l {
				found = found || string(f.Path) == name
			}
			return nil
		}); err != nil || !found {
			t.Errorf("list %q: found %v, %v", name, found, err)
		}
		r, err = c.Download(within(t), b.id, "/names", "")
		if err != nil {
			t.Fatal(err)
		}
		if n, err := countTar(r); n < 1 || err != nil {
			t.Errorf("download %q: %d, %v", name, n, err)
		}
		r.Close()
		if err := c.RenameFile(within(t), b.id, path, path[:len(path)-1]+"2", ""); err != nil {
			t.Errorf("rename %q: %v", name, err)
		}
		if err := c.RemoveFile(within(t), b.id, path[:len(path)-1]+"2", "", false); err != nil {
			t.Errorf("remove %q: %v", name, err)
		}
	}
	for _, bad := range []string{"/names/" + strings.Repeat("n", 256), "/" + strings.Repeat("x/", 3000), "/a\x00b", ""} {
		_, err := c.WriteFile(within(t), &v1.WriteFileRequest{SandboxId: b.id, Path: []byte(bad)}, strings.NewReader("x"))
		if !errors.Is(err, sandbox.Invalid) {
			t.Errorf("write to a name of %d bytes: %v, want invalid", len(bad), err)
		}
	}
	if got := b.sh("ls -a /names | wc -l"); got != "2" {
		t.Errorf("%s entries are left", got)
	}
}
