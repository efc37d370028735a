package secret

import (
	"encoding/base64"
	"errors"
	"net/http"
	"strings"
	"testing"

	"vivarium/sandbox"
)

const host = "api.example.com"

// C19: a placeholder becomes the value in headers to its host, over TLS, and
// nowhere else.
func TestRequestHeaders(t *testing.T) {
	t.Parallel()
	v := open(t)
	put(t, v, Secret{Name: "KEY", Hosts: []string{host}}, theValue)
	put(t, v, Secret{Name: "OTHER", Hosts: []string{"other.example"}}, "value-of-other")
	b := bind(t, v, BindSpec{Uses: []Use{{Name: "KEY"}, {Name: "OTHER"}}})
	ph, other := b.Environment().Vars()["KEY"], b.Environment().Vars()["OTHER"]
	fill := func(r *http.Request) *http.Request {
		r.Header = http.Header{
			"Authorization": {"Bearer " + ph}, "X-Two": {ph + "," + ph, "second " + ph}, "X-Other": {other},
			"X-" + ph: {"name"}, "X-Part": {ph[:len(ph)-1]}, "Cookie": {"t=" + ph + "; u=1"},
		}
		r.Trailer = http.Header{"T": {ph}}
		return r
	}
	r := fill(request(t, host, "/p/"+ph+"?q="+ph+"#"+ph, nil))
	path, raw := r.URL.Path, r.URL.RawQuery
	if err := b.Request(host, r); err != nil {
		t.Fatal(err)
	}
	if got := r.Header.Get("Authorization"); got != "Bearer "+theValue {
		t.Error("not in Authorization")
	}
	if two := r.Header["X-Two"]; two[0] != theValue+","+theValue || two[1] != "second "+theValue {
		t.Error("not in every value")
	}
	if r.Header.Get("Cookie") != "t="+theValue+"; u=1" {
		t.Error("not in Cookie")
	}
	if r.Header.Get("X-Other") != other {
		t.Error("another host's secret")
	}
	if r.Header["X-"+ph] == nil || r.Header.Get("X-Part") != ph[:len(ph)-1] || r.Trailer.Get("T") != ph {
		t.Error("a name, a part or a trailer was changed")
	}
	if r.URL.Path != path || r.URL.RawQuery != raw || r.URL.Fragment != ph {
		t.Error("the URL was changed")
	}
	if r.Header.Get("Accept-Encoding") != "identity" {
		t.Error("a compressed answer could not be read")
	}

	// where nothing happens
	for what, c := range map[string]struct {
		host string
		r    *http.Request
	}{
		"another host":  {"evil.example", request(t, "evil.example", "/", nil)},
		"its subdomain": {"x." + host, request(t, "x."+host, "/", nil)},
		"no TLS":        {host, func() *http.Request { r := request(t, host, "/", nil); r.TLS = nil; return r }()},
	} {
		fill(c.r)
		if err := b.Request(c.host, c.r); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if c.r.Header.Get("Authorization") != "Bearer "+ph || c.r.Header.Get("Accept-Encoding") != "" {
			t.Errorf("%s: changed", what)
		}
	}
	o := fill(request(t, "other.example", "/", nil))
	if err := b.Request("other.example", o); err != nil || o.Header.Get("X-Other") != "value-of-other" || o.Header.Get("Authorization") != "Bearer "+ph {
		t.Errorf("the other host: %v", err)
	}
	// the connection says one host, the request another
	for what, change := range map[string]func(*http.Request){
		"Host": func(r *http.Request) { r.Host = "evil.example" }, "no Host": func(r *http.Request) { r.Host = "" },
		"TLS": func(r *http.Request) { r.TLS.ServerName = "evil.example" }, "no name": func(r *http.Request) { r.TLS.ServerName = "" },
	} {
		r := fill(request(t, host, "/", nil))
		change(r)
		if err := b.Request(host, r); !errors.Is(err, sandbox.Denied) || r.Header.Get("Authorization") != "Bearer "+ph {
			t.Errorf("%s of another host: %v", what, err)
		}
	}
	p := fill(request(t, host, "/", nil))
	p.Host = strings.ToUpper(host) + ":443"
	if err := b.Request(host, p); err != nil || p.Header.Get("Authorization") != "Bearer "+theValue {
		t.Errorf("host with a port: %v", err)
	}
}

