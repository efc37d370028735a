package runtimetest

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"vivarium/guest"
	"vivarium/sandbox"
)

// Features: a name, and a word about each feature that an adapter may ask for.
func testFeatures(t *testing.T, h *Harness) {
	r := h.open(t, Options{})
	if r.Name() == "" {
		t.Error("no name")
	}
	want := []string{sandbox.FeatureCheckpoint, sandbox.FeatureDocker, sandbox.FeatureHotResize}
	got := slices.Sorted(maps.Keys(r.Features()))
	if slices.Sort(want); !slices.Equal(got, want) {
		t.Errorf("features %v, want a word about each of %v", got, want)
	}
}

// Boot gives a machine that is alive, measured, and found by its id.
func testBoot(t *testing.T, h *Harness) {
	r := h.open(t, Options{})
	m := boot(t, r, Resources)
	alive(t, m)
	if m.ID() == "" || m.Slot() == "" || !m.Address().IsValid() {
		t.Errorf("id %q, slot %q, address %v", m.ID(), m.Slot(), m.Address())
	}
	if u := usage(t, m); u.Memory <= 0 || u.PeakMemory < u.Memory || u.Pids <= 0 || u.OOM {
		t.Errorf("usage %+v", u)
	}
	if len(h.Left(t, m.ID())) == 0 || len(h.Processes(t, m.ID())) == 0 {
		t.Error("the harness does not see a machine that is alive: its word about what is left is worth nothing")
	}
}

// A machine that cannot boot is an error with a kind, and leaves nothing.
func testBootTooSmall(t *testing.T, h *Harness) {
	r := h.open(t, Options{})
	res := Resources
	res.Pids, res.MemoryLimit = 1, 1
	m, err := r.Boot(within(t), sandbox.BootSpec{Resources: res})
	if err == nil { // a runtime may give more than was asked for
		remove(t, m)
		return
	}
	if m != nil {
		t.Errorf("machine %v with error %v", m, err)
	}
	kinded(t, err)
}

func kinded(t testing.TB, err error) {
	t.Helper()
	var k *sandbox.Error
	if !errors.As(err, &k) {
		t.Errorf("%v has no kind", err)
	}
}

// Start runs the guest on the image: process 1, the image's files, the name.
func testStart(t *testing.T, h *Harness) {
	r := h.open(t, Options{})
	b := h.start(t, r, Resources)
	if got := b.run("hostname"); got != "suite" {
		t.Errorf("hostname %q", got)
	}
	if got := b.run("tr '\\0' ' ' </proc/1/cmdline"); !strings.Contains(got, "viv-guest") {
		t.Errorf("process 1 is %q", got)
	}
	if got := b.run("echo data >/file && cat /file; ls /bin/busybox"); got != "data\n/bin/busybox" {
		t.Errorf("root file system: %q", got)
	}
	// what is written is this machine's alone
	c := h.start(t, r, Resources)
	if got := c.run("test -e /file || echo none"); got != "none" {
		t.Errorf("another machine sees /file")
	}
	// the guest's key is nobody's to read inside
	if got := b.run("cat /proc/1/environ /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c KEY; true"); got != "0" {
		t.Errorf("%s variables with a key can be read inside", got)
	}
}

func testStartTwice(t *testing.T, h *Harness) {
	r := h.open(t, Options{})
	b := h.start(t, r, Resources)
	if err := b.Start(within(t), h.spec(Resources, newKey())); !errors.Is(err, sandbox.Conflict) {
		t.Errorf("second start: %v, want conflict", err)
	}
	if got := b.run("echo still"); got != "still" {
		t.Errorf("after it: %q", got)
	}
}

// An image that is missing or is no image is an error; the machine can still be
// removed.
func testStartBadImage(t *testing.T, h *Harness) {
	r := h.open(t, Options{})
	for _, path := range []string{h.Image + ".missing", "/dev/zero", "/etc/passwd"} {
		m := boot(t, r, Resources)
		s := h.spec(Resources, newKey())
		s.ImagePath = path
		err := m.Start(within(t), s)
		if err == nil {
			t.Errorf("started on %s", path)
		} else {
			kinded(t, err)
		}
		remove(t, m)
	}
}

