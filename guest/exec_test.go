package guest_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"vivarium/sandbox"
)

func TestExec(t *testing.T) {
	t.Parallel()
	b := start(t)
	r := b.sh("echo out; echo err >&2; exit 7")
	if r.out != "out\n" || r.err != "err\n" || r.st.Code != 7 || r.st.Signal != 0 {
		t.Fatalf("%+v", r)
	}
	r = b.run(sandbox.ExecSpec{Argv: []string{"sh", "-c", "pwd; echo $A $HOME; umask; cat"}, Env: map[string]string{"A": "b"}, Workdir: "/usr"})
	if r.out != "/usr\nb /root\n0022\n" || r.st.Code != 0 {
		t.Fatalf("%+v", r)
	}
	r = b.run(sandbox.ExecSpec{Argv: []string{"sh", "-c", "echo 1; echo 2 >&2; echo 3"}, Output: sandbox.OutputMerged})
	if r.out != "1\n2\n3\n" || r.err != "" {
		t.Fatalf("merged: %+v", r)
	}
	r = b.run(sandbox.ExecSpec{Argv: []string{"sh", "-c", "echo 1; exit 3"}, Output: sandbox.OutputDiscard})
	if r.out != "" || r.st.Code != 3 {
		t.Fatalf("discard: %+v", r)
	}
	r = b.sh("kill -9 $$")
	if r.st.Code != 137 || r.st.Signal != 9 {
		t.Fatalf("killed: %+v", r)
	}
}

// Whatever is wrong with the command is its status, as a shell would tell it.
func TestExecNotStarted(t *testing.T) {
	t.Parallel()
	b := start(t)
	for _, c := range []struct {
		spec sandbox.ExecSpec
		code int
		kind sandbox.Kind
	}{
		{sandbox.ExecSpec{Argv: []string{"no-such-program"}}, 127, sandbox.NotFound},
		{sandbox.ExecSpec{Argv: []string{"/no/such/program"}}, 127, sandbox.NotFound},
		{sandbox.ExecSpec{Argv: []string{"/etc/passwd"}}, 126, sandbox.Denied},
		{sandbox.ExecSpec{Argv: []string{"/etc"}}, 126, sandbox.Denied},
		{sandbox.ExecSpec{Argv: []string{"true"}, Workdir: "/no/such/dir"}, 126, sandbox.NotFound},
		{sandbox.ExecSpec{Argv: []string{"true"}, Workdir: "/etc/passwd"}, 126, sandbox.Invalid},
		{sandbox.ExecSpec{Argv: []string{"true"}, User: "nobody-at-all"}, 126, sandbox.NotFound},
		{sandbox.ExecSpec{Argv: []string{"true"}, User: "0:no-group"}, 126, sandbox.NotFound},
	} {
		r := b.run(c.spec)
		if r.st.Code != c.code || r.st.Kind != c.kind || r.st.Error == "" {
			t.Errorf("%+v: %+v", c.spec, r.st)
		}
	}
	for _, s := range []sandbox.ExecSpec{{}, {Argv: []string{"a\x00b"}}, {Argv: []string{"a"}, Stdin: "tape"}, {Argv: []string{"a"}, Timeout: -1}} {
		if _, err := b.StartExec(b.ctx(), newID(), s); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("%+v: %v", s, err)
		}
	}
}

