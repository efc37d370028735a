package life

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
	"vivarium/test/fixture"
)

// read reads what there is of an exec's stdout from an offset.
func (e *env) read(t *testing.T, sb, id string, from int64) (out []byte, first int64, dropped bool) {
	t.Helper()
	s, err := e.c.Execs.Output(t.Context(), newRequest(&v1.ReadOutputRequest{SandboxId: sb, Id: id, StdoutOffset: from, StderrOffset: -1}))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	first = -1
	for s.Receive() {
		m := s.Msg()
		if len(m.Stdout) == 0 {
			continue
		}
		if first < 0 {
			first, dropped = m.Offset, m.Dropped
		} else if m.Offset != first+int64(len(out)) {
			t.Errorf("a gap: %d bytes from %d, then %d", len(out), first, m.Offset)
		}
		out = append(out, m.Stdout...)
	}
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
	return out, first, dropped
}

func execIDs(t *testing.T, e *env) {
	sb := e.create(t, spec())
	x := &v1.ExecSpec{Argv: sh("echo x >> /tmp/runs; sleep 1; cat /tmp/runs"), Env: map[string]string{"A": "b"}}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if got, err := e.c.StartExec(t.Context(), sb.Id, "once", x); err != nil || got.Id != "once" {
				t.Errorf("%v, %v", got, err)
			}
		})
	}
	wg.Wait()
	if got, err := e.c.WaitExec(t.Context(), sb.Id, "once", patience); err != nil || got.StdoutLen != 2 {
		t.Errorf("%v, %v", got, err)
	}
	// after it has ended as well
	if got, err := e.c.StartExec(t.Context(), sb.Id, "once", x); err != nil || got.State != "exited" {
		t.Errorf("%v, %v", got, err)
	}
	for what, other := range map[string]*v1.ExecSpec{
		"another command":     {Argv: []string{"true"}, Env: x.Env},
		"another environment": {Argv: x.Argv, Env: map[string]string{"A": "c"}},
		"another directory":   {Argv: x.Argv, Env: x.Env, Workdir: "/tmp"},
	} {
		_, err := e.c.StartExec(t.Context(), sb.Id, "once", other)
		is(t, what, err, sandbox.Exists, "once", true)
	}
	_, err := e.c.StartExec(t.Context(), sb.Id, "main", x)
	is(t, "the id of a main command", err, sandbox.Invalid, "main", true)
	_, err = e.c.StartExec(t.Context(), sb.Id, "probe-1", x)
	is(t, "the id of a probe", err, sandbox.Invalid, "probe-", true)
	_, err = e.c.GetExec(t.Context(), sb.Id, "never")
	is(t, "an exec that never was", err, sandbox.NotFound, "never", false)
	_, err = e.c.WaitExec(t.Context(), sb.Id, "never", 0)
	is(t, "wait for it", err, sandbox.NotFound, "never", false)
}

func outputAgain(t *testing.T, e *env) {
	sb := e.create(t, spec())
	const want = "0123456789\n"
	if _, err := e.c.RunExec(t.Context(), sb.Id, "x", &v1.ExecSpec{Argv: sh("echo 0123456789; echo err >&2")}, nil, nil); err != nil {
		t.Fatal(err)
	}
	check := func(when string) {
		for _, from := range []int64{0, 5, 10} {
			if out, at, dropped := e.read(t, sb.Id, "x", from); string(out) != want[from:] || at != from || dropped {
				t.Errorf("%s: from %d: %q at %d", when, from, out, at)
			}
		}
		if out, _, _ := e.read(t, sb.Id, "x", 11); len(out) != 0 {
			t.Errorf("%s: behind the end: %q", when, out)
		}
		if out, _, _ := e.read(t, sb.Id, "x", 1<<40); len(out) != 0 {
			t.Errorf("%s: far behind the end: %q", when, out)
		}
		var errs bytes.Buffer
		x, err := e.c.Output(t.Context(), &v1.ReadOutputRequest{SandboxId: sb.Id, Id: "x", StdoutOffset: -1, Follow: true}, nil, &errs)
		if err != nil || errs.String() != "err\n" || x.State != "exited" || x.StdoutLen != 11 || x.StderrLen != 4 {
			t.Errorf("%s: %q, %v, %v", when, errs.String(), x, err)
		}
	}
	check("while the sandbox lives")
	if _, err := e.c.Stop(t.Context(), sb.Id, 0); err != nil {
		t.Fatal(err)
	}
	check("after its end")
	if l, err := e.c.ListExecs(t.Context(), sb.Id); err != nil || len(l) != 1 || l[0].Exit.GetCode() != 0 {
		t.Errorf("%v, %v", l, err)
	}
	if err := e.c.Remove(t.Context(), sb.Id, false); err != nil {
		t.Fatal(err)
	}
	if out, _, _ := e.read(t, sb.Id, "x", 0); len(out) != 0 {
		t.Errorf("after it was removed: %q", out)
	}
}

