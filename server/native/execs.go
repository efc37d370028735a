package native

import (
	"context"
	"errors"
	"io"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/api/vivarium/v1/vivariumv1connect"
	"vivarium/engine"
	"vivarium/sandbox"
	"vivarium/server"
)

type execs struct{ eng Engine }

var _ vivariumv1connect.ExecServiceHandler = (*execs)(nil)

// within bounds ctx by the timeout of a request; the error is the request's.
func within(ctx context.Context, d *durationpb.Duration) (context.Context, context.CancelFunc, error) {
	t, err := duration("timeout", d)
	if err != nil {
		return nil, nil, err
	}
	if t == 0 {
		return ctx, func() {}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, t)
	return ctx, cancel, nil
}

func checkExec(ref, id string) error {
	return firstOf(checkRef(ref), checkID("the exec's id", id))
}

func (x *execs) start(ctx context.Context, ref, id string, m *v1.ExecSpec) (sandbox.Exec, error) {
	if err := checkRef(ref); err != nil {
		return sandbox.Exec{}, err
	}
	if id != "" {
		if err := checkID("the exec's id", id); err != nil {
			return sandbox.Exec{}, err
		}
	}
	spec, err := execSpecFrom(m)
	if err != nil {
		return sandbox.Exec{}, err
	}
	return x.eng.StartExec(ctx, server.Tenant(ctx), ref, id, spec)
}

func (x *execs) Start(ctx context.Context, req *connect.Request[v1.StartExecRequest]) (*connect.Response[v1.StartExecResponse], error) {
	e, err := x.start(ctx, req.Msg.SandboxId, req.Msg.Id, req.Msg.Spec)
	if err != nil {
		return nil, err
	}
	return answer(&v1.StartExecResponse{Exec: execTo(e)}), nil
}

func (x *execs) Get(ctx context.Context, req *connect.Request[v1.GetExecRequest]) (*connect.Response[v1.GetExecResponse], error) {
	if err := checkExec(req.Msg.SandboxId, req.Msg.Id); err != nil {
		return nil, err
	}
	e, err := x.eng.GetExec(ctx, server.Tenant(ctx), req.Msg.SandboxId, req.Msg.Id)
	if err != nil {
		return nil, err
	}
	return answer(&v1.GetExecResponse{Exec: execTo(e)}), nil
}

func (x *execs) List(ctx context.Context, req *connect.Request[v1.ListExecsRequest]) (*connect.Response[v1.ListExecsResponse], error) {
	if err := checkRef(req.Msg.SandboxId); err != nil {
		return nil, err
	}
	list, err := x.eng.ListExecs(ctx, server.Tenant(ctx), req.Msg.SandboxId)
	if err != nil {
		return nil, err
	}
	res := &v1.ListExecsResponse{Execs: make([]*v1.Exec, len(list))}
	for i, e := range list {
		res.Execs[i] = execTo(e)
	}
	return answer(res), nil
}

func (x *execs) Wait(ctx context.Context, req *connect.Request[v1.WaitExecRequest]) (*connect.Response[v1.WaitExecResponse], error) {
	if err := checkExec(req.Msg.SandboxId, req.Msg.Id); err != nil {
		return nil, err
	}
	ctx, cancel, err := within(ctx, req.Msg.Timeout)
	if err != nil {
		return nil, err
	}
	defer cancel()
	e, err := x.eng.WaitExec(ctx, server.Tenant(ctx), req.Msg.SandboxId, req.Msg.Id)
	if err != nil {
		return nil, err
	}
	return answer(&v1.WaitExecResponse{Exec: execTo(e)}), nil
}

func (x *execs) WriteStdin(ctx context.Context, req *connect.Request[v1.WriteStdinRequest]) (*connect.Response[v1.WriteStdinResponse], error) {
	if err := checkExec(req.Msg.SandboxId, req.Msg.Id); err != nil {
		return nil, err
	}
	if req.Msg.Offset < 0 {
		return nil, sandbox.Invalid.Errorf("offset %d is below zero", req.Msg.Offset)
	}
	n, err := x.eng.WriteStdin(ctx, server.Tenant(ctx), req.Msg.SandboxId, req.Msg.Id, req.Msg.Offset, req.Msg.Data, req.Msg.Eof)
	if err != nil {
		return nil, err
	}
	return answer(&v1.WriteStdinResponse{StdinLen: n}), nil
}

