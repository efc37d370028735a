package tunnel

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"github.com/caddyserver/certmagic"
	"go.uber.org/zap"

	"vivarium/sandbox"
)

// ACME is how certificates are got from an authority (RFC 8555). It proves each
// name by TLS-ALPN-01 (RFC 8737) on the tunnels' own listener, which port 443 of
// every name has to lead to.
type ACME struct {
	Email     string // of the account; "" is no ACME
	Directory string // https URL of the authority; "" is Let's Encrypt's
	Root      string // PEM file: whom to trust besides the system's, for an authority of one's own
}

// acmeCerts has one certificate for each name that is in use. What an authority
// signs is published (certificate transparency), so that the names are no secret.
type acmeCerts struct {
	cfg    *certmagic.Config
	cache  *certmagic.Cache
	issuer string
	log    *slog.Logger
	ctx    context.Context
	cancel context.CancelFunc

	mu    sync.Mutex
	names map[string]context.CancelFunc // ends the getting of it; guarded by mu
}

func openACME(a ACME, dir, listen string, log *slog.Logger) (*acmeCerts, error) {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return nil, sandbox.Invalid.Errorf("tunnel listen address %q: %w", listen, err)
	}
	n, err := strconv.Atoi(port)
	if err != nil {
		return nil, sandbox.Invalid.Errorf("tunnel listen address %q: %w", listen, err)
	}
	var roots *x509.CertPool
	if a.Root != "" {
		pem, err := os.ReadFile(a.Root)
		if err != nil {
			return nil, sandbox.Invalid.Errorf("read root of ACME authority: %w", err)
		}
		if roots, err = x509.SystemCertPool(); err != nil {
			roots = x509.NewCertPool()
		}
		if !roots.AppendCertsFromPEM(pem) {
			return nil, sandbox.Invalid.Errorf("%s has no certificate in it", a.Root)
		}
	}
	if a.Directory == "" {
		a.Directory = certmagic.LetsEncryptProductionCA
	}
	c := &acmeCerts{log: log, names: map[string]context.CancelFunc{}}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	quiet := zap.NewNop() // what matters comes by OnEvent
	c.cache = certmagic.NewCache(certmagic.CacheOptions{
		GetConfigForCert: func(certmagic.Certificate) (*certmagic.Config, error) { return c.cfg, nil },
		Logger:           quiet,
	})
	c.cfg = certmagic.New(c.cache, certmagic.Config{
		Storage: &certmagic.FileStorage{Path: filepath.Join(dir, "acme")},
		OCSP:    certmagic.OCSPConfig{DisableStapling: true},
		Logger:  quiet,
		OnEvent: c.event,
	})
	issuer := certmagic.NewACMEIssuer(c.cfg, certmagic.ACMEIssuer{
		CA: a.Directory, Email: a.Email, Agreed: true, TrustedRoots: roots, Logger: quiet,
		DisableHTTPChallenge: true, ListenHost: host, AltTLSALPNPort: n,
	})
	c.cfg.Issuers = []certmagic.Issuer{issuer}
	c.issuer = issuer.IssuerKey()
	return c, nil
}

func (c *acmeCerts) event(_ context.Context, event string, data map[string]any) error {
	switch event {
	case "cert_obtained":
		c.log.Info("got certificate of tunnel", "host", data["identifier"])
	case "cert_failed":
		c.log.Error("get certificate of tunnel", "host", data["identifier"], "err", fmt.Sprint(data["error"]))
	}
	return nil
}

func (c *acmeCerts) get(hello *tls.ClientHelloInfo, host string) (*tls.Certificate, error) {
	c.mu.Lock()
	_, ok := c.names[host]
	c.mu.Unlock()
	if !ok { // one that was closed looks like one that never was
		return nil, sandbox.NotFound.Errorf("no certificate")
	}
	return c.cfg.GetCertificate(hello)
}

func (c *acmeCerts) protocols() []string { return []string{"acme-tls/1"} }

// open gets the certificate of a name, which takes a while, and keeps it fresh.
func (c *acmeCerts) open(host string) {
	ctx, cancel := context.WithCancel(c.ctx)
	c.mu.Lock()
	c.names[host] = cancel
	c.mu.Unlock()
	if err := c.cfg.ManageAsync(ctx, []string{host}); err != nil {
		c.log.Error("get certificate of tunnel", "host", host, "err", err)
	}
}

func (c *acmeCerts) close(host string) {
	c.mu.Lock()
	if cancel := c.names[host]; cancel != nil {
		cancel()
	}
	delete(c.names, host)
	c.mu.Unlock()
	c.cache.RemoveManaged([]certmagic.SubjectIssuer{{Subject: host}})
	if err := c.cfg.Storage.Delete(c.ctx, certmagic.StorageKeys.CertsSitePrefix(c.issuer, host)); err != nil {
		c.log.Warn("remove certificate of tunnel", "host", host, "err", err)
	}
}

func (c *acmeCerts) stop() {
	c.cancel()
	c.cache.Stop()
}
