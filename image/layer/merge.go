package layer

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"math"
	"slices"
	"strings"

	"vivarium/image/erofsimg"
	"vivarium/sandbox"
)

const (
	whiteoutPrefix = ".wh."
	whiteoutOpaque = ".wh..wh..opq"
	// whiteoutMeta starts AUFS's own bookkeeping, which is never content.
	whiteoutMeta = ".wh..wh."
	xattrRecord  = "SCHILY.xattr."
)

// Merger applies layers, lowest first, to one tree.
type Merger struct {
	w       *erofsimg.Writer
	limit   Limits
	t       *tree
	entries int
	bytes   int64 // read from layers
	data    int64 // in regular files, holes included
}

// NewMerger returns a Merger that writes file data through w.
func NewMerger(w *erofsimg.Writer, l Limits) *Merger {
	l = l.WithDefaults()
	return &Merger{w: w, limit: l, t: newTree(l)}
}

// Root returns the tree as merged so far.
func (m *Merger) Root() *erofsimg.Node { return m.t.root }

// Apply applies one layer: an uncompressed tar. It reads r to its end, so that a
// digest taken of it is complete, and reports whether the archive had its end
// mark, without which it may have been cut off between two entries. Errors are
// Invalid for a bad layer, Exhausted beyond a limit, else those of r and of the
// writer.
func (m *Merger) Apply(ctx context.Context, r io.Reader) (whole bool, err error) {
	m.t.cur++
	if int(m.t.cur) > m.limit.Layers {
		return false, sandbox.Exhausted.Errorf("more than %d layers", m.limit.Layers)
	}
	src := &boundedReader{ctx: ctx, r: r, m: m, layerLeft: m.limit.LayerBytes}
	tr := tar.NewReader(src)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return false, src.blame(&tarError{err})
		}
		if m.entries++; m.entries > m.limit.Entries {
			return false, sandbox.Exhausted.Errorf("more than %d entries", m.limit.Entries).
				WithHint("raise the image limits in the daemon's configuration if you trust this image")
		}
		if err := m.entry(h, ctxReader{ctx, tr}); err != nil {
			return false, src.blame(err)
		}
	}
	whole = !src.ended
	// Whatever follows the end of the archive belongs to the digest.
	_, err = io.Copy(io.Discard, src)
	return whole, err
}

func (m *Merger) tooLarge() error {
	return sandbox.Exhausted.Errorf("layer is larger than the limit of %d MiB, or the image than %d MiB",
		m.limit.LayerBytes>>20, m.limit.ImageBytes>>20).
		WithHint("raise the image limits in the daemon's configuration if you trust this image")
}

// entry applies one entry of a layer.
func (m *Merger) entry(h *tar.Header, data io.Reader) error {
	if h.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	parts, err := m.t.split(h.Name)
	if err != nil {
		return err
	}
	if len(parts) == 0 {
		if h.Typeflag != tar.TypeDir {
			return sandbox.Invalid.Errorf("the root is not a directory")
		}
		return m.attributes(m.t.root, h)
	}
	parents, base := parts[:len(parts)-1], parts[len(parts)-1]
	if strings.HasPrefix(base, whiteoutPrefix) {
		return m.whiteout(parents, base)
	}
	c, err := m.t.walkDirs(parents, true)
	if err != nil {
		return err
	}
	if h.Typeflag == tar.TypeDir {
		return m.directory(c.dir, base, h)
	}
	n, err := m.node(h, data)
	if err != nil {
		return err
	}
	return m.t.put(c.dir, base, n)
}

// whiteout removes what lower layers have; it never creates anything.
func (m *Merger) whiteout(parents []string, base string) error {
	name := base[len(whiteoutPrefix):]
	if name == "" || name == "." || name == ".." {
		return sandbox.Invalid.Errorf("whiteout of %q", name)
	}
	c, err := m.t.walkDirs(parents, false)
	if err != nil || c == nil {
		return err
	}
	switch {
	case base == whiteoutOpaque:
		m.t.sweep(c.dir)
	case strings.HasPrefix(base, whiteoutMeta):
	default:
		m.t.remove(c.dir, name)
	}
	return nil
}

// directory adds a directory, or gives one that is there new attributes.
func (m *Merger) directory(dir *erofsimg.Node, base string, h *tar.Header) error {
	n := dir.Children[base].Node
	if n == nil || !n.IsDir() {
		n = erofsimg.NewDir(0)
	}
	if err := m.attributes(n, h); err != nil {
		return err
	}
	return m.t.put(dir, base, n)
}

// node makes the inode that a header describes, or finds it for a hard link.
func (m *Merger) node(h *tar.Header, data io.Reader) (*erofsimg.Node, error) {
	n := &erofsimg.Node{}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeCont, tar.TypeGNUSparse:
		n.Mode = erofsimg.TypeRegular
		// A sparse entry yields more bytes than its tar holds.
		if m.data += h.Size; h.Size > m.limit.LayerBytes || m.data > m.limit.ImageBytes {
			return nil, m.tooLarge()
		}
		ext, err := m.w.Data(data, h.Size)
		if err != nil {
			return nil, err
		}
		n.Data = ext
	case tar.TypeLink:
		return m.hardLink(h)
	case tar.TypeSymlink:
		if h.Linkname == "" || len(h.Linkname) > erofsimg.MaxTarget || strings.IndexByte(h.Linkname, 0) >= 0 {
			return nil, sandbox.Invalid.Errorf("bad target of the symbolic link %.64q", h.Name)
		}
		if err := m.t.take(len(h.Linkname)); err != nil {
			return nil, err
		}
		n.Mode = erofsimg.TypeSymlink
		n.Ext = &erofsimg.Extra{Target: strings.Clone(h.Linkname)}
	case tar.TypeChar, tar.TypeBlock:
		if h.Devmajor < 0 || h.Devmajor > 0xfff || h.Devminor < 0 || h.Devminor > 0xfffff {
			return nil, sandbox.Invalid.Errorf("device number %d:%d of %.64q is out of range", h.Devmajor, h.Devminor, h.Name)
		}
		n.Mode = erofsimg.TypeChar
		if h.Typeflag == tar.TypeBlock {
			n.Mode = erofsimg.TypeBlock
		}
		n.Rdev = erofsimg.Rdev(uint32(h.Devmajor), uint32(h.Devminor))
	case tar.TypeFifo:
		n.Mode = erofsimg.TypeFIFO
	default:
		return nil, sandbox.Invalid.Errorf("entry %.64q has the unknown type %q", h.Name, h.Typeflag)
	}
	return n, m.attributes(n, h)
}

