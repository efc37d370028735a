package packagecache

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"
)

// writeStall is how long a client may take for a piece of an answer.
const writeStall = 30 * time.Second

// answer writes to a client that may be slow on purpose.
type answer struct {
	http.ResponseWriter
	ctl  *http.ResponseController
	c    *Cache
	kind string
}

func (a *answer) Write(p []byte) (int, error) {
	_ = a.ctl.SetWriteDeadline(time.Now().Add(writeStall))
	n, err := a.ResponseWriter.Write(p)
	a.c.served.Add(int64(n))
	return n, err
}

// ReadFrom lets whole files go by sendfile, a deadline for each piece.
func (a *answer) ReadFrom(r io.Reader) (int64, error) {
	rf, ok := a.ResponseWriter.(io.ReaderFrom)
	lr, limited := r.(*io.LimitedReader)
	if !ok || !limited {
		return io.Copy(struct{ io.Writer }{a}, r)
	}
	var sent int64
	for lr.N > 0 {
		_ = a.ctl.SetWriteDeadline(time.Now().Add(writeStall))
		piece := &io.LimitedReader{R: lr.R, N: min(lr.N, 1<<20)}
		n, err := rf.ReadFrom(piece)
		sent += n
		lr.N -= n
		a.c.served.Add(n)
		if err != nil || n == 0 {
			return sent, err
		}
	}
	return sent, nil
}

func (a *answer) text(status int, body string) {
	h := a.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	a.WriteHeader(status)
	_, _ = io.WriteString(a, body)
}

func (a *answer) fail(r *http.Request, err error) {
	var f *failure
	if !errors.As(err, &f) {
		f = fail(http.StatusInternalServerError, "%v", err)
	}
	switch f.status {
	case http.StatusForbidden:
		a.c.count(a.kind, func(n *Counts) { n.Denied++ })
	case http.StatusNotFound, http.StatusGone:
		a.c.count(a.kind, func(n *Counts) { n.Absent++ })
	case http.StatusMethodNotAllowed:
		a.Header().Set("Allow", "GET, HEAD")
	case http.StatusServiceUnavailable:
		a.Header().Set("Retry-After", "5")
	}
	if r.ContentLength != 0 { // a body that nobody reads
		a.Header().Set("Connection", "close")
	}
	a.text(f.status, "vivarium package cache: "+f.msg+"\n")
}

// serve answers with an object, from the disk or as it comes.
func (c *Cache) serve(a *answer, r *http.Request, s *shelf, o *object) {
	for range 2 {
		if m := s.get(o.key); m != nil && fresh(o, m) {
			if f, err := s.open(m); err == nil {
				c.count(o.up.kind, func(n *Counts) { n.Hits++ })
				c.file(a, r, m, f, "hit")
				_ = f.Close()
				return
			}
		}
		if status := s.isMissing(o.key); status != 0 {
			a.fail(r, fail(status, "upstream has no such thing"))
			return
		}
		again, err := c.follow(a, r, s, o)
		if err != nil {
			a.fail(r, err)
			return
		}
		if !again {
			return
		}
	}
	a.fail(r, fail(http.StatusServiceUnavailable, "evicted before it could be served"))
}

func fresh(o *object, m *meta) bool {
	return o.ttl == forever || time.Since(m.Fetched) < o.ttl && m.Fetched.Before(time.Now().Add(time.Minute)) || o.fresh != nil && o.fresh(m)
}

// follow waits for a download and sends it on. again says that nothing was sent,
// and another try is worth it.
func (c *Cache) follow(a *answer, r *http.Request, s *shelf, o *object) (again bool, err error) {
	fl, err := c.join(s, o)
	if err != nil {
		return false, err
	}
	defer fl.leave()
	// A client that has something already is answered when all is known.
	partial := r.Header.Get("If-None-Match") == "" && r.Header.Get("If-Modified-Since") == "" && r.Header.Get("If-Range") == ""
	l, err := fl.wait(r.Context(), func(l look) bool { return l.stage > streaming || partial && l.stage == streaming })
	if err != nil {
		return false, fail(http.StatusServiceUnavailable, "the client left")
	}
	if l.stage != failed {
		c.count(o.up.kind, func(n *Counts) {
			switch l.how {
			case "revalidated":
				n.Revalidated++
			case "stale":
				n.Stale++
			default:
				if c.first(fl) {
					n.Misses++
				} else { // somebody else's download
					n.Hits++
					l.how = "hit"
				}
			}
		})
	}
	switch l.stage {
	case failed:
		return false, l.err
	case kept:
		f, err := s.open(l.meta)
		if err != nil {
			return true, nil //nolint:nilerr // evicted meanwhile: fetch it again
		}
		c.file(a, r, l.meta, f, l.how)
		_ = f.Close()
		return false, nil
	case whole:
		c.file(a, r, l.meta, io.NewSectionReader(fl.f, 0, l.meta.Size), l.how)
		return false, nil
	}
	fl.stream(a, r, l)
	return false, nil
}

