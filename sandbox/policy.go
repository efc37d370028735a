package sandbox

import (
	"net/netip"
	"time"
)

// NetworkMode is what a policy does with what none of its rules matches.
type NetworkMode string

const (
	NetworkNone      NetworkMode = "none"      // nothing, DNS included; rules make no sense
	NetworkPublic    NetworkMode = "public"    // the public internet and nothing private, link-local, host or neighbour
	NetworkAllowlist NetworkMode = "allowlist" // nothing: what is to pass has a rule
)

// RuleAction is what a rule does.
type RuleAction string

const (
	RuleAllow RuleAction = "allow"
	RuleDeny  RuleAction = "deny"
)

// Protocols of a rule. An address rule without one is for TCP, UDP and ICMP
// echo. A name rule without one is checked: TCP, in which the TLS server name or
// the HTTP host must be that name.
const (
	ProtocolTCP  = "tcp"
	ProtocolUDP  = "udp"
	ProtocolICMP = "icmp"
)

// PortRange is inclusive at both ends.
type PortRange struct {
	Lo uint16 `json:"lo"`
	Hi uint16 `json:"hi"`
}

// PolicyRule is one line of a policy. Exactly one of Prefix, Domain and Preset
// is set.
type PolicyRule struct {
	Action   RuleAction   `json:"action"`
	Prefix   netip.Prefix `json:"prefix,omitzero"`    // IPv4
	Domain   string       `json:"domain,omitempty"`   // x, *.x (every name below x, not x), or * (every name)
	Preset   string       `json:"preset,omitempty"`   // a list of the node's configuration, by name
	Ports    []PortRange  `json:"ports,omitempty"`    // none: every port of an address, 80 and 443 of a name
	Protocol string       `json:"protocol,omitempty"` // tcp, udp, icmp; see there
}

// HeaderRule sets headers of requests to a domain. Its values are templates in
// which ${NAME} is a secret.
type HeaderRule struct {
	Domain  string            `json:"domain"`
	Headers map[string]string `json:"headers"`
}

// NetworkPolicy says what a sandbox may reach. The first rule that matches
// decides, then the mode. docs/network.md has the truth table.
type NetworkPolicy struct {
	Mode  NetworkMode  `json:"mode"`
	Rules []PolicyRule `json:"rules,omitempty"`
	// ResolveAny answers every name under an allow-list, not only those that a
	// rule allows. It lets data out through DNS.
	ResolveAny bool `json:"resolve_any,omitempty"`
	// Headers are set by the proxy, which reads the requests to those domains.
	Headers []HeaderRule `json:"headers,omitempty"`
	// Inspect are the domains whose TLS the proxy ends and begins anew: those of
	// Headers and of the sandbox's secrets. Filled in by the node.
	Inspect []string `json:"inspect,omitempty"`
	// Upstream is the name of an upstream proxy of the configuration that all
	// TCP goes through; UDP and ICMP are then refused.
	Upstream string `json:"upstream,omitempty"`
	// Source is an address of the host that the sandbox's packets leave with;
	// invalid: the host decides.
	Source netip.Addr `json:"source,omitzero"`
	// Limits; 0 is the node's default.
	BytesPerSecond int64 `json:"bytes_per_second,omitempty"` // each way
	ConnsPerSecond int64 `json:"conns_per_second,omitempty"` // new flows
}

// AppliedPolicy is what is in force, read back.
type AppliedPolicy struct {
	Policy NetworkPolicy `json:"policy"` // presets expanded
	// Hash is the SHA-256, in hex, of the policy together with everything that
	// the operator's configuration adds to it. Equal hashes mean equal reach.
	Hash string `json:"hash"`
}

// FlowTarget is a destination that a sandbox reached or tried to reach.
type FlowTarget struct {
	Name     string     `json:"name,omitempty"` // as the sandbox asked for it, where known
	Addr     netip.Addr `json:"addr,omitzero"`
	Port     uint16     `json:"port,omitempty"`
	Protocol string     `json:"protocol"` // tcp, udp, icmp, dns, or a number
}

// Proof results.
const (
	ProofEnforced = "enforced"
	ProofFailed   = "failed"
)

// Proof is what a canary inside the sandbox saw and what the rules say: every
// check of it has to hold, else the result is failed.
type Proof struct {
	Result string
	Hash   string // of the policy that it is about
	Time   time.Time
	Checks []ProofCheck
}

// ProofCheck is one thing that was tried.
type ProofCheck struct {
	What   string // rules, denied_address, metadata_address, denied_name, allowed_name
	Target string
	Want   string // in_force, refused, reached
	Got    string
	OK     bool
	Detail string
}

// FlowRecord is one destination that a sandbox reached or was refused, with
// counts so far.
type FlowRecord struct {
	Seq       int64 // per sandbox; a record that changes gets a new one
	SandboxID string
	Tenant    string
	Allowed   bool
	Target    FlowTarget
	Rule      string // who decided, where known
	Flows     int64  // connections, queries
	BytesOut  int64
	BytesIn   int64
	First     time.Time
	Last      time.Time
	ExecID    string // where known
	// Uncounted are flows to destinations that found no room in the log; such a
	// record has no target.
	Uncounted int64
}

// Explanation says what a policy does with a target, and why.
type Explanation struct {
	Allowed   bool
	Rule      string
	Via       string // direct, proxy, inspected; empty when denied
	Addresses []ExplainedAddr
}

// ExplainedAddr is one address that a name has now.
type ExplainedAddr struct {
	Addr    netip.Addr
	Allowed bool
	Rule    string
}
