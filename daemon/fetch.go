package daemon

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"vivarium/config"
	"vivarium/image"
	"vivarium/network/policy"
	"vivarium/sandbox"
)

// fetch says which addresses the daemon connects to for somebody: what a sandbox
// with policy public reaches under the operator's floor, grants and denied
// ranges, and the registries that the config names. Else a tenant could ask the
// daemon what this host and its network hide from him, and read the answer in the
// error. It is asked after every resolution and redirect.
type fetch struct {
	policy *policy.Policy
	floor6 bool // the floor lets all of the public internet pass
	deny   []netip.Prefix
	named  []place // registries of the config
	lookup func(ctx context.Context, network, host string) ([]netip.Addr, error)
	local  func() ([]netip.Addr, error)
}

func newFetch(node policy.Node) (*fetch, error) {
	p, err := node.Compile(sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic})
	if err != nil {
		return nil, err
	}
	return &fetch{policy: p, floor6: p.Simple(), deny: node.Deny, lookup: net.DefaultResolver.LookupNetIP, local: localAddrs}, nil
}

// forImages is fetch for pulls. The first tenant's are the operator's own, who may
// have a registry anywhere.
func (f *fetch) forImages(cfg *config.Config) func(tenant string) image.DialPolicy {
	for _, list := range cfg.Images.Mirrors {
		for _, m := range list {
			f.name(m)
		}
	}
	for _, h := range cfg.Images.Insecure {
		f.name(h)
	}
	return func(tenant string) image.DialPolicy {
		if tenant == DefaultTenant {
			return nil
		}
		return func(ctx context.Context, _, host, addr string) error { return f.allow(ctx, host, addr) }
	}
}

// dial connects to host:port, whatever the name resolves to being judged.
func (f *fetch) dial(ctx context.Context, network, address string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, sandbox.Invalid.Errorf("address %q: %w", address, err)
	}
	d := net.Dialer{Timeout: 15 * time.Second, ControlContext: func(ctx context.Context, _, addr string, _ syscall.RawConn) error {
		return f.allow(ctx, host, addr)
	}}
	return d.DialContext(ctx, network, address)
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
)

// allow decides on a connection to addr, "ip:port", which host resolved to.
func (f *fetch) allow(ctx context.Context, host, addr string) error {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		return sandbox.Denied.Errorf("address %q: %w", addr, err)
	}
	a := ap.Addr().Unmap().WithZone("")
	if in(f.deny, a) {
		return sandbox.Denied.Errorf("it is in network.deny")
	}
	if f.isNamed(ctx, a, ap.Port()) {
		return nil
	}
	own, err := f.local() // be they public: the host's services are not for tenants
	if err != nil {
		return err
	}
	if a.Is4() {
		name, _ := policy.Name(host) // an address has none
		v := f.policy.Decide(policy.Flow{Name: name, Addr: a, Port: ap.Port(), Protocol: sandbox.ProtocolTCP}, own...)
		if !v.Allowed {
			return sandbox.Denied.Errorf("%s", v.Rule)
		}
		return nil
	}
	if !f.floor6 || !public6.Contains(a) || in(hidden6, a) || slices.Contains(own, a) {
		return sandbox.Denied.Errorf("it is not on the public internet")
	}
	return nil
}

func in(l []netip.Prefix, a netip.Addr) bool {
	for _, p := range l {
		if p.Contains(a) {
			return true
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
