package conformance

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/sandbox"
)

// TestB is the file system.
func TestB(t *testing.T) {
	l := newLab(t)
	for _, c := range []struct {
		name string
		fn   func(*testing.T, *lab)
	}{
		{"B01Paths", b01}, {"B01SymlinkRace", b01Race}, {"B02TarIn", b02}, {"B02TarDamaged", b02Damaged}, {"B02TarMany", b02Many}, {"B02TarOut", b02Out},
		{"B04NotFiles", b04}, {"B05Truncated", b05}, {"B05Sparse", b05Sparse}, {"B06SameUser", b06}, {"B07Atomic", b07}, {"B07Interrupted", b07Interrupted},
		{"B08Leaks", b08}, {"B10Watch", b10}, {"B10Overflow", b10Overflow},
	} {
		l.attack(t, c.name, func(t *testing.T) { c.fn(t, l) })
	}
}

func (b *box) write(path, user, data string) error {
	_, err := b.l.Client.WriteFile(within(b.t), &v1.WriteFileRequest{SandboxId: b.id, Path: []byte(path), User: user}, strings.NewReader(data))
	return err
}

func (b *box) read(path, user string) (string, error) {
	r, _, err := b.l.Client.ReadFile(within(b.t), &v1.ReadFileRequest{SandboxId: b.id, Path: []byte(path), User: user})
	if err != nil {
		return "", err
	}
	defer r.Close()
	data, err := io.ReadAll(r)
	return string(data), err
}

func (b *box) want(what string, err error, kind sandbox.Kind) {
	b.t.Helper()
	if !errors.Is(err, kind) {
		b.t.Errorf("%s: %v (%s), want %s", what, err, sandbox.KindOf(err), kind)
	}
}

// B1: every path is one of the sandbox, by whatever way it is written.
func b01(t *testing.T, l *lab) {
	b := l.box(t, nil)
	// this file is on the host, readable by everyone, at this path
	host := filepath.Join(t.TempDir(), "host-marker")
	if err := os.WriteFile(host, []byte("host"), 0o644); err != nil {
		t.Fatal(err)
	}
	up := strings.Repeat("../", 40)
	b.sh("mkdir -p /job/d; ln -s / /job/root; ln -s " + host + " /job/link; ln -s " + up + host[1:] + " /job/up; ln -s /proc/1/root /job/proc; ln -s loop /job/loop; echo in >/job/d/f")
	for _, p := range []string{host, up + host[1:], "/job/root" + host, "/job/link", "/job/up", "/job/proc" + host, "/proc/1/root" + host, "/proc/self/root/" + up + host, "/job/d/.." + host, "/../" + host} {
		_, err := b.read(p, "")
		b.want("read "+p, err, sandbox.NotFound)
		_, err = l.Client.Stat(within(t), b.id, p, "", true)
		b.want("stat "+p, err, sandbox.NotFound)
		b.want("remove "+p, l.Client.RemoveFile(within(t), b.id, filepath.Dir(p)+"/host-marker", "", false), sandbox.NotFound)
		b.want("rename "+p, l.Client.RenameFile(within(t), b.id, filepath.Dir(p)+"/host-marker", "/job/stolen", ""), sandbox.NotFound)
	}
	for _, p := range []string{up + "etc/evil", "/job/root/etc/evil", "/job/d/../../etc/evil"} {
		if err := b.write(p, "", "x"); err != nil {
			t.Errorf("write %s: %v", p, err)
		}
		if got := b.sh("cat /etc/evil; rm /etc/evil"); got != "x" { // of the sandbox
			t.Errorf("write %s: %q", p, got)
		}
	}
	if _, err := os.Stat("/etc/evil"); err == nil {
		t.Error("written on the host")
	}
	_, err := b.read("/job/loop", "")
	b.want("read a loop of links", err, sandbox.Invalid)
	// a user does through a link what he may do himself
	b.sh("mkdir -m 700 /secret; echo s >/secret/f; ln -s /secret /tmp/s; ln -s /etc/passwd /tmp/p; chmod 1777 /tmp")
	b.want("write through a link to root's directory", b.write("/tmp/s/f", "user", "x"), sandbox.Denied)
	_, err = b.read("/tmp/s/f", "user")
	b.want("read through it", err, sandbox.Denied)
	_ = b.write("/tmp/p", "user", "evil") // replaces the link, or is refused
	if got := b.sh("cat /secret/f; head -1 /etc/passwd"); got != "s\nroot:x:0:0:root:/root:/bin/sh" {
		t.Errorf("%q", got)
	}
	// removing a link removes the link
	b.sh("mkdir -p /victim/d; echo v >/victim/d/f; mkdir /rm; ln -s /victim /rm/link; ln -s /victim/d/f /rm/file")
	if err := l.Client.RemoveFile(within(t), b.id, "/rm", "", true); err != nil {
		t.Error(err)
	}
	if got := b.sh("cat /victim/d/f; test -e /rm || echo gone"); got != "v\ngone" {
		t.Errorf("%q", got)
	}
	if got, err := os.ReadFile(host); err != nil || string(got) != "host" {
		t.Errorf("the host's file: %q, %v", got, err)
	}
}

