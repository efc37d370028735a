package secret

import (
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

// Use is a secret that a sandbox has in its environment.
type Use struct {
	Name string
	Env  string // the variable; default: the secret's Env
}

// BindSpec says what a sandbox has of its tenant's secrets.
type BindSpec struct {
	Tenant  string
	Sandbox string // its id
	Uses    []Use
	// Headers are rules for requests. A bound secret in one must be bound to the
	// rule's whole domain. Secrets that are in rules only have no variable.
	Headers []sandbox.HeaderRule
	// Lifetime is how long the sandbox can live at most; 0: without an end.
	Lifetime time.Duration
}

// Binding is what one sandbox has of its tenant's secrets. It implements the
// proxy's Injector. It may be used by several goroutines at once.
type Binding struct {
	saved  saved
	roots  *x509.CertPool
	ca     *authority // nil if there are no hosts
	rules  []rule
	byName map[string]int // index into saved.Entries

	rewrite sync.Mutex // held while the header rules change

	mu     sync.Mutex       // guards too what SetHeaders changes: saved.Entries, saved.Headers, rules, byName
	values []live           // like saved.Entries; guarded by mu
	plans  map[string]*plan // by host; guarded by mu
}

// saved is what a restart of the daemon needs. It has no values: they are read
// again.
type saved struct {
	Tenant  string
	Sandbox string
	Entries []entry
	Headers []sandbox.HeaderRule
	Hosts   []string
	CA      []byte // the root's certificate, DER; nil if there are no hosts
	Issuer  []byte // the intermediate's
	Key     []byte // of the intermediate, PKCS #8 DER; nil in memory
}

// Format implements fmt.Formatter: %+v would print the CA's key.
func (b *Binding) Format(f fmt.State, _ rune) {
	fmt.Fprintf(f, "secrets of sandbox %s %s", b.saved.Sandbox, hidden)
}

type entry struct {
	Name        string
	Env         string   `json:",omitempty"` // "": in header rules only
	Hosts       []string `json:",omitempty"` // of the secret when it was bound; none: plain
	Placeholder string   `json:",omitempty"` // of a bound one
}

// live is an entry's secret as it now is.
type live struct {
	ok    bool // false: deleted, or of another kind by now
	value Value
	old   Value // the value before: responses are still searched for it
	hosts []string
	query bool
}

type rule struct {
	domain  string
	headers map[string]template
}

// prefix is what placeholders begin with, unless their secret says otherwise.
const prefix = "viv_secret_"

const base62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

// placeholder is p and 36 letters and digits, 214 random bits: of a length and an
// alphabet that tokens have (GitHub's are just so), whatever the value's are.
func placeholder(p string) string {
	if p == "" {
		p = prefix
	}
	out := []byte(p)
	for len(out) < len(p)+36 {
		var b [64]byte
		rand.Read(b[:])
		for _, c := range b {
			if c := c & 63; int(c) < len(base62) && len(out) < len(p)+36 {
				out = append(out, base62[c])
			}
		}
	}
	return string(out)
}

// Bind gives a sandbox its secrets, at its creation, and makes that durable.
// Errors: NotFound (no such secret), Invalid, Exists (it has a binding).
func (v *Vault) Bind(ctx context.Context, spec BindSpec) (*Binding, error) {
	b := &Binding{roots: v.Roots, saved: saved{Tenant: spec.Tenant, Sandbox: spec.Sandbox, Headers: spec.Headers}}
	if spec.Tenant == "" || spec.Sandbox == "" {
		return nil, sandbox.Internal.Errorf("bind secrets: no tenant or no sandbox")
	}
	if err := b.parseRules(); err != nil {
		return nil, err
	}
	v.change.RLock()
	defer v.change.RUnlock()
	names := map[string]bool{}
	for _, u := range spec.Uses {
		if names[u.Name] {
			return nil, sandbox.Invalid.Errorf("secret %s is there twice", clip(u.Name))
		}
		names[u.Name] = true
		if err := v.add(ctx, b, u, true); err != nil {
			return nil, err
		}
	}
	if err := v.addOfRules(ctx, b, names); err != nil {
		return nil, err
	}
	if err := b.check(); err != nil {
		return nil, err
	}
	if len(b.saved.Hosts) > 0 {
		ca, err := newAuthority(b.saved.Hosts, spec.Lifetime, time.Now())
		if err != nil {
			return nil, err
		}
		b.ca, b.saved.CA, b.saved.Issuer = ca, ca.root.Raw, ca.issuer.Raw
	}
	if err := v.register(b); err != nil {
		return nil, err
	}
	if err := v.save(ctx, b); err != nil {
		v.forget(b)
		return nil, err
	}
	return b, nil
}

// add reads a secret into the binding.
func (v *Vault) add(ctx context.Context, b *Binding, u Use, env bool) error {
	if len(b.saved.Entries) == MaxUses {
		return sandbox.Invalid.Errorf("more than %d secrets in one sandbox", MaxUses)
	}
	s, val, err := v.read(ctx, b.saved.Tenant, u.Name)
	if err != nil {
		return err
	}
	e := entry{Name: s.Name, Hosts: s.Hosts}
	if env {
		if e.Env = u.Env; e.Env == "" {
			e.Env = s.Env
		}
		if !variable(e.Env) {
			return sandbox.Invalid.Errorf("secret %s: variable %q: want a letter or _, then letters, digits and _", s.Name, clip(e.Env))
		}
	}
	if s.Kind() == Bound {
		e.Placeholder = placeholder(s.Prefix)
	}
	b.saved.Entries = append(b.saved.Entries, e)
	b.values = append(b.values, live{ok: true, value: val, hosts: s.Hosts, query: s.Query})
	return nil
}

// addOfRules reads the secrets that only header rules have.
func (v *Vault) addOfRules(ctx context.Context, b *Binding, names map[string]bool) error {
	for _, r := range b.rules {
		for _, h := range slices.Sorted(maps.Keys(r.headers)) {
			for _, n := range r.headers[h].names() {
				if names[n] {
					continue
				}
				names[n] = true
				if err := v.add(ctx, b, Use{Name: n}, false); err != nil {
					return sandbox.KindOf(err).Errorf("header rule for %s: %s: %w", r.domain, h, err)
				}
			}
		}
	}
	return nil
}

func (b *Binding) parseRules() error {
	for _, r := range b.saved.Headers {
		d, err := policy.Canonical(r.Domain)
		if err != nil || d == "*" {
			return sandbox.Invalid.Errorf("header rule for %q: name a domain", clip(r.Domain))
		}
		p := rule{domain: d, headers: map[string]template{}}
		for k, val := range r.Headers {
			if !headerSafe(val) {
				return sandbox.Invalid.Errorf("header rule for %s: %s: the value has bytes that no header can have", d, clip(k))
			}
			t, err := parseTemplate(val)
			if err != nil {
				return sandbox.Invalid.Errorf("header rule for %s: %s: %w", d, clip(k), err)
			}
			p.headers[http.CanonicalHeaderKey(k)] = t
		}
		b.rules = append(b.rules, p)
	}
	return nil
}

// check validates the whole and fills in the hosts.
func (b *Binding) check() error {
	b.byName = map[string]int{}
	vars := map[string]string{}
	total := 0
	var hosts []string
	for i, e := range b.saved.Entries {
		b.byName[e.Name] = i
		if other, taken := vars[e.Env]; taken && e.Env != "" {
			return sandbox.Invalid.Errorf("secrets %s and %s want the same variable %s", other, e.Name, e.Env)
		}
		vars[e.Env] = e.Name
		hosts = append(hosts, e.Hosts...)
		if e.Placeholder != "" {
			total += b.values[i].value.Len()
		}
	}
	if total > maxBoundTotal {
		return sandbox.Invalid.Errorf("the bound secrets of one sandbox have %d bytes: at most %d", total, maxBoundTotal)
	}
	for _, r := range b.rules {
		hosts = append(hosts, r.domain)
		for h, t := range r.headers {
			for _, n := range t.names() {
				if e := b.saved.Entries[b.byName[n]]; e.Placeholder != "" && !covers(e.Hosts, r.domain) {
					return sandbox.Invalid.Errorf("header rule for %s: %s: secret %s is not bound to that domain", r.domain, h, n).
						WithHint("set the secret with that host, or narrow the rule")
				}
			}
		}
	}
	slices.Sort(hosts)
	if b.saved.Hosts = slices.Compact(hosts); len(b.saved.Hosts) > maxSandboxHosts {
		return sandbox.Invalid.Errorf("the secrets of one sandbox have %d hosts: at most %d", len(b.saved.Hosts), maxSandboxHosts)
	}
	return nil
}

func (b *Binding) id() id { return id{b.saved.Tenant, b.saved.Sandbox} }

func (v *Vault) register(b *Binding) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.live[b.id()] != nil {
		return sandbox.Exists.Errorf("sandbox %s has its secrets already", b.saved.Sandbox)
	}
	v.live[b.id()] = b
	return nil
}

