package guest_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/guest"
	"vivarium/sandbox"
)

// What is packed and extracted again is the same, in the eyes of find and of
// Go's own reader.
func TestTarRoundTrip(t *testing.T) {
	t.Parallel()
	b := start(t)
	src := b.tmp + "/src"
	long := strings.Repeat("long-name-", 20)
	bad := "bad\xff\xfename"
	for _, d := range []string{"", "/d", "/d/" + long, "/empty", "/ünï"} {
		if err := os.Mkdir(src+d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	os.WriteFile(src+"/d/"+long+"/"+long, []byte("deep"), 0o600)
	os.WriteFile(src+"/"+bad, bytes.Repeat([]byte("x"), 100_001), 0o644)
	os.WriteFile(src+"/setuid", []byte("s"), 0o755)
	os.Chmod(src+"/setuid", 0o4755|os.ModeSetuid)
	os.Link(src+"/setuid", src+"/d/hard")
	os.Symlink("../"+strings.Repeat("t/", 60), src+"/d/soft")
	os.Symlink("/etc/passwd", src+"/abs")
	unix.Mkfifo(src+"/fifo", 0o640)
	unix.Mknod(src+"/null", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3)))
	os.Chown(src+"/"+bad, 3_000_000, 70000)
	unix.Setxattr(src+"/setuid", "user.note", []byte("a=b\nc\x00"), 0)
	f, _ := os.Create(src + "/sparse")
	f.WriteAt([]byte("middle"), 5<<20)
	f.Truncate(1 << 34)
	f.Close()
	for _, p := range []string{"/d", "/empty", "/" + bad, "/setuid", "/sparse", "/fifo"} {
		os.Chtimes(src+p, time.Time{}, time.Unix(1_234_567_890, 123_456_789))
	}
	os.Chtimes(src+"/ünï", time.Time{}, time.Unix(-3, 500_000_000))

	r, err := b.TarOut(b.ctx(), "", src, ".", false)
	if err != nil {
		t.Fatal(err)
	}
	var ar bytes.Buffer
	if _, err := io.Copy(&ar, r); err != nil {
		t.Fatal(err)
	}
	r.Close()
	if ar.Len() > 4<<20 {
		t.Errorf("archive of %d bytes: holes were packed", ar.Len())
	}
	n := 0
	for tr := tar.NewReader(bytes.NewReader(ar.Bytes())); ; n++ {
		if _, err := tr.Next(); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if n != 14 {
		t.Errorf("%d entries", n)
	}
	// GNU tar, where it is, agrees that this is an archive.
	if tarBin, err := exec.LookPath("tar"); err == nil {
		cmd := exec.Command(tarBin, "-tf", "-")
		cmd.Stdin = bytes.NewReader(ar.Bytes())
		if out, err := cmd.CombinedOutput(); err != nil || bytes.Count(out, []byte("\n")) < 14 {
			t.Errorf("tar: %v %s", err, out)
		}
	}
	// Only the sparse file is too large to write out here.
	var small bytes.Buffer
	tw, tr := tar.NewWriter(&small), tar.NewReader(&ar)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if strings.HasSuffix(h.Name, "sparse") {
			h.Size = 6 << 20
			for k := range h.PAXRecords {
				if strings.HasPrefix(k, "GNU.") {
					delete(h.PAXRecords, k)
				}
			}
		}
		h.Format = tar.FormatPAX
		if err := tw.WriteHeader(h); err != nil {
			t.Fatal(h.Name, err)
		}
		io.CopyN(tw, tr, h.Size)
	}
	tw.Close()
	res, err := b.TarIn(b.ctx(), "", b.tmp+"/dst", &small, guest.TarOptions{Parents: true, Owners: true})
	if err != nil || res.Entries != 14 {
		t.Fatal(res, err)
	}
	os.Truncate(src+"/sparse", 6<<20)
	os.Chtimes(src+"/sparse", time.Time{}, time.Unix(1_234_567_890, 123_456_789))
	list := func(dir string) string {
		out, err := exec.Command("find", dir, "-mindepth", "1", "-printf", "%P %y %m %U %G %T@ %l %n\\n").CombinedOutput()
		if err != nil {
			t.Fatal(err)
		}
		l := strings.Split(string(out), "\n")
		// sorted by find's own order, which differs
		for i := range l {
			for j := i + 1; j < len(l); j++ {
				if l[j] < l[i] {
					l[i], l[j] = l[j], l[i]
				}
			}
		}
		return strings.Join(l, "\n")
	}
	if a, c := list(src), list(b.tmp+"/dst"); a != c {
		t.Errorf("packed:\n%s\nextracted:\n%s", a, c)
	}
	if out, err := exec.Command("diff", "-r", "--no-dereference", "-x", "fifo", "-x", "null", src, b.tmp+"/dst").CombinedOutput(); err != nil {
		t.Errorf("%v %s", err, out)
	}
	v := make([]byte, 10)
	if n, err := unix.Getxattr(b.tmp+"/dst/setuid", "user.note", v); err == nil && string(v[:n]) != "a=b\nc\x00" {
		t.Errorf("attribute %q", v[:n])
	}
	var st unix.Stat_t
	if unix.Stat(b.tmp+"/dst/sparse", &st); st.Blocks*512 > 1<<20 {
		t.Errorf("holes were filled: %d blocks", st.Blocks)
	}
}