// The guest answers only to its key, and one that was asked wrongly goes on.
func testWrongKey(t *testing.T, h *Harness) {
	r := h.open(t, Options{})
	b := h.start(t, r, Resources)
	ctx := within(t)
	c, err := guest.Connect(ctx, b.Dial, newKey(), guest.Options{})
	if err == nil {
		_ = c.Close()
		t.Fatal("connected with another key")
	}
	if k := sandbox.KindOf(err); k != sandbox.Denied {
		t.Errorf("connect with another key: %s (%v), want denied", k, err)
	}
	if got := b.run("echo still"); got != "still" {
		t.Errorf("after it: %q", got)
	}
}

// D12: every exit code, and every signal that ends a process, as it was.
func testExitStatus(t *testing.T, h *Harness) {
	r := h.open(t, Options{})
	b := h.start(t, r, Resources)
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, 8)
	check := func(script string, want sandbox.ExitStatus) {
		slots <- struct{}{}
		s := b.exec("/bin/sh", "-c", script)
		wg.Go(func() {
			defer func() { <-slots }()
			if _, st, err := finish(s); err != nil || st != want {
				t.Errorf("%s: %+v, %v, want %+v", script, st, err, want)
			}
		})
	}
	for code := range 256 {
		check(fmt.Sprintf("exit %d", code), sandbox.ExitStatus{Code: code})
	}
	// not SIGQUIT, which busybox's shell ignores
	for _, sig := range []unix.Signal{unix.SIGHUP, unix.SIGINT, unix.SIGILL, unix.SIGTRAP, unix.SIGABRT, unix.SIGBUS, unix.SIGFPE,
		unix.SIGKILL, unix.SIGUSR1, unix.SIGSEGV, unix.SIGUSR2, unix.SIGPIPE, unix.SIGALRM, unix.SIGTERM, unix.SIGXCPU, unix.SIGSYS, 34, 64} {
		check(fmt.Sprintf("kill -%d $$; sleep 60", sig), sandbox.ExitStatus{Code: 128 + int(sig), Signal: int(sig)})
	}
	for name, code := range map[string]int{"/nowhere": 127, "/etc/passwd": 126, "/": 126} {
		s, err := b.guest.StartExec(within(t), execID(), sandbox.ExecSpec{Argv: []string{name}})
		if err != nil {
			t.Fatal(err)
		}
		if _, st, err := finish(s); err != nil || st.Code != code || st.Error == "" {
			t.Errorf("start %s: %+v, %v, want code %d and why", name, st, err, code)
		}
		_ = s.Close()
	}
}

// Usage counts what happens inside, from outside.
func testUsage(t *testing.T, h *Harness) {
	r := h.open(t, Options{})
	b := h.start(t, r, Resources)
	u0 := usage(t, b)
	const disk = 24 << 20
	b.run("dd if=/dev/urandom of=/data bs=1M count=24 2>/dev/null; sync")
	u1 := usage(t, b)
	if u1.Disk < u0.Disk+disk {
		t.Errorf("disk went from %d to %d by writing %d", u0.Disk, u1.Disk, disk)
	}
	if u1.CPU <= u0.CPU {
		t.Errorf("CPU went from %v to %v", u0.CPU, u1.CPU)
	}
	const mem = 64 << 20
	b.run("dd if=/dev/zero of=/dev/null bs=64M count=1 2>/dev/null")
	u2 := usage(t, b)
	if u2.PeakMemory < u0.Memory+mem/2 || u2.PeakMemory < u2.Memory {
		t.Errorf("peak %d, memory %d after %d were used over %d", u2.PeakMemory, u2.Memory, mem, u0.Memory)
	}
	b.run("for i in 1 2 3 4 5 6 7 8; do sleep 100 & done >/dev/null 2>&1; sleep 0.2")
	if u3 := usage(t, b); u3.Pids <= 0 {
		t.Errorf("%d processes", u3.Pids)
	}
	if err := b.Kill(within(t)); err != nil {
		t.Fatal(err)
	}
	if u := usage(t, b); u.PeakMemory < u2.PeakMemory || u.CPU < u1.CPU || u.Disk < u1.Disk || u.OOM {
		t.Errorf("after death %+v, before %+v", u, u2)
	}
}

