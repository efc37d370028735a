package guest

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"sync"
	"time"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// pathOp checks and encodes a request about a path.
func pathOp(user, path, other string, flag bool, n int64) (func([]byte) []byte, error) {
	if err := checkPath(user, path, other); err != nil {
		return nil, err
	}
	o := wire.PathOp{User: user, Path: path, Other: other, Flag: flag, N: n}
	return o.Append, nil
}

func checkPath(user string, paths ...string) error {
	if len(user) > wire.MaxUser {
		return sandbox.Invalid.Errorf("user name too long")
	}
	for _, p := range paths {
		if len(p) > wire.MaxPath {
			return sandbox.Invalid.Errorf("path longer than %d bytes", wire.MaxPath)
		}
	}
	return nil
}

func (c *Client) pathCall(ctx context.Context, m wire.Method, user, path, other string, flag bool, n int64) ([]byte, error) {
	fill, err := pathOp(user, path, other, flag, n)
	if err != nil {
		return nil, err
	}
	return c.call(ctx, m, fill)
}

// Stat describes a file; with follow, what a symbolic link leads to. In all of
// these methods user is as in ExecSpec, paths are absolute (relative ones are
// from /), links are followed as the sandbox's kernel does, and what the user
// may not do is refused (Denied).
func (c *Client) Stat(ctx context.Context, user, path string, follow bool) (sandbox.FileInfo, error) {
	p, err := c.pathCall(ctx, wire.MStat, user, path, "", follow, 0)
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	d := wire.NewDec(p)
	f := d.File()
	if d.End() != nil {
		return sandbox.FileInfo{}, broken("stat answered wrongly")
	}
	f.Name = path
	return f.Info(), nil
}

// Mkdir makes a directory, with parents also what is missing above it, and then
// it may exist. mode 0 is 0777 less the umask 022.
func (c *Client) Mkdir(ctx context.Context, user, path string, mode fs.FileMode, parents bool) error {
	_, err := c.pathCall(ctx, wire.MMkdir, user, path, "", parents, int64(wire.UnixMode(mode)))
	return err
}

// Remove removes a file or an empty directory, with recursive also one that is
// not empty.
func (c *Client) Remove(ctx context.Context, user, path string, recursive bool) error {
	_, err := c.pathCall(ctx, wire.MRemove, user, path, "", recursive, 0)
	return err
}

// Rename renames a file; with keep it fails (Exists) where the new name is
// taken.
func (c *Client) Rename(ctx context.Context, user, from, to string, keep bool) error {
	_, err := c.pathCall(ctx, wire.MRename, user, from, to, keep, 0)
	return err
}

// Symlink makes a symbolic link at path.
func (c *Client) Symlink(ctx context.Context, user, target, path string) error {
	_, err := c.pathCall(ctx, wire.MSymlink, user, path, target, false, 0)
	return err
}

// Attr is what to set of a file; nil leaves it.
type Attr struct {
	Mode     *fs.FileMode // permissions, setuid, setgid, sticky
	UID, GID *uint32
	ModTime  *time.Time
}

func (a Attr) wire() wire.Attr {
	w := wire.Attr{UID: a.UID, GID: a.GID, ModTime: a.ModTime}
	if a.Mode != nil {
		m := wire.UnixMode(*a.Mode)
		w.Mode = &m
	}
	return w
}

// SetAttr changes a file's attributes, following links.
func (c *Client) SetAttr(ctx context.Context, user, path string, a Attr) error {
	if err := checkPath(user, path); err != nil {
		return err
	}
	s := wire.SetAttr{User: user, Path: path, Attr: a.wire()}
	_, err := c.call(ctx, wire.MSetAttr, s.Append)
	return err
}

// transfer is a connection that bytes come over.
type transfer struct {
	c     *Client
	h     *hostConn
	ctx   context.Context
	stop  func() bool
	rest  []byte // of the current frame
	limit int64  // bytes that may still come; < 0: any
	got   int64  // bytes that came
	told  int64  // of them, those that the guest knows of
	asked bool   // the guest wants to know
	done  *wire.Done
	err   error
	once  sync.Once
}

// credit lets the guest go on, if it asked for that.
func (t *transfer) credit(step int64) {
	if !t.asked || t.got-t.told < step {
		return
	}
	t.told = t.got
	_ = t.h.send(wire.TCredit, func(b []byte) []byte { return wire.AppendInt(b, t.got) }) // a failure shows in the next read
}

func (c *Client) transfer(ctx context.Context, h *hostConn) *transfer {
	return &transfer{c: c, h: h, ctx: ctx, stop: interrupt(ctx, h.c), limit: -1}
}

// next reads the next frame.
func (t *transfer) next() (wire.Type, []byte, error) {
	t.h.readBy(t.ctx, time.Now().Add(t.c.opts.TransferTimeout))
	ty, p, err := t.h.r.Next()
	if err != nil {
		return 0, nil, t.c.failure(ctxError(t.ctx, err))
	}
	return ty, p, nil
}

