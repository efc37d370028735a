package packagecache

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"golang.org/x/net/html"
)

// What pip and uv ask for: the index of a project (PEP 503 as HTML, PEP 691 as
// JSON), the files that it links to, and their metadata (PEP 658) at the file's
// address with .metadata added.

const (
	simpleJSON = "application/vnd.pypi.simple.v1+json"
	simpleHTML = "application/vnd.pypi.simple.v1+html"
)

func (c *Cache) pypi(q *request) (*object, error) {
	up := q.ups[0]
	if rest, ok := strings.CutPrefix(q.path, "files/"); ok {
		return c.pypiFile(up, rest)
	}
	rest, ok := strings.CutPrefix(q.path+"/", "simple/")
	rest = strings.TrimSuffix(strings.TrimSuffix(rest, "/"), "/")
	if !ok || strings.Contains(rest, "/") {
		return nil, fail(http.StatusNotFound, "no such path of a Python index; want simple/ or simple/PROJECT/")
	}
	name := ""
	if rest != "" {
		if name, ok = normalProject(rest); !ok {
			return nil, fail(http.StatusNotFound, "not the name of a project")
		}
		name += "/"
	}
	accept, kind := "text/html, "+simpleHTML, "html"
	if strings.Contains(q.r.Header.Get("Accept"), simpleJSON) {
		accept, kind = simpleJSON+", "+simpleHTML+"; q=0.2, text/html; q=0.01", "json"
	}
	return &object{key: "pypi " + up.base.String() + " " + kind + " " + q.where + " " + name, up: up, url: up.at(name), accept: accept,
		ttl: c.cfg.MetadataTTL, max: maxMetadata, rewrite: func(raw []byte, from *url.URL, typ string) ([]byte, string, error) {
			mime, _, _ := strings.Cut(typ, ";")
			switch strings.TrimSpace(strings.ToLower(mime)) {
			case simpleJSON, "application/json":
				out, err := pypiJSON(q, up, raw, from)
				return out, simpleJSON, err
			case simpleHTML, "text/html":
				out, err := pypiHTML(q, up, raw, from)
				return out, typ, err
			}
			return nil, "", errors.New("it is neither HTML nor JSON")
		}}, nil
}

// normalProject is the one spelling of a project's name (PEP 503).
func normalProject(s string) (string, bool) {
	var b strings.Builder
	for i, c := range []byte(strings.ToLower(s)) {
		switch {
		case c >= 'a' && c <= 'z' || c >= '0' && c <= '9':
			b.WriteByte(c)
		case c == '-' || c == '_' || c == '.':
			if i == 0 || i == len(s)-1 {
				return "", false
			}
			if !strings.HasSuffix(b.String(), "-") {
				b.WriteByte('-')
			}
		default:
			return "", false
		}
	}
	return b.String(), b.Len() > 0
}

// pypiFile reads the path that link makes: META/HASH/SCHEME/HOST/PATH.
func (c *Cache) pypiFile(up *upstream, p string) (*object, error) {
	metaHash, rest, _ := strings.Cut(p, "/")
	if !strings.HasSuffix(rest, ".metadata") {
		return elsewhere(up, rest, PyPI)
	}
	_, rest, _ = strings.Cut(rest, "/")
	o, err := elsewhere(up, metaHash+"/"+rest, PyPI)
	if err == nil {
		o.max = maxMetadata
	}
	return o, err
}

// link is our address for a file, as a path from the root, or "" if the upstream
// may not have it.
func (q *request) link(up *upstream, u *url.URL, sum, metaSum string) string {
	if u.RawQuery != "" || !up.may(u) || !cleanPath(strings.TrimPrefix(u.Path, "/")) || strings.HasSuffix(u.Path, "/") {
		return ""
	}
	w := "-"
	if m := (digest{"sha256", strings.ToLower(metaSum)}); m.valid() {
		w = m.algo + "-" + m.hex
	}
	want := digest{"sha256", strings.ToLower(sum)}
	if !want.valid() {
		want = digest{}
	}
	return q.where + "/files/" + w + "/" + elsewherePath(&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}, want)
}

