package secret

import (
	"io"
	"mime"
	"net/http"
	"slices"
	"strings"

	"vivarium/network/policy"
)

// Response takes the values of the host's secrets out of what the host answers:
// the placeholder comes in their place, in the header, in the trailer and in a
// body of text as it streams by. It does what it can: a body that is compressed
// all the same (Request asked for none) or binary passes as it is, and so does
// what comes after an upgrade (101) and a value of fewer than 8 bytes.
//
// The proxy must call it before it copies the header (Content-Length is dropped
// where a body may change its length), read the body from resp.Body, and copy
// resp.Trailer after the body's end.
func (b *Binding) Response(host string, resp *http.Response) error {
	name, ok := policy.Name(host)
	if !ok || !matchAny(b.saved.Hosts, name) {
		return nil
	}
	m := b.plan(name).scrub
	if m == nil {
		return nil
	}
	resp.Status = m.replace(resp.Status)
	m.header(resp.Header)
	m.header(resp.Trailer)
	if resp.Body == nil || resp.Body == http.NoBody || resp.StatusCode == http.StatusSwitchingProtocols {
		return nil
	}
	body := &body{src: resp.Body, resp: resp, m: m}
	if readable(resp.Header) && (resp.ContentLength < 0 || resp.ContentLength >= int64(m.min)) {
		body.scrub = &scrubber{m: m}
		if head := resp.Request != nil && resp.Request.Method == http.MethodHead; !head {
			resp.Header.Del("Content-Length")
			resp.ContentLength = -1
		}
	}
	resp.Body = body
	return nil
}

// header scrubs values, and drops a field that has one in its name.
func (m *matcher) header(h http.Header) {
	for k, vs := range h {
		if m.replace(k) != k {
			delete(h, k)
			continue
		}
		for i, v := range vs {
			vs[i] = m.replace(v)
		}
	}
}

// textTypes are those besides text/*, and what ends in a suffix of text.
var textTypes = []string{
	"application/json", "application/x-ndjson", "application/ndjson", "application/jsonl", "application/json-seq",
	"application/xml", "application/javascript", "application/x-javascript", "application/ecmascript",
	"application/x-www-form-urlencoded", "application/graphql", "application/yaml", "application/x-yaml",
	"application/toml", "application/sql", "application/x-sh", "application/jwt",
	"multipart/form-data", "multipart/mixed", "message/http",
}

// readable says whether a body is text that is not compressed. Without a type
// that can be read it counts as text.
func readable(h http.Header) bool {
	for _, e := range h.Values("Content-Encoding") {
		if e = strings.TrimSpace(e); e != "" && !strings.EqualFold(e, "identity") {
			return false
		}
	}
	t, _, err := mime.ParseMediaType(h.Get("Content-Type"))
	if t == "" || err != nil && err != mime.ErrInvalidMediaParameter {
		return true
	}
	return strings.HasPrefix(t, "text/") || slices.Contains(textTypes, t) ||
		strings.HasSuffix(t, "+json") || strings.HasSuffix(t, "+xml") || strings.HasSuffix(t, "+yaml")
}

// chunkSize is what is read of a body at once.
const chunkSize = 16 << 10

// body is a response's body, scrubbed.
type body struct {
	src   io.ReadCloser
	resp  *http.Response
	m     *matcher
	scrub *scrubber // nil: only the trailer is

	in, ready []byte // ready is a part of out
	out       []byte
	err       error // once ready is empty
}

// Read implements io.Reader. It returns as soon as something is certain, so that
// events pass as they come.
func (b *body) Read(p []byte) (int, error) {
	if b.scrub == nil {
		n, err := b.src.Read(p)
		if err == io.EOF {
			b.m.header(b.resp.Trailer)
		}
		return n, err
	}
	if len(p) == 0 {
		return 0, nil
	}
	for len(b.ready) == 0 {
		if b.err != nil {
			return 0, b.err
		}
		if b.in == nil {
			b.in = make([]byte, chunkSize)
		}
		n, err := b.src.Read(b.in)
		b.out = b.scrub.write(b.out[:0], b.in[:n])
		if err != nil {
			b.out, b.err = b.scrub.close(b.out), err
			if err == io.EOF {
				b.m.header(b.resp.Trailer)
			}
		}
		b.ready = b.out
	}
	n := copy(p, b.ready)
	b.ready = b.ready[n:]
	return n, nil
}

// Close implements io.Closer.
func (b *body) Close() error { return b.src.Close() }
