// Package tree moves directory trees between this machine and tar streams. What
// it reads from a stream is hostile.
package tree

import (
	"archive/tar"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"vivarium/sandbox"
)

// Pack is a tar stream of a directory, file or link of this machine; the names
// in it begin with prefix. Symbolic links are packed as such; sockets, FIFOs and
// devices are left out. With owner the owner and group are kept by number, else
// all is root's. Errors come out of the reader: Invalid for what cannot be read,
// Conflict for what changes meanwhile. Close it.
func Pack(src, prefix string, owner bool) io.ReadCloser {
	r, w := io.Pipe()
	go func() {
		tw := tar.NewWriter(w)
		err := filepath.WalkDir(src, func(p string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			rel, err := filepath.Rel(src, p)
			if err != nil {
				return err
			}
			return packEntry(tw, p, path.Join(prefix, filepath.ToSlash(rel)), d, owner)
		})
		if err == nil {
			err = tw.Close()
		}
		if err != nil && sandbox.KindOf(err) == sandbox.Internal {
			err = sandbox.Invalid.Errorf("read %s: %w", src, err)
		}
		w.CloseWithError(err)
	}()
	return r
}

func packEntry(tw *tar.Writer, file, name string, d fs.DirEntry, owner bool) error {
	fi, err := d.Info()
	if err != nil {
		return err
	}
	var target string
	switch fi.Mode().Type() {
	case 0, fs.ModeDir:
	case fs.ModeSymlink:
		if target, err = os.Readlink(file); err != nil {
			return err
		}
	default:
		return nil
	}
	h, err := tar.FileInfoHeader(fi, target)
	if err != nil {
		return err
	}
	h.Name = name
	if fi.IsDir() {
		h.Name += "/"
	}
	h.Uname, h.Gname = "", "" // names differ inside
	if !owner {
		h.Uid, h.Gid = 0, 0
	}
	h.Format = tar.FormatPAX
	if !fi.Mode().IsRegular() {
		return tw.WriteHeader(h)
	}
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if now, err := f.Stat(); err != nil || !now.Mode().IsRegular() {
		return sandbox.Conflict.Errorf("%s changed while it was read", file)
	} else {
		h.Size = now.Size()
	}
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	n, err := io.CopyN(tw, f, h.Size)
	if err == io.EOF {
		return sandbox.Conflict.Errorf("%s shrank from %d to %d bytes while it was read", file, h.Size, n)
	}
	return err
}
