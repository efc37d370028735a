package runtimetest

import (
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

func number(t testing.TB, s string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(strings.TrimSpace(s), 10, 64)
	if err != nil {
		t.Errorf("%v", err)
	}
	return n
}

// D9: what the machine shows inside are its limits, and they hold.
func testLimitsInside(t *testing.T, h *Harness) {
	r := h.open(t, Options{})
	res := sandbox.Resources{CPURequest: 10, CPULimit: 1000, MemoryRequest: 16 << 20, MemoryLimit: 192 << 20, Disk: 96 << 20, Pids: 64}
	b := h.start(t, r, res)
	// gVisor never shows fewer than two
	if n := number(t, b.run("nproc")); n < 1 || n > int64(min(2, runtime.NumCPU())) {
		t.Errorf("nproc %d with a limit of one core", n)
	}
	if n := number(t, b.run("awk '/^MemTotal/{print $2}' /proc/meminfo")) << 10; n != res.MemoryLimit {
		t.Errorf("MemTotal %d, limit %d", n, res.MemoryLimit)
	}
	if n := number(t, b.run("df -k / | awk 'END{print $(NF-4)}'")) << 10; n != res.Disk {
		t.Errorf("df %d, limit %d", n, res.Disk)
	}
	// A5: the disk ends where it says, and the machine goes on
	out := b.run("dd if=/dev/zero of=/full bs=1M 2>&1; wc -c </full; rm /full; echo x >/ok && cat /ok")
	f := strings.Fields(out)
	if !strings.Contains(out, "No space left") || f[len(f)-1] != "x" {
		t.Errorf("fill the disk: %s", out)
	} else if n := number(t, f[len(f)-2]); n > res.Disk || n < res.Disk/2 {
		t.Errorf("%d bytes fit on a disk of %d", n, res.Disk)
	}
	// A1: as many processes as the limit says, at most
	n := number(t, b.run("(n=0; while [ $n -lt 200 ]; do sleep 300 & n=$((n+1)); done) >/dev/null 2>&1; set -- /proc/[0-9]*; echo $#; killall sleep"))
	if n > res.Pids+4 || n < res.Pids/2 { // the guest is not counted
		t.Errorf("%d processes, limit %d", n, res.Pids)
	}
	alive(t, b)
}

// A2: a machine that runs out of memory dies alone, and it is known why.
func testOOM(t *testing.T, h *Harness) {
	r := h.open(t, Options{})
	other := h.start(t, r, Resources)
	res := Resources
	res.MemoryLimit = 96 << 20
	b := h.start(t, r, res)
	b.exec("/bin/dd", "if=/dev/zero", "of=/dev/null", "bs=512M", "count=1")
	dead(t, b)
	if u := usage(t, b); !u.OOM || u.PeakMemory < res.MemoryLimit/2 {
		t.Errorf("%+v, want out of memory with its peak", u)
	}
	if got := other.run("echo still"); got != "still" {
		t.Errorf("neighbour: %q", got)
	}
	if u := usage(t, other); u.OOM {
		t.Errorf("neighbour: %+v", u)
	}
}

// The pool holds what was asked for, gives it away, fills itself again, and goes
// with Close; what was given away stays.
func testPool(t *testing.T, h *Harness) {
	r := h.Open(t, Options{PoolSize: 2, Class: Resources})
	full := func() bool { return r.Ready() == 2 }
	eventually(t, "the pool is full", full)
	before := h.Left(t, "")
	b := h.start(t, r, Resources)
	if !strings.Contains(fmt.Sprint(before), b.ID()) {
		t.Errorf("machine %s is not from the pool", b.ID())
	}
	// only what can be changed later may differ
	small := Resources
	small.MemoryLimit /= 2
	c := h.start(t, r, small)
	if n := number(t, c.run("awk '/^MemTotal/{print $2}' /proc/meminfo")) << 10; n != small.MemoryLimit {
		t.Errorf("MemTotal %d, limit %d", n, small.MemoryLimit)
	}
	d := Resources
	d.Disk /= 2
	e := h.start(t, r, d)
	if n := number(t, e.run("df -k / | awk 'END{print $(NF-4)}'")) << 10; n != d.Disk {
		t.Errorf("df %d, limit %d", n, d.Disk)
	}
	eventually(t, "the pool is full again", full)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if got := b.run("echo still"); got != "still" {
		t.Errorf("%q", got)
	}
	for _, m := range []sandbox.Machine{b, c, e} {
		remove(t, m)
	}
	for _, l := range h.Left(t, "") {
		t.Errorf("left of the pool: %s", l)
	}
}

// A pooled machine that dies is not given away.
func testPoolMemberDies(t *testing.T, h *Harness) {
	r := h.Open(t, Options{PoolSize: 1, Class: Resources})
	eventually(t, "the pool is full", func() bool { return r.Ready() == 1 })
	pids := h.Processes(t, "")
	for _, p := range pids {
		_ = unix.Kill(p, unix.SIGKILL) // the first may take the others with it
	}
	eventually(t, "it is dead", func() bool { return unix.Kill(pids[0], 0) != nil })
	b := h.start(t, r, Resources)
	if got := b.run("echo alive"); got != "alive" {
		t.Errorf("%q", got)
	}
	remove(t, b)
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}
