package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"

	"vivarium/sandbox"
)

// Node is what the operator's configuration says. It is the same for all
// sandboxes of a node.
type Node struct {
	Grants []Grant
	Deny   []netip.Prefix
	// Floor is a policy that every flow must pass besides its sandbox's own. The
	// zero value allows what the ranges above leave.
	Floor sandbox.NetworkPolicy
	// Presets are lists of allow rules, by name.
	Presets map[string][]sandbox.PolicyRule
	// Upstreams are the names of upstream proxies, Sources the addresses of the
	// host, that a policy may choose.
	Upstreams []string
	Sources   []netip.Addr
}

// Check validates and normalises the operator's part.
func (n *Node) Check() error {
	for name, rules := range n.Presets {
		if !validPreset(name) {
			return sandbox.Invalid.Errorf("preset %q: want a name of 1 to 64 of a-z, 0-9, - and _", clip(name))
		}
		for i := range rules {
			if rules[i].Preset != "" {
				return sandbox.Invalid.Errorf("preset %q: a preset cannot contain another", name)
			}
			if err := checkRule(&rules[i]); err != nil {
				return sandbox.Invalid.Errorf("preset %q: rule %d: %w", name, i+1, err)
			}
		}
	}
	if n.Floor.Mode == "" {
		n.Floor.Mode = sandbox.NetworkPublic
	}
	if len(n.Floor.Headers)+len(n.Floor.Inspect) > 0 || n.Floor.Upstream != "" || n.Floor.Source.IsValid() {
		return sandbox.Invalid.Errorf("floor: it has a mode, rules and resolve_any, nothing else")
	}
	floor, err := n.Normalise(n.Floor)
	if err != nil {
		return sandbox.Invalid.Errorf("floor: %w", err)
	}
	n.Floor = floor
	return nil
}

// Normalise validates p and returns it in the one spelling that is compared and
// hashed, with its presets replaced by their rules. Errors: Invalid, NotFound (no
// such preset, upstream or source); each names the offending entry.
func (n *Node) Normalise(p sandbox.NetworkPolicy) (sandbox.NetworkPolicy, error) {
	switch p.Mode {
	case "":
		p.Mode = sandbox.NetworkNone
	case sandbox.NetworkNone, sandbox.NetworkPublic, sandbox.NetworkAllowlist:
	default:
		return p, sandbox.Invalid.Errorf("network mode %q: want public, none or allowlist", clip(string(p.Mode)))
	}
	if p.Mode == sandbox.NetworkNone && (len(p.Rules) > 0 || p.ResolveAny || len(p.Headers) > 0 || p.Upstream != "") {
		return p, sandbox.Invalid.Errorf("network mode none has no rules").WithHint("use mode allowlist, which allows what its rules say and nothing else")
	}
	if len(p.Rules) > MaxRules {
		return p, sandbox.Invalid.Errorf("%d rules: at most %d", len(p.Rules), MaxRules)
	}
	var rules []sandbox.PolicyRule
	for i, r := range p.Rules {
		if err := checkRule(&r); err != nil {
			return p, sandbox.Invalid.Errorf("rule %d (%s): %w", i+1, clip(FormatRule(r)), err)
		}
		if r.Preset == "" {
			r.Ports = mergePorts(r.Ports)
			rules = append(rules, r)
			continue
		}
		list, ok := n.Presets[r.Preset]
		if !ok {
			return p, sandbox.NotFound.Errorf("rule %d: no preset %q", i+1, r.Preset).WithHint("viv network preset lists them; presets are lists in the daemon's configuration")
		}
		for _, e := range list {
			e.Action = r.Action
			e.Ports = mergePorts(e.Ports)
			rules = append(rules, e)
		}
	}
	if len(rules) > MaxRules {
		return p, sandbox.Invalid.Errorf("%d rules with the presets': at most %d", len(rules), MaxRules)
	}
	p.Rules = rules
	if err := normaliseHeaders(&p); err != nil {
		return p, err
	}
	if len(p.Inspect) > maxInspect {
		return p, sandbox.Invalid.Errorf("%d inspected domains: at most %d", len(p.Inspect), maxInspect)
	}
	inspect := make([]string, 0, len(p.Inspect))
	for _, d := range p.Inspect {
		c, err := Canonical(d)
		if err != nil {
			return p, err
		}
		inspect = append(inspect, c)
	}
	for _, h := range p.Headers {
		inspect = append(inspect, h.Domain)
	}
	slices.Sort(inspect)
	p.Inspect = slices.Compact(inspect)
	if len(p.Inspect) == 0 {
		p.Inspect = nil
	}
	if p.Upstream != "" && !slices.Contains(n.Upstreams, p.Upstream) {
		return p, sandbox.NotFound.Errorf("no upstream proxy %q", clip(p.Upstream)).WithHint("network.upstreams in the daemon's configuration lists them")
	}
	if p.Source.IsValid() && !slices.Contains(n.Sources, p.Source) {
		return p, sandbox.NotFound.Errorf("no source address %s", p.Source).WithHint("network.sources in the daemon's configuration lists them")
	}
	if p.BytesPerSecond < 0 || p.ConnsPerSecond < 0 {
		return p, sandbox.Invalid.Errorf("a limit is negative")
	}
	return p, nil
}