type ent struct {
	name, link string
	kind       byte
	data       string
}

func archive(t *testing.T, l ...ent) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range l {
		if err := w.WriteHeader(&tar.Header{Name: e.name, Linkname: e.link, Typeflag: e.kind, Mode: 0o755, Size: int64(len(e.data))}); err != nil {
			t.Fatal(err)
		}
		io.WriteString(w, e.data)
	}
	w.Close()
	return &b
}

// B1, B2: nothing leaves the destination.
func TestTarHostile(t *testing.T) {
	t.Parallel()
	b := start(t)
	out := b.tmp + "/outside"
	os.Mkdir(out, 0o755)
	os.WriteFile(out+"/secret", []byte("secret"), 0o600)
	for i, c := range []struct {
		l    []ent
		kind sandbox.Kind // "" for none
	}{
		{[]ent{{"../x", "", '0', "x"}}, sandbox.Invalid},
		{[]ent{{"a/../../x", "", '0', "x"}}, sandbox.Invalid},
		{[]ent{{"..", "", '5', ""}}, sandbox.Invalid},
		{[]ent{{out + "/x", "", '0', "x"}}, ""}, // becomes relative
		{[]ent{{"l", out, '2', ""}, {"l/x", "", '0', "x"}}, sandbox.Invalid},
		{[]ent{{"l", "../outside", '2', ""}, {"l/x", "", '5', ""}}, sandbox.Invalid},
		{[]ent{{"l", out, '2', ""}, {"l", "", '5', ""}, {"l/x", "", '0', "x"}}, ""}, // replaced by a directory
		{[]ent{{"l", out + "/x", '2', ""}, {"l", "", '0', "x"}}, ""},                // replaced by a file
		{[]ent{{"h", "../outside/secret", '1', ""}}, sandbox.Invalid},
		{[]ent{{"h", out + "/secret", '1', ""}}, sandbox.NotFound},
		{[]ent{{"l", out, '2', ""}, {"h", "l/secret", '1', ""}}, sandbox.Invalid},
		{[]ent{{"d", "", '5', ""}, {"d", "", '0', "file now"}}, ""},
		{[]ent{{"d/f", "", '0', "x"}, {"d", "", '0', "x"}}, sandbox.Conflict},
		{[]ent{{"f", "", '0', "one"}, {"f", "", '0', "two"}}, ""},
	} {
		dst := fmt.Sprintf("%s/dst%d", b.tmp, i)
		_, err := b.TarIn(b.ctx(), "", dst, archive(t, c.l...), guest.TarOptions{Parents: true})
		if sandbox.KindOf(err) != c.kind && !(c.kind == sandbox.NotFound && errors.Is(err, sandbox.Invalid)) {
			t.Errorf("%d: %v, want %q", i, err, c.kind)
		}
		got, _ := os.ReadDir(out)
		if len(got) != 1 {
			t.Fatalf("%d: written outside: %v", i, got)
		}
	}
	if st, err := os.Stat(out + "/secret"); err != nil || st.Sys() == nil || st.Size() != 6 {
		t.Error(err)
	}
	if got, _ := os.ReadFile(b.tmp + "/dst13/f"); string(got) != "two" {
		t.Errorf("%q", got)
	}
	// A link that was there is followed, within the destination.
	dst := b.tmp + "/root"
	os.MkdirAll(dst+"/usr/bin", 0o755)
	os.Symlink("usr/bin", dst+"/bin")
	os.Symlink("/usr", dst+"/abs")
	os.Symlink("../../..", dst+"/up")
	if _, err := b.TarIn(b.ctx(), "", dst, archive(t, ent{"bin/", "", '5', ""}, ent{"bin/tool", "", '0', "t"}, ent{"abs/bin/tool2", "", '0', "t"}, ent{"up/top", "", '0', "t"}), guest.TarOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"/usr/bin/tool", "/usr/bin/tool2", "/top"} {
		if _, err := os.Stat(dst + p); err != nil {
			t.Error(err)
		}
	}
	// Limits, and archives that are none.
	many := make([]ent, 50)
	for i := range many {
		many[i] = ent{fmt.Sprint(i), "", '0', "0123456789"}
	}
	if _, err := b.TarIn(b.ctx(), "", b.tmp+"/m", archive(t, many...), guest.TarOptions{Parents: true, MaxEntries: 20}); !errors.Is(err, sandbox.Exhausted) {
		t.Error(err)
	}
	if _, err := b.TarIn(b.ctx(), "", b.tmp+"/m", archive(t, many...), guest.TarOptions{MaxBytes: 300}); !errors.Is(err, sandbox.Exhausted) {
		t.Error(err)
	}
	if _, err := b.TarIn(b.ctx(), "", b.tmp+"/m", strings.NewReader(strings.Repeat("no archive ", 1<<18)), guest.TarOptions{}); !errors.Is(err, sandbox.Invalid) {
		t.Error(err)
	}
	cut := archive(t, ent{"f", "", '0', strings.Repeat("x", 100_000)}).Bytes()[:50_000]
	if _, err := b.TarIn(b.ctx(), "", b.tmp+"/m", bytes.NewReader(cut), guest.TarOptions{}); !errors.Is(err, sandbox.Invalid) {
		t.Error(err)
	}
	if _, err := b.TarIn(b.ctx(), "", "/etc/passwd", bytes.NewReader(cut), guest.TarOptions{}); !errors.Is(err, sandbox.Invalid) {
		t.Error(err)
	}
}

