package daemon

import (
	"errors"
	"log/slog"
	"net/netip"
	"path/filepath"
	"sync/atomic"

	"vivarium/config"
	"vivarium/engine"
	"vivarium/network"
	"vivarium/network/policy"
	"vivarium/packagecache"
	"vivarium/sandbox"
)

// The package cache's place among the network's local services.
const (
	cacheService = "packages"
	cachePort    = 80
)

// openCache starts the cache of packages inside the router. A sandbox gets from
// it what its policy lets it fetch by itself, and shares it with its tenant's.
func openCache(cfg *config.Config, nw *network.Network, fetch *fetch, eng *atomic.Pointer[engine.Engine], log *slog.Logger) (*packagecache.Cache, error) {
	who := func(a netip.Addr) (string, sandbox.NetworkPolicy) {
		slot, _, ok := nw.SlotOf(a)
		e := eng.Load()
		if !ok || e == nil {
			return "", sandbox.NetworkPolicy{}
		}
		return e.SlotTenant(slot)
	}
	pc := packagecache.Config{
		Dir: filepath.Join(cfg.DataDir, "packages"), Budget: int64(cfg.Cache.DiskBudget), GoDirect: cfg.Cache.GoDirect,
		Dial: fetch.dial, Log: log,
		Tenant: func(a netip.Addr) string { t, _ := who(a); return t },
		Allow: func(a netip.Addr, host string, port uint16) bool {
			t, np := who(a)
			if t == "" {
				return false
			}
			p, err := nw.Compile(np)
			if err != nil {
				return false
			}
			f := policy.Flow{Port: port, Protocol: sandbox.ProtocolTCP}
			if ip, err := netip.ParseAddr(host); err == nil {
				f.Addr = ip
			} else if f.Name, _ = policy.Name(host); f.Name == "" {
				return false
			}
			return p.Decide(f).Allowed
		},
	}
	for kind, list := range map[string]*[]packagecache.Upstream{
		packagecache.Debian: &pc.Debian, packagecache.NPM: &pc.NPM, packagecache.PyPI: &pc.PyPI, packagecache.Go: &pc.Go,
	} {
		for _, u := range cfg.Cache.Upstreams[kind] {
			*list = append(*list, packagecache.Upstream{Name: u.Name, URL: u.URL, Also: u.Also})
		}
	}
	c, err := packagecache.Open(pc)
	if err != nil {
		return nil, err
	}
	ln, err := nw.LocalListener(cacheService)
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	go func() {
		if err := c.Serve(ln); err != nil {
			log.Error("serve packages", "err", err)
		}
	}()
	return c, nil
}

// furnishing is what sandboxes get so that their tools use the cache.
func furnishing(c *packagecache.Cache, at netip.Addr) func() engine.Furnish {
	return func() engine.Furnish {
		env, files := c.Setup(netip.AddrPortFrom(at, cachePort))
		f := engine.Furnish{Env: env}
		for _, x := range files {
			f.Files = append(f.Files, engine.FurnishFile(x))
		}
		return f
	}
}
