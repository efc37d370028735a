package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"regexp"
	"strings"
	"sync"

	"vivarium/sandbox"
)

// blobs is a place with named files: an OCI layout directory, or a tar of one
// or of docker save.
type blobs interface {
	open(name string) (io.ReadCloser, error)
	Close() error
}

// dirBlobs is a directory. Names and links cannot lead out of it.
type dirBlobs struct{ root *os.Root }

func (d dirBlobs) open(name string) (io.ReadCloser, error) {
	f, err := d.root.Open(name)
	if err != nil {
		return nil, missingBlob(name, err)
	}
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		f.Close()
		return nil, sandbox.Invalid.Errorf("archive: %.80q is not a regular file", name)
	}
	return f, nil
}

func (d dirBlobs) Close() error { return d.root.Close() }

func missingBlob(name string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return sandbox.Invalid.Errorf("archive lacks %.80q", name)
	}
	return err
}

// tarBlobs is an uncompressed tar file.
type tarBlobs struct {
	f     *os.File
	at    map[string]span   // regular files
	links map[string]string // symbolic links, by which docker save repeats layers
}

type span struct{ off, size int64 }

func (t *tarBlobs) open(name string) (io.ReadCloser, error) {
	name = path.Clean(name)
	if to, ok := t.links[name]; ok {
		name = path.Join(path.Dir(name), to)
	}
	s, ok := t.at[name]
	if !ok {
		return nil, missingBlob(name, fs.ErrNotExist)
	}
	return io.NopCloser(io.NewSectionReader(t.f, s.off, s.size)), nil
}

func (t *tarBlobs) Close() error { return t.f.Close() }

// maxArchiveFiles bounds the files of an archive of images: a few per layer.
const maxArchiveFiles = 100_000

// archiveName returns what may stand in an archive of images; compiled on
// first use, since starting viv should not pay for it.
var archiveName = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^(oci-layout|index\.json|manifest\.json|repositories|blobs(/[a-z0-9]+(/[0-9a-f]+)?)?|(sha256:)?[0-9a-f]{64}(\.json|\.tar|\.tar\.gz|/(layer\.tar|json|VERSION)?)?)$`)
})

// scanTar indexes a tar of images. It gives up with RootFS at the first name
// that no such archive has, unless the caller is sure that it is one.
func scanTar(ctx context.Context, f *os.File, sure bool) (*tarBlobs, Format, error) {
	t := &tarBlobs{f: f, at: map[string]span{}, links: map[string]string{}}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, "", err
	}
	pos := &counter{r: f}
	tr := tar.NewReader(struct{ io.Reader }{pos}) // no seeking, so that the count is right
	for n := 0; ; n++ {
		if err := ctx.Err(); err != nil {
			return nil, "", err
		}
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, "", sandbox.Invalid.Errorf("read archive: %w", err)
		}
		name := path.Clean(strings.TrimPrefix(h.Name, "./"))
		if name == "." {
			continue
		}
		if n > maxArchiveFiles || !sure && !archiveName().MatchString(name) {
			return nil, RootFS, nil
		}
		switch h.Typeflag {
		case tar.TypeReg:
			t.at[name] = span{pos.n, h.Size}
		case tar.TypeSymlink:
			t.links[name] = h.Linkname
		}
	}
	if _, ok := t.at["manifest.json"]; ok {
		return t, Docker, nil
	}
	if _, ok := t.at["index.json"]; ok {
		return t, OCILayout, nil
	}
	return nil, RootFS, nil
}

// spool copies r, decompressed, into an unnamed file in tmp, so that it can be
// read at any place.
func (s *Store) spool(ctx context.Context, r io.Reader) (*os.File, error) {
	plain, err := decompress(ctxReader{ctx, r}, s.opt.Limits)
	if err != nil {
		return nil, err
	}
	defer plain.Close()
	f, err := os.CreateTemp(s.dir(tmpDir), "load-*")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return nil, err
	}
	n, err := io.Copy(f, io.LimitReader(&roomReader{plain, room{s: s}}, s.opt.Limits.ImageBytes+1))
	if err == nil && n > s.opt.Limits.ImageBytes {
		err = sandbox.Exhausted.Errorf("archive is larger than the limit of %d MiB", s.opt.Limits.ImageBytes>>20).
			WithHint("raise the image limits in the daemon's configuration if you trust this image")
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (c ctxReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

// sizeOf returns the size of a regular file, else 0.
func sizeOf(r io.Reader) int64 {
	if f, ok := r.(*os.File); ok {
		if fi, err := f.Stat(); err == nil && fi.Mode().IsRegular() {
			return fi.Size()
		}
	}
	return 0
}

// seekable returns r itself if it is a plain tar in a regular file, opened
// again so that closing it is ours to do.
func seekable(r io.Reader) (*os.File, bool) {
	f, ok := r.(*os.File)
	if !ok {
		return nil, false
	}
	fi, err := f.Stat()
	if err != nil || !fi.Mode().IsRegular() {
		return nil, false
	}
	if off, err := f.Seek(0, io.SeekCurrent); err != nil || off != 0 {
		return nil, false
	}
	magic := make([]byte, 5)
	if _, err := f.ReadAt(magic, 257); err != nil || string(magic) != "ustar" {
		return nil, false
	}
	g, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	return g, err == nil
}