// A14: as deep as a path can only be walked, not named.
func TestTarDeep(t *testing.T) {
	t.Parallel()
	b := start(t)
	if r := b.sh(`cd "$1" && mkdir deep && cd deep && i=0 && while [ $i -lt 40 ]; do d=; j=0; while [ $j -lt 100 ]; do d=${d}d/; j=$((j+1)); done; mkdir -p $d && cd -P $d && echo x > f; i=$((i+1)); done`, b.tmp); r.st.Code != 0 {
		t.Fatalf("%+v", r)
	}
	r, err := b.TarOut(b.ctx(), "", b.tmp+"/deep", "", false)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	pr, pw := io.Pipe()
	go func() {
		_, err := io.Copy(pw, r)
		pw.CloseWithError(err)
	}()
	if res, err := b.TarIn(b.ctx(), "", b.tmp+"/copy", pr, guest.TarOptions{Parents: true}); err != nil || res.Entries != 4041 {
		t.Fatal(res, err)
	}
	for _, d := range []string{"/deep", "/copy"} {
		if err := b.Remove(b.ctx(), "", b.tmp+d, true); err != nil {
			t.Fatal(err)
		}
	}
}

// A14: what a deep tree costs the guest does not grow with the square of its
// depth, which a program inside chooses.
func TestTarDeepMemory(t *testing.T) {
	t.Parallel()
	b := start(t)
	const depth, name = 5000, "dddddddddddddddddddd"
	if r := b.run(sandbox.ExecSpec{Argv: []string{"python3", "-c", `
import os
os.chdir("` + b.tmp + `")
for i in range(` + fmt.Sprint(depth) + `):
    os.mkdir("` + name + `"); os.chdir("` + name + `")
`}}); r.st.Code != 0 {
		t.Fatalf("%+v", r)
	}
	r, err := b.TarOut(b.ctx(), "", b.tmp+"/"+name, "", false)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if n, err := io.Copy(io.Discard, r); err != nil || n < depth*depth {
		t.Fatal(n, err)
	}
	status, err := os.ReadFile("/proc/" + strconv.Itoa(b.pid) + "/status")
	if err != nil {
		t.Fatal(err)
	}
	var peak int // kB
	for line := range strings.Lines(string(status)) {
		fmt.Sscanf(line, "VmHWM: %d kB", &peak)
	}
	if peak == 0 || peak > 150<<10 {
		t.Errorf("the guest took %d kB", peak)
	}
	if err := b.Remove(b.ctx(), "", b.tmp+"/"+name, true); err != nil {
		t.Fatal(err)
	}
}

