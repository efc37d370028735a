package tree

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"vivarium/sandbox"
)

type entry struct {
	tar.Header
	data string
}

func archive(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		h := e.Header
		h.Size = int64(len(e.data))
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(e.data)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func dir(name string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}, ""}
}
func file(name, data string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeReg}, data}
}
func link(name, to string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}, ""}
}
func hard(name, to string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: to}, ""}
}

// jail is a destination with a secret beside it that nothing may touch.
type jail struct {
	t           testing.TB
	out, secret string
}

func newJail(t testing.TB) *jail {
	j := &jail{t: t, out: filepath.Join(t.TempDir(), "out")}
	j.secret = filepath.Join(filepath.Dir(j.out), "secret")
	if err := os.Mkdir(j.out, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(j.secret, []byte("secret"), 0o640); err != nil {
		t.Fatal(err)
	}
	return j
}

func (j *jail) extract(b []byte) error {
	root, err := os.OpenRoot(j.out)
	if err != nil {
		j.t.Fatal(err)
	}
	defer root.Close()
	return Extract(root, bytes.NewReader(b), Options{})
}

// whole checks that nothing outside was touched, and that nothing inside is
// what must not be there.
func (j *jail) whole() {
	j.t.Helper()
	beside, err := os.ReadDir(filepath.Dir(j.out))
	if err != nil || len(beside) != 2 {
		j.t.Errorf("beside the destination: %v, %v", beside, err)
	}
	fi, err := os.Lstat(j.secret)
	if err != nil || fi.Mode() != 0o640 || fi.Sys().(*syscall.Stat_t).Nlink != 1 {
		j.t.Errorf("the secret: %v, %v", fi, err)
	}
	if b, _ := os.ReadFile(j.secret); string(b) != "secret" {
		j.t.Errorf("the secret is %q", b)
	}
	err = filepath.WalkDir(j.out, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		if m := fi.Mode(); m&(fs.ModeDevice|fs.ModeNamedPipe|fs.ModeSocket|fs.ModeSetuid|fs.ModeSetgid|fs.ModeSticky) != 0 {
			j.t.Errorf("%s is %v", p, m)
		}
		if strings.Contains(d.Name(), ".viv-cp-") {
			j.t.Errorf("%s was left behind", p)
		}
		return nil
	})
	if err != nil && !errors.Is(err, fs.ErrPermission) {
		j.t.Error(err)
	}
}

// B1, B2: whatever the archive says, nothing outside is touched.
func TestHostileArchives(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x/", 3000) + "x"
	for _, tt := range []struct {
		name    string
		entries []entry
		refused bool
	}{
		{"dot dot", []entry{dir("d/"), file("d/../../secret", "owned")}, true},
		{"dot dot at once", []entry{file("../secret", "owned")}, true},
		{"dot dot in the middle", []entry{dir("d/"), file("d/a/../b", "x")}, true},
		{"absolute", []entry{dir("d/"), file("/etc/owned", "x")}, true},
		{"another top", []entry{dir("d/"), file("e/x", "x")}, true},
		{"not a directory", []entry{file("d", "x")}, true},
		{"the top is a link", []entry{link("d", "..")}, true},
		{"through a link", []entry{dir("d/"), link("d/l", ".."), file("d/l/secret", "owned")}, true},
		{"through an absolute link", []entry{dir("d/"), link("d/l", "/"), file("d/l/tmp/owned", "x")}, true},
		{"through a link to a link", []entry{dir("d/"), link("d/a", ".."), link("d/b", "a"), file("d/b/secret", "owned")}, true},
		{"onto a link", []entry{dir("d/"), link("d/l", "../secret"), file("d/l", "owned")}, false},
		{"a directory onto a link", []entry{dir("d/"), link("d/l", ".."), dir("d/l/"), file("d/l/secret", "x")}, false},
		{"a link onto a full directory", []entry{dir("d/"), file("d/x/y", "z"), link("d/x", "..")}, true},
		{"hard link out", []entry{dir("d/"), hard("d/h", "d/../../secret")}, true},
		{"hard link absolute", []entry{dir("d/"), hard("d/h", "/etc/passwd")}, true},
		{"hard link by a link", []entry{dir("d/"), link("d/l", ".."), hard("d/h", "d/l/secret")}, true},
		{"hard link to a link", []entry{dir("d/"), link("d/l", "../secret"), hard("d/h", "d/l"), file("d/h", "owned")}, false},
		{"hard link to nothing", []entry{dir("d/"), hard("d/h", "d/nothing")}, true},
		{"hard link to a directory", []entry{dir("d/"), hard("d/h", "d")}, true},
		{"hard link before its file", []entry{dir("d/"), hard("d/h", "d/f"), file("d/f", "x")}, false},
		{"hard link, then a file over it", []entry{dir("d/"), file("d/f", "x"), hard("d/h", "d/f"), file("d/h", "y")}, false},
		{"device", []entry{dir("d/"), {tar.Header{Name: "d/null", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}, ""}}, false},
		{"block device", []entry{dir("d/"), {tar.Header{Name: "d/sda", Typeflag: tar.TypeBlock, Devmajor: 8}, ""}}, false},
		{"FIFO", []entry{dir("d/"), {tar.Header{Name: "d/fifo", Typeflag: tar.TypeFifo}, ""}}, false},
		{"setuid", []entry{dir("d/"), {tar.Header{Name: "d/su", Typeflag: tar.TypeReg, Mode: 0o6755}, "x"}, {tar.Header{Name: "d/t", Typeflag: tar.TypeDir, Mode: 0o7777}, ""}}, false},
		{"twice", []entry{dir("d/"), file("d/f", "1"), file("d/f", "2"), dir("d/"), file("d/f", "3")}, false},
		{"a file, then a directory", []entry{dir("d/"), file("d/f", "1"), dir("d/f/")}, true},
		{"a directory, then a file", []entry{dir("d/"), dir("d/f/"), file("d/f", "1")}, true},
		{"long", []entry{dir("d/"), file("d/"+long, "x")}, true},
		{"deep", []entry{dir("d/"), file("d/"+strings.Repeat("y/", 500)+"z", "x")}, false}, // A14
		{"closed directory", []entry{{tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o100}, ""}, file("d/f", "x")}, false},
		{"relative names", []entry{dir("./"), file("./f", "x")}, false},
		{"nothing", nil, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			j := newJail(t)
			err := j.extract(archive(t, tt.entries...))
			if (err != nil) != tt.refused {
				t.Errorf("got %v", err)
			}
			if err != nil && sandbox.KindOf(err) == sandbox.Internal {
				t.Errorf("kind of %v", err)
			}
			j.whole()
		})
	}
}

