package tunnel

import (
	"crypto/rand"
	"encoding/base64"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"vivarium/sandbox"
)

// TestF09Inside: no credential of ours and nothing forged comes inside, judged by
// what the program there got.
func TestF09Inside(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	s := &seen{}
	l.serve("sb-1", 80, s.ServeHTTP)
	public := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 80})
	tokenURL, token, _, err := l.m.Connect(t.Context(), "a", "sb-1", 80, `{"user":"ann"}`, 0)
	if err != nil {
		t.Fatal(err)
	}
	const apiToken = "viv_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
	basic := func(user, pass string) string {
		return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+pass))
	}
	inside := func(what string) {
		t.Helper()
		r := s.request()
		var b strings.Builder
		if err := r.Header.Write(&b); err != nil {
			t.Fatal(err)
		}
		all := r.RequestURI + "\n" + b.String()
		all += "\n" + base64Decoded(r.Header.Get("Authorization"))
		for _, bad := range []string{token, apiToken, CookieName, QueryParam, TokenPrefix, "forged", "203.0.113.66"} {
			if strings.Contains(strings.ToLower(all), strings.ToLower(bad)) {
				t.Errorf("%s: %q came inside: %s", what, bad, all)
			}
		}
	}
	// each form of each credential, through a tunnel that asks for it and one that
	// does not
	for _, c := range []struct {
		what, path string
		header     []string
		authorize  bool
	}{
		{"bearer", "/", []string{"Authorization", "Bearer " + token}, true},
		{"bearer, odd", "/", []string{"Authorization", "bearer  " + token + " "}, true},
		{"cookie", "/", []string{"Cookie", "a=1; " + CookieName + "=" + token + "; b=2"}, true},
		{"two cookie headers", "/", []string{"Cookie", "a=1", "Cookie", CookieName + "=" + token}, true},
		{"query beside a bearer", "/?x=1&" + QueryParam + "=" + token + "&y=2", []string{"Authorization", "Bearer " + token}, true},
		{"query, escaped", "/?vivarium%5ftoken=" + token, []string{"Authorization", "Bearer " + token}, true},
		{"query, semicolon", "/?a=1;" + QueryParam + "=" + token, []string{"Authorization", "Bearer " + token}, true},
		{"query in a Referer", "/", []string{"Authorization", "Bearer " + token, "Referer", public.URL + "/?" + QueryParam + "=" + token + "&z=1"}, true},
		{"as a password", "/", []string{"Authorization", basic("u", token), "Cookie", CookieName + "=" + token}, true},
		{"token of the API", "/", []string{"Authorization", "Bearer " + apiToken, "Cookie", CookieName + "=" + token}, true},
		{"token of the API as a password", "/", []string{"Authorization", basic(apiToken, ""), "Cookie", CookieName + "=" + token}, true},
	} {
		n := s.count()
		if res, _ := l.get(l.client(), tokenURL+c.path, c.header...); res.StatusCode != 200 {
			t.Errorf("%s: %s", c.what, res.Status)
			continue
		}
		inside(c.what)
		if u := s.request().Header[UserHeader]; !slices.Equal(u, []string{`{"user":"ann"}`}) {
			t.Errorf("%s: metadata %q", c.what, u)
		}
		if res, _ := l.get(l.client("h2"), public.URL+c.path, c.header...); res.StatusCode != 200 {
			t.Errorf("%s, public: %s", c.what, res.Status)
			continue
		}
		inside(c.what + ", public")
		if u := s.request().Header[UserHeader]; u != nil {
			t.Errorf("%s, public: metadata %q", c.what, u)
		}
		if s.count() != n+2 {
			t.Errorf("%s: %d requests", c.what, s.count()-n)
		}
	}
	// what is the program's own stays
	l.get(l.client(), public.URL+"/?a=1&b=%zz;c=3", "Authorization", "Bearer of-the-app", "Cookie", "session=1; vivarium=2")
	r := s.request()
	if r.Header.Get("Authorization") != "Bearer of-the-app" || r.Header.Get("Cookie") != "session=1; vivarium=2" || r.RequestURI != "/?a=1&b=%zz;c=3" {
		t.Errorf("the program's own: %s %v", r.RequestURI, r.Header)
	}
	// forged
	for _, h := range []string{
		UserHeader, "x-verified-user-data", "X_Verified_User_Data", "X-Verified_User-Data", "X.Verified.User.Data", "X-Verified-User-Id",
		"X-Vivarium-Tenant", "X_Vivarium_Tenant", "X-Vivarium",
		"X-Forwarded-For", "X_Forwarded_For", "X-Forwarded-Proto", "X-Forwarded-Host", "X-Forwarded-Port", "X-Forwarded-Prefix", "X-Forwarded-User", "X-Forwarded",
		"Forwarded", "X-Real-Ip", "X_Real_IP", "True-Client-Ip", "Cf-Connecting-Ip", "Proxy", "X-Original-Url", "X-Rewrite-Url", "Remote-User",
	} {
		for _, p := range []string{"h1", "h2"} {
			for _, u := range []string{public.URL, tokenURL} {
				if res, _ := l.get(l.client(p), u, h, "203.0.113.66 forged", "Authorization", "Bearer "+token); res.StatusCode != 200 {
					t.Errorf("%s: %s", h, res.Status)
				}
				inside(h + " by " + p)
			}
		}
	}
	// named as a header of the connection, so that a proxy drops the one we set
	l.get(l.client(), tokenURL, "Authorization", "Bearer "+token, "Connection", UserHeader+", X-Forwarded-For")
	r = s.request()
	if r.Header.Get(UserHeader) == "" || r.Header.Get("X-Forwarded-For") != "127.0.0.1" {
		t.Errorf("dropped by Connection: %v", r.Header)
	}
	// in a trailer
	post, err := http.NewRequest("POST", public.URL, struct{ *strings.Reader }{strings.NewReader("x")})
	if err != nil {
		t.Fatal(err)
	}
	post.Trailer = http.Header{UserHeader: {"forged"}}
	l.do(l.client(), post)
	if r := s.request(); len(r.Trailer) > 0 {
		t.Errorf("trailer: %v", r.Trailer)
	}
	// ours, true
	r = s.request()
	host := strings.TrimPrefix(public.URL, "https://")
	for h, want := range map[string]string{
		"X-Forwarded-For": "127.0.0.1", "X-Forwarded-Proto": "https", "X-Forwarded-Host": host, "X-Real-Ip": "127.0.0.1",
		"Forwarded": `for=127.0.0.1;host="` + host + `";proto=https`,
	} {
		if got := r.Header[h]; !slices.Equal(got, []string{want}) {
			t.Errorf("%s: %q, want %q", h, got, want)
		}
	}
	// an upgrade to something that could carry requests past us
	for _, up := range []string{"h2c", "TLS/1.2", "foo"} {
		l.get(l.client(), public.URL, "Connection", "Upgrade, HTTP2-Settings", "Upgrade", up, "HTTP2-Settings", "AAMAAABkAAQAAP__")
		if r := s.request(); r.Header.Get("Upgrade") != "" || r.Header.Get("Connection") != "" {
			t.Errorf("upgrade to %s came inside: %v", up, r.Header)
		}
	}
	if log := l.log.String(); strings.Contains(log, token) || strings.Contains(log, TokenPrefix) || strings.Contains(log, apiToken) {
		t.Errorf("a token is in the log: %s", log)
	}
}

