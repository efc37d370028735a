package packagecache

import (
	"compress/gzip"
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
)

// stage of a flight.
type stage int

const (
	waiting   stage = iota // nothing to tell yet
	streaming              // its bytes can be read as they arrive
	whole                  // all of it is there, checked
	kept                   // what is kept is what to serve
	failed
)

// flight is one object on its way from upstream, however many wait for it.
type flight struct {
	c      *Cache
	s      *shelf
	o      *object
	cancel context.CancelFunc

	users   int  // guarded by Cache.mu
	counted bool // its miss was; guarded by Cache.mu

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at each change
	stage   stage
	meta    *meta // type, encoding and date from streaming on; all of it when whole or kept
	total   int64 // -1: not known
	ready   int64 // bytes that may be read
	err     *failure
	how     string // for statistics and the answer's header

	f      *os.File
	placed bool           // f's name is no longer the flight's
	files  sync.WaitGroup // readers of f
}

// look is what a reader sees of a flight.
type look struct {
	stage   stage
	meta    *meta
	total   int64
	ready   int64
	err     *failure
	how     string
	changed <-chan struct{}
}

func (fl *flight) look() look {
	fl.mu.Lock()
	defer fl.mu.Unlock()
	return look{fl.stage, fl.meta, fl.total, fl.ready, fl.err, fl.how, fl.changed}
}

func (fl *flight) change(fn func()) {
	fl.mu.Lock()
	defer fl.mu.Unlock()
	fn()
	close(fl.changed)
	fl.changed = make(chan struct{})
}

// wait blocks until ok holds or ctx ends.
func (fl *flight) wait(ctx context.Context, ok func(look) bool) (look, error) {
	for {
		l := fl.look()
		if ok(l) {
			return l, nil
		}
		select {
		case <-l.changed:
		case <-ctx.Done():
			return l, ctx.Err()
		}
	}
}

// join returns the flight of an object, started if there is none. The caller
// leaves it in the end.
func (c *Cache) join(s *shelf, o *object) (*flight, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, fail(http.StatusServiceUnavailable, "the cache is closing")
	}
	fl := s.flights[o.key]
	if fl == nil {
		if len(s.flights) >= maxFlights {
			return nil, fail(http.StatusServiceUnavailable, "too many downloads at once")
		}
		ctx, cancel := context.WithCancel(c.ctx)
		fl = &flight{c: c, s: s, o: o, cancel: cancel, changed: make(chan struct{}), total: -1, how: "miss"}
		s.flights[o.key] = fl
		c.running.Add(1)
		go func() {
			defer c.running.Done()
			defer cancel()
			fl.run(ctx)
		}()
	}
	fl.users++
	fl.files.Add(1)
	return fl, nil
}

const maxFlights = 4096

// leave ends a reader's part. A download that nobody waits for any more ends.
func (fl *flight) leave() {
	fl.files.Done()
	fl.c.mu.Lock()
	defer fl.c.mu.Unlock()
	if fl.users--; fl.users == 0 && fl.s.flights[fl.o.key] == fl {
		if l := fl.look(); l.stage < whole {
			delete(fl.s.flights, fl.o.key) // whoever comes now starts anew
			fl.cancel()
		}
	}
}

func (fl *flight) run(ctx context.Context) {
	err := fl.fetch(ctx)
	if err != nil {
		var f *failure
		if !errors.As(err, &f) {
			f = fail(http.StatusBadGateway, "fetch: %v", err)
		}
		if f.status >= 500 && ctx.Err() == nil {
			fl.c.count(fl.o.up.kind, func(n *Counts) { n.Errors++ })
			fl.c.cfg.Log.Warn("package cache: fetch", "kind", fl.o.up.kind, "upstream", fl.o.up.name, "path", fl.o.url.Path, "error", f.msg)
		}
		fl.change(func() {
			if fl.stage < whole { // else readers have all of it; it is only not kept
				fl.stage, fl.err = failed, f
			}
		})
	}
	fl.c.mu.Lock()
	if fl.s.flights[fl.o.key] == fl {
		delete(fl.s.flights, fl.o.key)
	}
	fl.c.mu.Unlock()
	if fl.f != nil {
		fl.files.Wait()
		if !fl.placed {
			_ = os.Remove(fl.f.Name())
		}
		_ = fl.f.Close()
	}
}

