package tunnel

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"vivarium/sandbox"
)

// authority is an ACME server (RFC 8555) as far as one client needs it. It does
// not check signatures; it does prove names by TLS-ALPN-01, at the address that
// stands for port 443 of every name.
type authority struct {
	t    *testing.T
	s    *httptest.Server
	at   func() string // the tunnels' listener
	cert *x509.Certificate
	key  *ecdsa.PrivateKey

	mu     sync.Mutex
	thumb  string // of the account's key
	n      int
	orders map[string]*order
	asked  []string // names that a certificate was asked for
}

type order struct {
	name, token, status, authz string
	chain                      []byte
}

func newAuthority(t *testing.T, at func() string) *authority {
	t.Helper()
	a := &authority{t: t, at: at, orders: map[string]*order{}}
	var err error
	if a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(1000 * time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, a.key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	a.s = httptest.NewTLSServer(mux)
	t.Cleanup(a.s.Close)
	answer := func(w http.ResponseWriter, code int, location string, v any) {
		a.mu.Lock()
		a.n++
		w.Header().Set("Replay-Nonce", fmt.Sprintf("nonce%d", a.n))
		a.mu.Unlock()
		if location != "" {
			w.Header().Set("Location", a.s.URL+location)
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(v)
	}
	orderJSON := func(id string, o *order) map[string]any {
		m := map[string]any{
			"status": o.status, "identifiers": []any{map[string]string{"type": "dns", "value": o.name}},
			"authorizations": []string{a.s.URL + "/authz/" + id}, "finalize": a.s.URL + "/finalize/" + id,
		}
		if o.chain != nil {
			m["certificate"] = a.s.URL + "/cert/" + id
		}
		return m
	}
	challenge := func(id string, o *order) map[string]any {
		return map[string]any{"type": "tls-alpn-01", "status": o.authz, "token": o.token, "url": a.s.URL + "/challenge/" + id}
	}
	mux.HandleFunc("/directory", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, 200, "", map[string]string{"newNonce": a.s.URL + "/nonce", "newAccount": a.s.URL + "/account", "newOrder": a.s.URL + "/order", "revokeCert": a.s.URL + "/revoke", "keyChange": a.s.URL + "/keychange"})
	})
	mux.HandleFunc("/nonce", func(w http.ResponseWriter, _ *http.Request) { answer(w, 200, "", nil) })
	mux.HandleFunc("/account", func(w http.ResponseWriter, r *http.Request) {
		var p struct {
			JWK json.RawMessage `json:"jwk"`
		}
		a.jws(r, &p, nil)
		if len(p.JWK) > 0 {
			var k struct{ Crv, Kty, X, Y string }
			_ = json.Unmarshal(p.JWK, &k)
			sum := sha256.Sum256([]byte(fmt.Sprintf(`{"crv":%q,"kty":%q,"x":%q,"y":%q}`, k.Crv, k.Kty, k.X, k.Y)))
			a.mu.Lock()
			a.thumb = base64.RawURLEncoding.EncodeToString(sum[:])
			a.mu.Unlock()
		}
		answer(w, 201, "/acct/1", map[string]any{"status": "valid"})
	})
	mux.HandleFunc("/order", func(w http.ResponseWriter, r *http.Request) {
		var p struct{ Identifiers []struct{ Value string } }
		a.jws(r, nil, &p)
		a.mu.Lock()
		id := fmt.Sprint(len(a.orders))
		o := &order{name: p.Identifiers[0].Value, token: "token" + id, status: "pending", authz: "pending"}
		a.orders[id] = o
		a.asked = append(a.asked, o.name)
		a.mu.Unlock()
		answer(w, 201, "/o/"+id, orderJSON(id, o))
	})
	with := func(prefix string, fn func(w http.ResponseWriter, r *http.Request, id string, o *order)) {
		mux.HandleFunc(prefix, func(w http.ResponseWriter, r *http.Request) {
			id := strings.TrimPrefix(r.URL.Path, prefix)
			a.mu.Lock()
			o := a.orders[id]
			a.mu.Unlock()
			if o == nil {
				http.NotFound(w, r)
				return
			}
			fn(w, r, id, o)
		})
	}
	with("/o/", func(w http.ResponseWriter, _ *http.Request, id string, o *order) {
		answer(w, 200, "", orderJSON(id, o))
	})
	with("/authz/", func(w http.ResponseWriter, _ *http.Request, id string, o *order) {
		answer(w, 200, "", map[string]any{"status": o.authz, "identifier": map[string]string{"type": "dns", "value": o.name}, "challenges": []any{challenge(id, o)}})
	})
	with("/challenge/", func(w http.ResponseWriter, _ *http.Request, id string, o *order) {
		if err := a.prove(o); err != nil {
			t.Logf("challenge of %s: %v", o.name, err)
			o.authz, o.status = "invalid", "invalid"
		} else {
			o.authz, o.status = "valid", "ready"
		}
		answer(w, 200, "", challenge(id, o))
	})
	with("/finalize/", func(w http.ResponseWriter, r *http.Request, id string, o *order) {
		var p struct {
			CSR string `json:"csr"`
		}
		a.jws(r, nil, &p)
		raw, err := base64.RawURLEncoding.DecodeString(p.CSR)
		if err != nil {
			t.Error(err)
		}
		csr, err := x509.ParseCertificateRequest(raw)
		if err != nil {
			t.Error(err)
			return
		}
		leaf := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), DNSNames: csr.DNSNames, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(90 * 24 * time.Hour), KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
		der, err := x509.CreateCertificate(rand.Reader, leaf, a.cert, csr.PublicKey, a.key)
		if err != nil {
			t.Error(err)
			return
		}
		o.chain = append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})...)
		o.status = "valid"
		answer(w, 200, "/o/"+id, orderJSON(id, o))
	})
	with("/cert/", func(w http.ResponseWriter, _ *http.Request, _ string, o *order) {
		w.Header().Set("Content-Type", "application/pem-certificate-chain")
		_, _ = w.Write(o.chain)
	})
	return a
}

