package secret

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"vivarium/sandbox"
)

// request is one as the proxy gets it from a sandbox, over TLS.
func request(t testing.TB, host, target string, header map[string]string) *http.Request {
	t.Helper()
	u, err := url.Parse("https://" + host + target)
	if err != nil {
		t.Fatal(err)
	}
	r := &http.Request{Method: "GET", URL: u, Host: host, Header: http.Header{}, TLS: &tls.ConnectionState{ServerName: host}}
	for k, v := range header {
		r.Header.Set(k, v)
	}
	return r
}

func TestBind(t *testing.T) {
	t.Parallel()
	v := open(t)
	put(t, v, Secret{Name: "KEY", Hosts: []string{"api.example.com"}}, theValue)
	put(t, v, Secret{Name: "GH", Env: "GH_TOKEN", Prefix: "ghp_", Hosts: []string{"*.git.example", "git.example"}}, theValue+"2")
	put(t, v, Secret{Name: "PLAIN"}, "plain value")
	b := bind(t, v, BindSpec{Uses: []Use{{Name: "KEY"}, {Name: "GH"}, {Name: "PLAIN", Env: "LEVEL"}}, Lifetime: time.Hour})
	env := b.Environment().Vars()
	if len(env) != 3 || env["LEVEL"] != "plain value" {
		t.Errorf("%d variables", len(env))
	}
	if !regexp.MustCompile(`^viv_secret_[A-Za-z0-9]{36}$`).MatchString(env["KEY"]) {
		t.Errorf("placeholder %q", env["KEY"])
	}
	if !regexp.MustCompile(`^ghp_[A-Za-z0-9]{36}$`).MatchString(env["GH_TOKEN"]) {
		t.Errorf("placeholder %q", env["GH_TOKEN"])
	}
	if got := strings.Join(b.Hosts(), " "); got != "*.git.example api.example.com git.example" {
		t.Errorf("hosts %s", got)
	}
	other := bind(t, v, BindSpec{Sandbox: "sb-2", Uses: []Use{{Name: "KEY"}}})
	if other.Environment().Vars()["KEY"] == env["KEY"] {
		t.Error("two sandboxes with one placeholder")
	}
	if only := bind(t, v, BindSpec{Sandbox: "sb-3", Uses: []Use{{Name: "PLAIN"}}}); only.CA() != nil || len(only.Hosts()) != 0 {
		t.Error("a CA for nothing")
	}
	for what, c := range map[string]struct {
		spec BindSpec
		kind sandbox.Kind
	}{
		"twice":              {BindSpec{Uses: []Use{{Name: "KEY"}, {Name: "KEY", Env: "K"}}}, sandbox.Invalid},
		"one variable":       {BindSpec{Uses: []Use{{Name: "KEY"}, {Name: "PLAIN", Env: "KEY"}}}, sandbox.Invalid},
		"bad variable":       {BindSpec{Uses: []Use{{Name: "KEY", Env: "A=B"}}}, sandbox.Invalid},
		"none such":          {BindSpec{Uses: []Use{{Name: "NONE"}}}, sandbox.NotFound},
		"another's":          {BindSpec{Tenant: "b", Uses: []Use{{Name: "KEY"}}}, sandbox.NotFound}, // E1
		"bound already":      {BindSpec{Sandbox: "sb-1", Uses: []Use{{Name: "KEY"}}}, sandbox.Exists},
		"rule for everybody": {BindSpec{Headers: []sandbox.HeaderRule{{Domain: "*", Headers: map[string]string{"X": "y"}}}}, sandbox.Invalid},
		"not its host":       {BindSpec{Headers: []sandbox.HeaderRule{{Domain: "evil.example", Headers: map[string]string{"X": "${KEY}"}}}}, sandbox.Invalid},
		"wider than it": {BindSpec{Headers: []sandbox.HeaderRule{{Domain: "*.example.com", Headers: map[string]string{"X": "${KEY}"}}}},
			sandbox.Invalid},
		"rule with none such": {BindSpec{Headers: []sandbox.HeaderRule{{Domain: "a.example", Headers: map[string]string{"X": "${NONE}"}}}}, sandbox.NotFound},
		"half a template":     {BindSpec{Headers: []sandbox.HeaderRule{{Domain: "a.example", Headers: map[string]string{"X": "${KEY"}}}}, sandbox.Invalid},
		"two lines":           {BindSpec{Headers: []sandbox.HeaderRule{{Domain: "a.example", Headers: map[string]string{"X": "a\r\nB: c"}}}}, sandbox.Invalid},
	} {
		if c.spec.Tenant == "" {
			c.spec.Tenant = "a"
		}
		if c.spec.Sandbox == "" {
			c.spec.Sandbox = "sb-9"
		}
		if _, err := v.Bind(t.Context(), c.spec); !errors.Is(err, c.kind) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if len(v.of("a")) != 3 || len(v.of("b")) != 0 {
		t.Error("what failed is bound")
	}
}

func TestAuthority(t *testing.T) {
	t.Parallel()
	v := open(t)
	put(t, v, Secret{Name: "KEY", Hosts: []string{"api.example.com", "*.wild.example"}}, theValue)
	b := bind(t, v, BindSpec{Uses: []Use{{Name: "KEY"}}, Lifetime: 2 * time.Hour})
	block, rest := pem.Decode(b.CA())
	if block == nil || len(rest) != 0 {
		t.Fatal("not one certificate")
	}
	ca, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	if !ca.IsCA || ca.MaxPathLen != 1 || b.ca.issuer.MaxPathLen != 0 || !b.ca.issuer.MaxPathLenZero || !b.ca.issuer.PermittedDNSDomainsCritical || len(b.ca.issuer.PermittedDNSDomains) != 2 || !ca.PermittedDNSDomainsCritical || strings.Join(ca.PermittedDNSDomains, " ") != "api.example.com wild.example" {
		t.Errorf("%+v", ca)
	}
	if left := time.Until(ca.NotAfter); left < 25*time.Hour || left > 27*time.Hour {
		t.Errorf("it ends in %s", left)
	}
	if n := len(ca.Subject.Names); n != 1 || !strings.HasPrefix(ca.Subject.CommonName, subjectName) {
		t.Errorf("subject %s", ca.Subject)
	}
	pool := x509.NewCertPool()
	pool.AddCert(ca)
	below := x509.NewCertPool()
	below.AddCert(b.ca.issuer)
	for host, ok := range map[string]bool{
		"api.example.com": true, "API.example.com.": true, "x.wild.example": true, "x.y.wild.example": true,
		"wild.example": false, "sub.api.example.com": false, "example.com": false, "evil.example": false, "": false, "*": false, "*.wild.example": false, "127.0.0.1": false,
	} {
		c, err := b.Certificate(host)
		if (err == nil) != ok || err != nil && !errors.Is(err, sandbox.Denied) {
			t.Errorf("%q: %v", host, err)
		}
		if err != nil {
			continue
		}
		name := strings.TrimSuffix(strings.ToLower(host), ".")
		if _, err := c.Leaf.Verify(x509.VerifyOptions{Roots: pool, Intermediates: below, DNSName: name}); err != nil {
			t.Errorf("%s: %v", host, err)
		}
		if again, _ := b.Certificate(host); again != c {
			t.Errorf("%s: made twice", host)
		}
		if c.Leaf.NotAfter.After(ca.NotAfter) {
			t.Error("the certificate outlives its CA")
		}
	}
	// even with its key it vouches for nobody else
	for _, host := range []string{"evil.example", "example.com", "api.example.com.evil.example"} {
		c, err := b.ca.issue(host, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		var bad x509.CertificateInvalidError
		if _, err := c.Leaf.Verify(x509.VerifyOptions{Roots: pool, Intermediates: below, DNSName: host}); !errors.As(err, &bad) || bad.Reason != x509.CANotAuthorizedForThisName {
			t.Errorf("%s: %v", host, err)
		}
	}
	// nor does Java, which takes the issuer's constraint only (the root as an anchor
	// without one): see TestTools
	for i := range 3 * maxLeaves {
		if _, err := b.Certificate(fmt.Sprintf("h%d.wild.example", i)); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(b.ca.leaves); n > maxLeaves {
		t.Errorf("%d certificates kept", n)
	}
	old, err := b.Certificate("api.example.com")
	if err != nil {
		t.Fatal(err)
	}
	if later, err := b.ca.certificate("api.example.com", old.Leaf.NotAfter.Add(-time.Minute)); err != nil || later == old {
		t.Errorf("a certificate that is about to end: %v", err)
	}
}

// A restart of the daemon finds the same placeholders and the same CA.
func TestRestore(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := openStore(t, dir)
	v, err := Open(t.Context(), dir, s)
	if err != nil {
		t.Fatal(err)
	}
	put(t, v, Secret{Name: "KEY", Hosts: []string{"api.example.com"}}, theValue)
	put(t, v, Secret{Name: "GONE", Hosts: []string{"api.example.com"}}, theValue+"-gone")
	put(t, v, Secret{Name: "PLAIN"}, "plain")
	b := bind(t, v, BindSpec{Uses: []Use{{Name: "KEY"}, {Name: "GONE"}, {Name: "PLAIN"}},
		Headers: []sandbox.HeaderRule{{Domain: "api.example.com", Headers: map[string]string{"X-Key": "k=${KEY}"}}}})
	leaf, _ := b.Certificate("api.example.com")
	v2, err := Open(t.Context(), dir, s)
	if err != nil {
		t.Fatal(err)
	}
	if err := v2.Delete(t.Context(), "a", "GONE"); err != nil {
		t.Fatal(err)
	}
	put(t, v2, Secret{Name: "KEY", Hosts: []string{"api.example.com"}}, "new-value-of-key")
	r, err := v2.Restore(t.Context(), "a", "sb-1")
	if err != nil {
		t.Fatal(err)
	}
	if string(r.CA()) != string(b.CA()) || fmt.Sprint(r.Hosts()) != fmt.Sprint(b.Hosts()) {
		t.Error("another CA")
	}
	for k, want := range b.Environment().Vars() {
		if r.Environment().Vars()[k] != want {
			t.Errorf("%s differs", k)
		}
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(b.CA())
	below := x509.NewCertPool()
	below.AddCert(r.ca.issuer)
	c, err := r.Certificate("api.example.com")
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range []*x509.Certificate{c.Leaf, leaf.Leaf} {
		if _, err := l.Verify(x509.VerifyOptions{Roots: pool, Intermediates: below, DNSName: "api.example.com"}); err != nil {
			t.Error(err)
		}
	}
	env := r.Environment().Vars()
	q := request(t, "api.example.com", "/", map[string]string{"A": env["KEY"], "B": env["GONE"]})
	if err := r.Request("api.example.com", q); err != nil {
		t.Fatal(err)
	}
	if q.Header.Get("A") != "new-value-of-key" || q.Header.Get("B") != env["GONE"] || q.Header.Get("X-Key") != "k=new-value-of-key" {
		t.Error("not the values of now")
	}
	if same, err := v2.Restore(t.Context(), "a", "sb-1"); err != nil || same != r {
		t.Errorf("restored twice: %v", err)
	}
	if _, err := v2.Restore(t.Context(), "b", "sb-1"); !errors.Is(err, sandbox.NotFound) { // E1
		t.Errorf("another tenant's: %v", err)
	}
	// another sandbox's state does not open
	state, err := s.SecretBinding(t.Context(), "a", "sb-1")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.PutSecretBinding(t.Context(), "a", "sb-2", state); err != nil {
		t.Fatal(err)
	}
	if _, err := v2.Restore(t.Context(), "a", "sb-2"); !errors.Is(err, sandbox.Internal) {
		t.Errorf("another sandbox's: %v", err)
	}
	for range 2 {
		if err := v2.Release(t.Context(), "a", "sb-1"); err != nil {
			t.Error(err)
		}
	}
	if _, err := v2.Restore(t.Context(), "a", "sb-1"); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("after release: %v", err)
	}
	q = request(t, "api.example.com", "/", map[string]string{"A": env["KEY"]})
	if err := r.Request("api.example.com", q); !errors.Is(err, sandbox.Denied) { // its rule has no secret any more
		t.Errorf("after release: %v", err)
	}
	if q.Header.Get("A") != env["KEY"] {
		t.Error("a value after release")
	}
}

// A running sandbox gets a secret's new value, and loses one that is gone or that
// is no longer for the host; it never gets more hosts than it started with.
func TestLiveChange(t *testing.T) {
	t.Parallel()
	v := open(t)
	hosts := []string{"a.example", "b.example"}
	put(t, v, Secret{Name: "KEY", Hosts: hosts}, theValue)
	b := bind(t, v, BindSpec{Uses: []Use{{Name: "KEY"}}})
	ph := b.Environment().Vars()["KEY"]
	gets := func(host string) string {
		q := request(t, host, "/", map[string]string{"A": ph})
		if err := b.Request(host, q); err != nil {
			t.Error(err)
		}
		return q.Header.Get("A")
	}
	if gets("a.example") != theValue || gets("b.example") != theValue {
		t.Error("at first")
	}
	put(t, v, Secret{Name: "KEY", Hosts: []string{"a.example", "c.example"}}, "another-value")
	if gets("a.example") != "another-value" || gets("b.example") != ph || gets("c.example") != ph {
		t.Error("after a change of hosts")
	}
	if got := scrubbed(t, b, "a.example", "old "+theValue+" new another-value"); got != "old "+ph+" new "+ph {
		t.Errorf("the old value comes back: %q", got)
	}
	put(t, v, Secret{Name: "KEY"}, "now plain")
	if gets("a.example") != ph || b.Environment().Vars()["KEY"] != ph {
		t.Error("after a change of kind")
	}
	put(t, v, Secret{Name: "KEY", Hosts: hosts}, "back again")
	if gets("b.example") != "back again" {
		t.Error("bound again")
	}
	put(t, v, Secret{Tenant: "b", Name: "KEY", Hosts: hosts}, "of another tenant")
	if gets("a.example") != "back again" {
		t.Error("another tenant's secret") // E1
	}
	if err := v.Delete(t.Context(), "a", "KEY"); err != nil {
		t.Fatal(err)
	}
	if gets("a.example") != ph {
		t.Error("after deletion")
	}
}

func TestConcurrentUse(t *testing.T) {
	t.Parallel()
	v := open(t)
	put(t, v, Secret{Name: "KEY", Hosts: []string{"*.a.example"}}, theValue)
	b := bind(t, v, BindSpec{Uses: []Use{{Name: "KEY"}}})
	ph := b.Environment().Vars()["KEY"]
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for j := range 50 {
				host := fmt.Sprintf("h%d.a.example", (i+j)%5)
				q := request(t, host, "/", map[string]string{"A": ph})
				if err := b.Request(host, q); err != nil || q.Header.Get("A") == ph {
					t.Error(err)
				}
				if _, err := b.Certificate(host); err != nil {
					t.Error(err)
				}
				scrubbed(t, b, host, "x "+theValue)
			}
		})
	}
	for i := range 10 {
		put(t, v, Secret{Name: "KEY", Hosts: []string{"*.a.example"}}, fmt.Sprintf("value number %d", i))
	}
	wg.Wait()
}