// fetch asks upstream and keeps what it sends.
func (fl *flight) fetch(ctx context.Context) error {
	select {
	case fl.s.slots <- struct{}{}:
		defer func() { <-fl.s.slots }()
	case <-ctx.Done():
		return ctx.Err()
	}
	o := fl.o
	have := fl.s.peek(o.key)
	if have != nil && have.URL != o.url.String() { // from another upstream of a chain, or another address
		have = nil
	}
	for {
		err := fl.ask(ctx, o, have)
		var f *failure
		if err == nil {
			return nil
		}
		if errors.As(err, &f) && (f.status == http.StatusNotFound || f.status == http.StatusGone) {
			if o.next != nil {
				o, have = o.next, nil
				continue
			}
			fl.s.missing(fl.o.key, f.status, fl.c.cfg.NegativeTTL)
			if have != nil {
				fl.s.drop(have)
			}
			return err
		}
		// Upstream does not answer: what it said last is better than nothing.
		if old := fl.s.peek(fl.o.key); old != nil && ctx.Err() == nil && fl.look().stage == waiting && (f == nil || f.status >= 500) &&
			fl.c.cfg.StaleFor > 0 && time.Since(old.Fetched) < fl.c.cfg.StaleFor {
			fl.change(func() { fl.stage, fl.meta, fl.how = kept, old, "stale" })
			return nil
		}
		return err
	}
}

// ask makes one request to one upstream, and goes on from where it broke off.
func (fl *flight) ask(ctx context.Context, o *object, have *meta) error {
	c := fl.c
	h := http.Header{"Accept-Encoding": {"identity"}}
	if o.accept != "" {
		h.Set("Accept", o.accept)
	}
	if o.rewrite != nil {
		h.Set("Accept-Encoding", "gzip")
	}
	if have != nil {
		if have.ETag != "" {
			h.Set("If-None-Match", have.ETag)
		} else if have.Modified != "" {
			h.Set("If-Modified-Since", have.Modified)
		}
	}
	resp, err := c.open(ctx, o, h)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	switch {
	case resp.StatusCode == http.StatusNotModified && have != nil:
		m := *have
		m.Fetched = time.Now()
		if err := fl.s.update(&m); err != nil {
			return err
		}
		fl.change(func() { fl.stage, fl.meta, fl.how = kept, &m, "revalidated" })
		return nil
	case resp.StatusCode != http.StatusOK:
		return statusFailure(resp)
	}
	m := &meta{Key: fl.o.key, URL: o.url.String(), Fetched: time.Now(),
		Type: plainHeader(resp.Header, "Content-Type"), Encoding: plainHeader(resp.Header, "Content-Encoding"),
		Modified: plainHeader(resp.Header, "Last-Modified"), ETag: plainHeader(resp.Header, "ETag")}
	if _, err := http.ParseTime(m.Modified); err != nil {
		m.Modified = ""
	}
	if strings.EqualFold(m.Encoding, "identity") {
		m.Encoding = ""
	}
	limit := min(o.max, c.cfg.MaxObject)
	if resp.ContentLength > limit {
		return fail(http.StatusBadGateway, "upstream sends %d bytes, more than %d", resp.ContentLength, limit)
	}
	fl.f, err = fl.s.temp()
	if err != nil {
		return fail(http.StatusInternalServerError, "make file: %v", err)
	}
	d := &download{fl: fl, o: o, m: m, resp: resp, limit: limit, hs: newHashes(o)}
	defer func() { fl.s.reserve(-d.reserved) }()
	if o.rewrite != nil {
		err = d.rewritten(ctx)
	} else {
		err = d.streamed(ctx)
	}
	if err != nil {
		return err
	}
	m.Sum, m.Size = d.hs.sum("sha256"), d.n
	for _, a := range o.digests {
		if m.Digests == nil {
			m.Digests = map[string]string{}
		}
		m.Digests[a] = d.hs.sum(a)
	}
	if o.want.algo != "" {
		if got := d.hs.sum(o.want.algo); got != o.want.hex {
			if o.lied != nil {
				o.lied()
			}
			return fail(http.StatusBadGateway, "upstream sent something else: %s is %s, not %s", o.want.algo, got, o.want.hex)
		}
		m.Verified = o.want.algo
	}
	if o.check != nil {
		v, err := o.check(fl.f, m.Size)
		if err != nil {
			return fail(http.StatusBadGateway, "upstream sent something else: %v", err)
		}
		if v != "" {
			m.Verified = v
		}
	}
	keep := *m
	keep.Digests = maps.Clone(m.Digests)
	arrived := func() {
		fl.change(func() { fl.stage, fl.meta, fl.total, fl.ready = whole, m, m.Size, m.Size })
	}
	// An index is kept before anybody has it: what is asked for next is held to
	// it. Other things need not wait for the disk.
	index := o.rewrite != nil || o.ttl != forever
	if !index {
		arrived()
	}
	fl.s.reserve(-d.reserved)
	d.reserved = 0
	if err := fl.s.keep(fl.f, &keep); err != nil {
		return fail(http.StatusInternalServerError, "keep: %v", err)
	}
	fl.placed = true
	if index {
		arrived()
	}
	if o.kept != nil {
		o.kept(&keep)
	}
	return nil
}

