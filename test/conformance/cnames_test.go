package conformance

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/sandbox"
)

// C4: a name that has a public address first and a private one then.
func c04(t *testing.T, w *world, l *lab) {
	for i, p := range []*v1.NetworkPolicy{policyOf(sandbox.NetworkPublic), policyOf(sandbox.NetworkAllowlist, "allow *.rebind.example", "allow 1.2.3.20"), policyOf(sandbox.NetworkAllowlist, "allow *")} {
		name := fmt.Sprintf("n%d.rebind.example", i)
		w.zone.flip(name, "1.2.3.20", "10.0.0.2")
		b := l.under(t, p)
		if out := b.web("-to", name+":80", "-plain", "-host", name, "-path", "/c04-first"); !strings.HasPrefix(out, "200") {
			t.Errorf("%s: the first answer is public: %s", name, out)
		}
		for range 5 {
			b.dns("udp", b.resolver()+":53", name, "A")
			if out := b.web("-to", name+":80", "-plain", "-host", name, "-path", "/c04-then"); strings.Contains(out, "from private") {
				t.Errorf("%s: %s", name, out)
			}
			if out := b.dns("tcp", b.resolver()+":53", name, "A"); strings.Contains(out, "10.0.0.2") {
				t.Errorf("%s was answered with a private address: %s", name, out)
			}
		}
		// the attacker knows the address: it is not the name's for having been answered
		b.web("-to", "10.0.0.2:80", "-plain", "-host", name, "-path", "/c04-then")
		b.web("-to", "10.0.0.2:443", "-sni", name, "-path", "/c04-then")
	}
	if got := w.site.hits(func(h hit) bool { return strings.HasPrefix(h.path, "/c04") && h.place != "internet" }); len(got) > 0 {
		t.Errorf("arrived: %v", got)
	}
}

// C5: an address that our DNS has not given this sandbox for the name.
func c05(t *testing.T, w *world, l *lab) {
	w.zone.set(t, "toctou.example", "toctou.example. 60 IN A 1.2.3.21")
	b, other := l.under(t, policyOf(sandbox.NetworkAllowlist, "allow toctou.example")), l.under(t, policyOf(sandbox.NetworkAllowlist, "allow toctou.example"))
	no := func(token, to string) {
		t.Helper()
		for _, out := range []string{b.web("-to", to+":443", "-sni", "toctou.example", "-path", "/"+token), b.web("-to", to+":80", "-plain", "-host", "toctou.example", "-path", "/"+token)} {
			if strings.Contains(out, "hello") {
				t.Errorf("%s: %s", token, out)
			}
		}
		if got := w.site.got(token); len(got) > 0 {
			t.Errorf("arrived: %v", got)
		}
	}
	no("c05-unasked", "1.2.3.21")
	if out := other.web("-to", "toctou.example:443", "-sni", "toctou.example", "-path", "/c05-other"); !strings.Contains(out, "hello") {
		t.Errorf("%s", out)
	}
	no("c05-anothers", "1.2.3.21") // what another sandbox was answered does not count
	if out := b.web("-to", "toctou.example:443", "-sni", "toctou.example", "-path", "/c05-yes"); !strings.Contains(out, "hello") {
		t.Errorf("%s", out)
	}
	no("c05-elsewhere", "1.2.3.22")
	w.zone.set(t, "toctou.example", "toctou.example. 60 IN A 1.2.3.23")
	no("c05-later", "1.2.3.23") // the name's by now, but nobody was told
	w.settle(t)
	for _, a := range []string{"1.2.3.22", "1.2.3.23"} {
		if w.out.saw(a) {
			t.Errorf("a packet for %s arrived", a)
		}
	}
}

