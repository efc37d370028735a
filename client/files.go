package client

import (
	"context"
	"errors"
	"io"

	"connectrpc.com/connect"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/sandbox"
)

// ReadFile opens a file; length 0 reads to its end. Close the reader.
func (c *Client) ReadFile(ctx context.Context, req *v1.ReadFileRequest) (io.ReadCloser, *v1.FileInfo, error) {
	ctx, cancel := context.WithCancel(ctx)
	s, err := c.Files.Read(ctx, connect.NewRequest(req))
	if err != nil {
		cancel()
		return nil, nil, err
	}
	r := &streamReader[v1.ReadFileResponse]{s: s, cancel: cancel, data: (*v1.ReadFileResponse).GetData}
	m, err := r.receive()
	if err != nil {
		r.Close()
		if errors.Is(err, io.EOF) {
			err = sandbox.Internal.Errorf("the daemon's answer is empty")
		}
		return nil, nil, err
	}
	r.rest = m.Data
	return r, m.Info, nil
}

// streamReader reads the bytes that the messages of a stream carry.
type streamReader[T any] struct {
	s      *connect.ServerStreamForClient[T]
	cancel context.CancelFunc
	data   func(*T) []byte
	rest   []byte
}

func (r *streamReader[T]) receive() (*T, error) {
	if r.s.Receive() {
		return r.s.Msg(), nil
	}
	if err := r.s.Err(); err != nil {
		return nil, err
	}
	return nil, io.EOF
}

func (r *streamReader[T]) fill() error {
	for len(r.rest) == 0 {
		m, err := r.receive()
		if err != nil {
			return err
		}
		r.rest = r.data(m)
	}
	return nil
}

func (r *streamReader[T]) Read(p []byte) (int, error) {
	if err := r.fill(); err != nil {
		return 0, err
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// WriteTo saves io.Copy a buffer and a copy.
func (r *streamReader[T]) WriteTo(w io.Writer) (total int64, err error) {
	for {
		if err := r.fill(); err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return total, err
		}
		n, err := w.Write(r.rest)
		total += int64(n)
		if err != nil {
			return total, err
		}
		r.rest = nil
	}
}

func (r *streamReader[T]) Close() error {
	r.cancel()
	return r.s.Close()
}

// send sends what r gives after the first message. An error of r is returned
// as it is, and the daemon sees a request that was broken off.
func send[Req, Res any](ctx context.Context, open func(context.Context) *connect.ClientStreamForClient[Req, Res], first *Req, r io.Reader, set func([]byte) *Req) (*Res, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := open(ctx)
	err := s.Send(first)
	buf := make([]byte, Chunk)
	for err == nil {
		n, rerr := io.ReadFull(r, buf)
		if n > 0 {
			err = s.Send(set(buf[:n]))
		}
		if errors.Is(rerr, io.EOF) || errors.Is(rerr, io.ErrUnexpectedEOF) {
			break
		}
		if rerr != nil {
			cancel()
			_, _ = s.CloseAndReceive()
			return nil, rerr
		}
	}
	if err != nil && !errors.Is(err, io.EOF) { // EOF: the daemon has answered already
		return nil, err
	}
	res, err := s.CloseAndReceive()
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

// WriteFile writes what r gives; first has everything but the data.
func (c *Client) WriteFile(ctx context.Context, first *v1.WriteFileRequest, r io.Reader) (*v1.FileInfo, error) {
	res, err := send(ctx, c.Files.Write, first, r, func(p []byte) *v1.WriteFileRequest { return &v1.WriteFileRequest{Data: p} })
	return res.GetInfo(), err
}

// Upload extracts a tar stream into a directory of the sandbox.
func (c *Client) Upload(ctx context.Context, ref, path, user string, r io.Reader) (entries, bytes int64, err error) {
	return c.UploadAs(ctx, &v1.UploadRequest{SandboxId: ref, Path: []byte(path), User: user}, r)
}

// UploadAs is Upload with all that can be said about it.
func (c *Client) UploadAs(ctx context.Context, first *v1.UploadRequest, r io.Reader) (entries, bytes int64, err error) {
	res, err := send(ctx, c.Files.Upload, first, r, func(p []byte) *v1.UploadRequest { return &v1.UploadRequest{Tar: p} })
	return res.GetEntries(), res.GetBytes(), err
}

// Download returns a tar stream of a file or directory. Close it.
func (c *Client) Download(ctx context.Context, ref, path, user string) (io.ReadCloser, error) {
	ctx, cancel := context.WithCancel(ctx)
	s, err := c.Files.Download(ctx, connect.NewRequest(&v1.DownloadRequest{SandboxId: ref, Path: []byte(path), User: user}))
	if err != nil {
		cancel()
		return nil, err
	}
	r := &streamReader[v1.DownloadResponse]{s: s, cancel: cancel, data: (*v1.DownloadResponse).GetTar}
	// The first message tells an error before anything is made of the stream.
	m, err := r.receive()
	switch {
	case errors.Is(err, io.EOF):
	case err != nil:
		r.Close()
		return nil, err
	default:
		r.rest = m.Tar
	}
	return r, nil
}

// Stat describes a file.
func (c *Client) Stat(ctx context.Context, ref, path, user string, follow bool) (*v1.FileInfo, error) {
	res, err := c.Files.Stat(ctx, connect.NewRequest(&v1.StatFileRequest{SandboxId: ref, Path: []byte(path), User: user, Follow: follow}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Info, nil
}

// ListFiles calls fn with pages of a directory's entries.
func (c *Client) ListFiles(ctx context.Context, ref, path, user string, fn func([]*v1.FileInfo) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.Files.List(ctx, connect.NewRequest(&v1.ListFilesRequest{SandboxId: ref, Path: []byte(path), User: user}))
	if err != nil {
		return err
	}
	return each(s, func(m *v1.ListFilesResponse) error { return fn(m.Files) })
}

// MakeDir makes a directory; mode 0 is 0755.
func (c *Client) MakeDir(ctx context.Context, ref, path, user string, mode uint32, parents bool) error {
	_, err := c.Files.MakeDir(ctx, connect.NewRequest(&v1.MakeDirRequest{SandboxId: ref, Path: []byte(path), User: user, Mode: mode, Parents: parents}))
	return err
}

// RemoveFile removes a file or directory.
func (c *Client) RemoveFile(ctx context.Context, ref, path, user string, recursive bool) error {
	_, err := c.Files.Remove(ctx, connect.NewRequest(&v1.RemoveFileRequest{SandboxId: ref, Path: []byte(path), User: user, Recursive: recursive}))
	return err
}

// RenameFile renames a file or directory.
func (c *Client) RenameFile(ctx context.Context, ref, from, to, user string) error {
	_, err := c.Files.Rename(ctx, connect.NewRequest(&v1.RenameFileRequest{SandboxId: ref, From: []byte(from), To: []byte(to), User: user}))
	return err
}

// WatchFiles calls fn with every change until ctx ends or fn fails. The first
// event has the op ready.
func (c *Client) WatchFiles(ctx context.Context, req *v1.WatchFilesRequest, fn func(*v1.FileEvent) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.Files.Watch(ctx, connect.NewRequest(req))
	if err != nil {
		return err
	}
	return each(s, fn)
}