func base64Decoded(v string) string {
	_, s, _ := strings.Cut(v, " ")
	b, _ := base64.StdEncoding.DecodeString(s)
	return string(b)
}

// TestF09Outside: a page cannot set or clear what is kept for other hosts.
func TestF09Outside(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.serve("sb-1", 80, func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		for _, c := range []string{
			"plain=1; Path=/; HttpOnly",
			"wide=1; Domain=" + domain + "; Secure",
			"dot=1; domain=." + domain,
			"above=1; DOMAIN = example.test ;Path=/",
			"tab=1;\tDomain=" + domain,
			"empty=1; Domain",
			CookieName + "=stolen; Path=/; Secure",
			" " + strings.ToLower(CookieName) + " =stolen",
		} {
			h.Add("Set-Cookie", c)
		}
		h.Set("Clear-Site-Data", `"cookies"`)
		h.Set("Alt-Svc", `h2="evil.example:443"`)
		if r.URL.Path == "/hints" {
			w.WriteHeader(http.StatusEarlyHints)
		}
		w.WriteHeader(200)
	})
	tun := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 80})
	for _, path := range []string{"/", "/hints"} {
		res, _ := l.get(l.client(), tun.URL+path)
		want := []string{"plain=1; Path=/; HttpOnly", "wide=1; Secure", "dot=1", "above=1;Path=/", "tab=1", "empty=1"}
		if got := res.Header["Set-Cookie"]; !slices.Equal(got, want) {
			t.Errorf("%s: cookies %q, want %q", path, got, want)
		}
		if res.Header.Get("Clear-Site-Data")+res.Header.Get("Alt-Svc") != "" {
			t.Errorf("%s: %v", path, res.Header)
		}
	}
	// what a browser's jar makes of it
	jar := newJar(t)
	c := l.client()
	c.Jar = jar
	l.get(c, tun.URL)
	other, err := url.Parse(strings.Replace(tun.URL, tun.Name, "other", 1))
	if err != nil {
		t.Fatal(err)
	}
	own, _ := url.Parse(tun.URL)
	if len(jar.Cookies(own)) < 3 || len(jar.Cookies(other)) != 0 {
		t.Errorf("own host %v, another tunnel %v", jar.Cookies(own), jar.Cookies(other))
	}
}

