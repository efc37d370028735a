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

// authority is the certificate authority of one sandbox: a root, which is put
// inside, and an intermediate below it, which issues. Both can vouch for the bound
// hosts and what is below them, and for nothing else; the constraint is critical
// (RFC 5280 section 4.2.1.10), so a client that does not know it refuses them.
// There are two because clients need not apply the constraints of a root (section
// 6.1), and Java does not: the root's key is thrown away once it has signed the
// intermediate, whose constraint every client applies. The intermediate's key
// never leaves the host.
type authority struct {
	root   *x509.Certificate
	issuer *x509.Certificate
	key    *ecdsa.PrivateKey // the issuer's
	leaf   *ecdsa.PrivateKey // of all leaves: what they prove is the same

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
	rootKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, sandbox.Internal.Errorf("make key of a CA: %w", err)
	}
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
	names = slices.Compact(names)
	// Each sandbox's CA has a name of its own: OpenSSL finds CAs by name, and an
	// old one from a snapshot must not be found in place of this one.
	id := hex.EncodeToString(serial().Bytes()[:4])
	any4, any6 := net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	ca := func(name string, path int) *x509.Certificate {
		return &x509.Certificate{
			SerialNumber:                serial(),
			Subject:                     pkix.Name{CommonName: name + id},
			NotBefore:                   now.Add(-time.Hour).Truncate(time.Second),
			NotAfter:                    now.Add(lifetime + lifetimeMargin).Truncate(time.Second),
			KeyUsage:                    x509.KeyUsageCertSign,
			BasicConstraintsValid:       true,
			IsCA:                        true,
			MaxPathLen:                  path,
			MaxPathLenZero:              path == 0,
			PermittedDNSDomainsCritical: true,
			PermittedDNSDomains:         names,
			ExcludedIPRanges:            []*net.IPNet{&any4, &any6},
		}
	}
	rootDER, err := x509.CreateCertificate(rand.Reader, ca(subjectName, 1), ca(subjectName, 1), rootKey.Public(), rootKey)
	if err != nil {
		return nil, sandbox.Internal.Errorf("make a CA: %w", err)
	}
	root, err := x509.ParseCertificate(rootDER)
	if err != nil {
		return nil, sandbox.Internal.Errorf("make a CA: %w", err)
	}
	issuerDER, err := x509.CreateCertificate(rand.Reader, ca(issuerName, 0), root, key.Public(), rootKey)
	if err != nil {
		return nil, sandbox.Internal.Errorf("make a CA: %w", err)
	}
	return loadAuthority(rootDER, issuerDER, key)
}

// What the subjects of the two certificates begin with.
const (
	subjectName = "Vivarium sandbox CA "
	issuerName  = "Vivarium sandbox issuer "
)

func loadAuthority(rootDER, issuerDER []byte, key *ecdsa.PrivateKey) (*authority, error) {
	root, err := x509.ParseCertificate(rootDER)
	if err != nil {
		return nil, sandbox.Internal.Errorf("read a CA: %w", err)
	}
	issuer, err := x509.ParseCertificate(issuerDER)
	if err != nil {
		return nil, sandbox.Internal.Errorf("read a CA: %w", err)
	}
	if pub, ok := issuer.PublicKey.(*ecdsa.PublicKey); !ok || !pub.Equal(key.Public()) {
		return nil, sandbox.Internal.Errorf("read a CA: the key is another's")
	}
	leaf, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, sandbox.Internal.Errorf("make key of certificates: %w", err)
	}
	return &authority{root: root, issuer: issuer, key: key, leaf: leaf, leaves: map[string]*tls.Certificate{}}, nil
}

func (a *authority) pem() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.root.Raw})
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
	if end.After(a.issuer.NotAfter) {
		end = a.issuer.NotAfter
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
	der, err := x509.CreateCertificate(rand.Reader, t, a.issuer, a.leaf.Public(), a.key)
	if err != nil {
		return nil, sandbox.Internal.Errorf("make certificate for %s: %w", host, err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, sandbox.Internal.Errorf("make certificate for %s: %w", host, err)
	}
	return &tls.Certificate{Certificate: [][]byte{der, a.issuer.Raw}, PrivateKey: a.leaf, Leaf: leaf}, nil
}