// Read reads the bytes of a transfer.
func (t *transfer) Read(p []byte) (int, error) {
	for len(t.rest) == 0 {
		if err := t.more(); err != nil {
			return 0, err
		}
	}
	n := copy(p, t.rest)
	t.rest = t.rest[n:]
	return n, nil
}

// WriteTo writes all bytes of a transfer to w, from the buffer that they were
// received in.
func (t *transfer) WriteTo(w io.Writer) (n int64, err error) {
	for {
		if len(t.rest) > 0 {
			m, err := w.Write(t.rest)
			n += int64(m)
			t.rest = t.rest[m:]
			if err != nil {
				return n, err
			}
		}
		switch err := t.more(); err {
		case nil:
		case io.EOF:
			return n, nil
		default:
			return n, err
		}
	}
}

// more gets the next bytes into t.rest; at the end it returns io.EOF.
func (t *transfer) more() error {
	if t.err != nil {
		return t.err
	}
	ty, p, err := t.next()
	switch {
	case err != nil:
	case ty == wire.TData && len(p) > 0 && (t.limit < 0 || int64(len(p)) <= t.limit):
		t.rest = p
		t.got += int64(len(p))
		t.credit(wire.CreditStep)
		if t.limit >= 0 {
			t.limit -= int64(len(p))
		}
		return nil
	case ty == wire.TCredit && !t.asked:
		t.asked = true
		t.credit(0)
		return t.more()
	case ty == wire.TDone:
		var d wire.Done
		if d, err = wire.DecodeDone(p); err == nil {
			t.done = &d
			t.finish(true)
			t.err = io.EOF
			return t.err
		}
	case ty == wire.TError:
		t.err = t.said(p)
		return t.err
	default:
		err = broken("frame of type %d and %d bytes in a transfer", ty, len(p))
	}
	t.err = lost(err)
	t.finish(false)
	return t.err
}

// said ends the transfer with the guest's error.
func (t *transfer) said(p []byte) error {
	e, err := wire.DecodeError(wire.NewDec(p))
	t.finish(err == nil)
	if err != nil {
		return lost(err)
	}
	return e
}

// finish gives the connection back, or closes it.
func (t *transfer) finish(clean bool) {
	t.once.Do(func() {
		if t.stop() && clean {
			t.c.put(t.h)
		} else {
			t.c.discard(t.h)
		}
	})
}

// Close ends the transfer, wherever it is.
func (t *transfer) Close() error {
	t.finish(false)
	if t.err == nil {
		t.err = sandbox.Unavailable.Errorf("the transfer was closed")
	}
	return nil
}

// FileReader reads a file. Its owner must close it.
type FileReader struct {
	*transfer
	Info sandbox.FileInfo
}

// ReadFile reads n bytes of a regular file from offset off on, n < 0: to its
// end. Fewer come where the file ends earlier. Anything but a regular file is
// refused (Invalid). ctx counts until the reader is closed. A hostile file has no
// end: whoever keeps what comes has to bound it.
func (c *Client) ReadFile(ctx context.Context, user, path string, off, n int64) (*FileReader, error) {
	if err := checkPath(user, path); err != nil {
		return nil, err
	}
	if off < 0 {
		return nil, sandbox.Invalid.Errorf("negative offset")
	}
	req := wire.ReadFile{User: user, Path: path, Off: off, Len: max(n, -1)}
	h, t, p, err := c.request(ctx, wire.TRead, req.Append)
	if err != nil {
		return nil, err
	}
	switch t {
	case wire.TError:
		return nil, c.answered(h, p)
	case wire.TInfo:
		d := wire.NewDec(p)
		f := d.File()
		if d.End() == nil {
			f.Name = path
			r := &FileReader{c.transfer(ctx, h), f.Info()}
			r.limit = req.Len
			return r, nil
		}
	}
	c.discard(h)
	return nil, broken("read answered wrongly")
}

// WriteOptions say how a file is written.
type WriteOptions struct {
	Attr           // given to the file; a file replaced keeps its own otherwise
	Parents   bool // make missing directories
	Append    bool // in place, at the end
	InPlace   bool // not by a temporary file and rename
	Sync      bool // to the disk before it counts
	Exclusive bool // Exists where the file exists
}

// WriteResult is what was written.
type WriteResult struct {
	Bytes int64
	// InPlace says that the file was written in place: because that was asked
	// for, or because the user may write the file, but not replace it.
	InPlace bool
}

// WriteFile writes a file from r: all of it, or (unless in place) nothing. A
// symbolic link is followed.
func (c *Client) WriteFile(ctx context.Context, user, path string, r io.Reader, o WriteOptions) (WriteResult, error) {
	if err := checkPath(user, path); err != nil {
		return WriteResult{}, err
	}
	w := wire.WriteFile{User: user, Path: path, Attr: o.Attr.wire(), Parents: o.Parents, Append: o.Append, InPlace: o.InPlace, Sync: o.Sync, Exclusive: o.Exclusive}
	d, err := c.upload(ctx, wire.TWrite, w.AppendTo, r)
	return WriteResult{d.Bytes, d.InPlace}, err
}

