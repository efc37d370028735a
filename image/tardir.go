package image

import (
	"archive/tar"
	"context"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

// tarDir writes the tree under root as a tar, with owners, hard links, devices
// and extended attributes. It does not leave the file system of root, and
// nobody may change the tree meanwhile.
func tarDir(ctx context.Context, w io.Writer, root string) error {
	tw := tar.NewWriter(w)
	seen := map[[2]uint64]string{} // device and inode: first name
	var dev uint64
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		st := fi.Sys().(*syscall.Stat_t)
		if file == root {
			dev = st.Dev
		} else if st.Dev != dev {
			return fs.SkipDir // something is mounted there
		}
		if fi.Mode()&fs.ModeSocket != 0 {
			return nil
		}
		rel, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		key := [2]uint64{st.Dev, st.Ino}
		if first, ok := seen[key]; ok {
			return tw.WriteHeader(&tar.Header{Typeflag: tar.TypeLink, Name: rel, Linkname: first, Format: tar.FormatPAX})
		}
		if !d.IsDir() && st.Nlink > 1 {
			seen[key] = rel
		}
		return tarEntry(tw, file, rel, fi)
	})
	if err != nil {
		return err
	}
	return tw.Close()
}

func tarEntry(tw *tar.Writer, file, rel string, fi fs.FileInfo) error {
	link := ""
	if fi.Mode()&fs.ModeSymlink != 0 {
		var err error
		if link, err = os.Readlink(file); err != nil {
			return err
		}
	}
	h, err := tar.FileInfoHeader(fi, link)
	if err != nil {
		return err
	}
	h.Name, h.Format, h.Uname, h.Gname = rel, tar.FormatPAX, "", ""
	if h.PAXRecords, err = readXattrs(file); err != nil {
		return err
	}
	if err := tw.WriteHeader(h); err != nil {
		return err
	}
	if h.Typeflag != tar.TypeReg {
		return nil
	}
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(tw, f)
	return err
}

// readXattrs returns a file's extended attributes as PAX records.
func readXattrs(file string) (map[string]string, error) {
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(file, buf)
	if err == unix.ENOTSUP || n == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, &fs.PathError{Op: "listxattr", Path: file, Err: err}
	}
	out := map[string]string{}
	val := make([]byte, 64<<10)
	for _, name := range splitZero(buf[:n]) {
		m, err := unix.Lgetxattr(file, name, val)
		if err != nil {
			return nil, &fs.PathError{Op: "getxattr", Path: file, Err: err}
		}
		out["SCHILY.xattr."+name] = string(val[:m])
	}
	return out, nil
}

func splitZero(b []byte) []string {
	var out []string
	start := 0
	for i, c := range b {
		if c == 0 {
			out = append(out, string(b[start:i]))
			start = i + 1
		}
	}
	return out
}