func (v *Vault) forget(b *Binding) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.live[b.id()] == b {
		delete(v.live, b.id())
	}
}

func statePlace(tenant, id string) [][]byte {
	return [][]byte{[]byte("binding"), []byte(tenant), []byte(id)}
}

func (v *Vault) save(ctx context.Context, b *Binding) error {
	state := b.saved
	if b.ca != nil {
		var err error
		if state.Key, err = x509.MarshalPKCS8PrivateKey(b.ca.key); err != nil {
			return sandbox.Internal.Errorf("encode key of a CA: %w", err)
		}
		defer clear(state.Key)
	}
	raw, err := json.Marshal(state)
	if err != nil {
		return sandbox.Internal.Errorf("encode secrets of sandbox %s: %w", b.saved.Sandbox, err)
	}
	defer clear(raw)
	sealed, err := v.key.seal(raw, statePlace(b.saved.Tenant, b.saved.Sandbox)...)
	if err != nil {
		return err
	}
	return v.store.PutSecretBinding(ctx, b.saved.Tenant, b.saved.Sandbox, sealed)
}

// Restore is the binding of a sandbox that lived through a restart of the daemon:
// with the same placeholders and the same CA, and the secrets' values of now.
// Errors: NotFound (it has none), Internal.
func (v *Vault) Restore(ctx context.Context, tenant, sandboxID string) (*Binding, error) {
	v.mu.Lock()
	b := v.live[id{tenant, sandboxID}]
	v.mu.Unlock()
	if b != nil {
		return b, nil
	}
	sealed, err := v.store.SecretBinding(ctx, tenant, sandboxID)
	if err != nil {
		return nil, err
	}
	raw, err := v.key.open(sealed, statePlace(tenant, sandboxID)...)
	if err != nil {
		return nil, sandbox.Internal.Errorf("read secrets of sandbox %s: %w", sandboxID, err)
	}
	defer clear(raw)
	b = &Binding{roots: v.Roots}
	if err := json.Unmarshal(raw, &b.saved); err != nil {
		return nil, sandbox.Internal.Errorf("decode secrets of sandbox %s: %w", sandboxID, err)
	}
	if err := b.parseRules(); err != nil {
		return nil, err
	}
	v.change.RLock()
	defer v.change.RUnlock()
	b.byName = map[string]int{}
	for i, e := range b.saved.Entries {
		b.byName[e.Name] = i
		b.values = append(b.values, live{})
		s, val, err := v.read(ctx, tenant, e.Name)
		if errors.Is(err, sandbox.NotFound) {
			continue // deleted in the meantime
		}
		if err != nil {
			return nil, err
		}
		b.values[i] = e.now(s, val, Value{})
	}
	if b.saved.CA != nil {
		k, err := parseKey(b.saved.Key)
		clear(b.saved.Key)
		b.saved.Key = nil
		if err != nil {
			return nil, err
		}
		if b.ca, err = loadAuthority(b.saved.CA, b.saved.Issuer, k); err != nil {
			return nil, err
		}
	}
	if err := v.register(b); err != nil { // two at once: the first is as good
		v.mu.Lock()
		defer v.mu.Unlock()
		if b := v.live[id{tenant, sandboxID}]; b != nil {
			return b, nil
		}
		return nil, err
	}
	return b, nil
}

