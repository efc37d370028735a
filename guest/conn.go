package guest

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// Dialer opens a byte stream to the guest's port in the sandbox. It may be
// called at any time and several times at once. An error of kind sandbox.Gone
// means that the sandbox has ended; others are tried again.
type Dialer func(ctx context.Context) (net.Conn, error)

// hostConn is an authenticated connection.
type hostConn struct {
	c   net.Conn
	r   *wire.Reader
	wmu sync.Mutex
	buf []byte // for frames to be sent, guarded by wmu
}

var past = time.Unix(1, 0)

// writeTime bounds every write: a guest that reads nothing for so long is lost.
const writeTime = 30 * time.Second

// send sends one frame whose payload fill appends.
func (h *hostConn) send(t wire.Type, fill func([]byte) []byte) error {
	h.wmu.Lock()
	defer h.wmu.Unlock()
	h.buf = wire.AppendFrame(h.buf[:0], t, fill)
	h.c.SetWriteDeadline(time.Now().Add(writeTime))
	_, err := h.c.Write(h.buf)
	if cap(h.buf) > 64<<10 {
		h.buf = nil
	}
	return err
}

// data sends one frame of head and p without joining them.
func (h *hostConn) data(t wire.Type, head func([]byte) []byte, p []byte) error {
	return h.dataBy(time.Now().Add(writeTime), t, head, p)
}

func (h *hostConn) dataBy(by time.Time, t wire.Type, head func([]byte) []byte, p []byte) error {
	h.wmu.Lock()
	defer h.wmu.Unlock()
	h.buf = wire.AppendFrame(h.buf[:0], t, head)
	wire.PutHeader(h.buf, t, len(h.buf)-wire.HeaderSize+len(p))
	h.c.SetWriteDeadline(by)
	if len(p) <= 16<<10 {
		h.buf = append(h.buf, p...)
		_, err := h.c.Write(h.buf)
		return err
	}
	v := net.Buffers{h.buf, p}
	_, err := v.WriteTo(h.c)
	return err
}

// next reads a frame; it fails when ctx ends or within has passed (0: never).
// After that the connection is of no more use.
func (h *hostConn) next(ctx context.Context, within time.Duration) (wire.Type, []byte, error) {
	if within > 0 {
		h.c.SetReadDeadline(time.Now().Add(within))
	} else {
		h.c.SetReadDeadline(time.Time{})
	}
	stop := interrupt(ctx, h.c)
	t, p, err := h.r.Next()
	if !stop() && err == nil {
		err = ctx.Err() // the deadline has been spoilt
	}
	if err != nil {
		return 0, nil, ctxError(ctx, err)
	}
	return t, p, nil
}

// readBy makes reads fail at a time (zero: never), or at once when ctx, for
// which there is an interrupt, has ended.
func (h *hostConn) readBy(ctx context.Context, t time.Time) {
	h.c.SetReadDeadline(t)
	if ctx.Err() != nil { // the interrupt may have come before that
		h.c.SetReadDeadline(past)
	}
}

// interrupt ends reads and writes on c when ctx ends. The function returned
// says whether that did not happen, and ends the arrangement.
func interrupt(ctx context.Context, c net.Conn) func() bool {
	if ctx.Done() == nil {
		return func() bool { return true }
	}
	return context.AfterFunc(ctx, func() { c.SetDeadline(past) })
}

func ctxError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// alive says whether an idle connection can still be used, as far as this side
// knows: the guest has nothing to say on one, so whatever can be read but nudges,
// the end included, means that it is lost.
func (h *hostConn) alive() bool {
	sc, ok := h.c.(syscall.Conn)
	if !ok {
		return true
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	var perr error
	err = raw.Control(func(fd uintptr) {
		var b [256]byte
		n, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		if perr = err; err == nil && n > 0 && wire.OnlyNudges(b[:n]) {
			perr = unix.EAGAIN
		}
	})
	return err == nil && (perr == unix.EAGAIN || perr == unix.ENOTSOCK)
}

func (h *hostConn) close() { h.c.Close() }

// lost makes of a failed read or write an error with a kind.
func lost(err error) error {
	var e *sandbox.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &e):
		return err
	case errors.Is(err, wire.ErrFrame):
		return sandbox.Unavailable.Errorf("the guest does not keep to the protocol: %w", err)
	case errors.Is(err, context.Canceled):
		return sandbox.Unavailable.Errorf("cancelled: %w", err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return sandbox.Timeout.Errorf("the guest did not answer in time: %w", err)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return sandbox.Unavailable.Errorf("the guest closed the connection")
	}
	return sandbox.Unavailable.Errorf("connection to the guest: %w", err)
}

func broken(format string, args ...any) error {
	return sandbox.Unavailable.Errorf("the guest does not keep to the protocol: "+format, args...)
}
