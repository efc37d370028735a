package native

import (
	"context"
	"errors"
	"io"
	"sync"

	"connectrpc.com/connect"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/api/vivarium/v1/vivariumv1connect"
	"vivarium/sandbox"
	"vivarium/server"
)

// listPage is how many entries one message of a listing has at most.
const listPage = 1024

type files struct{ eng Engine }

var _ vivariumv1connect.FileServiceHandler = (*files)(nil)

func (f *files) of(ctx context.Context, ref, user string) (sandbox.Files, error) {
	if err := firstOf(checkRef(ref), checkUser(user)); err != nil {
		return nil, err
	}
	return f.eng.Files(ctx, server.Tenant(ctx), ref)
}

func (f *files) Read(ctx context.Context, req *connect.Request[v1.ReadFileRequest], stream *connect.ServerStream[v1.ReadFileResponse]) error {
	m := req.Msg
	if err := checkPath("the path", m.Path, false); err != nil {
		return err
	}
	if m.Offset < 0 || m.Length < 0 {
		return sandbox.Invalid.Errorf("the offset or the length is below zero")
	}
	fs, err := f.of(ctx, m.SandboxId, m.User)
	if err != nil {
		return err
	}
	r, info, err := fs.Read(ctx, string(m.Path), m.User, m.Offset, m.Length)
	if err != nil {
		return err
	}
	defer r.Close()
	if err := stream.Send(&v1.ReadFileResponse{Info: fileTo(info)}); err != nil {
		return err
	}
	var msg v1.ReadFileResponse
	return pump(r, func(p []byte) error { msg.Data = p; return stream.Send(&msg) })
}

// chunks are buffers for pump.
var chunks = sync.Pool{New: func() any { return new([server.Chunk]byte) }}

// pump sends what r gives in messages that are full where r is fast.
func pump(r io.Reader, send func([]byte) error) error {
	p := chunks.Get().(*[server.Chunk]byte)
	defer chunks.Put(p)
	buf := p[:]
	for {
		n, err := io.ReadFull(r, buf)
		if n > 0 {
			if serr := send(buf[:n]); serr != nil {
				return serr
			}
		}
		switch {
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
			return nil
		case err != nil:
			return err
		}
	}
}

// messages reads the bytes that the messages of a client stream carry.
type messages struct {
	rest []byte
	next func() ([]byte, error) // io.EOF at the end
}

func (m *messages) Read(p []byte) (int, error) {
	for len(m.rest) == 0 {
		b, err := m.next()
		if err != nil {
			return 0, err
		}
		m.rest = b
	}
	n := copy(p, m.rest)
	m.rest = m.rest[n:]
	return n, nil
}

// WriteTo saves io.Copy a buffer and a copy.
func (m *messages) WriteTo(w io.Writer) (total int64, err error) {
	for {
		if len(m.rest) > 0 {
			n, err := w.Write(m.rest)
			total += int64(n)
			if err != nil {
				return total, err
			}
		}
		if m.rest, err = m.next(); err != nil {
			m.rest = nil
			if errors.Is(err, io.EOF) {
				return total, nil
			}
			return total, err
		}
	}
}

// following returns the bytes of the messages after the first.
func following[T any](stream *connect.ClientStream[T], data func(*T) []byte) func() ([]byte, error) {
	return func() ([]byte, error) {
		if stream.Receive() {
			return data(stream.Msg()), nil
		}
		if err := stream.Err(); err != nil {
			// Not a clean end: the file must not be taken for whole.
			return nil, sandbox.Unavailable.Errorf("receive from the client: %w", err)
		}
		return nil, io.EOF
	}
}

func (f *files) Write(ctx context.Context, stream *connect.ClientStream[v1.WriteFileRequest]) (*connect.Response[v1.WriteFileResponse], error) {
	if !stream.Receive() {
		if err := stream.Err(); err != nil {
			return nil, err
		}
		return nil, sandbox.Invalid.Errorf("the first message is missing")
	}
	m := stream.Msg()
	if err := firstOf(checkPath("the path", m.Path, false), checkMode(m.Mode), checkTime("mtime", m.Mtime)); err != nil {
		return nil, err
	}
	fs, err := f.of(ctx, m.SandboxId, m.User)
	if err != nil {
		return nil, err
	}
	o := sandbox.WriteOptions{Path: string(m.Path), User: m.User, Mode: permMode(m.Mode), Parents: m.Parents, Append: m.Append}
	if m.Mtime != nil {
		o.ModTime = m.Mtime.AsTime()
	}
	r := &messages{rest: m.Data, next: following(stream, (*v1.WriteFileRequest).GetData)}
	info, err := fs.Write(ctx, o, r)
	if err != nil {
		return nil, err
	}
	return answer(&v1.WriteFileResponse{Info: fileTo(info)}), nil
}

func (f *files) List(ctx context.Context, req *connect.Request[v1.ListFilesRequest], stream *connect.ServerStream[v1.ListFilesResponse]) error {
	if err := checkPath("the path", req.Msg.Path, true); err != nil {
		return err
	}
	fs, err := f.of(ctx, req.Msg.SandboxId, req.Msg.User)
	if err != nil {
		return err
	}
	return fs.List(ctx, string(req.Msg.Path), req.Msg.User, func(page []sandbox.FileInfo) error {
		for len(page) > 0 {
			n := min(len(page), listPage)
			res := &v1.ListFilesResponse{Files: make([]*v1.FileInfo, n)}
			for i, fi := range page[:n] {
				res.Files[i] = fileTo(fi)
			}
			if err := stream.Send(res); err != nil {
				return err
			}
			page = page[n:]
		}
		return nil
	})
}

