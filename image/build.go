package image

import (
	"bytes"
	"os"
	"path"
	"path/filepath"
	"strings"

	"vivarium/image/erofsimg"
	"vivarium/sandbox"
)

// File is one entry of a small image made by BuildErofs.
type File struct {
	// Path is where it is in the image; parents are made as needed.
	Path string
	// Mode is permission bits, set-id bits and the sticky bit, as in chmod(2).
	Mode uint16
	// Dir makes it a directory, Symlink a symbolic link to that target; else it
	// is a regular file with Data.
	Dir     bool
	Symlink string
	Data    []byte
}

// BuildErofs writes an EROFS image with these files, owned by root, to file,
// replacing it atomically and durably. It is for what the runtimes themselves
// need: the guest, the pause program. The same files give the same bytes.
func BuildErofs(file string, files []File) error {
	return kinded(buildErofs(file, files), "build image "+filepath.Base(file))
}

func buildErofs(file string, files []File) (err error) {
	f, err := os.CreateTemp(filepath.Dir(file), ".erofs-*")
	if err != nil {
		return err
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	w := erofsimg.NewWriter(f, erofsimg.Options{})
	root := erofsimg.NewDir(0o755)
	for _, e := range files {
		if err := addFile(w, root, e); err != nil {
			return err
		}
	}
	if _, err := w.Finish(root); err != nil {
		return err
	}
	if err := f.Chmod(0o444); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), file); err != nil {
		return err
	}
	return syncDir(filepath.Dir(file))
}

func addFile(w *erofsimg.Writer, root *erofsimg.Node, e File) error {
	parts := strings.Split(strings.Trim(path.Join("/", e.Path), "/"), "/")
	if parts[0] == "" {
		root.Mode = erofsimg.TypeDir | e.Mode&0o7777
		return nil
	}
	dir := root
	for _, p := range parts[:len(parts)-1] {
		l, ok := dir.Children[p]
		if !ok {
			l = erofsimg.Link{Node: erofsimg.NewDir(0o755)}
			dir.Children[p] = l
		}
		if !l.IsDir() {
			return sandbox.Invalid.Errorf("parent of %q is not a directory", e.Path)
		}
		dir = l.Node
	}
	n := &erofsimg.Node{Mode: erofsimg.TypeRegular | e.Mode&0o7777}
	switch {
	case e.Dir:
		n = erofsimg.NewDir(e.Mode)
		if old := dir.Children[parts[len(parts)-1]]; old.Node != nil && old.IsDir() {
			n.Children = old.Children
		}
	case e.Symlink != "":
		n.Mode = erofsimg.TypeSymlink | 0o777
		n.Ext = &erofsimg.Extra{Target: e.Symlink}
	default:
		var err error
		if n.Data, err = w.Data(bytes.NewReader(e.Data), int64(len(e.Data))); err != nil {
			return err
		}
	}
	dir.Children[parts[len(parts)-1]] = erofsimg.Link{Node: n}
	return nil
}
