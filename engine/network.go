package engine

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/miekg/dns"

	"vivarium/guest"
	"vivarium/guest/wire"
	"vivarium/network/policy"
	"vivarium/network/proxy"
	"vivarium/sandbox"
)

const (
	eventNetwork = "network.changed"
	eventProof   = "network.proven"
)

// NetworkQuestion asks what a policy does with a host.
type NetworkQuestion struct {
	Policy   *sandbox.NetworkPolicy // nil: the sandbox's
	Host     string                 // a name, or an IPv4 address
	Port     uint16
	Protocol string // tcp (default), udp, icmp
}

// Preset is a named list of the configuration.
type Preset struct {
	Name  string
	Rules []sandbox.PolicyRule
}

// Presets are those of the configuration, by name.
func (e *Engine) Presets() []Preset {
	var out []Preset
	m := e.opts.Network.Presets()
	for _, name := range slices.Sorted(maps.Keys(m)) {
		out = append(out, Preset{name, m[name]})
	}
	return out
}

// SetNetwork replaces the policy of a running sandbox. When it returns, the
// policy holds for every packet, and flows that it does not allow are being cut,
// which takes less than a second. Secrets that the sandbox was made with go on
// being put into the requests to their hosts.
func (e *Engine) SetNetwork(ctx context.Context, tenant, ref string, p sandbox.NetworkPolicy) (a sandbox.AppliedPolicy, err error) {
	b, err := e.usable(ctx, tenant, ref)
	if err != nil {
		return sandbox.AppliedPolicy{}, err
	}
	b.policyMu.Lock()
	defer b.policyMu.Unlock()
	if b.isEnding() { // its secrets may be forgotten already
		return sandbox.AppliedPolicy{}, b.endedError()
	}
	sb := b.record()
	if p.Mode == "" {
		p.Mode = sb.Spec.Network.Mode
	}
	b.mu.Lock()
	bound := b.secrets
	b.mu.Unlock()
	switch {
	case p.Headers == nil && p.Mode == sandbox.NetworkNone: // there are no requests; the next policy finds them again
	case p.Headers == nil && bound != nil:
		p.Headers = bound.Headers()
	case p.Headers != nil && bound == nil:
		return sandbox.AppliedPolicy{}, sandbox.Unsupported.Errorf("this sandbox was created without secrets and header rules, so the proxy reads none of its requests").
			WithHint("create one with --header or --secret: which hosts the proxy may read is settled then")
	}
	p.Inspect = b.inspected()
	c, err := e.opts.Network.Compile(p)
	if err != nil {
		return sandbox.AppliedPolicy{}, err
	}
	if bound != nil && p.Mode != sandbox.NetworkNone {
		if before := bound.Headers(); !reflect.DeepEqual(c.Headers, before) {
			if err := e.opts.Secrets.SetHeaders(ctx, bound, c.Headers); err != nil {
				return sandbox.AppliedPolicy{}, err
			}
			defer func() {
				if err != nil { // the old policy holds, with its rules
					err = errors.Join(err, e.opts.Secrets.SetHeaders(context.WithoutCancel(ctx), bound, before))
				}
			}()
		}
	}
	b.mu.Lock()
	b.policySeq++
	b.mu.Unlock()
	a, err = e.opts.Network.SetPolicy(ctx, sb.Slot, c.NetworkPolicy)
	b.mu.Lock()
	b.policySeq++
	if err == nil {
		b.rec.Spec.Network, b.rec.NetworkHash, b.rec.Proof = a.Policy, a.Hash, nil
		b.notify()
	}
	b.mu.Unlock()
	if err != nil {
		if b.isEnding() {
			err = b.endedError()
		}
		return a, err
	}
	if err := b.persist().Wait(); err != nil {
		return a, err
	}
	e.events.emit(b.tenant, b.id, eventNetwork, string(a.Policy.Mode), map[string]string{"hash": a.Hash, "rules": fmt.Sprint(len(a.Policy.Rules))})
	return a, nil
}

// Network reads a sandbox's policy back from where it is enforced.
func (e *Engine) Network(ctx context.Context, tenant, ref string) (sandbox.AppliedPolicy, error) {
	b, err := e.usable(ctx, tenant, ref)
	if err != nil {
		return sandbox.AppliedPolicy{}, err
	}
	return e.opts.Network.ReadBack(ctx, b.record().Slot)
}

