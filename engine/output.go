package engine

import (
	"context"
	"sync"

	"vivarium/sandbox"
	"vivarium/spool"
)

// chunk is how much output is handed on at once.
const chunk = 256 << 10

var chunks = sync.Pool{New: func() any { b := make([]byte, chunk); return &b }}

// follower is one stream that Output reads.
type follower struct {
	stream sandbox.Stream
	spool  *spool.Stream
	off    int64
	reader *spool.Reader // nil if nobody has to wait for it
}

// Output calls fn with the output of an exec from the given offsets: with follow
// until the exec has ended and all was delivered, else with what there is. It
// returns the exec as it then stands.
//
// While somebody follows, a command that writes faster than he reads is slowed
// down rather than its output dropped.
func (e *Engine) Output(ctx context.Context, tenant, ref, id string, from Offsets, follow bool, fn func(Output) error) (sandbox.Exec, error) {
	x, err := e.exec(ctx, tenant, ref, id)
	if err != nil {
		return sandbox.Exec{}, err
	}
	var all []*follower
	for _, f := range []*follower{{stream: sandbox.Stdout, spool: x.stdout, off: from.Stdout}, {stream: sandbox.Stderr, spool: x.stderr, off: from.Stderr}} {
		if f.off < 0 {
			continue
		}
		if follow && x.running() {
			f.reader = f.spool.Follow(f.off)
			defer f.reader.Close()
		}
		all = append(all, f)
	}
	buf := chunks.Get().(*[]byte)
	defer chunks.Put(buf)
	for {
		over := !x.running() // before reading: what is written after is not there
		var changed [2]<-chan struct{}
		for i, f := range all {
			changed[i] = f.spool.Changed()
		}
		moved := false
		for _, f := range all {
			n, at, err := f.spool.ReadAt(*buf, f.off)
			if err != nil {
				return sandbox.Exec{}, err
			}
			if n == 0 {
				continue
			}
			moved = true
			if err := fn(Output{Stream: f.stream, Offset: at, Data: (*buf)[:n], Dropped: at > f.off}); err != nil {
				return sandbox.Exec{}, err
			}
			f.off = at + int64(n)
			if f.reader != nil {
				f.reader.Moved(f.off)
			}
		}
		if moved {
			if err := ctx.Err(); err != nil {
				return sandbox.Exec{}, err
			}
			continue
		}
		if over || !follow {
			return x.record(), nil
		}
		select {
		case <-changed[0]:
		case <-changed[1]:
		case <-x.done:
		case <-x.b.quit:
			return sandbox.Exec{}, sandbox.Unavailable.Errorf("the daemon is stopping")
		case <-ctx.Done():
			return sandbox.Exec{}, ctx.Err()
		}
	}
}
