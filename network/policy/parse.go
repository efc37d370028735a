package policy

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/idna"

	"vivarium/sandbox"
)

// Bounds of a policy.
const (
	MaxRules = 4096 // presets expanded
	MaxPorts = 32   // ranges of one rule
	// MaxNamePorts are those of one name and protocol, of all its rules together:
	// each address of a name is opened port by port.
	MaxNamePorts = 128
	maxText      = 512 // bytes of a rule's text
	maxHeaders   = 25  // of all header rules
	maxInspect   = 256
)

// ParseRule reads TARGET[:PORTS][/PROTOCOL]. TARGET is an IPv4 address or
// network, a domain, *.domain, *, or preset:NAME; PORTS are numbers and ranges
// with commas between; PROTOCOL is tcp, udp or icmp. Errors: Invalid.
func ParseRule(action sandbox.RuleAction, text string) (sandbox.PolicyRule, error) {
	r := sandbox.PolicyRule{Action: action}
	fail := func(format string, args ...any) (sandbox.PolicyRule, error) {
		e := sandbox.Invalid.Errorf(format, args...)
		return r, sandbox.Invalid.Errorf("rule %q: %w", clip(text), e)
	}
	if text == "" || len(text) > maxText {
		return fail("want 1 to %d bytes", maxText)
	}
	target := text
	if name, ok := strings.CutPrefix(target, "preset:"); ok {
		if r.Preset = name; !validPreset(name) {
			return fail("want a preset's name, 1 to 64 of a-z, 0-9, - and _")
		}
		return r, nil
	}
	if i := strings.LastIndexByte(target, '/'); i >= 0 {
		switch p := strings.ToLower(target[i+1:]); p {
		case sandbox.ProtocolTCP, sandbox.ProtocolUDP, sandbox.ProtocolICMP:
			r.Protocol, target = p, target[:i]
		default:
			if _, err := strconv.Atoi(strings.SplitN(p, ":", 2)[0]); err != nil {
				return fail("protocol %q: want tcp, udp or icmp", p)
			}
		}
	}
	if strings.Count(target, ":") > 1 {
		return fail("IPv6 is off in sandboxes, so rules are for IPv4 and names")
	}
	if i := strings.IndexByte(target, ':'); i >= 0 {
		ports, err := ParsePorts(target[i+1:])
		if err != nil {
			return fail("%w", err)
		}
		r.Ports, target = ports, target[:i]
	}
	switch p, isAddr, err := parsePrefix(target); {
	case err != nil:
		return fail("%w", err)
	case isAddr:
		r.Prefix = p
	default:
		r.Domain = target
	}
	if err := checkRule(&r); err != nil {
		return fail("%w", err)
	}
	return r, nil
}

// ParsePorts reads numbers and ranges, such as 80,443,8000-8080.
func ParsePorts(text string) ([]sandbox.PortRange, error) {
	var out []sandbox.PortRange
	for f := range strings.SplitSeq(text, ",") {
		lo, hi, isRange := strings.Cut(f, "-")
		a, err := strconv.ParseUint(lo, 10, 16)
		b := a
		if err == nil && isRange {
			b, err = strconv.ParseUint(hi, 10, 16)
		}
		if err != nil || a == 0 || b < a {
			return nil, sandbox.Invalid.Errorf("port %q: want 1 to 65535, or a range such as 8000-8080", clip(f))
		}
		if len(out) == MaxPorts {
			return nil, sandbox.Invalid.Errorf("more than %d ranges of ports", MaxPorts)
		}
		out = append(out, sandbox.PortRange{Lo: uint16(a), Hi: uint16(b)})
	}
	return out, nil
}

// parsePrefix reads an IPv4 address or network. What is neither, and does not
// look like one, is a name.
func parsePrefix(s string) (p netip.Prefix, isAddr bool, err error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), true, nil
	}
	if p, err := netip.ParsePrefix(s); err == nil {
		return p, true, nil
	}
	if strings.Contains(s, "/") {
		return p, false, sandbox.Invalid.Errorf("%q is not a network such as 192.0.2.0/24", clip(s))
	}
	return p, false, nil
}

// checkRule validates r and puts it into the one spelling that is compared.
func checkRule(r *sandbox.PolicyRule) error {
	if r.Action != sandbox.RuleAllow && r.Action != sandbox.RuleDeny {
		return sandbox.Invalid.Errorf("action %q: want allow or deny", clip(string(r.Action)))
	}
	kinds := 0
	for _, set := range []bool{r.Prefix != netip.Prefix{}, r.Domain != "", r.Preset != ""} {
		if set {
			kinds++
		}
	}
	if kinds != 1 {
		return sandbox.Invalid.Errorf("want one of an address, a domain and a preset")
	}
	if len(r.Ports) > MaxPorts {
		return sandbox.Invalid.Errorf("more than %d ranges of ports", MaxPorts)
	}
	for _, p := range r.Ports {
		if p.Lo == 0 || p.Hi < p.Lo {
			return sandbox.Invalid.Errorf("ports %d-%d: want 1 to 65535", p.Lo, p.Hi)
		}
	}
	switch r.Protocol {
	case "", sandbox.ProtocolTCP, sandbox.ProtocolUDP:
	case sandbox.ProtocolICMP:
		if len(r.Ports) > 0 {
			return sandbox.Invalid.Errorf("icmp has no ports")
		}
	default:
		return sandbox.Invalid.Errorf("protocol %q: want tcp, udp or icmp", clip(r.Protocol))
	}
	switch {
	case r.Preset != "":
		if len(r.Ports) > 0 || r.Protocol != "" {
			return sandbox.Invalid.Errorf("preset %q: its rules have their own ports and protocols", clip(r.Preset))
		}
		if !validPreset(r.Preset) {
			return sandbox.Invalid.Errorf("preset %q: want 1 to 64 of a-z, 0-9, - and _", clip(r.Preset))
		}
	case r.Domain != "":
		if r.Protocol == sandbox.ProtocolICMP {
			return sandbox.Invalid.Errorf("icmp needs an address, not a name")
		}
		d, err := Canonical(r.Domain)
		if err != nil {
			return err
		}
		r.Domain = d
	default:
		p := r.Prefix
		switch {
		case !p.IsValid():
			return sandbox.Invalid.Errorf("not a network")
		case p.Addr().Is4In6():
			return sandbox.Invalid.Errorf("%s: write IPv4 addresses as such", p)
		case !p.Addr().Is4():
			return sandbox.Invalid.Errorf("%s: IPv6 is off in sandboxes, so rules are for IPv4 and names", p)
		case p != p.Masked():
			return sandbox.Invalid.Errorf("%s has bits beyond its length; did you mean %s?", p, p.Masked())
		}
	}
	return nil
}