func TestRequestBasic(t *testing.T) {
	t.Parallel()
	v := open(t)
	put(t, v, Secret{Name: "KEY", Hosts: []string{host}}, theValue)
	b := bind(t, v, BindSpec{Uses: []Use{{Name: "KEY"}}})
	ph := b.Environment().Vars()["KEY"]
	enc := base64.StdEncoding.EncodeToString
	for _, c := range []struct{ in, want string }{
		{"Basic " + enc([]byte("x-access-token:"+ph)), "Basic " + enc([]byte("x-access-token:"+theValue))},
		{"Basic " + enc([]byte(ph+":")), "Basic " + enc([]byte(theValue+":"))},
		{"basic  " + enc([]byte(ph+":"+ph)), "basic " + enc([]byte(theValue+":"+theValue))},
		{"Basic " + strings.TrimRight(enc([]byte("u:"+ph)), "="), "Basic " + enc([]byte("u:"+theValue))},
		{"Basic " + enc([]byte("u:p")), "Basic " + enc([]byte("u:p"))},
		{"Basic !!!", "Basic !!!"},
		{"Basic", "Basic"},
		{"Basic " + ph, "Basic " + theValue}, // made by hand: a header like any other
		{"Digest " + enc([]byte("u:"+ph)), "Digest " + enc([]byte("u:"+ph))},
	} {
		r := request(t, host, "/", map[string]string{"Authorization": c.in})
		if err := b.Request(host, r); err != nil || r.Header.Get("Authorization") != c.want {
			t.Errorf("%q: not what it should be, %v", c.in, err)
		}
	}
	// in another header it is no credentials
	in := enc([]byte("u:" + ph))
	r := request(t, host, "/", map[string]string{"X": "Basic " + in})
	if err := b.Request(host, r); err != nil || r.Header.Get("X") != "Basic "+in {
		t.Errorf("not Authorization: %v", err)
	}
}

func TestRequestQuery(t *testing.T) {
	t.Parallel()
	v := open(t)
	put(t, v, Secret{Name: "KEY", Hosts: []string{host}, Query: true}, "a&b=c d%+/é")
	b := bind(t, v, BindSpec{Uses: []Use{{Name: "KEY"}}})
	ph := b.Environment().Vars()["KEY"]
	r := request(t, host, "/"+ph+"?x=1&key="+ph+"&bad=%zz", nil)
	if err := b.Request(host, r); err != nil {
		t.Fatal(err)
	}
	if r.URL.RawQuery != "x=1&key=a%26b%3Dc+d%25%2B%2F%C3%A9&bad=%zz" || r.URL.Path != "/"+ph {
		t.Errorf("%s", r.URL)
	}
	if q := r.URL.Query(); q.Get("key") != "a&b=c d%+/é" || q.Has("b") {
		t.Errorf("%v", q)
	}
}

