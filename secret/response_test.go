package secret

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"html"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"
)

func response(body io.Reader, n int64, header map[string]string) *http.Response {
	r := &http.Response{StatusCode: 200, Status: "200 OK", Header: http.Header{}, Body: io.NopCloser(body), ContentLength: n}
	for k, v := range header {
		r.Header.Set(k, v)
	}
	if n >= 0 {
		r.Header.Set("Content-Length", strconv.FormatInt(n, 10))
	}
	return r
}

// scrubbed is what a sandbox reads of a body.
func scrubbed(t testing.TB, b *Binding, host, body string) string {
	t.Helper()
	r := response(strings.NewReader(body), int64(len(body)), map[string]string{"Content-Type": "text/plain"})
	if err := b.Response(host, r); err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func echo(t testing.TB) (*Binding, string) {
	v := open(t)
	put(t, v, Secret{Name: "KEY", Hosts: []string{host}}, theValue)
	b := bind(t, v, BindSpec{Uses: []Use{{Name: "KEY"}}})
	return b, b.Environment().Vars()["KEY"]
}

// C19: what echoes the value comes back with the placeholder, however it is cut.
func TestResponseBody(t *testing.T) {
	t.Parallel()
	b, ph := echo(t)
	in := "a" + theValue + theValue + "b " + theValue[:10] + " " + theValue
	want := "a" + ph + ph + "b " + theValue[:10] + " " + ph
	for size := 1; size <= len(in); size++ {
		r := response(&pieces{in, size}, -1, map[string]string{"Content-Type": "application/json; charset=utf-8"})
		if err := b.Response(host, r); err != nil {
			t.Fatal(err)
		}
		out, err := io.ReadAll(iotest.OneByteReader(r.Body))
		if err != nil || string(out) != want {
			t.Fatalf("in pieces of %d: %q, %v", size, out, err)
		}
	}
	for _, form := range []string{
		url.QueryEscape(theValue), url.PathEscape(theValue), strings.ToLower(url.QueryEscape("/+=")), html.EscapeString(theValue),
		hex.EncodeToString([]byte(theValue)), strings.ReplaceAll(theValue, "/", `\/`),
		base64.StdEncoding.EncodeToString([]byte(theValue)), base64.URLEncoding.EncodeToString([]byte(theValue)),
	} {
		if got := scrubbed(t, b, host, "<"+form+">"); len(form) > 9 && strings.Contains(got, form[:len(form)-4]) {
			t.Errorf("%q came through as %q", form, got)
		}
	}
	// within something longer, in base64: at each of the three offsets at most the
	// digits at the edges are left
	for _, user := range []string{"u:", "us:", "use:", "x-access-token:"} {
		form := base64.StdEncoding.EncodeToString([]byte(user + theValue + " and more"))
		got := scrubbed(t, b, host, form)
		i := strings.Index(got, ph)
		if i < 0 {
			t.Errorf("%s: %q", user, got)
			continue
		}
		left := got[:i] + got[i+len(ph):]
		if n := len(form) - len(left); n < len(theValue)*8/6-2 {
			t.Errorf("%s: only %d digits are hidden of %q", user, n, form)
		}
	}
	j, _ := json.Marshal(map[string]string{"k": theValue})
	if got := scrubbed(t, b, host, string(j)); got != `{"k":"`+ph+`"}` {
		t.Errorf("%s", got)
	}
	if got := scrubbed(t, b, "other.example", theValue); got != theValue {
		t.Errorf("another host's answer was changed: %q", got)
	}
}

// pieces reads a string in pieces of one size.
type pieces struct {
	s    string
	size int
}

func (p *pieces) Read(b []byte) (int, error) {
	if p.s == "" {
		return 0, io.EOF
	}
	n := copy(b, p.s[:min(p.size, len(p.s))])
	p.s = p.s[n:]
	return n, nil
}

func TestResponseHeader(t *testing.T) {
	t.Parallel()
	b, ph := echo(t)
	r := response(strings.NewReader("body"), -1, map[string]string{"X-Echo": "got " + theValue, "Location": "/?k=" + url.QueryEscape(theValue), "X-Fine": "fine"})
	r.Status = "400 bad " + theValue
	r.Trailer = http.Header{"X-Sum": nil}
	r.Body = io.NopCloser(&atEnd{strings.NewReader("body"), func() { r.Trailer = http.Header{"X-Sum": {theValue}} }})
	if err := b.Response(host, r); err != nil {
		t.Fatal(err)
	}
	if r.Header.Get("X-Echo") != "got "+ph || r.Header.Get("Location") != "/?k="+ph || r.Header.Get("X-Fine") != "fine" || r.Status != "400 bad "+ph {
		t.Errorf("%v %q", r.Header, r.Status)
	}
	if _, err := io.ReadAll(r.Body); err != nil {
		t.Fatal(err)
	}
	if r.Trailer.Get("X-Sum") != ph {
		t.Errorf("trailer %v", r.Trailer)
	}
}

type atEnd struct {
	io.Reader
	fn func()
}

func (a *atEnd) Read(p []byte) (int, error) {
	n, err := a.Reader.Read(p)
	if err == io.EOF {
		a.fn()
	}
	return n, err
}

func TestResponseLengths(t *testing.T) {
	t.Parallel()
	b, _ := echo(t)
	body := strings.Repeat("x", 100)
	for what, c := range map[string]struct {
		n      int64
		header map[string]string
		change func(*http.Response)
		keeps  bool
	}{
		"text":              {100, map[string]string{"Content-Type": "text/html"}, nil, false},
		"no type":           {100, nil, nil, false},
		"not a type":        {100, map[string]string{"Content-Type": ";;;"}, nil, false},
		"json":              {100, map[string]string{"Content-Type": "application/vnd.api+json"}, nil, false},
		"identity":          {100, map[string]string{"Content-Encoding": "identity"}, nil, false},
		"shorter than any":  {7, nil, nil, true},
		"binary":            {100, map[string]string{"Content-Type": "application/octet-stream"}, nil, true},
		"compressed":        {100, map[string]string{"Content-Encoding": "gzip", "Content-Type": "text/html"}, nil, true},
		"answer to HEAD":    {100, nil, func(r *http.Response) { r.Request = &http.Request{Method: "HEAD"} }, true},
		"without a body":    {100, nil, func(r *http.Response) { r.Body = http.NoBody }, true},
		"other protocol":    {100, nil, func(r *http.Response) { r.StatusCode = 101 }, true},
		"after a HEAD, GET": {100, nil, func(r *http.Response) { r.Request = &http.Request{Method: "GET"} }, false},
	} {
		r := response(strings.NewReader(body), c.n, c.header)
		if c.change != nil {
			c.change(r)
		}
		if err := b.Response(host, r); err != nil {
			t.Fatal(err)
		}
		if has := r.Header.Get("Content-Length") != ""; has != c.keeps || (r.ContentLength == c.n) != c.keeps {
			t.Errorf("%s: Content-Length %q, %d", what, r.Header.Get("Content-Length"), r.ContentLength)
		}
	}
	r := response(strings.NewReader(""), -1, nil)
	up := struct {
		io.ReadWriteCloser
	}{}
	r.StatusCode, r.Body = 101, up
	if err := b.Response(host, r); err != nil {
		t.Fatal(err)
	}
	if _, ok := r.Body.(io.Writer); !ok {
		t.Error("the body of a 101 cannot be written to any more")
	}
}

// Events of a stream are not held back: what cannot be the beginning of a value
// is there at once.
func TestResponseStreams(t *testing.T) {
	t.Parallel()
	b, ph := echo(t)
	in, out := io.Pipe()
	r := response(in, -1, map[string]string{"Content-Type": "text/event-stream"})
	if err := b.Response(host, r); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1000)
	for _, c := range [][2]string{
		{"data: one\n\n", "data: one\n\n"},
		{"data: " + theValue + "\n\n", "data: " + ph + "\n\n"},
		{"data: " + theValue[:5], "data: "},
		{"\n\n", theValue[:5] + "\n\n"},
		{"data: x" + theValue[:3], "data: x"},
		{theValue[3:], ph},
	} {
		go io.WriteString(out, c[0])
		n, err := r.Body.Read(buf)
		if err != nil || string(buf[:n]) != c[1] {
			t.Fatalf("%q came as %q, %v", c[0], buf[:n], err)
		}
	}
	bad := errors.New("broken off")
	go func() { io.WriteString(out, theValue[:4]); out.CloseWithError(bad) }()
	rest, err := io.ReadAll(r.Body)
	if string(rest) != theValue[:4] || !errors.Is(err, bad) {
		t.Errorf("%q, %v", rest, err)
	}
	r.Body.Close()
}

