package guest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/guest"
	"vivarium/guest/wire"
	"vivarium/sandbox"
)

func (b *box) stats() wire.Stats {
	b.t.Helper()
	s, err := b.Stats(b.ctx())
	if err != nil {
		b.t.Fatal(err)
	}
	return s
}

// settled waits until the guest is as small as it was.
func (b *box) settled(before wire.Stats) {
	b.t.Helper()
	var s wire.Stats
	for range 200 {
		if s = b.stats(); s.Execs == 0 && s.FDs <= before.FDs+2 && s.Goroutines <= before.Goroutines+4 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	b.t.Fatalf("before %+v, after %+v", before, s)
}

// A11: many tiny execs leave nothing behind. (The 20,000 are run in a real
// sandbox, by the test of the engine.)
func TestManyExecs(t *testing.T) {
	t.Parallel()
	n := 4000
	if testing.Short() {
		n = 500
	}
	b := start(t)
	b.sh("true")
	before := b.stats()
	var wg sync.WaitGroup
	const workers = 4
	for w := range workers {
		wg.Go(func() {
			for i := range n / workers {
				s, err := b.StartExec(t.Context(), fmt.Sprintf("m%d-%d", w, i), sandbox.ExecSpec{Argv: []string{"/bin/true"}})
				if err != nil {
					t.Error(err)
					return
				}
				f, err := s.Recv()
				if err != nil || f.Exit == nil || f.Exit.Status.Code != 0 || s.AckExit() != nil {
					t.Errorf("%v %+v", err, f)
					return
				}
			}
		})
	}
	wg.Wait()
	b.settled(before)
	if s := b.stats(); s.RSS > 64<<20 {
		t.Errorf("guest takes %d bytes", s.RSS)
	}
}

// A12, D10: orphans are reaped, whatever their number.
func TestOrphans(t *testing.T) {
	t.Parallel()
	b := start(t)
	if r := b.sh("i=0; while [ $i -lt 5000 ]; do (true &); i=$((i+1)); done"); r.st.Code != 0 {
		t.Fatalf("%+v", r)
	}
	for i := 0; ; i++ {
		r := b.sh("cat /proc/[0-9]*/stat | grep -c ') Z '")
		if s := b.stats(); strings.TrimSpace(r.out) == "0" && s.Orphans >= 5000 {
			break
		} else if i == 200 {
			t.Fatalf("%s zombies, %+v", r.out, s)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// D10: signals from inside do not end process 1.
func TestInitSignals(t *testing.T) {
	t.Parallel()
	b := start(t)
	r := b.sh("for s in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 34 50 64; do kill -$s 1; done; echo alive")
	if r.out != "alive\n" {
		t.Fatalf("%+v", r)
	}
	if r := b.sh("trap - INT; kill -INT $$"); r.st.Signal != 2 {
		t.Fatalf("signals are not as they should be in a command: %+v", r)
	}
	// what process 1 does about signals is no inheritance
	for s := 1; s < 65; s++ {
		switch unix.Signal(s) {
		case 32, 33, 34: // shells do not have them
			continue
		case unix.SIGSTOP, unix.SIGTSTP, unix.SIGTTIN, unix.SIGTTOU: // nobody would wake it
			continue
		}
		r := b.sh("kill -" + strconv.Itoa(s) + " $$; echo alive")
		switch unix.Signal(s) {
		case unix.SIGCHLD, unix.SIGCONT, unix.SIGURG, unix.SIGWINCH:
			if r.out != "alive\n" {
				t.Errorf("signal %d: %+v", s, r)
			}
		default:
			if r.st.Signal != s {
				t.Errorf("signal %d: %+v", s, r)
			}
		}
	}
	// what this test was started with ignored, the guest was as well
	inherited := "0000000000000000"
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "SigIgn:"); ok {
			inherited = strings.TrimSpace(v)
		}
	}
	if r := b.sh("cat /proc/self/status | grep -E '^Sig(Blk|Ign|Cgt):' | grep -v 0000000000000000 | grep -v 'SigIgn:.*" + inherited + "'"); r.out != "" {
		t.Errorf("%+v", r)
	}
	if _, err := b.Ping(b.ctx()); err != nil {
		t.Fatal(err)
	}
}

// A10: a flood that nobody takes is held back, not kept.
func TestFlood(t *testing.T) {
	t.Parallel()
	b := start(t)
	b.sh("true")
	var all []*guest.ExecStream
	for range 8 {
		s, err := b.StartExec(b.ctx(), newID(), sandbox.ExecSpec{Argv: []string{"sh", "-c", "yes & yes >&2"}})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, s)
	}
	time.Sleep(200 * time.Millisecond)
	if s := b.stats(); s.RSS > 100<<20 {
		t.Errorf("guest takes %d bytes", s.RSS)
	}
	// Others are served meanwhile, and everything ends when it is told to.
	if r := b.sh("echo served"); r.out != "served\n" {
		t.Fatalf("%+v", r)
	}
	for _, s := range all {
		if err := s.Signal(9); err != nil {
			t.Fatal(err)
		}
		if r := collect(t, s); r.st.Signal != 9 || r.out == "" || r.err == "" {
			t.Fatalf("%d %d %+v", len(r.out), len(r.err), r.st)
		}
	}
}

// A7: a guest without descriptors says so and goes on.
func TestDescriptors(t *testing.T) {
	t.Parallel()
	b := start(t)
	b.sh("true")
	if err := unix.Prlimit(b.pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 64, Max: 64}, nil); err != nil {
		t.Fatal(err)
	}
	var all []*guest.ExecStream
	var err error
	for range 64 {
		ctx, cancel := context.WithTimeout(b.ctx(), 2*time.Second)
		defer cancel()
		var s *guest.ExecStream
		if s, err = b.StartExec(ctx, newID(), sandbox.ExecSpec{Argv: []string{"sleep", "1000"}}); err != nil {
			break
		}
		all = append(all, s)
	}
	if err == nil || len(all) < 5 {
		t.Fatalf("%d execs with 64 descriptors: %v", len(all), err)
	}
	if _, err := b.Ping(b.ctx()); err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		s.Signal(9)
		if r := collect(t, s); r.st.Signal != 9 {
			t.Fatalf("%+v", r)
		}
	}
	if r := b.sh("echo again"); r.out != "again\n" {
		t.Fatalf("%+v", r)
	}
}