// B2: an archive whose one file is a hole of 4 EiB keeps the guest busy for as
// long as somebody waits for it and not longer.
func TestTarHole(t *testing.T) {
	t.Parallel()
	b := start(t)
	before, err := b.Stats(b.ctx())
	if err != nil {
		t.Fatal(err)
	}
	var a bytes.Buffer
	rec := map[string]string{"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.name": "hole", "GNU.sparse.size": strconv.FormatInt(1<<62, 10), "GNU.sparse.map": "0,0", "GNU.sparse.numblocks": "1"}
	var pax bytes.Buffer
	for k, v := range rec {
		n := len(k) + len(v) + 3
		n += len(strconv.Itoa(n + 2))
		fmt.Fprintf(&pax, "%d %s=%s\n", n, k, v)
	}
	head := func(name string, kind byte, size int) {
		h := make([]byte, 512)
		copy(h, name)
		copy(h[100:], "0000644\x000000000\x000000000\x00")
		copy(h[124:], fmt.Sprintf("%011o\x0000000000000\x00        ", size))
		h[156] = kind
		copy(h[257:], "ustar\x0000")
		sum := 0
		for _, c := range h {
			sum += int(c)
		}
		copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
		a.Write(h)
	}
	head("pax", 'x', pax.Len())
	a.Write(append(pax.Bytes(), make([]byte, (512-pax.Len()%512)%512)...))
	head("hole", '0', 0)
	a.Write(make([]byte, 1024))
	if h, err := tar.NewReader(bytes.NewReader(a.Bytes())).Next(); err != nil || h.Size != 1<<62 {
		t.Fatal(h, err)
	}
	ctx, cancel := context.WithTimeout(b.ctx(), time.Second)
	defer cancel()
	if _, err := b.TarIn(ctx, "", b.tmp, &a, guest.TarOptions{}); err == nil {
		t.Fatal("extracted 4 EiB")
	} else {
		t.Log(err)
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		st, err := b.Stats(b.ctx())
		if err != nil {
			t.Fatal(err)
		}
		if st.Goroutines <= before.Goroutines+2 && st.FDs <= before.FDs+1 {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("before %+v, after %+v", before, st)
		}
	}
}

