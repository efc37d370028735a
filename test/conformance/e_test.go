package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/sandbox"
)

// TestE is the abuse of the API's streams. (E1, E2, E4, E5, E6 are in the tests
// of the API and of crashes.)
func TestE(t *testing.T) {
	l := newLab(t)
	// one after another: they look at the daemon's descriptors
	t.Run("E03SlowClients", func(t *testing.T) { e03Slow(t, l) })
	t.Run("E03HalfClosed", func(t *testing.T) { e03Half(t, l) })
	t.Run("E03Vanishing", func(t *testing.T) { e03Vanish(t, l) })
	t.Run("E03Garbage", func(t *testing.T) { e03Garbage(t, l) })
}

// usable asks the daemon and the neighbour.
func (l *lab) usable(t *testing.T) {
	t.Helper()
	if got := l.neighbour.as(t).sh("echo usable"); got != "usable" {
		t.Errorf("the neighbour says %q", got)
	}
}

func (l *lab) raw(t *testing.T, data string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", l.Addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if _, err := c.Write([]byte(data)); err != nil {
		t.Fatal(err)
	}
	return c
}

const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// E3: clients that send a little and then nothing hold up nobody.
func e03Slow(t *testing.T, l *lab) {
	b := l.box(t, nil)
	path := "/vivarium.v1.ExecService/Attach"
	for i := range 200 {
		switch i % 4 {
		case 0:
			l.raw(t, "POST "+path+" HTTP/1.1\r\nHost: x\r\nAuthori")
		case 1:
			l.raw(t, preface[:10])
		case 2:
			l.raw(t, fmt.Sprintf("POST /vivarium.v1.ExecService/Run HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/connect+json\r\nContent-Length: 1000\r\n\r\n\x00\x00\x00", l.Token))
		case 3:
			l.raw(t, preface+"\x00\x00\x00\x04\x00\x00\x00\x00\x00") // SETTINGS, and no more
		}
	}
	for range 10 {
		l.usable(t)
		if got := b.sh("echo works"); got != "works" {
			t.Errorf("%q", got)
		}
	}
}

// E3: a client that closes its half, or its whole, of a stream ends neither the
// command nor its input, and leaves nothing in the daemon.
func e03Half(t *testing.T, l *lab) {
	b := l.box(t, nil)
	base := countFDs(t, l.Pid())
	for i := range 30 {
		a, err := l.Client.Attach(within(t), &v1.AttachRequest{SandboxId: b.id, Id: fmt.Sprint("half", i), Spec: &v1.ExecSpec{Argv: []string{"cat"}, Stdin: "pipe"}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := a.Receive(); err != nil {
			t.Fatal(err)
		}
		if err := a.Send(&v1.AttachRequest{Stdin: []byte("one ")}); err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 { // until it has arrived; the others go at once
			if m, err := a.Receive(); err != nil || string(m.Stdout) != "one " {
				t.Fatalf("%v, %v", m, err)
			}
		}
		a.Close()
	}
	for i := range 30 {
		id := fmt.Sprint("half", i)
		e, err := l.Client.GetExec(within(t), b.id, id)
		if err != nil || e.State != string(sandbox.ExecRunning) {
			t.Fatalf("%s after its client went: %v, %v", id, e, err)
		}
		a, err := l.Client.Attach(within(t), &v1.AttachRequest{SandboxId: b.id, Id: id})
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if e, err = a.Copy(strings.NewReader("two"), &out, nil); err != nil || e.GetExit().GetCode() != 0 {
			t.Errorf("%s: %v, %v", id, e, err)
		}
		if got := out.String(); got != "one two" && (i%2 == 0 || got != "two") {
			t.Errorf("%s: %q", id, got)
		}
		a.Close()
	}
	eventually(t, "the daemon's descriptors go back", func() bool { return countFDs(t, l.Pid()) <= base+10 })
}

// E3: clients that vanish while they are sent to.
func e03Vanish(t *testing.T, l *lab) {
	b := l.box(t, nil)
	base, threads := countFDs(t, l.Pid()), statusNumber(t, l.Pid(), "Threads")
	for range 30 {
		ctx, cancel := context.WithCancel(within(t))
		s, err := l.Client.Execs.Run(ctx, request(&v1.RunExecRequest{SandboxId: b.id, Spec: &v1.ExecSpec{Argv: []string{"sh", "-c", "yes | head -c 3000000; echo done"}}}))
		if err != nil {
			t.Fatal(err)
		}
		if !s.Receive() {
			t.Fatal(s.Err())
		}
		cancel()
		_ = s.Close()
		wctx, wcancel := context.WithCancel(within(t))
		go func() {
			time.Sleep(20 * time.Millisecond)
			wcancel()
		}()
		_ = l.Client.WatchFiles(wctx, &v1.WatchFilesRequest{SandboxId: b.id, Path: []byte("/")}, func(*v1.FileEvent) error { return nil })
		ectx, ecancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		_ = l.Client.Events(ectx, &v1.WatchEventsRequest{Follow: true, After: -1}, func(*v1.Event) error { return nil })
		ecancel()
	}
	// the commands go on to their end
	list, err := l.Client.ListExecs(within(t), b.id)
	if err != nil || len(list) != 30 {
		t.Fatalf("%d execs, %v", len(list), err)
	}
	for _, x := range list {
		e, err := l.Client.WaitExec(within(t), b.id, x.Id, limit)
		if err != nil || e.GetExit().GetCode() != 0 || e.StdoutLen != 3000000+5 {
			t.Errorf("%v, %v", e, err)
		}
	}
	eventually(t, "the daemon's descriptors go back", func() bool { return countFDs(t, l.Pid()) <= base+10 })
	if n := statusNumber(t, l.Pid(), "Threads"); n > threads+60 {
		t.Errorf("%d threads, %d before", n, threads)
	}
}

// E3: what is no request, and requests that are too large.
func e03Garbage(t *testing.T, l *lab) {
	for _, data := range []string{"\x00\x01\x02\x03", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", strings.Repeat("A", 1<<20), "GET / HTTP/1.1\r\n" + strings.Repeat("X: y\r\n", 100_000), preface + strings.Repeat("\xff", 1<<16)} {
		c, err := net.Dial("tcp", l.Addr)
		if err != nil {
			t.Fatal(err)
		}
		wait := 20 * time.Second
		if len(data) < 1<<16 {
			wait = time.Second // it may be waited for more, as of any slow client
		}
		_ = c.SetDeadline(time.Now().Add(wait))
		_, _ = c.Write([]byte(data)) // it may close before it has all
		_, err = c.Read(make([]byte, 1024))
		var ne net.Error
		if errors.As(err, &ne) && ne.Timeout() && len(data) >= 1<<16 {
			t.Errorf("%d bytes of %q are still waited for", len(data), data[:4])
		}
		c.Close()
	}
	big := strings.Repeat("x", 8<<20)
	_, err := l.Client.StartExec(within(t), l.neighbour.id, "", &v1.ExecSpec{Argv: []string{"echo", big}})
	if err == nil || sandbox.KindOf(err) == sandbox.Internal {
		t.Errorf("a command of 8 MiB: %v", err)
	}
	l.usable(t)
}