// download is the body of one answer.
type download struct {
	fl       *flight
	o        *object
	m        *meta
	resp     *http.Response
	limit    int64
	hs       hashes
	n        int64 // bytes in the file
	reserved int64
}

// write appends to the file. Room for it is taken by the mebibyte.
func (d *download) write(p []byte) error {
	if d.n+int64(len(p)) > d.limit {
		return fail(http.StatusBadGateway, "upstream sends more than %d bytes", d.limit)
	}
	if d.n+int64(len(p)) > d.reserved {
		more := max(int64(len(p)), 1<<20)
		if !d.fl.s.reserve(more) {
			return fail(http.StatusServiceUnavailable, "no room: the cache's disk budget is in use by other downloads")
		}
		d.reserved += more
	}
	if _, err := d.fl.f.WriteAt(p, d.n); err != nil {
		return fail(http.StatusInsufficientStorage, "write: %v", err)
	}
	_, _ = d.hs.Write(p)
	d.n += int64(len(p))
	return nil
}

// streamed writes the body to the file while readers follow.
func (d *download) streamed(ctx context.Context) error {
	total := d.resp.ContentLength
	if total < 0 || total > smallObject {
		d.fl.change(func() { d.fl.stage, d.fl.meta, d.fl.total = streaming, d.m, total })
	}
	body := io.Reader(d.resp.Body)
	buf := make([]byte, 64<<10)
	for tries := 0; ; {
		n, err := body.Read(buf)
		if n > 0 {
			if err := d.write(buf[:n]); err != nil {
				return err
			}
			d.fl.c.fetched.Add(int64(n))
			// The end is held back until all of it is known to be right: who gets it
			// has all of the right bytes, and else a broken connection.
			if ready := d.n - heldTail; ready > 0 {
				d.fl.change(func() { d.fl.ready = ready })
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			if total >= 0 && d.n != total {
				return fail(http.StatusBadGateway, "upstream sent %d bytes of %d", d.n, total)
			}
			return nil
		case err != nil:
			if tries++; tries > 3 || ctx.Err() != nil || total < 0 {
				return fail(http.StatusBadGateway, "upstream broke off after %d bytes: %v", d.n, err)
			}
			again, rerr := d.resume(ctx, total)
			if rerr != nil {
				return fail(http.StatusBadGateway, "upstream broke off after %d bytes: %v; %v", d.n, err, rerr)
			}
			defer func() { _ = again.Close() }()
			body = again
		}
	}
}

// resume asks for the rest (RFC 9110, 14.2). It needs a validator, so that the
// rest is of the same thing.
func (d *download) resume(ctx context.Context, total int64) (io.ReadCloser, error) {
	val := d.m.ETag
	if val == "" || strings.HasPrefix(val, "W/") {
		val = d.m.Modified
	}
	if val == "" {
		return nil, errors.New("it gave no validator to resume with")
	}
	select {
	case <-time.After(200 * time.Millisecond):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	want := contentRange(d.n, total)
	resp, err := d.fl.c.open(ctx, d.o, http.Header{"Accept-Encoding": {"identity"}, "Range": {rangeFrom(d.n)}, "If-Range": {val}})
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusPartialContent || resp.Header.Get("Content-Range") != want {
		_ = resp.Body.Close()
		return nil, errors.New("it does not resume")
	}
	return resp.Body, nil
}

// rewritten reads the whole body, decompressed, and writes what is made of it.
func (d *download) rewritten(ctx context.Context) error {
	body := io.Reader(d.resp.Body)
	switch strings.ToLower(d.m.Encoding) {
	case "":
	case "gzip":
		z, err := gzip.NewReader(body)
		if err != nil {
			return fail(http.StatusBadGateway, "decompress: %v", err)
		}
		body = z
	default:
		return fail(http.StatusBadGateway, "upstream sends encoding %q", d.m.Encoding)
	}
	d.m.Encoding = ""
	raw, err := d.fl.c.readAll(ctx, d.fl.s, body, d.limit)
	if err != nil {
		return err
	}
	defer d.fl.c.memory.Release(raw.weight)
	d.fl.c.fetched.Add(int64(len(raw.b)))
	out, typ, err := d.o.rewrite(raw.b, d.resp.Request.URL, d.m.Type)
	if err != nil {
		return fail(http.StatusBadGateway, "read index: %v", err)
	}
	d.m.Type = typ
	d.limit = 2 * maxMetadata // addresses of ours may be longer than upstream's
	return d.write(out)
}
