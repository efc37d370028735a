package daemon

import (
	"context"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"vivarium/config"
	"vivarium/image"
	"vivarium/network/policy"
	"vivarium/sandbox"
)

// fetchPolicy says which addresses the daemon connects to for a tenant's pulls:
// what a sandbox with policy public reaches, and the registries that the config
// names. Else a tenant could ask the daemon what this host and its network hide
// from him, and read the answer in the error. The first tenant's pulls are the
// operator's own, who may have a registry anywhere.
func fetchPolicy(cfg *config.Config, grants []policy.Grant, deny []netip.Prefix) func(tenant string) image.DialPolicy {
	p := &fetch{grants: grants, deny: deny, lookup: net.DefaultResolver.LookupNetIP, local: localAddrs}
	for _, list := range cfg.Images.Mirrors {
		for _, m := range list {
			p.name(m)
		}
	}
	for _, h := range cfg.Images.Insecure {
		p.name(h)
	}
	return func(tenant string) image.DialPolicy {
		if tenant == DefaultTenant {
			return nil
		}
		return p.allow
	}
}

type fetch struct {
	grants []policy.Grant
	deny   []netip.Prefix
	named  []place // registries of the config
	lookup func(ctx context.Context, network, host string) ([]netip.Addr, error)
	local  func() ([]netip.Addr, error)
}

// place is a host, on one port or ("") all.
type place struct{ host, port string }

// name notes a registry or mirror, "[http://]host[:port][/prefix]".
func (f *fetch) name(s string) {
	_, rest, ok := strings.Cut(s, "://")
	if !ok {
		rest = s
	}
	rest, _, _ = strings.Cut(rest, "/")
	host, port, err := net.SplitHostPort(rest)
	if err != nil {
		host, port = strings.Trim(rest, "[]"), ""
	}
	f.named = append(f.named, place{host, port})
}

// public6 is what is given out of IPv6 (IANA), hidden6 what of it is not the
// internet's: Teredo and other protocols, documentation, 6to4.
var (
	public6 = netip.MustParsePrefix("2000::/3")
	hidden6 = []netip.Prefix{
		netip.MustParsePrefix("2001::/23"), netip.MustParsePrefix("2001:db8::/32"),
		netip.MustParsePrefix("2002::/16"), netip.MustParsePrefix("3fff::/20"),
	}
	hidden4 = policy.SpecialPurpose()
)

func (f *fetch) allow(ctx context.Context, _, _, addr string) error {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		return sandbox.Denied.Errorf("address %q: %w", addr, err)
	}
	a := ap.Addr().Unmap().WithZone("")
	if in(f.deny, a) {
		return sandbox.Denied.Errorf("it is in network.deny")
	}
	if f.isPublic(a) || f.granted(a, ap.Port()) || f.isNamed(ctx, a, ap.Port()) {
		return nil
	}
	return sandbox.Denied.Errorf("it is not on the public internet")
}

func in(l []netip.Prefix, a netip.Addr) bool {
	for _, p := range l {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

func (f *fetch) isPublic(a netip.Addr) bool {
	if a.Is4() && in(hidden4, a) || a.Is6() && (!public6.Contains(a) || in(hidden6, a)) {
		return false
	}
	// the host's own, be they public: its services are not for tenants
	own, err := f.local()
	if err != nil {
		return false
	}
	for _, o := range own {
		if o == a {
			return false
		}
	}
	return true
}

func (f *fetch) granted(a netip.Addr, port uint16) bool {
	for _, g := range f.grants {
		if !g.Prefix.Contains(a) {
			continue
		}
		if len(g.Ports) == 0 {
			return true
		}
		for _, p := range g.Ports {
			if p == port {
				return true
			}
		}
	}
	return false
}

// lookupTimeout bounds the resolution of a registry that the config names.
const lookupTimeout = 5 * time.Second

func (f *fetch) isNamed(ctx context.Context, a netip.Addr, port uint16) bool {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	for _, n := range f.named {
		if n.port != "" && n.port != strconv.Itoa(int(port)) {
			continue
		}
		if ip, err := netip.ParseAddr(n.host); err == nil {
			if ip.Unmap() == a {
				return true
			}
			continue
		}
		ips, err := f.lookup(ctx, "ip", n.host)
		if err != nil {
			continue // then it is not this one
		}
		for _, ip := range ips {
			if ip.Unmap() == a {
				return true
			}
		}
	}
	return false
}

// localAddrs are the addresses of this host.
func localAddrs() ([]netip.Addr, error) {
	l, err := net.InterfaceAddrs()
	if err != nil {
		return nil, sandbox.Internal.Errorf("list addresses of the host: %w", err)
	}
	var out []netip.Addr
	for _, x := range l {
		if n, ok := x.(*net.IPNet); ok {
			if a, ok := netip.AddrFromSlice(n.IP); ok {
				out = append(out, a.Unmap())
			}
		}
	}
	return out, nil
}