// C6: a handshake or request that claims another name than the address's, or none.
func c06(t *testing.T, w *world, l *lab) {
	b := l.under(t, policyOf(sandbox.NetworkAllowlist, "allow front.example"))
	for _, args := range [][]string{{"-to", "front.example:443", "-sni", "front.example"}, {"-to", "front.example:80", "-plain", "-host", "front.example"}, {"-to", "front.example:443", "-sni", "FRONT.example", "-h2"}} {
		if out := b.web(append(args, "-path", "/c06-yes")...); !strings.Contains(out, "hello from internet") {
			t.Errorf("%v: %s", args, out)
		}
	}
	req := func(host string) string {
		return `GET /c06 HTTP/1.1\r\nHost: ` + host + `\r\nConnection: close\r\n\r\n`
	}
	for _, args := range [][]string{
		{"-sni", "hidden.example"}, {"-sni", ""}, {"-sni", "hidden.example", "-h2"}, {"-sni", "x.front.example"}, {"-sni", "front.example.hidden.example"},
		{"-plain", "-host", "hidden.example"}, {"-plain", "-host", sharedIP},
		{"-plain", "-raw", req("hidden.example")}, {"-plain", "-raw", `GET /c06 HTTP/1.0\r\n\r\n`},
		{"-plain", "-raw", `GET http://hidden.example/c06 HTTP/1.1\r\nHost: front.example\r\nConnection: close\r\n\r\n`},
		{"-plain", "-raw", `GET /c06 HTTP/1.1\r\nHost: front.example\r\nHost: hidden.example\r\nConnection: close\r\n\r\n`},
		{"-plain", "-raw", `GET /c06 HTTP/1.1\r\nHost: front.example@hidden.example\r\nConnection: close\r\n\r\n`},
		{"-plain", "-raw", `GET /c06 HTTP/1.1\r\n Host: front.example\r\nHost: hidden.example\r\nConnection: close\r\n\r\n`},
		{"-plain", "-raw", `CONNECT hidden.example:443 HTTP/1.1\r\nHost: hidden.example:443\r\n\r\nGET /c06 HTTP/1.1\r\nHost: hidden.example\r\n\r\n`},
		{"-plain", "-raw", `CONNECT front.example:443 HTTP/1.1\r\nHost: front.example:443\r\n\r\nGET /c06 HTTP/1.1\r\nHost: hidden.example\r\n\r\n`},
		// a second request on the connection, and one smuggled behind a body
		{"-plain", "-raw", `GET /c06-first HTTP/1.1\r\nHost: front.example\r\n\r\n` + req("hidden.example")},
		{"-plain", "-raw", `POST /c06-first HTTP/1.1\r\nHost: front.example\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n` + req("hidden.example")},
		{"-plain", "-raw", `c06 neither TLS nor HTTP\r\n\r\n`},
	} {
		to := sharedIP + ":443"
		if slices.Contains(args, "-plain") {
			to = sharedIP + ":80"
		}
		b.web(append([]string{"-to", to, "-path", "/c06"}, args...)...)
	}
	for _, h := range w.site.hits(func(h hit) bool { return strings.HasPrefix(h.path, "/c06") || strings.Contains(h.data, "c06") }) {
		if h.path == "/c06" && (!strings.EqualFold(h.host, "front.example") || h.proto == "https") || h.data != "" || h.sni != "" && !strings.EqualFold(h.sni, "front.example") {
			t.Errorf("arrived: %v", h)
		}
	}
}

// C6: fronting, one name in the handshake and another of the same server in the
// request. Where requests are read it is refused; elsewhere it is the residual
// risk that docs/network.md names: this says that it is there, so that nobody
// believes otherwise.
func c06Fronting(t *testing.T, w *world, l *lab) {
	if _, err := l.Client.SetSecret(within(t), &v1.Secret{Name: "FRONT", Hosts: []string{"front.example"}}, []byte("the-front-secret-value")); err != nil {
		t.Fatal(err)
	}
	read := l.box(t, func(s *v1.SandboxSpec) {
		s.Network, s.Secrets = policyOf(sandbox.NetworkAllowlist, "allow front.example"), []string{"FRONT"}
	})
	if out := read.web("-to", "front.example:443", "-sni", "front.example", "-path", "/c06-read"); !strings.Contains(out, "hello from internet") {
		t.Errorf("%s", out)
	}
	for _, h2 := range []string{"-h2=false", "-h2"} {
		out := read.web("-to", "front.example:443", "-sni", "front.example", "-host", "hidden.example", "-path", "/c06-front", h2)
		if strings.Contains(out, "hello") {
			t.Errorf("%s", out)
		}
	}
	if got := w.site.got("c06-front"); len(got) > 0 {
		t.Errorf("fronted where requests are read: %v", got)
	}
	unread := l.under(t, policyOf(sandbox.NetworkAllowlist, "allow front.example"))
	unread.web("-to", "front.example:443", "-sni", "front.example", "-host", "hidden.example", "-path", "/c06-residual")
	if got := w.site.got("c06-residual"); len(got) != 1 {
		t.Errorf("%v: has the residual risk gone? then docs/network.md is to say so", got)
	}
}

