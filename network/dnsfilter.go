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
		var ok bool
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
			if v.Value, ok = filterParams(v.Value, allowed); !ok {
				continue
			}
		case *dns.HTTPS:
			if v.Value, ok = filterParams(v.Value, allowed); !ok {
				continue
			}
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

// filterParams drops address hints that policy refuses, all of IPv6, and the keys
// of encrypted client hellos (RFC 9460, RFC 9849): with them a sandbox would hide
// from the proxy which name it asks for. It says no to a record that cannot be used
// without what was dropped.
func filterParams(vs []dns.SVCBKeyValue, allowed func(netip.Addr) bool) ([]dns.SVCBKeyValue, bool) {
	usable := true
	out := slices.DeleteFunc(vs, func(kv dns.SVCBKeyValue) bool {
		switch h := kv.(type) {
		case *dns.SVCBIPv6Hint, *dns.SVCBECHConfig:
			return true
		case *dns.SVCBMandatory:
			usable = usable && !slices.Contains(h.Code, dns.SVCB_ECHCONFIG)
		case *dns.SVCBIPv4Hint:
			for _, ip := range h.Hint {
				if a, ok := netip.AddrFromSlice(ip.To4()); !ok || !allowed(a) {
					return true
				}
			}
		default:
			return h.Key() == dns.SVCB_ECHCONFIG
		}
		return false
	})
	return out, usable
}
