package policy

import (
	"net/netip"
	"slices"
)

// SpecialPurpose lists the IPv4 ranges that nothing reaches unless the operator
// granted it: the IANA special-purpose address registry (RFC 6890 and updates),
// multicast (RFC 5771), and the reserved block with limited broadcast.
func SpecialPurpose() []netip.Prefix { return slices.Clone(special) }

var special = prefixes(
	"0.0.0.0/8",       // this network, RFC 791
	"10.0.0.0/8",      // private, RFC 1918
	"100.64.0.0/10",   // carrier-grade NAT, RFC 6598
	"127.0.0.0/8",     // loopback, RFC 1122
	"169.254.0.0/16",  // link-local and cloud metadata, RFC 3927
	"172.16.0.0/12",   // private, RFC 1918
	"192.0.0.0/24",    // IETF protocol assignments, RFC 6890
	"192.0.2.0/24",    // documentation, RFC 5737
	"192.31.196.0/24", // AS112, RFC 7535
	"192.52.193.0/24", // AMT, RFC 7450
	"192.88.99.0/24",  // 6to4 relay, RFC 7526
	"192.168.0.0/16",  // private, RFC 1918
	"192.175.48.0/24", // AS112, RFC 7534
	"198.18.0.0/15",   // benchmarking, RFC 2544
	"198.51.100.0/24", // documentation, RFC 5737
	"203.0.113.0/24",  // documentation, RFC 5737
	"224.0.0.0/4",     // multicast, RFC 5771
	"240.0.0.0/4",     // reserved and limited broadcast, RFC 1112, RFC 919
)

// Ungrantable ranges never leave a host in a sensible way; a grant for one is a
// mistake, and a grant that contains one is far too wide.
func Ungrantable() []netip.Prefix { return slices.Clone(ungrantable) }

var ungrantable = prefixes("0.0.0.0/8", "127.0.0.0/8", "224.0.0.0/4", "255.255.255.255/32")

func prefixes(ss ...string) []netip.Prefix {
	ps := make([]netip.Prefix, len(ss))
	for i, s := range ss {
		ps[i] = netip.MustParsePrefix(s)
	}
	return ps
}

// find returns the first prefix that contains a.
func find(ps []netip.Prefix, a netip.Addr) (netip.Prefix, bool) {
	for _, p := range ps {
		if p.Contains(a) {
			return p, true
		}
	}
	return netip.Prefix{}, false
}
