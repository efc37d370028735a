package secret

import (
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"golang.org/x/net/http/httpguts"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

// Bounds.
const (
	MaxValue   = 64 << 10 // bytes of a plain secret
	MaxBound   = 8 << 10  // bytes of a bound one: servers take no longer headers
	MaxHosts   = 32       // of one secret
	MaxSecrets = 1000     // of one tenant
	MaxUses    = 64       // secrets of one sandbox, those of header rules included
	maxName    = 64
	maxPrefix  = 16
	// maxSandboxHosts bounds the name constraints of one sandbox's CA.
	maxSandboxHosts = 256
	// maxBoundTotal bounds the values that a sandbox's responses are searched for.
	maxBoundTotal = 64 << 10
)

// minScrub is the length from which on a value is looked for in responses: a
// shorter one is found everywhere by chance.
const minScrub = 8

// Kind says where a secret's value may be.
type Kind string

// The kinds of secrets.
const (
	Bound Kind = "bound" // outside; a placeholder inside
	Plain Kind = "plain" // inside, in the environment
)

// Secret is what anybody is told about a secret. The value is not part of it and
// is never given out again, nor is anything derived from it.
type Secret struct {
	Tenant string `json:"-"`
	Name   string `json:"-"` // also the name in ${NAME} of a header rule
	// Hosts that requests with the value may go to, as in a policy: x or *.x.
	// Empty: the secret is plain.
	Hosts []string `json:"hosts,omitempty"`
	// Env is the variable inside that has the placeholder or, for a plain secret,
	// the value. Default: Name.
	Env string `json:"env"`
	// Query puts the value into the queries of requests' URLs too, where servers
	// log it.
	Query bool `json:"query,omitempty"`
	// Prefix is what the placeholder begins with, for programs that look at their
	// token's first letters (ghp_, sk-). It is public; nothing is taken from the
	// value by itself. Default: viv_secret_.
	Prefix  string    `json:"prefix,omitempty"`
	Created time.Time `json:"created"`
	Updated time.Time `json:"updated"`
	Version int64     `json:"-"` // 1, 2, ...: each Set makes a new one
}

// Kind is Bound for a secret with hosts, else Plain.
func (s Secret) Kind() Kind {
	if len(s.Hosts) > 0 {
		return Bound
	}
	return Plain
}

// check validates s with its value and puts it into its one spelling.
func (s *Secret) check(v Value) error {
	if s.Tenant == "" || len(s.Tenant) > 256 {
		return sandbox.Invalid.Errorf("secret without a tenant")
	}
	if !variable(s.Name) {
		return sandbox.Invalid.Errorf("secret name %q: want a letter or _, then letters, digits and _, at most %d bytes", clip(s.Name), maxName)
	}
	if s.Env == "" {
		s.Env = s.Name
	}
	if !variable(s.Env) {
		return sandbox.Invalid.Errorf("secret %s: variable %q: want a letter or _, then letters, digits and _, at most %d bytes", s.Name, clip(s.Env), maxName)
	}
	if len(s.Hosts) > MaxHosts {
		return sandbox.Invalid.Errorf("secret %s: more than %d hosts", s.Name, MaxHosts)
	}
	hosts := make([]string, 0, len(s.Hosts))
	for _, h := range s.Hosts {
		c, err := policy.Canonical(h)
		if err != nil {
			return sandbox.Invalid.Errorf("secret %s: %w", s.Name, err)
		}
		if c == "*" || !strings.Contains(strings.TrimPrefix(c, "*."), ".") && c != strings.TrimPrefix(c, "*.") {
			return sandbox.Invalid.Errorf("secret %s: host %q: name the hosts", s.Name, clip(h)).
				WithHint("a value that may go to every host is bound to none")
		}
		hosts = append(hosts, c)
	}
	slices.Sort(hosts)
	if s.Hosts = slices.Compact(hosts); len(s.Hosts) == 0 {
		s.Hosts = nil
	}
	if len(s.Prefix) > maxPrefix || strings.IndexFunc(s.Prefix, func(c rune) bool { return !alphanumeric(c) && c != '_' && c != '-' }) >= 0 {
		return sandbox.Invalid.Errorf("secret %s: prefix: want at most %d letters, digits, - and _", s.Name, maxPrefix)
	}
	if s.Kind() == Plain && (s.Query || s.Prefix != "") {
		return sandbox.Invalid.Errorf("secret %s: without hosts there is no placeholder, so neither a prefix nor a query", s.Name)
	}
	b := v.bytes()
	switch {
	case len(b) == 0:
		return sandbox.Invalid.Errorf("secret %s: the value is empty", s.Name)
	case len(b) > MaxValue, s.Kind() == Bound && len(b) > MaxBound:
		return sandbox.Invalid.Errorf("secret %s: the value has %d bytes: at most %d, or %d of one with hosts", s.Name, len(b), MaxValue, MaxBound)
	case s.Kind() == Bound && !headerSafe(string(b)):
		return sandbox.Invalid.Errorf("secret %s: the value has bytes that no header can have, such as a newline, or spaces around it", s.Name).
			WithHint("give it without the newline at its end, for instance with printf rather than echo")
	case slices.Contains(b, 0) || !utf8.Valid(b):
		return sandbox.Invalid.Errorf("secret %s: the value is not text, so no variable can have it", s.Name)
	}
	return nil
}

// headerSafe says whether a server gets s as it is (RFC 9110 section 5.5).
func headerSafe(s string) bool {
	return httpguts.ValidHeaderFieldValue(s) && strings.Trim(s, " \t") == s
}

// variable says whether s can be a variable's name in a shell.
func variable(s string) bool {
	return s != "" && len(s) <= maxName && (s[0] < '0' || s[0] > '9') &&
		strings.IndexFunc(s, func(c rune) bool { return !alphanumeric(c) && c != '_' }) < 0
}

func alphanumeric(c rune) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

// matchAny says whether one of the patterns covers a canonical name.
func matchAny(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool { return policy.Matches(p, name) })
}

// covers says whether every name of pattern p is one of the patterns'.
func covers(patterns []string, p string) bool {
	base, wild := strings.CutPrefix(p, "*.")
	if !wild {
		return matchAny(patterns, p)
	}
	return slices.ContainsFunc(patterns, func(q string) bool {
		top, ok := strings.CutPrefix(q, "*.")
		return ok && (base == top || strings.HasSuffix(base, "."+top))
	})
}

// clip shortens text for an error.
func clip(s string) string {
	if len(s) > 80 {
		s = s[:80] + "..."
	}
	return strings.ToValidUTF8(s, "?")
}
