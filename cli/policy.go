package cli

import (
	"strings"

	"github.com/spf13/pflag"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/config"
)

// policyFlags are the flags of a network policy. Rules keep the order in which
// they are given, whatever flag they come from: the first that matches decides.
type policyFlags struct {
	mode             string
	rules            []*v1.PolicyRule
	resolveAny       bool
	headers          []string
	upstream, source string
	bytes            string
	conns            int64
}

func addPolicyFlags(fs *pflag.FlagSet) *policyFlags {
	f := &policyFlags{}
	fs.StringVar(&f.mode, "network", "", "public, none or allowlist; with --allow the default is allowlist")
	fs.Var(&ruleFlag{f, "allow"}, "allow", "let TARGET[:PORTS][/PROTO] pass: example.com, *.example.com:443, 192.0.2.0/24:22/tcp, preset:NAME; may be repeated, the first match decides")
	fs.Var(&ruleFlag{f, "deny"}, "deny", "refuse TARGET[:PORTS][/PROTO]; as --allow")
	fs.BoolVar(&f.resolveAny, "resolve-any", false, "under an allow-list: answer every name, which lets data out through DNS")
	fs.StringArrayVar(&f.headers, "header", nil, "DOMAIN=NAME: VALUE to set in requests to DOMAIN; ${SECRET} in VALUE is a secret; may be repeated")
	fs.StringVar(&f.upstream, "upstream", "", "configured upstream proxy that all TCP goes through")
	fs.StringVar(&f.source, "source", "", "configured address of the host to leave with")
	fs.StringVar(&f.bytes, "bandwidth", "", "bytes per second each way at most, such as 10MiB")
	fs.Int64Var(&f.conns, "conn-rate", 0, "new connections per second at most")
	return f
}

// policy makes the message; nil when no flag was given.
func (f *policyFlags) policy() (*v1.NetworkPolicy, error) {
	p := &v1.NetworkPolicy{
		Mode: f.mode, Rules: f.rules, ResolveAny: f.resolveAny, Upstream: f.upstream, Source: f.source, ConnsPerSecond: f.conns,
	}
	if f.bytes != "" {
		v, err := config.ParseSize(f.bytes)
		if err != nil || v == 0 {
			return nil, usage("--bandwidth: %q is not a size such as 10MiB", f.bytes)
		}
		p.BytesPerSecond = int64(v)
	}
	if f.conns < 0 {
		return nil, usage("--conn-rate must be more than 0")
	}
	for _, h := range f.headers {
		domain, rest, ok := strings.Cut(h, "=")
		name, value, ok2 := strings.Cut(rest, ":")
		if !ok || !ok2 {
			return nil, usage("--header %q is not DOMAIN=NAME: VALUE", h)
		}
		p.Headers = append(p.Headers, &v1.HeaderRule{Domain: domain, Headers: map[string]string{name: strings.TrimSpace(value)}})
	}
	if p.Mode == "" {
		for _, r := range p.Rules {
			if r.Action == "allow" {
				p.Mode = "allowlist"
			}
		}
	}
	if p.Mode == "" && len(p.Rules)+len(p.Headers) == 0 && !p.ResolveAny && p.Upstream == "" && p.Source == "" && p.BytesPerSecond == 0 && p.ConnsPerSecond == 0 {
		return nil, nil
	}
	return p, nil
}

// ruleFlag appends to the rules of f.
type ruleFlag struct {
	f      *policyFlags
	action string
}

func (r *ruleFlag) String() string { return "" }
func (r *ruleFlag) Type() string   { return "TARGET" }
func (r *ruleFlag) Set(s string) error {
	r.f.rules = append(r.f.rules, &v1.PolicyRule{Action: r.action, Match: s})
	return nil
}
