package packagecache

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
)

// What the go command asks a proxy for (go.dev/ref/mod#goproxy-protocol), and
// through it the checksum database.

func (c *Cache) golang(q *request) (*object, error) {
	o := &object{ttl: forever, max: 1 << 20}
	p := q.path
	switch mod, file, ok := strings.Cut(p, "/@v/"); {
	case strings.HasPrefix(p, "sumdb/"):
		if err := c.sumdb(q, o); err != nil {
			return nil, err
		}
	case ok && file == "list":
		o.ttl, o.max = c.cfg.MetadataTTL, 16<<20
	case ok && !strings.Contains(file, "/"):
		i := strings.LastIndexByte(file, '.')
		if i <= 0 {
			return nil, fail(http.StatusNotFound, "no such file of a module")
		}
		version := file[:i]
		if !canonicalVersion(version) {
			o.ttl = c.cfg.MetadataTTL // a branch, say, which moves
		}
		// The record may have come between the check and the keeping.
		recheck := func(m *meta) {
			if m.Verified == "" {
				c.checkLater(q, mod, version)
			}
		}
		switch file[i:] {
		case ".info":
			o.check = checkInfo
		case ".mod":
			o.max = 16 << 20 // as the go command
			o.check = func(f *os.File, size int64) (string, error) {
				return checkMod(f, size, c.goSum(q, mod, version+"/go.mod"))
			}
			o.kept = recheck
		case ".zip":
			o.max = 1 << 62
			o.check = func(f *os.File, size int64) (string, error) { return checkZip(f, size, c.goSum(q, mod, version)) }
			o.kept = recheck
		default:
			return nil, fail(http.StatusNotFound, "no such file of a module")
		}
	case strings.HasSuffix(p, "/@latest"):
		o.ttl, o.check = c.cfg.MetadataTTL, checkInfo
	default:
		return nil, fail(http.StatusNotFound, "no such path of a Go module proxy")
	}
	o.key = goKey(q, p)
	var first, last *object
	for _, up := range q.ups {
		n := *o
		n.up, n.url = up, up.at(p)
		if first == nil {
			first = &n
		} else {
			last.next = &n
		}
		last = &n
	}
	return first, nil
}

func goKey(q *request, p string) string { return "go " + q.ups[0].base.String() + " " + p }

// sumdb is a request to a checksum database, whose answers are signed: the go
// command trusts no proxy for them.
func (c *Cache) sumdb(q *request, o *object) error {
	name, rest, _ := strings.Cut(strings.TrimPrefix(q.path, "sumdb/"), "/")
	switch {
	case rest == "supported", rest == "latest":
		o.ttl = c.cfg.MetadataTTL
	case strings.HasPrefix(rest, "tile/"):
	case strings.HasPrefix(rest, "lookup/"):
		mod, version, ok := strings.Cut(strings.TrimPrefix(rest, "lookup/"), "@")
		if !ok {
			return fail(http.StatusNotFound, "no such path of a checksum database")
		}
		q.s.sawSumdb(name)
		o.kept = func(*meta) { c.checkLater(q, mod, version) }
	default:
		return fail(http.StatusNotFound, "no such path of a checksum database")
	}
	return nil
}

const maxSumdbs = 8

func (s *shelf) sawSumdb(name string) {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	if len(s.sumdbs) < maxSumdbs {
		s.sumdbs[name] = true
	}
}

// goSum is what a kept record of a checksum database says of "version" or
// "version/go.mod" of a module (in the escaped spelling of paths); "" if there is
// none.
func (c *Cache) goSum(q *request, mod, version string) string {
	q.s.d.mu.Lock()
	var names []string
	for n := range q.s.sumdbs {
		names = append(names, n)
	}
	q.s.d.mu.Unlock()
	v, _, _ := strings.Cut(version, "/")
	for _, n := range names {
		m := q.s.peek(goKey(q, "sumdb/"+n+"/lookup/"+mod+"@"+v))
		if m == nil || m.Size > 1<<20 {
			continue
		}
		f, err := q.s.open(m)
		if err != nil {
			continue
		}
		b, err := io.ReadAll(io.LimitReader(f, 1<<20))
		_ = f.Close()
		if err != nil {
			continue
		}
		if h := recordSum(b, unescapeModule(mod), unescapeModule(version)); h != "" {
			return h
		}
	}
	return ""
}

// recordSum finds a line of go.sum in a record (golang.org/design/25530-sumdb).
func recordSum(b []byte, mod, version string) string {
	for line := range bytes.Lines(b) {
		f := strings.Fields(string(line))
		if len(f) == 3 && f[0] == mod && f[1] == version && strings.HasPrefix(f[2], "h1:") {
			return f[2]
		}
	}
	return ""
}

// unescapeModule undoes the spelling of capitals in paths: !a is A.
func unescapeModule(s string) string {
	var b strings.Builder
	up := false
	for _, c := range []byte(s) {
		switch {
		case c == '!':
			up = true
			continue
		case up && c >= 'a' && c <= 'z':
			c -= 'a' - 'A'
		}
		up = false
		b.WriteByte(c)
	}
	return b.String()
}

// checkLater compares what was kept before its record came. Precondition: the
// caller is counted in c.running.
func (c *Cache) checkLater(q *request, mod, version string) {
	c.running.Add(1)
	go func() {
		defer c.running.Done()
		select {
		case c.checking <- struct{}{}:
			defer func() { <-c.checking }()
		case <-c.ctx.Done():
			return
		}
		for _, k := range []struct {
			ext, version string
			check        func(*os.File, int64, string) (string, error)
		}{{".zip", version, checkZip}, {".mod", version + "/go.mod", checkMod}} {
			m := q.s.peek(goKey(q, mod+"/@v/"+version+k.ext))
			want := c.goSum(q, mod, k.version)
			if m == nil || m.Verified != "" || want == "" {
				continue
			}
			f, err := q.s.open(m)
			if err != nil {
				continue
			}
			v, err := k.check(f, m.Size, want)
			_ = f.Close()
			if err != nil {
				q.s.drop(m)
				c.cfg.Log.Warn("package cache: a module is not what its record says", "module", mod, "version", version, "error", err)
				continue
			}
			n := *m
			if n.Verified = v; v != "" {
				_ = q.s.update(&n) // else it is compared again
			}
		}
	}()
}

// canonicalVersion says whether a version is one that never moves: vX.Y.Z, with
// what may follow.
func canonicalVersion(v string) bool {
	rest, ok := strings.CutPrefix(v, "v")
	if !ok {
		return false
	}
	if i := strings.IndexAny(rest, "-+"); i >= 0 {
		rest = rest[:i]
	}
	parts := strings.Split(rest, ".")
	for _, p := range parts {
		if p == "" || strings.Trim(p, "0123456789") != "" {
			return false
		}
	}
	return len(parts) == 3
}

func checkInfo(f *os.File, size int64) (string, error) {
	b := make([]byte, size)
	if _, err := f.ReadAt(b, 0); err != nil {
		return "", err
	}
	var v struct{ Version string }
	if err := json.Unmarshal(b, &v); err != nil || v.Version == "" {
		return "", errors.New("it is not a module's info")
	}
	return "", nil
}