// ExplainNetwork says what a policy does with a host, and which rule says so.
func (e *Engine) ExplainNetwork(ctx context.Context, tenant, ref string, q NetworkQuestion) (sandbox.Explanation, error) {
	var x sandbox.Explanation
	np := q.Policy
	if np == nil {
		sb, err := e.Get(ctx, tenant, ref)
		if err != nil {
			return x, err
		}
		np = &sb.Spec.Network
	} else if np.Mode == "" { // as a create would
		p := *np
		p.Mode = e.opts.Defaults.Network.Mode
		np = &p
	}
	p, err := e.opts.Network.Compile(*np)
	if err != nil {
		return x, err
	}
	f := policy.Flow{Port: q.Port, Protocol: q.Protocol}
	switch f.Protocol {
	case "":
		f.Protocol = sandbox.ProtocolTCP
	case sandbox.ProtocolTCP, sandbox.ProtocolUDP, sandbox.ProtocolICMP:
	default:
		return x, sandbox.Invalid.Errorf("protocol %q: want tcp, udp or icmp", q.Protocol)
	}
	if f.Addr, err = netip.ParseAddr(q.Host); err != nil {
		f.Addr = netip.Addr{}
		name, ok := policy.Name(q.Host)
		if !ok {
			return x, sandbox.Invalid.Errorf("host %q is neither a name nor an IPv4 address", q.Host)
		}
		f.Name = name
	}
	hosts := e.opts.Network.HostAddrs()
	via := func(v policy.Verdict) string {
		switch {
		case f.Protocol == sandbox.ProtocolTCP && p.Inspects(f.Name):
			return "inspected"
		case v.Checked, p.CheckAll() && f.Protocol == sandbox.ProtocolTCP && (f.Port == 80 || f.Port == 443), p.Upstream != "":
			return "proxy"
		}
		return "direct"
	}
	if f.Name == "" {
		v := p.Decide(f, hosts...)
		x.Allowed, x.Rule = v.Allowed, v.Rule
		if v.Allowed {
			x.Via = via(v)
		}
		return x, nil
	}
	if ok, _, rule := p.Resolves(f.Name); !ok {
		x.Rule = rule
		return x, nil
	}
	v := p.Decide(f)
	x.Allowed, x.Rule = v.Allowed, v.Rule
	addrs, err := e.opts.Network.Lookup(ctx, f.Name)
	if err != nil {
		x.Rule += "; the name does not resolve now: " + err.Error()
	}
	v = explainAddrs(&x, p, f, v, addrs, hosts)
	if x.Allowed {
		x.Via = via(v)
	}
	return x, nil
}

// explainAddrs adds what a policy says of the addresses of a name, of which v is
// what it says without one. It returns the verdict that counts.
func explainAddrs(x *sandbox.Explanation, p *policy.Policy, f policy.Flow, v policy.Verdict, addrs, hosts []netip.Addr) policy.Verdict {
	reachable, refused, special := len(addrs) == 0, "", policy.SpecialPurpose()
	for _, a := range addrs {
		f.Addr = a
		va := p.Decide(f, hosts...)
		if !va.Allowed {
			refused = va.Rule
		}
		// What a name has of private addresses is not told inside either (DNS
		// rebinding), and is not every tenant's to know.
		if va.Allowed || !slices.ContainsFunc(special, func(s netip.Prefix) bool { return s.Contains(a) }) {
			x.Addresses = append(x.Addresses, sandbox.ExplainedAddr{Addr: a, Allowed: va.Allowed, Rule: va.Rule})
		}
		reachable = reachable || va.Allowed
		if va.Allowed && !x.Allowed { // an address rule lets it through
			x.Allowed, x.Rule, v = true, va.Rule, va
		}
	}
	if x.Allowed && !reachable {
		x.Allowed, x.Rule = false, refused
	}
	return v
}

// What bounds one try of the canary.
const (
	probeWait = 2 * time.Second
	speakWait = 8 * time.Second // there may be a long way to a server
)

// ProveNetwork reads the rules back and lets a canary inside the sandbox try
// what its policy denies and allows. Nothing is assumed: a check that could not
// be made fails the proof.
func (e *Engine) ProveNetwork(ctx context.Context, tenant, ref string) (sandbox.Proof, error) {
	b, err := e.usable(ctx, tenant, ref)
	if err != nil {
		return sandbox.Proof{}, err
	}
	return b.prove(ctx)
}

