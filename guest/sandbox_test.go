package guest_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/guest"
	"vivarium/guest/agent"
	"vivarium/sandbox"
)

// The tests run the real guest as process 1 of namespaces of its own: this
// binary, started again.
func TestMain(m *testing.M) {
	if os.Getenv("VIV_TEST_GUEST") != "" {
		if err := inside(); err != nil {
			fmt.Fprintln(os.Stderr, "guest:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func inside() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return err
	}
	if dir := os.Getenv("VIV_TEST_ETC"); dir != "" {
		if err := unix.Mount(dir, "/etc", "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	unix.Mount("devpts", "/dev/pts", "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
	unix.Mount("/dev/pts/ptmx", "/dev/ptmx", "", unix.MS_BIND, "")
	if err := loopbackUp(); err != nil {
		return err
	}
	return agent.Main()
}

func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
}

// box is a running guest.
type box struct {
	*guest.Client
	t    testing.TB
	sock string
	key  []byte
	pid  int
	tmp  string // a directory that guest and test share
	cmd  *exec.Cmd
}

func (b *box) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", b.sock)
}

func start(t testing.TB, env ...string) *box {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: it makes namespaces")
	}
	dir, err := os.MkdirTemp("", "vg")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { exec.Command("rm", "-rf", dir).Run() })
	os.Chmod(dir, 0o755)
	b := &box{t: t, sock: filepath.Join(dir, "s"), key: make([]byte, 32), tmp: filepath.Join(dir, "tmp")}
	os.Mkdir(b.tmp, 0o777)
	os.Chmod(b.tmp, 0o777)
	rand.Read(b.key)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: b.sock})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	f, err := l.File()
	l.Close()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "VIV_TEST_GUEST=1", "VIV_GUEST_FD=3", "VIV_GUEST_KEY="+hex.EncodeToString(b.key))
	cmd.Env = append(cmd.Env, env...)
	cmd.ExtraFiles = []*os.File{f}
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	f.Close()
	b.cmd, b.pid = cmd, cmd.Process.Pid
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	b.Client = b.connect(guest.Options{})
	return b
}

func (b *box) connect(o guest.Options) *guest.Client {
	b.t.Helper()
	c, err := guest.Connect(b.ctx(), b.dial, b.key, o)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { c.Close() })
	return c
}

func (b *box) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	b.t.Cleanup(cancel)
	return ctx
}

// result is all that came of an exec.
type result struct {
	out, err string
	st       sandbox.ExitStatus
}

// collect takes a stream to its end, acknowledging as it goes.
func collect(t testing.TB, s *guest.ExecStream) result {
	t.Helper()
	var out, errs bytes.Buffer
	var r result
	off := [2]int64{s.Started.Stdout, s.Started.Stderr}
	for {
		f, err := s.Recv()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatalf("recv: %v (after %d and %d bytes)", err, out.Len(), errs.Len())
		}
		switch f.Stream {
		case sandbox.Stdout:
			out.Write(f.Data)
			off[0] += int64(len(f.Data))
		case sandbox.Stderr:
			errs.Write(f.Data)
			off[1] += int64(len(f.Data))
		}
		if f.Exit != nil {
			r.st = f.Exit.Status
		} else if f.Stream != 0 {
			if err := s.Ack(off[0], off[1]); err != nil {
				t.Fatalf("ack: %v", err)
			}
		}
	}
	if err := s.AckExit(); err != nil {
		t.Fatalf("ack exit: %v", err)
	}
	r.out, r.err = out.String(), errs.String()
	return r
}

var serial = make(chan int, 1)

func init() { serial <- 0 }

var guestOptions guest.Options

func newID() string {
	n := <-serial
	serial <- n + 1
	return fmt.Sprintf("x%d", n)
}

func (b *box) run(spec sandbox.ExecSpec) result {
	b.t.Helper()
	s, err := b.StartExec(b.ctx(), newID(), spec)
	if err != nil {
		b.t.Fatal(err)
	}
	return collect(b.t, s)
}

func (b *box) sh(script string, args ...string) result {
	b.t.Helper()
	return b.run(sandbox.ExecSpec{Argv: append([]string{"/bin/sh", "-c", script, "sh"}, args...)})
}