// first says whether nobody asked before. Precondition: Cache.mu is held.
func (c *Cache) first(fl *flight) bool {
	was := fl.counted
	fl.counted = true
	return !was
}

// headers sets what is the same for every answer with an object.
func headers(h http.Header, m *meta, how string) {
	h.Set("Content-Type", "application/octet-stream")
	if m.Type != "" {
		h.Set("Content-Type", m.Type)
	}
	if m.Encoding != "" {
		h.Set("Content-Encoding", m.Encoding)
	}
	if m.Sum != "" {
		h.Set("ETag", `"`+m.Sum+`"`)
	}
	if m.Modified != "" {
		h.Set("Last-Modified", m.Modified)
	}
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Vivarium-Cache", how)
}

// file sends what is there, or a part of it.
func (c *Cache) file(a *answer, r *http.Request, m *meta, f io.ReadSeeker, how string) {
	headers(a.Header(), m, how)
	var modified time.Time
	if t, err := http.ParseTime(m.Modified); err == nil {
		modified = t
	}
	if strings.Count(r.Header.Get("Range"), ",") > 0 {
		r.Header.Del("Range") // of many parts: nothing of use asks for that
	}
	http.ServeContent(a, r, "", modified, f)
}

// stream sends what arrives. When the download fails the connection breaks, so
// that nobody takes a part for the whole.
func (fl *flight) stream(a *answer, r *http.Request, l look) {
	h := a.Header()
	headers(h, l.meta, l.how)
	from, to, status := int64(0), l.total, http.StatusOK
	if f, t, ok := oneRange(r.Header.Get("Range"), l.total); ok {
		from, to, status = f, t, http.StatusPartialContent
		h.Set("Content-Range", "bytes "+strconv.FormatInt(from, 10)+"-"+strconv.FormatInt(to-1, 10)+"/"+strconv.FormatInt(l.total, 10))
	}
	if to >= 0 {
		h.Set("Content-Length", strconv.FormatInt(to-from, 10))
	}
	a.WriteHeader(status)
	if r.Method == http.MethodHead {
		return
	}
	buf := make([]byte, 64<<10)
	for at := from; to < 0 || at < to; {
		l, err := fl.wait(r.Context(), func(l look) bool { return l.ready > at || l.stage > streaming })
		if err != nil || l.stage == failed {
			panic(http.ErrAbortHandler)
		}
		if l.stage == whole && at >= l.ready {
			return // of a length that upstream did not say
		}
		n := min(l.ready-at, int64(len(buf)))
		if to >= 0 {
			n = min(n, to-at)
		}
		k, err := fl.f.ReadAt(buf[:n], at)
		if err != nil && !errors.Is(err, io.EOF) {
			panic(http.ErrAbortHandler)
		}
		if _, err := a.Write(buf[:k]); err != nil {
			return
		}
		at += int64(k)
	}
}

// oneRange reads a Range header of one part of total bytes (RFC 9110, 14.1.2),
// as from and the byte after the last.
func oneRange(s string, total int64) (from, to int64, ok bool) {
	spec, ok := strings.CutPrefix(s, "bytes=")
	if !ok || total <= 0 {
		return 0, 0, false
	}
	lo, hi, ok := strings.Cut(strings.TrimSpace(spec), "-")
	if !ok {
		return 0, 0, false
	}
	if lo == "" { // the last n
		n, err := strconv.ParseInt(hi, 10, 64)
		if err != nil || n <= 0 {
			return 0, 0, false
		}
		return max(0, total-n), total, true
	}
	from, err := strconv.ParseInt(lo, 10, 64)
	if err != nil || from < 0 || from >= total {
		return 0, 0, false
	}
	to = total
	if hi != "" {
		h, err := strconv.ParseInt(hi, 10, 64)
		if err != nil || h < from {
			return 0, 0, false
		}
		to = min(total, h+1)
	}
	return from, to, true
}

// body reads all of a kept object.
func (c *Cache) body(ctx context.Context, s *shelf, m *meta) (inMemory, error) {
	f, err := s.open(m)
	if err != nil {
		return inMemory{}, err
	}
	defer func(f *os.File) { _ = f.Close() }(f)
	return c.load(ctx, f, m.Size)
}
