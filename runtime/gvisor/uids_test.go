package gvisor_test

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/runtime/gvisor"
	"vivarium/runtime/runtimetest"
	"vivarium/sandbox"
)

// boot gives a machine with its sentry's pid and user.
func boot(t *testing.T, l *lab, r sandbox.Runtime) (m sandbox.Machine, pid, uid int) {
	t.Helper()
	m, err := r.Boot(t.Context(), sandbox.BootSpec{Resources: runtimetest.Resources})
	if err != nil {
		t.Fatal(err)
	}
	pid = sentryOf(t, l.processes(t, m.ID()))
	return m, pid, userOf(t, l, pid)
}

func remove(t *testing.T, m sandbox.Machine) {
	t.Helper()
	if err := m.Remove(context.Background()); err != nil {
		t.Fatal(err)
	}
}

func wantExhausted(t *testing.T, r sandbox.Runtime) {
	t.Helper()
	m, err := r.Boot(t.Context(), sandbox.BootSpec{Resources: runtimetest.Resources})
	if err == nil {
		remove(t, m)
	}
	if sandbox.KindOf(err) != sandbox.Exhausted || sandbox.HintOf(err) == "" {
		t.Fatalf("boot without a free user: %v, want exhausted and what to do", err)
	}
}

// gone waits until no process has a user: one that has ended does as long as
// nobody has taken its status.
func gone(t *testing.T, uid int) {
	t.Helper()
	for range 1000 {
		if _, err := unix.Getpriority(unix.PRIO_USER, uid); errors.Is(err, unix.ESRCH) {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("user %d still has processes", uid)
}

// Nor is a user taken that another process of the host has, such as a sandbox of
// another daemon.
func TestUserOfAnotherProcess(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.uids.Count = 2
	r := l.open(t, runtimetest.Options{})
	t.Cleanup(func() { r.Close() })
	other := exec.Command("/bin/sleep", "600")
	other.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(l.uids.First + 1)}, Pdeathsig: syscall.SIGKILL}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	end := sync.OnceFunc(func() {
		_ = other.Process.Kill()
		_ = other.Wait()
	})
	t.Cleanup(end)
	m1, _, uid := boot(t, l, r)
	defer remove(t, m1)
	if uid != l.uids.First {
		t.Errorf("user %d, want %d", uid, l.uids.First)
	}
	wantExhausted(t, r)
	end()
	m2, _, _ := boot(t, l, r)
	remove(t, m2)
}

// mayEnd says whether a process of a user of the host may signal another.
func mayEnd(t *testing.T, uid, pid int) bool {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-c", `kill -0 "$1"`, "sh", strconv.Itoa(pid))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
	err := cmd.Run()
	var ee *exec.ExitError
	if err != nil && !errors.As(err, &ee) {
		t.Fatal(err)
	}
	return err == nil
}

// F1: machines that live at once have each a user of their own, which may do
// nothing to the other's, also without the namespaces between them.
func TestF01UserOfItsOwn(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.uids.Count = 2
	r := l.open(t, runtimetest.Options{})
	t.Cleanup(func() { r.Close() })
	m1, pid1, uid1 := boot(t, l, r)
	defer remove(t, m1)
	m2, pid2, uid2 := boot(t, l, r)
	defer remove(t, m2)
	if uid1 == uid2 {
		t.Fatalf("both are user %d", uid1)
	}
	for _, p := range []struct{ pid, uid int }{{pid1, uid1}, {pid2, uid2}} {
		checkThread(t, fmt.Sprintf("/proc/%d/status", p.pid), p.uid)
		if !mayEnd(t, p.uid, p.pid) {
			t.Errorf("user %d may not signal process %d: nothing is shown by what follows", p.uid, p.pid)
		}
	}
	if mayEnd(t, uid1, pid2) || mayEnd(t, uid2, pid1) {
		t.Error("one sentry's user may signal the other")
	}
	const nobody = 65534
	if mayEnd(t, nobody, pid1) {
		t.Error("nobody may signal a sentry")
	}
}

// A user is given again only when nothing is left of its machine, whichever
// daemon has booted that; a node without free ones says so.
func TestUsersAreNotShared(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.uids.Count = 2
	before := l.open(t, runtimetest.Options{})
	m1, _, uid1 := boot(t, l, before)
	if err := before.Close(); err != nil {
		t.Fatal(err)
	}

	r := l.open(t, runtimetest.Options{})
	t.Cleanup(func() { r.Close() })
	m2, _, uid2 := boot(t, l, r)
	defer remove(t, m2)
	if uid1 == uid2 {
		t.Fatalf("user %d was given again while its machine lives", uid1)
	}
	wantExhausted(t, r)
	groups, err := l.cgroups.List()
	if err != nil || len(groups) != 2 {
		t.Errorf("cgroups %v, %v: want those of the two that live", groups, err)
	}
	adopted, err := r.Adopt(t.Context(), m1.ID())
	if err != nil {
		t.Fatal(err)
	}
	if err := adopted.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantExhausted(t, r) // dead, and not removed
	remove(t, adopted)
	gone(t, uid1)
	m3, _, uid3 := boot(t, l, r)
	defer remove(t, m3)
	if uid3 != uid1 {
		t.Errorf("user %d, want %d, the only one that is free", uid3, uid1)
	}
}

// So does the user of a boot that was cut off before anything was written of
// the machine but its spec.
func TestUserOfACutBoot(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.uids.Count = 1
	cut := errors.New("cut")
	before := l.open(t, runtimetest.Options{Fail: func(step string) error {
		if step == "boot.state" || step == "remove.cgroup" {
			return cut
		}
		return nil
	}})
	if m, err := before.Boot(t.Context(), sandbox.BootSpec{Resources: runtimetest.Resources}); !errors.Is(err, cut) {
		if err == nil {
			remove(t, m)
		}
		t.Fatalf("boot: %v", err)
	}
	wantExhausted(t, before) // it was not undone
	if err := before.Close(); err != nil {
		t.Fatal(err)
	}
	r := l.open(t, runtimetest.Options{})
	t.Cleanup(func() { r.Close() })
	wantExhausted(t, r)
	none := func(string) bool { return false }
	if err := r.Reconcile(t.Context(), none); err != nil {
		t.Fatal(err)
	}
	gone(t, l.uids.First)
	m, _, _ := boot(t, l, r)
	remove(t, m)
	if err := l.slots.Forget(t.Context(), none); err != nil { // the network's affair, as in the daemon
		t.Error(err)
	}
}

func TestUsersMustBeARange(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	for _, u := range []gvisor.UIDs{{}, {First: 5}, {First: -5, Count: 10}, {First: 0, Count: 10}, {First: 1 << 31, Count: 1}, {First: 1<<31 - 2, Count: 10}} {
		_, err := gvisor.Open(gvisor.Options{Dir: l.dir + "/gv", Sentry: l.sentry, Start: common.paths.Start, Slots: l.slots, Cgroups: l.cgroups, UIDs: u})
		if sandbox.KindOf(err) != sandbox.Invalid {
			t.Errorf("%+v: %v", u, err)
		}
	}
}
