package engine

import (
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

const (
	// diskEvery is how often the host's free space is looked at. What a sandbox
	// can write in that time may be taken from the reserve.
	diskEvery = time.Second
	// diskWorth is what a sandbox must have written for its end to be worth it:
	// else it is the host's own doing.
	diskWorth = 64 << 20
)

// freeDisk is what is free below the data directory, in bytes.
func (e *Engine) freeDisk() (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(e.opts.Dir, &st); err != nil {
		return 0, sandbox.Internal.Errorf("look at free disk space: %w", err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// guardDisk keeps the reserve free (A5): the limits of all sandboxes together may
// be more than the disk has, so when they come to use it the one that wrote most
// has to end, as one does that uses more memory than there is.
func (e *Engine) guardDisk() {
	if e.opts.Limits.ReserveDisk == 0 {
		return
	}
	t := time.NewTicker(diskEvery)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-e.ctx.Done():
			return
		}
		free, err := e.freeDisk()
		if err != nil {
			e.log.Error("guard the disk", "err", err)
			continue
		}
		if free >= e.opts.Limits.ReserveDisk {
			continue
		}
		b, wrote := e.biggestWriter()
		if b == nil {
			continue
		}
		e.log.Warn("the disk is full: ending the sandbox that wrote most", "sandbox", b.id, "wrote", wrote, "free", free, "reserve", e.opts.Limits.ReserveDisk)
		b.end(ending{reason: sandbox.ReasonDisk, message: "the node ran out of disk space, and this sandbox had written most"})
		select {
		case <-b.gone: // its blocks are free
		case <-time.After(stopLimit):
		case <-e.ctx.Done():
			return
		}
	}
}

// biggestWriter is the sandbox with the most bytes on disk, nil if none has much.
func (e *Engine) biggestWriter() (most *box, wrote int64) {
	e.mu.Lock()
	boxes := slices.Collect(maps.Values(e.boxes))
	e.mu.Unlock()
	for _, b := range boxes {
		b.mu.Lock()
		m, over := b.machine, b.ending != nil
		b.mu.Unlock()
		if m == nil || over {
			continue
		}
		if u, err := m.Usage(); err == nil && u.Disk >= diskWorth && u.Disk > wrote {
			most, wrote = b, u.Disk
		}
	}
	return most, wrote
}
