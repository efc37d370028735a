package secret

import (
	"bytes"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"vivarium/sandbox"
)

// image is a sandbox's files.
type image map[string][]byte

func (i image) read(p string) ([]byte, error) {
	b, ok := i[p]
	if !ok {
		return nil, fmt.Errorf("open %s: %w", p, fs.ErrNotExist)
	}
	return b, nil
}

func (i image) apply(t Trust) {
	for _, f := range t.Files {
		i[f.Path] = f.Data
	}
}

func bound(t testing.TB, hosts ...string) *Binding {
	v := open(t)
	put(t, v, Secret{Name: "KEY", Hosts: hosts}, theValue)
	return bind(t, v, BindSpec{Uses: []Use{{Name: "KEY"}}})
}

func roots(t testing.TB) []byte {
	t.Helper()
	return bound(t, "root.example").CA()
}

func TestTrustFiles(t *testing.T) {
	t.Parallel()
	b, old := bound(t, host), bound(t, host)
	bundle := roots(t)
	other := roots(t)
	before := image{
		"/etc/ssl/certs/ca-certificates.crt": bundle,
		"/opt/mine.pem":                      bytes.TrimSuffix(other, []byte("\n")),
		"/etc/ssl/cert.pem":                  nil, // empty
	}
	in := Inside{Env: map[string]string{"SSL_CERT_FILE": "/opt/mine.pem", "REQUESTS_CA_BUNDLE": "relative.pem", "PIP_CERT": "/nowhere.pem"}}
	for what, from := range map[string]image{
		"fresh": before,
		"with one that a snapshot kept": func() image {
			im := image{}
			for k, v := range before {
				im[k] = v
			}
			tr, err := old.TrustFiles(Inside{Read: im.read, Env: in.Env})
			if err != nil {
				t.Fatal(err)
			}
			im.apply(tr)
			return im
		}(),
	} {
		im := image{}
		for k, v := range from {
			im[k] = v
		}
		in.Read = im.read
		var tr Trust
		for range 2 { // the second time changes nothing
			var err error
			if tr, err = b.TrustFiles(in); err != nil {
				t.Fatal(err)
			}
			im.apply(tr)
		}
		if len(tr.Skipped) != 0 {
			t.Errorf("%s: skipped %v", what, tr.Skipped)
		}
		for _, p := range []string{"/etc/ssl/certs/ca-certificates.crt", "/opt/mine.pem"} {
			if n := bytes.Count(im[p], b.CA()); n != 1 || bytes.Contains(im[p], old.CA()) {
				t.Errorf("%s: %s has the CA %d times", what, p, n)
			}
			if n := count(t, im[p]); n != 2 {
				t.Errorf("%s: %s has %d certificates", what, p, n)
			}
		}
		if string(im[debianAnchor]) != string(b.CA()) {
			t.Errorf("%s: no anchor", what)
		}
		e := tr.Env
		if _, set := e["SSL_CERT_FILE"]; set || e["CURL_CA_BUNDLE"] != "/etc/ssl/certs/ca-certificates.crt" || e["NODE_EXTRA_CA_CERTS"] != debianAnchor {
			t.Errorf("%s: %v", what, e)
		}
		if _, set := e["REQUESTS_CA_BUNDLE"]; set {
			t.Errorf("%s: the image's variable is overridden", what)
		}
		write, remove, err := b.Strip(in)
		if err != nil {
			t.Fatal(err)
		}
		im.apply(Trust{Files: write})
		for _, p := range remove {
			delete(im, p)
		}
		for p, data := range before {
			if !bytes.Equal(im[p], data) {
				t.Errorf("%s: %s is not what it was", what, p)
			}
		}
		for p, data := range im {
			if bytes.Contains(data, b.CA()) {
				t.Errorf("%s: %s has the CA still", what, p)
			}
		}
		if write, _, err := b.Strip(in); err != nil || len(write) != 0 {
			t.Errorf("%s: stripped twice: %v, %v", what, write, err)
		}
	}
}

func count(t *testing.T, bundle []byte) (n int) {
	t.Helper()
	for {
		var b *pem.Block
		if b, bundle = pem.Decode(bundle); b == nil {
			return n
		}
		n++
	}
}

func TestTrustWithoutBundle(t *testing.T) {
	t.Parallel()
	b := bound(t, host)
	host := roots(t)
	im := image{}
	tr, err := b.TrustFiles(Inside{Read: im.read, Roots: host})
	if err != nil {
		t.Fatal(err)
	}
	im.apply(tr)
	got := im["/etc/ssl/certs/ca-certificates.crt"]
	if !bytes.Contains(got, host) || !bytes.Contains(got, b.CA()) || tr.Env["SSL_CERT_FILE"] != "/etc/ssl/certs/ca-certificates.crt" {
		t.Errorf("%s", got)
	}
	_, remove, err := b.Strip(Inside{Read: im.read})
	if err != nil || !strings.Contains(strings.Join(remove, " "), "/etc/ssl/certs/ca-certificates.crt") {
		t.Errorf("%v, %v", remove, err)
	}
	if n := count(t, HostRoots()); n == 0 {
		t.Log("this host has no CAs")
	}
}

