// Package control calls a running sentry. It speaks gVisor's urpc
// (gvisor.dev/gvisor/pkg/urpc: one JSON object each way, descriptors beside the
// first byte) and is not gVisor's own client for three reasons: that one makes
// sockets and eventfds that are inherited by whatever another goroutine starts
// meanwhile, so that sentries got descriptors of the daemon; it takes a thread
// per call that waits; and nothing bounds the wait or the answer, which comes
// from a process that must be taken for hostile.
package control

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// maxAnswer bounds an answer in bytes.
const maxAnswer = 1 << 20

// maxFiles is how many descriptors a call can carry, as in urpc.
const maxFiles = 128

type request struct {
	Method string `json:"method"`
	Arg    any    `json:"arg"`
}

type answer struct {
	Success bool            `json:"success"`
	Err     string          `json:"err"`
	Result  json.RawMessage `json:"result"`
}

// Call calls a method of the sentry whose control socket is at path. arg is sent
// as JSON, files beside it. It returns when the sentry has answered or ctx ends;
// a call that was sent may take effect all the same.
func Call(ctx context.Context, path, method string, arg any, files []*os.File) error {
	if len(files) > maxFiles {
		return sandbox.Internal.Errorf("call sentry: %d files, at most %d can be sent", len(files), maxFiles)
	}
	raw, err := json.Marshal(request{method, arg})
	if err != nil {
		return sandbox.Internal.Errorf("encode call of sentry: %w", err)
	}
	c, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err != nil {
		return sandbox.Unavailable.Errorf("call sentry: %w", err)
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Now()) })
	defer stop()
	if err := send(c.(*net.UnixConn), raw, files); err != nil {
		return lost(ctx, method, err)
	}
	var a answer
	if err := json.NewDecoder(io.LimitReader(c, maxAnswer)).Decode(&a); err != nil {
		return lost(ctx, method, err)
	}
	if !a.Success {
		const most = 2000
		return sandbox.Internal.Errorf("%s: %s", method, a.Err[:min(len(a.Err), most)])
	}
	return nil
}

func send(c *net.UnixConn, raw []byte, files []*os.File) error {
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			rc, err := f.SyscallConn() // not Fd, which would make it blocking
			if err != nil {
				return err
			}
			if err := rc.Control(func(fd uintptr) { fds[i] = int(fd) }); err != nil {
				return err
			}
		}
		rights = unix.UnixRights(fds...)
	}
	n, _, err := c.WriteMsgUnix(raw, rights, nil)
	for err == nil && n < len(raw) {
		var m int
		m, err = c.Write(raw[n:])
		n += m
	}
	return err
}

func lost(ctx context.Context, method string, err error) error {
	if ctx.Err() != nil {
		return sandbox.Timeout.Errorf("%s: no answer of the sentry: %w", method, errors.Join(ctx.Err(), err))
	}
	return sandbox.Unavailable.Errorf("%s: %w", method, err)
}