func normaliseHeaders(p *sandbox.NetworkPolicy) error {
	n := 0
	var out []sandbox.HeaderRule
	for _, h := range p.Headers {
		d, err := Canonical(h.Domain)
		if err != nil {
			return sandbox.Invalid.Errorf("header rule: %w", err)
		}
		if d == "*" {
			return sandbox.Invalid.Errorf("header rule: domain *: name the domains").WithHint("a value that is put into every request is a value given to everybody")
		}
		set := map[string]string{}
		for k, v := range h.Headers {
			if n++; n > maxHeaders {
				return sandbox.Invalid.Errorf("more than %d headers to set", maxHeaders)
			}
			c := http.CanonicalHeaderKey(k)
			if !httpguts.ValidHeaderFieldName(k) || !httpguts.ValidHeaderFieldValue(v) || len(v) > 4096 {
				return sandbox.Invalid.Errorf("header rule for %s: header %q is not valid in HTTP", d, clip(k))
			}
			if forbiddenHeaders[c] {
				return sandbox.Invalid.Errorf("header rule for %s: %s cannot be set", d, c)
			}
			set[c] = v
		}
		if len(set) == 0 {
			return sandbox.Invalid.Errorf("header rule for %s sets nothing", d)
		}
		out = append(out, sandbox.HeaderRule{Domain: d, Headers: set})
	}
	p.Headers = out
	return nil
}

// forbiddenHeaders say where a request goes and where it ends (RFC 9110, 9112):
// setting them would take a request past its check.
var forbiddenHeaders = map[string]bool{
	"Host": true, "Connection": true, "Content-Length": true, "Transfer-Encoding": true, "Upgrade": true,
	"Te": true, "Trailer": true, "Proxy-Connection": true, "Keep-Alive": true, "Expect": true,
}

// Policy is a policy made ready to decide. It does not change and may be used by
// several goroutines at once.
type Policy struct {
	sandbox.NetworkPolicy // normalised
	Hash                  string

	node  *Node
	own   *rules
	floor *rules
}

// Compile normalises p and makes it ready.
func (n *Node) Compile(p sandbox.NetworkPolicy) (*Policy, error) {
	p, err := n.Normalise(p)
	if err != nil {
		return nil, err
	}
	floor := n.Floor
	if floor.Mode == "" {
		floor.Mode = sandbox.NetworkPublic
	}
	out := &Policy{NetworkPolicy: p, Hash: n.hash(p), node: n, own: newRules(p), floor: newRules(floor)}
	for i, r := range p.Rules {
		if r.Domain == "" || r.Action != sandbox.RuleAllow {
			continue
		}
		// a wildcard stands for names below it; a denied name opens nothing
		tcp, udp := out.Ports(strings.Replace(r.Domain, "*", "x", 1), MaxNamePorts+1)
		if len(tcp) > MaxNamePorts || len(udp) > MaxNamePorts {
			return nil, sandbox.Invalid.Errorf("rule %d (%s): its name has more than %d ports", i+1, clip(FormatRule(r)), MaxNamePorts).
				WithHint("each address of a name is opened port by port; for wide ranges allow the addresses")
		}
	}
	return out, nil
}