func validPreset(s string) bool {
	if s == "" || len(s) > 64 {
		return false
	}
	return strings.IndexFunc(s, func(c rune) bool {
		return (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_'
	}) < 0
}

// lookup is IDNA as browsers do it (UTS 46, non-transitional), which leaves
// underscores alone: service names have them.
var lookup = idna.New(idna.MapForLookup(), idna.BidiRule(), idna.StrictDomainName(false))

// Canonical returns the spelling of a domain pattern that names are compared
// in: lower case, ASCII (IDNA), no dot at the end. What looks like an address in
// an odd spelling (0x7f.1, 010.0.0.1, 2130706433) is Invalid.
func Canonical(pattern string) (string, error) {
	bad := func(why string) (string, error) {
		return "", sandbox.Invalid.Errorf("domain %q: %s", clip(pattern), why)
	}
	if pattern == "*" {
		return pattern, nil
	}
	name, prefix := pattern, ""
	if rest, ok := strings.CutPrefix(name, "*."); ok {
		name, prefix = rest, "*."
	}
	name = strings.TrimSuffix(name, ".")
	if len(name) > 1024 || !utf8.ValidString(name) {
		return bad("not a domain name")
	}
	name, err := lookup.ToASCII(name)
	if err != nil {
		return bad("not a domain name")
	}
	name = strings.ToLower(name)
	if again, err := lookup.ToASCII(name); err != nil || again != name {
		return bad("not a domain name in its one spelling")
	}
	if name == "" || len(name) > 253 {
		return bad("want 1 to 253 bytes")
	}
	labels := strings.Split(name, ".")
	for _, l := range labels {
		if l == "" || len(l) > 63 {
			return bad("want labels of 1 to 63 bytes")
		}
		if strings.IndexFunc(l, func(c rune) bool {
			return (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_'
		}) >= 0 {
			if strings.Contains(l, "*") {
				return bad("a wildcard stands alone before a domain, as in *.example.com")
			}
			return bad("want letters, digits, hyphens and dots")
		}
	}
	if last := labels[len(labels)-1]; numeric(last) {
		return bad("it looks like an address; write addresses as four decimal numbers")
	}
	return prefix + name, nil
}

// numeric says whether a last label makes a URL's host an IPv4 address (WHATWG
// URL Standard, "ends in a number checker").
func numeric(l string) bool {
	if l == "" {
		return false
	}
	if strings.HasPrefix(l, "0x") {
		_, err := strconv.ParseUint("0"+l[2:], 16, 64)
		return err == nil
	}
	return strings.IndexFunc(l, func(c rune) bool { return c < '0' || c > '9' }) < 0
}

// Name returns the canonical spelling of a host name that something inside
// asked for, or false if it is no name. It is no pattern: an asterisk is an error.
func Name(s string) (string, bool) {
	if strings.Contains(s, "*") {
		return "", false
	}
	c, err := Canonical(s)
	return c, err == nil
}

// FormatRule is the text that ParseRule reads, without the action.
func FormatRule(r sandbox.PolicyRule) string {
	var b strings.Builder
	switch {
	case r.Preset != "":
		return "preset:" + r.Preset
	case r.Domain != "":
		b.WriteString(r.Domain)
	case r.Prefix.Bits() == 32:
		b.WriteString(r.Prefix.Addr().String())
	default:
		b.WriteString(r.Prefix.String())
	}
	for i, p := range r.Ports {
		b.WriteByte(":,"[min(i, 1)])
		b.WriteString(strconv.Itoa(int(p.Lo)))
		if p.Hi != p.Lo {
			b.WriteString("-" + strconv.Itoa(int(p.Hi)))
		}
	}
	if r.Protocol != "" {
		b.WriteString("/" + r.Protocol)
	}
	return b.String()
}

// clip shortens hostile text for an error.
func clip(s string) string {
	if len(s) > 80 {
		s = s[:80] + "..."
	}
	return strings.ToValidUTF8(s, "?")
}

// mergePorts sorts and joins ranges.
func mergePorts(ps []sandbox.PortRange) []sandbox.PortRange {
	ps = slices.Clone(ps)
	slices.SortFunc(ps, func(a, b sandbox.PortRange) int { return int(a.Lo) - int(b.Lo) })
	var out []sandbox.PortRange
	for _, p := range ps {
		if n := len(out); n > 0 && int(p.Lo) <= int(out[n-1].Hi)+1 {
			out[n-1].Hi = max(out[n-1].Hi, p.Hi)
			continue
		}
		out = append(out, p)
	}
	return out
}