func TestTokens(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	s := &seen{}
	l.serve("sb-1", 80, s.ServeHTTP)
	l.serve("sb-1", 81, s.ServeHTTP)
	l.serve("sb-2", 80, s.ServeHTTP)
	connect := func(id string, port uint16, life time.Duration) (string, string, time.Time) {
		t.Helper()
		u, token, expires, err := l.m.Connect(t.Context(), "a", id, port, "me", life)
		if err != nil {
			t.Fatal(err)
		}
		return u, token, expires
	}
	u, token, expires := connect("sb-1", 80, 0)
	if end := l.boxes["sb-1"].Deadline; expires.Before(end) || expires.After(end.Add(2*time.Second)) {
		t.Errorf("lives until %v, the sandbox until %v", expires, end)
	}
	u2, short, expires := connect("sb-1", 80, time.Minute)
	if u2 != u || time.Until(expires) > time.Minute+2*time.Second {
		t.Errorf("a second token: %s, until %v", u2, expires)
	}
	_, otherPort, _ := connect("sb-1", 81, 0)
	_, otherBox, _ := connect("sb-2", 80, 0)
	c := l.client()
	bearer := func(token string) int {
		t.Helper()
		res, body := l.get(c, u, "Authorization", "Bearer "+token)
		if res.StatusCode == 401 && (body != "" || res.Header.Get("WWW-Authenticate") != "Bearer") {
			t.Errorf("401 says more: %q %v", body, res.Header)
		}
		return res.StatusCode
	}
	for _, ok := range []string{token, short} {
		if code := bearer(ok); code != 200 {
			t.Errorf("%d", code)
		}
	}
	flip := []byte(token)
	flip[len(flip)-5] ^= 1
	for what, bad := range map[string]string{
		"none": "", "of another port": otherPort, "of another sandbox": otherBox, "changed": string(flip), "cut": token[:len(token)-4],
		"longer": token + "AAAA", "prefix alone": TokenPrefix, "long": TokenPrefix + strings.Repeat("A", 5000),
	} {
		if code := bearer(bad); code != 401 {
			t.Errorf("%s: %d", what, code)
		}
	}
	// too late
	l.m.tokens.now = func() time.Time { return time.Now().Add(2 * time.Minute) }
	if code := bearer(short); code != 401 {
		t.Errorf("expired: %d", code)
	}
	if code := bearer(token); code != 200 {
		t.Errorf("not expired: %d", code)
	}
	l.m.tokens.now = time.Now
	if res, _ := l.get(c, u); res.StatusCode != 401 {
		t.Errorf("no token: %s", res.Status)
	}

	// a link: the cookie, and the same address without the token
	n := s.count()
	res, _ := l.get(c, u+"//evil.example/%2e?a=1&"+QueryParam+"="+token+"&b=2")
	if want := u + "//evil.example/%2e?a=1&b=2"; res.StatusCode != http.StatusFound || res.Header.Get("Location") != want || s.count() != n {
		t.Errorf("link: %s to %s, want %s", res.Status, res.Header.Get("Location"), want)
	}
	cookie := res.Cookies()[0]
	if raw := res.Header.Get("Set-Cookie"); !strings.HasPrefix(cookie.Name, "__Host-") || !cookie.Secure || !cookie.HttpOnly || cookie.SameSite != http.SameSiteLaxMode || cookie.Path != "/" || cookie.Domain != "" || strings.Contains(raw, "Domain") {
		t.Errorf("cookie %s", raw)
	}
	if res.Header.Get("Cache-Control") != "no-store" || res.Header.Get("Referrer-Policy") != "no-referrer" {
		t.Errorf("header of the redirect: %v", res.Header)
	}
	c.Jar, c.CheckRedirect = newJar(t), nil
	if res, body := l.get(c, u+"/page?"+QueryParam+"="+token); res.StatusCode != 200 || body != "GET /page " {
		t.Errorf("browser: %s %q", res.Status, body)
	}
	if res, _ := l.get(c, u+"/again"); res.StatusCode != 200 || s.request().Header.Get(UserHeader) != "me" {
		t.Errorf("browser again: %s", res.Status)
	}
	if res, _ := l.get(l.client(), u+"/?"+QueryParam+"="+otherBox); res.StatusCode != 401 || len(res.Cookies()) > 0 {
		t.Errorf("wrong link: %s", res.Status)
	}
	// not a page: no redirect that would lose the body
	post, err := http.NewRequest("POST", u+"/?"+QueryParam+"="+token, strings.NewReader("body"))
	if err != nil {
		t.Fatal(err)
	}
	if res, body := l.do(l.client(), post); res.StatusCode != 200 || body != "POST / body" {
		t.Errorf("post: %s %q", res.Status, body)
	}

	// pages of other tunnels, which browsers take for the same site, cannot use
	// the cookie
	have := CookieName + "=" + token
	own := u
	for _, c := range []struct {
		what   string
		method string
		header []string
		ok     bool
	}{
		{"the page's own script", "POST", []string{"Sec-Fetch-Site", "same-origin", "Origin", own}, true},
		{"the user", "GET", []string{"Sec-Fetch-Site", "none", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document"}, true},
		{"a link", "GET", []string{"Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document"}, true},
		{"another tunnel's fetch", "GET", []string{"Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "cors", "Sec-Fetch-Dest", "empty"}, false},
		{"another tunnel's image", "GET", []string{"Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "no-cors", "Sec-Fetch-Dest", "image"}, false},
		{"another tunnel's frame", "GET", []string{"Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "iframe"}, false},
		{"another tunnel's form", "POST", []string{"Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document"}, false},
		{"another origin", "POST", []string{"Origin", "https://other." + domain}, false},
		{"an origin without TLS", "POST", []string{"Origin", strings.Replace(own, "https", "http", 1)}, false},
		{"no origin at all", "POST", []string{"Origin", "null"}, false},
	} {
		r, err := http.NewRequest(c.method, u, nil)
		if err != nil {
			t.Fatal(err)
		}
		res, _ := l.do(l.client(), r, append(c.header, "Cookie", have)...)
		if (res.StatusCode == 200) != c.ok || !c.ok && res.StatusCode != 401 {
			t.Errorf("%s: %s", c.what, res.Status)
		}
	}

	// closed: the token opens nothing any more, and the next tunnel is another
	l.end("sb-2")
	var id string
	for _, tun := range l.m.List("a", "sb-1") {
		if tun.URL == u {
			id = tun.ID
		}
	}
	if err := l.m.CloseTunnel(t.Context(), "a", id); err != nil {
		t.Fatal(err)
	}
	u3, _, _ := connect("sb-1", 80, 0)
	if res, _ := l.get(l.client(), u3, "Authorization", "Bearer "+token); u3 == u || res.StatusCode != 401 {
		t.Errorf("a token of a closed tunnel: %s", res.Status)
	}

	for _, bad := range []string{strings.Repeat("x", MaxMetadata+1), "a\nb", "é", "a\x00", " a", "a "} {
		if _, _, _, err := l.m.Connect(t.Context(), "a", "sb-1", 80, bad, 0); sandbox.KindOf(err) != sandbox.Invalid {
			t.Errorf("metadata %.10q: %v", bad, err)
		}
	}
	full := strings.Repeat("x", MaxMetadata)
	u4, long, _, err := l.m.Connect(t.Context(), "a", "sb-1", 80, full, 0)
	if err != nil {
		t.Fatal(err)
	}
	if res, _ := l.get(l.client(), u4, "Cookie", CookieName+"="+long); res.StatusCode != 200 || s.request().Header.Get(UserHeader) != full || len(long) > 4000 {
		t.Errorf("long metadata: %s, token of %d bytes", res.Status, len(long))
	}
	if _, _, _, err := l.m.Connect(t.Context(), "b", "sb-1", 80, "", 0); sandbox.KindOf(err) != sandbox.NotFound {
		t.Errorf("by another tenant: %v", err)
	}
	if strings.Contains(l.log.String(), TokenPrefix) {
		t.Error("a token is in the log")
	}
}

// TestTokenWebSocket: scripts cannot set headers there, so the query is taken,
// and goes no further.
func TestTokenWebSocket(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	s := &seen{}
	ws := echoServer()
	l.serve("sb-1", 80, func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.last = r
		s.mu.Unlock()
		ws.ServeHTTP(w, r)
	})
	_, token, _, err := l.m.Connect(t.Context(), "a", "sb-1", 80, "me", 0)
	if err != nil {
		t.Fatal(err)
	}
	tun := l.m.List("a", "sb-1")[0]
	c, err := l.dialWS(tun, "?"+QueryParam+"="+token+"&room=1", nil)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if r := s.request(); r.RequestURI != "/ws?room=1" || r.Header.Get(UserHeader) != "me" {
		t.Errorf("inside: %s %v", r.RequestURI, r.Header)
	}
	for what, h := range map[string]http.Header{
		"no token":                 nil,
		"cookie from another page": {"Cookie": {CookieName + "=" + token}, "Sec-Fetch-Site": {"same-site"}, "Sec-Fetch-Mode": {"websocket"}},
	} {
		if c, err := l.dialWS(tun, "", h); err == nil {
			c.Close()
			t.Errorf("%s: let in", what)
		}
	}
}

func TestTokenKey(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	k, err := tokenKey(dir)
	if err != nil || len(k) != keySize {
		t.Fatalf("%d bytes, %v", len(k), err)
	}
	if again, err := tokenKey(dir); err != nil || string(again) != string(k) {
		t.Errorf("another key: %v", err)
	}
	if err := writeFile(dir+"/token.key", []byte("short"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := tokenKey(dir); sandbox.KindOf(err) != sandbox.Invalid {
		t.Errorf("a broken key: %v", err)
	}
}

// FuzzRequest: whatever headers, cookies and queries hold, nothing of ours is
// left in them, and a second cleaning changes nothing.
func FuzzRequest(f *testing.F) {
	f.Add("Authorization", "Bearer vivct_x", "a=1; __Host-vivarium=vivct_x", "a=1&vivarium_token=x;b=2")
	f.Add("X_Forwarded_For", "1", "__host-VIVARIUM", "%76ivarium_token=1")
	f.Add("Referer", "https://x/?vivarium_token=1", ";;=;", "&&;;&")
	f.Fuzz(func(t *testing.T, name, value, cookie, query string) {
		r := &http.Request{Header: http.Header{name: {value}, "Cookie": {cookie}}, URL: &url.URL{RawQuery: query}}
		from := netip.MustParseAddr("2001:db8::1")
		cleanRequest(r, "h.example", from, "")
		if len(params(r.URL.RawQuery)) > 0 || len(cookies(r.Header)) > 0 {
			t.Errorf("left: %q %q", r.URL.RawQuery, r.Header["Cookie"])
		}
		for h, v := range r.Header {
			if isForged(h) && !slices.Contains([]string{"X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "X-Real-Ip", "Forwarded"}, h) {
				t.Errorf("left: %s", h)
			}
			if h == "Authorization" && (ours(bearer(v[0])) || ours(v[0])) {
				t.Errorf("left: %s", v)
			}
		}
		again := r.Clone(t.Context())
		cleanRequest(again, "h.example", from, "")
		if again.URL.RawQuery != r.URL.RawQuery || !slices.Equal(again.Header["Cookie"], r.Header["Cookie"]) {
			t.Errorf("not stable: %q %q", r.URL.RawQuery, again.URL.RawQuery)
		}
	})
}

// FuzzToken: no text but a sealed one opens anything.
func FuzzToken(f *testing.F) {
	secret := make([]byte, keySize)
	rand.Read(secret) // each of the fuzzer's processes has its own
	k, err := newTokens(secret)
	if err != nil {
		f.Fatal(err)
	}
	real := k.seal("tn-1", ticket{time.Now().Add(time.Hour), "me"})
	f.Add("tn-1", real)
	f.Add("tn-2", real)
	f.Add("tn-1", TokenPrefix)
	f.Fuzz(func(t *testing.T, id, token string) {
		if _, ok := k.open(id, token); ok && (id != "tn-1" || token != real) {
			t.Errorf("%q opens %q", token, id)
		}
	})
}

// FuzzSetCookie: no Domain attribute is left, and no cookie of ours.
func FuzzSetCookie(f *testing.F) {
	f.Add("a=1; Domain=x")
	f.Add("__Host-vivarium=1")
	f.Fuzz(func(t *testing.T, c string) {
		h := http.Header{"Set-Cookie": {c}}
		cleanResponse(h)
		for _, v := range h["Set-Cookie"] {
			if p, err := http.ParseSetCookie(v); err == nil && (p.Domain != "" || strings.EqualFold(p.Name, CookieName)) {
				t.Errorf("%q becomes %q", c, v)
			}
		}
	})
}