// A link that an earlier copy left in the destination is not followed.
func TestLinksOfAnEarlierCopy(t *testing.T) {
	t.Parallel()
	for name, entries := range map[string][]entry{
		"file":         {dir("d/"), file("d/l/secret", "owned")},
		"deeper":       {dir("d/"), file("d/l/x/y", "owned")},
		"hard link":    {dir("d/"), hard("d/h", "d/l/secret")},
		"onto a file":  {dir("d/"), file("d/f", "owned")},
		"as directory": {dir("d/"), dir("d/l/")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := newJail(t)
			if err := os.Symlink("..", j.out+"/l"); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink("../secret", j.out+"/f"); err != nil {
				t.Fatal(err)
			}
			err := j.extract(archive(t, entries...))
			if (err == nil) != (name == "onto a file") {
				t.Errorf("got %v", err)
			}
			j.whole()
		})
	}
}

func TestManyEntries(t *testing.T) {
	t.Parallel()
	j := newJail(t)
	entries := []entry{dir("d/")}
	for i := range 5000 {
		entries = append(entries, file(fmt.Sprintf("d/%d/%d", i%50, i), "x"))
	}
	if err := j.extract(archive(t, entries...)); err != nil {
		t.Fatal(err)
	}
	j.whole()
	if b, err := os.ReadFile(j.out + "/49/4999"); err != nil || string(b) != "x" {
		t.Errorf("%q, %v", b, err)
	}
}

// FuzzExtract: no archive touches anything outside.
func FuzzExtract(f *testing.F) {
	f.Add(archive(f, dir("d/"), file("d/f", "x"), link("d/l", ".."), hard("d/h", "d/f")))
	f.Add(archive(f, dir("d/"), link("d/l", "../secret"), file("d/l", "owned"), hard("d/h", "d/l")))
	f.Add(archive(f, dir("./"), link("./a", ".."), dir("./a/"), file("./a/secret", "x")))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 64<<10 {
			return
		}
		// A header may promise a sparse file of any size, which is what this
		// machine's disk is for, but not its tests'.
		tr := tar.NewReader(bytes.NewReader(b))
		for {
			h, err := tr.Next()
			if err != nil {
				break
			}
			if h.Size > 1<<20 {
				return
			}
		}
		j := newJail(t)
		if err := j.extract(b); err != nil && sandbox.KindOf(err) == sandbox.Internal {
			t.Errorf("kind of %v", err)
		}
		j.whole()
	})
}
