package fake

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/creack/pty"

	"vivarium/engine"
	"vivarium/sandbox"
)

// process is one exec: a process of the test's machine, or with the program
// "flood" as many bytes as its argument says.
type process struct {
	cmd   *exec.Cmd
	tty   *os.File
	stdin io.WriteCloser
	done  chan struct{}

	mu       sync.Mutex
	cond     *sync.Cond
	rec      sandbox.Exec
	out, err []byte
	flood    int64
	lost     bool
}

func (e *Engine) spawn(box, id string, spec sandbox.ExecSpec) *process {
	p := &process{done: make(chan struct{}), rec: sandbox.Exec{
		ID: id, SandboxID: box, Spec: spec, State: sandbox.ExecRunning, Started: time.Now(),
	}}
	p.cond = sync.NewCond(&p.mu)
	if spec.Argv[0] == "flood" {
		p.flood, _ = strconv.ParseInt(spec.Argv[1], 10, 64)
		p.finish(sandbox.ExitStatus{})
		return p
	}
	p.cmd = exec.Command(spec.Argv[0], spec.Argv[1:]...)
	p.cmd.Dir = spec.Workdir
	p.cmd.Env = append(os.Environ(), "PS1=$ ")
	for k, v := range spec.Env {
		p.cmd.Env = append(p.cmd.Env, k+"="+v)
	}
	if err := p.start(spec); err != nil {
		code := 126
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
			code = 127
		}
		p.finish(sandbox.ExitStatus{Code: code, Error: "start " + spec.Argv[0] + ": no such program", Kind: sandbox.NotFound})
	}
	return p
}

func (p *process) start(spec sandbox.ExecSpec) (err error) {
	if spec.PTY != nil {
		p.tty, err = pty.StartWithSize(p.cmd, &pty.Winsize{Rows: spec.PTY.Rows, Cols: spec.PTY.Cols})
		if err != nil {
			return err
		}
		p.stdin = p.tty
		go p.reap(p.collect(p.tty, &p.out))
		return nil
	}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if spec.Stdin == sandbox.StdinPipe {
		if p.stdin, err = p.cmd.StdinPipe(); err != nil {
			return err
		}
	}
	or, ow, err := os.Pipe()
	if err != nil {
		return err
	}
	er, ew, err := os.Pipe()
	if err != nil {
		return err
	}
	p.cmd.Stdout, p.cmd.Stderr = ow, ew
	if spec.Output == sandbox.OutputMerged {
		p.cmd.Stderr = ow
	}
	err = p.cmd.Start()
	ow.Close()
	ew.Close()
	if err != nil {
		or.Close()
		er.Close()
		return err
	}
	a, b := p.collect(or, &p.out), p.collect(er, &p.err)
	go p.reap(a, b)
	return nil
}

func (p *process) collect(f *os.File, to *[]byte) chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 64<<10)
		for {
			n, err := f.Read(buf)
			p.mu.Lock()
			*to = append(*to, buf[:n]...)
			p.cond.Broadcast()
			p.mu.Unlock()
			if err != nil {
				if f != p.tty {
					f.Close()
				}
				return
			}
		}
	}()
	return done
}

func (p *process) reap(outputs ...chan struct{}) {
	for _, o := range outputs {
		<-o
	}
	_ = p.cmd.Wait()
	p.mu.Lock()
	if p.tty != nil {
		p.tty.Close()
	}
	p.mu.Unlock()
	ws := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	st := sandbox.ExitStatus{Code: ws.ExitStatus()}
	if ws.Signaled() {
		st = sandbox.ExitStatus{Code: 128 + int(ws.Signal()), Signal: int(ws.Signal())}
	}
	p.finish(st)
}

