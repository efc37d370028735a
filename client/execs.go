package client

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/sandbox"
)

// StartExec starts a command and does not wait. An empty id is chosen by the
// daemon; the same id again gives the same exec.
func (c *Client) StartExec(ctx context.Context, ref, id string, spec *v1.ExecSpec) (*v1.Exec, error) {
	res, err := c.Execs.Start(ctx, connect.NewRequest(&v1.StartExecRequest{SandboxId: ref, Id: id, Spec: spec}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Exec, nil
}

// RunExec starts a command and copies its output until it has ended. A nil
// writer discards.
func (c *Client) RunExec(ctx context.Context, ref, id string, spec *v1.ExecSpec, stdout, stderr io.Writer) (*v1.Exec, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.Execs.Run(ctx, connect.NewRequest(&v1.RunExecRequest{SandboxId: ref, Id: id, Spec: spec}))
	if err != nil {
		return nil, err
	}
	return copyOutput(s, stdout, stderr)
}

// Output copies the output of an exec from req's offsets. It returns the exec
// as it then stands.
func (c *Client) Output(ctx context.Context, req *v1.ReadOutputRequest, stdout, stderr io.Writer) (*v1.Exec, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.Execs.Output(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return copyOutput(s, stdout, stderr)
}

func copyOutput(s *connect.ServerStreamForClient[v1.ExecOutput], stdout, stderr io.Writer) (*v1.Exec, error) {
	var last *v1.Exec
	err := each(s, func(m *v1.ExecOutput) error {
		if m.Exec != nil {
			last = m.Exec
		}
		return writeOutput(m, stdout, stderr)
	})
	return last, err
}

func writeOutput(m *v1.ExecOutput, stdout, stderr io.Writer) error {
	if len(m.Stdout) > 0 && stdout != nil {
		if _, err := stdout.Write(m.Stdout); err != nil {
			return err
		}
	}
	if len(m.Stderr) > 0 && stderr != nil {
		if _, err := stderr.Write(m.Stderr); err != nil {
			return err
		}
	}
	return nil
}

// GetExec returns an exec as it stands.
func (c *Client) GetExec(ctx context.Context, ref, id string) (*v1.Exec, error) {
	res, err := c.Execs.Get(ctx, connect.NewRequest(&v1.GetExecRequest{SandboxId: ref, Id: id}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Exec, nil
}

// ListExecs lists the execs of a sandbox.
func (c *Client) ListExecs(ctx context.Context, ref string) ([]*v1.Exec, error) {
	res, err := c.Execs.List(ctx, connect.NewRequest(&v1.ListExecsRequest{SandboxId: ref}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Execs, nil
}

// WaitExec returns when an exec has ended. A timeout of 0 is none.
func (c *Client) WaitExec(ctx context.Context, ref, id string, timeout time.Duration) (*v1.Exec, error) {
	req := &v1.WaitExecRequest{SandboxId: ref, Id: id}
	if timeout > 0 {
		req.Timeout = durationpb.New(timeout)
	}
	res, err := c.Execs.Wait(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg.Exec, nil
}

// WriteStdin gives bytes to an exec; see the API for offset. It returns how
// many were taken in all.
func (c *Client) WriteStdin(ctx context.Context, ref, id string, offset int64, p []byte, eof bool) (int64, error) {
	res, err := c.Execs.WriteStdin(ctx, connect.NewRequest(&v1.WriteStdinRequest{SandboxId: ref, Id: id, Offset: offset, Data: p, Eof: eof}))
	if err != nil {
		return 0, err
	}
	return res.Msg.StdinLen, nil
}

// Signal sends a signal to an exec.
func (c *Client) Signal(ctx context.Context, ref, id string, signal int) error {
	_, err := c.Execs.Signal(ctx, connect.NewRequest(&v1.SignalExecRequest{SandboxId: ref, Id: id, Signal: int32(signal)}))
	return err
}

// Resize sets the size of an exec's terminal.
func (c *Client) Resize(ctx context.Context, ref, id string, rows, cols uint32) error {
	_, err := c.Execs.Resize(ctx, connect.NewRequest(&v1.ResizeExecRequest{SandboxId: ref, Id: id, Size: &v1.WindowSize{Rows: rows, Cols: cols}}))
	return err
}

// Attachment is a conversation with an exec. Closing it does not end the exec.
type Attachment struct {
	stream *connect.BidiStreamForClient[v1.AttachRequest, v1.ExecOutput]
	cancel context.CancelFunc

	// Offsets of the next bytes, for another Attach that goes on from here.
	// Receive moves them.
	StdoutNext, StderrNext int64

	mu sync.Mutex // of sending
}

// Attach starts (first.Spec set) or joins an exec. The exec as it stands comes
// with the first message that Receive returns.
func (c *Client) Attach(ctx context.Context, first *v1.AttachRequest) (*Attachment, error) {
	ctx, cancel := context.WithCancel(ctx)
	stream := c.Execs.Attach(ctx)
	// net/http does not look at the context while it waits for more of the
	// request: without this the daemon would not learn that nobody listens
	context.AfterFunc(ctx, func() { _ = stream.CloseRequest() })
	a := &Attachment{stream: stream, cancel: cancel, StdoutNext: first.StdoutOffset, StderrNext: first.StderrOffset}
	if err := a.stream.Send(first); err != nil {
		if errors.Is(err, io.EOF) { // the daemon has answered already
			_, err = a.stream.Receive()
		}
		cancel()
		return nil, err
	}
	return a, nil
}

// Receive returns the next piece of output; io.EOF after the last.
func (a *Attachment) Receive() (*v1.ExecOutput, error) {
	m, err := a.stream.Receive()
	if err != nil {
		return nil, err
	}
	if len(m.Stdout) > 0 {
		a.StdoutNext = m.Offset + int64(len(m.Stdout))
	}
	if len(m.Stderr) > 0 {
		a.StderrNext = m.Offset + int64(len(m.Stderr))
	}
	return m, nil
}

// Send sends input, a size or a signal. After the exec has ended it returns
// io.EOF.
func (a *Attachment) Send(m *v1.AttachRequest) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.stream.Send(m)
}

// Close leaves the exec to itself.
func (a *Attachment) Close() {
	a.cancel()
	_ = a.stream.CloseResponse()
}

// Copy sends what stdin gives (nil: nothing, without an end) and writes what
// the exec does, until it has ended. It returns the exec as it ended.
//
// A read of stdin that does not return keeps only its goroutine: Copy returns
// without it.
func (a *Attachment) Copy(stdin io.Reader, stdout, stderr io.Writer) (*v1.Exec, error) {
	if stdin != nil {
		go a.feed(stdin)
	}
	var last *v1.Exec
	for {
		m, err := a.Receive()
		if errors.Is(err, io.EOF) {
			return last, nil
		}
		if err != nil {
			return last, err
		}
		if m.Exec != nil {
			last = m.Exec
		}
		if err := writeOutput(m, stdout, stderr); err != nil {
			return last, sandbox.Conflict.Errorf("write output: %w", err)
		}
	}
}

// stdinChunk keeps a terminal's keys apart from each other and a pipe's bytes
// few messages.
const stdinChunk = 64 << 10

func (a *Attachment) feed(r io.Reader) {
	buf := make([]byte, stdinChunk)
	for {
		n, err := r.Read(buf)
		m := &v1.AttachRequest{Stdin: buf[:n], StdinEof: err != nil}
		if n > 0 || err != nil {
			if a.Send(m) != nil || err != nil {
				return
			}
		}
	}
}