// Release forgets what a sandbox that has ended had. Idempotent. Its Binding puts
// in no more values; requests on their way may still get the old ones.
func (v *Vault) Release(ctx context.Context, tenant, sandboxID string) error {
	v.mu.Lock()
	b := v.live[id{tenant, sandboxID}]
	delete(v.live, id{tenant, sandboxID})
	v.mu.Unlock()
	if b != nil {
		b.clear()
	}
	return v.store.DeleteSecretBinding(ctx, tenant, sandboxID)
}

// SetHeaders replaces the header rules of a running sandbox, from its next request
// on. Conflict: a rule's domain is not among the hosts that the sandbox's CA was
// made for; a CA's hosts cannot grow. Other errors as of Bind; after any the old
// rules stay.
func (v *Vault) SetHeaders(ctx context.Context, b *Binding, rules []sandbox.HeaderRule) error {
	v.change.RLock()
	defer v.change.RUnlock()
	b.rewrite.Lock()
	defer b.rewrite.Unlock()
	// saved and rules change here only, under both locks
	n := &Binding{ca: b.ca, saved: b.saved}
	n.saved.Headers, n.saved.Entries = rules, nil
	if err := n.parseRules(); err != nil {
		return err
	}
	names := map[string]bool{}
	b.mu.Lock()
	for i, e := range b.saved.Entries {
		if e.Env != "" {
			names[e.Name] = true
			n.saved.Entries = append(n.saved.Entries, e)
			n.values = append(n.values, b.values[i])
		}
	}
	b.mu.Unlock()
	if err := v.addOfRules(ctx, n, names); err != nil {
		return err
	}
	if err := n.check(); err != nil {
		return err
	}
	for _, r := range n.rules {
		if !covers(b.saved.Hosts, r.domain) {
			return sandbox.Conflict.Errorf("header rule for %s: the sandbox was made without that domain", r.domain).
				WithHint("make a sandbox with the rule: the certificate authority inside is for the domains that were known then")
		}
	}
	n.saved.Hosts = b.saved.Hosts
	if err := v.save(ctx, n); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.saved.Headers, b.saved.Entries = n.saved.Headers, n.saved.Entries
	b.values, b.rules, b.byName = n.values, n.rules, n.byName
	b.plans = nil
	return nil
}

