package agent

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// A ring gives back what was put into it, whatever the order of things.
func TestRing(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var r ring
	var model []byte // all bytes ever
	sent := int64(0)
	for range 20_000 {
		switch rng.IntN(3) {
		case 0:
			p := r.space()
			if len(p) == 0 {
				if r.end-r.base != ringMax {
					t.Fatalf("no room with %d bytes held", r.end-r.base)
				}
				break
			}
			n := 1 + rng.IntN(len(p))
			for i := range n {
				p[i] = byte(rng.Uint32())
			}
			model = append(model, p[:n]...)
			r.end += int64(n)
		case 1:
			if sent < r.end {
				p := r.at(sent)
				if len(p) == 0 || !bytes.Equal(p, model[sent:sent+int64(len(p))]) {
					t.Fatalf("wrong bytes at %d", sent)
				}
				sent += int64(1 + rng.IntN(len(p)))
			}
		case 2:
			if sent > r.base {
				r.ack(r.base + rng.Int64N(sent-r.base+1))
			}
		}
		if len(model) > 8<<20 {
			break
		}
	}
	if r.free(); r.buf != nil || ringUsed.Load() != 0 {
		t.Fatalf("%d bytes still counted", ringUsed.Load())
	}
}

// A10: what all rings may take is bounded, and then they stay small.
func TestRingTotal(t *testing.T) {
	var all []*ring
	for range 200 {
		r := &ring{}
		for p := r.space(); len(p) > 0; p = r.space() {
			r.end += int64(len(p))
		}
		all = append(all, r)
	}
	if n := ringUsed.Load(); n > ringTotal+200*ringMin {
		t.Errorf("%d bytes", n)
	}
	for _, r := range all {
		if r.end == 0 {
			t.Error("a stream without any room")
		}
		r.free()
	}
	if n := ringUsed.Load(); n != 0 {
		t.Errorf("%d bytes still counted", n)
	}
}

// Ended execs that the host has not collected are never dropped; when there are
// too many, new ones have to wait.
func TestTooManyExecs(t *testing.T) {
	a := &Agent{execs: map[string]*execution{}}
	for i := range maxExecs {
		a.execs[fmt.Sprint("e", i)] = &execution{}
	}
	s := wire.Start{ID: "one more", Argv: []string{"true"}}
	if _, _, err := a.start(s.Append(nil)); !errors.Is(err, sandbox.Exhausted) {
		t.Fatal(err)
	}
	if len(a.execs) != maxExecs {
		t.Fatal(len(a.execs))
	}
}

// Whoever attaches to an exec that is being started waits until it is, and is
// told if it could not be.
func TestAttachStarting(t *testing.T) {
	a := &Agent{execs: map[string]*execution{}}
	e := &execution{a: a, id: "e"}
	e.cond.L = &e.mu
	e.ready.Add(1)
	a.execs["e"] = e
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	c, err := newConn(fds[0])
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	c.r = wire.NewReader(c.f, wire.GuestLimit)
	host := os.NewFile(uintptr(fds[1]), "host")
	defer host.Close()
	at := wire.Attach{ID: "e"}
	done := make(chan bool, 1)
	go func() { done <- a.first(c, wire.TAttach, at.Append(nil)) }()
	time.Sleep(50 * time.Millisecond)
	e.failed = sandbox.Exhausted.Errorf("start process: no more")
	a.forget(e)
	e.ready.Done()
	host.SetReadDeadline(time.Now().Add(10 * time.Second))
	ty, p, err := wire.NewReader(host, wire.HostLimit).Next()
	if err != nil || ty != wire.TError {
		t.Fatalf("frame %d, %v", ty, err)
	}
	if said, err := wire.DecodeError(wire.NewDec(p)); err != nil || said.Kind != sandbox.NotFound {
		t.Error(said, err)
	}
	if !<-done {
		t.Error("the connection is of no more use")
	}
}

