package network

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/miekg/dns"
)

// maxRecords bounds what is kept of an upstream's answer.
const maxRecords = 256

// localAnswer answers what never goes upstream, or returns nil.
func localAnswer(q dns.Question) *reply {
	if q.Qclass != dns.ClassINET {
		return failure(dns.RcodeRefused) // CHAOS tells about the resolver
	}
	switch q.Qtype {
	case dns.TypeANY, dns.TypeAXFR, dns.TypeIXFR, dns.TypeMAILA, dns.TypeMAILB, dns.TypeNULL, dns.TypeNone, dns.TypeOPT, dns.TypeTSIG, dns.TypeTKEY:
		return failure(dns.RcodeRefused)
	case dns.TypeAAAA:
		return failure(dns.RcodeSuccess) // there is no IPv6 here: no data
	}
	if q.Qtype >= 128 && q.Qtype < 256 { // other meta types, RFC 6895
		return failure(dns.RcodeRefused)
	}
	if q.Name == "localhost." || strings.HasSuffix(q.Name, ".localhost.") {
		return failure(dns.RcodeNameError) // RFC 6761: never asked upstream
	}
	if reverseOfSpecial(q.Name) {
		// Names of the host's private network are not for sandboxes (RFC 6303).
		return failure(dns.RcodeNameError)
	}
	return nil
}

// reverseOfSpecial says whether name is in the reverse tree of a
// special-purpose IPv4 range, or of IPv6.
func reverseOfSpecial(name string) bool {
	if name == "ip6.arpa." || strings.HasSuffix(name, ".ip6.arpa.") {
		return true
	}
	rest, ok := strings.CutSuffix(name, ".in-addr.arpa.")
	if !ok {
		return false
	}
	labels := strings.Split(rest, ".")
	slices.Reverse(labels)
	var b [4]byte
	n := 0
	for _, l := range labels {
		v, err := strconv.ParseUint(l, 10, 8)
		if err != nil || n == 4 {
			break // RFC 2317 delegations have odd labels below
		}
		b[n] = byte(v)
		n++
	}
	if n == 0 {
		return false
	}
	return overlapsAny(special, netip.PrefixFrom(netip.AddrFrom4(b), 8*n))
}

// sanitise makes of an upstream's answer what a slot may see: the answer
// records without any address that policy refuses (so that no public name can
// stand for a private address), the SOA of a negative answer, nothing else.
// When every address had to go, the answer is REFUSED rather than empty.
func sanitise(q dns.Question, m *dns.Msg, allowed func(netip.Addr) bool) *reply {
	r := &reply{}
	r.Rcode = m.Rcode
	removed, addrs := 0, 0
	for _, rr := range m.Answer {
		if len(r.Answer) >= maxRecords {
			break
		}
		if rr.Header().Class != dns.ClassINET {
			continue
		}
		switch v := rr.(type) {
		case *dns.OPT, *dns.AAAA:
			continue
		case *dns.A:
			a, ok := netip.AddrFromSlice(v.A.To4())
			if !ok || !allowed(a) {
				removed++
				continue
			}
			addrs++
		case *dns.SVCB:
			v.Value = filterHints(v.Value, allowed)
		case *dns.HTTPS:
			v.Value = filterHints(v.Value, allowed)
		}
		r.Answer = append(r.Answer, rr)
	}
	if removed > 0 && addrs == 0 {
		f := failure(dns.RcodeRefused)
		f.filtered = true
		return f
	}
	if len(r.Answer) == 0 {
		for _, rr := range m.Ns {
			if _, ok := rr.(*dns.SOA); ok {
				r.Ns = append(r.Ns, rr)
				break
			}
		}
	}
	return r
}

// filterHints drops address hints that policy refuses, and all of IPv6.
func filterHints(vs []dns.SVCBKeyValue, allowed func(netip.Addr) bool) []dns.SVCBKeyValue {
	return slices.DeleteFunc(vs, func(kv dns.SVCBKeyValue) bool {
		switch h := kv.(type) {
		case *dns.SVCBIPv6Hint:
			return true
		case *dns.SVCBIPv4Hint:
			for _, ip := range h.Hint {
				if a, ok := netip.AddrFromSlice(ip.To4()); !ok || !allowed(a) {
					return true
				}
			}
		}
		return false
	})
}