// upload sends a request and what r has, and returns the result. The answer may
// come before all is sent: when the guest refuses.
func (c *Client) upload(ctx context.Context, ty wire.Type, fill func([]byte) []byte, r io.Reader) (wire.Done, error) {
	h, _, err := c.take(ctx)
	if err != nil {
		return wire.Done{}, err
	}
	t := c.transfer(ctx, h)
	if err := h.send(ty, fill); err != nil {
		t.finish(false)
		return wire.Done{}, c.failure(ctxError(ctx, err))
	}
	type answer struct {
		done wire.Done
		err  error
	}
	answered := make(chan answer, 1)
	flow := wire.NewFlow()
	h.readBy(ctx, time.Time{})
	go func() {
		var a answer
		rt, p, err := h.r.Next()
		for err == nil && rt == wire.TCredit {
			if err = flow.Credit(p); err == nil {
				rt, p, err = h.r.Next()
			}
		}
		defer flow.Fail(io.ErrClosedPipe)
		switch {
		case err != nil:
			a.err = c.failure(ctxError(ctx, err))
		case rt == wire.TDone:
			if a.done, err = wire.DecodeDone(p); err != nil {
				a.err = lost(err)
			}
		case rt == wire.TError:
			e, err := wire.DecodeError(wire.NewDec(p))
			if a.err = e; err != nil {
				a.err = lost(err)
			}
		default:
			a.err = broken("frame of type %d for an upload", rt)
		}
		answered <- a
	}()
	sent, rerr, werr := int64(0), error(nil), error(nil)
	buf := *chunks.Get().(*[]byte)
	defer chunks.Put(&buf)
loop:
	for {
		// While r is slow the guest has nothing to say: only ctx ends that.
		h.readBy(ctx, time.Time{})
		n, err := r.Read(buf)
		if n > 0 {
			h.readBy(ctx, time.Now().Add(c.opts.TransferTimeout))
			for p := buf[:n]; len(p) > 0; {
				m, err := flow.Wait(len(p))
				if err != nil {
					break loop // there is an answer
				}
				if werr = h.data(wire.TData, nil, p[:m]); werr != nil {
					break loop
				}
				sent += int64(m)
				p = p[m:]
			}
		}
		if err == io.EOF {
			werr = h.send(wire.TEnd, nil)
			break
		}
		if err != nil {
			rerr = err
			break
		}
	}
	if rerr != nil {
		t.finish(false) // the guest drops what it has
		<-answered
		var e *sandbox.Error
		if errors.As(rerr, &e) {
			return wire.Done{}, rerr
		}
		return wire.Done{}, sandbox.Invalid.Errorf("read what is to be uploaded: %w", rerr)
	}
	wait := c.opts.TransferTimeout
	if werr != nil {
		wait = time.Second // the guest may have said why before it closed
	}
	h.readBy(ctx, time.Now().Add(wait))
	a := <-answered
	if a.err == nil && ty == wire.TWrite && a.done.Bytes != sent {
		a.err = broken("%d bytes written of %d", a.done.Bytes, sent)
	}
	t.finish(a.err == nil)
	if a.err != nil && ctx.Err() != nil {
		a.err = lost(context.Cause(ctx))
	}
	return a.done, a.err
}

var chunks = sync.Pool{New: func() any { b := make([]byte, wire.MaxChunk); return &b }}

// ListDir calls fn for the files of a directory, in the order that the kernel
// gives them; Path is the name within. More than limit (0: a million) files are
// an error of kind Exhausted, after the first limit ones.
func (c *Client) ListDir(ctx context.Context, user, path string, limit int64, fn func(sandbox.FileInfo) error) error {
	if limit <= 0 {
		limit = 1_000_000
	}
	fill, err := pathOp(user, path, "", false, limit)
	if err != nil {
		return err
	}
	h, ty, p, err := c.request(ctx, wire.TList, fill)
	if err != nil {
		return err
	}
	t := c.transfer(ctx, h)
	defer t.finish(false)
	n := int64(0)
	for {
		switch ty {
		case wire.TError:
			return t.said(p)
		case wire.TPage:
			d := wire.NewDec(p)
			for d.More() {
				f := d.File()
				if d.Bad() || n >= limit || f.Name == "" {
					return broken("list answered wrongly")
				}
				n++
				if err := fn(f.Info()); err != nil {
					return err
				}
			}
			if d.End() != nil {
				return broken("list answered wrongly")
			}
		case wire.TDone:
			done, err := wire.DecodeDone(p)
			if err != nil {
				return lost(err)
			}
			t.finish(true)
			if done.More {
				return sandbox.Exhausted.Errorf("more than %d files in the directory", limit)
			}
			return nil
		default:
			return broken("frame of type %d in a list", ty)
		}
		if ty, p, err = t.next(); err != nil {
			return err
		}
	}
}