// A10 as far as what is kept goes.
func outputBounded(t *testing.T, e *env) {
	sb := e.create(t, spec())
	// nobody reads: the command is not held up, the oldest output goes
	x, err := e.c.StartExec(t.Context(), sb.Id, "flood", &v1.ExecSpec{Argv: sh("seq -w 1 400000")})
	if err != nil {
		t.Fatal(err)
	}
	if x, err = e.c.WaitExec(t.Context(), sb.Id, "flood", patience); err != nil || x.Exit.GetCode() != 0 {
		t.Fatalf("%v, %v", x, err)
	}
	const length = 400000 * 7
	if x.StdoutLen != length || x.StdoutFirst != length-spoolSize {
		t.Errorf("from %d to %d", x.StdoutFirst, x.StdoutLen)
	}
	out, first, dropped := e.read(t, sb.Id, "flood", 0)
	if !dropped || first != x.StdoutFirst || len(out) != spoolSize {
		t.Errorf("%d bytes from %d, dropped %v", len(out), first, dropped)
	}
	// what is held is right, byte by byte
	for i, c := range out {
		o := first + int64(i)
		if want := fmt.Sprintf("%06d\n", o/7+1)[o%7]; c != want {
			t.Fatalf("at %d: %q, want %q", o, c, want)
		}
	}
	if _, at, dropped := e.read(t, sb.Id, "flood", length-7); dropped || at != length-7 {
		t.Errorf("what is held is marked as dropped: %d", at)
	}
	// who follows loses nothing
	h := sha256.New()
	if _, err := e.c.RunExec(t.Context(), sb.Id, "", &v1.ExecSpec{Argv: sh("seq -w 1 400000")}, h, nil); err != nil {
		t.Fatal(err)
	}
	w := sha256.New()
	for i := range 400000 {
		fmt.Fprintf(w, "%06d\n", i+1)
	}
	if !bytes.Equal(h.Sum(nil), w.Sum(nil)) {
		t.Error("a follower got something else")
	}
}