func TestExecStdin(t *testing.T) {
	t.Parallel()
	b := start(t)
	s, err := b.StartExec(b.ctx(), newID(), sandbox.ExecSpec{Argv: []string{"sha256sum"}, Stdin: sandbox.StdinPipe})
	if err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte("\x00\xff binary\r\n"), 300_000)
	go func() {
		for off := 0; off < len(data); {
			n := min(100_001, len(data)-off)
			if err := s.WriteStdin(b.ctx(), int64(off), data[off:off+n], false); err != nil {
				t.Error(err)
			}
			s.WriteStdin(b.ctx(), int64(off), data[off:off+n/2], false) // again: skipped
			off += n
		}
		if err := s.WriteStdin(b.ctx(), int64(len(data)), nil, true); err != nil {
			t.Error(err)
		}
	}()
	r := collect(t, s)
	if want := fmt.Sprintf("%x  -\n", sha256.Sum256(data)); r.out != want || r.st.Code != 0 {
		t.Fatalf("%+v, want %s", r, want)
	}
	// A command that takes nothing and goes does not block the writer.
	if s, err = b.StartExec(b.ctx(), newID(), sandbox.ExecSpec{Argv: []string{"true"}, Stdin: sandbox.StdinPipe}); err != nil {
		t.Fatal(err)
	}
	go s.WriteStdin(b.ctx(), 0, data, true)
	if r := collect(t, s); r.st.Code != 0 {
		t.Fatalf("%+v", r)
	}
}

// A command outlives its connection and client; nothing of its output is lost
// or comes twice, and starting it again attaches.
func TestExecAttach(t *testing.T) {
	t.Parallel()
	b := start(t)
	spec := sandbox.ExecSpec{Argv: []string{"sh", "-c", "seq 1 400000; exit 5"}}
	s, err := b.StartExec(b.ctx(), "dup", spec)
	if err != nil {
		t.Fatal(err)
	}
	if !s.Started.Created || s.Started.PID <= 1 {
		t.Fatalf("%+v", s.Started)
	}
	var got bytes.Buffer
	for got.Len() < 1_000_000 { // the guest sends not so much without having seen an acknowledgement
		f, err := s.Recv()
		if err != nil {
			t.Fatal(err)
		}
		got.Write(f.Data)
		if got.Len() > 200_000 {
			s.Ack(int64(got.Len()), 0)
		}
	}
	b.Close()
	c := b.connect(guestOptions)
	if _, err := c.AttachExec(b.ctx(), "nope", 0, 0); !errors.Is(err, sandbox.NotFound) {
		t.Fatal(err)
	}
	if _, err := c.AttachExec(b.ctx(), "dup", 0, 0); !errors.Is(err, sandbox.Conflict) {
		t.Fatalf("output that was acknowledged is there again: %v", err)
	}
	if _, err := c.StartExec(b.ctx(), "dup", sandbox.ExecSpec{Argv: []string{"true"}}); !errors.Is(err, sandbox.Exists) {
		t.Fatal(err)
	}
	s1, err := c.StartExec(b.ctx(), "dup", spec)
	if err != nil || s1.Started.Created || s1.Started.PID != s.Started.PID {
		t.Fatalf("%v %+v", err, s1)
	}
	s2, err := c.AttachExec(b.ctx(), "dup", int64(got.Len()), 0)
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = s1.Recv()
	}
	if !errors.Is(err, sandbox.Conflict) {
		t.Fatalf("the earlier stream: %v", err)
	}
	r := collect(t, s2)
	got.WriteString(r.out)
	var want bytes.Buffer
	for i := 1; i <= 400000; i++ {
		fmt.Fprintln(&want, i)
	}
	if !bytes.Equal(got.Bytes(), want.Bytes()) || r.st.Code != 5 {
		t.Fatalf("%d bytes, want %d, status %+v", got.Len(), want.Len(), r.st)
	}
	if _, err := c.AttachExec(b.ctx(), "dup", 0, 0); !errors.Is(err, sandbox.NotFound) {
		t.Fatalf("forgotten exec: %v", err)
	}
}

// The exit does not wait for what was left in the background, and the
// background is not blocked by nobody reading.
func TestExecBackground(t *testing.T) {
	t.Parallel()
	b := start(t)
	r := b.sh("(sleep 0.05; echo late; sleep 1000) & echo early")
	if r.out != "early\nlate\n" && r.out != "early\n" || r.st.Code != 0 {
		t.Fatalf("%+v", r)
	}
	// A large output before the exit arrives whole though others hold the pipe.
	r = b.sh("sleep 1000 & head -c 3000000 /dev/zero")
	if len(r.out) != 3000000 {
		t.Fatalf("%d bytes", len(r.out))
	}
	r = b.sh("(while echo noise; do :; done; echo stopped >&2) & sleep 0.1; kill -0 $!")
	if r.st.Code != 0 {
		t.Fatalf("%+v", r.st)
	}
}