func (f *files) Stat(ctx context.Context, req *connect.Request[v1.StatFileRequest]) (*connect.Response[v1.StatFileResponse], error) {
	if err := checkPath("the path", req.Msg.Path, false); err != nil {
		return nil, err
	}
	fs, err := f.of(ctx, req.Msg.SandboxId, req.Msg.User)
	if err != nil {
		return nil, err
	}
	info, err := fs.Stat(ctx, string(req.Msg.Path), req.Msg.User, req.Msg.Follow)
	if err != nil {
		return nil, err
	}
	return answer(&v1.StatFileResponse{Info: fileTo(info)}), nil
}

func (f *files) MakeDir(ctx context.Context, req *connect.Request[v1.MakeDirRequest]) (*connect.Response[v1.MakeDirResponse], error) {
	m := req.Msg
	if err := firstOf(checkPath("the path", m.Path, false), checkMode(m.Mode)); err != nil {
		return nil, err
	}
	fs, err := f.of(ctx, m.SandboxId, m.User)
	if err != nil {
		return nil, err
	}
	mode := permMode(m.Mode)
	if mode == 0 {
		mode = 0o755
	}
	if err := fs.MakeDir(ctx, string(m.Path), m.User, mode, m.Parents); err != nil {
		return nil, err
	}
	return answer(&v1.MakeDirResponse{}), nil
}

func (f *files) Remove(ctx context.Context, req *connect.Request[v1.RemoveFileRequest]) (*connect.Response[v1.RemoveFileResponse], error) {
	if err := checkPath("the path", req.Msg.Path, false); err != nil {
		return nil, err
	}
	fs, err := f.of(ctx, req.Msg.SandboxId, req.Msg.User)
	if err != nil {
		return nil, err
	}
	if err := fs.Remove(ctx, string(req.Msg.Path), req.Msg.User, req.Msg.Recursive); err != nil {
		return nil, err
	}
	return answer(&v1.RemoveFileResponse{}), nil
}

func (f *files) Rename(ctx context.Context, req *connect.Request[v1.RenameFileRequest]) (*connect.Response[v1.RenameFileResponse], error) {
	if err := firstOf(checkPath("the old path", req.Msg.From, false), checkPath("the new path", req.Msg.To, false)); err != nil {
		return nil, err
	}
	fs, err := f.of(ctx, req.Msg.SandboxId, req.Msg.User)
	if err != nil {
		return nil, err
	}
	if err := fs.Rename(ctx, string(req.Msg.From), string(req.Msg.To), req.Msg.User); err != nil {
		return nil, err
	}
	return answer(&v1.RenameFileResponse{}), nil
}

func (f *files) Watch(ctx context.Context, req *connect.Request[v1.WatchFilesRequest], stream *connect.ServerStream[v1.FileEvent]) error {
	if err := checkPath("the path", req.Msg.Path, false); err != nil {
		return err
	}
	fs, err := f.of(ctx, req.Msg.SandboxId, req.Msg.User)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	started := func() {
		if err := stream.Send(&v1.FileEvent{Op: "ready"}); err != nil {
			cancel(err)
		}
	}
	return fs.Watch(ctx, string(req.Msg.Path), req.Msg.User, req.Msg.Recursive, started, func(e sandbox.FileEvent) error {
		return stream.Send(&v1.FileEvent{Op: string(e.Op), Path: []byte(e.Path), From: []byte(e.From)})
	})
}

func (f *files) Download(ctx context.Context, req *connect.Request[v1.DownloadRequest], stream *connect.ServerStream[v1.DownloadResponse]) error {
	if err := checkPath("the path", req.Msg.Path, false); err != nil {
		return err
	}
	fs, err := f.of(ctx, req.Msg.SandboxId, req.Msg.User)
	if err != nil {
		return err
	}
	r, err := fs.Download(ctx, string(req.Msg.Path), req.Msg.User)
	if err != nil {
		return err
	}
	defer r.Close()
	var msg v1.DownloadResponse
	return pump(r, func(p []byte) error { msg.Tar = p; return stream.Send(&msg) })
}

func (f *files) Upload(ctx context.Context, stream *connect.ClientStream[v1.UploadRequest]) (*connect.Response[v1.UploadResponse], error) {
	if !stream.Receive() {
		if err := stream.Err(); err != nil {
			return nil, err
		}
		return nil, sandbox.Invalid.Errorf("the first message is missing")
	}
	m := stream.Msg()
	if err := checkPath("the path", m.Path, false); err != nil {
		return nil, err
	}
	fs, err := f.of(ctx, m.SandboxId, m.User)
	if err != nil {
		return nil, err
	}
	r := &messages{rest: m.Tar, next: following(stream, (*v1.UploadRequest).GetTar)}
	entries, bytes, err := fs.Upload(ctx, string(m.Path), m.User, m.Owners, r)
	if err != nil {
		return nil, err
	}
	return answer(&v1.UploadResponse{Entries: entries, Bytes: bytes}), nil
}
