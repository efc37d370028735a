package image

import (
	"archive/tar"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

// A tree read back from its tar: links, devices, modes, attributes, and nothing
// of what is mounted in it.
func TestTarDir(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("devices and mounts need root")
	}
	t.Parallel()
	root := t.TempDir()
	at := func(n string) string { return filepath.Join(root, n) }
	for _, err := range []error{
		os.WriteFile(at("a"), []byte("data"), 0o600),
		os.Chown(at("a"), 7, 8),
		os.Chmod(at("a"), 0o755|os.ModeSetuid),
		unix.Setxattr(at("a"), "user.x", []byte("\x00\xff"), 0),
		os.Link(at("a"), at("b")),
		os.Symlink("../out", at("c")),
		unix.Mkfifo(at("d"), 0o640),
		unix.Mknod(at("e"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))),
		os.MkdirAll(at("f/\xff"), 0o755),
		os.Mkdir(at("m"), 0o755),
		unix.Mount("tmpfs", at("m"), "tmpfs", 0, "size=64k"),
		os.WriteFile(at("m/hidden"), nil, 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(at("m"), 0); err != nil {
			t.Error(err)
		}
	})
	var b bytes.Buffer
	if err := tarDir(context.Background(), &b, root); err != nil {
		t.Fatal(err)
	}
	var got []string
	r := tar.NewReader(&b)
	for {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprintf("%q %c %o %d:%d %s %d:%d %s %q", h.Name, h.Typeflag, h.Mode, h.Uid, h.Gid, h.Linkname, h.Devmajor, h.Devminor, data, h.PAXRecords["SCHILY.xattr.user.x"]))
	}
	want := []string{
		`"." 5 755 0:0  0:0  ""`, `"a" 0 4755 7:8  0:0 data "\x00\xff"`, `"b" 1 0 0:0 a 0:0  ""`, `"c" 2 777 0:0 ../out 0:0  ""`,
		`"d" 6 640 0:0  0:0  ""`, `"e" 3 644 0:0  1:3  ""`, `"f" 5 755 0:0  0:0  ""`, `"f/\xff" 5 755 0:0  0:0  ""`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%q\nwant\n%q", got, want)
	}
}
