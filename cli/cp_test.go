package cli

import (
	"archive/tar"
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"vivarium/server/native/fake"
)

func write(t *testing.T, name, data string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(data), 0o644); err != nil {
		t.Fatal(err)
	}
}

func holds(t *testing.T, name, data string) {
	t.Helper()
	if b, err := os.ReadFile(name); err != nil || string(b) != data {
		t.Errorf("%s holds %q, %v; want %q", name, b, err, data)
	}
}

// What the names mean is as in docker cp.
func TestCopySemantics(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	id := strings.TrimSpace(viv(t, n, nil, "create", "--name", "box", "x").out)
	in, out := n.Engine.Dir(id), t.TempDir()
	write(t, in+"/etc/passwd", "root")
	write(t, in+"/job/a/b", "deep")
	write(t, in+"/job/c", "flat")
	if err := os.Symlink("c", in+"/job/link"); err != nil {
		t.Fatal(err)
	}
	cp := func(args ...string) result { return viv(t, n, nil, append([]string{"cp"}, args...)...) }

	// out of the sandbox
	cp("box:/etc/passwd", out+"/new").is(t, 0, "")
	holds(t, out+"/new", "root")
	cp("box:/etc/passwd", out).is(t, 0, "")
	holds(t, out+"/passwd", "root")
	cp("box:/etc/passwd", out+"/nodir/").fails(t, 1, "no directory")
	cp("box:/etc/passwd", out+"/nodir/x").fails(t, 1, "destination")
	cp("box:/nosuch", out).fails(t, 1, "no such file")
	cp("nobox:/etc", out).fails(t, 1, "no sandbox")
	cp("box:/job", out+"/fresh").is(t, 0, "")
	holds(t, out+"/fresh/a/b", "deep")
	cp("box:/job", out).is(t, 0, "")
	holds(t, out+"/job/c", "flat")
	if to, err := os.Readlink(out + "/job/link"); err != nil || to != "c" {
		t.Errorf("link: %q, %v", to, err)
	}
	if err := os.Mkdir(out+"/flat", 0o755); err != nil {
		t.Fatal(err)
	}
	cp("box:/job/.", out+"/flat").is(t, 0, "")
	holds(t, out+"/flat/c", "flat")
	cp("box:/job", out+"/new").fails(t, 1, "is a file")
	cp("box:/job/link", out+"/l").is(t, 0, "")
	if to, err := os.Readlink(out + "/l"); err != nil || to != "c" {
		t.Errorf("a link alone: %q, %v", to, err)
	}
	cp("-L", "box:/job/link", out+"/followed").is(t, 0, "")
	holds(t, out+"/followed", "flat")
	r := cp("box:/job", "-")
	h, err := tar.NewReader(strings.NewReader(r.out)).Next()
	if err != nil || h.Name != "job" && h.Name != "job/" {
		t.Errorf("tar: %v, %v", h, err)
	}

	// into the sandbox
	cp(out+"/new", "box:/tmpfile").is(t, 0, "")
	holds(t, in+"/tmpfile", "root")
	cp(out+"/new", "box:/job").is(t, 0, "")
	holds(t, in+"/job/new", "root")
	cp(out+"/new", "box:/nodir/").fails(t, 1, "no directory")
	cp(out+"/fresh", "box:/copy").is(t, 0, "")
	holds(t, in+"/copy/a/b", "deep")
	cp(out+"/fresh", "box:/job").is(t, 0, "")
	holds(t, in+"/job/fresh/c", "flat")
	cp(out+"/fresh/.", "box:/etc").is(t, 0, "")
	holds(t, in+"/etc/c", "flat")
	cp(out+"/fresh", "box:/etc/passwd").fails(t, 1, "is a file in the sandbox")
	cp(out+"/fresh", "box:/no/such/parent").fails(t, 1)
	cp("/no/such", "box:/").fails(t, 1, "no such file")
	if to, err := os.Readlink(in + "/copy/link"); err != nil || to != "c" {
		t.Errorf("link: %q, %v", to, err)
	}
	viv(t, n, strings.NewReader(r.out), "cp", "-", "box:/etc").is(t, 0, "")
	holds(t, in+"/etc/job/a/b", "deep")
	viv(t, n, strings.NewReader(r.out), "cp", "-", "box:/nosuch").fails(t, 1)

	cp("box:/a", "box:/b").fails(t, 2, "must be on this machine")
	cp("a", "b").fails(t, 2, "must be in a sandbox")
	cp("./a:b", "box:/x").fails(t, 1, "no such file")
	if err := syscall.Mkfifo(in+"/fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	cp("box:/fifo", out).fails(t, 1, "neither a file", "cannot be copied") // B4
}

// B7: bytes, mode and time stay what they are.
func TestCopyKeeps(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	id := strings.TrimSpace(viv(t, n, nil, "create", "--name", "box", "x").out)
	in, out := n.Engine.Dir(id), t.TempDir()
	data := string(bytes.Repeat([]byte{0, 0xff, '\r', '\n'}, 200_000))
	write(t, in+"/d/\xff\xfe", data)
	when := time.Unix(1_000_000_000, 0)
	for _, err := range []error{
		os.Chmod(in+"/d/\xff\xfe", 0o4751), os.Chtimes(in+"/d/\xff\xfe", when, when),
		os.Chmod(in+"/d", 0o750), os.Chtimes(in+"/d", when, when),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	viv(t, n, nil, "cp", "box:/d", out).is(t, 0, "")
	viv(t, n, nil, "cp", "box:/d/\xff\xfe", out+"/one").is(t, 0, "")
	for name, mode := range map[string]fs.FileMode{"/d/\xff\xfe": 0o751, "/one": 0o751, "/d": fs.ModeDir | 0o750} {
		fi, err := os.Lstat(out + name)
		if err != nil || fi.Mode() != mode || !fi.ModTime().Equal(when) {
			t.Errorf("%q is %v of %v, %v", name, fi.Mode(), fi.ModTime(), err)
		}
	}
	holds(t, out+"/d/\xff\xfe", data)
	holds(t, out+"/one", data)

	viv(t, n, nil, "cp", out+"/one", "box:/back").is(t, 0, "")
	if fi, err := os.Lstat(in + "/back"); err != nil || fi.Mode() != 0o751 || !fi.ModTime().Equal(when) {
		t.Errorf("the file copied in is %v of %v, %v", fi.Mode(), fi.ModTime(), err)
	}
	holds(t, in+"/back", data)
}

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

// A link of an earlier copy that has the name of what is copied is not followed.
func TestCopyOntoLink(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	id := strings.TrimSpace(viv(t, n, nil, "create", "--name", "box", "x").out)
	write(t, n.Engine.Dir(id)+"/l/secret", "owned")
	write(t, n.Engine.Dir(id)+"/f", "owned")
	j := newJail(t)
	for name, to := range map[string]string{"/l": "..", "/f": "../secret"} {
		if err := os.Symlink(to, j.out+name); err != nil {
			t.Fatal(err)
		}
	}
	viv(t, n, nil, "cp", "box:/l", j.out).fails(t, 1, "is not a directory")
	viv(t, n, nil, "cp", "box:/f", j.out).fails(t, 0)
	holds(t, j.out+"/f", "owned")
	j.whole()
}

// B2 by the verb: what is left out is told, what is hostile is an error.
func TestCopyHostile(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	id := strings.TrimSpace(viv(t, n, nil, "create", "--name", "box", "x").out)
	write(t, n.Engine.Dir(id)+"/d/x", "x")
	j := newJail(t)
	n.Engine.Download = func() []byte {
		return archive(t, dir("d/"), entry{tar.Header{Name: "d/\x1b[2J", Typeflag: tar.TypeFifo}, ""}, file("d/f", "x"))
	}
	r := viv(t, n, nil, "cp", "box:/d", j.out)
	if r.fails(t, 0, "left out", "a FIFO"); strings.Contains(r.err, "\x1b") {
		t.Errorf("stderr is %q", r.err)
	}
	n.Engine.Download = func() []byte { return archive(t, dir("d/"), file("d/../../secret", "x")) }
	viv(t, n, nil, "cp", "box:/d", j.out).fails(t, 1, "refused")
	n.Engine.Download = func() []byte { return archive(t, dir("d/"), file("d/f", strings.Repeat("x", 5000)))[:3000] }
	viv(t, n, nil, "cp", "box:/d", j.out).fails(t, 1)
	j.whole()
}