// C6: the keys of encrypted client hello do not arrive inside, nor do addresses
// that come beside the name's.
func c06ECH(t *testing.T, _ *world, l *lab) {
	for _, p := range []*v1.NetworkPolicy{policyOf(sandbox.NetworkPublic), policyOf(sandbox.NetworkAllowlist, "allow ech.example")} {
		b := l.under(t, p)
		out := b.dns("udp", b.resolver()+":53", "ech.example", "HTTPS")
		if strings.Contains(out, "ech=") || strings.Contains(out, "10.0.0.2") || !strings.Contains(out, "NOERROR") {
			t.Errorf("%s: %s", p.Mode, out)
		}
	}
}

// C7: a proxy that the sandbox runs itself goes no further than it does.
func c07(t *testing.T, w *world, l *lab) {
	b := l.under(t, policyOf(sandbox.NetworkAllowlist, "allow allowed.example:9000/tcp"))
	out := outcomes(b.must("attack", "relay", deniedIP+":9000", "c07-no", "denied.example:9000", "c07-no", "10.0.0.2:9000", "c07-no", "169.254.169.254:80", "c07-no", "allowed.example:9000", "c07-yes").out)
	for to, r := range out {
		if (r == "reached") != strings.HasPrefix(to, "allowed") {
			t.Errorf("%s: %s", to, r)
		}
	}
	if no, yes := w.site.got("c07-no"), w.site.got("c07-yes"); len(no) > 0 || len(yes) != 1 {
		t.Errorf("arrived: %v, %v", no, yes)
	}
}

// C9: DNS carries nothing to a domain that is not allowed, to no resolver, and
// of an allowed wildcard's names only the addresses are answered.
func c09(t *testing.T, w *world, l *lab) {
	b := l.under(t, policyOf(sandbox.NetworkAllowlist, "allow allowed.example", "allow *.wild.example"))
	at := b.resolver() + ":53"
	label := strings.Repeat("c09a1b2c3d4e5f6", 4)
	long := strings.Join([]string{label, label, label, "c09.tunnel.example"}, ".")
	for _, network := range []string{"udp", "tcp"} {
		out := b.dns(network, at, long, "A", long, "TXT", "c09.tunnel.example", "NULL", "c09.tunnel.example", "CNAME", "c09.tunnel.example", "MX", "c09.tunnel.example", "SRV", "c09.tunnel.example", "HTTPS",
			"c09.allowed.example", "A", "c09x.wild.example", "TXT", "c09x.wild.example", "NULL", "c09x.wild.example", "ANY", "c09x.wild.example", "MX", "_c09.wild.example", "TXT", "c09.example", "A", ".", "NS", "9.3.2.1.in-addr.arpa", "PTR")
		if strings.Contains(out, "command") {
			t.Errorf("an answer came in: %s", out)
		}
	}
	for _, a := range w.zone.questions("", "c09") {
		t.Errorf("asked upstream: %v", a)
	}
	// allowed names resolve, at any depth
	if out := b.dns("udp", at, "deep.c0y.wild.example", "A"); !strings.Contains(out, "1.2.3.4") {
		t.Errorf("%s", out)
	}
	// no other resolver, by any port or protocol
	for _, server := range []string{publicDNS + ":53", "9.9.9.9:53", resolver + ":53", systemResolver(t) + ":53", "5.5.5.2:53", allowedIP + ":53"} {
		for _, network := range []string{"udp", "tcp"} {
			if out := b.dns(network, server, "c09z.tunnel.example", "TXT"); strings.Contains(out, "[") {
				t.Errorf("%s %s: %s", network, server, out)
			}
		}
	}
	open := l.box(t, nil)
	for _, server := range []string{publicDNS + ":53", "9.9.9.9:53", resolver + ":53"} {
		for _, network := range []string{"udp", "tcp"} {
			if out := open.dns(network, server, "c09z.tunnel.example", "TXT"); strings.Contains(out, "[") && server == resolver+":53" {
				t.Errorf("%s %s: %s", network, server, out)
			}
		}
	}
	for _, a := range w.zone.questions("private", "c09z") {
		t.Errorf("asked upstream: %v", a)
	}
}