func (x *execs) Signal(ctx context.Context, req *connect.Request[v1.SignalExecRequest]) (*connect.Response[v1.SignalExecResponse], error) {
	if err := firstOf(checkExec(req.Msg.SandboxId, req.Msg.Id), checkSignal(req.Msg.Signal)); err != nil {
		return nil, err
	}
	if err := x.eng.SignalExec(ctx, server.Tenant(ctx), req.Msg.SandboxId, req.Msg.Id, int(req.Msg.Signal)); err != nil {
		return nil, err
	}
	return answer(&v1.SignalExecResponse{}), nil
}

func (x *execs) Resize(ctx context.Context, req *connect.Request[v1.ResizeExecRequest]) (*connect.Response[v1.ResizeExecResponse], error) {
	size := req.Msg.GetSize()
	if err := firstOf(checkExec(req.Msg.SandboxId, req.Msg.Id), checkSize(size.GetRows(), size.GetCols())); err != nil {
		return nil, err
	}
	ws := sandbox.WindowSize{Rows: uint16(size.GetRows()), Cols: uint16(size.GetCols())}
	if err := x.eng.ResizeExec(ctx, server.Tenant(ctx), req.Msg.SandboxId, req.Msg.Id, ws); err != nil {
		return nil, err
	}
	return answer(&v1.ResizeExecResponse{}), nil
}

// sender is the sending side of the streams that carry output.
type sender interface{ Send(*v1.ExecOutput) error }

// follow sends the exec as it stands, its output, and the exec as it ended.
// Send returns once the bytes are under the client's flow control, so that a
// slow client holds up the engine's callback and nothing is queued here.
func (x *execs) follow(ctx context.Context, e sandbox.Exec, from engine.Offsets, follow bool, out sender) error {
	if err := out.Send(&v1.ExecOutput{Exec: execTo(e)}); err != nil {
		return err
	}
	var msg v1.ExecOutput
	end, err := x.eng.Output(ctx, server.Tenant(ctx), e.SandboxID, e.ID, from, follow, func(o engine.Output) error {
		for first := true; first || len(o.Data) > 0; first = false {
			n := min(len(o.Data), server.Chunk)
			msg.Offset, msg.Dropped, msg.Stdout, msg.Stderr = o.Offset, o.Dropped, nil, nil
			if o.Stream == sandbox.Stderr {
				msg.Stderr = o.Data[:n]
			} else {
				msg.Stdout = o.Data[:n]
			}
			if err := out.Send(&msg); err != nil {
				return err
			}
			o.Data, o.Offset, o.Dropped = o.Data[n:], o.Offset+int64(n), false
		}
		return nil
	})
	if err != nil {
		return err
	}
	return out.Send(&v1.ExecOutput{Exec: execTo(end)})
}

func (x *execs) Run(ctx context.Context, req *connect.Request[v1.RunExecRequest], stream *connect.ServerStream[v1.ExecOutput]) error {
	e, err := x.start(ctx, req.Msg.SandboxId, req.Msg.Id, req.Msg.Spec)
	if err != nil {
		return err
	}
	return x.follow(ctx, e, engine.Offsets{}, true, stream)
}

func (x *execs) Output(ctx context.Context, req *connect.Request[v1.ReadOutputRequest], stream *connect.ServerStream[v1.ExecOutput]) error {
	if err := firstOf(checkExec(req.Msg.SandboxId, req.Msg.Id), checkOffsets(req.Msg.StdoutOffset, req.Msg.StderrOffset)); err != nil {
		return err
	}
	e, err := x.eng.GetExec(ctx, server.Tenant(ctx), req.Msg.SandboxId, req.Msg.Id)
	if err != nil {
		return err
	}
	from := engine.Offsets{Stdout: req.Msg.StdoutOffset, Stderr: req.Msg.StderrOffset}
	return x.follow(ctx, e, from, req.Msg.Follow, stream)
}

