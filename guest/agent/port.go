package agent

import (
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// dialTime bounds how long a connection to a port or socket inside may take.
const dialTime = 10 * time.Second

// connectTo connects to a TCP port on 127.0.0.1, then ::1.
func connectTo(port int, within time.Duration) (*conn, error) {
	c, err := connectFD(unix.AF_INET, &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}}, within)
	if err != nil {
		if c6, err6 := connectFD(unix.AF_INET6, &unix.SockaddrInet6{Port: port, Addr: [16]byte{15: 1}}, within); err6 == nil {
			return c6, nil
		}
	}
	return c, err
}

func connectFD(family int, to unix.Sockaddr, within time.Duration) (*conn, error) {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	err = unix.Connect(fd, to)
	if err != nil && err != unix.EINPROGRESS && err != unix.EINTR {
		unix.Close(fd)
		return nil, err
	}
	if family != unix.AF_UNIX {
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	}
	c, cerr := newConn(fd)
	if cerr != nil {
		unix.Close(fd)
		return nil, cerr
	}
	if err == nil {
		return c, nil
	}
	c.deadline(within)
	werr := c.raw.Write(func(fd uintptr) bool {
		pfd := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		if n, perr := unix.Poll(pfd, 0); n == 0 || perr == unix.EINTR {
			return false // not connected yet
		}
		var v int
		if v, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR); err == nil && v != 0 {
			err = syscall.Errno(v)
		}
		return true
	})
	if werr != nil {
		err = werr
	}
	if err != nil {
		c.close()
		return nil, err
	}
	c.deadline(0)
	return c, nil
}

// probe says whether something listens on a port.
func probe(port int) bool {
	c, err := connectTo(port, time.Second)
	if err != nil {
		return false
	}
	c.close()
	return true
}

// dialPort answers TDial and copies both ways until both have ended.
func (a *Agent) dialPort(c *conn, p []byte) error {
	o, err := wire.DecodePathOp(p)
	if err != nil {
		return err
	}
	var t *conn
	if o.Path == "" {
		if o.N < 1 || o.N > 65535 {
			return c.fail(sandbox.Invalid.Errorf("no such port: %d", o.N))
		}
		t, err = connectTo(int(o.N), dialTime)
	} else {
		who, name, rerr := request(o.User, o.Path)
		if rerr != nil {
			return c.fail(rerr)
		}
		if len(name) > 107 {
			return c.fail(sandbox.Invalid.Errorf("path of a socket longer than 107 bytes"))
		}
		err = a.files.as(who, func() (err error) {
			t, err = connectFD(unix.AF_UNIX, &unix.SockaddrUnix{Name: name}, dialTime)
			return err
		})
	}
	if err != nil {
		k := sandbox.Unavailable
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			k = sandbox.Timeout
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
			k = sandbox.Exhausted
		case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
			k = sandbox.Denied
		case errors.Is(err, unix.ENOENT):
			k = sandbox.NotFound
		}
		if o.Path == "" {
			return c.fail(k.Errorf("connect to port %d inside: %w", o.N, err))
		}
		return c.fail(k.Errorf("connect to %s inside: %w", clip(o.Path, 128), err))
	}
	defer t.close()
	if err := c.frame(wire.TReady, nil); err != nil {
		return err
	}
	s := &splice{c: c, t: t, flow: wire.NewFlow(), in: wire.NewQueue()}
	var wg sync.WaitGroup
	wg.Go(s.toHost)
	wg.Go(s.toPort)
	s.receive()
	s.flow.Fail(errClosed)
	s.in.Abort(errClosed)
	t.close()
	c.close()
	wg.Wait()
	return errClosed
}

// splice copies between the host's connection and one inside.
type splice struct {
	c, t *conn
	flow *wire.Flow  // to the host
	in   *wire.Queue // from the host
}

// receive takes the host's frames, without ever waiting for the port.
func (s *splice) receive() {
	for {
		ty, b, err := s.c.r.Next()
		if err != nil {
			return
		}
		switch ty {
		case wire.TData:
			err = s.in.Put(b)
		case wire.TEnd:
			s.in.End(io.EOF)
		case wire.TCredit:
			err = s.flow.Credit(b)
		default:
			return
		}
		if err != nil {
			return
		}
		s.c.r.Idle()
	}
}

// toPort writes what came to the program. When that does not read any more, it
// is dropped, and what the program still says goes on to the host.
func (s *splice) toPort() {
	var tally wire.Tally
	dead := false
	for {
		b, err := s.in.Take()
		if err != nil {
			s.t.raw.Control(func(fd uintptr) { unix.Shutdown(int(fd), unix.SHUT_WR) })
			return
		}
		if !dead {
			// not send: it nudges, which only the host understands
			_, err := s.t.f.Write(b)
			dead = err != nil
		}
		if total, tell := tally.Add(len(b)); tell && s.c.credit(total) != nil {
			return
		}
	}
}

// toHost reads from the program. The host learns whether it ended or broke.
func (s *splice) toHost() {
	buf := *chunks.Get().(*[]byte)
	defer chunks.Put(&buf)
	for {
		n, err := s.t.f.Read(buf)
		for have := 0; have < n; {
			m, ferr := s.flow.Wait(n - have)
			if ferr != nil || s.c.data(buf[have:have+m]) != nil {
				s.c.close()
				return
			}
			have += m
		}
		if err != nil {
			if s.c.frame(wire.TEnd, func(b []byte) []byte { return wire.AppendBool(b, !errors.Is(err, io.EOF)) }) != nil {
				s.c.close()
			}
			return
		}
	}
}

var errClosed = errors.New("connection ended")