// B10: a large tree that is moved into a watched one is told of in full, or it
// is told that it is not.
func TestWatchMovedIn(t *testing.T) {
	t.Parallel()
	b := start(t)
	long := strings.Repeat("n", 240)
	files := 0
	for i := range 12 {
		d := filepath.Join(b.tmp, "tree", strconv.Itoa(i))
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
		for j := range 500 {
			if err := os.WriteFile(filepath.Join(d, long+strconv.Itoa(j)), nil, 0o644); err != nil {
				t.Fatal(err)
			}
			files++
		}
	}
	os.Mkdir(b.tmp+"/watched", 0o755)
	w, err := b.Watch(b.ctx(), "", b.tmp+"/watched", true)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := os.Rename(b.tmp+"/tree", b.tmp+"/watched/tree"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(b.tmp+"/watched/last", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	told, last, overflow := 0, false, false
	for !last {
		l, err := w.Next()
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range l {
			switch {
			case e.Op == sandbox.FileOverflow:
				overflow = true
			case e.Path == "last":
				last = true
			case e.Op == sandbox.FileCreated && strings.Contains(e.Path, long):
				told++
			}
		}
	}
	if told != files && !overflow {
		t.Errorf("told of %d files of %d, and of no overflow", told, files)
	}
	// and what is in it is watched from now on
	if err := os.WriteFile(b.tmp+"/watched/tree/11/late", nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for {
		l, err := w.Next()
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range l {
			if e.Path == "tree/11/late" {
				return
			}
		}
	}
}

// B10: what a watch sees.
func TestWatch(t *testing.T) {
	t.Parallel()
	b := start(t)
	root := b.tmp + "/w"
	os.MkdirAll(root+"/sub", 0o755)
	if _, err := b.Watch(b.ctx(), "", root+"/none", true); !errors.Is(err, sandbox.NotFound) {
		t.Fatal(err)
	}
	w, err := b.Watch(b.ctx(), "", root, true)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	var seen []sandbox.FileEvent
	until := func(op sandbox.FileOp, path, from string) {
		t.Helper()
		for {
			for i, e := range seen {
				if e.Op == op && e.Path == path && e.From == from {
					seen = seen[i+1:]
					return
				}
			}
			l, err := w.Next()
			if err != nil {
				t.Fatalf("%v while waiting for %s %s after %v", err, op, path, seen)
			}
			seen = append(seen, l...)
		}
	}
	os.WriteFile(root+"/sub/f", []byte("x"), 0o644)
	until(sandbox.FileCreated, "sub/f", "")
	until(sandbox.FileModified, "sub/f", "")
	os.Rename(root+"/sub/f", root+"/g")
	until(sandbox.FileRenamed, "g", "sub/f")
	os.Rename(root+"/sub", root+"/dir")
	until(sandbox.FileRenamed, "dir", "sub")
	os.WriteFile(root+"/dir/h", nil, 0o644)
	until(sandbox.FileCreated, "dir/h", "")
	os.Chmod(root+"/dir/h", 0o600)
	until(sandbox.FileAttrib, "dir/h", "")
	os.MkdirAll(root+"/new/deep/er", 0o755)
	until(sandbox.FileCreated, "new/deep/er", "")
	os.WriteFile(root+"/new/deep/er/x\xff", nil, 0o644)
	until(sandbox.FileCreated, "new/deep/er/x\xff", "")
	os.Rename(root+"/g", b.tmp+"/away")
	until(sandbox.FileRemoved, "g", "")
	os.RemoveAll(root)
	until(sandbox.FileRemoved, "", "")
	for err == nil {
		_, err = w.Next()
	}
	if err != io.EOF {
		t.Fatal(err)
	}
}

// B10: a flood is said, not hidden.
func TestWatchOverflow(t *testing.T) {
	t.Parallel()
	b := start(t)
	w, err := b.Watch(b.ctx(), "", b.tmp, false)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	limit, _ := os.ReadFile("/proc/sys/fs/inotify/max_queued_events")
	var max int
	fmt.Sscan(string(limit), &max)
	if max == 0 || max > 50_000 {
		t.Skipf("the kernel's queue holds %d events", max)
	}
	// Nobody reads meanwhile: the connection fills, then the kernel's queue.
	long := strings.Repeat("n", 200)
	for i := range max + 60_000 {
		p := filepath.Join(b.tmp, fmt.Sprint(long, i%7))
		if i%2 == 0 {
			os.WriteFile(p, nil, 0o600)
		} else {
			os.Remove(p)
		}
	}
	for {
		l, err := w.Next()
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range l {
			if e.Op == sandbox.FileOverflow {
				return
			}
		}
	}
}
