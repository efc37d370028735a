package agent

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Cookie is the variable that marks the processes of an exec, so that those
// that left its session and lost their parents can still be found.
const Cookie = "VIV_EXEC_ID"

// notStarted is why a command could not be started, as a shell would tell it.
func notStarted(code int, err error) sandbox.ExitStatus {
	return sandbox.ExitStatus{Code: code, Error: err.Error(), Kind: sandbox.KindOf(err)}
}

// spawn starts e as s says. An error is for what the host may try again
// (Exhausted); whatever is wrong with the command becomes its status.
func (e *execution) spawn(s *wire.Start) error {
	status, err := e.fork(s)
	if err != nil {
		return err
	}
	if status.Error != "" {
		e.mu.Lock()
		e.exited, e.done, e.status, e.ended = true, true, status, time.Now()
		e.mu.Unlock()
	}
	return nil
}

func (e *execution) fork(s *wire.Start) (bad sandbox.ExitStatus, err error) {
	e.started = time.Now()
	who, err := lookup(s.User)
	if err != nil {
		return notStarted(126, err), nil
	}
	dir := s.Workdir
	if dir == "" {
		dir = "/"
	}
	if !strings.HasPrefix(dir, "/") {
		dir = "/" + dir
	}
	if dir != "/" { // where process 1 is
		if err := checkDir(dir); err != nil {
			return notStarted(126, err), nil
		}
	}
	env := environ(s, who)
	prog, err := find(s.Argv[0], dir, value(env, "PATH"), who)
	if err != nil {
		code := 126
		if sandbox.KindOf(err) == sandbox.NotFound {
			code = 127
		}
		return notStarted(code, err), nil
	}

	var p plumbing
	if err := p.open(s, who); err != nil {
		p.close()
		return bad, err
	}
	attr := &syscall.ProcAttr{Env: env, Files: p.child[:], Sys: &syscall.SysProcAttr{Setsid: true}}
	if dir != "/" {
		attr.Dir = dir
	}
	if s.PTY != nil {
		attr.Sys.Setctty = true
	}
	if who.uid != 0 || who.gid != 0 || len(who.groups) > 0 || e.a.groups {
		attr.Sys.Credential = &syscall.Credential{Uid: who.uid, Gid: who.gid, Groups: who.groups}
	}
	e.mu.Lock() // until pid is set: reaped waits for it
	e.pty = s.PTY != nil
	e.out[0].target, e.out[1].target = -1, -1
	for i, f := range p.out {
		if f != nil {
			e.out[i].f = f
		}
	}
	if p.in != nil {
		e.in = &input{f: p.in}
	}
	pid, err := e.a.reaper.start(func() (int, error) { return syscall.ForkExec(prog, s.Argv, attr) }, e.reaped)
	e.pid = pid
	if err == nil && s.Timeout > 0 {
		e.timer = time.AfterFunc(s.Timeout, e.timeout)
	}
	if err != nil {
		e.out, e.in = [2]output{}, nil
	}
	e.mu.Unlock()
	if err != nil {
		p.close()
		return forkError(err, prog)
	}
	p.closeChild()
	for i := range e.out {
		if e.have(i) {
			go e.read(i)
		}
	}
	if e.in != nil {
		go e.write()
	}
	return bad, nil
}

// checkDir says what is wrong with a working directory.
func checkDir(dir string) error {
	st, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return sandbox.NotFound.Errorf("working directory %s does not exist", clip(dir, 256)).WithHint("create it first, or choose another")
	case err != nil:
		return sandbox.Invalid.Errorf("working directory: %w", err)
	case !st.IsDir():
		return sandbox.Invalid.Errorf("working directory %s is not a directory", clip(dir, 256))
	}
	return nil
}

