package agent

import (
	"errors"
	"io"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// poller reads a fast pipe of small writes by looking at it again and again,
// with rests, instead of being told of every write: inside gVisor the telling
// alone takes some 100 us of CPU, more than copying the 8 KB that cat writes.
// While it is used the pipe is not in the runtime's poller.
type poller struct {
	fd    int // -1: not in use
	since time.Time
	nap   time.Duration
}

// errIdle says that there is nothing to read now.
var errIdle = errors.New("nothing to read")

const (
	pollNap  = 500 * time.Microsecond
	pollMost = 4 * time.Millisecond
	pollIdle = 100 * time.Millisecond
)

// enter takes the pipe out of the runtime's poller. It stays as it is where that
// cannot be done.
func (p *poller) enter(f *os.File, raw syscall.RawConn) {
	if p.fd >= 0 {
		return
	}
	fd := -1
	raw.Control(func(old uintptr) {
		if n, err := unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0); err == nil {
			fd = n
		}
	})
	if fd < 0 {
		return
	}
	f.Close()
	p.fd, p.since, p.nap = fd, time.Now(), pollNap
}

// leave gives the pipe back to the runtime's poller.
func (p *poller) leave() (*os.File, syscall.RawConn, error) {
	f := os.NewFile(uintptr(p.fd), "pipe")
	p.fd = -1
	raw, err := f.SyscallConn()
	return f, raw, err
}

func (p *poller) close() {
	if p.fd >= 0 {
		unix.Close(p.fd)
	}
}

func (p *poller) read(f *os.File, b []byte) (int, error) {
	if p.fd < 0 {
		return f.Read(b)
	}
	for {
		n, err := unix.Read(p.fd, b)
		switch {
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			return 0, errIdle
		case err != nil:
			return 0, err
		case n == 0:
			return 0, io.EOF
		default:
			p.since, p.nap = time.Now(), pollNap
			return n, nil
		}
	}
}

// rest sleeps a little. False if nothing has come for too long.
func (p *poller) rest() bool {
	if time.Since(p.since) > pollIdle {
		return false
	}
	time.Sleep(p.nap)
	p.nap = min(2*p.nap, pollMost)
	return true
}

// pending is how many bytes wait in the pipe.
func (p *poller) pending(raw syscall.RawConn) int {
	if p.fd < 0 {
		return pending(raw)
	}
	n, _ := unix.IoctlGetInt(p.fd, unix.TIOCINQ)
	return max(n, 0)
}
