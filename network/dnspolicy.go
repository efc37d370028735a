package network

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/miekg/dns"

	"vivarium/network/policy"
)

// addressTypes are what is asked for on the way to an address. Of a name that only
// a wildcard covers nothing else is answered: whoever owns the domain could else
// talk with the sandbox by TXT records of names that it makes up.
var addressTypes = []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeHTTPS, dns.TypeSVCB, dns.TypeCNAME}

// resolveUnder answers a query as a policy wants it. When the answer opens an
// address, the kernel lets it pass before the answer leaves. It fails with
// errPolicyChanged when the slot has another policy by then.
func (s *dnsServer) resolveUnder(sl *slot, p *policy.Policy, q dns.Question) (*reply, error) {
	if p == nil {
		return failure(dns.RcodeRefused), nil
	}
	plain := strings.TrimSuffix(q.Name, ".")
	name, isName := policy.Name(plain)
	refuse := func(rule string) (*reply, error) {
		s.n.flows.asked(sl.ID, clipName(plain), rule, false)
		r := failure(dns.RcodeRefused)
		r.filtered = true
		return r, nil
	}
	rule := "policy: mode " + string(p.Mode)
	switch {
	case isName:
		ok, wild, by := p.Resolves(name)
		if rule = by; !ok {
			return refuse(rule)
		}
		if wild && !slices.Contains(addressTypes, q.Qtype) {
			return refuse(rule + ": only its addresses are answered")
		}
	case p.ByName() || !p.Simple():
		// no rule could be compared with it
		return refuse("not a host name")
	}
	s.n.flows.asked(sl.ID, clipName(plain), rule, true)
	if q.Qtype == dns.TypeAAAA {
		return failure(dns.RcodeSuccess), nil // there is no IPv6 here: no data
	}
	r := s.shared(q)
	addrs := s.tailor(p, name, r)
	if len(addrs) == 0 || !isName {
		return r, nil
	}
	return r, s.n.pin(sl, p, name, addrs)
}

// tailor takes out of an answer what a policy refuses, and shortens how long it may
// be kept. It returns the addresses that are left and how long they are to count.
func (s *dnsServer) tailor(p *policy.Policy, name string, r *reply) map[netip.Addr]time.Duration {
	hosts := s.n.hostAddrs()
	simple := p.Simple()
	addrs := map[netip.Addr]time.Duration{}
	removed := 0
	kept := r.Answer[:0]
	for _, rr := range r.Answer {
		h := rr.Header()
		h.Ttl = min(h.Ttl, uint32(maxAnswer/time.Second))
		switch v := rr.(type) {
		case *dns.A:
			a, ok := netip.AddrFromSlice(v.A.To4())
			if !ok || !simple && (len(addrs) >= maxAddrs || !p.ReachesSome(name, a, hosts...)) {
				removed++
				continue
			}
			if len(addrs) < maxAddrs {
				addrs[a] = max(time.Duration(h.Ttl)*time.Second, minPin) + pinSlack
			}
		case *dns.SVCB:
			if !simple && !tailorService(p, v) {
				continue
			}
		case *dns.HTTPS:
			if !simple && !tailorService(p, &v.SVCB) {
				continue
			}
		}
		kept = append(kept, rr)
	}
	r.Answer = kept
	if removed > 0 && len(addrs) == 0 {
		r.Answer, r.Ns, r.Rcode, r.filtered = nil, nil, dns.RcodeRefused, true
	}
	return addrs
}

// tailorService drops addresses that come with a service's record, which are
// not pinned, and says no to one that sends elsewhere, to a name that is not answered.
func tailorService(p *policy.Policy, v *dns.SVCB) bool {
	v.Value = slices.DeleteFunc(v.Value, func(kv dns.SVCBKeyValue) bool { return kv.Key() == dns.SVCB_IPV4HINT })
	if v.Target == "." {
		return true
	}
	target, ok := policy.Name(strings.TrimSuffix(v.Target, "."))
	if ok {
		ok, _, _ = p.Resolves(target)
	}
	return ok
}

// clipName keeps a name in the log within the length of one.
func clipName(s string) string {
	if len(s) > 255 {
		s = s[:255]
	}
	return strings.ToLower(s)
}
