package image

import (
	"io"
	"sync"
)

const (
	aheadBuffers = 4
	aheadSize    = 256 << 10 // bytes
)

// readAhead reads r in a goroutine of its own, a few buffers ahead, so that
// decompressing and hashing run beside merging and writing. Close stops it, but
// does not wait for a read of r that is under way, which may block for as long
// as whoever sends pleases.
type readAhead struct {
	full chan chunk
	free chan []byte
	stop chan struct{}
	once sync.Once
	cur  chunk
	off  int
}

// chunk is a filled buffer and the error that came after it.
type chunk struct {
	buf []byte
	err error
}

// newReadAhead starts reading r. done is called when r is not read any more.
func newReadAhead(r io.Reader, done func()) *readAhead {
	a := &readAhead{full: make(chan chunk, aheadBuffers), free: make(chan []byte, aheadBuffers), stop: make(chan struct{})}
	for range aheadBuffers {
		a.free <- make([]byte, aheadSize)
	}
	go func() {
		defer done()
		a.run(r)
	}()
	return a
}

func (a *readAhead) run(r io.Reader) {
	defer close(a.full)
	for {
		var buf []byte
		select {
		case buf = <-a.free:
		case <-a.stop:
			return
		}
		n, err := 0, error(nil)
		for n < aheadSize && err == nil { // not io.ReadFull, which changes errors
			var m int
			m, err = r.Read(buf[n:aheadSize])
			n += m
		}
		a.full <- chunk{buf[:n], err} // has room for every buffer
		if err != nil {
			return
		}
	}
}

// Read implements io.Reader.
func (a *readAhead) Read(p []byte) (int, error) {
	for a.off == len(a.cur.buf) {
		if a.cur.err != nil {
			return 0, a.cur.err
		}
		if a.cur.buf != nil {
			a.free <- a.cur.buf[:cap(a.cur.buf)]
		}
		c, ok := <-a.full
		if !ok {
			return 0, io.ErrClosedPipe
		}
		a.cur, a.off = c, 0
	}
	n := copy(p, a.cur.buf[a.off:])
	a.off += n
	return n, nil
}

// Close implements io.Closer.
func (a *readAhead) Close() error {
	a.once.Do(func() { close(a.stop) })
	return nil
}
