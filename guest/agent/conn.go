package agent

import (
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
)

// conn is a socket in the runtime's poller, without package net: a connection
// from the host, on which there are frames, or one to a program inside.
type conn struct {
	f   *os.File
	raw syscall.RawConn
	r   *wire.Reader
	wmu sync.Mutex // one frame at a time
	// The series of nudges after the last write; guarded by wmu.
	nudging *time.Timer
	nudges  int       // how many there were
	wrote   time.Time // the last one, or the last write
	armed   bool      // nudging will fire
	settled bool      // the host has all that was written
	shut    bool      // guarded by wmu
	// moved is how many bytes of data went either way for the present purpose.
	moved atomic.Int64
}

func newConn(fd int) (*conn, error) {
	f := os.NewFile(uintptr(fd), "conn")
	raw, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return nil, err
	}
	return &conn{f: f, raw: raw}, nil
}

// frame sends one frame whose payload fill appends.
func (c *conn) frame(t wire.Type, fill func([]byte) []byte) error {
	b := bufs.Get().(*[]byte)
	defer bufs.Put(b)
	*b = wire.AppendFrame((*b)[:0], t, fill)
	return c.send(*b, nil)
}

var bufs = sync.Pool{New: func() any { b := make([]byte, 0, 512); return &b }}

func (c *conn) fail(err error) error {
	return c.frame(wire.TError, func(b []byte) []byte { return wire.AppendError(b, err) })
}

// send writes head and body, which are a frame, as one, without joining them.
func (c *conn) send(head, body []byte) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	defer c.nudgeLater()
	if len(body) == 0 {
		_, err := c.f.Write(head)
		return err
	}
	c.moved.Add(int64(len(body)))
	var err error
	werr := c.raw.Write(func(fd uintptr) bool {
		for len(head)+len(body) > 0 {
			var n int
			if len(head) > 0 {
				n, err = unix.Writev(int(fd), [][]byte{head, body})
			} else {
				n, err = unix.Write(int(fd), body)
			}
			switch err {
			case nil:
				h := min(n, len(head))
				head, body = head[h:], body[n-h:]
			case unix.EINTR:
			case unix.EAGAIN:
				err = nil
				return false
			default:
				return true
			}
		}
		return true
	})
	if werr != nil {
		return werr
	}
	return err
}

func (c *conn) deadline(d time.Duration) {
	if d == 0 {
		c.f.SetDeadline(time.Time{})
		return
	}
	c.f.SetDeadline(time.Now().Add(d))
}

func (c *conn) close() {
	c.f.Close()
	c.wmu.Lock()
	defer c.wmu.Unlock()
	c.shut = true
	if c.nudging != nil {
		c.nudging.Stop()
	}
}

// gone says whether the other end has closed, also if there is something still to
// be read: for whoever does not read for long.
func (c *conn) gone() bool {
	gone := true
	_ = c.raw.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(p, 0)
		gone = err == nil && n > 0 && p[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
	})
	return gone
}

// nudgeAfter is when, after a write, the other end is nudged. gVisor's port
// forwarding (runsc/boot/portforward, netstackConn.Read) looks for data, finds
// none, and only then asks to be told of it: what arrives in between stays there
// until something else arrives. Without a nudge the last bytes of an answer may
// never come, once in some ten thousand times.
var nudgeAfter = [...]time.Duration{25 * time.Millisecond, 150 * time.Millisecond, time.Second}

// nudgeLater starts the series anew. wmu is held. A timer that runs is left to
// find out by itself that there was another write: setting one wakes a thread.
func (c *conn) nudgeLater() {
	c.nudges, c.wrote, c.settled = 0, time.Now(), false
	if c.armed || c.shut {
		return
	}
	c.armed = true
	if c.nudging == nil {
		c.nudging = time.AfterFunc(nudgeAfter[0], c.nudge)
	} else {
		c.nudging.Reset(nudgeAfter[0])
	}
}

// settle ends the series: the host has shown that it has everything.
func (c *conn) settle() {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	c.settled = true
	if c.armed {
		c.nudging.Stop()
		c.armed = false
	}
}

func (c *conn) nudge() {
	if !c.wmu.TryLock() { // a write is under way, and may last
		c.nudging.Reset(nudgeAfter[0])
		return
	}
	defer c.wmu.Unlock()
	c.armed = false
	if c.shut || c.settled || c.nudges == len(nudgeAfter) {
		return
	}
	if wait := nudgeAfter[c.nudges] - time.Since(c.wrote); wait > 0 {
		c.armed = true
		c.nudging.Reset(wait)
		return
	}
	b := wire.AppendFrame(nil, wire.TNudge, nil)
	_ = c.raw.Write(func(fd uintptr) bool {
		for len(b) > 0 {
			n, err := unix.Write(int(fd), b)
			if err == unix.EAGAIN && len(b) == wire.HeaderSize {
				return true // what is in the way will do
			}
			if err == unix.EAGAIN {
				return false
			}
			if err != nil && err != unix.EINTR {
				return true
			}
			b = b[max(n, 0):]
		}
		return true
	})
	c.nudges++
	c.wrote = time.Now()
	if c.nudges < len(nudgeAfter) {
		c.armed = true
		c.nudging.Reset(nudgeAfter[c.nudges])
	}
}

// listener accepts connections from a listening socket.
type listener struct {
	f   *os.File
	raw syscall.RawConn
}

func listen(port int) (*listener, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	err = unix.Bind(fd, &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}})
	if err == nil {
		err = unix.Listen(fd, 256)
	}
	if err != nil {
		unix.Close(fd)
		return nil, os.NewSyscallError("listen", err)
	}
	return newListener(fd)
}

func newListener(fd int) (*listener, error) {
	unix.CloseOnExec(fd)
	if err := unix.SetNonblock(fd, true); err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "listener")
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &listener{f: f, raw: raw}, nil
}

func (l *listener) accept() (fd int, err error) {
	rerr := l.raw.Read(func(lfd uintptr) bool {
		for {
			fd, _, err = unix.Accept4(int(lfd), unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
			switch err {
			case unix.EINTR, unix.ECONNABORTED:
				continue
			case unix.EAGAIN:
				return false
			}
			return true
		}
	})
	if rerr != nil {
		return -1, rerr
	}
	return fd, err
}
