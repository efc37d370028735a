package guest_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"vivarium/guest"
	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// cuts is a dialer whose connections can all be cut, as a restore does.
type cuts struct {
	dial guest.Dialer
	mu   sync.Mutex
	all  []net.Conn
	n    int
}

func (c *cuts) Dial(ctx context.Context) (net.Conn, error) {
	n, err := c.dial(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil {
		c.n++
		c.all = append(c.all, n)
	}
	return n, err
}

// cut ends the connections the way a peer would.
func (c *cuts) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.all {
		n.(*net.UnixConn).CloseRead()
		n.(*net.UnixConn).CloseWrite()
	}
	c.all = nil
}

// After every connection was lost, whatever comes next works, and an exec goes
// on where it was.
func TestReconnect(t *testing.T) {
	t.Parallel()
	b := start(t)
	d := &cuts{dial: b.dial}
	c, err := guest.Connect(b.ctx(), d.Dial, b.key, guest.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx := b.ctx()
	if _, err := c.Ping(ctx); err != nil {
		t.Fatal(err)
	}
	s, err := c.StartExec(ctx, "long", sandbox.ExecSpec{Argv: []string{"sh", "-c", "echo one; read x; echo $x; read x; echo $x"}, Stdin: sandbox.StdinPipe})
	if err != nil {
		t.Fatal(err)
	}
	f, err := s.Recv()
	if err != nil || string(f.Data) != "one\n" {
		t.Fatal(err, f)
	}
	if err := s.WriteStdin(ctx, 0, []byte("two\n"), false); err != nil {
		t.Fatal(err)
	}
	d.cut()
	for err == nil {
		_, err = s.Recv()
	}
	if !errors.Is(err, sandbox.Unavailable) {
		t.Fatal(err)
	}
	s.Close()
	for i := range 3 {
		if _, err := c.WriteFile(ctx, "", b.tmp+"/f", strings.NewReader("data"), guest.WriteOptions{}); err != nil {
			t.Fatal(i, err)
		}
		d.cut()
		if _, err := c.Stat(ctx, "", b.tmp+"/f", true); err != nil {
			t.Fatal(i, err)
		}
		d.cut()
		s, err := c.StartExec(ctx, newID(), sandbox.ExecSpec{Argv: []string{"echo", "hi"}})
		if err != nil {
			t.Fatal(i, err)
		}
		if r := collect(t, s); r.out != "hi\n" {
			t.Fatalf("%d %+v", i, r)
		}
		d.cut()
	}
	if s, err = c.AttachExec(ctx, "long", 4, 0); err != nil {
		t.Fatal(err)
	}
	// Standard input goes on from what was taken; what is sent twice is skipped.
	if s.Started.Stdin > 4 {
		t.Fatalf("%+v", s.Started)
	}
	if err := s.WriteStdin(ctx, s.Started.Stdin, []byte("two\nthree\n")[s.Started.Stdin:], true); err != nil {
		t.Fatal(err)
	}
	if r := collect(t, s); r.out != "two\nthree\n" || r.st.Code != 0 {
		t.Fatalf("%+v", r)
	}
}

// A connection serves one exec after the other.
func TestReuse(t *testing.T) {
	t.Parallel()
	b := start(t)
	d := &cuts{dial: b.dial}
	c, err := guest.Connect(b.ctx(), d.Dial, b.key, guest.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for i := range 50 {
		s, err := c.StartExec(b.ctx(), newID(), sandbox.ExecSpec{Argv: []string{"cat", "/no/such/file"}, Stdin: sandbox.StdinPipe})
		if err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 {
			s.WriteStdin(b.ctx(), 0, []byte("unwanted"), true)
		}
		if r := collect(t, s); r.st.Code != 1 {
			t.Fatalf("%+v", r)
		}
		var w bytes.Buffer
		if i%10 == 0 {
			r, err := c.ReadFile(b.ctx(), "", "/proc/version", 0, -1)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.Copy(&w, r); err != nil || w.Len() == 0 {
				t.Fatal(err)
			}
			r.Close()
			if _, err := c.ReadFile(b.ctx(), "", "/no/such/file", 0, -1); !errors.Is(err, sandbox.NotFound) {
				t.Fatal(err)
			}
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.n > 10 {
		t.Fatalf("%d connections for 50 execs", d.n)
	}
}

// Calls do with the connection that is there.
func TestCallsOnOneConnection(t *testing.T) {
	t.Parallel()
	b := start(t)
	d := &cuts{dial: b.dial}
	c, err := guest.Connect(b.ctx(), d.Dial, b.key, guest.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 20 {
		if _, err := c.Ping(b.ctx()); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Stat(b.ctx(), "", "/no/such/file", true); !errors.Is(err, sandbox.NotFound) {
			t.Fatal(err)
		}
		if l, err := c.ListExecs(b.ctx()); err != nil || len(l) != 0 {
			t.Fatal(l, err)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.n != 1 {
		t.Fatalf("%d connections", d.n)
	}
}

// A guest of an earlier version takes calls only on a connection of their own.
func TestCallsOfOldGuest(t *testing.T) {
	t.Parallel()
	c := fake(t, guest.Options{}, func(c net.Conn, r *wire.Reader) {
		ty, _, err := r.Next()
		if err != nil || ty != wire.TControl {
			return
		}
		for {
			ty, p, err := r.Next()
			if err != nil || ty != wire.TCall {
				return
			}
			d := wire.NewDec(p)
			id := d.Uint(1 << 62)
			c.Write(frame(wire.TReply, func(b []byte) []byte { return wire.AppendExecsHead(wire.AppendUint(b, id), false, 0) }))
		}
	})
	for range 3 {
		if l, err := c.ListExecs(t.Context()); err != nil || len(l) != 0 {
			t.Fatal(l, err)
		}
	}
}
