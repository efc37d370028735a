package wire

import (
	"encoding/binary"
	"math"
)

// AppendUint appends an unsigned integer.
func AppendUint(b []byte, v uint64) []byte { return binary.AppendUvarint(b, v) }

// AppendInt appends an integer that must not be negative; a negative one
// becomes 0.
func AppendInt(b []byte, v int64) []byte { return binary.AppendUvarint(b, uint64(max(v, 0))) }

// AppendSigned appends an integer of either sign.
func AppendSigned(b []byte, v int64) []byte { return binary.AppendVarint(b, v) }

// AppendString appends a string with its length.
func AppendString[S ~string | ~[]byte](b []byte, s S) []byte {
	b = binary.AppendUvarint(b, uint64(len(s)))
	return append(b, s...)
}

// AppendBool appends a truth value as one byte.
func AppendBool(b []byte, v bool) []byte {
	if v {
		return append(b, 1)
	}
	return append(b, 0)
}

// AppendStrings appends a list of strings with its length.
func AppendStrings(b []byte, v []string) []byte {
	b = binary.AppendUvarint(b, uint64(len(v)))
	for _, s := range v {
		b = AppendString(b, s)
	}
	return b
}

// Dec takes a payload apart. The first mistake sticks: later calls return
// zero values, and End returns ErrFrame.
type Dec struct {
	b   []byte
	bad bool
}

// NewDec returns a Dec over b, which it does not copy.
func NewDec(b []byte) *Dec { return &Dec{b: b} }

func (d *Dec) fail() { d.b, d.bad = nil, true }

// Bad says whether a mistake was found so far.
func (d *Dec) Bad() bool { return d.bad }

// More says whether bytes are left and no mistake was found.
func (d *Dec) More() bool { return !d.bad && len(d.b) > 0 }

// Uint takes an unsigned integer of at most max.
func (d *Dec) Uint(max uint64) uint64 {
	v, n := binary.Uvarint(d.b)
	if n <= 0 || v > max {
		d.fail()
		return 0
	}
	d.b = d.b[n:]
	return v
}

// Int takes an integer from 0 to the largest int64.
func (d *Dec) Int() int64 { return int64(d.Uint(math.MaxInt64)) }

// Signed takes an integer of either sign.
func (d *Dec) Signed() int64 {
	v, n := binary.Varint(d.b)
	if n <= 0 {
		d.fail()
		return 0
	}
	d.b = d.b[n:]
	return v
}

// Bool takes a truth value.
func (d *Dec) Bool() bool {
	if len(d.b) == 0 || d.b[0] > 1 {
		d.fail()
		return false
	}
	v := d.b[0] == 1
	d.b = d.b[1:]
	return v
}

// Bytes takes a byte string of at most max bytes, without copying it.
func (d *Dec) Bytes(max int) []byte {
	n := d.Uint(uint64(max))
	if d.bad || n > uint64(len(d.b)) {
		d.fail()
		return nil
	}
	v := d.b[:n:n]
	d.b = d.b[n:]
	return v
}

// String takes a string of at most max bytes.
func (d *Dec) String(max int) string { return string(d.Bytes(max)) }

// Count takes the length of a list of at most max entries that take at least
// size bytes each, so that a short message cannot ask for a large allocation.
func (d *Dec) Count(max, size int) int {
	n := d.Uint(uint64(max))
	if d.bad || n*uint64(size) > uint64(len(d.b)) {
		d.fail()
		return 0
	}
	return int(n)
}

// Strings takes a list of at most max strings of at most each bytes.
func (d *Dec) Strings(max, each int) []string {
	n := d.Count(max, 1)
	if n == 0 {
		return nil
	}
	v := make([]string, 0, n)
	for range n {
		v = append(v, d.String(each))
		if d.bad {
			return nil
		}
	}
	return v
}

// Rest takes everything that is left, without copying it.
func (d *Dec) Rest() []byte {
	v := d.b
	d.b = nil
	return v
}

// End returns ErrFrame if there was a mistake or bytes are left.
func (d *Dec) End() error {
	if d.bad || len(d.b) > 0 {
		return ErrFrame
	}
	return nil
}
