// Package setup makes the options of the network from the configuration: one
// place for the daemon and for doctor, which must look at the same things.
package setup

import (
	"crypto/sha256"
	"encoding/hex"
	"net/netip"
	"net/url"
	"path/filepath"

	"vivarium/config"
	"vivarium/network"
	"vivarium/sandbox"
)

// Instance names what a daemon makes on the host, so that those of several data
// directories do not get into each other's way.
func Instance(dataDir string) string {
	abs, err := filepath.Abs(dataDir)
	if err != nil {
		abs = dataDir
	}
	sum := sha256.Sum256([]byte(abs))
	return hex.EncodeToString(sum[:])[:6]
}

// Options are those that the configuration asks for. Errors are Invalid.
func Options(cfg *config.Config) (network.Options, error) {
	o := network.Options{Dir: cfg.DataDir, Instance: Instance(cfg.DataDir), Pool: cfg.Network.Pool}
	var err error
	if cfg.Network.Subnet != "" {
		if o.Subnet, err = netip.ParsePrefix(cfg.Network.Subnet); err != nil {
			return o, sandbox.Invalid.Errorf("network.subnet: %w", err)
		}
	}
	if o.Node, err = cfg.Network.Node(); err != nil {
		return o, err
	}
	o.BytesPerSecond, o.ConnsPerSecond = int64(cfg.Network.Bandwidth), int64(cfg.Network.ConnRate)
	o.MaxConns, o.DNSRate = uint32(cfg.Network.MaxConns), cfg.Network.DNSRate
	for name, text := range cfg.Network.Upstreams {
		u, err := url.Parse(text)
		if err != nil { // which would show the password
			return o, sandbox.Invalid.Errorf("network.upstreams: %q: want an http, https or socks5 URL", name)
		}
		if o.Proxies == nil {
			o.Proxies = map[string]*url.URL{}
		}
		o.Proxies[name] = u
	}
	for _, r := range cfg.Network.Resolvers {
		a, err := netip.ParseAddrPort(r)
		if err != nil {
			ip, ierr := netip.ParseAddr(r)
			if ierr != nil {
				return o, sandbox.Invalid.Errorf("network.resolvers: %w", err)
			}
			a = netip.AddrPortFrom(ip, 53)
		}
		o.Upstream = append(o.Upstream, a)
	}
	return o, nil
}
