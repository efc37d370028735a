package tunnel

import (
	"crypto/tls"
	"os"
	"strings"
	"sync"
	"time"

	"vivarium/sandbox"
)

// certs give the certificate of a handshake. Where they come from one by one,
// open and close say which names are in use.
type certs interface {
	get(hello *tls.ClientHelloInfo, host string) (*tls.Certificate, error)
	protocols() []string // besides HTTP's, for ALPN
	open(host string)
	close(host string)
	stop()
}

// wildcard is one certificate for all names.
type wildcard struct {
	certificate func() (*tls.Certificate, error)
}

func (w wildcard) get(*tls.ClientHelloInfo, string) (*tls.Certificate, error) { return w.certificate() }
func (wildcard) protocols() []string                                          { return nil }
func (wildcard) open(string)                                                  {}
func (wildcard) close(string)                                                 {}
func (wildcard) stop()                                                        {}

// certFiles is a certificate that the operator's own tool renews.
type certFiles struct {
	cert, key string

	mu   sync.Mutex
	last *tls.Certificate // guarded by mu
	read time.Time        // when the files were looked at; guarded by mu
	made [2]time.Time     // their times of change then; guarded by mu
}

// lookEvery is how often the files are looked at.
const lookEvery = 10 * time.Second

func openCertFiles(cert, key, domain string) (*certFiles, error) {
	f := &certFiles{cert: cert, key: key}
	c, err := f.certificate()
	if err != nil {
		return nil, err
	}
	if err := c.Leaf.VerifyHostname("x." + domain); err != nil {
		return nil, sandbox.Invalid.Errorf("the certificate %s is not for *.%s: %w", cert, domain, err)
	}
	return f, nil
}

func (f *certFiles) certificate() (*tls.Certificate, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.last != nil && time.Since(f.read) < lookEvery {
		return f.last, nil
	}
	var made [2]time.Time
	for i, name := range []string{f.cert, f.key} {
		fi, err := os.Stat(name)
		if err != nil {
			return f.orLast(err)
		}
		made[i] = fi.ModTime()
	}
	f.read = time.Now()
	if f.last != nil && made == f.made {
		return f.last, nil
	}
	c, err := tls.LoadX509KeyPair(f.cert, f.key)
	if err != nil { // such as between the writing of the two
		return f.orLast(err)
	}
	f.last, f.made = &c, made
	return f.last, nil
}

func (f *certFiles) orLast(err error) (*tls.Certificate, error) {
	if f.last != nil {
		return f.last, nil
	}
	return nil, sandbox.Invalid.Errorf("read certificate of tunnels: %w", err)
}

// within says whether a host is one label below a domain.
func within(host, domain string) (label string, ok bool) {
	label, ok = strings.CutSuffix(host, "."+domain)
	return label, ok && label != "" && !strings.Contains(label, ".")
}