func (b *box) prove(ctx context.Context) (sandbox.Proof, error) {
	// A change is not kept waiting by a proof, which may take long: what is inside
	// and what it tries are in somebody else's hands.
	e := b.e
	b.mu.Lock()
	sb, seq := b.rec, b.policySeq
	b.mu.Unlock()
	changed := sandbox.Conflict.Errorf("the policy was changed while it was being proven").WithHint("prove it again")
	if seq%2 != 0 {
		return sandbox.Proof{}, changed
	}
	c, err := b.guest(ctx)
	if err != nil {
		return sandbox.Proof{}, err
	}
	p, err := e.opts.Network.Compile(sb.Spec.Network)
	if err != nil {
		return sandbox.Proof{}, err
	}
	pr := sandbox.Proof{Result: sandbox.ProofEnforced, Hash: sb.NetworkHash, Time: time.Now()}
	add := func(k sandbox.ProofCheck) {
		k.OK = k.Got == k.Want
		if !k.OK {
			pr.Result = sandbox.ProofFailed
		}
		pr.Checks = append(pr.Checks, k)
	}
	k := sandbox.ProofCheck{What: "rules", Target: sb.NetworkHash, Want: "in_force", Got: "in_force"}
	if a, err := e.opts.Network.ReadBack(ctx, sb.Slot); err != nil {
		k.Got, k.Detail = "unknown", err.Error()
	} else if a.Hash != sb.NetworkHash {
		k.Got, k.Detail = "another", "read back: "+a.Hash
	}
	add(k)
	t := &canary{c: c, dns: e.opts.Network.DNS()}
	hosts := e.opts.Network.HostAddrs()
	// 192.0.0.192 is in use nowhere (RFC 6890), the others are documentation's
	// and a neighbour's: if a rule were missing, the try would reach nobody.
	for _, try := range []struct {
		what string
		to   []string
	}{
		{"denied_address", []string{"192.0.2.254:443", "198.51.100.254:443", "203.0.113.254:443", "192.0.0.192:443", "240.0.0.1:443"}},
		{"metadata_address", []string{"169.254.169.254:80"}},
	} {
		for _, s := range try.to {
			to := netip.MustParseAddrPort(s)
			if p.Decide(policy.Flow{Addr: to.Addr(), Port: to.Port(), Protocol: sandbox.ProtocolTCP}, hosts...).Allowed {
				continue // granted by the operator: the next will do
			}
			got, detail := t.connect(ctx, to)
			add(sandbox.ProofCheck{What: try.what, Target: s, Want: "refused", Got: got, Detail: detail})
			break
		}
	}
	if name := deniedName(p); name != "" {
		got, detail := "refused", ""
		if addrs, why := t.lookup(ctx, name); len(addrs) > 0 {
			got, detail = "reached", fmt.Sprint("resolves to ", addrs)
		} else if why != nil {
			detail = why.Error()
		}
		add(sandbox.ProofCheck{What: "denied_name", Target: name, Want: "refused", Got: got, Detail: detail})
	}
	if name, ports := allowedName(p); name != "" {
		k := sandbox.ProofCheck{What: "allowed_name", Target: fmt.Sprintf("%s:%d", name, ports[0]), Want: "reached", Got: "refused"}
		addrs, why := t.lookup(ctx, name)
		if why != nil {
			k.Detail = why.Error()
		}
		for _, port := range ports { // a server need not listen on all
			if len(addrs) == 0 || k.Got == "reached" {
				break
			}
			k.Target = fmt.Sprintf("%s:%d", name, port)
			k.Got, k.Detail = t.speak(ctx, name, netip.AddrPortFrom(addrs[0], port))
		}
		add(k)
	}
	if b.isEnding() { // a sandbox that goes down proves nothing
		return sandbox.Proof{}, b.endedError()
	}
	b.mu.Lock()
	if b.policySeq != seq {
		b.mu.Unlock()
		return sandbox.Proof{}, changed
	}
	b.rec.Proof = &pr
	b.mu.Unlock()
	b.persist()
	e.events.emit(b.tenant, b.id, eventProof, pr.Result, map[string]string{"hash": pr.Hash})
	return pr, nil
}

func failedChecks(pr sandbox.Proof) string {
	var out []string
	for _, k := range pr.Checks {
		if !k.OK {
			out = append(out, fmt.Sprintf("%s %s: want %s, got %s", k.What, k.Target, k.Want, k.Got))
		}
	}
	return strings.Join(out, "; ")
}

// canary tries from inside.
type canary struct {
	c   *guest.Client
	dns netip.Addr
}

// connect says "reached", "refused", or "unknown" when the guest did not tell.
func (t *canary) connect(ctx context.Context, to netip.AddrPort) (got, detail string) {
	_, err := t.c.Reach(ctx, false, to, nil, probeWait)
	var no syscall.Errno
	switch {
	case err == nil:
		return "reached", ""
	case errors.As(err, &no):
		return "refused", no.Error()
	}
	return "unknown", err.Error()
}

