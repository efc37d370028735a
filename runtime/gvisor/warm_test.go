package gvisor_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"vivarium/guest"
	"vivarium/guest/wire"
	"vivarium/runtime/runtimetest"
	"vivarium/sandbox"
)

// F1: machines that boot at the same time share no socket. gVisor makes control
// and packet sockets without close-on-exec; one that is started meanwhile would
// inherit them.
func TestF01SharesNoSocket(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	r := l.open(t, runtimetest.Options{})
	t.Cleanup(func() { r.Close() })
	const n = 8
	machines := make([]sandbox.Machine, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			m, err := r.Boot(t.Context(), sandbox.BootSpec{Resources: runtimetest.Resources})
			if err != nil {
				t.Error(err)
				return
			}
			machines[i] = m
		})
	}
	wg.Wait()
	owner := map[string]string{}
	sockets := 0
	for _, m := range machines {
		if m == nil {
			continue
		}
		for _, pid := range l.processes(t, m.ID()) {
			fds, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
			if err != nil {
				t.Fatal(err)
			}
			for _, fd := range fds {
				to, err := os.Readlink(fd)
				if err != nil || !strings.HasPrefix(to, "socket:") {
					continue
				}
				sockets++
				if o, ok := owner[to]; ok && o != m.ID() {
					t.Errorf("%s is in machines %s and %s", to, o, m.ID())
				}
				owner[to] = m.ID()
			}
		}
		if err := m.Remove(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if sockets < 2*n { // control and packet
		t.Errorf("only %d sockets in %d machines: nothing was looked at", sockets, n)
	}
}

// A warm machine runs its guest before anybody asked for it, with the
// capabilities that setting up needs; a sandbox gets it without them.
func TestWarm(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	r := l.open(t, runtimetest.Options{PoolSize: 4, Class: runtimetest.Resources})
	t.Cleanup(func() { r.Close() })
	boot := sandbox.BootSpec{Resources: runtimetest.Resources, ImagePath: common.image}
	var w sandbox.Warm
	for end := time.Now().Add(time.Minute); w == nil; {
		if time.Now().After(end) {
			t.Fatal("the same image is asked for again and again, and no machine is warm")
		}
		m, err := r.Boot(t.Context(), boot)
		if err != nil {
			t.Fatal(err)
		}
		if c := m.(sandbox.Warm); c.WarmKey() != nil {
			w = c
			break
		}
		if err := m.Remove(t.Context()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(200 * time.Millisecond)
	}
	t.Cleanup(func() {
		if err := w.Remove(context.Background()); err != nil {
			t.Error(err)
		}
	})
	spec := sandbox.StartSpec{Hostname: "warm", ImagePath: common.image, Resources: runtimetest.Resources, GuestKey: w.WarmKey()}
	g, err := w.WarmSetup(spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Start(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	c, err := guest.Connect(t.Context(), w.Dial, spec.GuestKey, guest.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Prepare(t.Context(), wire.Setup{Hostname: g.Hostname, Hosts: g.Hosts, ResolvConf: g.ResolvConf, Unmount: g.Unmount, DropCaps: g.DropCaps}); err != nil {
		t.Fatal(err)
	}
	s, err := c.StartExec(t.Context(), "x", sandbox.ExecSpec{Argv: []string{"/bin/sh", "-c", "hostname; grep CapEff /proc/self/status; grep CapBnd /proc/1/status; grep -c ' /tmp ' /proc/mounts"}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var out bytes.Buffer
	for {
		f, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		out.Write(f.Data)
		if f.Exit != nil {
			break
		}
	}
	// 0xa80425fb are Docker's default capabilities
	want := "warm\nCapEff:\t00000000a80425fb\nCapBnd:\t00000000a80425fb\n0\n"
	if out.String() != want {
		t.Errorf("inside:\n%s\nwant:\n%s", out.String(), want)
	}
}