// jws reads the parts of a signed request.
func (a *authority) jws(r *http.Request, protected, payload any) {
	var m struct{ Protected, Payload string }
	if err := json.NewDecoder(r.Body).Decode(&m); err != nil {
		a.t.Error(err)
		return
	}
	for _, p := range []struct {
		text string
		to   any
	}{{m.Protected, protected}, {m.Payload, payload}} {
		if p.to == nil {
			continue
		}
		b, err := base64.RawURLEncoding.DecodeString(p.text)
		if err == nil {
			err = json.Unmarshal(b, p.to)
		}
		if err != nil {
			a.t.Errorf("%s: %v", r.URL, err)
		}
	}
}

// prove connects as RFC 8737 says.
func (a *authority) prove(o *order) error {
	c, err := tls.Dial("tcp", a.at(), &tls.Config{ServerName: o.name, NextProtos: []string{"acme-tls/1"}, InsecureSkipVerify: true})
	if err != nil {
		return err
	}
	defer c.Close()
	cert := c.ConnectionState().PeerCertificates[0]
	want := sha256.Sum256([]byte(o.token + "." + a.thumb))
	for _, e := range cert.Extensions {
		if e.Id.Equal(asn1.ObjectIdentifier{1, 3, 6, 1, 5, 5, 7, 1, 31}) {
			var got []byte
			if _, err := asn1.Unmarshal(e.Value, &got); err != nil || !bytes.Equal(got, want[:]) {
				return fmt.Errorf("another proof: %x, %v", got, err)
			}
			return nil
		}
	}
	return fmt.Errorf("no proof in the certificate of %v", cert.DNSNames)
}

