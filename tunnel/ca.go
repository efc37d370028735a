package tunnel

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"vivarium/sandbox"
)

// Lives of certificates.
const (
	caLife    = 10 * 365 * 24 * time.Hour
	leafLife  = 90 * 24 * time.Hour
	renewLeft = 30 * 24 * time.Hour
	backdate  = time.Hour // for clocks that go late
)

// CAFile is the local authority's certificate, below Options.Dir, for clients to
// trust.
const CAFile = "ca.pem"

// localCA signs the certificate of all tunnels. What it signs counts below the
// domain only, so that trusting it is no risk beyond (RFC 5280 section 4.2.1.10).
type localCA struct {
	domain string
	cert   *x509.Certificate
	key    crypto.Signer
	now    func() time.Time

	mu   sync.Mutex
	leaf *tls.Certificate // guarded by mu
}

// openCA reads the authority in dir, or makes one where there is none for this
// domain, or it is about to end.
func openCA(dir, domain string, now func() time.Time) (*localCA, error) {
	c := &localCA{domain: domain, now: now}
	ok, err := c.read(dir)
	if err != nil || ok {
		return c, err
	}
	return c, c.make(dir)
}

func (c *localCA) read(dir string) (bool, error) {
	certPEM, err := os.ReadFile(filepath.Join(dir, CAFile))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, sandbox.Internal.Errorf("read tunnel CA: %w", err)
	}
	keyPEM, err := os.ReadFile(filepath.Join(dir, "ca.key"))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, sandbox.Internal.Errorf("read key of tunnel CA: %w", err)
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil { // a crash between the two files leaves such a pair
		return false, nil
	}
	if c.cert, err = x509.ParseCertificate(pair.Certificate[0]); err != nil {
		return false, nil
	}
	c.key, _ = pair.PrivateKey.(crypto.Signer)
	return c.key != nil && slices.Equal(c.cert.PermittedDNSDomains, []string{c.domain}) &&
		c.now().After(c.cert.NotBefore) && c.now().Add(leafLife).Before(c.cert.NotAfter), nil
}

func serial() (*big.Int, error) { return rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120)) }

func (c *localCA) make(dir string) error {
	fail := func(err error) error { return sandbox.Internal.Errorf("make tunnel CA: %w", err) }
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fail(err)
	}
	n, err := serial()
	if err != nil {
		return fail(err)
	}
	everyV4, everyV6 := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	t := &x509.Certificate{
		SerialNumber: n,
		Subject:      pkix.Name{Organization: []string{"Vivarium"}, CommonName: "Vivarium tunnels " + c.domain},
		NotBefore:    c.now().Add(-backdate), NotAfter: c.now().Add(caLife),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		PermittedDNSDomainsCritical: true, PermittedDNSDomains: []string{c.domain},
		ExcludedIPRanges: []*net.IPNet{everyV4, everyV6},
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return fail(err)
	}
	if c.cert, err = x509.ParseCertificate(der); err != nil {
		return fail(err)
	}
	c.key = key
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return fail(err)
	}
	if err := writeFile(filepath.Join(dir, "ca.key"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}), 0o600); err != nil {
		return fail(err)
	}
	if err := writeFile(filepath.Join(dir, CAFile), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644); err != nil {
		return fail(err)
	}
	return nil
}

// certificate is the one of all tunnels, made anew before it ends. Its key is
// nowhere but in memory.
func (c *localCA) certificate() (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leaf != nil && c.now().Add(renewLeft).Before(c.leaf.Leaf.NotAfter) {
		return c.leaf, nil
	}
	fail := func(err error) error { return sandbox.Internal.Errorf("make certificate of tunnels: %w", err) }
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fail(err)
	}
	n, err := serial()
	if err != nil {
		return nil, fail(err)
	}
	end := c.now().Add(leafLife)
	if end.After(c.cert.NotAfter) {
		end = c.cert.NotAfter
	}
	t := &x509.Certificate{
		SerialNumber: n, Subject: pkix.Name{Organization: []string{"Vivarium"}},
		NotBefore: c.now().Add(-backdate), NotAfter: end, DNSNames: []string{"*." + c.domain},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, t, c.cert, key.Public(), c.key)
	if err != nil {
		return nil, fail(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fail(err)
	}
	c.leaf = &tls.Certificate{Certificate: [][]byte{der, c.cert.Raw}, PrivateKey: key, Leaf: leaf}
	return c.leaf, nil
}