// C10: DNS to elsewhere, and DNS over TLS, are refused unless a rule says
// otherwise; DNS over HTTPS is an HTTPS host like any other.
func c10(t *testing.T, w *world, l *lab) {
	for i, p := range []*v1.NetworkPolicy{policyOf(sandbox.NetworkPublic), policyOf(sandbox.NetworkAllowlist, "allow dns.example"), policyOf(sandbox.NetworkAllowlist, "allow allowed.example")} {
		b := l.under(t, p)
		token := fmt.Sprintf("c10-%d", i)
		for _, q := range []string{"udp " + publicDNS + ":53", "tcp " + publicDNS + ":53", "tcp-tls " + publicDNS + ":853", "tcp " + publicDNS + ":853"} {
			network, server, _ := strings.Cut(q, " ")
			if out := b.dns(network, server, token+".example", "A"); !strings.Contains(out, "refused") && !strings.Contains(out, "silent") && !strings.Contains(out, "failed") {
				t.Errorf("%v: %s: %s", p, q, out)
			}
		}
		if got := w.zone.questions("internet", token); len(got) > 0 {
			t.Errorf("%v: arrived: %v", p, got)
		}
		out := b.dns("https", "dns.example", token+"-doh.allowed.example", "A")
		if got := w.zone.questions("internet", token+"-doh"); (len(got) == 1) != (i < 2) {
			t.Errorf("%v: DNS over HTTPS: %v, %s", p, got, out)
		}
		// by its address, which nobody lists
		if i > 0 {
			b.web("-to", publicDNS+":443", "-sni", "other.example", "-path", "/"+token+"-address")
			if got := w.site.got(token + "-address"); len(got) > 0 {
				t.Errorf("%v: %v", p, got)
			}
		}
	}
	b := l.under(t, policyOf(sandbox.NetworkAllowlist, "allow "+publicDNS+":53", "allow "+publicDNS+":853/tcp"))
	for _, q := range []string{"udp " + publicDNS + ":53", "tcp " + publicDNS + ":53", "tcp-tls " + publicDNS + ":853"} {
		network, server, _ := strings.Cut(q, " ")
		if out := b.dns(network, server, "allowed.example", "A"); !strings.Contains(out, "1.2.3.4") {
			t.Errorf("allowed by a rule: %s: %s", q, out)
		}
	}
}

