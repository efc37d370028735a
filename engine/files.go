package engine

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"path"
	"strings"

	"vivarium/guest"
	"vivarium/sandbox"
)

// files are the files of a living sandbox, through its guest.
type files struct{ b *box }

var _ sandbox.Files = files{}

// Files of a running sandbox. Every use counts as activity.
func (e *Engine) Files(ctx context.Context, tenant, ref string) (sandbox.Files, error) {
	b, err := e.usable(ctx, tenant, ref)
	if err != nil {
		return nil, err
	}
	return files{b}, nil
}

// usable finds a box that runs, waiting for one that is on its way.
func (e *Engine) usable(ctx context.Context, tenant, ref string) (*box, error) {
	b, err := e.living(ctx, tenant, ref)
	if err != nil {
		return nil, err
	}
	if !b.record().Stage.Usable() {
		if _, err := e.waitBox(ctx, b, UntilRunning); err != nil {
			return nil, err
		}
	}
	return b, nil
}

// use gives the guest, who to be and where, and notes activity until end.
func (f files) use(ctx context.Context, as string, paths ...*string) (c *guest.Client, user string, end func(), err error) {
	c, err = f.b.guest(ctx)
	if err != nil {
		return nil, "", nil, err
	}
	sb := f.b.record()
	user = as
	if user == "" {
		user = userOf(&sb)
	}
	for _, p := range paths {
		if *p == "" || strings.ContainsRune(*p, 0) {
			return nil, "", nil, sandbox.Invalid.Errorf("path %q", *p)
		}
		if !path.IsAbs(*p) {
			// not path.Join: it would clean "..", which is the kernel's to follow
			*p = strings.TrimSuffix(workdir(&sb), "/") + "/" + *p
		}
	}
	return c, user, f.b.begin(), nil
}

func (f files) Read(ctx context.Context, path, user string, offset, length int64) (io.ReadCloser, sandbox.FileInfo, error) {
	c, user, end, err := f.use(ctx, user, &path)
	if err != nil {
		return nil, sandbox.FileInfo{}, err
	}
	if length <= 0 {
		length = -1
	}
	r, err := c.ReadFile(ctx, user, path, offset, length)
	if err != nil {
		end()
		return nil, sandbox.FileInfo{}, err
	}
	return &activeReader{r, end}, r.Info, nil
}

// activeReader counts as activity until it is closed.
type activeReader struct {
	io.ReadCloser
	end func()
}

func (r *activeReader) Close() error {
	r.end()
	return r.ReadCloser.Close()
}

// WriteTo keeps the fast path of the reader below.
func (r *activeReader) WriteTo(w io.Writer) (int64, error) { return io.Copy(w, r.ReadCloser) }

func (f files) Write(ctx context.Context, o sandbox.WriteOptions, r io.Reader) (sandbox.FileInfo, error) {
	c, user, end, err := f.use(ctx, o.User, &o.Path)
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	defer end()
	w := guest.WriteOptions{Parents: o.Parents, Append: o.Append}
	if o.Mode != 0 {
		w.Mode = &o.Mode
	}
	if !o.ModTime.IsZero() {
		w.ModTime = &o.ModTime
	}
	if _, err := c.WriteFile(ctx, user, o.Path, r, w); err != nil {
		return sandbox.FileInfo{}, err
	}
	return c.Stat(ctx, user, o.Path, true)
}

// listPage is how many entries List hands on at once.
const listPage = 500

func (f files) List(ctx context.Context, path, user string, fn func([]sandbox.FileInfo) error) error {
	c, user, end, err := f.use(ctx, user, &path)
	if err != nil {
		return err
	}
	defer end()
	page := make([]sandbox.FileInfo, 0, listPage)
	err = c.ListDir(ctx, user, path, 0, func(i sandbox.FileInfo) error {
		page = append(page, i)
		if len(page) < listPage {
			return nil
		}
		err := fn(page)
		page = page[:0]
		return err
	})
	if err != nil || len(page) == 0 {
		return err
	}
	return fn(page)
}

func (f files) Stat(ctx context.Context, path, user string, follow bool) (sandbox.FileInfo, error) {
	c, user, end, err := f.use(ctx, user, &path)
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	defer end()
	return c.Stat(ctx, user, path, follow)
}

func (f files) MakeDir(ctx context.Context, path, user string, mode fs.FileMode, parents bool) error {
	c, user, end, err := f.use(ctx, user, &path)
	if err != nil {
		return err
	}
	defer end()
	if mode == 0 {
		mode = 0o755
	}
	return c.Mkdir(ctx, user, path, mode, parents)
}

func (f files) Remove(ctx context.Context, path, user string, recursive bool) error {
	c, user, end, err := f.use(ctx, user, &path)
	if err != nil {
		return err
	}
	defer end()
	return c.Remove(ctx, user, path, recursive)
}

func (f files) Rename(ctx context.Context, from, to, user string) error {
	c, user, end, err := f.use(ctx, user, &from, &to)
	if err != nil {
		return err
	}
	defer end()
	return c.Rename(ctx, user, from, to, false)
}

func (f files) Watch(ctx context.Context, path, user string, recursive bool, started func(), fn func(sandbox.FileEvent) error) error {
	c, user, end, err := f.use(ctx, user, &path)
	if err != nil {
		return err
	}
	defer end()
	w, err := c.Watch(ctx, user, path, recursive)
	if err != nil {
		return err
	}
	defer w.Close()
	started()
	for {
		evs, err := w.Next()
		if errors.Is(err, io.EOF) { // what was watched is gone
			return nil
		}
		if err != nil {
			return err
		}
		for _, ev := range evs {
			if err := fn(ev); err != nil {
				return err
			}
		}
	}
}

func (f files) Download(ctx context.Context, path, user string) (io.ReadCloser, error) {
	c, user, end, err := f.use(ctx, user, &path)
	if err != nil {
		return nil, err
	}
	r, err := c.TarOut(ctx, user, path, "", false)
	if err != nil {
		end()
		return nil, err
	}
	return &activeReader{r, end}, nil
}

func (f files) Upload(ctx context.Context, path, user string, owners bool, r io.Reader) (entries, bytes int64, err error) {
	c, user, end, err := f.use(ctx, user, &path)
	if err != nil {
		return 0, 0, err
	}
	defer end()
	res, err := c.TarIn(ctx, user, path, r, guest.TarOptions{Parents: true, Owners: owners})
	return res.Entries, res.Bytes, err
}

// Dial connects to a TCP port inside. The connection counts as activity.
func (e *Engine) Dial(ctx context.Context, tenant, ref string, port uint16) (net.Conn, error) {
	if port == 0 {
		return nil, sandbox.Invalid.Errorf("port 0")
	}
	b, err := e.usable(ctx, tenant, ref)
	if err != nil {
		return nil, err
	}
	c, err := b.guest(ctx)
	if err != nil {
		return nil, err
	}
	conn, err := c.Dial(ctx, port)
	if err != nil {
		return nil, err
	}
	return &activeConn{conn, b.begin()}, nil
}

type activeConn struct {
	net.Conn
	end func()
}

func (c *activeConn) Close() error {
	c.end()
	return c.Conn.Close()
}

// CloseWrite ends what is sent, as net.TCPConn's does.
func (c *activeConn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return sandbox.Unsupported.Errorf("close one direction of %T", c.Conn)
}
