// Package spool keeps the output of execs on the host: bounded, readable again
// from any offset that is still held, also after the daemon was killed and after
// the sandbox ended.
//
// A stream is one file: a header of one block, then a ring of at most Cap bytes
// and some spare. The byte at offset o of the stream is at o modulo the ring's
// size. The header holds the length of the stream and is written after the bytes
// it counts, which go into the spare and not over bytes that still count: so
// what a killed daemon left behind is at worst short, and the guest, which has
// kept what was not acknowledged, sends the rest again.
package spool

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

const (
	headerSize = 4096
	magic      = 0x76697673706c3032 // "vivspl02"
	// spare is how much is written before the header is.
	spare = 256 << 10
)

// Stream is one output. Write is called by one goroutine; reads are concurrent.
type Stream struct {
	path string
	cap  int64

	mu      sync.Mutex
	f       *os.File // nil until there is something to write
	closed  bool     // guarded by mu
	len     int64    // guarded by mu
	changed chan struct{}
	readers map[*Reader]struct{}
}

// Open opens the stream at path, or prepares a new one that makes its file when
// it is first written to. cap is the capacity in bytes of a new one.
func Open(path string, cap int64) (*Stream, error) {
	s := &Stream{path: path, cap: cap, changed: make(chan struct{}), readers: map[*Reader]struct{}{}}
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, sandbox.Internal.Errorf("open spool: %w", err)
	}
	var h [24]byte
	if _, err := f.ReadAt(h[:], 0); err != nil || binary.LittleEndian.Uint64(h[:]) != magic {
		f.Close() // killed between making the file and its header: it holds nothing
		return s, nil
	}
	s.f, s.cap, s.len = f, int64(binary.LittleEndian.Uint64(h[8:])), int64(binary.LittleEndian.Uint64(h[16:]))
	if s.cap <= 0 || s.len < 0 {
		f.Close()
		return nil, sandbox.Internal.Errorf("spool %s has a wrong header", path)
	}
	return s, nil
}

func (s *Stream) header() error {
	var h [24]byte
	binary.LittleEndian.PutUint64(h[:], magic)
	binary.LittleEndian.PutUint64(h[8:], uint64(s.cap))
	binary.LittleEndian.PutUint64(h[16:], uint64(s.len))
	_, err := s.f.WriteAt(h[:], 0)
	return err
}

// Write appends p, dropping the oldest bytes beyond the capacity. Conflict after
// Close.
func (s *Stream) Write(p []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(p) == 0 {
		return nil
	}
	if s.closed { // making its file anew would take away what it holds
		return sandbox.Conflict.Errorf("write spool: it is closed")
	}
	if s.f == nil {
		if err := os.MkdirAll(filepath.Dir(s.path), 0o700); err != nil {
			return kinded("make spool", err)
		}
		f, err := os.OpenFile(s.path, os.O_RDWR|os.O_CREATE|os.O_TRUNC|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return kinded("make spool", err)
		}
		s.f = f
	}
	for len(p) > 0 {
		part := p[:min(len(p), spare)]
		p = p[len(part):]
		off := s.len
		for len(part) > 0 {
			at := off % s.ring()
			n := min(int64(len(part)), s.ring()-at)
			if _, err := s.f.WriteAt(part[:n], headerSize+at); err != nil {
				return kinded("write spool", err)
			}
			part, off = part[n:], off+n
		}
		s.len = off
		if err := s.header(); err != nil {
			return kinded("write spool", err)
		}
	}
	s.wake()
	return nil
}

// ring is the size of the ring in bytes.
func (s *Stream) ring() int64 { return s.cap + spare }

// wake lets everybody who waits look again. The caller holds mu.
func (s *Stream) wake() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Bounds are the lowest offset that can still be read, and the length.
func (s *Stream) Bounds() (first, length int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return max(0, s.len-s.cap), s.len
}

// Lag is how far the slowest reader that follows is behind, and a channel that
// is closed when that, or the length, changes. 0 without readers.
func (s *Stream) Lag() (lag int64, readers int, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for r := range s.readers {
		lag = max(lag, s.len-r.off)
	}
	return lag, len(s.readers), s.changed
}

// Cap is the capacity in bytes.
func (s *Stream) Cap() int64 { return s.cap }

// Changed is closed when there is more to read, or Close was called.
func (s *Stream) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// ReadAt copies what is held from offset off on. It returns the offset of the
// first byte copied: greater than off if what was there is gone. n is 0 at the
// end.
func (s *Stream) ReadAt(p []byte, off int64) (n int, at int64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at = max(off, s.len-s.cap, 0)
	if at >= s.len {
		return 0, at, nil
	}
	f := s.f
	if f == nil { // closed, with what it held still there
		if f, err = os.OpenFile(s.path, os.O_RDONLY|unix.O_NOFOLLOW, 0); err != nil {
			return 0, at, kinded("open spool", err)
		}
		defer f.Close()
	}
	pos := at % s.ring()
	want := min(int64(len(p)), s.len-at, s.ring()-pos)
	n, err = f.ReadAt(p[:want], headerSize+pos)
	if err != nil {
		return 0, at, kinded("read spool", err)
	}
	return n, at, nil
}

// Close closes the file, and nothing is written to it any more. Reads open it for
// themselves.
func (s *Stream) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wake()
	s.closed = true
	if s.f == nil {
		return nil
	}
	err := s.f.Close()
	s.f = nil
	if err != nil {
		return kinded("close spool", err)
	}
	return nil
}

// Reader follows a stream; while it does, the writer can see how far it is.
type Reader struct {
	s   *Stream
	off int64 // guarded by s.mu
}

// Follow registers a reader at an offset.
func (s *Stream) Follow(off int64) *Reader {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := &Reader{s: s, off: max(off, s.len-s.cap, 0)}
	s.readers[r] = struct{}{}
	return r
}

// Moved says that everything before off was delivered.
func (r *Reader) Moved(off int64) {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	r.off = off
	r.s.wake()
}

// Close removes the reader.
func (r *Reader) Close() {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	delete(r.s.readers, r)
	r.s.wake()
}

func kinded(what string, err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return sandbox.Exhausted.Errorf("%s: %w", what, err).WithHint("free disk space below the data directory")
	}
	return sandbox.Internal.Errorf("%s: %w", what, err)
}