// speak says whether a name answers: to the beginning of a TLS handshake, or to
// a request of HTTP on port 80. A connection alone would only show that the proxy
// took it.
func (t *canary) speak(ctx context.Context, name string, to netip.AddrPort) (got, detail string) {
	say := []byte("HEAD / HTTP/1.1\r\nHost: " + name + "\r\nConnection: close\r\n\r\n")
	if to.Port() != 80 {
		var err error
		if say, err = clientHello(name); err != nil {
			return "unknown", err.Error()
		}
	}
	answer, err := t.c.Reach(ctx, false, to, say, speakWait)
	var no syscall.Errno
	switch {
	case errors.As(err, &no):
		return "refused", no.Error()
	case err != nil:
		return "unknown", err.Error()
	case to.Port() == 80 && bytes.HasPrefix(answer, []byte("HTTP/")) && !bytes.Contains(answer, []byte(proxy.RefusalHeader)):
		return "reached", ""
	case to.Port() != 80 && len(answer) > 5 && answer[0] == 22: // a handshake record, RFC 8446, 5.1
		return "reached", ""
	}
	return "refused", fmt.Sprintf("an answer of %d bytes that is no server's", len(answer))
}

// clientHello is how a TLS client begins.
func clientHello(name string) ([]byte, error) {
	here, there := net.Pipe()
	defer here.Close()
	defer there.Close()
	go tls.Client(there, &tls.Config{ServerName: name}).Handshake() // ends with the pipe
	buf := make([]byte, wire.MaxReach)
	if err := here.SetReadDeadline(time.Now().Add(probeWait)); err != nil {
		return nil, sandbox.Internal.Errorf("make a handshake: %w", err)
	}
	n, err := here.Read(buf)
	if err != nil {
		return nil, sandbox.Internal.Errorf("make a handshake: %w", err)
	}
	return buf[:n], nil
}

// lookup asks the sandbox's resolver, as a program inside would.
func (t *canary) lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	var q dns.Msg
	q.SetQuestion(dns.Fqdn(name), dns.TypeA)
	raw, err := q.Pack()
	if err != nil {
		return nil, sandbox.Internal.Errorf("pack query: %w", err)
	}
	raw, err = t.c.Reach(ctx, true, netip.AddrPortFrom(t.dns, 53), raw, probeWait)
	if err != nil {
		return nil, err
	}
	var m dns.Msg
	if err := m.Unpack(raw); err != nil || m.Id != q.Id {
		return nil, sandbox.Unavailable.Errorf("the resolver's answer is not one")
	}
	var out []netip.Addr
	for _, rr := range m.Answer {
		if a, ok := rr.(*dns.A); ok {
			if ip, ok := netip.AddrFromSlice(a.A.To4()); ok {
				out = append(out, ip)
			}
		}
	}
	if len(out) == 0 {
		return nil, sandbox.Denied.Errorf("%s", strings.ToLower(dns.RcodeToString[m.Rcode]))
	}
	return out, nil
}

// deniedName finds a name that the policy does not resolve: one that exists
// nowhere (RFC 6761), or one that a rule denies.
func deniedName(p *policy.Policy) string {
	for _, r := range p.Rules {
		if r.Action == sandbox.RuleDeny && r.Domain != "" && !strings.HasPrefix(r.Domain, "*") {
			if ok, _, _ := p.Resolves(r.Domain); !ok {
				return r.Domain
			}
		}
	}
	const nowhere = "canary.vivarium.invalid"
	if ok, _, _ := p.Resolves(nowhere); !ok {
		return nowhere
	}
	return ""
}

// maxTryPorts bounds the ports of a name that are tried.
const maxTryPorts = 4

// allowedName finds a name and TCP ports of it that the policy allows by a rule.
func allowedName(p *policy.Policy) (string, []uint16) {
	for _, r := range p.Rules {
		if r.Action != sandbox.RuleAllow || r.Domain == "" || strings.HasPrefix(r.Domain, "*") || r.Protocol == sandbox.ProtocolUDP {
			continue
		}
		var ports []uint16
		for _, pr := range slices.Backward(policy.NamePorts(r)) { // TLS first
			if len(ports) < maxTryPorts && p.Decide(policy.Flow{Name: r.Domain, Port: pr.Lo, Protocol: sandbox.ProtocolTCP}).Allowed {
				ports = append(ports, pr.Lo)
			}
		}
		if len(ports) > 0 {
			return r.Domain, ports
		}
	}
	return "", nil
}
