package secret

import (
	"strings"

	"vivarium/network/policy"
)

// maxPlans bounds the hosts below wildcards that are kept ready.
const maxPlans = 64

// plan is what to do with requests to one host and their responses.
type plan struct {
	headers swaps // placeholders in header values
	query   swaps // and in queries
	rules   []set
	scrub   *matcher // nil: nothing to look for
	broken  string   // header whose secret is gone
}

// set is a header to set.
type set struct{ name, value string }

// swaps are placeholders with their values.
type swaps struct {
	pairs    []swap
	replacer *strings.Replacer
}

type swap struct{ placeholder, value string }

func newSwaps(pairs []swap) swaps {
	var flat []string
	for _, p := range pairs {
		flat = append(flat, p.placeholder, p.value)
	}
	return swaps{pairs, strings.NewReplacer(flat...)}
}

// in says how many bytes of values replace would put into s.
func (w swaps) in(s string) (n int) {
	for _, p := range w.pairs {
		n += len(p.value) * strings.Count(s, p.placeholder)
	}
	return n
}

func (w swaps) replace(s string) string { return w.replacer.Replace(s) }

// plan of a canonical host among the binding's.
func (b *Binding) plan(host string) *plan {
	b.mu.Lock()
	defer b.mu.Unlock()
	if p := b.plans[host]; p != nil {
		return p
	}
	p := b.newPlan(host)
	if b.plans == nil || len(b.plans) >= maxPlans {
		b.plans = map[string]*plan{}
	}
	b.plans[host] = p
	return p
}

// newPlan is called with b.mu held.
func (b *Binding) newPlan(host string) *plan {
	p := &plan{}
	var headers, query []swap
	var find []pattern
	inRule := map[string]bool{}
	for _, r := range b.rules {
		if policy.Matches(r.domain, host) {
			for _, t := range r.headers {
				for _, n := range t.names() {
					inRule[n] = true
				}
			}
		}
	}
	for i, e := range b.saved.Entries {
		l := b.values[i]
		if e.Placeholder == "" {
			// a plain one is secret from the sandbox if it is in rules only
			if e.Env == "" && inRule[e.Name] {
				find = append(find, forms(l.value.text(), hidden)...)
				find = append(find, forms(l.old.text(), hidden)...)
			}
			continue
		}
		if !matchAny(e.Hosts, host) {
			continue
		}
		find = append(find, forms(l.old.text(), e.Placeholder)...)
		if !l.ok || !matchAny(l.hosts, host) {
			continue
		}
		find = append(find, forms(l.value.text(), e.Placeholder)...)
		if e.Env == "" { // nothing inside is to have its placeholder
			continue
		}
		s := swap{e.Placeholder, l.value.text()}
		headers = append(headers, s)
		if l.query {
			query = append(query, swap{e.Placeholder, queryEscape(s.value)})
		}
	}
	p.headers, p.query = newSwaps(headers), newSwaps(query)
	p.scrub = newMatcher(find)
	at := map[string]int{}
	for _, r := range b.rules {
		if !policy.Matches(r.domain, host) {
			continue
		}
		for name, t := range r.headers {
			value, ok := t.expand(func(n string) (string, bool) {
				l := b.values[b.byName[n]]
				bound := b.saved.Entries[b.byName[n]].Placeholder != ""
				return l.value.text(), l.ok && (!bound || matchAny(l.hosts, host))
			})
			if !ok || !headerSafe(value) {
				p.broken = name
				continue
			}
			if i, again := at[name]; again { // the later rule wins
				p.rules[i].value = value
				continue
			}
			at[name] = len(p.rules)
			p.rules = append(p.rules, set{name, value})
		}
	}
	return p
}