// hardLink finds the node that a hard link names: in this layer or below it.
func (m *Merger) hardLink(h *tar.Header) (*erofsimg.Node, error) {
	parts, err := m.t.split(h.Linkname)
	if err != nil {
		return nil, err
	}
	n, err := m.t.lookup(parts)
	if err != nil {
		return nil, err
	}
	if n == nil {
		return nil, sandbox.Invalid.Errorf("hard link %.64q to the missing %.64q", h.Name, h.Linkname)
	}
	if n.IsDir() {
		return nil, sandbox.Invalid.Errorf("hard link %.64q to a directory", h.Name)
	}
	return n, nil
}

// attributes sets owner, mode, time and extended attributes.
func (m *Merger) attributes(n *erofsimg.Node, h *tar.Header) error {
	if h.Uid < 0 || h.Uid > math.MaxUint32 || h.Gid < 0 || h.Gid > math.MaxUint32 {
		return sandbox.Invalid.Errorf("owner %d:%d of %.64q is out of range", h.Uid, h.Gid, h.Name)
	}
	n.UID, n.GID = uint32(h.Uid), uint32(h.Gid)
	n.Mode = n.Mode&erofsimg.TypeMask | uint16(h.Mode&0o7777)
	if n.IsSymlink() {
		n.Mode = erofsimg.TypeSymlink | 0o777
	}
	n.Mtime, n.Nsec = h.ModTime.Unix(), uint32(h.ModTime.Nanosecond())
	var xs []erofsimg.Xattr
	total := 0
	for key, value := range h.PAXRecords {
		name, ok := strings.CutPrefix(key, xattrRecord)
		if !ok || !keepXattr(name) {
			continue
		}
		if total += len(name) + len(value) + 8; len(value) > 0xffff || total > 128<<10 {
			return sandbox.Invalid.Errorf("extended attributes of %.64q are too large", h.Name)
		}
		if err := m.t.take(len(name) + len(value) + 48); err != nil {
			return err
		}
		xs = append(xs, erofsimg.Xattr{Name: strings.Clone(name), Value: strings.Clone(value)})
	}
	slices.SortFunc(xs, func(a, b erofsimg.Xattr) int { return strings.Compare(a.Name, b.Name) })
	switch {
	case n.Ext != nil:
		n.Ext.Xattrs = xs
	case len(xs) > 0:
		n.Ext = &erofsimg.Extra{Xattrs: xs}
	}
	return nil
}

// keepXattr leaves out attributes that cannot be stored, and those by which a
// lower layer could command an overlay mount above it.
func keepXattr(name string) bool {
	return erofsimg.KnownXattr(name) &&
		!strings.HasPrefix(name, "trusted.overlay.") && !strings.HasPrefix(name, "user.overlay.")
}

// boundedReader counts what comes out of a layer, stops at the limits and when
// the context ends, and remembers its error, so that a failing source is not
// taken for a bad archive.
type boundedReader struct {
	ctx       context.Context
	r         io.Reader
	m         *Merger
	layerLeft int64
	err       error
	ended     bool // a read found nothing more
}

func (b *boundedReader) Read(p []byte) (int, error) {
	if b.err != nil {
		b.ended = true
		return 0, b.err
	}
	if err := b.ctx.Err(); err != nil {
		b.err = err
		return 0, err
	}
	n, err := b.r.Read(p)
	b.layerLeft -= int64(n)
	b.m.bytes += int64(n)
	if b.layerLeft < 0 || b.m.bytes > b.m.limit.ImageBytes {
		err = b.m.tooLarge()
	}
	if err != nil {
		b.err = err
	}
	if n > 0 && err == io.EOF {
		err = nil // the next read says so
	}
	b.ended = b.ended || n == 0 && err != nil
	return n, err
}

// ctxReader stops when the context ends, even where the data is a hole and
// nothing is read from the source. It marks the errors of the tar reader.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (c ctxReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := c.r.Read(p)
	if err != nil && err != io.EOF {
		err = &tarError{err}
	}
	return n, err
}

// tarError is what the tar reader says, as opposed to the writer of the image.
type tarError struct{ err error }

func (t *tarError) Error() string { return t.err.Error() }
func (t *tarError) Unwrap() error { return t.err }

// blame turns an error of the tar reader into Invalid, unless the source
// failed first or the error has a kind.
func (b *boundedReader) blame(err error) error {
	if b.err != nil && b.err != io.EOF {
		return b.err
	}
	var e *sandbox.Error
	var t *tarError
	if !errors.As(err, &e) && (errors.As(err, &t) || errors.Is(err, io.ErrUnexpectedEOF)) {
		return sandbox.Invalid.Errorf("read layer: %w", err)
	}
	return err
}
