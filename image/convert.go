package image

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"hash"
	"io"
	"os"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"vivarium/image/erofsimg"
	"vivarium/image/layer"
	"vivarium/sandbox"
)

// formatVersion changes whenever conversion gives other files for the same
// layers, so that old files are not taken for new ones.
const formatVersion = "vivarium-erofs-1"

// imageID derives an image's id from the digest of its config.
func imageID(config v1.Hash) string {
	sum := sha256.Sum256([]byte(formatVersion + "\n" + config.String()))
	return idPrefix + hex.EncodeToString(sum[:])
}

// layerSource is one layer of an image to be converted.
type layerSource struct {
	// open returns the layer as it is stored, perhaps compressed.
	open func(context.Context) (io.ReadCloser, error)
	// digest of what open returns; the zero Hash if unknown or checked already.
	digest v1.Hash
	// diffID is the digest of the uncompressed layer; zero if unknown.
	diffID v1.Hash
	// done, if not nil, is called once the layer is merged.
	done func()
}

// built is a converted image that has no name yet: files in tmp, synced.
type built struct {
	erofs, xattrs string // paths; xattrs may be ""
	size, disk    int64
	diffIDs       []v1.Hash
}

func (b *built) remove() {
	os.Remove(b.erofs)
	if b.xattrs != "" {
		os.Remove(b.xattrs)
	}
}

// convert merges layers, lowest first, into an EROFS file in tmp. tick is told
// the compressed bytes read.
func (s *Store) convert(ctx context.Context, layers []layerSource, tick func(int)) (_ *built, err error) {
	if err := s.work.Acquire(ctx, 1); err != nil {
		return nil, err
	}
	defer s.work.Release(1)
	f, err := os.CreateTemp(s.dir(tmpDir), "erofs-*")
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b := &built{erofs: f.Name()}
	defer func() {
		if err != nil {
			b.remove()
		}
	}()
	w := erofsimg.NewWriter(f, erofsimg.Options{})
	m := layer.NewMerger(w, s.opt.Limits)
	for _, l := range layers {
		diffID, err := s.apply(ctx, m, l, tick)
		if err != nil {
			return nil, err
		}
		if l.done != nil {
			l.done()
		}
		b.diffIDs = append(b.diffIDs, diffID)
		if err := s.fail("layer"); err != nil {
			return nil, err
		}
	}
	if err := m.EnsureMountPoints(); err != nil {
		return nil, err
	}
	if err := s.writeXattrs(b, m.Root()); err != nil {
		return nil, err
	}
	if b.size, err = w.Finish(m.Root()); err != nil {
		return nil, err
	}
	if err := f.Chmod(0o444); err != nil {
		return nil, err
	}
	if err := f.Sync(); err != nil {
		return nil, err
	}
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	b.disk = diskUsage(fi)
	return b, s.fail("converted")
}

// apply merges one layer and checks its digests.
func (s *Store) apply(ctx context.Context, m *layer.Merger, l layerSource, tick func(int)) (v1.Hash, error) {
	rc, err := l.open(ctx)
	if err != nil {
		return v1.Hash{}, err
	}
	defer rc.Close()
	packed := &hashReader{r: rc, tick: tick}
	if l.digest != (v1.Hash{}) {
		packed.h = sha256.New()
	}
	plain, err := decompress(packed, s.opt.Limits)
	if err != nil {
		return v1.Hash{}, err
	}
	sum := &hashReader{r: &roomReader{plain, room{s: s}}, h: sha256.New()}
	ahead := newReadAhead(sum, func() { plain.Close() })
	defer ahead.Close()
	whole, err := m.Apply(ctx, ahead)
	if err != nil {
		return v1.Hash{}, err
	}
	got := sum.sum()
	if !whole && l.diffID == (v1.Hash{}) {
		// Nothing else would tell that the transfer was cut off.
		return got, sandbox.Invalid.Errorf("archive ends without an end mark: it is empty, cut short, or not a tar")
	}
	if l.diffID != (v1.Hash{}) && got != l.diffID {
		return got, sandbox.Invalid.Errorf("layer is corrupt: its content has the digest %s, not %s", got, l.diffID)
	}
	if packed.h != nil {
		if _, err := io.Copy(io.Discard, packed); err != nil {
			return got, err
		}
		if d := packed.sum(); d != l.digest {
			return got, sandbox.Invalid.Errorf("layer is corrupt: its digest is %s, not %s", d, l.digest)
		}
	}
	return got, nil
}

// hashReader hashes (h may be nil) and counts what is read.
type hashReader struct {
	r    io.Reader
	h    hash.Hash
	tick func(int)
}

func (h *hashReader) Read(p []byte) (int, error) {
	n, err := h.r.Read(p)
	if h.h != nil {
		h.h.Write(p[:n])
	}
	if h.tick != nil {
		h.tick(n)
	}
	return n, err
}

func (h *hashReader) sum() v1.Hash {
	return v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(h.h.Sum(nil))}
}

// xattrLine is one line of an attribute list.
type xattrLine struct {
	Path  []byte `json:"path"` // absolute; bytes, since names need not be UTF-8
	Name  string `json:"name"`
	Value []byte `json:"value"`
}

// writeXattrs writes the image's extended attributes beside it, if it has any.
func (s *Store) writeXattrs(b *built, root *erofsimg.Node) (err error) {
	var f *os.File
	var w *bufio.Writer
	err = layer.Xattrs(root, func(path string, x erofsimg.Xattr) error {
		if f == nil {
			if f, err = os.CreateTemp(s.dir(tmpDir), "xattrs-*"); err != nil {
				return err
			}
			b.xattrs = f.Name()
			w = bufio.NewWriter(f)
		}
		line, err := json.Marshal(xattrLine{[]byte(path), x.Name, []byte(x.Value)})
		if err != nil {
			return err
		}
		_, err = w.Write(append(line, '\n'))
		return err
	})
	if f == nil {
		return err
	}
	defer f.Close()
	if err != nil {
		return err
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if err := f.Chmod(0o444); err != nil {
		return err
	}
	return f.Sync()
}

// ReadXattrs calls fn for every extended attribute of an image: the absolute
// path of the file, without links on the way, the attribute's full name and
// its value. A runtime sets them inside the sandbox, where they can do no harm;
// never on the host.
func ReadXattrs(img *Image, fn func(path, name string, value []byte) error) error {
	if img.Xattrs == "" {
		return nil
	}
	f, err := os.Open(img.Xattrs)
	if err != nil {
		return kinded(err, "read attributes of image")
	}
	defer f.Close()
	d := json.NewDecoder(bufio.NewReader(f))
	for {
		var l xattrLine
		if err := d.Decode(&l); err == io.EOF {
			return nil
		} else if err != nil {
			return kinded(err, "read attributes of image")
		}
		if err := fn(string(l.Path), l.Name, l.Value); err != nil {
			return err
		}
	}
}
