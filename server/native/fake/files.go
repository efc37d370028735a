package fake

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"vivarium/sandbox"
)

// Files implements native.Engine: those of a directory for each sandbox.
func (e *Engine) Files(_ context.Context, tenant, ref string) (sandbox.Files, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	b, err := e.find(tenant, ref)
	if err != nil {
		return nil, err
	}
	if !b.rec.Stage.Usable() {
		return nil, sandbox.Gone.Errorf("sandbox %s has ended", ref)
	}
	f := &files{dir: e.Dir(b.rec.ID), download: e.Download}
	return f, os.MkdirAll(f.dir, 0o755)
}

// Dir is the root directory of a sandbox.
func (e *Engine) Dir(id string) string { return filepath.Join(e.dir, id) }

type files struct {
	dir      string
	download func() []byte
}

func (f *files) at(p string) string { return filepath.Join(f.dir, path.Clean("/"+p)) }

func kinded(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return sandbox.NotFound.Errorf("no such file")
	case errors.Is(err, fs.ErrExist):
		return sandbox.Exists.Errorf("it exists")
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EISDIR):
		return sandbox.Invalid.Errorf("not of that type")
	}
	return err
}

func info(name string, fi fs.FileInfo, target string) sandbox.FileInfo {
	st := fi.Sys().(*syscall.Stat_t)
	return sandbox.FileInfo{Path: name, Size: fi.Size(), Mode: fi.Mode(), UID: st.Uid, GID: st.Gid, ModTime: fi.ModTime(), Target: target}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// Zeros is a path that reads as one GiB of nothing, and takes as much.
const Zeros = "/zeros"

func (f *files) Read(_ context.Context, p, _ string, offset, length int64) (io.ReadCloser, sandbox.FileInfo, error) {
	if p == Zeros {
		return io.NopCloser(io.LimitReader(zeros{}, 1<<30)), sandbox.FileInfo{Path: p, Size: 1 << 30}, nil
	}
	file, err := os.Open(f.at(p))
	if err != nil {
		return nil, sandbox.FileInfo{}, kinded(err)
	}
	fi, err := file.Stat()
	if err == nil && !fi.Mode().IsRegular() {
		err = sandbox.Invalid.Errorf("%s is not a regular file", p)
	}
	if err == nil {
		_, err = file.Seek(offset, io.SeekStart)
	}
	if err != nil {
		file.Close()
		return nil, sandbox.FileInfo{}, err
	}
	if length > 0 {
		return struct {
			io.Reader
			io.Closer
		}{io.LimitReader(file, length), file}, info(p, fi, ""), nil
	}
	return file, info(p, fi, ""), nil
}

func (f *files) Write(_ context.Context, o sandbox.WriteOptions, r io.Reader) (sandbox.FileInfo, error) {
	if o.Path == Zeros {
		n, err := io.Copy(io.Discard, r)
		return sandbox.FileInfo{Path: o.Path, Size: n}, err
	}
	dst := f.at(o.Path)
	if o.Parents {
		if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
			return sandbox.FileInfo{}, kinded(err)
		}
	}
	mode := o.Mode
	if mode == 0 {
		mode = 0o644
	}
	file, err := os.CreateTemp(filepath.Dir(dst), ".tmp")
	if err != nil {
		return sandbox.FileInfo{}, kinded(err)
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if _, err := io.Copy(file, r); err != nil {
		return sandbox.FileInfo{}, err
	}
	if err := file.Chmod(mode); err != nil {
		return sandbox.FileInfo{}, err
	}
	if !o.ModTime.IsZero() {
		if err := os.Chtimes(file.Name(), time.Time{}, o.ModTime); err != nil {
			return sandbox.FileInfo{}, err
		}
	}
	if err := os.Rename(file.Name(), dst); err != nil {
		return sandbox.FileInfo{}, kinded(err)
	}
	fi, err := os.Lstat(dst)
	if err != nil {
		return sandbox.FileInfo{}, kinded(err)
	}
	return info(o.Path, fi, ""), nil
}

func (f *files) List(_ context.Context, p, _ string, fn func([]sandbox.FileInfo) error) error {
	list, err := os.ReadDir(f.at(p))
	if err != nil {
		return kinded(err)
	}
	var out []sandbox.FileInfo
	for _, d := range list {
		fi, err := d.Info()
		if err != nil {
			return err
		}
		out = append(out, info(d.Name(), fi, ""))
	}
	return fn(out)
}

func (f *files) Stat(_ context.Context, p, _ string, follow bool) (sandbox.FileInfo, error) {
	stat := os.Lstat
	if follow {
		stat = os.Stat
	}
	fi, err := stat(f.at(p))
	if err != nil {
		return sandbox.FileInfo{}, kinded(err)
	}
	target := ""
	if fi.Mode().Type() == fs.ModeSymlink {
		target, _ = os.Readlink(f.at(p))
	}
	return info(p, fi, target), nil
}

func (f *files) MakeDir(_ context.Context, p, _ string, mode fs.FileMode, parents bool) error {
	if parents {
		return kinded(os.MkdirAll(f.at(p), mode))
	}
	return kinded(os.Mkdir(f.at(p), mode))
}

func (f *files) Remove(_ context.Context, p, _ string, recursive bool) error {
	if recursive {
		return kinded(os.RemoveAll(f.at(p)))
	}
	return kinded(os.Remove(f.at(p)))
}

func (f *files) Rename(_ context.Context, from, to, _ string) error {
	return kinded(os.Rename(f.at(from), f.at(to)))
}

func (f *files) Watch(ctx context.Context, p, _ string, _ bool, started func(), fn func(sandbox.FileEvent) error) error {
	started()
	if err := fn(sandbox.FileEvent{Op: sandbox.FileCreated, Path: p + "/x"}); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

func (f *files) Download(_ context.Context, p, _ string) (io.ReadCloser, error) {
	if f.download != nil {
		return io.NopCloser(bytes.NewReader(f.download())), nil
	}
	if _, err := os.Lstat(f.at(p)); err != nil {
		return nil, kinded(err)
	}
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	base := path.Base(path.Clean("/" + p))
	err := filepath.Walk(f.at(p), func(file string, fi fs.FileInfo, err error) error {
		if err != nil {
			return err
		}
		target, _ := os.Readlink(file)
		h, err := tar.FileInfoHeader(fi, target)
		if err != nil {
			return err
		}
		h.Name = path.Join(base, strings.TrimPrefix(file, f.at(p)))
		if err := w.WriteHeader(h); err != nil || !fi.Mode().IsRegular() {
			return err
		}
		b, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		_, err = w.Write(b)
		return err
	})
	if err == nil {
		err = w.Close()
	}
	return io.NopCloser(&buf), err
}

func (f *files) Upload(_ context.Context, p, _ string, _ bool, r io.Reader) (entries, n int64, err error) {
	if err := os.MkdirAll(f.at(p), 0o755); err != nil {
		return 0, 0, kinded(err)
	}
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return entries, n, nil
		}
		if err != nil {
			return entries, n, err
		}
		entries++
		dst := f.at(path.Join(p, h.Name))
		switch h.Typeflag {
		case tar.TypeDir:
			err = os.MkdirAll(dst, 0o755)
		case tar.TypeSymlink:
			err = os.Symlink(h.Linkname, dst)
		case tar.TypeReg:
			var b []byte
			if b, err = io.ReadAll(tr); err == nil {
				n += int64(len(b))
				err = os.WriteFile(dst, b, fs.FileMode(h.Mode))
			}
		}
		if err != nil {
			return entries, n, kinded(err)
		}
	}
}