func TestRequestBounds(t *testing.T) {
	t.Parallel()
	v := open(t)
	put(t, v, Secret{Name: "KEY", Hosts: []string{host}, Query: true}, strings.Repeat("v", MaxBound))
	b := bind(t, v, BindSpec{Uses: []Use{{Name: "KEY"}}})
	ph := b.Environment().Vars()["KEY"]
	many := strings.Repeat(ph, maxPutIn/MaxBound+1)
	for what, r := range map[string]*http.Request{
		"header": request(t, host, "/", map[string]string{"X": many}),
		"query":  request(t, host, "/?"+many, nil),
		"basic":  request(t, host, "/", map[string]string{"Authorization": "Basic " + base64.StdEncoding.EncodeToString([]byte("u:"+many))}),
	} {
		if err := b.Request(host, r); !errors.Is(err, sandbox.Exhausted) || strings.Contains(err.Error(), "vvvv") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestHeaderRules(t *testing.T) {
	t.Parallel()
	v := open(t)
	put(t, v, Secret{Name: "KEY", Hosts: []string{"*.example.com"}}, theValue)
	put(t, v, Secret{Name: "USER"}, "robot-user")
	b := bind(t, v, BindSpec{
		Headers: []sandbox.HeaderRule{
			{Domain: "*.example.com", Headers: map[string]string{"authorization": "Bearer ${KEY}", "X-Team": "all"}},
			{Domain: host, Headers: map[string]string{"X-Team": "${USER} for $$5 $x"}},
		},
	})
	if len(b.Environment().Vars()) != 0 {
		t.Error("a secret of a rule has a variable")
	}
	r := request(t, host, "/", map[string]string{"Authorization": "mine", "X-Team": "mine"})
	r.Header.Add("Authorization", "mine too")
	if err := b.Request(host, r); err != nil {
		t.Fatal(err)
	}
	if got := r.Header["Authorization"]; len(got) != 1 || got[0] != "Bearer "+theValue {
		t.Error("not set")
	}
	if got := r.Header.Get("X-Team"); got != "robot-user for $5 $x" {
		t.Errorf("the later rule: %q", got)
	}
	q := request(t, "www.example.com", "/", nil)
	if err := b.Request("www.example.com", q); err != nil || q.Header.Get("X-Team") != "all" {
		t.Errorf("%v", err)
	}
	plain := request(t, host, "/", nil)
	plain.TLS = nil
	if err := b.Request(host, plain); err != nil || len(plain.Header) != 0 {
		t.Errorf("without TLS: %v", err)
	}
	// what comes back is not the value, nor something that would be replaced by it
	got := scrubbed(t, b, host, theValue+" robot-user")
	if strings.Contains(got, theValue) || strings.Contains(got, "robot-user") {
		t.Errorf("%q", got)
	}
	back := request(t, host, "/", map[string]string{"X-Mine": got})
	if err := b.Request(host, back); err != nil || strings.Contains(back.Header.Get("X-Mine"), theValue) {
		t.Errorf("a placeholder of a rule's secret was replaced: %v", err)
	}
	// a value that no header can have, and a secret that is gone
	put(t, v, Secret{Name: "USER"}, "two\r\nEvil: lines")
	if err := b.Request(host, request(t, host, "/", nil)); !errors.Is(err, sandbox.Denied) || strings.Contains(err.Error(), "Evil") {
		t.Errorf("CRLF in a rule's secret: %v", err)
	}
	if err := b.Request("www.example.com", request(t, "www.example.com", "/", nil)); err != nil {
		t.Errorf("another domain: %v", err)
	}
	if err := v.Delete(t.Context(), "a", "KEY"); err != nil {
		t.Fatal(err)
	}
	if err := b.Request("www.example.com", request(t, "www.example.com", "/", nil)); !errors.Is(err, sandbox.Denied) {
		t.Errorf("a secret that is gone: %v", err)
	}
}

func TestTemplate(t *testing.T) {
	t.Parallel()
	value := func(n string) (string, bool) { return "<" + n + ">", n != "NONE" }
	for in, want := range map[string]string{
		"": "", "x": "x", "${A}": "<A>", "a${A}b${_b1}c": "a<A>b<_b1>c", "$${A}": "${A}", "$$$$": "$$", "$": "$", "a$b": "a$b", "${A}}": "<A>}", "}{": "}{",
	} {
		p, err := parseTemplate(in)
		if got, ok := p.expand(value); err != nil || !ok || got != want {
			t.Errorf("%q: %q, %v", in, got, err)
		}
	}
	for _, in := range []string{"${", "${}", "${A", "${A B}", "${1}", "${A${B}}"} {
		if _, err := parseTemplate(in); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("%q: %v", in, err)
		}
	}
	p, _ := parseTemplate("${NONE}")
	if _, ok := p.expand(value); ok {
		t.Error("a secret that there is not")
	}
}

func TestCovers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		host, rule string
		want       bool
	}{
		{"a.x", "a.x", true}, {"*.x.y", "a.x.y", true}, {"*.x.y", "*.x.y", true}, {"*.x.y", "*.a.x.y", true}, {"*.x.y", "x.y", false},
		{"*.x.y", "*.y", false}, {"a.x", "*.a.x", false}, {"*.x.y", "*.ax.y", false}, {"*.x.y", "*", false},
	} {
		if got := covers([]string{c.host}, c.rule); got != c.want {
			t.Errorf("%s covers %s: %v", c.host, c.rule, got)
		}
	}
}

func FuzzBasic(f *testing.F) {
	const ph, val = "viv_secret_0123456789", "the real value"
	w := newSwaps([]swap{{ph, val}})
	f.Add("Basic " + base64.StdEncoding.EncodeToString([]byte("u:"+ph)))
	f.Add("Basic dTpw")
	f.Add("basic =")
	f.Fuzz(func(t *testing.T, in string) {
		out, n, ok := basic(in, w)
		if !ok {
			return
		}
		_, tok, _ := strings.Cut(out, " ")
		raw, err := base64.StdEncoding.DecodeString(tok)
		if err != nil || n < len(val) || !strings.Contains(string(raw), val) || strings.Contains(string(raw), ph) || strings.ContainsAny(out, "\r\n") && !strings.ContainsAny(in, "\r\n") {
			t.Errorf("%q became %q", in, out)
		}
	})
}