// C11: what names match, from the name that is typed to the server that is reached.
func c11(t *testing.T, w *world, l *lab) {
	for i, c := range []struct {
		rule  string
		yes   []string // host:port
		no    []string
		plain bool
	}{
		{"*.wild.example", []string{"a.wild.example:443", "a.b.c.wild.example:443", "A.WILD.Example:443", "a.wild.example.:443", "a.wild.example:80"}, []string{"wild.example:443", "xwild.example:443", "a.wild.example:8443", "a.wild.example.denied.example:443"}, false},
		{"wild.example", []string{"wild.example:443", "WILD.EXAMPLE:443", "wild.example.:80"}, []string{"a.wild.example:443", "wild.example:8080"}, false},
		{"WILD.example.:8443", []string{"wild.example:8443"}, []string{"wild.example:443", "wild.example:80"}, false},
		{"*.wild.example:8080,8400-8450", []string{"a.wild.example:8080", "a.wild.example:8443"}, []string{"a.wild.example:443", "wild.example:8080"}, false},
		{"bücher.example", []string{"xn--bcher-kva.example:443", "XN--BCHER-KVA.example:80"}, []string{"bucher.example:443"}, false},
	} {
		b := l.under(t, policyOf(sandbox.NetworkAllowlist, "allow "+c.rule))
		ask := func(target, token string) string {
			host, port, _ := strings.Cut(target, ":")
			args := []string{"-to", target, "-sni", strings.TrimSuffix(host, "."), "-path", "/" + token}
			if strings.HasSuffix(port, "80") {
				args = []string{"-to", target, "-plain", "-host", host, "-path", "/" + token}
			}
			return b.web(args...)
		}
		for k, target := range c.yes {
			token := fmt.Sprintf("c11-yes-%d-%d", i, k)
			if out := ask(target, token); len(w.site.got(token)) != 1 {
				t.Errorf("rule %s, %s: %s", c.rule, target, out)
			}
		}
		for k, target := range c.no {
			token := fmt.Sprintf("c11-no-%d-%d", i, k)
			out := ask(target, token)
			// as one who knows the address
			_, port, _ := strings.Cut(target, ":")
			host, _, _ := strings.Cut(target, ":")
			if strings.HasSuffix(port, "80") {
				out += b.web("-to", "1.2.3.4:"+port, "-plain", "-host", host, "-path", "/"+token)
			} else {
				out += b.web("-to", "1.2.3.4:"+port, "-sni", host, "-path", "/"+token)
			}
			if got := w.site.got(token); len(got) > 0 {
				t.Errorf("rule %s, %s: %v, %s", c.rule, target, got, out)
			}
			x, err := l.Client.ExplainNetwork(within(t), &v1.ExplainNetworkRequest{SandboxId: b.id, Host: host, Port: number(t, port)})
			if err != nil || x.Allowed {
				t.Errorf("rule %s: explain %s: %v, %v", c.rule, target, x, err)
			}
		}
	}
	for _, bad := range []string{"*.*.example", "a.*.example", "*example", "*.", "a..example", "-a.example", "a_b c.example", strings.Repeat("a", 64) + ".example", "http://a.example", "a.example/path", "a.example:0", "a.example:70000", "a.example:9-8", "a.example/sctp", "a.example:1-65535", ""} {
		if _, err := l.Client.ExplainNetwork(within(t), &v1.ExplainNetworkRequest{Policy: policyOf(sandbox.NetworkAllowlist, "allow good.example", "allow "+bad), Host: "a.example"}); !errors.Is(err, sandbox.Invalid) || !strings.Contains(err.Error(), bad) {
			t.Errorf("rule %q: %v, want it refused by name", bad, err)
		}
	}
}

func number(t testing.TB, s string) (n uint32) {
	t.Helper()
	_, err := fmt.Sscan(s, &n)
	ok(t, err)
	return n
}

