package tunnel

import (
	"encoding/base64"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
)

// Names that connect tokens go by.
const (
	QueryParam  = "vivarium_token"
	CookieName  = "__Host-vivarium"      // the prefix keeps every other host from setting it
	UserHeader  = "X-Verified-User-Data" // as in Modal: what a program inside may trust
	TokenPrefix = "vivct_"               // so that scanners for leaked secrets can find ours
)

// ownPrefixes begin every secret of ours: connect tokens, and tokens of the API,
// which a client may send here by mistake.
var ownPrefixes = []string{TokenPrefix, "viv_"}

func ours(secret string) bool {
	for _, p := range ownPrefixes {
		if strings.HasPrefix(secret, p) {
			return true
		}
	}
	return false
}

// spelling is a header's name as programs that make variables of it tell it apart
// (CGI, RFC 3875 section 4.1.18, and WSGI): X_Verified_User_Data is to them what
// X-Verified-User-Data is.
func spelling(name string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r >= 'A' && r <= 'Z':
			return r + 'a' - 'A'
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		}
		return '-'
	}, name)
}

// forged are headers that say who the client is, or what a proxy did. Programs
// trust them, so that they must not come from a client.
var forged = map[string]bool{
	"forwarded": true, "x-real-ip": true, "true-client-ip": true, "client-ip": true, "x-client-ip": true,
	"x-cluster-client-ip": true, "cf-connecting-ip": true, "fastly-client-ip": true, "fly-client-ip": true,
	"x-original-forwarded-for": true, "x-original-url": true, "x-original-host": true, "x-rewrite-url": true,
	"x-host": true, "x-url-scheme": true, "x-scheme": true, "front-end-https": true,
	"proxy":           true, // CGI makes HTTP_PROXY of it
	"x-envoy-peer-id": true, "x-remote-user": true, "remote-user": true, "x-ssl-client-cert": true, "x-client-cert": true,
}

func isForged(name string) bool {
	s := spelling(name)
	return forged[s] || strings.HasPrefix(s, "x-forwarded") || strings.HasPrefix(s, "x-vivarium") || strings.HasPrefix(s, "x-verified-user")
}

// cleanRequest takes out of a request what must not go inside, and puts in what
// we know of the client. in is the request as it came.
func cleanRequest(out *http.Request, host string, from netip.Addr, user string) {
	for name := range out.Header {
		if isForged(name) {
			delete(out.Header, name)
		}
	}
	out.Trailer = nil
	var keep []string
	for _, v := range out.Header["Authorization"] {
		if !carriesOurs(v) {
			keep = append(keep, v)
		}
	}
	setAll(out.Header, "Authorization", keep)
	keep = nil
	for _, v := range out.Header["Cookie"] {
		if v = dropCookie(v); v != "" {
			keep = append(keep, v)
		}
	}
	setAll(out.Header, "Cookie", keep)
	if v := out.Header.Get("Referer"); v != "" {
		if base, query, ok := strings.Cut(v, "?"); ok {
			if q := dropParam(query); q != query {
				out.Header.Set("Referer", join(base, q))
			}
		}
	}
	out.URL.RawQuery = dropParam(out.URL.RawQuery)
	h := out.Header
	h.Set("X-Forwarded-For", from.String())
	h.Set("X-Forwarded-Host", host)
	h.Set("X-Forwarded-Proto", "https")
	h.Set("X-Real-Ip", from.String())
	node := from.String()
	if from.Is6() {
		node = `"[` + node + `]"`
	}
	h.Set("Forwarded", "for="+node+`;host="`+host+`";proto=https`)
	if user != "" {
		h.Set(UserHeader, user)
	}
}

func setAll(h http.Header, name string, values []string) {
	if len(values) == 0 {
		delete(h, name)
		return
	}
	h[name] = values
}

