package tunnel

import (
	"net/netip"
	"regexp"
	"strings"

	"golang.org/x/net/publicsuffix"

	"vivarium/sandbox"
)

// Bounds of what may be asked for.
const (
	MaxPerSandbox = 32
	MaxAllow      = 256 // networks of one tunnel
)

// Normalise fills in what a spec leaves out and checks it: Invalid if it makes no
// sense.
func Normalise(s sandbox.TunnelSpec) (sandbox.TunnelSpec, error) {
	if s.Port == 0 {
		return s, sandbox.Invalid.Errorf("the tunnel's port is missing").WithHint("it is the port that a program inside listens on, 1 to 65535")
	}
	switch s.Kind {
	case "":
		s.Kind = sandbox.TunnelHTTPS
	case sandbox.TunnelHTTPS, sandbox.TunnelH2:
	case sandbox.TunnelTCP:
		if s.Token {
			return s, sandbox.Invalid.Errorf("a tcp tunnel cannot ask for a token").WithHint("use kind https, or an allow-list of client networks")
		}
	default:
		return s, sandbox.Invalid.Errorf("tunnel kind %.32q", s.Kind).WithHint("the kinds are https, h2 and tcp")
	}
	if len(s.Allow) > MaxAllow {
		return s, sandbox.Invalid.Errorf("%d networks in the allow-list of a tunnel: at most %d", len(s.Allow), MaxAllow)
	}
	allow := make([]netip.Prefix, 0, len(s.Allow))
	for _, p := range s.Allow {
		if !p.IsValid() {
			return s, sandbox.Invalid.Errorf("a network in the allow-list of a tunnel is none")
		}
		if p.Addr().Is4In6() && p.Bits() >= 96 {
			p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
		}
		if p != p.Masked() {
			return s, sandbox.Invalid.Errorf("network %s has bits beyond its length; did you mean %s?", p, p.Masked())
		}
		allow = append(allow, p)
	}
	if s.Allow = allow; len(allow) == 0 {
		s.Allow = nil
	}
	return s, nil
}

// ParseAllow reads a network of clients, or one address, such as 192.0.2.0/24.
func ParseAllow(text string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
		return netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen()), nil
	}
	p, err := netip.ParsePrefix(text)
	if err != nil {
		return p, sandbox.Invalid.Errorf("%.64q is not a network such as 192.0.2.0/24", text)
	}
	return p, nil
}

// allows says whether a client may come. The address is the connection's own.
func allows(s sandbox.TunnelSpec, from netip.Addr) bool {
	if len(s.Allow) == 0 {
		return true
	}
	from = from.Unmap().WithZone("")
	for _, p := range s.Allow {
		if p.Contains(from) {
			return true
		}
	}
	return false
}

// domainForm is two labels or more, in lower case (RFC 1123 section 2.1).
var domainForm = regexp.MustCompile(`^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// CheckDomain says whether tunnels may be below a domain, given the hosts that
// the API is reached by: a page inside must share a site with none of them, and a
// certificate for every name below needs two labels at least.
func CheckDomain(domain string, api ...string) error {
	if !domainForm.MatchString(domain) || len(domain) > 200 {
		return sandbox.Invalid.Errorf("tunnel domain %.64q: want a domain of two labels or more, in lower case, such as tunnels.example.com", domain)
	}
	if _, err := netip.ParseAddr(domain); err == nil {
		return sandbox.Invalid.Errorf("tunnel domain %q is an address", domain)
	}
	for _, h := range api {
		h = strings.TrimSuffix(strings.ToLower(h), ".")
		if _, err := netip.ParseAddr(h); err == nil || h == "" {
			continue
		}
		if h == domain || strings.HasSuffix(h, "."+domain) || site(h) == site("x."+domain) {
			return sandbox.Invalid.Errorf("tunnel domain %s shares a site with the API at %s: pages of sandboxes could act on it", domain, h).
				WithHint("give tunnels a domain that is used for nothing else")
		}
	}
	return nil
}

// site is what browsers take for one site: the public suffix of a host and one
// label more. Of a public suffix, such as localhost, it is the host itself.
func site(host string) string {
	s, err := publicsuffix.EffectiveTLDPlusOne(host)
	if err != nil {
		return host
	}
	return s
}