func TestShortValuesAreNotLookedFor(t *testing.T) {
	t.Parallel()
	v := open(t)
	put(t, v, Secret{Name: "PIN", Hosts: []string{host}}, "1234")
	b := bind(t, v, BindSpec{Uses: []Use{{Name: "PIN"}}})
	if got := scrubbed(t, b, host, "1234 apples"); got != "1234 apples" {
		t.Errorf("%q", got)
	}
	r := request(t, host, "/", map[string]string{"A": b.Environment().Vars()["PIN"], "Accept-Encoding": "gzip"})
	if err := b.Request(host, r); err != nil || r.Header.Get("A") != "1234" || r.Header.Get("Accept-Encoding") != "gzip" {
		t.Errorf("%v", err)
	}
}

// Many requests leave nothing behind.
func TestManyRequests(t *testing.T) {
	b, ph := echo(t)
	run := func(n int) {
		for range n {
			q := request(t, host, "/", map[string]string{"A": ph})
			if err := b.Request(host, q); err != nil {
				t.Fatal(err)
			}
			if _, err := b.Certificate(host); err != nil {
				t.Fatal(err)
			}
			if got := scrubbed(t, b, host, "x"+theValue); got != "x"+ph {
				t.Fatal(got)
			}
		}
	}
	heap := func() (uint64, int) {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc, runtime.NumGoroutine()
	}
	run(100)
	mem, routines := heap()
	run(10000)
	mem2, routines2 := heap()
	if mem2 > mem+1<<20 || routines2 > routines {
		t.Errorf("%d bytes and %d goroutines became %d and %d", mem, routines, mem2, routines2)
	}
}