// B1: a name that changes between a directory and a link out of it, while the
// API works on it for a user who may not touch what the link leads to.
func b01Race(t *testing.T, l *lab) {
	b := l.box(t, nil)
	b.sh("mkdir -p /victim; echo safe >/victim/file; chmod 755 /victim; mkdir -m 777 /race")
	for _, at := range []string{"/race/a", "/race/b"} {
		x, err := l.Client.StartExec(within(t), b.id, "", &v1.ExecSpec{Argv: []string{"attack", "swap", at, "/victim"}, User: "user"})
		if err != nil {
			t.Fatal(err)
		}
		b.says(x.Id, "swapping")
	}
	for i := range 80 {
		p := []string{"/race/a", "/race/b"}[i%2]
		// each may fail in its own way: nothing of it may reach /victim
		_ = b.write(p+"/file", "user", "evil")
		_ = l.Client.RemoveFile(within(t), b.id, p, "user", true)
		_ = l.Client.MakeDir(within(t), b.id, p+"/file/x", "user", 0, true)
		_ = l.Client.RenameFile(within(t), b.id, p+"/file", "/race/stolen", "user")
		// root's recursive removal follows no link either
		_ = l.Client.RemoveFile(within(t), b.id, p, "", true)
		_, _, _ = l.Client.Upload(within(t), b.id, p, "user", bytes.NewReader(archive(t, entry{tar.Header{Name: "file", Mode: 0o644}, "evil"})))
	}
	if got := b.sh("cat /victim/file; ls /victim"); got != "safe\nfile" {
		t.Errorf("the victim: %q", got)
	}
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
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		h.Size = int64(len(e.data))
		h.ModTime = time.Unix(1700000000, 0)
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// B2: an archive changes nothing outside the directory it is extracted into.
func b02(t *testing.T, l *lab) {
	b := l.box(t, nil)
	b.sh("mkdir -p /out; echo safe >/out/file; chmod 600 /out/file; mkdir /out/dir")
	snapshot := func() string { return b.sh("ls -lR /out; cat /out/file; ls / ; cat /etc/passwd | md5sum") }
	before := snapshot()
	dir := func(n string) entry {
		return entry{Header: tar.Header{Name: n, Typeflag: tar.TypeDir, Mode: 0o755}}
	}
	link := func(n, to string) entry {
		return entry{Header: tar.Header{Name: n, Typeflag: tar.TypeSymlink, Linkname: to}}
	}
	hard := func(n, to string) entry {
		return entry{Header: tar.Header{Name: n, Typeflag: tar.TypeLink, Linkname: to}}
	}
	file := func(n string) entry { return entry{tar.Header{Name: n, Mode: 0o644}, "evil"} }
	for name, a := range map[string][]entry{
		"absolute":               {file("/out/file")},
		"up":                     {file("../out/file")},
		"up in the middle":       {dir("a"), file("a/../../out/file")},
		"link then write":        {link("l", "/out"), file("l/file")},
		"relative link":          {link("l", "../../../../out"), file("l/file")},
		"link in link":           {link("a", "b"), link("b", "/out"), file("a/file")},
		"link then directory":    {link("l", "/out"), dir("l"), file("l/file")},
		"link as file":           {link("f", "/out/file"), file("f")},
		"hard link out":          {hard("h", "/out/file"), file("h")},
		"hard link up":           {hard("h", "../out/file"), file("h")},
		"hard link by link":      {link("l", "/out"), hard("h", "l/file"), file("h")},
		"directory over link":    {link("dir", "/out/dir"), entry{Header: tar.Header{Name: "dir/", Typeflag: tar.TypeDir, Mode: 0o777}}},
		"mode of what is linked": {link("f", "/out/file"), entry{tar.Header{Name: "f", Mode: 0o666, Typeflag: tar.TypeReg}, "evil"}},
		"root itself":            {link(".", "/out"), file("./file")},
		"replaced directory":     {dir("d"), file("d/x"), link("d", "/out"), file("d/file")},
	} {
		b.sh("rm -rf /in; mkdir /in")
		_, _, err := l.Client.Upload(within(t), b.id, "/in/dest", "", bytes.NewReader(archive(t, a...)))
		if err != nil && sandbox.KindOf(err) == sandbox.Internal {
			t.Errorf("%s: %v", name, err)
		}
		if after := snapshot(); strings.ReplaceAll(after, "in\n", "") != strings.ReplaceAll(before, "in\n", "") {
			t.Errorf("%s (%v) changed what is outside:\n%s\nbefore:\n%s", name, err, after, before)
			b.sh("rm -rf /out; mkdir -p /out; echo safe >/out/file; chmod 600 /out/file; mkdir /out/dir")
			before = snapshot()
		}
		if got := b.sh("ls /in"); got != "dest" && got != "" {
			t.Errorf("%s: beside the destination: %s", name, got)
		}
	}
	// as a user, who becomes nobody else by it
	a := archive(t, entry{tar.Header{Name: "suid", Mode: 0o4755, Uid: 0, Uname: "root"}, "x"}, entry{Header: tar.Header{Name: "block", Typeflag: tar.TypeBlock, Devmajor: 8, Mode: 0o666}})
	_, _, err := l.Client.Upload(within(t), b.id, "/home/user/in", "user", bytes.NewReader(a))
	b.sh("chown user /home/user")
	_, _, err2 := l.Client.Upload(within(t), b.id, "/home/user/in", "user", bytes.NewReader(a))
	got := b.sh("cd /home/user/in 2>/dev/null || exit 0; find . -user root; find . -type b")
	if got != "" {
		t.Errorf("a user's archive (%v, %v) made what is root's, or a device: %s", err, err2, got)
	}
}

// B2: an archive that is cut off or is none is an error, with a kind, and what
// follows works.
func b02Damaged(t *testing.T, l *lab) {
	b := l.box(t, nil)
	whole := archive(t, entry{tar.Header{Name: "a", Mode: 0o644}, strings.Repeat("a", 100_000)}, entry{tar.Header{Name: "b", Mode: 0o644}, "b"})
	noise := make([]byte, 64<<10)
	r := rand.NewChaCha8([32]byte{1})
	_, _ = r.Read(noise) // never fails
	for name, data := range map[string][]byte{"noise": noise, "cut": whole[:50_000], "cut header": whole[:100], "changed": slices.Concat(whole[:200], []byte{1, 2, 3, 4}, whole[204:])} {
		_, _, err := l.Client.Upload(within(t), b.id, "/d", "", bytes.NewReader(data))
		if err == nil || sandbox.KindOf(err) == sandbox.Internal || sandbox.KindOf(err) == sandbox.Unavailable {
			t.Errorf("%s: %v, want an error that says what is wrong", name, err)
		}
	}
	if n, _, err := l.Client.Upload(within(t), b.id, "/d", "", bytes.NewReader(whole)); n != 2 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	// an endless entry ends with the disk
	pr, pw := io.Pipe()
	go func() {
		w := tar.NewWriter(pw)
		_ = w.WriteHeader(&tar.Header{Name: "endless", Mode: 0o644, Size: 1 << 40})
		zeros := bytes.Repeat([]byte{1}, mib)
		for {
			if _, err := w.Write(zeros); err != nil {
				pw.CloseWithError(err)
				return
			}
		}
	}()
	_, _, err := l.Client.Upload(within(t), b.id, "/d", "", pr)
	pr.Close()
	b.want("endless", err, sandbox.Exhausted)
	b.sh("rm -rf /d; echo works >/works")
}

// B2: very many entries.
func b02Many(t *testing.T, l *lab) {
	b := l.box(t, nil)
	const n = 20_000
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for i := range n {
		if err := w.WriteHeader(&tar.Header{Name: fmt.Sprintf("d%d/f%d", i%100, i), Mode: 0o644, Typeflag: tar.TypeReg}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	got, _, err := l.Client.Upload(within(t), b.id, "/many", "", &buf)
	if err != nil || got != n {
		t.Fatalf("%d, %v", got, err)
	}
	if s := b.sh("find /many -type f | wc -l"); s != strconv.Itoa(n) {
		t.Errorf("%s files", s)
	}
}

// B2: what comes out is an archive of names below the one asked for, whatever is
// there.
func b02Out(t *testing.T, l *lab) {
	b := l.box(t, nil)
	b.sh(`mkdir -p /o/sub; cd /o; mkfifo fifo; mknod zero c 1 5; ln -s / root; ln -s ../../../etc up; echo x >sub/f; ln sub/f hard; chmod 4755 sub/f; truncate -s 1048576M sparse`)
	r, err := l.Client.Download(within(t), b.id, "/o", "")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	// a 1 TiB hole is not sent as zeros for ever: bounded here, in bytes
	tr := tar.NewReader(io.LimitReader(r, 64*mib))
	names := map[string]bool{}
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Logf("after %d names: %v", len(names), err)
			break
		}
		names[h.Name] = true
		if strings.HasPrefix(h.Name, "/") || slices.Contains(strings.Split(h.Name, "/"), "..") {
			t.Errorf("name %q", h.Name)
		}
		if h.Name == "sparse" || strings.HasSuffix(h.Name, "/sparse") {
			continue // skipping it reads it
		}
	}
	if len(names) < 3 {
		t.Errorf("names %v", names)
	}
}

// B4: what is no file is no file, and nobody waits for it.
func b04(t *testing.T, l *lab) {
	b := l.box(t, nil)
	b.sh("mkdir /n; mkfifo /n/fifo; mknod /n/zero c 1 5; mkdir /n/dir; ln -s /dev/zero /n/link")
	for _, p := range []string{"/n/fifo", "/n/zero", "/dev/zero", "/dev/null", "/dev/tty", "/n/link", "/n/dir"} {
		_, err := b.read(p, "")
		if err == nil || errors.Is(err, sandbox.Internal) || errors.Is(err, sandbox.Timeout) {
			t.Errorf("read %s: %v", p, err)
		}
		if p == "/n/fifo" || p == "/dev/zero" {
			b.want("read "+p, err, sandbox.Invalid)
		}
		_, err = l.Client.WriteFile(within(t), &v1.WriteFileRequest{SandboxId: b.id, Path: []byte(p), Append: true}, strings.NewReader("x"))
		if p != "/n/link" && (err == nil || errors.Is(err, sandbox.Internal) || errors.Is(err, sandbox.Timeout)) {
			t.Errorf("append to %s: %v", p, err)
		}
		if _, err := l.Client.Stat(within(t), b.id, p, "", false); err != nil {
			t.Errorf("stat %s: %v", p, err)
		}
	}
	r, err := l.Client.Download(within(t), b.id, "/n", "")
	if err != nil {
		t.Fatal(err)
	}
	if n, err := countTar(r); err != nil || n < 4 {
		t.Errorf("download: %d, %v", n, err)
	}
	r.Close()
	for _, p := range []string{"/proc/kmsg", "/proc/1/mem", "/proc/self/pagemap", "/sys/kernel/uevent_helper"} {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		r, _, err := l.Client.ReadFile(ctx, &v1.ReadFileRequest{SandboxId: b.id, Path: []byte(p), Length: 4096})
		if err == nil {
			_, _ = io.Copy(io.Discard, r)
			r.Close()
		}
		if ctx.Err() != nil {
			t.Errorf("read %s hangs", p)
		}
		cancel()
	}
}

// B5: a file that changes while it is read gives what there was, or an error.
func b05(t *testing.T, l *lab) {
	b := l.box(t, nil)
	b.sh("truncate -s 8M /t")
	x := b.start("attack", "truncate", "/t")
	b.says(x, "truncating")
	for range 20 {
		got, err := b.read("/t", "")
		if k := sandbox.KindOf(err); k == sandbox.Internal || k == sandbox.Timeout {
			t.Fatalf("read: %d bytes, then %v", len(got), err)
		}
		if len(got) > 8<<20 || strings.Trim(got, "\x00") != "" {
			t.Errorf("%d bytes, not all of them zero", len(got))
		}
		r, err := l.Client.Download(within(t), b.id, "/t", "")
		if err != nil {
			continue
		}
		if n, err := countTar(r); sandbox.KindOf(err) == sandbox.Timeout {
			t.Fatalf("download: %d entries, then %v", n, err)
		}
		r.Close()
	}
	b.alive()
}

// B5: ranges of a file of a terabyte of nothing.
func b05Sparse(t *testing.T, l *lab) {
	b := l.box(t, nil)
	b.sh("truncate -s 1048576M /s; printf end >>/s; printf 0123456789 >/r")
	for _, c := range []struct {
		path        string
		off, length int64
		want        string
	}{
		{"/s", 1<<40 - 2, 5, "\x00\x00end"}, {"/s", 1 << 40, 0, "end"}, {"/s", 1<<40 + 3, 10, ""}, {"/s", 1 << 50, 10, ""}, {"/s", 1 << 39, 4, "\x00\x00\x00\x00"},
		{"/r", 0, 0, "0123456789"}, {"/r", 3, 4, "3456"}, {"/r", 8, 100, "89"}, {"/r", 10, 1, ""},
	} {
		r, info, err := l.Client.ReadFile(within(t), &v1.ReadFileRequest{SandboxId: b.id, Path: []byte(c.path), Offset: c.off, Length: c.length})
		if err != nil {
			if c.want != "" {
				t.Errorf("%+v: %v", c, err)
			}
			continue
		}
		if got := readAll(t, r); got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
		if c.path == "/s" && info.Size != 1<<40+3 {
			t.Errorf("size %d", info.Size)
		}
	}
	for _, bad := range [][2]int64{{-1, 0}, {0, -1}, {1 << 62, 1 << 62}} {
		r, _, err := l.Client.ReadFile(within(t), &v1.ReadFileRequest{SandboxId: b.id, Path: []byte("/r"), Offset: bad[0], Length: bad[1]})
		if err == nil {
			if got := readAll(t, r); got != "" {
				t.Errorf("%v: %q", bad, got)
			}
		} else if sandbox.KindOf(err) == sandbox.Internal {
			t.Errorf("%v: %v", bad, err)
		}
	}
	// a reader that gives up half way
	r, _, err := l.Client.ReadFile(within(t), &v1.ReadFileRequest{SandboxId: b.id, Path: []byte("/s")})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(io.Discard, r, 8*mib); err != nil {
		t.Error(err)
	}
	r.Close()
}

// B6: files and commands are of the same user, with the same groups, at the same
// place.
func b06(t *testing.T, l *lab) {
	b := l.box(t, func(s *v1.SandboxSpec) { s.User, s.Workdir = "user", "/home/user" })
	b.shAs("root", "chown user /home/user; mkdir -m 700 /rootonly; echo s >/rootonly/f; echo g >/group; chgrp 2000 /group; chmod 640 /group")
	if err := b.write("mine", "", "data"); err != nil {
		t.Fatal(err)
	}
	if got := b.sh("id -un; pwd; stat -c '%U %G %a' mine; cat mine"); got != "user\n/home/user\nuser user 644\ndata" {
		t.Errorf("%q", got)
	}
	b.sh("echo from exec >theirs")
	if got, err := b.read("theirs", ""); err != nil || got != "from exec\n" {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := b.read("/group", ""); err != nil || got != "g\n" { // by a supplementary group, as in an exec
		t.Errorf("%q, %v", got, err)
	}
	if got := b.sh("cat /group"); got != "g" {
		t.Errorf("%q", got)
	}
	_, err := b.read("/rootonly/f", "")
	b.want("read root's", err, sandbox.Denied)
	b.want("write root's", b.write("/rootonly/g", "", "x"), sandbox.Denied)
	b.want("make in root's", l.Client.MakeDir(within(t), b.id, "/rootonly/d", "", 0, false), sandbox.Denied)
	b.want("remove root's", l.Client.RemoveFile(within(t), b.id, "/rootonly", "", true), sandbox.Denied)
	b.want("list root's", l.Client.ListFiles(within(t), b.id, "/rootonly", "", func([]*v1.FileInfo) error { return nil }), sandbox.Denied)
	_, err = l.Client.Download(within(t), b.id, "/rootonly", "")
	if err == nil {
		t.Error("downloaded root's")
	}
	_, _, err = l.Client.Upload(within(t), b.id, "/rootonly", "", bytes.NewReader(archive(t, entry{tar.Header{Name: "x", Mode: 0o644}, "x"})))
	b.want("upload into root's", err, sandbox.Denied)
	b.want("watch root's", l.Client.WatchFiles(within(t), &v1.WatchFilesRequest{SandboxId: b.id, Path: []byte("/rootonly")}, func(*v1.FileEvent) error { return errors.New("watching") }), sandbox.Denied)
	for _, user := range []string{"root", "0", "0:0"} {
		if got, err := b.read("/rootonly/f", user); err != nil || got != "s\n" {
			t.Errorf("as %s: %q, %v", user, got, err)
		}
	}
	// an archive's owners are root's to give
	owned := archive(t, entry{tar.Header{Name: "own", Mode: 0o640, Uid: 1234, Gid: 2000}, "x"})
	for _, c := range []struct {
		user   string
		owners bool
		want   string
	}{{"root", false, "0 0"}, {"root", true, "1234 2000"}} {
		if _, _, err := l.Client.UploadAs(within(t), &v1.UploadRequest{SandboxId: b.id, Path: []byte("/rootonly"), User: c.user, Owners: c.owners}, bytes.NewReader(owned)); err != nil {
			t.Error(err)
		}
		if got := strings.TrimSpace(b.shAs("root", "stat -c '%u %g' /rootonly/own; rm /rootonly/own")); got != c.want {
			t.Errorf("owners %v: %q, want %q", c.owners, got, c.want)
		}
	}
	_, err = b.read("/group", "nosuchuser")
	if err == nil || sandbox.KindOf(err) == sandbox.Internal {
		t.Errorf("as nobody known: %v", err)
	}
}

// B7: a file is replaced as a whole, with its mode, and every byte is what it
// was.
func b07(t *testing.T, l *lab) {
	b := l.box(t, nil)
	c := l.Client
	all := make([]byte, 256*16)
	for i := range all {
		all[i] = byte(i)
	}
	if err := b.write("/bin.dat", "", string(all)); err != nil {
		t.Fatal(err)
	}
	if got, err := b.read("/bin.dat", ""); err != nil || got != string(all) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if got := b.sh("md5sum </bin.dat"); got != b.sh("i=0; while [ $i -lt 16 ]; do j=0; while [ $j -lt 256 ]; do printf \"\\\\$(printf %o $j)\"; j=$((j+1)); done; i=$((i+1)); done | md5sum") {
		t.Errorf("inside: %s", got)
	}
	for _, m := range []struct {
		mode uint32
		want string
	}{{0o755, "755"}, {0, "755"}, {0o600, "600"}, {0o4755, "4755"}, {0o1777, "1777"}} {
		if _, err := c.WriteFile(within(t), &v1.WriteFileRequest{SandboxId: b.id, Path: []byte("/mode"), Mode: m.mode}, strings.NewReader("x")); err != nil {
			t.Errorf("mode %o: %v", m.mode, err)
			continue
		}
		if got := b.sh("stat -c %a /mode"); got != m.want {
			t.Errorf("mode %o: %s, want %s", m.mode, got, m.want)
		}
	}
	when := time.Date(2001, 2, 3, 4, 5, 6, 789, time.UTC)
	for _, add := range []bool{false, true} {
		fi, err := c.WriteFile(within(t), &v1.WriteFileRequest{SandboxId: b.id, Path: []byte("/time"), Append: add, Mtime: timestamppb.New(when)}, strings.NewReader("x"))
		if err != nil || !fi.GetMtime().AsTime().Equal(when) {
			t.Errorf("append %v: time %v, %v", add, fi.GetMtime().AsTime(), err)
		}
	}
	if got := b.sh("stat -c %Y /time"); got != strconv.FormatInt(when.Unix(), 10) {
		t.Errorf("time inside: %s", got)
	}
	b.sh("head -c 1048576 /dev/zero | tr '\\0' a >/atomic; ln /atomic /hard; ln -s atomic /soft")
	x, err := c.StartExec(within(t), b.id, "", &v1.ExecSpec{Argv: []string{"attack", "atomic", "/atomic"}, Stdin: "pipe", Output: "merged"})
	if err != nil {
		t.Fatal(err)
	}
	b.says(x.Id, "reading")
	for i := range 20 {
		if err := b.write("/atomic", "", strings.Repeat(string(rune('a'+i)), mib)); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.WriteStdin(within(t), b.id, x.Id, 0, nil, true); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if e, err := c.Output(within(t), &v1.ReadOutputRequest{SandboxId: b.id, Id: x.Id, Follow: true}, &out, &out); err != nil || e.GetExit().GetCode() != 0 {
		t.Errorf("a reader saw half a file: %q, %v, %v", out.String(), e.GetExit(), err)
	}
	if err := b.write("/soft", "", "through the link"); err != nil {
		t.Error(err)
	}
	// two at once: one of them, whole
	var wg sync.WaitGroup
	for _, ch := range []string{"x", "y", "z"} {
		wg.Go(func() {
			if err := b.write("/atomic", "", strings.Repeat(ch, mib)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got, err := b.read("/atomic", ""); err != nil || len(got) != mib || strings.Trim(got, got[:1]) != "" {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// B7: a client that goes away in the middle leaves what was there, and nothing
// else.
func b07Interrupted(t *testing.T, l *lab) {
	b := l.box(t, nil)
	b.sh("mkdir /w; echo old >/w/f")
	for range 5 {
		ctx, cancel := context.WithCancel(within(t))
		pr, pw := io.Pipe()
		done := make(chan error, 1)
		go func() {
			_, err := l.Client.WriteFile(ctx, &v1.WriteFileRequest{SandboxId: b.id, Path: []byte("/w/f")}, pr)
			done <- err
		}()
		if _, err := pw.Write(make([]byte, 2*mib)); err != nil {
			t.Fatal(err)
		}
		cancel()
		pw.CloseWithError(context.Canceled)
		if err := <-done; err == nil {
			t.Error("a write that was cut off succeeded")
		}
	}
	eventually(t, "only the old file is there", func() bool { return b.sh("cat /w/f; ls -a /w | wc -l") == "old\n3" })
}

// B8: /proc and /sys tell nothing of the host, and change nothing on it.
func b08(t *testing.T, l *lab) {
	b := l.box(t, nil)
	inside := b.sh(`cat /proc/cmdline /proc/version /proc/mounts /proc/self/mountinfo /proc/self/environ /proc/1/environ /proc/self/cgroup /proc/net/dev /proc/net/route /proc/partitions /proc/swaps /proc/sys/kernel/random/boot_id /proc/modules /proc/keys /proc/sched_debug /proc/timer_list /proc/iomem /proc/kallsyms /proc/config.gz /sys/class/dmi/id/* /sys/firmware/dmi/tables/DMI 2>/dev/null | tr '\0' '\n'; hostname; ps; env; ls /sys/class/net /sys/block /sys/fs/cgroup /proc/bus /sys/firmware 2>/dev/null; true`)
	marks := []string{l.Dir, filepath.Base(l.Dir), "/var/lib", "viv serve", "vivarium-", "VIV_GUEST_KEY"}
	for _, f := range []string{"/proc/sys/kernel/random/boot_id", "/proc/cmdline", "/etc/machine-id", "/proc/sys/kernel/hostname", "/sys/class/dmi/id/product_serial", "/sys/class/dmi/id/product_uuid", "/proc/version"} {
		if raw, err := os.ReadFile(f); err == nil && len(bytes.TrimSpace(raw)) > 5 && strings.TrimSpace(string(raw)) != "localhost" {
			marks = append(marks, string(bytes.TrimSpace(raw)))
		}
	}
	for _, e := range os.Environ() {
		if _, v, _ := strings.Cut(e, "="); len(v) > 12 && !strings.HasPrefix(v, "/bin") && !strings.HasPrefix(v, "/sbin") && v != "xterm-256color" {
			marks = append(marks, e)
		}
	}
	for _, m := range marks {
		if strings.Contains(inside, m) {
			t.Errorf("%q can be read inside", m)
		}
	}
	for _, f := range []string{"/proc/kcore", "/proc/kmsg", "/proc/sysrq-trigger", "/proc/keys", "/proc/sched_debug", "/proc/timer_list", "/proc/latency_stats", "/proc/acpi", "/proc/scsi", "/sys/firmware/efi", "/sys/kernel/debug", "/sys/kernel/tracing", "/dev/mem", "/dev/kmsg", "/dev/port", "/dev/kvm"} {
		r := b.must("sh", "-c", "test -e "+f+" && head -c 64 "+f+" | wc -c")
		if n := strings.TrimSpace(r.out); r.exit.Code == 0 && n != "" && n != "0" && !strings.Contains(r.out, "Is a directory") && !strings.Contains(r.out, "denied") {
			t.Errorf("%s gives %s bytes", f, n)
		}
	}
	// other processes: those of this sandbox only
	if got := b.sh("ps -o comm | sort -u | tr '\\n' ' '"); strings.Contains(got, "viv ") || strings.Contains(got, "systemd") {
		t.Errorf("processes inside: %s", got)
	}
	// a neighbour's are not there either
	l.neighbour.as(t).start("sleep", "98765")
	if got := b.sh("ps -o args | grep -c '[9]8765'; true"); got != "0" {
		t.Errorf("a neighbour's process can be seen")
	}
}

// B10: a watch sees what happens, renames included.
func b10(t *testing.T, l *lab) {
	b := l.box(t, nil)
	b.sh("mkdir -p /w/sub")
	events := make(chan *v1.FileEvent, 1000)
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	done := make(chan error, 1)
	go func() {
		done <- l.Client.WatchFiles(ctx, &v1.WatchFilesRequest{SandboxId: b.id, Path: []byte("/w"), Recursive: true}, func(e *v1.FileEvent) error {
			events <- e
			return nil
		})
	}()
	see := func(op, path string) *v1.FileEvent {
		t.Helper()
		for {
			select {
			case e := <-events:
				if e.Op == op && strings.HasSuffix(string(e.Path), path) {
					return e
				}
			case err := <-done:
				t.Fatalf("the watch ended: %v", err)
			case <-time.After(limit):
				t.Fatalf("never saw %s of %s", op, path)
			}
		}
	}
	see("ready", "")
	b.sh("echo x >/w/a")
	see("created", "a")
	b.sh("echo y >>/w/a")
	see("modified", "a")
	b.sh("chmod 600 /w/a")
	see("attrib", "a")
	b.sh("mv /w/a /w/sub/b")
	if e := see("renamed", "b"); len(e.From) > 0 && !strings.HasSuffix(string(e.From), "a") {
		t.Errorf("renamed from %q", e.From)
	}
	b.sh("mkdir /w/new; sleep 0.3; echo z >/w/new/c")
	see("created", "c")
	b.sh("rm /w/sub/b")
	see("removed", "b")
	if err := b.write("/w/api", "", "by the API"); err != nil {
		t.Fatal(err)
	}
	for { // as whatever it is written
		e := <-events
		if strings.HasSuffix(string(e.Path), "api") {
			break
		}
	}
	b.sh(`touch "$(printf '/w/\377\376')"`)
	see("created", "\xff\xfe")
	cancel()
	<-done
	eventually(t, "the guest forgets the watch", func() bool { return b.sh("ls -l /proc/1/fd 2>/dev/null | grep -c inotify; true") == "0" })
}

// B10: more changes than anyone reads say so, and the watch goes on.
func b10Overflow(t *testing.T, l *lab) {
	b := l.box(t, nil)
	b.sh("mkdir /w")
	ctx, cancel := context.WithCancel(within(t))
	defer cancel()
	var n, overflows int
	err := l.Client.WatchFiles(ctx, &v1.WatchFilesRequest{SandboxId: b.id, Path: []byte("/w")}, func(e *v1.FileEvent) error {
		switch {
		case e.Op == "ready":
			go func() {
				b.start("sh", "-c", "i=0; while [ $i -lt 6000 ]; do : >/w/f; rm /w/f; i=$((i+1)); done; sleep 1; touch /w/last")
			}()
			time.Sleep(2 * time.Second) // a reader that is away for a while
		case strings.HasSuffix(string(e.Path), "last"):
			cancel()
			return io.EOF
		case e.Op == "overflow":
			overflows++
		default:
			n++
		}
		return nil
	})
	if !errors.Is(err, io.EOF) {
		t.Errorf("%d events, %d overflows, then %v", n, overflows, err)
	}
	if n < 12_000 && overflows == 0 {
		t.Errorf("%d events of at least 12000, and no word of a loss", n)
	}
}
