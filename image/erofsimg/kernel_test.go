package erofsimg_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"vivarium/image/erofsimg"
)

// mount mounts an image with the kernel, read-only, and takes it down again.
func mount(t *testing.T, image string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no loop devices: %v", err)
	}
	defer ctl.Close()
	img, err := os.Open(image)
	if err != nil {
		t.Fatal(err)
	}
	defer img.Close()
	var dev *os.File
	for range 50 { // another test may take the free number first
		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			t.Fatal(err)
		}
		if dev, err = os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0); err != nil {
			t.Skipf("no loop devices: %v", err)
		}
		// The kernel frees the device when the last user has gone.
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &unix.LoopConfig{Fd: uint32(img.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR}})
		if err == nil {
			break
		}
		dev.Close()
		if !errors.Is(err, unix.EBUSY) {
			t.Fatal(err)
		}
	}
	defer dev.Close()
	dir := t.TempDir()
	if err := unix.Mount(dev.Name(), dir, "erofs", unix.MS_RDONLY|unix.MS_NODEV|unix.MS_NOEXEC|unix.MS_NOSUID, ""); err != nil {
		if errors.Is(err, unix.ENODEV) {
			t.Skip("this kernel has no EROFS")
		}
		t.Fatalf("mount: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// build writes an image of root; data is written by fill.
func build(t *testing.T, opt erofsimg.Options, fill func(w *erofsimg.Writer) *erofsimg.Node) string {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w := erofsimg.NewWriter(f, opt)
	size, err := w.Finish(fill(w))
	if err != nil {
		t.Fatal(err)
	}
	fi, err := f.Stat()
	if err != nil || fi.Size() != size || size%4096 != 0 {
		t.Fatalf("size %d, said %d (%v)", fi.Size(), size, err)
	}
	return f.Name()
}

func add(dir *erofsimg.Node, name string, n *erofsimg.Node) *erofsimg.Node {
	dir.Children[name] = erofsimg.Link{Node: n}
	return n
}

func file(t *testing.T, w *erofsimg.Writer, data string) *erofsimg.Node {
	t.Helper()
	e, err := w.Data(strings.NewReader(data), int64(len(data)))
	if err != nil {
		t.Fatal(err)
	}
	return &erofsimg.Node{Mode: erofsimg.TypeRegular | 0o644, Data: e}
}

func link(target string) *erofsimg.Node {
	return &erofsimg.Node{Mode: erofsimg.TypeSymlink | 0o777, Ext: &erofsimg.Extra{Target: target}}
}

func stat(t *testing.T, path string) *unix.Stat_t {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return &st
}

// Everything that an inode can be, seen by the kernel.
func TestKernelInodes(t *testing.T) {
	t.Parallel()
	hole := strings.Repeat("\x00", 40960) + "end"
	value := strings.Repeat("v", 60000)
	img := build(t, erofsimg.Options{Xattrs: true}, func(w *erofsimg.Writer) *erofsimg.Node {
		root := erofsimg.NewDir(0o711)
		a := add(root, "a", file(t, w, "hello"))
		a.UID, a.GID, a.Mtime, a.Nsec = 70000, 4294967294, -5, 999999999
		a.Mode = erofsimg.TypeRegular | 0o6755
		add(root, "same", a)
		d := add(root, "d", erofsimg.NewDir(0o1777))
		add(d, "again", a)
		add(d, "empty", erofsimg.NewDir(0o500))
		add(root, "zero", &erofsimg.Node{Mode: erofsimg.TypeRegular})
		add(root, "hole", file(t, w, hole))
		add(root, "\xff\xfe bad \n", file(t, w, "not utf-8"))
		add(root, strings.Repeat("n", 255), file(t, w, "long name"))
		add(root, "!before-dot", file(t, w, ""))
		for _, n := range []int{1, 59, 60, 2000, 2049, 4031, 4032, 4033, 4095} {
			add(root, fmt.Sprintf("link%d", n), link(strings.Repeat("l", n)))
		}
		add(root, "fifo", &erofsimg.Node{Mode: erofsimg.TypeFIFO | 0o600})
		add(root, "sock", &erofsimg.Node{Mode: erofsimg.TypeSocket | 0o600})
		add(root, "chr", &erofsimg.Node{Mode: erofsimg.TypeChar | 0o666, Rdev: erofsimg.Rdev(4095, 1048575)})
		add(root, "blk", &erofsimg.Node{Mode: erofsimg.TypeBlock | 0o660, Rdev: erofsimg.Rdev(8, 1)})
		x := add(root, "x", file(t, w, "attributes"))
		x.Ext = &erofsimg.Extra{Xattrs: []erofsimg.Xattr{
			{Name: "security.capability", Value: "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"},
			{Name: "user.big", Value: value}, {Name: "trusted.t", Value: ""},
		}}
		for i := range 100 {
			x.Ext.Xattrs = append(x.Ext.Xattrs, erofsimg.Xattr{Name: fmt.Sprintf("user.n%d", i), Value: fmt.Sprint(i)})
		}
		xd := add(root, "xd", erofsimg.NewDir(0o755))
		xd.Ext = &erofsimg.Extra{Xattrs: []erofsimg.Xattr{{Name: "user.dir", Value: strings.Repeat("d", 5000)}}}
		add(xd, "in", file(t, w, "in"))
		xl := add(root, "xl", link("somewhere"))
		xl.Ext.Xattrs = []erofsimg.Xattr{{Name: "trusted.l", Value: strings.Repeat("l", 4050)}}
		return root
	})
	dir := mount(t, img)
	for name, want := range map[string]string{
		"a": "hello", "same": "hello", "d/again": "hello", "zero": "", "hole": hole, "\xff\xfe bad \n": "not utf-8",
		strings.Repeat("n", 255): "long name", "!before-dot": "", "x": "attributes", "xd/in": "in",
	} {
		if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != want {
			t.Errorf("%.20q: %.20q, %v", name, b, err)
		}
	}
	a := stat(t, dir+"/a")
	if a.Mode != erofsimg.TypeRegular|0o6755 || a.Uid != 70000 || a.Gid != 4294967294 || a.Mtim.Sec != -5 || a.Mtim.Nsec != 999999999 || a.Nlink != 3 {
		t.Errorf("a: %+v", a)
	}
	if stat(t, dir+"/d/again").Ino != a.Ino || stat(t, dir+"/same").Ino != a.Ino {
		t.Error("hard links have different inodes")
	}
	if st := stat(t, dir); st.Mode != erofsimg.TypeDir|0o711 || st.Nlink != 4 || st.Ino == 0 {
		t.Errorf("root: %+v", st)
	}
	if st := stat(t, dir+"/d"); st.Mode != erofsimg.TypeDir|0o1777 || st.Nlink != 3 {
		t.Errorf("d: %+v", st)
	}
	if st := stat(t, dir+"/chr"); st.Mode != erofsimg.TypeChar|0o666 || st.Rdev != unix.Mkdev(4095, 1048575) {
		t.Errorf("chr: %+v", st)
	}
	if st := stat(t, dir+"/blk"); st.Mode != erofsimg.TypeBlock|0o660 || st.Rdev != unix.Mkdev(8, 1) {
		t.Errorf("blk: %+v", st)
	}
	for _, n := range []int{1, 59, 60, 2000, 2049, 4031, 4032, 4033, 4095} {
		if got, err := os.Readlink(fmt.Sprintf("%s/link%d", dir, n)); err != nil || got != strings.Repeat("l", n) {
			t.Errorf("link of %d bytes: %d, %v", n, len(got), err)
		}
	}
	buf := make([]byte, 65536)
	for name, want := range map[string]string{"user.big": value, "user.n99": "99", "trusted.t": ""} {
		if n, err := unix.Getxattr(dir+"/x", name, buf); err != nil || string(buf[:n]) != want {
			t.Errorf("%s: %d bytes, %v", name, n, err)
		}
	}
	if n, err := unix.Getxattr(dir+"/x", "security.capability", buf); err != nil || n != 20 {
		t.Errorf("capability: %d, %v", n, err)
	}
	if n, err := unix.Getxattr(dir+"/xd", "user.dir", buf); err != nil || n != 5000 {
		t.Errorf("attribute of a directory: %d, %v", n, err)
	}
	if n, err := unix.Lgetxattr(dir+"/xl", "trusted.l", buf); err != nil || n != 4050 {
		t.Errorf("attribute of a link: %d, %v", n, err)
	}
	if got, err := os.Readlink(dir + "/xl"); err != nil || got != "somewhere" {
		t.Errorf("link with attributes: %q, %v", got, err)
	}
	fi, err := os.Stat(img)
	if err != nil {
		t.Fatal(err)
	}
	if st := fi.Sys().(*syscall.Stat_t); st.Blocks*512 > fi.Size()-40000 {
		t.Errorf("a file of zeros takes space: %d of %d bytes", st.Blocks*512, fi.Size())
	}
}

// Directories of every size around a block, and one of 20,000 entries; each
// name is found by lookup, which bisects.
func TestKernelDirectories(t *testing.T) {
	t.Parallel()
	sizes := []int{0, 1, 2, 100, 101, 130, 170, 171, 172, 200, 340, 341, 342, 20000}
	img := build(t, erofsimg.Options{}, func(w *erofsimg.Writer) *erofsimg.Node {
		root := erofsimg.NewDir(0o755)
		for _, n := range sizes {
			d := add(root, fmt.Sprint(n), erofsimg.NewDir(0o755))
			for i := range n {
				add(d, fmt.Sprintf("entry-%d", i), &erofsimg.Node{Mode: erofsimg.TypeRegular | 0o600, Mtime: int64(i)})
			}
		}
		long := add(root, "long", erofsimg.NewDir(0o755))
		for i := range 300 {
			add(long, fmt.Sprintf("%0255d", i), &erofsimg.Node{Mode: erofsimg.TypeRegular | 0o600, Mtime: int64(i)})
		}
		return root
	})
	dir := mount(t, img)
	for _, n := range sizes {
		d := filepath.Join(dir, fmt.Sprint(n))
		list, err := os.ReadDir(d)
		if err != nil || len(list) != n {
			t.Errorf("%d: %d entries, %v", n, len(list), err)
		}
		for i := range n {
			if st := stat(t, fmt.Sprintf("%s/entry-%d", d, i)); st.Mtim.Sec != int64(i) {
				t.Fatalf("%d: entry %d is inode of %d", n, i, st.Mtim.Sec)
			}
		}
		if _, err := os.Lstat(d + "/entry-x"); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%d: found what is not there: %v", n, err)
		}
	}
	for i := range 300 {
		if st := stat(t, fmt.Sprintf("%s/long/%0255d", dir, i)); st.Mtim.Sec != int64(i) {
			t.Fatalf("long name %d is inode of %d", i, st.Mtim.Sec)
		}
	}
}

// B9: 4,000 levels deep, walked step by step since no path is that long.
func TestKernelDeep(t *testing.T) {
	t.Parallel()
	const depth = 4000
	name := strings.Repeat("d", 200)
	img := build(t, erofsimg.Options{}, func(w *erofsimg.Writer) *erofsimg.Node {
		root := erofsimg.NewDir(0o755)
		d := root
		for range depth {
			d = add(d, name, erofsimg.NewDir(0o755))
		}
		add(d, "f", file(t, w, "bottom"))
		return root
	})
	fd, err := unix.Open(mount(t, img), unix.O_DIRECTORY|unix.O_RDONLY|unix.O_CLOEXEC, 0)
	for i := 0; i < depth && err == nil; i++ {
		var next int
		next, err = unix.Openat(fd, name, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_CLOEXEC, 0)
		unix.Close(fd)
		fd = next
	}
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	f, err := unix.Openat(fd, "f", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(f)
	b := make([]byte, 16)
	if n, err := unix.Read(f, b); err != nil || string(b[:n]) != "bottom" {
		t.Errorf("%q, %v", b[:n], err)
	}
}

// zeroReader gives zeros, then data at the end.
type sparse struct{ off, size int64 }

func (s *sparse) Read(p []byte) (int, error) {
	if s.off == s.size {
		return 0, io.EOF
	}
	p = p[:min(int64(len(p)), s.size-s.off)]
	clear(p)
	if s.off += int64(len(p)); s.off == s.size {
		p[len(p)-1] = 'E'
	}
	return len(p), nil
}

// A file of more than 4 GiB, which takes no space where it is zeros.
func TestKernelLargeFile(t *testing.T) {
	t.Parallel()
	const size = 5<<30 + 1
	img := build(t, erofsimg.Options{}, func(w *erofsimg.Writer) *erofsimg.Node {
		root := erofsimg.NewDir(0o755)
		e, err := w.Data(&sparse{size: size}, size)
		if err != nil {
			t.Fatal(err)
		}
		add(root, "big", &erofsimg.Node{Mode: erofsimg.TypeRegular | 0o644, Data: e})
		add(root, "after", file(t, w, "small"))
		return root
	})
	fi, err := os.Stat(img)
	if err != nil {
		t.Fatal(err)
	}
	if used := fi.Sys().(*syscall.Stat_t).Blocks * 512; used > 1<<20 {
		t.Errorf("takes %d bytes on disk", used)
	}
	dir := mount(t, img)
	f, err := os.Open(dir + "/big")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 2)
	if _, err := f.ReadAt(b, size-2); err != nil || !bytes.Equal(b, []byte{0, 'E'}) {
		t.Errorf("end of the file: %q, %v", b, err)
	}
	if st := stat(t, dir+"/big"); st.Size != size {
		t.Errorf("size %d", st.Size)
	}
	if b, err := os.ReadFile(dir + "/after"); err != nil || string(b) != "small" {
		t.Errorf("after: %q, %v", b, err)
	}
}

// What the format cannot hold is an error, not a broken image.
func TestFinishRefuses(t *testing.T) {
	t.Parallel()
	bad := map[string]func(root *erofsimg.Node){
		"slash":        func(r *erofsimg.Node) { add(r, "a/b", erofsimg.NewDir(0)) },
		"dot":          func(r *erofsimg.Node) { add(r, "..", erofsimg.NewDir(0)) },
		"empty name":   func(r *erofsimg.Node) { add(r, "", erofsimg.NewDir(0)) },
		"long name":    func(r *erofsimg.Node) { add(r, strings.Repeat("x", 256), erofsimg.NewDir(0)) },
		"zero in name": func(r *erofsimg.Node) { add(r, "a\x00", erofsimg.NewDir(0)) },
		"empty target": func(r *erofsimg.Node) { add(r, "l", link("")) },
		"long target":  func(r *erofsimg.Node) { add(r, "l", link(strings.Repeat("x", 4096))) },
		"type":         func(r *erofsimg.Node) { add(r, "t", &erofsimg.Node{Mode: 0o644}) },
		"two parents":  func(r *erofsimg.Node) { add(r, "b", add(r, "a", erofsimg.NewDir(0))) },
		"cycle":        func(r *erofsimg.Node) { add(r, "b", r) },
		"data elsewhere": func(r *erofsimg.Node) {
			add(r, "f", &erofsimg.Node{Mode: erofsimg.TypeRegular, Data: erofsimg.Extent{Block: 99, Size: 1}})
		},
		"root not a dir": func(r *erofsimg.Node) { r.Mode = erofsimg.TypeRegular },
		"attribute name": func(r *erofsimg.Node) { r.Ext = &erofsimg.Extra{Xattrs: []erofsimg.Xattr{{Name: "odd.x"}}} },
		"attribute value": func(r *erofsimg.Node) {
			r.Ext = &erofsimg.Extra{Xattrs: []erofsimg.Xattr{{Name: "user.x", Value: strings.Repeat("x", 65536)}}}
		},
	}
	for name, fn := range bad {
		t.Run(name, func(t *testing.T) {
			f, err := os.Create(filepath.Join(t.TempDir(), "x"))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			root := erofsimg.NewDir(0o755)
			fn(root)
			if _, err := erofsimg.NewWriter(f, erofsimg.Options{Xattrs: true}).Finish(root); err == nil {
				t.Error("no error")
			}
		})
	}
}

// The same tree gives the same bytes, and dead data is not kept.
func TestReproducible(t *testing.T) {
	t.Parallel()
	secret := strings.Repeat("removed by a later layer", 1000)
	one := func() string {
		return build(t, erofsimg.Options{}, func(w *erofsimg.Writer) *erofsimg.Node {
			root := erofsimg.NewDir(0o755)
			file(t, w, secret)
			for i := range 500 {
				add(root, fmt.Sprint(i), file(t, w, fmt.Sprint("data", i)))
			}
			return root
		})
	}
	a, err := os.ReadFile(one())
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(one())
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(a, b) {
		t.Error("the same tree gave different images")
	}
	if bytes.Contains(a, []byte("removed by")) {
		t.Error("data of a removed file is still in the image")
	}
}

func TestKnownXattr(t *testing.T) {
	t.Parallel()
	for _, n := range []string{"user.a", "trusted.a", "security.capability", "system.posix_acl_access", "system.posix_acl_default"} {
		if !erofsimg.KnownXattr(n) {
			t.Errorf("%s is not known", n)
		}
	}
	unknown := []string{"", "user", "user.", "system.other", "system.posix_acl_accessx", "lustre.x", "user." + strings.Repeat("x", 256)}
	if i := slices.IndexFunc(unknown, erofsimg.KnownXattr); i >= 0 {
		t.Errorf("%q is known", unknown[i])
	}
}