// hash covers all that decides what is reachable.
func (n *Node) hash(p sandbox.NetworkPolicy) string {
	v := struct {
		Version int
		Policy  sandbox.NetworkPolicy
		Special []netip.Prefix         `json:",omitempty"`
		Grants  []Grant                `json:",omitempty"`
		Deny    []netip.Prefix         `json:",omitempty"`
		Floor   *sandbox.NetworkPolicy `json:",omitempty"`
	}{4, p, special, n.Grants, n.Deny, &n.Floor}
	if p.Mode == sandbox.NetworkNone { // nothing adds to nothing
		v.Special, v.Grants, v.Deny, v.Floor = nil, nil, nil, nil
	}
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // plain data always marshals
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// Flow is what is to be decided.
type Flow struct {
	Name     string     // canonical; empty: no name is known, or claimed
	Addr     netip.Addr // invalid: only the name is asked about
	Port     uint16
	Protocol string // tcp, udp, icmp
}

// Verdict on a flow.
type Verdict struct {
	Allowed bool
	// Checked says that it is allowed for its name alone, so that the proxy has
	// to see the name in it.
	Checked bool
	// ByName says that a rule about names decided.
	ByName bool
	// Rule tells who decided: "policy rule 3: allow *.example.com", "mode public".
	Rule string
}

// decision of one list of rules.
type decision struct {
	allowed, checked, byName bool
	rule                     int // index; -1: the mode
}

// Decide says whether a flow may pass. hosts are the addresses of the host
// itself, which are treated like special-purpose ones.
func (p *Policy) Decide(f Flow, hosts ...netip.Addr) Verdict {
	if f.Addr.IsValid() {
		f.Addr = f.Addr.Unmap()
		if v, done := p.node.ranges(f, hosts); done {
			return v
		}
	}
	fl := p.floor.decide(f)
	if !fl.allowed {
		return Verdict{ByName: fl.byName, Rule: p.floor.tell("floor", fl.rule)}
	}
	d := p.own.decide(f)
	if d.allowed && p.own.mode == sandbox.NetworkPublic && resolverPort(f) && !p.own.namesPort(d.rule) && !p.node.grantsPort(f) {
		return Verdict{Rule: "mode public: DNS goes to the sandbox's own resolver alone"}
	}
	if d.allowed && !d.byName && f.Protocol == sandbox.ProtocolUDP && f.Port == 443 && p.RefusesQUIC() {
		return Verdict{Rule: "QUIC is refused where names are looked for in TCP"}
	}
	return Verdict{Allowed: d.allowed, Checked: d.allowed && (d.checked || fl.checked), ByName: d.byName || fl.byName, Rule: p.own.tell("policy", d.rule)}
}

// resolverPort says whether a flow is for DNS, or DNS over TLS or DTLS (RFC 7858,
// RFC 8094), somewhere else. Under mode public those pass only where a rule or a
// grant names the port: names that another resolver answers are in nobody's log,
// and no rule about names would hold.
func resolverPort(f Flow) bool {
	return f.Protocol != sandbox.ProtocolICMP && (f.Port == 53 || f.Port == 853)
}

// ResolverPorts are the ports that mode public alone does not open.
func ResolverPorts() []uint16 { return []uint16{53, 853} }

// grantsPort says whether a grant names the flow's port.
func (n *Node) grantsPort(f Flow) bool {
	return f.Addr.IsValid() && slices.ContainsFunc(n.Grants, func(g Grant) bool { return len(g.Ports) > 0 && g.opens(f) })
}

// ranges decides what the operator's ranges decide.
func (n *Node) ranges(f Flow, hosts []netip.Addr) (Verdict, bool) {
	if !f.Addr.Is4() {
		return Verdict{Rule: "IPv6 is off"}, true
	}
	if d, ok := find(n.Deny, f.Addr); ok {
		return Verdict{Rule: "network.deny " + d.String()}, true
	}
	s, ok := find(special, f.Addr)
	if !ok && !slices.Contains(hosts, f.Addr) {
		return Verdict{}, false
	}
	for _, g := range n.Grants {
		// A grant opens an address of the host only by naming just it.
		if g.opens(f) && (g.Prefix.Bits() == 32 || !slices.Contains(hosts, f.Addr)) {
			return Verdict{}, false
		}
	}
	if ok {
		return Verdict{Rule: "special-purpose range " + s.String() + ", not granted"}, true
	}
	return Verdict{Rule: "address of the host, not granted"}, true
}

// Resolves says whether a name (canonical) is answered, and whether only because
// a wildcard covers it: then just addresses are asked for.
func (p *Policy) Resolves(name string) (ok, onlyWild bool, rule string) {
	ok, wild, i := p.floor.resolves(name)
	if !ok {
		return false, false, p.floor.tell("floor", i)
	}
	ok, wild2, i := p.own.resolves(name)
	return ok, wild || wild2, p.own.tell("policy", i)
}

// CheckAll says that TCP to ports 80 and 443 passes the proxy whatever its
// address: a name is denied that an address rule would let through.
func (p *Policy) CheckAll() bool {
	return (p.own.deniesNames || p.floor.deniesNames) && p.own.allowsAddrs && p.floor.allowsAddrs
}

// RefusesQUIC says that UDP to port 443 passes only where a rule by name says so:
// the proxy, which denies names or reads requests, sees TCP alone.
func (p *Policy) RefusesQUIC() bool { return p.CheckAll() || len(p.Inspect) > 0 }

// Simple says that the policy is its mode and nothing else: none, or public where
// the operator has no floor.
func (p *Policy) Simple() bool {
	if p.Mode == sandbox.NetworkNone {
		return true
	}
	return len(p.Rules) == 0 && !p.ResolveAny && p.BytesPerSecond == 0 && p.ConnsPerSecond == 0 && len(p.node.Floor.Rules) == 0 && p.floor.mode == sandbox.NetworkPublic &&
		len(p.Inspect) == 0 && p.Upstream == "" && !p.Source.IsValid() && p.Mode != sandbox.NetworkAllowlist
}

// Inspects says whether the proxy reads what is sent to a name (canonical).
func (p *Policy) Inspects(name string) bool {
	return name != "" && slices.ContainsFunc(p.Inspect, func(d string) bool { return Matches(d, name) })
}

// HeadersFor are the headers to set in requests to a name, as templates.
func (p *Policy) HeadersFor(name string) map[string]string {
	out := map[string]string{}
	for _, h := range p.Headers {
		if Matches(h.Domain, name) {
			maps.Copy(out, h.Headers)
		}
	}
	return out
}

// Matches says whether a canonical pattern covers a canonical name.
func Matches(pattern, name string) bool {
	if pattern == "*" {
		return name != ""
	}
	if suffix, ok := strings.CutPrefix(pattern, "*"); ok {
		return strings.HasSuffix(name, suffix) && len(name) > len(suffix)
	}
	return pattern == name
}

// String is for people.
func (f Flow) String() string {
	host := f.Name
	if host == "" {
		host = f.Addr.String()
	} else if f.Addr.IsValid() {
		host += " (" + f.Addr.String() + ")"
	}
	if f.Protocol == sandbox.ProtocolICMP {
		return host + "/icmp"
	}
	return fmt.Sprintf("%s:%d/%s", host, f.Port, f.Protocol)
}