// A process inside that opens connections and says nothing does not keep the
// host out, nor does it use up the guest.
func TestUnauthenticated(t *testing.T) {
	t.Parallel()
	b := start(t)
	b.sh("true")
	var conns []net.Conn
	for range 500 {
		c, err := net.Dial("unix", b.sock)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	c := b.connect(guest.Options{})
	s, err := c.StartExec(b.ctx(), newID(), sandbox.ExecSpec{Argv: []string{"true"}})
	if err != nil {
		t.Fatal(err)
	}
	collect(t, s)
	if s := b.stats(); s.FDs > 60 {
		t.Fatalf("%+v", s)
	}
	// Nor does one that says the wrong things.
	for i, c := range conns {
		c.Write(bytes.Repeat([]byte{byte(i)}, 100+i))
	}
	if r := b.sh("true"); r.st.Code != 0 {
		t.Fatalf("%+v", r)
	}
}

// pidsGroup puts the guest under a limit of processes.
func (b *box) pidsGroup(limit int) bool {
	for _, base := range []string{"/sys/fs/cgroup/pids", "/sys/fs/cgroup"} {
		dir := filepath.Join(base, fmt.Sprintf("guest-test-%d", b.pid))
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		b.t.Cleanup(func() {
			b.cmd.Process.Kill()
			b.cmd.Wait()
			for range 100 {
				if os.Remove(dir) == nil {
					break
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
		if os.WriteFile(dir+"/pids.max", []byte(strconv.Itoa(limit)), 0o644) == nil && os.WriteFile(dir+"/cgroup.procs", []byte(strconv.Itoa(b.pid)), 0o644) == nil {
			return true
		}
	}
	return false
}

// A1, A8: at the limit of processes the guest answers, says Exhausted, ends the
// bomb, and works again.
func TestForkBomb(t *testing.T) {
	t.Parallel()
	b := start(t)
	b.sh("true") // by now it has its threads
	time.Sleep(50 * time.Millisecond)
	if !b.pidsGroup(80) {
		t.Skip("no cgroup that limits processes")
	}
	bomb, err := b.StartExec(b.ctx(), "bomb", sandbox.ExecSpec{Argv: []string{"python3", "-c", "import os, time\nwhile True:\n try: os.fork()\n except OSError: time.sleep(0.005)"}, Output: sandbox.OutputDiscard, Timeout: 1500 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	full := false
	var wg sync.WaitGroup
	var mu sync.Mutex
	for w := range 8 {
		wg.Go(func() {
			for i := range 40 {
				s, err := b.StartExec(b.ctx(), fmt.Sprintf("b%d-%d", w, i), sandbox.ExecSpec{Argv: []string{"true"}})
				switch {
				case err == nil:
					for err == nil {
						_, err = s.Recv()
					}
					if err != io.EOF || s.AckExit() != nil {
						t.Error(err)
					}
				case errors.Is(err, sandbox.Exhausted):
					mu.Lock()
					full = true
					mu.Unlock()
				default:
					t.Error(err)
				}
				if _, err := b.Stat(b.ctx(), "", "/", true); err != nil {
					t.Error(err)
				}
				if _, err := b.Stat(b.ctx(), "1", "/", true); err != nil {
					t.Error(err)
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
	}
	wg.Wait()
	if !full {
		t.Error("the limit was never reached")
	}
	if r := collect(t, bomb); !r.st.TimedOut {
		t.Fatalf("%+v", r.st)
	}
	for i := 0; ; i++ {
		s, err := b.StartExec(b.ctx(), newID(), sandbox.ExecSpec{Argv: []string{"echo", "works"}})
		if err == nil {
			if r := collect(t, s); r.out != "works\n" {
				t.Fatalf("%+v", r)
			}
			if s := b.stats(); s.Processes <= 3 {
				return
			}
		}
		if i == 300 {
			t.Fatalf("%v, %+v", err, b.stats())
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// A restored sandbox gets a new key; the old one opens nothing more.
func TestRekey(t *testing.T) {
	t.Parallel()
	b := start(t)
	next := bytes.Repeat([]byte{7}, wire.KeySize)
	if err := b.Rekey(b.ctx(), next); err != nil {
		t.Fatal(err)
	}
	if _, err := guest.Connect(b.ctx(), b.dial, b.key, guest.Options{}); !errors.Is(err, sandbox.Denied) {
		t.Fatal(err)
	}
	b.key = next
	b.Close()
	c := b.connect(guest.Options{})
	if _, err := c.Ping(b.ctx()); err != nil {
		t.Fatal(err)
	}
}
