package guest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/guest"
	"vivarium/sandbox"
)

func (b *box) read(user, path string, off, n int64) (string, error) {
	b.t.Helper()
	r, err := b.ReadFile(b.ctx(), user, path, off, n)
	if err != nil {
		return "", err
	}
	defer r.Close()
	data, err := io.ReadAll(r)
	return string(data), err
}

// B7: what is written comes back, whatever bytes they are; a file replaced
// keeps its mode and owner.
func TestFiles(t *testing.T) {
	t.Parallel()
	b := start(t)
	ctx := b.ctx()
	p := b.tmp + "/a/b/c"
	data := bytes.Repeat([]byte{0, 255, 10, 13, 1}, 300_000)
	if _, err := b.WriteFile(ctx, "", p, bytes.NewReader(data), guest.WriteOptions{}); !errors.Is(err, sandbox.NotFound) {
		t.Fatal(err)
	}
	mode := fs.FileMode(0o640)
	mtime := time.Unix(1_000_000_000, 5000)
	res, err := b.WriteFile(ctx, "", p, bytes.NewReader(data), guest.WriteOptions{Parents: true, Sync: true, Attr: guest.Attr{Mode: &mode, ModTime: &mtime}})
	if err != nil || res.Bytes != int64(len(data)) || res.InPlace {
		t.Fatal(res, err)
	}
	got, err := b.read("", p, 0, -1)
	if err != nil || got != string(data) {
		t.Fatal(err, len(got))
	}
	if got, err = b.read("", p, 7, 3); err != nil || got != string(data[7:10]) {
		t.Fatalf("range: %v %q", err, got)
	}
	if got, err = b.read("", p, int64(len(data))+5, 10); err != nil || got != "" {
		t.Fatalf("beyond the end: %v %q", err, got)
	}
	st, err := b.Stat(ctx, "", p, true)
	if err != nil || st.Mode != 0o640 || st.Size != int64(len(data)) || !st.ModTime.Equal(mtime) {
		t.Fatalf("%+v %v", st, err)
	}
	os.Chown(p, 77, 88)
	if _, err := b.WriteFile(ctx, "", p, strings.NewReader("short"), guest.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	if st, _ = b.Stat(ctx, "", p, false); st.Mode != 0o640 || st.UID != 77 || st.GID != 88 || st.Size != 5 {
		t.Fatalf("replaced: %+v", st)
	}
	if _, err := b.WriteFile(ctx, "", p, strings.NewReader("er"), guest.WriteOptions{Append: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.WriteFile(ctx, "", p, strings.NewReader("x"), guest.WriteOptions{Exclusive: true}); !errors.Is(err, sandbox.Exists) {
		t.Fatal(err)
	}
	if got, _ := b.read("", p, 0, -1); got != "shorter" {
		t.Fatalf("%q", got)
	}
	// A link is followed, and stays a link.
	if err := b.Symlink(ctx, "", "c", b.tmp+"/a/b/link"); err != nil {
		t.Fatal(err)
	}
	if _, err := b.WriteFile(ctx, "", b.tmp+"/a/b/link", strings.NewReader("through"), guest.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	if got, _ := b.read("", p, 0, -1); got != "through" {
		t.Fatalf("%q", got)
	}
	if st, err := b.Stat(ctx, "", b.tmp+"/a/b/link", false); err != nil || st.Mode&fs.ModeSymlink == 0 || st.Target != "c" {
		t.Fatalf("%+v %v", st, err)
	}
	// A reader that fails leaves the old contents and no temporary file, wherever
	// it fails.
	for _, n := range []int{0, 1, 100, 1 << 18, 1 << 20} {
		bad := io.MultiReader(strings.NewReader(strings.Repeat("y", n)), &failing{})
		if _, err := b.WriteFile(ctx, "", p, bad, guest.WriteOptions{}); err == nil {
			t.Fatal("no error")
		}
	}
	if got, _ := b.read("", p, 0, -1); got != "through" {
		t.Fatalf("%.20q", got)
	}
	for i := 0; ; i++ {
		var names []string
		b.ListDir(ctx, "", b.tmp+"/a/b", 0, func(f sandbox.FileInfo) error { names = append(names, f.Path); return nil })
		sort.Strings(names)
		if fmt.Sprint(names) == "[c link]" {
			break
		}
		if i == 100 {
			t.Fatalf("left: %q", names)
		}
		time.Sleep(10 * time.Millisecond)
	}
	if err := b.Rename(ctx, "", p, b.tmp+"/d", false); err != nil {
		t.Fatal(err)
	}
	if err := b.Rename(ctx, "", b.tmp+"/d", b.tmp+"/a", true); !errors.Is(err, sandbox.Exists) {
		t.Fatal(err)
	}
	if err := b.Remove(ctx, "", b.tmp+"/a", false); !errors.Is(err, sandbox.Conflict) {
		t.Fatal(err)
	}
	if err := b.Remove(ctx, "", b.tmp+"/a", true); err != nil {
		t.Fatal(err)
	}
	if err := b.Remove(ctx, "", b.tmp+"/a", true); !errors.Is(err, sandbox.NotFound) {
		t.Fatal(err)
	}
	if err := b.Remove(ctx, "", "/", true); !errors.Is(err, sandbox.Invalid) {
		t.Fatal(err)
	}
}

type failing struct{}

func (*failing) Read([]byte) (int, error) { return 0, errors.New("client went away") }

// B4: what is not a file is refused and does not hang.
func TestFilesSpecial(t *testing.T) {
	t.Parallel()
	b := start(t)
	unix.Mkfifo(b.tmp+"/fifo", 0o666)
	l, err := net.Listen("unix", b.tmp+"/sock")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, p := range []string{b.tmp + "/fifo", b.tmp, "/dev/zero", "/dev/tty", b.tmp + "/sock"} {
		if _, err := b.read("", p, 0, -1); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("read %s: %v", p, err)
		}
		if _, err := b.WriteFile(b.ctx(), "", p, strings.NewReader("x"), guest.WriteOptions{}); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("write %s: %v", p, err)
		}
		if _, err := b.WriteFile(b.ctx(), "", p, strings.NewReader("x"), guest.WriteOptions{Append: true}); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("append %s: %v", p, err)
		}
	}
	// The guest's own memory and environment are out of reach, by links as well.
	os.Symlink("/proc/self/mem", b.tmp+"/mem")
	for _, p := range []string{"/proc/1/environ", "/proc/self/maps", b.tmp + "/mem"} {
		if _, err := b.read("", p, 0, -1); !errors.Is(err, sandbox.Denied) {
			t.Errorf("%s: %v", p, err)
		}
	}
	if _, err := b.WriteFile(b.ctx(), "", b.tmp+"/mem", strings.NewReader("x"), guest.WriteOptions{}); !errors.Is(err, sandbox.Denied) {
		t.Errorf("write memory: %v", err)
	}
	if got, err := b.read("", "/proc/sys/kernel/ostype", 0, -1); err != nil || got != "Linux\n" {
		t.Errorf("%v %q", err, got)
	}
}

// B5: sparse and large.
func TestFilesSparse(t *testing.T) {
	t.Parallel()
	b := start(t)
	f, err := os.Create(b.tmp + "/big")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const at = 1 << 40
	if _, err := f.WriteAt([]byte("end"), at); err != nil {
		t.Skip("no large files here:", err)
	}
	if got, err := b.read("", b.tmp+"/big", at-1, -1); err != nil || got != "\x00end" {
		t.Fatalf("%v %q", err, got)
	}
	r, err := b.ReadFile(b.ctx(), "", b.tmp+"/big", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	io.CopyN(io.Discard, r, 1<<20)
	f.Truncate(1 << 19) // while it is read
	if n, err := io.Copy(io.Discard, r); err != nil {
		t.Fatal(n, err)
	}
	r.Close()
}

// B6: the file API acts as the user that it is told, groups included.
func TestFilesUser(t *testing.T) {
	t.Parallel()
	etc := t.TempDir()
	os.Chmod(etc, 0o755)
	os.WriteFile(etc+"/passwd", []byte("root:x:0:0::/root:/bin/sh\nann:x:1234:1234::/home/ann:/bin/sh\n"), 0o644)
	os.WriteFile(etc+"/group", []byte("root:x:0:\nann:x:1234:\nshared:x:4321:bob,ann\n"), 0o644)
	b := start(t, "VIV_TEST_ETC="+etc)
	ctx := b.ctx()
	if r := b.run(sandbox.ExecSpec{Argv: []string{"sh", "-c", "id -u; id -G; echo $HOME"}, User: "ann"}); r.out != "1234\n1234 4321\n/home/ann\n" {
		t.Fatalf("%+v", r)
	}
	if r := b.run(sandbox.ExecSpec{Argv: []string{"sh", "-c", "id -u; id -G"}, User: "1234:4321"}); r.out != "1234\n4321\n" {
		t.Fatalf("%+v", r)
	}
	if r := b.run(sandbox.ExecSpec{Argv: []string{"id", "-u"}, User: "99999"}); r.out != "99999\n" {
		t.Fatalf("%+v", r)
	}
	if _, err := b.WriteFile(ctx, "ann", b.tmp+"/f", strings.NewReader("x"), guest.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	if st, err := b.Stat(ctx, "ann", b.tmp+"/f", true); err != nil || st.UID != 1234 || st.GID != 1234 || st.Mode != 0o644 {
		t.Fatalf("%+v %v", st, err)
	}
	os.Mkdir(b.tmp+"/root", 0o755)
	os.WriteFile(b.tmp+"/root/secret", []byte("s"), 0o600)
	os.WriteFile(b.tmp+"/root/group", []byte("g"), 0o660)
	os.Chown(b.tmp+"/root/group", 0, 4321)
	os.Chmod(b.tmp+"/root/group", 0o660)
	os.WriteFile(b.tmp+"/root/read", []byte("r"), 0o644)
	if _, err := b.read("ann", b.tmp+"/root/secret", 0, -1); !errors.Is(err, sandbox.Denied) {
		t.Fatalf("read another's file: %v", err)
	}
	if got, err := b.read("ann", b.tmp+"/root/group", 0, -1); err != nil || got != "g" {
		t.Fatalf("read by group: %v", err)
	}
	for _, name := range []string{"secret", "read", "new"} {
		if _, err := b.WriteFile(ctx, "ann", b.tmp+"/root/"+name, strings.NewReader("x"), guest.WriteOptions{}); !errors.Is(err, sandbox.Denied) {
			t.Fatalf("write %s: %v", name, err)
		}
	}
	// A file that may be written in a directory that may not: in place, and said.
	if res, err := b.WriteFile(ctx, "ann", b.tmp+"/root/group", strings.NewReader("mine"), guest.WriteOptions{}); err != nil || !res.InPlace {
		t.Fatal(res, err)
	}
	if err := b.Remove(ctx, "ann", b.tmp+"/root", true); !errors.Is(err, sandbox.Denied) {
		t.Fatal(err)
	}
	if err := b.Mkdir(ctx, "ann", b.tmp+"/x/y/z", 0o700, true); err != nil {
		t.Fatal(err)
	}
	if st, _ := b.Stat(ctx, "", b.tmp+"/x/y/z", true); st.UID != 1234 || st.Mode != fs.ModeDir|0o700 {
		t.Fatalf("%+v", st)
	}
	// Root is root again after that.
	if got, err := b.read("", b.tmp+"/root/secret", 0, -1); err != nil || got != "s" {
		t.Fatal(err)
	}
	if _, err := b.Stat(ctx, "nobody-at-all", "/", true); !errors.Is(err, sandbox.NotFound) {
		t.Fatal(err)
	}
}

// A14: deep trees and names that are not text.
func TestFilesDeep(t *testing.T) {
	t.Parallel()
	b := start(t)
	if r := b.sh(`cd "$1" && mkdir deep && cd deep && i=0 && while [ $i -lt 40 ]; do d=; j=0; while [ $j -lt 100 ]; do d=${d}d/; j=$((j+1)); done; mkdir -p $d && cd -P $d && : > f; i=$((i+1)); done`, b.tmp); r.st.Code != 0 {
		t.Fatalf("%+v", r)
	}
	name := strings.Repeat("\xff\xfe", 127) + "\n"
	if err := os.WriteFile(filepath.Join(b.tmp, "deep", name), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	found := false
	if err := b.ListDir(b.ctx(), "", b.tmp+"/deep", 0, func(f sandbox.FileInfo) error { found = found || f.Path == name; return nil }); err != nil || !found {
		t.Fatal(err, found)
	}
	if err := b.Remove(b.ctx(), "", b.tmp+"/deep", true); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(b.tmp + "/deep"); !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
}

func TestListLimit(t *testing.T) {
	t.Parallel()
	b := start(t)
	for i := range 3000 {
		os.WriteFile(fmt.Sprintf("%s/file-with-a-rather-long-name-%d", b.tmp, i), nil, 0o600)
	}
	n := 0
	if err := b.ListDir(b.ctx(), "", b.tmp, 0, func(sandbox.FileInfo) error { n++; return nil }); err != nil || n != 3000 {
		t.Fatal(n, err)
	}
	n = 0
	if err := b.ListDir(b.ctx(), "", b.tmp, 2000, func(sandbox.FileInfo) error { n++; return nil }); !errors.Is(err, sandbox.Exhausted) || n != 2000 {
		t.Fatal(n, err)
	}
}

func TestDial(t *testing.T) {
	t.Parallel()
	b := start(t)
	ctx := b.ctx()
	if _, err := b.Dial(ctx, 9); !errors.Is(err, sandbox.Unavailable) {
		t.Fatal(err)
	}
	if open, err := b.ProbePort(ctx, 9); err != nil || open {
		t.Fatal(open, err)
	}
	s, err := b.StartExec(ctx, newID(), sandbox.ExecSpec{Argv: []string{"python3", "-c", `
import socket
for fam, addr in (socket.AF_INET, ("127.0.0.1", 7000)), (socket.AF_UNIX, "` + b.tmp + `/sock"):
    l = socket.socket(fam); l.bind(addr); l.listen(5)
    print("ready", flush=True)
    while True:
        c = l.accept()[0]
        d = b""
        while True:
            p = c.recv(1 << 16)
            if not p: break
            d += p
        c.sendall(d[::-1]); c.close()
        if d: break
`}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	data := bytes.Repeat([]byte("0123456789abcdef"), 100_000)
	for i := range 2 {
		if f, err := s.Recv(); err != nil || f.Exit != nil {
			t.Fatal(err, f)
		}
		var c net.Conn
		if i == 0 {
			if open, err := b.ProbePort(ctx, 7000); err != nil || !open {
				t.Fatal(open, err)
			}
			c, err = b.Dial(ctx, 7000)
		} else {
			c, err = b.DialUnix(ctx, "", b.tmp+"/sock")
		}
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			c.Write(data)
			c.(interface{ CloseWrite() error }).CloseWrite()
		}()
		got, err := io.ReadAll(c)
		if err != nil || len(got) != len(data) || got[0] != 'f' {
			t.Fatal(i, err, len(got))
		}
		c.Close()
	}
	c, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := b.Dial(c, 7000); err == nil {
		t.Fatal("cancelled dial")
	}
}

// A program inside gets what was sent to it and nothing else, however long
// nothing is sent: the nudges are between guest and host.
func TestDialPause(t *testing.T) {
	t.Parallel()
	b := start(t)
	s, err := b.StartExec(b.ctx(), newID(), sandbox.ExecSpec{Argv: []string{"python3", "-c", `
import socket
l = socket.socket(); l.bind(("127.0.0.1", 7001)); l.listen(5)
print("ready", flush=True)
c = l.accept()[0]
while True:
    p = c.recv(100)
    if not p: break
    c.sendall(p)
`}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if f, err := s.Recv(); err != nil || f.Exit != nil {
		t.Fatal(err, f)
	}
	c, err := b.Dial(b.ctx(), 7001)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("one ")); err != nil {
		t.Fatal(err)
	}
	time.Sleep(1500 * time.Millisecond) // longer than all nudges
	if _, err := c.Write([]byte("two")); err != nil {
		t.Fatal(err)
	}
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); err != nil || string(got) != "one two" {
		t.Fatalf("%q, %v", got, err)
	}
}