// TestACME: each tunnel gets a certificate of its own from an authority that
// proves its name on our listener; nothing is asked for other names.
func TestACME(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0") // certmagic has to know the port
	if err != nil {
		t.Fatal(err)
	}
	listen := ln.Addr().String()
	ln.Close()
	a := newAuthority(t, func() string { return listen })
	root := filepath.Join(t.TempDir(), "root.pem")
	if err := os.WriteFile(root, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.s.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	with := func(o *Options) {
		o.Listen, o.ACME = listen, ACME{Email: "who@example.test", Directory: a.s.URL + "/directory", Root: root}
	}
	l := newLab(t, with)
	s := &seen{}
	l.serve("sb-1", 80, s.ServeHTTP)
	tun := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 80})
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	try := func(name string) (*x509.Certificate, error) {
		c, err := tls.Dial("tcp", listen, &tls.Config{ServerName: name + "." + domain, RootCAs: pool})
		if err != nil {
			return nil, err
		}
		defer c.Close()
		return c.ConnectionState().PeerCertificates[0], nil
	}
	var cert *x509.Certificate
	eventually(t, "the certificate is there", func() bool { cert, err = try(tun.Name); return err == nil })
	if err != nil {
		t.Fatalf("%v\n%s", err, l.log)
	}
	if len(cert.DNSNames) != 1 || cert.DNSNames[0] != tun.Name+"."+domain {
		t.Errorf("certificate for %v", cert.DNSNames)
	}
	hc := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: tun.Name + "." + domain}, DisableKeepAlives: true}}
	r, err := http.NewRequest("GET", "https://"+listen, nil)
	if err != nil {
		t.Fatal(err)
	}
	if res, _ := l.do(hc, r, "Host", tun.Name+"."+domain); res.StatusCode != 200 {
		t.Errorf("%s", res.Status)
	}
	for _, name := range []string{"abcdefgh", "www", "a.b"} {
		if _, err := try(name); err == nil {
			t.Errorf("a certificate for %s", name)
		}
	}
	// kept over a restart
	if err := l.m.Close(); err != nil {
		t.Fatal(err)
	}
	l.start(with)
	eventually(t, "the certificate is there again", func() bool {
		again, err := try(tun.Name)
		return err == nil && again.Equal(cert)
	})
	if len(a.asked) != 1 {
		t.Errorf("asked for %v", a.asked)
	}
	// closed: no certificate any more, as for a name that never was
	l.tunnel("sb-1", sandbox.TunnelSpec{Port: 81})
	if err := l.m.CloseTunnel(t.Context(), "a", tun.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := try(tun.Name); err == nil {
		t.Error("a closed tunnel has a certificate")
	}
	found := ""
	_ = filepath.WalkDir(filepath.Join(l.dir, "tunnel", "acme", "certificates"), func(p string, _ os.DirEntry, _ error) error {
		if strings.Contains(p, tun.Name) {
			found = p
		}
		return nil
	})
	if found != "" {
		t.Errorf("left: %s", found)
	}
}

// TestOwnCertificate: files that the operator's own tool renews.
func TestOwnCertificate(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c, err := openCA(dir, domain, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile := filepath.Join(dir, "c.pem"), filepath.Join(dir, "k.pem")
	write := func() *x509.Certificate {
		t.Helper()
		c.leaf = nil
		leaf, err := c.certificate()
		if err != nil {
			t.Fatal(err)
		}
		raw, err := x509.MarshalPKCS8PrivateKey(leaf.PrivateKey)
		if err != nil {
			t.Fatal(err)
		}
		for f, b := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: leaf.Certificate[0]}, keyFile: {Type: "PRIVATE KEY", Bytes: raw}} {
			if err := os.WriteFile(f, pem.EncodeToMemory(b), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return leaf.Leaf
	}
	first := write()
	if _, err := openCertFiles(certFile, keyFile, "other.example.test"); sandbox.KindOf(err) != sandbox.Invalid {
		t.Errorf("for another domain: %v", err)
	}
	f, err := openCertFiles(certFile, keyFile, domain)
	if err != nil {
		t.Fatal(err)
	}
	got := func() *x509.Certificate {
		t.Helper()
		f.read = time.Time{} // look again now
		c, err := f.certificate()
		if err != nil {
			t.Fatal(err)
		}
		return c.Leaf
	}
	if !got().Equal(first) {
		t.Error("another certificate")
	}
	second := write()
	later := time.Now().Add(time.Second)
	for _, n := range []string{certFile, keyFile} {
		if err := os.Chtimes(n, later, later); err != nil {
			t.Fatal(err)
		}
	}
	if !got().Equal(second) {
		t.Error("a renewed certificate is not taken")
	}
	if err := os.WriteFile(keyFile, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if !got().Equal(second) {
		t.Error("a broken file takes the certificate away")
	}
}
