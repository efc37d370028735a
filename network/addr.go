package network

import (
	"context"
	"net/netip"
	"slices"

	"github.com/miekg/dns"

	"vivarium/sandbox"
)

// DNS is the address of the only resolver that answers sandboxes.
func (n *Network) DNS() netip.Addr { return n.dnsAddr() }

// HostAddrs are the addresses of the host itself.
func (n *Network) HostAddrs() []netip.Addr {
	return slices.Clone(n.hostAddrs())
}

// hostAddrs may not be changed.
func (n *Network) hostAddrs() []netip.Addr { return *n.hosts.Load() }

// Lookup asks the host's resolvers for the IPv4 addresses of a name, for the
// daemon itself: nothing is taken out of the answer. Errors: NotFound,
// Unavailable (no resolver answered), Timeout.
func (n *Network) Lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	if err := n.enter(); err != nil {
		return nil, err
	}
	defer n.ops.Done()
	ctx, cancel := context.WithTimeout(ctx, dnsAnswerDeadline)
	defer cancel()
	m, err := n.dns.upstream.ask(ctx, dns.Question{Name: dns.Fqdn(name), Qtype: dns.TypeA, Qclass: dns.ClassINET})
	if err != nil {
		if ctx.Err() != nil {
			return nil, sandbox.Timeout.Errorf("resolve %s: %w", name, err)
		}
		return nil, sandbox.Unavailable.Errorf("resolve %s: %w", name, err)
	}
	var out []netip.Addr
	for _, rr := range m.Answer {
		if a, ok := rr.(*dns.A); ok && len(out) < maxRecords {
			if ip, ok := netip.AddrFromSlice(a.A.To4()); ok {
				out = append(out, ip)
			}
		}
	}
	if len(out) == 0 {
		return nil, sandbox.NotFound.Errorf("%s has no IPv4 address", name)
	}
	return out, nil
}