// D4, user report 8: the timeout ends the whole tree, also what left the
// session.
func TestExecTimeout(t *testing.T) {
	t.Parallel()
	b := start(t)
	var r result
	for _, user := range []string{"", "1234:5678"} {
		r = b.run(sandbox.ExecSpec{
			Argv:    []string{"sh", "-c", "setsid sleep 4321 & (setsid sh -c 'sleep 4322 & sleep 4323' &) ; trap '' TERM INT HUP; sleep 4324; sleep 4325"},
			Timeout: 300 * time.Millisecond,
			User:    user,
		})
		if !r.st.TimedOut || r.st.Signal != 9 || r.st.Code != 137 {
			t.Fatalf("%+v", r.st)
		}
	}
	for i := 0; ; i++ {
		r = b.sh("ps ax | grep -c '[s]leep 432'")
		if strings.TrimSpace(r.out) == "0" {
			break
		}
		if i == 100 {
			t.Fatalf("left over: %s", b.sh("ps axjf").out)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// D4: a terminal.
func TestExecPTY(t *testing.T) {
	t.Parallel()
	b := start(t)
	s, err := b.StartExec(b.ctx(), newID(), sandbox.ExecSpec{
		Argv: []string{"sh", "-c", `stty -echo; tty >/dev/null && echo terminal $TERM; stty size; read a; stty size; echo got $a; exec sleep 1000`}, Stdin: sandbox.StdinPipe, PTY: &sandbox.WindowSize{Rows: 30, Cols: 100},
	})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	until := func(want string) {
		t.Helper()
		for !strings.Contains(out.String(), want) {
			f, err := s.Recv()
			if err != nil {
				t.Fatalf("%v in %q", err, out.String())
			}
			out.Write(f.Data)
		}
	}
	until("terminal xterm\r\n30 100\r\n")
	s.Resize(sandbox.WindowSize{Rows: 7, Cols: 9})
	s.WriteStdin(b.ctx(), 0, []byte("line\n"), false)
	until("7 9\r\ngot line\r\n")
	s.WriteStdin(b.ctx(), 5, []byte("\x03"), false)
	for {
		f, err := s.Recv()
		if err == io.EOF {
			t.Fatal("no exit")
		}
		if err != nil {
			t.Fatal(err)
		}
		if f.Exit != nil {
			if f.Exit.Status.Code != 130 {
				t.Fatalf("%+v", f.Exit.Status)
			}
			break
		}
	}
	s.AckExit()
	// Ctrl-D ends a shell.
	if s, err = b.StartExec(b.ctx(), newID(), sandbox.ExecSpec{Argv: []string{"cat"}, Stdin: sandbox.StdinPipe, PTY: &sandbox.WindowSize{Rows: 5, Cols: 5}}); err != nil {
		t.Fatal(err)
	}
	s.WriteStdin(b.ctx(), 0, []byte("\x04"), false)
	if r := collect(t, s); r.st.Code != 0 {
		t.Fatalf("%+v", r)
	}
}

func TestExecSignal(t *testing.T) {
	t.Parallel()
	b := start(t)
	s, err := b.StartExec(b.ctx(), newID(), sandbox.ExecSpec{Argv: []string{"sh", "-c", "trap 'echo usr1; exit 9' USR1; echo ready; while :; do sleep 0.01; done"}})
	if err != nil {
		t.Fatal(err)
	}
	if f, err := s.Recv(); err != nil || string(f.Data) != "ready\n" {
		t.Fatal(err, f)
	}
	s.Signal(10)
	if r := collect(t, s); r.out != "usr1\n" || r.st.Code != 9 {
		t.Fatalf("%+v", r)
	}
}