// C12: the first rule that matches decides, as docs/network.md has it.
func c12(t *testing.T, w *world, l *lab) {
	for i, c := range []struct {
		mode  sandbox.NetworkMode
		rules []string
		x, a  bool // whether allowed.example, and 1.2.3.5 by itself, are reached
	}{
		{sandbox.NetworkAllowlist, nil, false, false},
		{sandbox.NetworkAllowlist, []string{"allow allowed.example"}, true, false},
		{sandbox.NetworkAllowlist, []string{"deny *", "allow allowed.example"}, false, false},
		{sandbox.NetworkAllowlist, []string{"allow allowed.example", "deny *"}, true, false},
		{sandbox.NetworkAllowlist, []string{"allow *", "deny allowed.example"}, true, false},
		{sandbox.NetworkAllowlist, []string{"deny allowed.example", "allow *"}, false, false},
		{sandbox.NetworkAllowlist, []string{"allow " + deniedIP}, false, true},
		{sandbox.NetworkAllowlist, []string{"deny " + deniedIP, "allow 1.2.3.0/24"}, false, false},
		{sandbox.NetworkAllowlist, []string{"allow " + deniedIP, "deny 1.2.3.0/24"}, false, true},
		{sandbox.NetworkPublic, nil, true, true},
		{sandbox.NetworkPublic, []string{"deny allowed.example"}, false, true},
		{sandbox.NetworkPublic, []string{"deny *", "allow allowed.example"}, false, true},
		{sandbox.NetworkPublic, []string{"allow allowed.example", "deny *"}, true, true},
		{sandbox.NetworkPublic, []string{"deny 1.2.3.0/24"}, false, false},
		{sandbox.NetworkPublic, []string{"allow allowed.example", "deny 1.2.3.0/24"}, true, false},
		{sandbox.NetworkPublic, []string{"deny 1.2.3.0/24", "allow allowed.example"}, false, false},
		{sandbox.NetworkNone, nil, false, false},
	} {
		p := policyOf(c.mode, c.rules...)
		b := l.under(t, p)
		token := fmt.Sprintf("c12-%d", i)
		out := b.web("-to", "allowed.example:443", "-sni", "allowed.example", "-path", "/"+token+"-x")
		out += b.web("-to", deniedIP+":80", "-plain", "-host", deniedIP, "-path", "/"+token+"-a")
		x, a := len(w.site.got(token+"-x")) > 0, len(w.site.got(token+"-a")) > 0
		if x != c.x || a != c.a {
			t.Errorf("%v %q: x %v, want %v; A %v, want %v\n%s", c.mode, c.rules, x, c.x, a, c.a, out)
		}
		ex, err := l.Client.ExplainNetwork(within(t), &v1.ExplainNetworkRequest{SandboxId: b.id, Host: "allowed.example", Port: 443})
		if err != nil || ex.Allowed != c.x {
			t.Errorf("%v %q: explain x: %v, %v", c.mode, c.rules, ex, err)
		}
		ea, err := l.Client.ExplainNetwork(within(t), &v1.ExplainNetworkRequest{SandboxId: b.id, Host: deniedIP, Port: 80})
		if err != nil || ea.Allowed != c.a {
			t.Errorf("%v %q: explain A: %v, %v", c.mode, c.rules, ea, err)
		}
	}
	b := l.box(t, nil)
	if _, _, err := l.Client.SetNetwork(within(t), b.id, policyOf(sandbox.NetworkNone, "allow allowed.example"), false); !errors.Is(err, sandbox.Invalid) {
		t.Errorf("rules with mode none: %v", err)
	}
}

// C13: an allowed host sends the client to one that is not.
func c13(t *testing.T, w *world, l *lab) {
	b := l.under(t, policyOf(sandbox.NetworkAllowlist, "allow allowed.example"))
	for _, to := range []string{"http://denied.example/c13-to", "http://" + deniedIP + "/c13-to", "http://" + allowedIP + "/c13-to", "http://wild.example/c13-to", "http://10.0.0.2/c13-to", "http://allowed.example:8080/c13-to"} {
		if out, got := b.get("http://allowed.example/redirect?to=" + to); got {
			t.Errorf("%s: %s", to, out)
		}
	}
	if got := w.site.hits(func(h hit) bool { return h.path == "/c13-to" }); len(got) > 0 {
		t.Errorf("followed: %v", got)
	}
	if got := w.site.hits(func(h hit) bool {
		return strings.HasPrefix(h.path, "/redirect") && strings.Contains(h.path, "c13")
	}); len(got) != 6 {
		t.Errorf("%d redirections were served, want 6", len(got))
	}
	if out, got := b.get("http://allowed.example/redirect?to=http://allowed.example/c13-same"); !got {
		t.Errorf("to itself: %s", out)
	}
}