// Kill ends everything, however busy it is, and Done says so.
func testKillBusy(t *testing.T, h *Harness) {
	r := h.open(t, Options{})
	b := h.start(t, r, Resources)
	streams := []*guest.ExecStream{
		b.exec("/bin/sh", "-c", "while :; do :; done"),
		b.exec("/bin/sh", "-c", "while :; do sh -c 'exit 0'; done"),
		b.exec("/bin/sh", "-c", "while :; do dd if=/dev/zero of=/big bs=1M count=64 2>/dev/null; done"),
		b.exec("/bin/sh", "-c", "trap '' TERM INT HUP; yes"),
	}
	for _, s := range streams[3:] {
		if _, err := s.Recv(); err != nil { // it is busy
			t.Fatal(err)
		}
	}
	if err := b.Kill(within(t)); err != nil {
		t.Fatalf("kill: %v", err)
	}
	dead(t, b)
	if p := h.Processes(t, b.ID()); len(p) > 0 {
		t.Errorf("processes %v are left", p)
	}
	if err := b.Kill(within(t)); err != nil {
		t.Errorf("kill what is dead: %v", err)
	}
	if c, err := b.Dial(within(t)); err == nil {
		c.Close()
		t.Error("dialled into a dead machine")
	} else if !errors.Is(err, sandbox.Gone) {
		t.Errorf("dial a dead machine: %v, want gone", err)
	}
	for _, s := range streams {
		if _, _, err := finish(s); err == nil {
			t.Error("an exec of a killed machine has a status")
		}
	}
}

// A machine whose processes die of something else is seen to have died.
func testDies(t *testing.T, h *Harness) {
	r := h.open(t, Options{})
	b := h.start(t, r, Resources)
	for _, p := range h.Processes(t, b.ID()) {
		_ = unix.Kill(p, unix.SIGKILL) // the first may take the others with it
	}
	dead(t, b)
	if u := usage(t, b); u.OOM {
		t.Errorf("%+v: killed, not out of memory", u)
	}
}

// Remove leaves nothing, at whatever point, and can be repeated.
func testRemove(t *testing.T, h *Harness) {
	r := h.open(t, Options{})
	for name, m := range map[string]sandbox.Machine{"booted": boot(t, r, Resources), "started": h.start(t, r, Resources)} {
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() { remove(t, m) })
		}
		wg.Wait()
		dead(t, m)
		remove(t, m)
		for _, l := range h.Left(t, m.ID()) {
			t.Errorf("%s: left on the host: %s", name, l)
		}
		if err := m.Kill(within(t)); err != nil {
			t.Errorf("%s: kill what was removed: %v", name, err)
		}
		if err := m.Start(within(t), h.spec(Resources, newKey())); err == nil {
			t.Errorf("%s: started what was removed", name)
		}
		if got, err := r.Adopt(within(t), m.ID()); !errors.Is(err, sandbox.NotFound) || got != nil {
			t.Errorf("%s: adopt what was removed: %v, %v", name, got, err)
		}
	}
}

// Machines that are made, used and removed at the same time do not get into
// each other's way.
func testMany(t *testing.T, h *Harness) {
	r := h.open(t, Options{PoolSize: 2, Class: Resources})
	var wg sync.WaitGroup
	var mu sync.Mutex
	seen := map[string]bool{}
	for i := range 8 {
		wg.Go(func() {
			b := h.start(t, r, Resources)
			want := fmt.Sprint("machine ", i)
			if got := b.run(fmt.Sprintf("echo %s >/id; cat /id", want)); got != want {
				t.Errorf("%q, want %q", got, want)
			}
			mu.Lock()
			for _, k := range []string{b.ID(), b.Slot(), b.Address().String()} {
				if seen[k] {
					t.Errorf("%s is shared", k)
				}
				seen[k] = true
			}
			mu.Unlock()
		})
	}
	wg.Wait()
}