// bearer is the credential of a Bearer header.
func bearer(v string) string {
	scheme, secret, _ := strings.Cut(strings.TrimSpace(v), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(secret)
}

// carriesOurs says whether an Authorization header has a secret of ours in it, as
// a bearer or as the password or user of Basic.
func carriesOurs(v string) bool {
	scheme, rest, _ := strings.Cut(strings.TrimSpace(v), " ")
	rest = strings.TrimSpace(rest)
	if strings.EqualFold(scheme, "Basic") {
		b, err := base64.StdEncoding.DecodeString(rest)
		if err != nil {
			b, _ = base64.RawStdEncoding.DecodeString(rest)
		}
		user, pass, _ := strings.Cut(string(b), ":")
		return ours(user) || ours(pass)
	}
	return ours(rest) || ours(v)
}

// dropCookie takes our cookie out of a Cookie header.
func dropCookie(v string) string {
	if !strings.Contains(strings.ToLower(v), strings.ToLower(CookieName)) {
		return v
	}
	var keep []string
	for _, c := range strings.Split(v, ";") {
		name, _, _ := strings.Cut(c, "=")
		if !strings.EqualFold(strings.TrimSpace(name), CookieName) {
			keep = append(keep, strings.TrimSpace(c))
		}
	}
	return strings.Join(keep, "; ")
}

// cookies are the values of our cookie in a request.
func cookies(h http.Header) []string {
	var out []string
	for _, v := range h["Cookie"] {
		for _, c := range strings.Split(v, ";") {
			if name, value, ok := strings.Cut(strings.TrimSpace(c), "="); ok && name == CookieName {
				out = append(out, value)
			}
		}
	}
	return out
}

// splitQuery calls fn for each parameter, with whether it is ours and its value.
// Both & and ; part them: some programs inside take either.
func splitQuery(q string, fn func(raw string, sep byte, ours bool, value string)) {
	for q != "" {
		raw, sep := q, byte(0)
		if i := strings.IndexAny(q, "&;"); i >= 0 {
			raw, sep, q = q[:i], q[i], q[i+1:]
		} else {
			q = ""
		}
		key, value, _ := strings.Cut(raw, "=")
		k, err := url.QueryUnescape(key)
		if err != nil {
			k = key
		}
		v, err := url.QueryUnescape(value)
		if err != nil {
			v = ""
		}
		fn(raw, sep, strings.EqualFold(k, QueryParam), v)
	}
}

// dropParam takes our parameter out of a query and leaves the rest as it is.
func dropParam(q string) string {
	var b strings.Builder
	last, dropped := byte(0), false
	splitQuery(q, func(raw string, sep byte, ours bool, _ string) {
		if ours {
			dropped = true
			return
		}
		if b.Len() > 0 || last != 0 {
			b.WriteByte(last)
		}
		b.WriteString(raw)
		last = sep
	})
	if !dropped {
		return q
	}
	return b.String()
}

// params are the values of our parameter.
func params(q string) []string {
	if q == "" {
		return nil
	}
	var out []string
	splitQuery(q, func(_ string, _ byte, ours bool, v string) {
		if ours {
			out = append(out, v)
		}
	})
	return out
}

func join(base, query string) string {
	if query == "" {
		return base
	}
	return base + "?" + query
}

// cleanResponse keeps a page to its own host: cookies go to no other, and it
// changes nothing that is kept for others of the domain.
func cleanResponse(h http.Header) {
	if set := h["Set-Cookie"]; len(set) > 0 {
		var keep []string
		for _, c := range set {
			if c = hostOnly(c); c != "" {
				keep = append(keep, c)
			}
		}
		setAll(h, "Set-Cookie", keep)
	}
	delete(h, "Set-Cookie2")
	delete(h, "Clear-Site-Data") // its cookies are those of the whole registrable domain
	delete(h, "Alt-Svc")         // this listener is the only way
}

// hostOnly takes the Domain attribute from a Set-Cookie header (RFC 6265 section
// 5.2), so that the domain behaves as a public suffix does; "" for our own cookie.
func hostOnly(c string) string {
	parts := strings.Split(c, ";")
	name, _, _ := strings.Cut(parts[0], "=")
	if strings.EqualFold(strings.TrimSpace(name), CookieName) {
		return ""
	}
	keep := parts[:1]
	for _, p := range parts[1:] {
		if a, _, _ := strings.Cut(p, "="); !strings.EqualFold(strings.TrimSpace(a), "Domain") {
			keep = append(keep, p)
		}
	}
	return strings.Join(keep, ";")
}
