package agent

import (
	"errors"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
)

// reach tries to reach an address, as any program inside would.
func reach(r wire.Reach) wire.Reached {
	data, err := tryReach(r)
	var no syscall.Errno
	switch {
	case err == nil:
		return wire.Reached{Data: data}
	case errors.Is(err, os.ErrDeadlineExceeded):
		no = unix.ETIMEDOUT
	case !errors.As(err, &no):
		no = unix.EIO
	}
	return wire.Reached{Errno: int(no)}
}

func tryReach(r wire.Reach) ([]byte, error) {
	within := time.Duration(r.Timeout) * time.Millisecond
	end := time.Now().Add(within)
	to := &unix.SockaddrInet4{Port: int(r.To.Port()), Addr: r.To.Addr().As4()}
	var c *conn
	var err error
	if r.UDP {
		c, err = packetConn(to)
	} else {
		c, err = connectFD(unix.AF_INET, to, within)
	}
	if err != nil {
		return nil, err
	}
	defer c.close()
	if len(r.Data) == 0 {
		return nil, nil
	}
	c.deadline(max(time.Until(end), time.Millisecond))
	if _, err := c.f.Write(r.Data); err != nil {
		return nil, err
	}
	buf := make([]byte, wire.MaxReach)
	n, err := c.f.Read(buf)
	return buf[:max(n, 0)], err
}

// packetConn is a UDP socket with one peer.
func packetConn(to unix.Sockaddr) (*conn, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Connect(fd, to); err != nil {
		unix.Close(fd)
		return nil, err
	}
	c, err := newConn(fd)
	if err != nil {
		unix.Close(fd)
	}
	return c, err
}
