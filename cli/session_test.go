package cli

import (
	"bytes"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"vivarium/sandbox"
	"vivarium/server/native/fake"
)

// proxy stands for a daemon that dies and comes back: its connections can be
// cut, and new ones refused.
type proxy struct {
	addr string
	to   string

	mu    sync.Mutex
	l     net.Listener
	conns []net.Conn
}

func newProxy(t *testing.T, to string) *proxy {
	t.Helper()
	p := &proxy{to: to}
	p.up(t, "127.0.0.1:0")
	t.Cleanup(p.down)
	return p
}

func (p *proxy) up(t *testing.T, addr string) {
	t.Helper()
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	p.l, p.addr = l, l.Addr().String()
	p.mu.Unlock()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			d, err := net.Dial("tcp", p.to)
			if err != nil {
				c.Close()
				continue
			}
			p.mu.Lock()
			p.conns = append(p.conns, c, d)
			p.mu.Unlock()
			go func() { _, _ = io.Copy(c, d); c.Close() }()
			go func() { _, _ = io.Copy(d, c); d.Close() }()
		}
	}()
}

func (p *proxy) down() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.l.Close()
	for _, c := range p.conns {
		c.Close()
	}
	p.conns = nil
}

// A command whose daemon dies and comes back is followed to its end, and
// nothing of its output is missing or doubled.
func TestDaemonComesBack(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	p := newProxy(t, n.Addr)
	env := map[string]string{"VIV_SERVER": "http://" + p.addr, "VIV_TOKEN": n.Admin}
	fifo := t.TempDir() + "/go"
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	done := make(chan result, 1)
	go func() {
		done <- vivEnv(t, env, Hooks{}, nil, "run", "x", "--", "sh", "-c", "echo one; cat "+fifo+"; echo three; exit 6")
	}()
	running(t, n)
	time.Sleep(100 * time.Millisecond) // until it is followed
	p.down()
	w, err := openFifo(fifo)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, "two\n"); err != nil {
		t.Fatal(err)
	}
	w.Close()
	p.up(t, p.addr)
	r := <-done
	r.is(t, 6, "one\ntwo\nthree\n")
	if !strings.Contains(r.err, "has gone away") {
		t.Errorf("stderr is %q", r.err)
	}
	if left := n.Engine.Boxes(); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

type brokenPipe struct{ after int }

func (b *brokenPipe) Write(p []byte) (int, error) {
	if b.after -= len(p); b.after < 0 {
		return 0, syscall.EPIPE
	}
	return len(p), nil
}

// D4: whoever reads our output and leaves ends the command as in a pipe.
func TestReaderLeaves(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	env := map[string]string{"VIV_SERVER": n.HTTP, "VIV_TOKEN": n.Admin}
	to := func(args ...string) int {
		var errOut bytes.Buffer
		code := Run(t.Context(), args, Streams{
			In: strings.NewReader(""), Out: &brokenPipe{1000}, Err: &errOut, Getenv: func(k string) string { return env[k] },
		}, Hooks{})
		if errOut.Len() > 0 {
			t.Errorf("stderr is %q", errOut.String())
		}
		return code
	}
	if code := to("run", "x", "--", "yes"); code != 141 {
		t.Errorf("run: exit code %d", code)
	}
	if left := n.Engine.Boxes(); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	viv(t, n, nil, "create", "--name", "box", "x")
	if code := to("exec", "--id", "yes", "box", "--", "yes"); code != 141 {
		t.Errorf("exec: exit code %d", code)
	}
	if r := viv(t, n, nil, "wait", "box", "yes"); r.out != "141\n" {
		t.Errorf("the command: %+v", r)
	}
}

func TestExecLost(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	id := strings.TrimSpace(viv(t, n, nil, "create", "x").out)
	done := make(chan result, 1)
	go func() { done <- viv(t, n, nil, "exec", "--id", "main", id, "--", "sh", "-c", "echo up; sleep 1000") }()
	running(t, n)
	n.Engine.End(id, sandbox.Death{Reason: sandbox.ReasonIdle, Message: "idle for 1m0s"})
	(<-done).fails(t, 124, "idle for 1m0s")
}

func openFifo(name string) (io.WriteCloser, error) { return os.OpenFile(name, os.O_WRONLY, 0) }