// Go's reader understands every header.
func TestTarHeader(t *testing.T) {
	long := string(bytes.Repeat([]byte("d/"), 5000)) + "f\xff"
	for i, e := range []tarEntry{
		{name: "a", kind: '0', mode: 0o4755, uid: 1, gid: 2, sec: 3},
		{name: long, kind: '2', link: long, mode: 0o777},
		{name: "big", kind: '0', size: 0, uid: 1<<32 - 2, gid: 1 << 31, sec: -5, nsec: 250_000_000},
		{name: "x", kind: '0', sec: -1, nsec: 999_999_999},
		{name: "x", kind: '0', sec: 1 << 40, nsec: 1, xattrs: [][2]string{{"user.a", "v=\n"}, {"security.capability", "\x01\x00"}}},
		{name: "dev", kind: '4', devMajor: 8, devMinor: 1},
		{name: string(bytes.Repeat([]byte("n"), 99-11)), kind: '0', nsec: 1},
	} {
		b := append(e.append(nil), make([]byte, 2*tarBlock)...)
		if len(b)%tarBlock != 0 {
			t.Fatalf("%d: %d bytes", i, len(b))
		}
		h, err := tar.NewReader(bytes.NewReader(b)).Next()
		if err != nil {
			t.Fatalf("%d: %v", i, err)
		}
		if h.Name != e.name || h.Linkname != e.link || h.Typeflag != e.kind || h.Mode != int64(e.mode) || h.Uid != int(e.uid) || h.Gid != int(e.gid) ||
			!h.ModTime.Equal(time.Unix(e.sec, e.nsec)) || h.Devmajor != int64(e.devMajor) || h.Devminor != int64(e.devMinor) {
			t.Errorf("%d: %+v of %+v", i, h, e)
		}
		for _, x := range e.xattrs {
			if h.PAXRecords["SCHILY.xattr."+x[0]] != x[1] {
				t.Errorf("%d: %q", i, h.PAXRecords)
			}
		}
	}
}

// FuzzUnpack extracts whatever archive into a directory and looks beside it.
func FuzzUnpack(f *testing.F) {
	for _, l := range [][]tar.Header{
		{{Name: "a/b", Typeflag: tar.TypeReg, Mode: 0o644}},
		{{Name: "l", Linkname: "../out", Typeflag: tar.TypeSymlink}, {Name: "l/x", Typeflag: tar.TypeReg}},
		{{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755}, {Name: "h", Linkname: "d/../../out/secret", Typeflag: tar.TypeLink}},
	} {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for i := range l {
			w.WriteHeader(&l[i])
		}
		w.Close()
		f.Add(b.Bytes())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		dir := t.TempDir()
		for _, d := range []string{"/in", "/out"} {
			if err := unix.Mkdir(dir+d, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		root, err := openRetry(dir+"/in", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		u := &unpacker{a: &Agent{files: newFileRunner()}, who: &account{}, req: &wire.TarIn{MaxEntries: 100, MaxBytes: 1 << 20}, root: root, lastFD: -1, made: map[[2]uint64]struct{}{}}
		u.extract(bytes.NewReader(b))
		u.close()
		for d, want := range map[string]int{"": 2, "/out": 0} {
			fd, err := openRetry(dir+d, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			buf := make([]byte, direntBuf)
			n, err := getdents(fd, buf)
			unix.Close(fd)
			got := 0
			dirents(buf[:n], func([]byte, byte) { got++ })
			if err != nil || got != want {
				t.Fatalf("%d files in %q", got, d)
			}
		}
	})
}

func TestLookup(t *testing.T) {
	if a, err := lookup(""); err != nil || a.uid != 0 || a.home == "" {
		t.Errorf("%+v %v", a, err)
	}
	if a, err := lookup("4000000:17"); err != nil || a.uid != 4000000 || a.gid != 17 || a.home != "/" {
		t.Errorf("%+v %v", a, err)
	}
	for _, s := range []string{"no such user", "-1", "4294967296", "0:no such group", "0x10"} {
		if a, err := lookup(s); !errors.Is(err, sandbox.NotFound) {
			t.Errorf("%q: %+v %v", s, a, err)
		}
	}
}

func TestUploadEnd(t *testing.T) {
	// Only TEnd ends an upload: see upload.next.
	data := wire.AppendFrame(nil, wire.TData, func(b []byte) []byte { return append(b, 'x') })
	u := &upload{c: &conn{r: wire.NewReader(bytes.NewReader(data), wire.GuestLimit)}}
	if _, err := io.ReadAll(u); err == nil {
		t.Error("a cut upload counts as whole")
	}
	u = &upload{c: &conn{r: wire.NewReader(bytes.NewReader(wire.AppendFrame(data, wire.TEnd, nil)), wire.GuestLimit)}}
	if b, err := io.ReadAll(u); err != nil || string(b) != "x" {
		t.Error(err, b)
	}
}
