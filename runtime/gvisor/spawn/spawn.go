// Package spawn starts sentries from small helper processes. gVisor expects to
// be a command that ends when the sandbox has started: it gives its own standard
// files away, and makes descriptors without close-on-exec that it never closes,
// among them the control socket and the packet socket of the machine. In the
// daemon, whatever sentry is started next would inherit them. A helper starts
// one machine at a time and marks everything before each, so no sentry gets a
// descriptor that is not its own (F1), while several boot at once.
package spawn

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// Verb is the argument that makes viv-sentry run Main.
const Verb = "spawn"

// Request is one machine to start.
type Request struct {
	ID       string
	Bundle   string // directory with config.json
	Sockets  string // directory of the control socket
	PanicLog string
	Image    string // EROFS of the root container
	Cgroup   string // path below the root of the hierarchies
	Spec     *specs.Spec
	UID      int // user and group of the host that the sentry runs as
	// What the machine shows inside; 0 is what the host has.
	CPULimit    int64 // thousandths of a core
	MemoryLimit int64 // bytes
}

// answer to a Request.
type answer struct {
	Pid  int
	Err  string
	Kind sandbox.Kind
}

// maxAnswer bounds an answer, in bytes.
const maxAnswer = 64 << 10

// Spawner runs the helpers.
type Spawner struct {
	sentry  string
	starter string
	log     *slog.Logger
	free    chan *helper // nil: one that is to be started

	mu     sync.Mutex
	all    map[*helper]bool // guarded by mu
	closed bool             // guarded by mu
}

// helper is one process.
type helper struct {
	cmd  *exec.Cmd
	conn net.Conn
	r    *bufio.Reader
	id   string // machine of the last request
}

// New prepares n helpers, which are started when they are first needed. sentry
// and starter are the paths of viv-sentry and viv-start.
func New(sentry, starter string, n int, log *slog.Logger) *Spawner {
	s := &Spawner{sentry: sentry, starter: starter, log: log, free: make(chan *helper, n), all: map[*helper]bool{}}
	for range n {
		s.free <- nil
	}
	return s
}

// Start starts a machine and its root container, and gives the sentry's pid. On
// error nothing of it runs, except what is in the machine's cgroup.
func (s *Spawner) Start(ctx context.Context, req Request) (pid int, err error) {
	var h *helper
	select {
	case h = <-s.free:
	case <-ctx.Done():
		return 0, sandbox.Timeout.Errorf("start sentry: %w", ctx.Err())
	}
	if h == nil {
		if h, err = s.start(); err != nil {
			s.free <- nil
			return 0, err
		}
	}
	pid, err = h.call(ctx, req)
	if errors.Is(err, errBroken) {
		s.discard(h)
		h = nil
	}
	s.free <- h
	return pid, err
}

// errBroken says that a helper is of no use any more.
var errBroken = errors.New("helper lost")

func (h *helper) call(ctx context.Context, req Request) (int, error) {
	h.id = req.ID
	cut := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = h.conn.SetDeadline(time.Now())
		close(cut)
	})
	defer func() {
		if !stop() { // it ran, or runs: the next call is not to be cut by it
			<-cut
			_ = h.conn.SetDeadline(time.Time{})
		}
	}()
	raw, err := json.Marshal(req)
	if err != nil {
		return 0, sandbox.Internal.Errorf("encode request: %w", err)
	}
	if _, err := h.conn.Write(append(raw, '\n')); err != nil {
		return 0, sandbox.Internal.Errorf("start sentry: %w: %w", errBroken, err)
	}
	line, err := h.r.ReadBytes('\n')
	if err != nil {
		if ctx.Err() != nil {
			return 0, sandbox.Timeout.Errorf("start sentry: %w: %w", errBroken, ctx.Err())
		}
		return 0, sandbox.Internal.Errorf("start sentry: %w: %w", errBroken, err)
	}
	var a answer
	if err := json.Unmarshal(line, &a); err != nil {
		return 0, sandbox.Internal.Errorf("start sentry: %w: %w", errBroken, err)
	}
	if a.Err != "" {
		return 0, a.Kind.Errorf("%s", a.Err)
	}
	return a.Pid, nil
}

