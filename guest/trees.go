package guest

import (
	"context"
	"io"
	"time"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// TarReader reads an archive that the guest makes. Its owner must close it.
type TarReader struct{ *transfer }

// TarOut packs path and all below it as a POSIX tar archive: directories,
// files with holes, symbolic and hard links, FIFOs, devices, extended
// attributes; sockets are left out. Names start with prefix, by default the
// last element of path; with "." only what is below path is in it. With follow
// a symbolic link at path itself is followed. ctx counts until the reader is
// closed. The archive is as long as the sandbox likes: the reader has to bound
// it.
func (c *Client) TarOut(ctx context.Context, user, path, prefix string, follow bool) (*TarReader, error) {
	fill, err := pathOp(user, path, prefix, follow, 0)
	if err != nil {
		return nil, err
	}
	h, t, p, err := c.request(ctx, wire.TTarOut, fill)
	if err != nil {
		return nil, err
	}
	if t == wire.TError {
		return nil, c.answered(h, p)
	}
	r := &TarReader{c.transfer(ctx, h)}
	if t != wire.TData || len(p) == 0 {
		r.finish(false)
		return nil, broken("frame of type %d for an archive", t)
	}
	r.rest = p
	r.got = int64(len(p))
	return r, nil
}

// TarOptions say how an archive is extracted.
type TarOptions struct {
	Parents bool // make the destination where it is missing
	Owners  bool // give files the numeric owners in the archive, else the user's
	// Limits; 0 is a million entries, and no limit of bytes but the disk.
	MaxEntries, MaxBytes int64
}

// TarResult is what was extracted.
type TarResult struct{ Entries, Bytes int64 }

// TarIn extracts an uncompressed tar archive below dest and nowhere else:
// absolute names become relative, names with ".." and those that lead through a
// symbolic link of the same archive are refused (Invalid), links that were
// there before are followed as if dest were the root. What was extracted before
// a refusal stays.
func (c *Client) TarIn(ctx context.Context, user, dest string, r io.Reader, o TarOptions) (TarResult, error) {
	if err := checkPath(user, dest); err != nil {
		return TarResult{}, err
	}
	if o.MaxEntries <= 0 {
		o.MaxEntries = 1_000_000
	}
	t := wire.TarIn{User: user, Path: dest, Parents: o.Parents, Owners: o.Owners, MaxEntries: o.MaxEntries, MaxBytes: o.MaxBytes}
	d, err := c.upload(ctx, wire.TTarIn, t.Append, r)
	return TarResult{d.Entries, d.Bytes}, err
}

// Watcher tells of changes.
type Watcher struct{ t *transfer }

// Watch watches a directory or file, with recursive also what is below it.
// Paths in events are relative to it; "" is the directory itself. ctx counts
// until the watcher is closed.
func (c *Client) Watch(ctx context.Context, user, path string, recursive bool) (*Watcher, error) {
	fill, err := pathOp(user, path, "", recursive, 0)
	if err != nil {
		return nil, err
	}
	h, t, p, err := c.request(ctx, wire.TWatch, fill)
	if err != nil {
		return nil, err
	}
	switch t {
	case wire.TError:
		return nil, c.answered(h, p)
	case wire.TReady:
		h.c.SetReadDeadline(time.Time{})
		return &Watcher{c.transfer(ctx, h)}, nil
	}
	c.discard(h)
	return nil, broken("frame of type %d for a watch", t)
}

// Next waits for changes. After an event FileOverflow some were lost. When the
// directory itself is removed, io.EOF follows.
func (w *Watcher) Next() ([]sandbox.FileEvent, error) {
	t := w.t
	if t.err != nil {
		return nil, t.err
	}
	ty, p, err := t.h.r.Next()
	if err == nil && ty == wire.TEvents {
		var l []sandbox.FileEvent
		if l, err = wire.DecodeEvents(p); err == nil {
			return l, nil
		}
	}
	switch {
	case err != nil:
		t.err = t.c.failure(ctxError(t.ctx, err))
	case ty == wire.TDone:
		t.err = io.EOF
	default:
		t.err = broken("frame of type %d in a watch", ty)
	}
	t.finish(false)
	return nil, t.err
}

// Close ends the watch, and a Next that waits.
func (w *Watcher) Close() error {
	w.t.finish(false)
	return nil
}
