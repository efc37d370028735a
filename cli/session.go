package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
)

// Bounds of how long a session looks for a daemon that has gone away.
const (
	reconnectFor   = time.Minute
	reconnectEvery = 200 * time.Millisecond
)

// exitPipe is what a shell gives for a command that SIGPIPE ended.
const exitPipe = 128 + int(syscall.SIGPIPE)

// session is the conversation with one exec. The exec outlives the daemon, and
// so does the session: it goes on where it was when the daemon is back. Only
// piped input does not survive that, since what of it was taken is not known.
type session struct {
	*app
	c     *client.Client
	stdin io.Reader // nil is none
	tty   bool

	mu  sync.Mutex
	cur *client.Attachment // guarded by mu
}

// run starts (first.Spec set) or joins an exec and stays until it has ended.
// started is called once, with the exec as it then stands.
func (s *session) run(ctx context.Context, first *v1.AttachRequest, started func(*v1.Exec)) (*v1.Exec, error) {
	// A reader of our output that leaves is an error of writing, and not the
	// end of this process: there is something to clean up.
	pipe := make(chan os.Signal, 1) // not Ignore, which child processes inherit
	signal.Notify(pipe, syscall.SIGPIPE)
	defer signal.Stop(pipe)
	var known *v1.Exec
	var lost time.Time
	for {
		e, progress, err := s.once(ctx, first, func(e *v1.Exec) {
			if known == nil {
				known = e
				started(e)
				if s.stdin != nil {
					go s.feed()
				}
			}
			lost = time.Time{}
		})
		switch {
		case err == nil:
			return e, nil
		case errors.Is(err, syscall.EPIPE):
			return nil, &exitCode{code: exitPipe}
		case known == nil || ctx.Err() != nil || !errors.Is(err, sandbox.Unavailable) || s.stdin != nil && !s.tty:
			return nil, err
		}
		if lost.IsZero() {
			lost = time.Now()
			fmt.Fprint(s.Err, "viv: the daemon has gone away; the command goes on, waiting for the daemon\r\n")
		}
		if time.Since(lost) > reconnectFor {
			return nil, err
		}
		if progress != nil {
			first = progress
		}
		select {
		case <-time.After(reconnectEvery):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// once is one attempt. It returns how another can go on.
func (s *session) once(ctx context.Context, first *v1.AttachRequest, up func(*v1.Exec)) (*v1.Exec, *v1.AttachRequest, error) {
	a, err := s.c.Attach(ctx, first)
	if err != nil {
		return nil, nil, err
	}
	defer a.Close()
	m, err := a.Receive()
	if err != nil {
		if errors.Is(err, io.EOF) {
			err = sandbox.Internal.Errorf("the daemon's answer is empty")
		}
		return nil, nil, err
	}
	s.mu.Lock()
	s.cur = a
	s.mu.Unlock()
	e := m.Exec
	up(e)
	end, err := a.Copy(nil, s.Out, s.Err)
	if end == nil {
		end = e
	}
	return end, &v1.AttachRequest{SandboxId: e.GetSandboxId(), Id: e.GetId(), StdoutOffset: a.StdoutNext, StderrOffset: a.StderrNext}, err
}

// feed sends standard input. What is typed while the daemon is away is lost.
func (s *session) feed() {
	buf := make([]byte, 64<<10)
	for {
		n, err := s.stdin.Read(buf)
		if n > 0 || err != nil {
			s.mu.Lock()
			a := s.cur
			s.mu.Unlock()
			serr := a.Send(&v1.AttachRequest{Stdin: buf[:n], StdinEof: err != nil})
			if err != nil || serr != nil && !s.tty {
				return
			}
		}
	}
}