func (p *process) finish(st sandbox.ExitStatus) {
	p.mu.Lock()
	p.rec.State, p.rec.Exit, p.rec.Ended = sandbox.ExecExited, st, time.Now()
	if p.lost {
		p.rec.State, p.rec.Exit = sandbox.ExecLost, sandbox.ExitStatus{}
	}
	p.cond.Broadcast()
	p.mu.Unlock()
	close(p.done)
}

func (p *process) lose() {
	p.mu.Lock()
	p.lost = true
	p.mu.Unlock()
}

func (p *process) status() sandbox.ExitStatus { return p.record().Exit }

func (p *process) record() sandbox.Exec {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.rec
	r.StdoutLen, r.StderrLen = int64(len(p.out))+p.flood, int64(len(p.err))
	return r
}

// kill ends the process and its children.
func (p *process) kill() { p.signal(syscall.SIGKILL) }

func (p *process) signal(s syscall.Signal) {
	select {
	case <-p.done:
	default:
		if p.cmd != nil && p.cmd.Process != nil {
			_ = syscall.Kill(-p.cmd.Process.Pid, s)
		}
	}
}

// StartExec implements native.Engine.
func (e *Engine) StartExec(_ context.Context, tenant, ref, id string, spec sandbox.ExecSpec) (sandbox.Exec, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	b, err := e.find(tenant, ref)
	if err != nil {
		return sandbox.Exec{}, err
	}
	if !b.rec.Stage.Alive() {
		return sandbox.Exec{}, sandbox.Gone.Errorf("sandbox %s has ended", ref)
	}
	if p := b.execs[id]; p != nil {
		return p.record(), nil
	}
	if id == "" {
		id = fmt.Sprintf("ex-%04d", len(b.execs)+1)
	}
	p := e.spawn(b.rec.ID, id, spec)
	b.execs[id] = p
	b.order = append(b.order, id)
	e.event(b, "exec.started", id)
	return p.record(), nil
}

func (e *Engine) process(tenant, ref, id string) (*process, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	b, err := e.find(tenant, ref)
	if err != nil {
		return nil, err
	}
	if p := b.execs[id]; p != nil {
		return p, nil
	}
	return nil, sandbox.NotFound.Errorf("no exec %q", id)
}

// GetExec implements native.Engine.
func (e *Engine) GetExec(_ context.Context, tenant, ref, id string) (sandbox.Exec, error) {
	p, err := e.process(tenant, ref, id)
	if err != nil {
		return sandbox.Exec{}, err
	}
	return p.record(), nil
}

// ListExecs implements native.Engine.
func (e *Engine) ListExecs(_ context.Context, tenant, ref string) ([]sandbox.Exec, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	b, err := e.find(tenant, ref)
	if err != nil {
		return nil, err
	}
	var out []sandbox.Exec
	for _, id := range b.order {
		out = append(out, b.execs[id].record())
	}
	return out, nil
}

// WaitExec implements native.Engine.
func (e *Engine) WaitExec(ctx context.Context, tenant, ref, id string) (sandbox.Exec, error) {
	p, err := e.process(tenant, ref, id)
	if err != nil {
		return sandbox.Exec{}, err
	}
	select {
	case <-p.done:
		return p.record(), nil
	case <-ctx.Done():
		return sandbox.Exec{}, ctx.Err()
	}
}

// FloodChunk is what one callback of a flood has.
const FloodChunk = 256 << 10