// forkError tells a command that cannot run from a sandbox that is full.
func forkError(err error, prog string) (sandbox.ExitStatus, error) {
	switch err {
	case unix.EAGAIN, unix.ENOMEM, unix.EMFILE, unix.ENFILE:
		return sandbox.ExitStatus{}, sandbox.Exhausted.Errorf("start process: %w", err).WithHint("end other processes of the sandbox, or raise its limits")
	case unix.ENOENT, unix.ENOTDIR:
		return notStarted(127, sandbox.NotFound.Errorf("run %s: its interpreter does not exist", clip(prog, 256))), nil
	case unix.ENOEXEC:
		return notStarted(126, sandbox.Invalid.Errorf("run %s: not a program (exec format)", clip(prog, 256)).WithHint("a script needs a first line such as #!/bin/sh")), nil
	case unix.EACCES, unix.EPERM:
		return notStarted(126, sandbox.Denied.Errorf("run %s: permission denied", clip(prog, 256))), nil
	}
	return notStarted(126, sandbox.Invalid.Errorf("run %s: %w", clip(prog, 256), err)), nil
}

func value(env []string, name string) string {
	for _, kv := range env {
		if v, ok := strings.CutPrefix(kv, name+"="); ok {
			return v
		}
	}
	return ""
}

func has(env []string, name string) bool {
	return slices.ContainsFunc(env, func(kv string) bool { return strings.HasPrefix(kv, name+"=") })
}

// environ adds to what the host gave what a login would set.
func environ(s *wire.Start, who *account) []string {
	env := slices.DeleteFunc(slices.Clone(s.Env), func(kv string) bool {
		return strings.HasPrefix(kv, "VIV_GUEST_") || strings.HasPrefix(kv, Cookie+"=")
	})
	if !has(env, "PATH") {
		env = append(env, "PATH="+defaultPath)
	}
	if !has(env, "HOME") {
		env = append(env, "HOME="+who.home)
	}
	if s.PTY != nil && !has(env, "TERM") {
		env = append(env, "TERM=xterm")
	}
	if !has(env, "HOSTNAME") {
		var u unix.Utsname
		if unix.Uname(&u) == nil && u.Nodename[0] != 0 {
			env = append(env, "HOSTNAME="+unix.ByteSliceToString(u.Nodename[:]))
		}
	}
	return append(env, Cookie+"="+s.ID)
}

// find looks a program up as execvp does: by name in PATH, else by path from
// dir.
func find(name, dir, path string, who *account) (string, error) {
	if strings.Contains(name, "/") {
		if !strings.HasPrefix(name, "/") {
			name = filepath.Join(dir, name)
		}
		switch ok, err := runnable(name, who); {
		case ok:
			return name, nil
		case err != nil:
			return "", sandbox.NotFound.Errorf("%s: no such program", clip(name, 256))
		}
		return "", sandbox.Denied.Errorf("%s: not an executable file for this user", clip(name, 256))
	}
	denied := false
	for d := range strings.SplitSeq(path, ":") {
		if !strings.HasPrefix(d, "/") {
			d = filepath.Join(dir, d)
		}
		p := d + "/" + name
		ok, err := runnable(p, who)
		if ok {
			return p, nil
		}
		denied = denied || err == nil
	}
	if denied {
		return "", sandbox.Denied.Errorf("%s: in PATH, but not an executable file for this user", clip(name, 256))
	}
	return "", sandbox.NotFound.Errorf("%s: no such program in PATH", clip(name, 256)).WithHint("PATH is %s", clip(path, 512))
}

// runnable says whether who may execute path; an error means that there is no
// such file.
func runnable(path string, who *account) (bool, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		if err == unix.EACCES || err == unix.ELOOP || err == unix.ENAMETOOLONG {
			return false, nil
		}
		return false, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return false, nil
	}
	bits := st.Mode & 0o111
	switch {
	case who.uid == 0:
	case who.uid == st.Uid:
		bits &= 0o100
	case who.gid == st.Gid || slices.Contains(who.groups, st.Gid):
		bits &= 0o010
	default:
		bits &= 0o001
	}
	return bits != 0, nil
}