// now is an entry's secret as it is now, if it still is of the entry's kind.
func (e entry) now(s Secret, val, old Value) live {
	if (e.Placeholder == "") != (s.Kind() == Plain) {
		return live{old: old}
	}
	return live{ok: true, value: val, old: old, hosts: s.Hosts, query: s.Query}
}

// update takes over a changed secret; value is empty for a deleted one.
func (b *Binding) update(s Secret, value string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	i, ok := b.byName[s.Name]
	if !ok {
		return
	}
	old := b.values[i].old
	if b.values[i].ok {
		old.Clear()
		old = b.values[i].value
	}
	if value == "" {
		b.values[i] = live{old: old}
	} else {
		b.values[i] = b.saved.Entries[i].now(s, NewValue([]byte(value)), old)
	}
	b.plans = nil
}

func (b *Binding) clear() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := range b.values {
		b.values[i].value.Clear()
		b.values[i].old.Clear()
		b.values[i] = live{}
	}
	b.plans = nil
}

// Environment is the variables for every process in the sandbox: placeholders, and
// the values of plain secrets as they now are.
func (b *Binding) Environment() Environment {
	b.mu.Lock()
	defer b.mu.Unlock()
	env := map[string]string{}
	for i, e := range b.saved.Entries {
		switch {
		case e.Env == "":
		case e.Placeholder != "":
			env[e.Env] = e.Placeholder
		case b.values[i].ok:
			env[e.Env] = b.values[i].value.text()
		}
	}
	return Environment{func() map[string]string { return env }}
}

// Hosts are the patterns of what is to be inspected, for NetworkPolicy.Inspect.
// None: there is nothing to put inside, and no Injector to set.
func (b *Binding) Hosts() []string { return slices.Clone(b.saved.Hosts) }

// Headers are the header rules as they now are.
func (b *Binding) Headers() []sandbox.HeaderRule {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.saved.Headers)
}

// CA is the certificate of the sandbox's CA in PEM, nil if there are no hosts.
func (b *Binding) CA() []byte {
	if b.ca == nil {
		return nil
	}
	return b.ca.pem()
}

// Roots verify the real servers of inspected hosts; nil: those of the host.
func (b *Binding) Roots() *x509.CertPool { return b.roots }

// Certificate is what the proxy shows the sandbox for a host. Denied: the host is
// none of the binding's.
func (b *Binding) Certificate(host string) (*tls.Certificate, error) {
	name, ok := policy.Name(host)
	if !ok || b.ca == nil || !matchAny(b.saved.Hosts, name) {
		return nil, sandbox.Denied.Errorf("no secret or header rule is for host %q", clip(host))
	}
	return b.ca.certificate(name, time.Now())
}

func parseKey(der []byte) (*ecdsa.PrivateKey, error) {
	k, err := x509.ParsePKCS8PrivateKey(der)
	if err != nil {
		return nil, sandbox.Internal.Errorf("read key of a CA: %w", err)
	}
	e, ok := k.(*ecdsa.PrivateKey)
	if !ok {
		return nil, sandbox.Internal.Errorf("read key of a CA: it is of another kind")
	}
	return e, nil
}
