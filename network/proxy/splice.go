package proxy

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// Bytes go from one socket to the other in one of two ways. What trickles is read
// into a buffer that is borrowed only when there is something to read, so that an
// idle connection holds neither buffer nor pipe. What comes in bulk is spliced by
// the kernel, as much at a time as has already arrived.
const (
	bufferSize = 32 << 10
	bulk       = 64 << 10
)

var buffers = sync.Pool{New: func() any { return new([bufferSize]byte) }}

// bufferPool is for bodies of HTTP, which cannot be spliced. A buffer goes with a
// body for as long as that takes, so the large ones, which take a third less of the
// CPU, are few: who finds none has one of the others.
type bufferPool struct{}

const largeSize = 256 << 10

var largeBuffers = func() chan []byte {
	c := make(chan []byte, 32)
	for range cap(c) {
		c <- nil // made when it is first used
	}
	return c
}()

func (bufferPool) Get() []byte {
	select {
	case b := <-largeBuffers:
		if b == nil {
			b = make([]byte, largeSize)
		}
		return b
	default:
		return buffers.Get().(*[bufferSize]byte)[:]
	}
}

func (bufferPool) Put(b []byte) {
	if len(b) == largeSize {
		largeBuffers <- b
		return
	}
	buffers.Put((*[bufferSize]byte)(b))
}

// sourceError is one of the side that bytes came from.
type sourceError struct{ err error }

func (e *sourceError) Error() string { return "read: " + e.err.Error() }
func (e *sourceError) Unwrap() error { return e.err }

// pump moves bytes until src ends (nil) or either fails. It adds them to n as they
// move, and calls touch.
func pump(dst, src net.Conn, n *atomic.Int64, touch func()) error {
	s, ok1 := src.(*net.TCPConn)
	d, ok2 := dst.(*net.TCPConn)
	if !ok1 || !ok2 {
		return pumpSlow(dst, src, n, touch)
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return err
	}
	for {
		var buf *[bufferSize]byte
		var got int
		var rerr error
		err := raw.Read(func(fd uintptr) bool {
			if buf == nil {
				buf = buffers.Get().(*[bufferSize]byte)
			}
			for {
				got, rerr = unix.Read(int(fd), buf[:])
				if rerr != unix.EINTR {
					break
				}
			}
			if rerr == unix.EAGAIN {
				buffers.Put(buf)
				buf = nil
				return false
			}
			return true
		})
		if err == nil {
			err = rerr
		}
		if err != nil {
			err = &sourceError{err}
		}
		if err == nil && got > 0 {
			_, err = d.Write(buf[:got])
			n.Add(int64(got))
		}
		if buf != nil {
			buffers.Put(buf)
		}
		switch {
		case err != nil:
			return err
		case got == 0:
			return nil
		}
		touch()
		for got == bufferSize {
			waiting := 0
			if err := raw.Control(func(fd uintptr) { waiting, rerr = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }); err != nil {
				return err
			}
			if rerr != nil || waiting < bulk {
				break
			}
			// so many bytes are there: this does not wait for more
			moved, err := io.CopyN(d, s, int64(waiting))
			n.Add(moved)
			touch()
			if err != nil {
				return err
			}
		}
	}
}

// pumpSlow is for what is not a plain TCP socket.
func pumpSlow(dst, src net.Conn, n *atomic.Int64, touch func()) error {
	buf := buffers.Get().(*[bufferSize]byte)
	defer buffers.Put(buf)
	for {
		got, rerr := src.Read(buf[:])
		if got > 0 {
			touch()
			if _, err := dst.Write(buf[:got]); err != nil {
				return err
			}
			n.Add(int64(got))
		}
		if errors.Is(rerr, io.EOF) {
			return nil
		}
		if rerr != nil {
			return &sourceError{rerr}
		}
	}
}

// closeWrite ends one direction and leaves the other open.
func closeWrite(c net.Conn) error {
	if w, ok := c.(interface{ CloseWrite() error }); ok {
		err := w.CloseWrite()
		if errors.Is(err, syscall.ENOTCONN) { // already ended by the other side
			return nil
		}
		return err
	}
	return c.Close()
}

// reset closes a connection so that the other side gets a TCP reset.
func reset(c net.Conn) {
	if t, ok := c.(*net.TCPConn); ok {
		_ = t.SetLinger(0) // fails only on what is closed
	}
	_ = c.Close()
}

// pending says whether bytes that were written are not yet acknowledged.
func pending(c *net.TCPConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	n := 0
	_ = raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCOUTQ) }) // a closed one has nothing
	return n > 0
}
