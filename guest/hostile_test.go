package guest_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"vivarium/guest"
	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// fake is a guest that knows the key and then does as script says.
func fake(t *testing.T, o guest.Options, script func(c net.Conn, r *wire.Reader)) *guest.Client {
	t.Helper()
	key := make([]byte, wire.KeySize)
	dial := func(context.Context) (net.Conn, error) {
		host, inside := net.Pipe()
		go func() {
			defer inside.Close()
			if wire.GuestHandshake(inside, key) != nil {
				return
			}
			script(inside, wire.NewReader(inside, wire.GuestLimit))
		}()
		return host, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if o.StartTimeout == 0 {
		o.StartTimeout = 2 * time.Second
	}
	c, err := guest.Connect(ctx, dial, key, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func frame(t wire.Type, fill func([]byte) []byte) []byte { return wire.AppendFrame(nil, t, fill) }

func output(off int64, data string) []byte {
	return frame(wire.TStdout, func(b []byte) []byte { return append(wire.AppendInt(b, off), data...) })
}

func started(s wire.Started) []byte { return frame(wire.TStarted, s.Append) }

func exit(x wire.Exit) []byte { return frame(wire.TExit, x.Append) }

// F4: a guest that lies about an exec gives an error, and what it said before
// the lie is all that was believed.
func TestHostileExec(t *testing.T) {
	t.Parallel()
	ok := started(wire.Started{PID: 7, StdinClosed: true})
	for name, say := range map[string][][]byte{
		"nothing":                    {},
		"rubbish":                    {[]byte("HTTP/1.1 400 Bad Request\r\n\r\n")},
		"unknown frame":              {ok, {0xee, 0, 0, 0}},
		"a frame of the host's":      {ok, frame(wire.TStdin, func(b []byte) []byte { return append(b, 0, 0) })},
		"frame too long":             {ok, {byte(wire.TStdout), 0xff, 0xff, 0xff}},
		"long started":               {{byte(wire.TStarted), 0x00, 0x40, 0x01}},
		"cut frame":                  {ok, output(0, "data")[:6]},
		"gap":                        {ok, output(0, "data"), output(5, "x")},
		"repeated":                   {ok, output(0, "data"), output(0, "data")},
		"empty output":               {ok, output(0, "")},
		"offset beyond all":          {ok, frame(wire.TStdout, func(b []byte) []byte { return append(wire.AppendUint(b, 1<<63), 'x') })},
		"exit before output":         {ok, output(0, "data"), exit(wire.Exit{})},
		"exit with output to come":   {ok, exit(wire.Exit{Stdout: 5})},
		"exit code 300":              {ok, exit(wire.Exit{Status: sandbox.ExitStatus{Code: 300}})},
		"stdin never sent":           {ok, frame(wire.TStdinAck, func(b []byte) []byte { return append(wire.AppendInt(b, 9), 0) })},
		"started twice":              {ok, ok},
		"negative pid":               {frame(wire.TStarted, func(b []byte) []byte { return append(wire.AppendUint(b, 1<<63), make([]byte, 10)...) })},
		"left over":                  {append([]byte{byte(wire.TStarted), 0, 0, 100}, make([]byte, 100)...)},
		"error that is none":         {frame(wire.TError, func(b []byte) []byte { return append(b, 0xff, 0xff) })},
		"error in the middle, wrong": {ok, frame(wire.TError, nil)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := fake(t, guest.Options{}, func(c net.Conn, r *wire.Reader) {
				if ty, _, err := r.Next(); err != nil || ty != wire.TStart {
					return
				}
				for _, b := range say {
					if _, err := c.Write(b); err != nil {
						return
					}
				}
			})
			s, err := c.StartExec(t.Context(), "x", sandbox.ExecSpec{Argv: []string{"x"}})
			for err == nil {
				var f guest.Frame
				if f, err = s.Recv(); err == nil && f.Exit != nil {
					t.Fatalf("an exit was believed: %+v", f.Exit)
				}
			}
			if err == io.EOF || sandbox.KindOf(err) != sandbox.Unavailable {
				t.Fatalf("%v (%s)", err, sandbox.KindOf(err))
			}
			if s != nil && s.AckExit() == nil {
				t.Fatal("acknowledged")
			}
		})
	}
}

// User report 2, F4: silence ends, whoever waits.
func TestHostileSilence(t *testing.T) {
	t.Parallel()
	c := fake(t, guest.Options{StartTimeout: 100 * time.Millisecond}, func(c net.Conn, r *wire.Reader) { r.Next(); io.Copy(io.Discard, c) })
	if _, err := c.StartExec(t.Context(), "x", sandbox.ExecSpec{Argv: []string{"x"}}); !errors.Is(err, sandbox.Timeout) {
		t.Fatal(err)
	}
	if _, err := c.Stat(t.Context(), "", "/", true); !errors.Is(err, sandbox.Timeout) {
		t.Fatal(err)
	}
	if _, err := c.ReadFile(t.Context(), "", "/x", 0, -1); !errors.Is(err, sandbox.Timeout) {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	go cancel()
	if _, err := c.WriteFile(ctx, "", "/x", strings.NewReader("x"), guest.WriteOptions{}); err == nil {
		t.Fatal("written by nobody")
	}

	// A guest that starts an exec and then freezes: the pings find out.
	c = fake(t, guest.Options{PingInterval: 20 * time.Millisecond, PingTimeout: 100 * time.Millisecond}, func(c net.Conn, r *wire.Reader) {
		if ty, _, _ := r.Next(); ty == wire.TStart {
			c.Write(started(wire.Started{PID: 7}))
		}
		io.Copy(io.Discard, c)
	})
	s, err := c.StartExec(t.Context(), "x", sandbox.ExecSpec{Argv: []string{"x"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Recv(); !errors.Is(err, sandbox.Unavailable) {
		t.Fatal(err)
	}
}

// Whoever knows that the sandbox is gone tells everybody who waits.
func TestClientFail(t *testing.T) {
	t.Parallel()
	c := fake(t, guest.Options{}, func(c net.Conn, r *wire.Reader) {
		if ty, _, _ := r.Next(); ty == wire.TStart {
			c.Write(started(wire.Started{PID: 7}))
		}
		io.Copy(io.Discard, c)
	})
	s, err := c.StartExec(t.Context(), "x", sandbox.ExecSpec{Argv: []string{"x"}, Stdin: sandbox.StdinPipe})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		time.Sleep(10 * time.Millisecond)
		c.Fail(sandbox.Gone.Errorf("the sandbox has ended"))
	}()
	if _, err := s.Recv(); !errors.Is(err, sandbox.Gone) {
		t.Fatal(err)
	}
	if err := s.WriteStdin(t.Context(), 0, []byte("x"), false); !errors.Is(err, sandbox.Gone) {
		t.Fatal(err)
	}
	if _, err := c.StartExec(t.Context(), "y", sandbox.ExecSpec{Argv: []string{"x"}}); !errors.Is(err, sandbox.Gone) {
		t.Fatal(err)
	}
	if _, err := c.Ping(t.Context()); !errors.Is(err, sandbox.Gone) {
		t.Fatal(err)
	}
}

// F4: files.
func TestHostileFiles(t *testing.T) {
	t.Parallel()
	fi := wire.File{Name: "/x", Size: 3}
	info := frame(wire.TInfo, fi.Append)
	data := func(s string) []byte { return frame(wire.TData, func(b []byte) []byte { return append(b, s...) }) }
	answer := func(l ...[]byte) *guest.Client {
		return fake(t, guest.Options{}, func(c net.Conn, r *wire.Reader) {
			r.Next()
			go io.Copy(io.Discard, c)
			for _, b := range l {
				if _, err := c.Write(b); err != nil {
					return
				}
			}
		})
	}
	unavailable := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, sandbox.Unavailable) {
			t.Errorf("%s: %v", what, err)
		}
	}
	// More than was asked for.
	r, err := answer(info, data("abc"), data("def")).ReadFile(t.Context(), "", "/x", 0, 4)
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(r)
	if unavailable("more", err); string(got) != "abc" {
		t.Errorf("%q", got)
	}
	r.Close()
	r, err = answer(info, data("abc")).ReadFile(t.Context(), "", "/x", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.ReadAll(r)
	unavailable("cut", err)
	_, err = answer(data("abc")).ReadFile(t.Context(), "", "/x", 0, -1)
	unavailable("no info", err)
	done := wire.Done{Bytes: 99}
	_, err = answer(frame(wire.TDone, done.Append)).WriteFile(t.Context(), "", "/x", strings.NewReader("abc"), guest.WriteOptions{})
	unavailable("wrong count", err)
	_, err = answer(frame(wire.TCredit, func(b []byte) []byte { return wire.AppendInt(b, 1<<40) })).WriteFile(t.Context(), "", "/x", strings.NewReader("abc"), guest.WriteOptions{})
	unavailable("credit for nothing", err)
	// A directory without end.
	page := frame(wire.TPage, func(b []byte) []byte {
		for range 1000 {
			b = fi.Append(b)
		}
		return b
	})
	c := fake(t, guest.Options{}, func(c net.Conn, r *wire.Reader) {
		r.Next()
		for {
			if _, err := c.Write(page); err != nil {
				return
			}
		}
	})
	n := 0
	err = c.ListDir(t.Context(), "", "/", 5500, func(sandbox.FileInfo) error { n++; return nil })
	if unavailable("endless list", err); n != 5500 {
		t.Error(n)
	}
	err = answer(frame(wire.TPage, func(b []byte) []byte { return append(fi.Append(b), 0xff) })).ListDir(t.Context(), "", "/", 0, func(sandbox.FileInfo) error { return nil })
	unavailable("broken page", err)
	// Replies to calls.
	for _, b := range [][]byte{
		frame(wire.TReply, func(b []byte) []byte { return wire.AppendUint(b, 1) }),
		frame(wire.TReply, func(b []byte) []byte { return append(wire.AppendUint(b, 1), make([]byte, 1000)...) }),
		frame(wire.TReply, nil),
		frame(wire.TFail, nil),
		frame(wire.TData, nil),
	} {
		script := func(c net.Conn, r *wire.Reader) {
			for {
				switch ty, _, err := r.Next(); {
				case err == nil && ty == wire.TControl: // the connection is for calls only
				case err == nil && ty == wire.TCall:
					c.Write(b)
				default:
					return
				}
			}
		}
		_, err := fake(t, guest.Options{}, script).Stat(t.Context(), "", "/", true)
		unavailable("stat", err)
		_, err = fake(t, guest.Options{}, script).ListExecs(t.Context())
		unavailable("execs", err)
	}
}

// A port that sends more than it may loses the connection.
func TestHostilePort(t *testing.T) {
	t.Parallel()
	c := fake(t, guest.Options{}, func(c net.Conn, r *wire.Reader) {
		r.Next()
		c.Write(frame(wire.TReady, nil))
		go io.Copy(io.Discard, c)
		chunk := frame(wire.TData, func(b []byte) []byte { return append(b, make([]byte, wire.MaxChunk)...) })
		for {
			if _, err := c.Write(chunk); err != nil {
				return
			}
		}
	})
	p, err := c.Dial(t.Context(), 80)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(50 * time.Millisecond) // nobody reads: what comes is held, up to the window
	n, err := io.Copy(io.Discard, p)
	if !errors.Is(err, sandbox.Unavailable) || n > wire.Window {
		t.Fatal(n, err)
	}
	p.Close()
}

// A guest that takes nothing of an upload ends it by the deadline, not before
// somebody who sends slowly has sent.
func TestHostileUpload(t *testing.T) {
	t.Parallel()
	c := fake(t, guest.Options{TransferTimeout: 300 * time.Millisecond}, func(c net.Conn, r *wire.Reader) {
		for {
			if _, _, err := r.Next(); err != nil {
				return
			}
		}
	})
	pr, pw := io.Pipe()
	sent := make(chan bool, 1)
	go func() {
		time.Sleep(600 * time.Millisecond)
		_, err := pw.Write(make([]byte, 1))
		sent <- err == nil
		_, _ = pw.Write(make([]byte, 4<<20))
	}()
	_, err := c.WriteFile(t.Context(), "", "/f", pr, guest.WriteOptions{})
	pr.Close()
	if !errors.Is(err, sandbox.Timeout) {
		t.Error(err)
	}
	if !<-sent {
		t.Error("a slow sender was not waited for")
	}
}

// Whoever holds the port without the key learns nothing.
func TestImpostor(t *testing.T) {
	t.Parallel()
	heard := make(chan int, 1)
	dial := func(context.Context) (net.Conn, error) {
		host, inside := net.Pipe()
		go func() {
			wire.GuestHandshake(inside, make([]byte, wire.KeySize))
			b, _ := io.ReadAll(inside)
			heard <- len(b)
			inside.Close()
		}()
		return host, nil
	}
	key := []byte(strings.Repeat("k", wire.KeySize))
	if _, err := guest.Connect(t.Context(), dial, key, guest.Options{}); !errors.Is(err, sandbox.Denied) {
		t.Fatal(err)
	}
	if n := <-heard; n != 0 {
		t.Fatalf("%d bytes were told", n)
	}
	gone := func(context.Context) (net.Conn, error) { return nil, sandbox.Gone.Errorf("no sandbox") }
	if _, err := guest.Connect(t.Context(), gone, key, guest.Options{}); !errors.Is(err, sandbox.Gone) {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	closing := func(context.Context) (net.Conn, error) {
		a, b := net.Pipe()
		b.Close()
		return a, nil
	}
	other := func(context.Context) (net.Conn, error) {
		a, b := net.Pipe()
		go io.Copy(io.Discard, b)
		go b.Write(make([]byte, 1000))
		return a, nil
	}
	if _, err := guest.Connect(t.Context(), other, key, guest.Options{}); !errors.Is(err, sandbox.Unavailable) {
		t.Fatal(err)
	}
	if _, err := guest.Connect(ctx, closing, key, guest.Options{}); !errors.Is(err, sandbox.Timeout) {
		t.Fatal(err)
	}
}
