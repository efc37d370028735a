package agent

import "sync/atomic"

const (
	ringMin = 4 << 10
	ringMax = 1 << 20
	// ringTotal bounds all rings of a sandbox. When it is used up, rings stay as
	// small as they are: commands go on, slower.
	ringTotal = 64 << 20
)

var ringUsed atomic.Int64

// ring is output that the host has not acknowledged yet: the bytes at stream
// offsets [base, end). Its caller holds the lock of the exec.
type ring struct {
	buf       []byte // its length is a power of two
	base, end int64
}

// space returns a contiguous piece of free room at end, growing the ring where
// it is full; empty means that there is none.
func (r *ring) space() []byte {
	used := int(r.end - r.base)
	if used == len(r.buf) && !r.grow() {
		return nil
	}
	at := int(r.end & int64(len(r.buf)-1))
	return r.buf[at:min(len(r.buf), at+len(r.buf)-used)]
}

// widen grows the ring as far as it may: a fast stream is read in large pieces,
// and what is acknowledged as fast as it comes would never fill a small one.
func (r *ring) widen() {
	for r.grow() {
	}
}

func (r *ring) grow() bool {
	size := max(ringMin, 4*len(r.buf))
	size = min(size, ringMax)
	if size == len(r.buf) {
		return false
	}
	if ringUsed.Add(int64(size-len(r.buf))) > ringTotal && len(r.buf) > 0 {
		ringUsed.Add(-int64(size - len(r.buf)))
		return false
	}
	nb := make([]byte, size)
	for o := r.base; o < r.end; {
		p := r.at(o)
		if max := r.end - o; int64(len(p)) > max {
			p = p[:max]
		}
		// Places in the new ring are contiguous at least as far as in the old.
		o += int64(copy(nb[o&int64(size-1):], p))
	}
	r.buf = nb
	return true
}

// at returns the contiguous bytes from offset o to the end of the ring's memory
// or of its data.
func (r *ring) at(o int64) []byte {
	i := int(o & int64(len(r.buf)-1))
	return r.buf[i:min(len(r.buf), i+int(r.end-o))]
}

// ack drops what is before o.
func (r *ring) ack(o int64) {
	if o > r.base {
		r.base = min(o, r.end)
	}
}

// free gives the memory back. What is held is lost.
func (r *ring) free() {
	ringUsed.Add(-int64(len(r.buf)))
	r.buf = nil
	r.base = r.end
}
