package secret

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"math/big"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"vivarium/sandbox"
)

const (
	// MaxLifetime bounds a sandbox's CA. A sandbox without an end gets that much.
	MaxLifetime = 5 * 365 * 24 * time.Hour
	// lifetimeMargin is for ends that are put off, and clocks that are wrong.
	lifetimeMargin = 24 * time.Hour
	leafLifetime   = 30 * 24 * time.Hour
	maxLeaves      = 256 // certificates kept ready for one sandbox
)

// authority is the certificate authority of one sandbox. Its key never leaves the
// host. It can vouch for the bound hosts and what is below them, and for nothing
// else: the constraint is critical (RFC 5280 section 4.2.1.10), so a client that
// does not know it refuses the CA.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	leaf *ecdsa.PrivateKey // of all leaves: what they prove is the same

	mu     sync.Mutex
	leaves map[string]*tls.Certificate // guarded by mu
}

// serial is at most 20 bytes and positive (RFC 5280 section 4.1.2.2).
func serial() *big.Int {
	var b [16]byte
	rand.Read(b[:])
	b[0] = b[0]&0x7f | 0x40
	return new(big.Int).SetBytes(b[:])
}

// newAuthority makes a CA for hosts (patterns).
func newAuthority(hosts []string, lifetime time.Duration, now time.Time) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, sandbox.Internal.Errorf("make key of a CA: %w", err)
	}
	if lifetime <= 0 || lifetime > MaxLifetime {
		lifetime = MaxLifetime
	}
	// A constraint covers the name and everything below, so *.x and x are one.
	var names []string
	for _, h := range hosts {
		names = append(names, strings.TrimPrefix(h, "*."))
	}
	slices.Sort(names)
	n := serial()
	// Each sandbox's CA has a name of its own: OpenSSL finds CAs by name, and an
	// old one from a snapshot must not be found in place of this one.
	id := hex.EncodeToString(n.Bytes()[:4])
	any4, any6 := net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	t := &x509.Certificate{
		SerialNumber:                n,
		Subject:                     pkix.Name{CommonName: subjectName + id},
		NotBefore:                   now.Add(-time.Hour).Truncate(time.Second),
		NotAfter:                    now.Add(lifetime + lifetimeMargin).Truncate(time.Second),
		KeyUsage:                    x509.KeyUsageCertSign,
		BasicConstraintsValid:       true,
		IsCA:                        true,
		MaxPathLen:                  0,
		MaxPathLenZero:              true,
		PermittedDNSDomainsCritical: true,
		PermittedDNSDomains:         slices.Compact(names),
		ExcludedIPRanges:            []*net.IPNet{&any4, &any6},
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return nil, sandbox.Internal.Errorf("make a CA: %w", err)
	}
	return loadAuthority(der, key)
}

// subjectName is what the subject of every CA begins with.
const subjectName = "Vivarium sandbox CA "

func loadAuthority(der []byte, key *ecdsa.PrivateKey) (*authority, error) {
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, sandbox.Internal.Errorf("read a CA: %w", err)
	}
	if pub, ok := cert.PublicKey.(*ecdsa.PublicKey); !ok || !pub.Equal(key.Public()) {
		return nil, sandbox.Internal.Errorf("read a CA: the key is another's")
	}
	leaf, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, sandbox.Internal.Errorf("make key of certificates: %w", err)
	}
	return &authority{cert: cert, key: key, leaf: leaf, leaves: map[string]*tls.Certificate{}}, nil
}

func (a *authority) pem() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
}

// certificate is the leaf of a canonical name, which the caller has checked.
func (a *authority) certificate(host string, now time.Time) (*tls.Certificate, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.leaves[host]; c != nil && now.Before(c.Leaf.NotAfter.Add(-time.Hour)) {
		return c, nil
	}
	c, err := a.issue(host, now)
	if err != nil {
		return nil, err
	}
	if len(a.leaves) >= maxLeaves { // names below a wildcard: whichever comes first goes
		for h := range a.leaves {
			delete(a.leaves, h)
			break
		}
	}
	a.leaves[host] = c
	return c, nil
}

func (a *authority) issue(host string, now time.Time) (*tls.Certificate, error) {
	end := now.Add(leafLifetime)
	if end.After(a.cert.NotAfter) {
		end = a.cert.NotAfter
	}
	t := &x509.Certificate{
		SerialNumber:          serial(),
		NotBefore:             now.Add(-time.Hour).Truncate(time.Second),
		NotAfter:              end.Truncate(time.Second),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		DNSNames:              []string{host},
	}
	if len(host) <= 64 { // X.520's bound of a common name
		t.Subject.CommonName = host
	}
	der, err := x509.CreateCertificate(rand.Reader, t, a.cert, a.leaf.Public(), a.key)
	if err != nil {
		return nil, sandbox.Internal.Errorf("make certificate for %s: %w", host, err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, sandbox.Internal.Errorf("make certificate for %s: %w", host, err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: a.leaf, Leaf: leaf}, nil
}
