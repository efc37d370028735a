package runtimetest

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"vivarium/guest"
	"vivarium/sandbox"
)

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}

// open opens the runtime, and closes it when the test ends.
func (h *Harness) open(t testing.TB, o Options) sandbox.Runtime {
	t.Helper()
	r := h.Open(t, o)
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return r
}

// box is a machine with its guest.
type box struct {
	t testing.TB
	sandbox.Machine
	key   []byte
	guest *guest.Client
}

func newKey() []byte {
	k := make([]byte, 32)
	_, _ = rand.Read(k) // never fails
	return k
}

func boot(t testing.TB, r sandbox.Runtime, res sandbox.Resources) sandbox.Machine {
	t.Helper()
	m, err := r.Boot(within(t), sandbox.BootSpec{Resources: res})
	if err != nil {
		t.Fatalf("boot: %v", err)
	}
	t.Cleanup(func() { remove(t, m) }) // idempotent
	return m
}

func remove(t testing.TB, m sandbox.Machine) {
	t.Helper()
	if err := m.Remove(within(t)); err != nil {
		t.Errorf("remove: %v", err)
	}
}

func (h *Harness) spec(res sandbox.Resources, key []byte) sandbox.StartSpec {
	return sandbox.StartSpec{SandboxID: "sb-suite", Hostname: "suite", ImagePath: h.Image, Resources: res, GuestKey: key}
}

// start boots a machine and starts its guest.
func (h *Harness) start(t testing.TB, r sandbox.Runtime, res sandbox.Resources) *box {
	t.Helper()
	b := &box{t: t, Machine: boot(t, r, res), key: newKey()}
	if err := b.Start(within(t), h.spec(res, b.key)); err != nil {
		t.Fatalf("start: %v", err)
	}
	b.connect()
	return b
}

func (b *box) connect() {
	b.t.Helper()
	c, err := guest.Connect(within(b.t), b.Dial, b.key, guest.Options{})
	if err != nil {
		b.t.Fatalf("connect to the guest: %v", err)
	}
	b.t.Cleanup(func() { _ = c.Close() })
	b.guest = c
}

var serial atomic.Int64

func execID() string { return fmt.Sprintf("x%d", serial.Add(1)) }

// exec starts a command and does not wait.
func (b *box) exec(argv ...string) *guest.ExecStream {
	b.t.Helper()
	s, err := b.guest.StartExec(within(b.t), execID(), sandbox.ExecSpec{Argv: argv, Output: sandbox.OutputMerged, Env: map[string]string{"PATH": "/bin"}})
	if err != nil {
		b.t.Fatalf("start %q: %v", argv, err)
	}
	b.t.Cleanup(func() { _ = s.Close() })
	return s
}

// finish reads a stream to its end.
func finish(s *guest.ExecStream) (string, sandbox.ExitStatus, error) {
	var out bytes.Buffer
	for {
		f, err := s.Recv()
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return out.String(), sandbox.ExitStatus{}, err
		}
		out.Write(f.Data)
		if f.Exit != nil {
			return out.String(), f.Exit.Status, s.AckExit()
		}
	}
}

// run runs a shell script that has to succeed, and gives what it wrote.
func (b *box) run(script string, args ...string) string {
	b.t.Helper()
	s := b.exec(append([]string{"/bin/sh", "-c", script, "sh"}, args...)...)
	out, st, err := finish(s)
	if err != nil || st.Code != 0 {
		b.t.Fatalf("%s: %+v, %v\n%s", script, st, err, out)
	}
	return strings.TrimSpace(out)
}

// dead waits until a machine has died.
func dead(t testing.TB, m sandbox.Machine) {
	t.Helper()
	select {
	case <-m.Done():
	case <-time.After(limit):
		t.Fatal("the machine does not die")
	}
}

func alive(t testing.TB, m sandbox.Machine) {
	t.Helper()
	select {
	case <-m.Done():
		t.Fatal("the machine has died")
	default:
	}
}

// usage of a machine, which has to be readable.
func usage(t testing.TB, m sandbox.Machine) sandbox.Usage {
	t.Helper()
	u, err := m.Usage()
	if err != nil {
		t.Fatalf("usage: %v", err)
	}
	return u
}

// eventually waits for something that takes a moment.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}
