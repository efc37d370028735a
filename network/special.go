package network

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"vivarium/network/policy"
)

var special = policy.SpecialPurpose()

func inAny(ps []netip.Prefix, a netip.Addr) bool {
	for _, p := range ps {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

func overlapsAny(ps []netip.Prefix, p netip.Prefix) bool {
	for _, q := range ps {
		if q.Overlaps(p) {
			return true
		}
	}
	return false
}

// addrRange is an inclusive range of IPv4 addresses as integers.
type addrRange struct{ lo, hi uint32 }

// mergeRanges turns prefixes into sorted, disjoint, non-adjacent ranges, which
// is what an interval set of nftables wants.
func mergeRanges(ps []netip.Prefix) []addrRange {
	var rs []addrRange
	for _, p := range ps {
		lo := u32(p.Masked().Addr())
		rs = append(rs, addrRange{lo, lo | uint32(1<<(32-p.Bits())-1)})
	}
	slices.SortFunc(rs, func(a, b addrRange) int {
		switch {
		case a.lo < b.lo:
			return -1
		case a.lo > b.lo:
			return 1
		}
		return 0
	})
	var out []addrRange
	for _, r := range rs {
		if n := len(out); n > 0 && (out[n-1].hi == ^uint32(0) || r.lo <= out[n-1].hi+1) {
			out[n-1].hi = max(out[n-1].hi, r.hi)
			continue
		}
		out = append(out, r)
	}
	return out
}

func u32(a netip.Addr) uint32 {
	b := a.As4()
	return binary.BigEndian.Uint32(b[:])
}

func addrOf(u uint32) netip.Addr {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], u)
	return netip.AddrFrom4(b)
}
