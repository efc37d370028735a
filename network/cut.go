package network

import (
	"errors"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

// Packets of a flow that a policy no longer allows are refused on their way out.
// What comes back in is let through as part of a flow that is known; so the flow is
// forgotten as well.

// cut ends what a slot's policy does not allow. The caller made it busy.
func (n *Network) cut(s *slot) error {
	n.proxy.Reevaluate(s.ID)
	return n.forgetRefused(map[netip.Addr]*slot{s.addr: s})
}

// cutAll does so for all slots, when a network is opened: the operator may have
// changed what holds for all.
func (n *Network) cutAll() error {
	if len(n.byAddr) == 0 {
		return nil
	}
	return n.forgetRefused(n.byAddr)
}

// forgetRefused removes the router's entries of flows that are not allowed, other
// than those to the proxy, which judges them itself.
func (n *Network) forgetRefused(slots map[netip.Addr]*slot) error {
	hosts := n.hostAddrs()
	match := flowFilter(func(f *netlink.ConntrackFlow) bool {
		src, _ := netip.AddrFromSlice(f.Forward.SrcIP.To4())
		dst, _ := netip.AddrFromSlice(f.Forward.DstIP.To4())
		back, _ := netip.AddrFromSlice(f.Reverse.SrcIP.To4())
		s := slots[src]
		if s == nil || back == n.proxyAddr() || dst == n.localAddr() {
			return false
		}
		p := s.pol.Load()
		return p == nil || !n.passes(s, p, dst, f.Forward.Protocol, f.Forward.DstPort, hosts)
	})
	err := retryDump(func() error {
		_, err := n.router.h.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, match)
		return err
	})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) {
		return nil // no entry, or no connection tracking yet
	}
	return err
}

// passes is what the router's rules do with a packet of a slot.
func (n *Network) passes(s *slot, p *policy.Policy, dst netip.Addr, proto uint8, port uint16, hosts []netip.Addr) bool {
	f := policy.Flow{Addr: dst, Port: port, Protocol: protoName(proto)}
	if p.Upstream != "" || f.Protocol == "" {
		return false
	}
	if s.pins.allows(dst, proto, port) {
		return true
	}
	if p.CheckAll() && f.Protocol == sandbox.ProtocolTCP && slices.Contains(checkedPorts, port) {
		return false
	}
	return p.Decide(f, hosts...).Allowed
}

func protoName(p uint8) string {
	switch p {
	case unix.IPPROTO_TCP:
		return sandbox.ProtocolTCP
	case unix.IPPROTO_UDP:
		return sandbox.ProtocolUDP
	case unix.IPPROTO_ICMP:
		return sandbox.ProtocolICMP
	}
	return ""
}

// flowFilter is a function as a filter of connection tracking.
type flowFilter func(*netlink.ConntrackFlow) bool

func (f flowFilter) MatchConntrackFlow(e *netlink.ConntrackFlow) bool { return f(e) }
