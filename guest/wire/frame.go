package wire

import (
	"encoding/binary"
	"errors"
	"io"
	"sync"
)

// Type is what a frame is.
type Type uint8

// First frames, from the host: what the connection is for.
const (
	TControl Type = 1 // calls and replies, many at a time
	TStart   Type = 2 // start an exec, or attach where the id is known
	TAttach  Type = 3 // attach to an exec
	TDial    Type = 4 // connect to a port or a socket inside
	TRead    Type = 5 // read a file
	TWrite   Type = 6 // write a file
	TList    Type = 7 // list a directory
	TWatch   Type = 8 // watch a directory
	TTarOut  Type = 9 // pack a path
	TTarIn   Type = 10
)

// Frames of an exec.
const (
	TStdin    Type = 20 // host: offset, eof, bytes
	TAck      Type = 21 // host: stdout and stderr offsets that are safe
	TResize   Type = 22 // host: rows, columns
	TSignal   Type = 23 // host: signal number
	TExitAck  Type = 24 // host: the status is safe, forget the exec
	TStarted  Type = 30 // guest: pid and offsets
	TStdout   Type = 31 // guest: offset, bytes
	TStderr   Type = 32 // guest: offset, bytes
	TExit     Type = 33 // guest: status and final offsets
	TStdinAck Type = 34 // guest: how much of stdin was taken; whether it is closed
	TTaken    Type = 35 // guest: another connection attached to this exec
)

// Frames of everything else.
const (
	TCall   Type = 40 // host: call id, method, payload
	TReply  Type = 41 // guest: call id, payload
	TFail   Type = 42 // guest: call id, kind, message
	TError  Type = 43 // either: kind, message; ends the transfer
	TData   Type = 50 // bytes
	TEnd    Type = 51 // no more bytes in this direction
	TInfo   Type = 52 // one file's information
	TPage   Type = 53 // a page of a listing
	TEvents Type = 54 // changes that a watch saw
	TDone   Type = 55 // guest: the transfer is complete; a result may follow
	TReady  Type = 56 // guest: the connection is as asked
	TCredit Type = 57 // either: bytes of data dealt with so far
	TNudge  Type = 58 // guest: nothing; skipped by Reader.Next, see agent.conn
)

// Sizes, in bytes.
const (
	HeaderSize = 4
	// MaxChunk is the most data in one frame.
	MaxChunk = 256 << 10
	// MaxData is the largest payload of a frame that carries data: the data and
	// what stands before it.
	MaxData = MaxChunk + 64
	// MaxMessage is the largest payload of any frame: only what starts an exec
	// may be so large. See Window for what bounds it.
	MaxMessage = 768 << 10
)

// ErrFrame is returned for bytes that are not the protocol.
var ErrFrame = errors.New("malformed frame")

// PutHeader writes the header of a frame of n payload bytes into b.
func PutHeader(b []byte, t Type, n int) {
	binary.BigEndian.PutUint32(b, uint32(t)<<24|uint32(n))
}

// AppendFrame appends a frame to b whose payload fill appends.
func AppendFrame(b []byte, t Type, fill func([]byte) []byte) []byte {
	at := len(b)
	b = append(b, 0, 0, 0, 0)
	if fill != nil {
		b = fill(b)
	}
	PutHeader(b[at:], t, len(b)-at-HeaderSize)
	return b
}

// Reader cuts a byte stream into frames without copying them.
type Reader struct {
	src  io.Reader
	buf  []byte
	r, w int
	// limit says how long a payload of a type may be; 0 refuses the type.
	limit func(Type) int
}

const readerSize = 4 << 10

// bigBuf holds buffers that fit the largest frame with data.
var bigBuf = sync.Pool{New: func() any { b := make([]byte, MaxData+HeaderSize); return &b }}

// NewReader returns a Reader. limit gives the largest payload allowed per type.
func NewReader(src io.Reader, limit func(Type) int) *Reader {
	return &Reader{src: src, limit: limit, buf: make([]byte, readerSize)}
}

// SetLimit replaces the limits.
func (f *Reader) SetLimit(limit func(Type) int) { f.limit = limit }