// plumbing is the descriptors of a command: ours and the child's.
type plumbing struct {
	child [3]uintptr
	fds   []int // the child's, to be closed here
	in    *os.File
	out   [2]*os.File
}

func (p *plumbing) open(s *wire.Start, who *account) error {
	if s.PTY != nil {
		return p.openPTY(*s.PTY, who)
	}
	null := uintptr(devNull())
	p.child = [3]uintptr{null, null, null}
	if s.Stdin == sandbox.StdinPipe {
		r, w, err := pipe()
		if err != nil {
			return err
		}
		nonblock(w)
		p.in = os.NewFile(uintptr(w), "stdin")
		p.add(0, r)
	}
	if s.Output == sandbox.OutputDiscard {
		return nil
	}
	for i := range p.out {
		if i == 1 && s.Output == sandbox.OutputMerged {
			p.child[2] = p.child[1]
			break
		}
		r, w, err := pipe()
		if err != nil {
			return err
		}
		nonblock(r)
		p.out[i] = os.NewFile(uintptr(r), "output")
		p.add(1+i, w)
	}
	return nil
}

func (p *plumbing) add(i, fd int) {
	p.child[i] = uintptr(fd)
	p.fds = append(p.fds, fd)
}

func (p *plumbing) closeChild() {
	for _, fd := range p.fds {
		unix.Close(fd)
	}
	p.fds = nil
}

func (p *plumbing) close() {
	p.closeChild()
	if p.in != nil && p.in != p.out[0] {
		p.in.Close()
	}
	for _, f := range p.out {
		if f != nil {
			f.Close()
		}
	}
}

// nonblock is for an end of a new pipe, whose flags are known.
func nonblock(fd int) { unix.FcntlInt(uintptr(fd), unix.F_SETFL, unix.O_NONBLOCK) }

func pipe() (r, w int, err error) {
	var fd [2]int
	if err := unix.Pipe2(fd[:], unix.O_CLOEXEC); err != nil {
		return 0, 0, sandbox.Exhausted.Errorf("make pipe: %w", err)
	}
	return fd[0], fd[1], nil
}

// openPTY makes a terminal that belongs to who.
func (p *plumbing) openPTY(size sandbox.WindowSize, who *account) error {
	m, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		if err == unix.ENOENT || err == unix.ENODEV || err == unix.ENXIO {
			return sandbox.Unsupported.Errorf("open terminal: %w", err)
		}
		return sandbox.Exhausted.Errorf("open terminal: %w", err)
	}
	master := os.NewFile(uintptr(m), "terminal")
	p.in, p.out[0] = master, master
	if err := unix.IoctlSetPointerInt(m, unix.TIOCSPTLCK, 0); err != nil {
		return sandbox.Unsupported.Errorf("unlock terminal: %w", err)
	}
	n, err := unix.IoctlGetUint32(m, unix.TIOCGPTN)
	if err != nil {
		return sandbox.Unsupported.Errorf("find terminal: %w", err)
	}
	name := "/dev/pts/" + strconv.Itoa(int(n))
	s, err := unix.Open(name, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return sandbox.Exhausted.Errorf("open terminal: %w", err)
	}
	p.fds = append(p.fds, s)
	p.child = [3]uintptr{uintptr(s), uintptr(s), uintptr(s)}
	if who.uid != 0 {
		unix.Fchown(s, int(who.uid), -1)
	}
	unix.IoctlSetWinsize(m, unix.TIOCSWINSZ, &unix.Winsize{Row: size.Rows, Col: size.Cols})
	return nil
}

func setSize(f *os.File, w sandbox.WindowSize) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return sandbox.Conflict.Errorf("the terminal is closed")
	}
	cerr := raw.Control(func(fd uintptr) {
		err = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: w.Rows, Col: w.Cols})
	})
	if cerr != nil {
		return sandbox.Conflict.Errorf("the terminal is closed")
	}
	if err != nil {
		return sandbox.Internal.Errorf("resize terminal: %w", err)
	}
	return nil
}
