package bench

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
)

// notUnpacked are the directories of a running sandbox that are not of its
// image.
var notUnpacked = map[string]bool{"proc": true, "sys": true, "dev": true, "tmp": true, ".viv": true}

// unpack makes dir the root filesystem of the image, read through a sandbox of
// it, so that the peers have the same whatever the node keeps it as.
func (r *run) unpack(ctx context.Context, dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return sandbox.Internal.Errorf("make root filesystem: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return sandbox.Internal.Errorf("open root filesystem: %w", err)
	}
	defer root.Close()
	for name := range notUnpacked {
		if err := root.Mkdir(name, 0o755); err != nil {
			return sandbox.Internal.Errorf("make root filesystem: %w", err)
		}
	}
	sb, err := r.c.Create(ctx, r.spec(), client.CreateOptions{Wait: true})
	if err != nil {
		return err
	}
	var names []string
	err = r.c.ListFiles(ctx, sb.Id, "/", "", func(page []*v1.FileInfo) error {
		for _, f := range page {
			name := strings.Trim(string(f.Path), "/")
			switch {
			case name == "" || strings.Contains(name, "/") || notUnpacked[name]:
			case len(f.Target) > 0: // such as /bin; a download would follow it
				if err := root.Symlink(string(f.Target), name); err != nil {
					return sandbox.Internal.Errorf("unpack %q: %w", name, err)
				}
			default:
				names = append(names, name)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, name := range names {
		tr, err := r.c.Download(ctx, sb.Id, "/"+name, "")
		if err != nil {
			return err
		}
		err = untar(root, tr)
		tr.Close()
		if err != nil {
			return err
		}
	}
	return r.remove(ctx, sb.Id)
}

// untar writes an archive below root. It is made inside a sandbox, so hostile:
// every operation goes through os.Root, which does not leave its directory
// whatever names and links say. Devices are left out, as are setuid bits.
func untar(root *os.Root, r io.Reader) error {
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return sandbox.Invalid.Errorf("read archive of root filesystem: %w", err)
		}
		name := strings.TrimPrefix(path.Clean("/"+h.Name), "/")
		if name == "" {
			continue
		}
		if err := untarEntry(root, name, h, tr); err != nil {
			return sandbox.Internal.Errorf("unpack %q: %w", name, err)
		}
	}
}

func untarEntry(root *os.Root, name string, h *tar.Header, r io.Reader) error {
	mode := fs.FileMode(h.Mode & 0o777)
	switch h.Typeflag {
	case tar.TypeDir:
		if err := root.MkdirAll(name, 0o755); err != nil {
			return err
		}
	case tar.TypeReg:
		f, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		_, err = io.Copy(f, r)
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			return err
		}
	case tar.TypeSymlink:
		return root.Symlink(h.Linkname, name)
	case tar.TypeLink:
		return root.Link(strings.TrimPrefix(path.Clean("/"+h.Linkname), "/"), name)
	default:
		return nil
	}
	if err := root.Lchown(name, h.Uid, h.Gid); err != nil {
		return err
	}
	return root.Chmod(name, mode)
}
