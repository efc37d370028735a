package secret

import (
	"encoding/base64"
	"net"
	"net/http"
	"net/url"
	"strings"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

// maxPutIn bounds the bytes of values that one request gets: a request full of
// placeholders would otherwise make its proxy hold a multiple of it.
const maxPutIn = 256 << 10

func queryEscape(s string) string { return url.QueryEscape(s) }

// Request puts values in place of placeholders in r's header values and, of
// secrets that allow it, in its query; then it sets the headers of the rules. The
// path, the body, the trailers and the names of headers are left alone, and so is
// everything of a request that did not come over TLS (r.TLS is nil: what the
// request says of itself counts for nothing) or that goes to a host without
// secrets. A placeholder of a secret of another host stays what it is.
//
// host is the one that the proxy will connect to, checked and in canonical
// spelling. Denied: r says another host in its TLS or its Host header, or one of
// its headers' secrets is gone. Exhausted: too many placeholders. After an error r
// must not be sent. No error has a value in it.
func (b *Binding) Request(host string, r *http.Request) error {
	name, ok := policy.Name(host)
	if !ok || r.TLS == nil || !matchAny(b.saved.Hosts, name) {
		return nil
	}
	if sni, ok := policy.Name(r.TLS.ServerName); !ok || sni != name {
		return sandbox.Denied.Errorf("the request is for %s, its TLS connection for %q", name, clip(r.TLS.ServerName))
	}
	if h, ok := policy.Name(hostOf(r.Host)); !ok || h != name {
		return sandbox.Denied.Errorf("the request is for %s, its Host header for %q", name, clip(r.Host))
	}
	p := b.plan(name)
	if p.broken != "" {
		return sandbox.Denied.Errorf("header %s for %s needs a secret that was deleted, or is no longer for that host", p.broken, name)
	}
	budget := maxPutIn
	spend := func(n int) bool { budget -= n; return budget >= 0 }
	for k, vs := range r.Header {
		for i, v := range vs {
			if strings.EqualFold(k, "Authorization") {
				if s, n, ok := basic(v, p.headers); ok {
					if !spend(n) {
						return tooMany(name)
					}
					vs[i] = s
					continue
				}
			}
			if n := p.headers.in(v); n > 0 {
				if !spend(n) {
					return tooMany(name)
				}
				vs[i] = p.headers.replace(v)
			}
		}
	}
	if r.URL != nil {
		if n := p.query.in(r.URL.RawQuery); n > 0 {
			if !spend(n) {
				return tooMany(name)
			}
			r.URL.RawQuery = p.query.replace(r.URL.RawQuery)
		}
	}
	if r.Header == nil {
		r.Header = http.Header{}
	}
	for _, s := range p.rules {
		r.Header[s.name] = []string{s.value}
	}
	if p.scrub != nil {
		r.Header["Accept-Encoding"] = []string{"identity"}
	}
	return nil
}

func tooMany(host string) error {
	return sandbox.Exhausted.Errorf("the request to %s has more placeholders than %d bytes of values can replace", host, maxPutIn)
}

// hostOf is a Host header without its port.
func hostOf(s string) string {
	if h, _, err := net.SplitHostPort(s); err == nil {
		return h
	}
	return s
}

// maxBasic bounds credentials: no server takes longer headers.
const maxBasic = 64 << 10

// basic replaces placeholders in the credentials of Basic authentication (RFC
// 7617), and says how many bytes of values that put in. False: v is not that, or
// there are none in it.
func basic(v string, w swaps) (string, int, bool) {
	scheme, token, ok := strings.Cut(v, " ")
	if !ok || !strings.EqualFold(scheme, "Basic") || len(token) > maxBasic {
		return "", 0, false
	}
	token = strings.TrimRight(strings.Trim(token, " "), "=")
	enc := base64.RawStdEncoding
	if strings.ContainsAny(token, "-_") { // wrong, and met
		enc = base64.RawURLEncoding
	}
	raw, err := enc.DecodeString(token)
	if err != nil {
		return "", 0, false
	}
	n := w.in(string(raw))
	if n == 0 {
		return "", 0, false
	}
	if n > maxPutIn {
		return "", n, true // refused by the caller
	}
	return scheme + " " + base64.StdEncoding.EncodeToString([]byte(w.replace(string(raw)))), n, true
}