func stdin(t *testing.T, e *env) {
	sb := e.create(t, spec())
	ctx := t.Context()
	data := make([]byte, 300_000)
	for i := range data {
		data[i] = byte(i * i >> 3) // 8-bit clean (report 6)
	}
	if _, err := e.c.StartExec(ctx, sb.Id, "sum", &v1.ExecSpec{Argv: []string{"sha256sum"}, Stdin: "pipe"}); err != nil {
		t.Fatal(err)
	}
	for off := 0; off < len(data); off += 100_000 {
		for range 2 { // a retry is skipped
			n, err := e.c.WriteStdin(ctx, sb.Id, "sum", int64(off), data[off:off+100_000], false)
			if err != nil || n != int64(off+100_000) {
				t.Fatalf("at %d: %d, %v", off, n, err)
			}
		}
	}
	// one that overlaps is cut
	if n, err := e.c.WriteStdin(ctx, sb.Id, "sum", 299_990, append(slices.Clone(data[299_990:]), "more"...), true); err != nil || n != 300_004 {
		t.Errorf("%d, %v", n, err)
	}
	if _, err := e.c.WriteStdin(ctx, sb.Id, "sum", 300_004, nil, true); err != nil { // the end again
		t.Logf("the end again: %v", err)
	}
	if x, err := e.c.WaitExec(ctx, sb.Id, "sum", patience); err != nil || x.Exit.GetCode() != 0 {
		t.Fatalf("%v, %v", x, err)
	}
	sum := sha256.Sum256(append(data, "more"...))
	if out, _, _ := e.read(t, sb.Id, "sum", 0); !strings.HasPrefix(string(out), hex.EncodeToString(sum[:])) {
		t.Errorf("got %q", out)
	}
	if _, err := e.c.StartExec(ctx, sb.Id, "gap", &v1.ExecSpec{Argv: []string{"cat"}, Stdin: "pipe"}); err != nil {
		t.Fatal(err)
	}
	_, err := e.c.WriteStdin(ctx, sb.Id, "gap", 5, []byte("x"), false)
	if k := sandbox.KindOf(err); k != sandbox.Invalid && k != sandbox.Conflict {
		t.Errorf("bytes are left out: %v", err)
	}
	// without, it is /dev/null, explicitly (report 4)
	if out, exit := e.run(t, sb.Id, sh("cat; echo end")...); out != "end\n" || exit.Code != 0 {
		t.Errorf("%q, %v", out, exit)
	}
	if _, err := e.c.StartExec(ctx, sb.Id, "none", &v1.ExecSpec{Argv: []string{"sleep", "1000"}}); err != nil {
		t.Fatal(err)
	}
	_, err = e.c.WriteStdin(ctx, sb.Id, "none", 0, []byte("x"), false)
	is(t, "input for one that has none", err, sandbox.Conflict, "none", true)
}

// receive reads an attachment until its output so far ends in text.
func receive(t *testing.T, a *client.Attachment, text string) string {
	t.Helper()
	var all []byte
	for !bytes.Contains(all, []byte(text)) {
		m, err := a.Receive()
		if err != nil {
			t.Fatalf("after %q: %v", all, err)
		}
		all = append(all, m.Stdout...)
	}
	return string(all)
}