func checkOffsets(out, err int64) error {
	if out < -1 || err < -1 {
		return sandbox.Invalid.Errorf("an offset is below -1")
	}
	return nil
}

// Attach is the conversation of a terminal: output one way, input, sizes and
// signals the other. The exec is not tied to it: it ends when the exec does,
// or when the client goes away, which the exec does not notice.
func (x *execs) Attach(ctx context.Context, stream *connect.BidiStream[v1.AttachRequest, v1.ExecOutput]) error {
	first, err := stream.Receive()
	if err != nil {
		if errors.Is(err, io.EOF) {
			return sandbox.Invalid.Errorf("the first message is missing")
		}
		return err
	}
	if err := checkOffsets(first.StdoutOffset, first.StderrOffset); err != nil {
		return err
	}
	var e sandbox.Exec
	if first.Spec != nil {
		e, err = x.start(ctx, first.SandboxId, first.Id, first.Spec)
	} else if err = checkExec(first.SandboxId, first.Id); err == nil {
		e, err = x.eng.GetExec(ctx, server.Tenant(ctx), first.SandboxId, first.Id)
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	in := &attachInput{eng: x.eng, tenant: server.Tenant(ctx), e: e, offset: e.StdinLen}
	if first.StdinOffset != nil {
		in.offset = *first.StdinOffset
	}
	// The reader ends with the stream, which closes when this handler returns;
	// an error of the input ends the output too.
	go func() {
		if err := in.run(ctx, first, stream.Receive); err != nil {
			cancel(err)
		}
	}()
	err = x.follow(ctx, e, engine.Offsets{Stdout: first.StdoutOffset, Stderr: first.StderrOffset}, true, stream)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	cancel(nil)
	return err
}

// attachInput carries what a client sends over an Attach to the exec.
type attachInput struct {
	eng    Engine
	tenant string
	e      sandbox.Exec
	offset int64
}

// stdinQueue is how many messages of input may wait for a command that does
// not read. Signals and sizes that come behind a full queue wait with them; a
// client that must get through uses the calls Signal and Resize.
const stdinQueue = 4

func (a *attachInput) run(ctx context.Context, first *v1.AttachRequest, receive func() (*v1.AttachRequest, error)) error {
	type piece struct {
		data []byte
		eof  bool
	}
	queue := make(chan piece, stdinQueue)
	done := make(chan error, 1)
	go func() {
		for p := range queue {
			_, err := a.eng.WriteStdin(ctx, a.tenant, a.e.SandboxID, a.e.ID, a.offset, p.data, p.eof)
			if err != nil {
				done <- err
				return
			}
			a.offset += int64(len(p.data))
		}
		done <- nil
	}()
	closed := false
	feed := func(m *v1.AttachRequest) error {
		if (len(m.Stdin) > 0 || m.StdinEof) && !closed {
			select {
			case queue <- piece{m.Stdin, m.StdinEof}:
			case err := <-done:
				// The exec takes no more input: it closed it, ended, or is gone.
				// What it still writes is delivered; a real mistake is told.
				closed = true
				if k := sandbox.KindOf(err); k == sandbox.Invalid || k == sandbox.Internal {
					return err
				}
			case <-ctx.Done():
				return nil
			}
		}
		if m.Resize != nil {
			if err := checkSize(m.Resize.Rows, m.Resize.Cols); err != nil {
				return err
			}
			ws := sandbox.WindowSize{Rows: uint16(m.Resize.Rows), Cols: uint16(m.Resize.Cols)}
			if err := a.eng.ResizeExec(ctx, a.tenant, a.e.SandboxID, a.e.ID, ws); sandbox.KindOf(err) == sandbox.Invalid {
				return err
			}
		}
		if m.Signal != 0 {
			if err := checkSignal(m.Signal); err != nil {
				return err
			}
			// One that comes too late is no mistake.
			_ = a.eng.SignalExec(ctx, a.tenant, a.e.SandboxID, a.e.ID, int(m.Signal))
		}
		return nil
	}
	defer close(queue)
	for m := first; ; {
		if err := feed(m); err != nil {
			return err
		}
		var err error
		if m, err = receive(); err != nil {
			return nil // half closed or gone: neither is the end of the input
		}
	}
}