func TestTrustHostile(t *testing.T) {
	t.Parallel()
	b := bound(t, host)
	huge := image{"/etc/ssl/certs/ca-certificates.crt": make([]byte, MaxTrustFile+1), "/etc/ssl/certs/java/cacerts": []byte("not a keystore")}
	tr, err := b.TrustFiles(Inside{Read: huge.read, Roots: roots(t)})
	if err != nil || len(tr.Skipped) != 2 {
		t.Errorf("%v, %v", tr.Skipped, err)
	}
	for _, f := range tr.Files {
		if huge[f.Path] != nil {
			t.Errorf("%s is overwritten", f.Path)
		}
	}
	if tr.Env["SSL_CERT_FILE"] != ownBundle {
		t.Errorf("%v", tr.Env)
	}
	if _, err := b.TrustFiles(Inside{Read: func(string) ([]byte, error) { return nil, errors.New("is a folder") }}); err != nil {
		t.Errorf("a file that cannot be read: %v", err)
	}
	if _, err := b.TrustFiles(Inside{Read: func(string) ([]byte, error) { return nil, sandbox.Gone.Errorf("ended") }}); !errors.Is(err, sandbox.Gone) {
		t.Errorf("a sandbox that is gone: %v", err)
	}
}

func TestHashName(t *testing.T) {
	t.Parallel()
	b := bound(t, host)
	got, err := hashName(b.ca.root.Raw)
	if err != nil {
		t.Fatal(err)
	}
	openssl, err := exec.LookPath("openssl")
	if err != nil {
		t.Skip("no openssl here to compare with")
	}
	cmd := exec.Command(openssl, "x509", "-noout", "-subject_hash")
	cmd.Stdin = bytes.NewReader(b.CA())
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if want := strings.TrimSpace(string(out)) + ".0"; got != want {
		t.Errorf("%s, openssl says %s", got, want)
	}
}

// keytool makes a keystore with one CA in it.
func keytool(t *testing.T, args ...string) []byte {
	t.Helper()
	tool, err := exec.LookPath("keytool")
	if err != nil {
		t.Skip("no keytool here")
	}
	dir := t.TempDir()
	ca, store := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "store")
	if err := os.WriteFile(ca, roots(t), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(tool, append([]string{"-importcert", "-noprompt", "-alias", "one", "-file", ca, "-keystore", store, "-storepass", "changeit"}, args...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	b, err := os.ReadFile(store)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// listed says what keytool finds in a keystore.
func listed(t *testing.T, b []byte, args ...string) string {
	t.Helper()
	p := filepath.Join(t.TempDir(), "store")
	if err := os.WriteFile(p, b, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("keytool", append([]string{"-list", "-keystore", p}, args...)...)
	cmd.Stdin = strings.NewReader("\n")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

// Keystores that Java made are changed, and Java reads them again.
func TestKeystores(t *testing.T) {
	t.Parallel()
	cert := bound(t, host).ca.root.Raw
	for name, c := range map[string]struct{ make, list []string }{
		"JKS": {[]string{"-storetype", "JKS"}, []string{"-storepass", "changeit"}},
		"PKCS12": {[]string{"-storetype", "PKCS12", "-J-Dkeystore.pkcs12.certProtectionAlgorithm=NONE", "-J-Dkeystore.pkcs12.macAlgorithm=NONE"},
			nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			before := keytool(t, c.make...)
			if !isKeystore(before) {
				t.Fatal("not known for a keystore")
			}
			b := before
			for range 2 {
				var err error
				if b, err = addToKeystore(b, cert); err != nil {
					t.Fatal(err)
				}
			}
			out := listed(t, b, c.list...)
			if strings.Count(out, "trustedCertEntry") != 2 || !strings.Contains(out, "vivarium,") || !strings.Contains(out, "one,") {
				t.Errorf("%s", out)
			}
			after, err := stripKeystore(b)
			if err != nil || !bytes.Equal(after, before) {
				t.Errorf("stripped it is not what it was: %v", err)
			}
		})
	}
	t.Run("with a password", func(t *testing.T) {
		t.Parallel()
		if b, err := addToKeystore(keytool(t, "-storetype", "PKCS12"), cert); err == nil {
			t.Errorf("changed: %d bytes", len(b))
		}
	})
}

func FuzzKeystore(f *testing.F) {
	head := append(bytes.Clone(jksMagic), 0, 0, 0, 2, 0, 0, 0, 0)
	f.Add(append(head, jksSum(head)...))
	if one, err := editJKS(append(head, jksSum(head)...), []byte("cert")); err == nil {
		f.Add(one)
	}
	f.Add([]byte{0x30, 3, 2, 1, 3})
	if b, err := partPKCS12([]byte("cert")); err == nil {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 12 && bytes.HasPrefix(b, jksMagic) { // so that more than the sum is tried
			b = append(bytes.Clone(b), jksSum(b)...)
		}
		added, err := addToKeystore(b, []byte("a certificate"))
		if err != nil {
			return
		}
		if !isKeystore(added) {
			t.Fatal("what came out is none")
		}
		again, err := addToKeystore(added, []byte("a certificate"))
		if err != nil || len(again) != len(added) {
			t.Errorf("again: %d and %d bytes, %v", len(added), len(again), err)
		}
		if s, err := stripKeystore(added); err != nil || len(s) >= len(added) {
			t.Errorf("stripped: %d of %d bytes, %v", len(s), len(added), err)
		}
	})
}

func FuzzBundle(f *testing.F) {
	f.Add([]byte("x"))
	f.Add([]byte("x\n" + beginMark + "\n" + endMark))
	f.Add([]byte(beginMark + joined + endMark + beginMark))
	ca := []byte("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n")
	f.Fuzz(func(t *testing.T, b []byte) {
		stripped := stripCA(b)
		added := appendCA(stripped, ca)
		if !bytes.Contains(added, ca) {
			t.Error("it is not there")
		}
		if bytes.Contains(stripped, []byte(beginMark)) { // half of ours, or one made of two
			return
		}
		if !bytes.Equal(stripCA(added), stripped) {
			t.Errorf("%q became %q", stripped, stripCA(added))
		}
		if !bytes.Equal(appendCA(added, ca), added) {
			t.Error("twice")
		}
	})
}
