package packagecache

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"time"

	"golang.org/x/net/http/httpguts"
)

const maxRedirects = 5

func (c *Cache) newTransport() *http.Transport {
	return &http.Transport{
		DialContext:            c.cfg.Dial,
		TLSClientConfig:        &tls.Config{RootCAs: c.cfg.RootCAs, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:    20 * time.Second,
		ResponseHeaderTimeout:  c.cfg.Stall,
		IdleConnTimeout:        90 * time.Second,
		MaxIdleConns:           64,
		MaxIdleConnsPerHost:    32,
		MaxConnsPerHost:        64,
		MaxResponseHeaderBytes: 128 << 10,
		DisableCompression:     true, // bytes are kept as they are
		ForceAttemptHTTP2:      true,
	}
}

// open requests an object from its upstream and follows redirects within it. The
// body fails when upstream sends nothing for too long.
func (c *Cache) open(ctx context.Context, o *object, h http.Header) (*http.Response, error) {
	u := o.url
	for range maxRedirects + 1 {
		if !o.up.may(u) {
			return nil, fail(http.StatusBadGateway, "upstream leads to %s, which is not one of its hosts in the configuration", hostPort(u))
		}
		rctx, cancel := context.WithCancel(ctx)
		req, err := http.NewRequestWithContext(rctx, http.MethodGet, u.String(), nil)
		if err != nil {
			cancel()
			return nil, fail(http.StatusBadGateway, "make request: %v", err)
		}
		req.URL = u // with its own spelling of the path
		req.Header = h.Clone()
		req.Header.Set("User-Agent", "vivarium")
		if o.up.auth != "" && hostPort(u) == hostPort(o.up.base) {
			req.Header.Set("Authorization", o.up.auth)
		}
		resp, err := c.transport.RoundTrip(req)
		if err != nil {
			cancel()
			var ue *url.Error
			if errors.As(err, &ue) {
				err = ue.Err
			}
			return nil, fail(http.StatusBadGateway, "ask %s: %v", hostPort(u), err)
		}
		resp.Body = &stallReader{r: resp.Body, cancel: cancel, t: time.AfterFunc(c.cfg.Stall, cancel), d: c.cfg.Stall}
		switch resp.StatusCode {
		case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
			_ = resp.Body.Close()
			next, err := u.Parse(resp.Header.Get("Location"))
			if err != nil || resp.Header.Get("Location") == "" {
				return nil, fail(http.StatusBadGateway, "upstream redirects to nowhere")
			}
			next.Fragment, next.RawFragment = "", ""
			u = next
		default:
			return resp, nil
		}
	}
	return nil, fail(http.StatusBadGateway, "upstream redirects more than %d times", maxRedirects)
}

// stallReader ends a request whose body stands still.
type stallReader struct {
	r      io.ReadCloser
	cancel context.CancelFunc
	t      *time.Timer
	d      time.Duration
}

func (s *stallReader) Read(p []byte) (int, error) {
	s.t.Reset(s.d)
	return s.r.Read(p)
}

func (s *stallReader) Close() error {
	s.t.Stop()
	s.cancel()
	return s.r.Close()
}

// statusFailure is what a client is told of an answer that is not 200. Nothing
// of its body is handed on.
func statusFailure(resp *http.Response) *failure {
	switch s := resp.StatusCode; s {
	case http.StatusNotFound, http.StatusGone:
		return fail(s, "upstream has no such thing")
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusUnavailableForLegalReasons:
		return fail(http.StatusForbidden, "upstream answers %d", s)
	case http.StatusTooManyRequests:
		return fail(http.StatusServiceUnavailable, "upstream is asked too often")
	default:
		return fail(http.StatusBadGateway, "upstream answers %d", s)
	}
}

// plainHeader is a header if it is short and could be sent again.
func plainHeader(h http.Header, name string) string {
	v := h.Get(name)
	if len(v) > 256 || !httpguts.ValidHeaderFieldValue(v) {
		return ""
	}
	return v
}

func rangeFrom(n int64) string { return "bytes=" + strconv.FormatInt(n, 10) + "-" }

func contentRange(from, total int64) string {
	return fmt.Sprintf("bytes %d-%d/%d", from, total-1, total)
}

// inMemory are bytes that were counted in Cache.memory, and are to be released.
type inMemory struct {
	b      []byte
	weight int64
}

// readAll reads at most limit bytes. What is in memory at once, of all clients,
// is bounded: more than a mebibyte waits in a file until there is room.
func (c *Cache) readAll(ctx context.Context, s *shelf, r io.Reader, limit int64) (inMemory, error) {
	var b bytes.Buffer
	n, err := io.CopyN(&b, r, min(1<<20, limit+1))
	tooMuch := fail(http.StatusBadGateway, "upstream sends more than %d bytes", limit)
	switch {
	case errors.Is(err, io.EOF):
		return inMemory{b.Bytes(), 0}, nil
	case err != nil:
		return inMemory{}, fail(http.StatusBadGateway, "read: %v", err)
	case n > limit:
		return inMemory{}, tooMuch
	}
	f, err := s.temp()
	if err != nil {
		return inMemory{}, fail(http.StatusInternalServerError, "make file: %v", err)
	}
	defer func() { _, _ = os.Remove(f.Name()), f.Close() }()
	size, err := io.Copy(f, io.LimitReader(io.MultiReader(&b, r), limit+1))
	if err != nil {
		return inMemory{}, fail(http.StatusBadGateway, "read: %v", err)
	}
	if size > limit {
		return inMemory{}, tooMuch
	}
	return c.load(ctx, f, size)
}

// load reads a file into memory when there is room for it.
func (c *Cache) load(ctx context.Context, f *os.File, size int64) (inMemory, error) {
	weight := min(3*size, memoryLimit) // what is read, and what is made of it
	if err := c.memory.Acquire(ctx, weight); err != nil {
		return inMemory{}, err
	}
	out := make([]byte, size)
	if _, err := f.ReadAt(out, 0); err != nil {
		c.memory.Release(weight)
		return inMemory{}, fail(http.StatusInternalServerError, "read: %v", err)
	}
	return inMemory{out, weight}, nil
}

const memoryLimit = 512 << 20