func attach(t *testing.T, e *env) {
	sb := e.create(t, spec())
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	a, err := e.c.Attach(ctx, &v1.AttachRequest{SandboxId: sb.Id, Id: "cat", Spec: &v1.ExecSpec{Argv: []string{"cat"}, Stdin: "pipe"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Send(&v1.AttachRequest{Stdin: []byte("one\n")}); err != nil {
		t.Fatal(err)
	}
	receive(t, a, "one\n")
	a.Close() // detached, without the end of its input
	if x, err := e.c.GetExec(ctx, sb.Id, "cat"); err != nil || x.State != "running" || x.StdinLen != 4 {
		t.Fatalf("detached: %v, %v", x, err)
	}
	b, err := e.c.Attach(ctx, &v1.AttachRequest{SandboxId: sb.Id, Id: "cat", StdoutOffset: a.StdoutNext})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Send(&v1.AttachRequest{Stdin: []byte("two\n"), StdinEof: true}); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	x, err := b.Copy(nil, &out, nil)
	if err != nil || out.String() != "two\n" || x.State != "exited" || x.Exit.Code != 0 {
		t.Errorf("%q, %v, %v", out.String(), x, err)
	}
	b.Close()
	// of what has ended, all of it
	c, err := e.c.Attach(ctx, &v1.AttachRequest{SandboxId: sb.Id, Id: "cat"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	out.Reset()
	if x, err := c.Copy(nil, &out, nil); err != nil || out.String() != "one\ntwo\n" || x.State != "exited" {
		t.Errorf("%q, %v, %v", out.String(), x, err)
	}
}

// Reports 1, 3 and 5: a command is not tied to the connection that started it,
// and has no deadline of its own unless it was given one.
func clientGoesAway(t *testing.T, e *env) {
	sb := e.create(t, spec())
	c, err := client.New(e.Addr, e.Token)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	seen := &finder{text: "begun\n"}
	_, err = c.RunExec(ctx, sb.Id, "x", &v1.ExecSpec{Argv: sh("echo begun; while ! [ -e /tmp/go ]; do sleep 0.1; done; echo over; exit 6")}, seen, nil)
	if err != errFound {
		t.Fatal(err)
	}
	cancel()
	c.Close()
	time.Sleep(200 * time.Millisecond)
	if x, err := e.c.GetExec(t.Context(), sb.Id, "x"); err != nil || x.State != "running" {
		t.Fatalf("%v, %v", x, err)
	}
	if _, exit := e.run(t, sb.Id, "touch", "/tmp/go"); exit.Code != 0 {
		t.Fatal(exit)
	}
	var out bytes.Buffer
	x, err := e.c.Output(t.Context(), &v1.ReadOutputRequest{SandboxId: sb.Id, Id: "x", Follow: true}, &out, nil)
	if err != nil || out.String() != "begun\nover\n" || x.Exit.GetCode() != 6 {
		t.Errorf("%q, %v, %v", out.String(), x, err)
	}
}

// D4, D12
func signals(t *testing.T, e *env) {
	sb := e.create(t, spec())
	for i, sig := range []unix.Signal{unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGKILL, unix.SIGUSR1} {
		id := fmt.Sprint("s", i)
		if _, err := e.c.StartExec(t.Context(), sb.Id, id, &v1.ExecSpec{Argv: []string{"sleep", "1000"}}); err != nil {
			t.Fatal(err)
		}
		if err := e.c.Signal(t.Context(), sb.Id, id, int(sig)); err != nil {
			t.Errorf("%v: %v", sig, err)
		}
		x, err := e.c.WaitExec(t.Context(), sb.Id, id, patience)
		if err != nil || x.Exit.GetSignal() != int32(sig) || x.Exit.Code != 128+int32(sig) || x.Exit.TimedOut {
			t.Errorf("%v: %v, %v", sig, x, err)
		}
		if err := e.c.Signal(t.Context(), sb.Id, id, int(sig)); err != nil {
			t.Errorf("%v to one that has ended: %v", sig, err)
		}
	}
	// one that handles it
	if _, err := e.c.StartExec(t.Context(), sb.Id, "trap", &v1.ExecSpec{Argv: sh(`trap "echo got; exit 3" TERM; echo up; while :; do sleep 1 & wait; done`)}); err != nil {
		t.Fatal(err)
	}
	e.until(t, sb.Id, "trap", "up")
	if err := e.c.Signal(t.Context(), sb.Id, "trap", int(unix.SIGTERM)); err != nil {
		t.Fatal(err)
	}
	if x, err := e.c.WaitExec(t.Context(), sb.Id, "trap", patience); err != nil || x.Exit.GetCode() != 3 || x.Exit.Signal != 0 {
		t.Errorf("%v, %v", x, err)
	}
	for _, n := range []int{-1, 0, 65} {
		is(t, fmt.Sprint("signal ", n), e.c.Signal(t.Context(), sb.Id, "trap", n), sandbox.Invalid, "1 to 64", false)
	}
}

// D12
func exitCodes(t *testing.T, e *env) {
	sb := e.create(t, spec())
	// all of them, in few calls
	out, exit := e.run(t, sb.Id, sh("i=0; while [ $i -lt 256 ]; do sh -c \"exit $i\"; [ $? = $i ] || echo $i; i=$((i+1)); done")...)
	if out != "" || exit.Code != 0 {
		t.Errorf("%q, %v", out, exit)
	}
	for _, code := range []int32{0, 1, 2, 125, 126, 127, 128, 137, 255} {
		if _, exit := e.run(t, sb.Id, "sh", "-c", fmt.Sprint("exit ", code)); exit.Code != code || exit.Signal != 0 || exit.Error != "" {
			t.Errorf("%d: %v", code, exit)
		}
	}
}

func resize(t *testing.T, e *env) {
	sb := e.create(t, spec())
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	a, err := e.c.Attach(ctx, &v1.AttachRequest{SandboxId: sb.Id, Id: "tty", Spec: &v1.ExecSpec{Argv: sh(`trap "stty size" WINCH; stty size; while :; do sleep 0.1; done`), Pty: &v1.WindowSize{Rows: 20, Cols: 70}}})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	receive(t, a, "20 70\r\n")
	if err := a.Send(&v1.AttachRequest{Resize: &v1.WindowSize{Rows: 33, Cols: 99}}); err != nil {
		t.Fatal(err)
	}
	receive(t, a, "33 99\r\n")
	if err := e.c.Resize(ctx, sb.Id, "tty", 40, 100); err != nil {
		t.Fatal(err)
	}
	receive(t, a, "40 100\r\n")
	if err := a.Send(&v1.AttachRequest{Stdin: []byte{3}}); err != nil { // Ctrl-C
		t.Fatal(err)
	}
	if x, err := e.c.WaitExec(ctx, sb.Id, "tty", patience); err != nil || x.Exit.GetCode() != 130 {
		t.Errorf("%v, %v", x, err)
	}
	if _, err := e.c.StartExec(ctx, sb.Id, "pipe", &v1.ExecSpec{Argv: []string{"sleep", "1000"}}); err != nil {
		t.Fatal(err)
	}
	is(t, "size of what is no terminal", e.c.Resize(ctx, sb.Id, "pipe", 1, 1), sandbox.Conflict, "terminal", false)
	is(t, "a size that is none", e.c.Resize(ctx, sb.Id, "tty", 1<<20, 1), sandbox.Invalid, "terminal", false)
}

// Reports 3 and 8: the whole tree goes, and it says so.
func execTimeout(t *testing.T, e *env) {
	sb := e.create(t, spec())
	out, exit := e.runSpec(t, sb.Id, &v1.ExecSpec{Argv: sh(`trap "" TERM; echo begun; setsid sleep 1234 & sleep 1234 & (sleep 1234; true) & wait`), Timeout: dur(time.Second)})
	if out != "begun\n" || !exit.TimedOut || exit.Code != 137 {
		t.Errorf("%q, %v", out, exit)
	}
	if out, _ := e.run(t, sb.Id, sh("ps -o args | grep '[s]leep 1234'")...); out != "" {
		t.Errorf("still there: %q", out)
	}
	if _, exit := e.runSpec(t, sb.Id, &v1.ExecSpec{Argv: sh("exit 2"), Timeout: dur(patience)}); exit.TimedOut || exit.Code != 2 {
		t.Errorf("%v", exit)
	}
}

func outputModes(t *testing.T, e *env) {
	sb := e.create(t, spec())
	for mode, want := range map[string][2]string{"": {"1\n3\n", "2\n"}, "separate": {"1\n3\n", "2\n"}, "merged": {"1\n2\n3\n", ""}, "discard": {"", ""}} {
		var out, errs bytes.Buffer
		x, err := e.c.RunExec(t.Context(), sb.Id, "", &v1.ExecSpec{Argv: sh("echo 1; echo 2 >&2; echo 3; exit 9"), Output: mode}, &out, &errs)
		if err != nil || out.String() != want[0] || errs.String() != want[1] || x.Exit.GetCode() != 9 {
			t.Errorf("%q: %q, %q, %v, %v", mode, out.String(), errs.String(), x, err)
		}
	}
}

func execEnvironment(t *testing.T, e *env) {
	s := spec()
	s.Name, s.Env, s.Workdir, s.User = "envtest", map[string]string{"A": "sandbox", "B": "sandbox"}, "/var", "user"
	sb := e.create(t, s)
	out, _ := e.runSpec(t, sb.Id, &v1.ExecSpec{Argv: sh("echo $A $B $HOSTNAME $PATH; pwd; id -un; id -gn; id -Gn; hostname; echo $HOME"), Env: map[string]string{"B": "exec"}})
	if want := "sandbox exec envtest /bin:/sbin\n/var\nuser\nuser\nuser extra\nenvtest\n/home/user\n"; out != want {
		t.Errorf("got  %q\nwant %q", out, want)
	}
	for user, want := range map[string]string{"root": "0:0", "1000": "1000:1000", "1234": "1234:0", "user:nogroup": "1000:65534", "1234:4321": "1234:4321", "nobody": "65534:65534"} {
		if out, exit := e.runSpec(t, sb.Id, &v1.ExecSpec{Argv: sh("echo $(id -u):$(id -g)"), User: user}); out != want+"\n" || exit.Code != 0 {
			t.Errorf("user %s: %q, %v", user, out, exit)
		}
	}
	if out, _ := e.runSpec(t, sb.Id, &v1.ExecSpec{Argv: []string{"pwd"}, Workdir: "/usr/bin"}); out != "/usr/bin\n" {
		t.Errorf("workdir: %q", out)
	}
	// report 15: a file written by the API is the command's user's own
	if _, err := e.c.WriteFile(t.Context(), &v1.WriteFileRequest{SandboxId: sb.Id, Path: []byte("/tmp/mine")}, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	if out, _ := e.run(t, sb.Id, sh("stat -c %U /tmp/mine; echo y >> /tmp/mine && cat /tmp/mine")...); out != "user\nxy\n" {
		t.Errorf("%q", out)
	}
}

func execBadInput(t *testing.T, e *env) {
	sb := e.create(t, spec())
	if _, exit := e.run(t, sb.Id, sh("echo '#!/bin/sh' > /tmp/plain; mkdir /tmp/dir; echo '#!/no/such' > /tmp/interp; chmod +x /tmp/interp")...); exit.Code != 0 {
		t.Fatal(exit)
	}
	// what cannot be started has a status, as in a shell
	for name, c := range map[string]struct {
		x    *v1.ExecSpec
		code int32
		kind sandbox.Kind
	}{
		"not found":             {&v1.ExecSpec{Argv: []string{"no-such-command"}}, 127, sandbox.NotFound},
		"no such path":          {&v1.ExecSpec{Argv: []string{"/no/such"}}, 127, sandbox.NotFound},
		"not executable":        {&v1.ExecSpec{Argv: []string{"/tmp/plain"}}, 126, sandbox.Denied},
		"a directory":           {&v1.ExecSpec{Argv: []string{"/tmp/dir"}}, 126, sandbox.Denied},
		"no such interpreter":   {&v1.ExecSpec{Argv: []string{"/tmp/interp"}}, 127, sandbox.NotFound},
		"no such directory":     {&v1.ExecSpec{Argv: []string{"true"}, Workdir: "/no/such"}, 126, sandbox.NotFound},
		"directory is a file":   {&v1.ExecSpec{Argv: []string{"true"}, Workdir: "/etc/passwd"}, 126, ""},
		"no such user":          {&v1.ExecSpec{Argv: []string{"true"}, User: "no-such-user"}, 126, sandbox.NotFound},
		"no such group":         {&v1.ExecSpec{Argv: []string{"true"}, User: "root:no-such-group"}, 126, sandbox.NotFound},
		"not in this user's":    {&v1.ExecSpec{Argv: []string{"true"}, User: "4294967296"}, 126, ""},
		"an empty PATH":         {&v1.ExecSpec{Argv: []string{"true"}, Env: map[string]string{"PATH": ""}}, 127, sandbox.NotFound},
		"a name that is a path": {&v1.ExecSpec{Argv: []string{"../bin/true"}}, 0, ""},
	} {
		_, exit := e.runSpec(t, sb.Id, c.x)
		if exit.Code != c.code || c.kind != "" && exit.ErrorKind != string(c.kind) || (exit.Error == "") != (c.code == 0) {
			t.Errorf("%s: %v", name, exit)
		}
	}
	// what is no command at all is an error
	for name, c := range map[string]struct {
		x    *v1.ExecSpec
		says string
	}{
		"nothing":           {&v1.ExecSpec{}, "command"},
		"an empty name":     {&v1.ExecSpec{Argv: []string{""}}, ""},
		"NUL":               {&v1.ExecSpec{Argv: []string{"a\x00b"}}, "NUL"},
		"env with =":        {&v1.ExecSpec{Argv: []string{"a"}, Env: map[string]string{"a=b": ""}}, "environment"},
		"stdin":             {&v1.ExecSpec{Argv: []string{"a"}, Stdin: "tty"}, "stdin"},
		"output":            {&v1.ExecSpec{Argv: []string{"a"}, Output: "file"}, "output"},
		"negative timeout":  {&v1.ExecSpec{Argv: []string{"a"}, Timeout: dur(-1)}, "timeout"},
		"a huge argument":   {&v1.ExecSpec{Argv: []string{"a", strings.Repeat("x", 2<<20)}}, "bytes"},
		"too many of them":  {&v1.ExecSpec{Argv: slices.Repeat([]string{"a"}, 10000)}, "8192"},
		"a terminal's size": {&v1.ExecSpec{Argv: []string{"a"}, Pty: &v1.WindowSize{Rows: 1 << 20}}, "terminal"},
	} {
		_, err := e.c.StartExec(t.Context(), sb.Id, "", c.x)
		if name == "an empty name" && err == nil { // as execve has it
			continue
		}
		is(t, name, err, sandbox.Invalid, c.says, false)
	}
	for _, id := range []string{"../x", "a/b", ".", "a b", "a\nb", strings.Repeat("a", 200)} {
		_, err := e.c.StartExec(t.Context(), sb.Id, id, &v1.ExecSpec{Argv: []string{"true"}})
		is(t, "id "+id, err, sandbox.Invalid, "exec", false)
	}
}

func execLimit(t *testing.T, e *env) {
	sb := e.create(t, spec())
	for i := range 20 {
		if _, err := e.c.StartExec(t.Context(), sb.Id, fmt.Sprint("x", i), &v1.ExecSpec{Argv: []string{"sleep", "1000"}}); err != nil {
			t.Fatal(err)
		}
	}
	_, err := e.c.StartExec(t.Context(), sb.Id, "more", &v1.ExecSpec{Argv: []string{"true"}})
	is(t, "one more than may run", err, sandbox.Exhausted, "20", true)
	if err := e.c.Signal(t.Context(), sb.Id, "x0", 9); err != nil {
		t.Fatal(err)
	}
	if _, err := e.c.WaitExec(t.Context(), sb.Id, "x0", patience); err != nil {
		t.Fatal(err)
	}
	eventually(t, "there is room again", func() bool {
		_, err := e.c.StartExec(t.Context(), sb.Id, "more", &v1.ExecSpec{Argv: []string{"true"}})
		return err == nil
	})
}

func imageConfig(t *testing.T, e *env) {
	e = e.tenant(t, "imageconfig")
	load := func(tag string, c *v1.ImageConfig) {
		if _, err := e.c.LoadImage(t.Context(), &v1.LoadImageRequest{Tag: tag, Format: "rootfs", Config: c}, bytes.NewReader(fixture.Busybox(t))); err != nil {
			t.Fatal(err)
		}
	}
	load("full:1", &v1.ImageConfig{Entrypoint: []string{"/bin/echo", "ent"}, Cmd: []string{"cmd"}, Env: []string{"PATH=/bin", "A=image", "B=image"}, WorkingDir: "/usr/bin", User: "user"})
	load("cmd:1", &v1.ImageConfig{Cmd: []string{"sh", "-c", "echo $A; exit 3"}, Env: []string{"PATH=/bin", "A=image"}})
	load("none:1", &v1.ImageConfig{})
	for name, c := range map[string]struct {
		s    *v1.SandboxSpec
		want string
		code int32
	}{
		"the image's":        {&v1.SandboxSpec{Image: "full:1", RunImageCommand: true}, "ent cmd\n", 0},
		"a command":          {&v1.SandboxSpec{Image: "full:1", Command: []string{"a", "b"}}, "ent a b\n", 0},
		"an entrypoint":      {&v1.SandboxSpec{Image: "full:1", Entrypoint: []string{"/bin/echo", "new"}}, "new\n", 0},
		"both":               {&v1.SandboxSpec{Image: "full:1", Entrypoint: []string{"/bin/echo", "new"}, Command: []string{"c"}}, "new c\n", 0},
		"no entrypoint":      {&v1.SandboxSpec{Image: "full:1", Entrypoint: []string{""}, Command: sh("pwd; id -un; echo $A $B"), Env: map[string]string{"B": "spec"}}, "/usr/bin\nuser\nimage spec\n", 0},
		"the image's cmd":    {&v1.SandboxSpec{Image: "cmd:1", RunImageCommand: true}, "image\n", 3},
		"user and directory": {&v1.SandboxSpec{Image: "full:1", Entrypoint: []string{""}, Command: sh("pwd; id -un"), User: "nobody", Workdir: "/tmp"}, "/tmp\nnobody\n", 0},
	} {
		sb := e.create(t, c.s)
		d := e.death(t, sb.Id)
		if out, _, _ := e.read(t, sb.Id, "main", 0); string(out) != c.want || d.Exit.GetCode() != c.code {
			t.Errorf("%s: %q, %v", name, out, d)
		}
	}
	_, err := e.c.Create(t.Context(), &v1.SandboxSpec{Image: "none:1", RunImageCommand: true}, client.CreateOptions{Wait: true})
	is(t, "an image that names no command", err, sandbox.Invalid, "command", true)
	// not asked to run it: it lives, with the image's user and directory
	sb := e.create(t, &v1.SandboxSpec{Image: "full:1"})
	if out, _ := e.run(t, sb.Id, sh("pwd; id -un; echo $A")...); out != "/usr/bin\nuser\nimage\n" {
		t.Errorf("%q", out)
	}
	if l, err := e.c.ListExecs(t.Context(), sb.Id); err != nil || len(l) != 1 {
		t.Errorf("%v, %v", l, err)
	}
}

// Of a sandbox's ended commands so much output is kept together; the oldest go,
// never that of the main command.
func oldOutput(t *testing.T, e *env) {
	sb := e.create(t, spec(sh("echo first; exec sleep 1000")...))
	const each = 5 // 1 MiB is kept, and an exec fills 256 KiB
	for i := range each {
		if _, err := e.c.RunExec(t.Context(), sb.Id, fmt.Sprint("x", i), &v1.ExecSpec{Argv: sh("seq -w 1 60000")}, nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the oldest is forgotten", func() bool {
		_, err := e.c.GetExec(t.Context(), sb.Id, "x0")
		return sandbox.KindOf(err) == sandbox.NotFound
	})
	if out, _, _ := e.read(t, sb.Id, fmt.Sprint("x", each-1), 0); len(out) != spoolSize {
		t.Errorf("of the newest %d bytes are left", len(out))
	}
	if out, _, _ := e.read(t, sb.Id, "main", 0); string(out) != "first\n" {
		t.Errorf("of the main command %q", out)
	}
}

// A sandbox ends while commands are being started in it, by several clients: each
// start either gives a command that ended with it or says that it is gone, and the
// daemon goes on.
func startsMeetEnd(t *testing.T, e *env) {
	e = e.tenant(t, "starts")
	for round := range 12 {
		sb := e.create(t, spec("sleep", "1000"))
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for {
					_, err := e.c.StartExec(t.Context(), sb.Id, "", &v1.ExecSpec{Argv: sh("echo x; sleep 0.02")})
					if err == nil {
						continue
					}
					if k := sandbox.KindOf(err); k != sandbox.Gone && k != sandbox.NotFound {
						t.Errorf("start: %v (%s)", err, k)
					}
					return
				}
			})
		}
		time.Sleep(time.Duration(round*5) * time.Millisecond)
		if _, err := e.c.Stop(t.Context(), sb.Id, time.Duration(round)*time.Millisecond); err != nil {
			t.Error(err)
		}
		wg.Wait()
		l, err := e.c.ListExecs(t.Context(), sb.Id)
		if err != nil {
			t.Error(err)
		}
		for _, x := range l {
			if x.State != string(sandbox.ExecExited) && x.State != string(sandbox.ExecLost) {
				t.Errorf("%s is %s in a sandbox that has ended", x.Id, x.State)
			}
		}
	}
}