// naive hides every stretch that occurrences of the patterns cover.
func naive(ps []pattern, s string) string {
	var spans []span
	for i, p := range ps {
		if slices.ContainsFunc(ps[:i], func(q pattern) bool { return q.find == p.find }) {
			continue
		}
		for j := 0; j+len(p.find) <= len(s); j++ {
			if s[j:j+len(p.find)] == p.find {
				spans = append(spans, span{int64(j), int64(j + len(p.find)), int32(i)})
			}
		}
	}
	slices.SortFunc(spans, func(a, b span) int {
		if a.start != b.start {
			return int(a.start - b.start)
		}
		return int(b.end - a.end)
	})
	var out strings.Builder
	at := int64(0)
	for i := 0; i < len(spans); {
		out.WriteString(s[at:spans[i].start])
		out.WriteString(ps[spans[i].put].put)
		end := spans[i].end
		for i++; i < len(spans) && spans[i].start < end; i++ {
			end = max(end, spans[i].end)
		}
		at = end
	}
	out.WriteString(s[at:])
	return out.String()
}

// overlaps says whether an occurrence of p can overlap another.
func overlaps(p string) bool {
	for i := 1; i < len(p); i++ {
		if strings.HasPrefix(p, p[i:]) {
			return true
		}
	}
	return false
}

// FuzzScrub: what comes out piece by piece is what replacing makes of the whole.
func FuzzScrub(f *testing.F) {
	f.Add("secret", "ret", "tse", "a secretsecret b secre", uint64(3))
	f.Add("aaaa", "aa", "ab", "aaaaaaaab aaa", uint64(1))
	f.Add("abcdefgh", "cdef", "fgx", "abcdefgx abcdefgh cdefgx", uint64(7))
	f.Fuzz(func(t *testing.T, a, b, c, text string, seed uint64) {
		var ps []pattern
		for i, p := range []string{a, b, c} {
			if p != "" {
				ps = append(ps, pattern{p, "<" + strconv.Itoa(i) + ">"})
			}
		}
		m := newMatcher(ps)
		if m == nil {
			return
		}
		if got, want := stream(m, text, seed), naive(ps, text); got != want {
			t.Errorf("%q in %q: %q, want %q", ps, text, got, want)
		}
		if a != "" && !overlaps(a) {
			one := newMatcher(ps[:1])
			if got, want := stream(one, text, seed), strings.ReplaceAll(text, a, "<0>"); got != want {
				t.Errorf("%q in %q: %q, want %q", a, text, got, want)
			}
		}
	})
}

// stream scrubs a text in pieces of random sizes, and checks what is held back.
func stream(m *matcher, text string, seed uint64) string {
	r := rand.New(rand.NewPCG(seed, 1))
	longest := 0
	for _, n := range m.nodes {
		longest = max(longest, int(n.depth))
	}
	s := scrubber{m: m}
	var out []byte
	for text != "" {
		n := 1 + r.IntN(min(len(text), 1+r.IntN(20)))
		out = s.write(out, []byte(text[:n]))
		text = text[n:]
		if len(s.held) > 2*longest {
			panic("more is held back than patterns are long")
		}
	}
	return string(s.close(out))
}

func TestScrubAtRandom(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	word := func(n int) string {
		b := make([]byte, n)
		for i := range b {
			b[i] = "aab"[r.IntN(3)]
		}
		return string(b)
	}
	for range 20000 {
		var ps []pattern
		for i := range 1 + r.IntN(4) {
			ps = append(ps, pattern{word(1 + r.IntN(7)), "<" + strconv.Itoa(i) + ">"})
		}
		text := word(r.IntN(60))
		if got, want := stream(newMatcher(ps), text, r.Uint64()), naive(ps, text); got != want {
			t.Fatalf("%q in %q: %q, want %q", ps, text, got, want)
		}
	}
}

// The worst that a tenant can make of values and answers costs no more per byte.
func BenchmarkScrub(b *testing.B) {
	for name, c := range map[string]struct {
		ps   []pattern
		text []byte
	}{
		"ordinary": {forms("ghp_0123456789abcdefghijklmnopqrstuvwxyz", "x"), bytes.Repeat([]byte(`{"id": 12345, "name": "some text as APIs have it", "url": "https://example.com/x"},`), 200)},
		"worst":    {[]pattern{{strings.Repeat("a", 8192) + "b", "x"}, {strings.Repeat("a", 8), "y"}}, bytes.Repeat([]byte("a"), 16<<10)},
	} {
		b.Run(name, func(b *testing.B) {
			s := scrubber{m: newMatcher(c.ps)}
			b.SetBytes(int64(len(c.text)))
			var out []byte
			for b.Loop() {
				out = s.write(out[:0], c.text)
			}
		})
	}
}