func (s *Spawner) start() (*helper, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, sandbox.Exhausted.Errorf("make a socket pair: %w", err)
	}
	mine, theirs := os.NewFile(uintptr(fds[0]), "spawn"), os.NewFile(uintptr(fds[1]), "spawn")
	defer mine.Close()
	defer theirs.Close()
	conn, err := net.FileConn(mine)
	if err != nil {
		return nil, sandbox.Internal.Errorf("use socket pair: %w", err)
	}
	cmd := exec.Command(s.sentry, Verb, s.starter)
	cmd.Env = []string{"GOMAXPROCS=2"}
	cmd.ExtraFiles = []*os.File{theirs}
	// not of the daemon's group: Ctrl-C at its terminal is not for the helper
	cmd.SysProcAttr = &unix.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		conn.Close()
		return nil, sandbox.Internal.Errorf("start helper: %w", err)
	}
	h := &helper{cmd: cmd, conn: conn, r: bufio.NewReader(io.LimitReader(conn, 1<<62))}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		h.end()
		return nil, sandbox.Unavailable.Errorf("the runtime is closed")
	}
	s.all[h] = true
	return h, nil
}

// discard ends a helper that is stuck, with what it was starting: that may not be
// in its cgroup yet, or not in all of its hierarchies.
func (s *Spawner) discard(h *helper) {
	pid := h.cmd.Process.Pid
	// stopped first, so that it starts nothing between the look and its end
	_ = h.cmd.Process.Signal(unix.SIGSTOP)
	for range 100 {
		if stopped(pid) {
			break
		}
		time.Sleep(time.Millisecond)
	}
	var killed []int
	for _, child := range children(pid) {
		if h.starting(child) {
			_ = unix.Kill(child, unix.SIGKILL)
			killed = append(killed, child)
		}
	}
	_ = h.cmd.Process.Kill()
	h.end()
	// until they are gone their groups cannot be removed
	for i := 0; i < 2000 && slices.ContainsFunc(killed, alive); i++ {
		time.Sleep(time.Millisecond)
	}
	s.mu.Lock()
	delete(s.all, h)
	s.mu.Unlock()
}

// state of a process, as in proc_pid_stat(5); 'X' if it is gone.
func state(pid int) byte {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 'X'
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	if rest == "" {
		return 'X'
	}
	return rest[0]
}

func stopped(pid int) bool { return strings.IndexByte("TtZX", state(pid)) >= 0 }

func alive(pid int) bool { return strings.IndexByte("ZX", state(pid)) < 0 }

// starting says whether a child is the sentry of the last request, or has not
// yet become one. The others are machines that were started before.
func (h *helper) starting(child int) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(child) + "/cmdline")
	return err == nil && (strings.Contains(string(b), h.id) || strings.Contains(string(b), "\x00"+Verb+"\x00"))
}

func (h *helper) end() {
	h.conn.Close()
	_ = h.cmd.Wait() // it ends when its connection does
}

// Close ends the helpers. Machines go on.
func (s *Spawner) Close() {
	s.mu.Lock()
	s.closed = true
	all := s.all
	s.all = map[*helper]bool{}
	s.mu.Unlock()
	for h := range all {
		h.end()
	}
}

// children of a process (proc_pid_task_children(5)).
func children(pid int) []int {
	var all []int
	tasks, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/task")
	if err != nil {
		return nil // it has ended
	}
	for _, t := range tasks {
		b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/task/" + t.Name() + "/children")
		if err != nil {
			continue
		}
		for _, f := range strings.Fields(string(b)) {
			if n, err := strconv.Atoi(f); err == nil {
				all = append(all, n)
			}
		}
	}
	return all
}
