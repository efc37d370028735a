package image

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"
)

func TestReadAhead(t *testing.T) {
	t.Parallel()
	data := make([]byte, 3*aheadSize+17)
	for i := range data {
		data[i] = byte(i >> 3)
	}
	boom := errors.New("boom")
	for name, r := range map[string]func(io.Reader) io.Reader{
		"plain":           func(r io.Reader) io.Reader { return r },
		"data with error": iotest.DataErrReader,
		"half":            iotest.HalfReader,
	} {
		a := newReadAhead(r(bytes.NewReader(data)), func() {})
		got, err := io.ReadAll(a)
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
		a.Close()
		a = newReadAhead(r(io.MultiReader(bytes.NewReader(data), iotest.ErrReader(boom))), func() {})
		got, err = io.ReadAll(a)
		if err != boom || !bytes.Equal(got, data) {
			t.Errorf("%s, with an error: %d bytes, %v", name, len(got), err)
		}
		a.Close()
	}
	// Closed while the source blocks: that does not wait, and the source is let
	// go of once it moves.
	pr, pw := io.Pipe()
	gone := make(chan struct{})
	a := newReadAhead(io.MultiReader(bytes.NewReader(data), pr), func() { close(gone) })
	if _, err := io.ReadFull(a, make([]byte, 10)); err != nil {
		t.Error(err)
	}
	a.Close()
	a.Close()
	pw.Close()
	<-gone
}