// Output implements native.Engine.
func (e *Engine) Output(ctx context.Context, tenant, ref, id string, from engine.Offsets, follow bool, fn func(engine.Output) error) (sandbox.Exec, error) {
	p, err := e.process(tenant, ref, id)
	if err != nil {
		return sandbox.Exec{}, err
	}
	if p.flood > 0 {
		return p.record(), p.pour(from.Stdout, fn)
	}
	stop := context.AfterFunc(ctx, func() {
		p.mu.Lock()
		p.cond.Broadcast()
		p.mu.Unlock()
	})
	defer stop()
	for {
		p.mu.Lock()
		for follow && p.rec.State == sandbox.ExecRunning && ctx.Err() == nil &&
			(from.Stdout < 0 || from.Stdout >= int64(len(p.out))) && (from.Stderr < 0 || from.Stderr >= int64(len(p.err))) {
			p.cond.Wait()
		}
		over := p.rec.State != sandbox.ExecRunning || !follow
		out, errOut := tail(p.out, from.Stdout), tail(p.err, from.Stderr)
		p.mu.Unlock()
		if err := ctx.Err(); err != nil {
			return sandbox.Exec{}, err
		}
		if len(out) > 0 {
			if err := fn(engine.Output{Stream: sandbox.Stdout, Offset: from.Stdout, Data: out}); err != nil {
				return sandbox.Exec{}, err
			}
			from.Stdout += int64(len(out))
		}
		if len(errOut) > 0 {
			if err := fn(engine.Output{Stream: sandbox.Stderr, Offset: from.Stderr, Data: errOut}); err != nil {
				return sandbox.Exec{}, err
			}
			from.Stderr += int64(len(errOut))
		}
		if over && len(out)+len(errOut) == 0 {
			return p.record(), nil
		}
	}
}

func tail(b []byte, from int64) []byte {
	if from < 0 || from >= int64(len(b)) {
		return nil
	}
	return slices.Clone(b[from:])
}

func (p *process) pour(at int64, fn func(engine.Output) error) error {
	buf := make([]byte, FloodChunk)
	for at < p.flood {
		n := min(int64(len(buf)), p.flood-at)
		if err := fn(engine.Output{Stream: sandbox.Stdout, Offset: at, Data: buf[:n]}); err != nil {
			return err
		}
		at += n
	}
	return nil
}

// WriteStdin implements native.Engine.
func (e *Engine) WriteStdin(_ context.Context, tenant, ref, id string, offset int64, b []byte, eof bool) (int64, error) {
	p, err := e.process(tenant, ref, id)
	if err != nil {
		return 0, err
	}
	if p.stdin == nil {
		return 0, sandbox.Conflict.Errorf("the exec has no standard input")
	}
	p.mu.Lock()
	taken := p.rec.StdinLen
	p.mu.Unlock()
	if offset > taken {
		return taken, sandbox.Invalid.Errorf("offset %d is beyond %d", offset, taken)
	}
	if skip := taken - offset; skip < int64(len(b)) {
		b = b[skip:]
	} else {
		b = nil
	}
	n, err := p.stdin.Write(b)
	p.mu.Lock()
	p.rec.StdinLen += int64(n)
	taken = p.rec.StdinLen
	p.mu.Unlock()
	if err != nil {
		return taken, sandbox.Gone.Errorf("write: %w", err)
	}
	if eof && p.tty == nil {
		p.stdin.Close()
	}
	return taken, nil
}

// SignalExec implements native.Engine.
func (e *Engine) SignalExec(_ context.Context, tenant, ref, id string, signal int) error {
	p, err := e.process(tenant, ref, id)
	if err != nil {
		return err
	}
	p.signal(syscall.Signal(signal))
	return nil
}

// ResizeExec implements native.Engine.
func (e *Engine) ResizeExec(_ context.Context, tenant, ref, id string, size sandbox.WindowSize) error {
	p, err := e.process(tenant, ref, id)
	if err != nil {
		return err
	}
	if p.tty == nil {
		return sandbox.Invalid.Errorf("the exec has no terminal")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = pty.Setsize(p.tty, &pty.Winsize{Rows: size.Rows, Cols: size.Cols}) // fails once it has ended
	return nil
}

// echo is a TCP connection that sends back what it gets.
func echo() (net.Conn, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	go func() {
		c, err := l.Accept()
		l.Close() // not before: what waits to be accepted would be reset
		if err != nil {
			return
		}
		_, _ = io.Copy(c, c)
		c.Close()
	}()
	return net.Dial("tcp", l.Addr().String())
}