func TestSetHeaders(t *testing.T) {
	t.Parallel()
	v := open(t)
	put(t, v, Secret{Name: "KEY", Hosts: []string{"*.a.example"}}, theValue)
	put(t, v, Secret{Name: "MORE", Hosts: []string{"x.a.example"}}, "more-of-a-value")
	b := bind(t, v, BindSpec{Uses: []Use{{Name: "KEY"}}})
	rules := func(domain, value string) []sandbox.HeaderRule {
		return []sandbox.HeaderRule{{Domain: domain, Headers: map[string]string{"X-R": value}}}
	}
	header := func(b *Binding) string {
		q := request(t, "x.a.example", "/", nil)
		if err := b.Request("x.a.example", q); err != nil {
			t.Error(err)
		}
		return q.Header.Get("X-R")
	}
	ph := b.Environment().Vars()["KEY"]
	if err := v.SetHeaders(t.Context(), b, rules("x.a.example", "${KEY} ${MORE}")); err != nil {
		t.Fatal(err)
	}
	if header(b) != theValue+" more-of-a-value" {
		t.Error("the rule is not in force")
	}
	if err := v.SetHeaders(t.Context(), b, rules("b.example", "x")); !errors.Is(err, sandbox.Conflict) {
		t.Errorf("a domain that the CA is not for: %v", err)
	}
	if err := v.SetHeaders(t.Context(), b, rules("y.a.example", "${MORE}")); !errors.Is(err, sandbox.Invalid) {
		t.Errorf("a secret that is not for the domain: %v", err)
	}
	if header(b) != theValue+" more-of-a-value" {
		t.Error("what was refused has changed something")
	}
	put(t, v, Secret{Name: "MORE", Hosts: []string{"x.a.example"}}, "changed")
	if header(b) != theValue+" changed" {
		t.Error("the rule's secret did not change")
	}
	v.forget(b) // as a restart does
	r, err := v.Restore(t.Context(), "a", "sb-1")
	if err != nil || r == b {
		t.Fatal(err)
	}
	if header(r) != theValue+" changed" || r.Environment().Vars()["KEY"] != ph || string(r.CA()) != string(b.CA()) {
		t.Error("not found again after a restart")
	}
	if err := v.SetHeaders(t.Context(), r, nil); err != nil || header(r) != "" {
		t.Errorf("no rules: %v", err)
	}
	if len(r.saved.Entries) != 1 || r.Environment().Vars()["KEY"] != ph {
		t.Errorf("%d secrets are left", len(r.saved.Entries))
	}
}
