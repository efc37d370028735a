package spool

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"vivarium/sandbox"
)

func read(t *testing.T, s *Stream, off int64) ([]byte, int64) {
	t.Helper()
	var all []byte
	first := int64(-1)
	buf := make([]byte, 7)
	for {
		n, at, err := s.ReadAt(buf, off)
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			return all, first
		}
		if first < 0 {
			first = at
		}
		all = append(all, buf[:n]...)
		off = at + int64(n)
	}
}

func TestRing(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "x", "stdout")
	s, err := Open(path, 100)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("an exec without output has a file")
	}
	var want []byte
	for i := range 50 {
		p := bytes.Repeat([]byte{byte('a' + i%26)}, i*3%40+1)
		want = append(want, p...)
		if err := s.Write(p); err != nil {
			t.Fatal(err)
		}
		first, length := s.Bounds()
		if length != int64(len(want)) || first != max(0, length-100) {
			t.Fatalf("bounds %d, %d after %d bytes", first, length, len(want))
		}
		got, at := read(t, s, 0)
		if at != first || !bytes.Equal(got, want[first:]) {
			t.Fatalf("read %d bytes at %d, want %d at %d", len(got), at, length-first, first)
		}
	}
	// one write larger than the ring
	big := bytes.Repeat([]byte("0123456789"), 30)
	want = append(want, big...)
	if err := s.Write(big); err != nil {
		t.Fatal(err)
	}
	got, at := read(t, s, 0)
	if at != int64(len(want))-100 || !bytes.Equal(got, want[at:]) {
		t.Fatalf("after a large write: %q at %d", got, at)
	}
	// another process finds it as it was, without Close
	again, err := Open(path, 999)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if got2, at2 := read(t, again, 0); at2 != at || !bytes.Equal(got2, got) {
		t.Errorf("opened again: %q at %d", got2, at2)
	}
	if again.Cap() != 100 {
		t.Errorf("capacity %d, want that of the file", again.Cap())
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func TestLag(t *testing.T) {
	t.Parallel()
	s, err := Open(filepath.Join(t.TempDir(), "s"), 100)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.Write(make([]byte, 60)); err != nil {
		t.Fatal(err)
	}
	r := s.Follow(0)
	if lag, n, _ := s.Lag(); lag != 60 || n != 1 {
		t.Errorf("lag %d of %d readers, want 60 of 1", lag, n)
	}
	_, _, changed := s.Lag()
	r.Moved(60)
	select {
	case <-changed:
	default:
		t.Error("a reader moved and nobody was told")
	}
	r.Close()
	if lag, n, _ := s.Lag(); lag != 0 || n != 0 {
		t.Errorf("lag %d of %d readers after Close", lag, n)
	}
}

// A daemon that is killed between the bytes and the header that counts them has
// not touched what counted before.
func TestTornWrite(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "stdout")
	const capacity = 1000
	s, err := Open(path, capacity)
	if err != nil {
		t.Fatal(err)
	}
	var all []byte
	for i := range 700 { // the ring wraps, at lengths that do not divide it
		p := bytes.Repeat([]byte{byte(i)}, 997)
		if i%50 == 7 {
			p = bytes.Repeat([]byte{byte(i)}, spare)
		}
		before, err := os.ReadFile(path)
		if err != nil && i > 0 {
			t.Fatal(err)
		}
		if err := s.Write(p); err != nil {
			t.Fatal(err)
		}
		if i > 0 && i%50 < 9 {
			// the bytes are there, and the old header
			after, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			torn := path + ".torn"
			if err := os.WriteFile(torn, append(before[:headerSize:headerSize], after[headerSize:]...), 0o600); err != nil {
				t.Fatal(err)
			}
			o, err := Open(torn, capacity)
			if err != nil {
				t.Fatal(err)
			}
			first, length := o.Bounds()
			if got, at := read(t, o, 0); length != int64(len(all)) || at != first || !bytes.Equal(got, all[first:]) {
				t.Fatalf("after write %d: %d bytes from %d of %d are not what was written", i, len(got), at, length)
			}
			if err := o.Close(); err != nil {
				t.Fatal(err)
			}
		}
		all = append(all, p...)
	}
	if got, at := read(t, s, 0); !bytes.Equal(got, all[at:]) || len(got) != capacity {
		t.Errorf("%d bytes from %d", len(got), at)
	}
}

// What comes when a stream was closed already, as of a command whose sandbox is
// being ended, neither takes away what is kept nor opens the file again.
func TestWriteAfterClose(t *testing.T) {
	t.Parallel()
	s, err := Open(filepath.Join(t.TempDir(), "x", "stdout"), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Write([]byte("kept")); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Write([]byte("late")); !errors.Is(err, sandbox.Conflict) {
		t.Errorf("write: %v", err)
	}
	b := make([]byte, 100)
	if n, at, err := s.ReadAt(b, 0); err != nil || at != 0 || string(b[:n]) != "kept" {
		t.Errorf("%q at %d, %v", b[:n], at, err)
	}
	if s.f != nil {
		t.Error("its file is open")
	}
}
