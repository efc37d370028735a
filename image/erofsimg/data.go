package erofsimg

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
)

// BlockSize is the size of a block in bytes, the page size of every machine
// that gVisor runs on.
const BlockSize = 4096

// maxBlocks bounds an image: block addresses have 32 bits, and the topmost
// means none.
const maxBlocks = 1<<32 - 2

// ErrTooLarge says that an image would need more blocks than EROFS can
// address (16 TiB), or a directory or file more than the format can hold.
var ErrTooLarge = errors.New("larger than the EROFS format allows")

// Options says how an image is written.
type Options struct {
	// Xattrs stores extended attributes in the image. gVisor refuses inodes
	// that have any.
	Xattrs bool
	// BuildTime goes into the superblock, in seconds since 1970. Zero keeps
	// the image reproducible.
	BuildTime int64
	// UUID goes into the superblock.
	UUID [16]byte
}

// Writer writes one image into a file. It is not safe for concurrent use.
type Writer struct {
	f    *os.File
	opt  Options
	next uint32 // first free block
	buf  []byte
}

// NewWriter returns a Writer that fills f, which is empty and opened for
// writing. The caller keeps f: it syncs and closes it after Finish.
func NewWriter(f *os.File, opt Options) *Writer {
	return &Writer{f: f, opt: opt, next: 1, buf: make([]byte, 256<<10)}
}

// Blocks returns how many blocks were handed out so far.
func (w *Writer) Blocks() int64 { return int64(w.next) }

var zeros [BlockSize]byte

// Data copies exactly size bytes from r into the image and returns where they
// are. Blocks of zeros become holes in the image file. A source that ends
// early gives io.ErrUnexpectedEOF; what was written is then dead space.
func (w *Writer) Data(r io.Reader, size int64) (Extent, error) {
	if size < 0 {
		return Extent{}, fmt.Errorf("negative size %d", size)
	}
	if size == 0 {
		return Extent{}, nil
	}
	blocks := (size-1)/BlockSize + 1
	if int64(w.next)+blocks > maxBlocks {
		return Extent{}, ErrTooLarge
	}
	e := Extent{Block: w.next, Size: size}
	off := int64(w.next) * BlockSize
	w.next += uint32(blocks)
	for left := size; left > 0; {
		b := w.buf[:min(int64(len(w.buf)), left)]
		if _, err := io.ReadFull(r, b); err != nil {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return Extent{}, err
		}
		if err := w.writeSparse(b, off); err != nil {
			return Extent{}, err
		}
		off += int64(len(b))
		left -= int64(len(b))
	}
	return e, nil
}

// writeSparse writes b at off, a multiple of BlockSize, leaving blocks of
// zeros as holes.
func (w *Writer) writeSparse(b []byte, off int64) error {
	for len(b) > 0 {
		n := zeroRun(b)
		b, off = b[n:], off+int64(n)
		if n = dataRun(b); n == 0 {
			continue
		}
		if _, err := w.f.WriteAt(b[:n], off); err != nil {
			return err
		}
		b, off = b[n:], off+int64(n)
	}
	return nil
}

// zeroRun returns how many bytes at the start of b are whole blocks of zeros
// (the last may be short).
func zeroRun(b []byte) int {
	n := 0
	for n < len(b) {
		m := min(BlockSize, len(b)-n)
		if !bytes.Equal(b[n:n+m], zeros[:m]) {
			break
		}
		n += m
	}
	return n
}

// dataRun is the opposite of zeroRun.
func dataRun(b []byte) int {
	n := 0
	for n < len(b) {
		m := min(BlockSize, len(b)-n)
		if bytes.Equal(b[n:n+m], zeros[:m]) {
			break
		}
		n += m
	}
	return n
}