// pypiHTML makes links ours. Tags are written anew only where they change.
func pypiHTML(q *request, up *upstream, raw []byte, from *url.URL) ([]byte, error) {
	var out bytes.Buffer
	out.Grow(len(raw) + len(raw)/4)
	z := html.NewTokenizer(bytes.NewReader(raw))
	base := from
	for {
		tt := z.Next()
		if tt == html.ErrorToken {
			if err := z.Err(); !errors.Is(err, io.EOF) {
				return nil, err
			}
			return out.Bytes(), nil
		}
		tok := append([]byte(nil), z.Raw()...) // what follows lower-cases it in place
		if tt != html.StartTagToken && tt != html.SelfClosingTagToken {
			out.Write(tok)
			continue
		}
		t := z.Token()
		switch t.Data {
		case "base":
			for _, a := range t.Attr {
				if u, err := base.Parse(a.Val); err == nil && a.Key == "href" {
					base = u
				}
			}
			continue // links are from here now
		case "a":
		default:
			out.Write(tok)
			continue
		}
		metaSum := ""
		for _, a := range t.Attr {
			if a.Key == "data-core-metadata" || a.Key == "data-dist-info-metadata" && metaSum == "" {
				metaSum = strings.TrimPrefix(a.Val, "sha256=")
			}
		}
		for i, a := range t.Attr {
			if a.Key == "href" {
				t.Attr[i].Val = pypiHref(q, up, base, a.Val, metaSum)
			}
		}
		out.WriteString(t.String())
	}
}

func pypiHref(q *request, up *upstream, base *url.URL, href, metaSum string) string {
	u, err := base.Parse(href)
	if err != nil {
		return href
	}
	if rest, ok := up.below(u); ok && u.RawQuery == "" { // a project, in the index of all
		if name, ok := normalProject(strings.TrimSuffix(rest, "/")); ok && strings.HasSuffix(rest, "/") {
			return q.where + "/simple/" + name + "/"
		}
	}
	l := q.link(up, u, strings.TrimPrefix(u.Fragment, "sha256="), metaSum)
	if l == "" {
		return u.String() // from here it is no longer relative
	}
	if u.Fragment != "" {
		l += "#" + u.EscapedFragment()
	}
	return l
}

// pypiJSON makes the addresses of files ours.
func pypiJSON(q *request, up *upstream, raw []byte, from *url.URL) ([]byte, error) {
	if !json.Valid(raw) {
		return nil, errors.New("it is not JSON")
	}
	type file struct {
		url, sum, metaSum string
		start, end        int
	}
	var files []file
	eachString(raw, func(keys []string, start, end int) {
		if len(keys) < 3 || keys[0] != "files" {
			return
		}
		i, err := strconv.Atoi(keys[1])
		if err != nil || i < 0 || i > len(raw) {
			return
		}
		for len(files) <= i {
			files = append(files, file{})
		}
		f := &files[i]
		switch {
		case len(keys) == 3 && keys[2] == "url":
			f.url, f.start, f.end = unquote(raw[start:end]), start, end
		case len(keys) == 4 && keys[2] == "hashes" && keys[3] == "sha256":
			f.sum = unquote(raw[start:end])
		case len(keys) == 4 && (keys[2] == "core-metadata" || keys[2] == "dist-info-metadata") && keys[3] == "sha256":
			f.metaSum = unquote(raw[start:end])
		}
	})
	var ps []patch
	for _, f := range files {
		u, err := from.Parse(f.url)
		if err != nil || f.end == 0 {
			continue
		}
		l := q.link(up, u, f.sum, f.metaSum)
		if l == "" {
			l = u.String()
		}
		ps = append(ps, patch{f.start, f.end, quote(l)})
	}
	return apply(raw, ps), nil
}