// Buffered is how many bytes were read but not yet returned.
func (f *Reader) Buffered() int { return f.w - f.r }

// maxNudges is how many may come in a row.
const maxNudges = 1 << 10

// OnlyNudges says whether b, which begins with a frame, holds nothing else.
func OnlyNudges(b []byte) bool {
	for i, c := range b {
		if i%HeaderSize == 0 && c != byte(TNudge) || i%HeaderSize != 0 && c != 0 {
			return false
		}
	}
	return true
}

// Next returns the next frame. The payload is valid until the next call. At the
// end of the stream between two frames it returns io.EOF, within a frame
// io.ErrUnexpectedEOF, and for a type or length that is not allowed ErrFrame.
func (f *Reader) Next() (Type, []byte, error) {
	var t Type
	var n int
	for nudges := 0; ; nudges++ {
		if f.r == f.w {
			f.r, f.w = 0, 0
			if len(f.buf) > MaxData+HeaderSize {
				f.buf = make([]byte, readerSize) // a large message has passed
			}
		}
		if err := f.fill(HeaderSize); err != nil {
			return 0, nil, err
		}
		h := binary.BigEndian.Uint32(f.buf[f.r:])
		t, n = Type(h>>24), int(h&0xffffff)
		if t != TNudge || n != 0 || nudges == maxNudges {
			break
		}
		f.r += HeaderSize
	}
	if max := f.limit(t); max <= 0 || n > max {
		return 0, nil, ErrFrame
	}
	if err := f.fill(HeaderSize + n); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	p := f.buf[f.r+HeaderSize : f.r+HeaderSize+n : f.r+HeaderSize+n]
	f.r += HeaderSize + n
	return t, p, nil
}

// fill makes at least n bytes available at f.r.
func (f *Reader) fill(n int) error {
	if f.w-f.r >= n {
		return nil
	}
	if len(f.buf)-f.r < n {
		f.room(n)
	}
	for f.w-f.r < n {
		m, err := f.src.Read(f.buf[f.w:])
		f.w += m
		if m < 0 || f.w > len(f.buf) {
			return ErrFrame
		}
		if err != nil && f.w-f.r < n {
			if err == io.EOF && f.w != f.r {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
	}
	return nil
}

func (f *Reader) room(n int) {
	b := f.buf
	switch {
	case n <= len(f.buf):
	case n <= readerSize:
		b = make([]byte, readerSize)
	case n <= MaxData+HeaderSize:
		b = *bigBuf.Get().(*[]byte)
	default:
		b = make([]byte, n)
	}
	f.w = copy(b, f.buf[f.r:f.w])
	f.r = 0
	if &b[0] != &f.buf[0] {
		f.release()
		f.buf = b
	}
}

// Idle gives a large buffer back where nothing is left in it. The last payload
// returned is no longer valid.
func (f *Reader) Idle() {
	if f.r == f.w && len(f.buf) != readerSize {
		f.release()
		f.buf, f.r, f.w = make([]byte, readerSize), 0, 0
	}
}

// Release gives the buffer back. The Reader must not be used again.
func (f *Reader) Release() {
	f.release()
	f.buf, f.r, f.w = nil, 0, 0
}

func (f *Reader) release() {
	if len(f.buf) == MaxData+HeaderSize {
		b := f.buf
		bigBuf.Put(&b)
	}
}

// GuestLimit is what a host may send.
func GuestLimit(t Type) int {
	switch t {
	case TStart:
		return MaxMessage
	case TControl, TAttach, TDial, TRead, TWrite, TList, TWatch, TTarOut, TTarIn, TCall:
		return 64 << 10
	case TStdin, TData:
		return MaxData
	case TAck, TResize, TSignal, TExitAck, TEnd, TCredit:
		return 64
	case TError:
		return 8 << 10
	}
	return 0
}

// HostLimit is what a guest may send.
func HostLimit(t Type) int {
	switch t {
	case TStdout, TStderr, TData, TPage, TEvents:
		return MaxData
	case TReply:
		return MaxData
	case TStarted, TExit, TFail, TError, TInfo, TDone:
		return 16 << 10
	case TStdinAck, TTaken, TEnd, TReady, TCredit:
		return 64
	}
	return 0
}
