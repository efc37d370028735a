package network

import (
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/google/nftables"
	"vivarium/network/policy"
	"vivarium/sandbox"
)

// A pin remembers that our DNS server gave a slot an address for a name, and for
// how long that counts.
const (
	minPin      = 60 * time.Second // the least that an answer counts
	pinSlack    = 30 * time.Second // beyond that: clients hold on to answers a little longer
	usedPin     = 10 * time.Minute // of what is in use
	maxAnswer   = 5 * time.Minute  // the longest TTL that leaves
	maxPinAddrs = 1024             // addresses of one slot; the oldest go
	maxPinNames = 8                // names of one address; the oldest go
	maxAddrs    = 32               // addresses of one answer that are pinned; the rest is left out
	maxPinElems = 16384            // elements of one slot in the kernel
)

// pinKey is what is opened in the kernel.
type pinKey struct {
	addr    netip.Addr
	port    uint16
	proto   byte
	proxied bool // to the proxy, which looks for the name
}

func (k pinKey) set() *nftables.Set {
	if k.proxied {
		return setProxied()
	}
	return setPinned()
}

func (k pinKey) element(veth string, life time.Duration) nftables.SetElement {
	key := append(ifname(veth), k.addr.AsSlice()...)
	if !k.proxied {
		key = append(key, k.proto, 0, 0, 0)
	}
	return nftables.SetElement{Key: append(key, port4(k.port)...), Timeout: max(life, time.Second)}
}

// pins are those of one slot.
type pins struct {
	// change is held while the slot's elements in the kernel change. Whoever holds
	// it knows that the policy stays as it is. It comes after Network.rules.
	change sync.Mutex

	mu    sync.Mutex
	names map[netip.Addr]map[string]time.Time // until when
	elems map[pinKey]time.Time                // what the kernel has, until when
	dirty bool                                // not saved
}

func newPins() *pins {
	return &pins{names: map[netip.Addr]map[string]time.Time{}, elems: map[pinKey]time.Time{}}
}

// of are the names that an address has now.
func (p *pins) of(a netip.Addr) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	var out []string
	for name, until := range p.names[a] {
		if now.Before(until) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// note remembers a name and returns the addresses that had to go for it.
func (p *pins) note(a netip.Addr, name string, until time.Time) (gone []netip.Addr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dirty = true
	names := p.names[a]
	if names == nil {
		if len(p.names) >= maxPinAddrs {
			gone = p.oldest(maxPinAddrs/8, nil)
		}
		names = map[string]time.Time{}
		p.names[a] = names
	}
	if _, ok := names[name]; !ok && len(names) >= maxPinNames {
		old := ""
		for k, t := range names {
			if old == "" || t.Before(names[old]) {
				old = k
			}
		}
		delete(names, old)
	}
	if names[name].Before(until) {
		names[name] = until
	}
	return gone
}

// oldest forgets the k addresses that end first, of those that need not be kept.
// The caller holds mu.
func (p *pins) oldest(k int, keep map[pinKey]time.Time) []netip.Addr {
	kept := map[netip.Addr]bool{}
	for key := range keep {
		kept[key.addr] = true
	}
	type end struct {
		a netip.Addr
		t time.Time
	}
	var ends []end
	for a, names := range p.names {
		if kept[a] {
			continue
		}
		e := end{a: a}
		for _, t := range names {
			if e.t.Before(t) {
				e.t = t
			}
		}
		ends = append(ends, e)
	}
	slices.SortFunc(ends, func(x, y end) int { return x.t.Compare(y.t) })
	var out []netip.Addr
	for _, e := range ends[:min(k, len(ends))] {
		delete(p.names, e.a)
		out = append(out, e.a)
	}
	return out
}

// purge forgets what has ended.
func (p *pins) purge(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for a, names := range p.names {
		for name, until := range names {
			if !now.Before(until) {
				delete(names, name)
				p.dirty = true
			}
		}
		if len(names) == 0 {
			delete(p.names, a)
		}
	}
	for k, until := range p.elems {
		if now.Sub(until) > time.Minute { // the kernel has surely forgotten it
			delete(p.elems, k)
		}
	}
}

// shut forgets what the kernel had.
func (p *pins) shut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.elems = map[pinKey]time.Time{}
}

// clear forgets everything; what the kernel has must go, too.
func (p *pins) clear() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.names, p.elems, p.dirty = map[netip.Addr]map[string]time.Time{}, map[pinKey]time.Time{}, true
}

// elements are what the kernel is to have of them.
func (p *pins) elements(s *slot, now time.Time) (proxied, pinned []nftables.SetElement) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k, until := range p.elems {
		if !now.Before(until) {
			continue
		}
		e := k.element(s.veth, until.Sub(now))
		if k.proxied {
			proxied = append(proxied, e)
		} else {
			pinned = append(pinned, e)
		}
	}
	return proxied, pinned
}

// keysFor are what a policy opens for a name at an address. What it opens to
// everybody anyway needs no pin.
func keysFor(p *policy.Policy, name string, a netip.Addr, hosts []netip.Addr) []pinKey {
	if !opens(p.Mode) || p.Simple() || p.Upstream != "" {
		return nil // an upstream proxy takes all TCP, and nothing else passes
	}
	tcp, udp := p.Ports(name, policy.MaxNamePorts)
	inspects, checks := p.Inspects(name), p.CheckAll()
	var out []pinKey
	add := func(proto string, ports []uint16) {
		for _, port := range ports {
			f := policy.Flow{Name: name, Addr: a, Port: port, Protocol: proto}
			v := p.Decide(f, hosts...)
			if !v.Allowed {
				continue
			}
			tcp := proto == sandbox.ProtocolTCP
			k := pinKey{a, port, protoNumber(proto), tcp && (v.Checked || inspects)}
			if !k.proxied {
				f.Name = ""
				if p.Decide(f, hosts...).Allowed && !(checks && slices.Contains(checkedPorts, port)) {
					continue
				}
			}
			out = append(out, k)
		}
	}
	add(sandbox.ProtocolTCP, tcp)
	add(sandbox.ProtocolUDP, udp)
	return out
}

// evaluate is what the kernel is to have under a policy, for the names there are.
func (p *pins) evaluate(pol *policy.Policy, hosts []netip.Addr, now time.Time) map[pinKey]time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[pinKey]time.Time{}
	for a, names := range p.names {
		for name, until := range names {
			if !now.Before(until) {
				continue
			}
			if ok, _, _ := pol.Resolves(name); !ok {
				continue
			}
			for _, k := range keysFor(pol, name, a, hosts) {
				if out[k].Before(until) && len(out) < maxPinElems {
					out[k] = until
				}
			}
		}
	}
	return out
}

// forget drops names that a policy would not have given.
func (p *pins) forget(pol *policy.Policy) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for a, names := range p.names {
		for name := range names {
			if ok, _, _ := pol.Resolves(name); !ok {
				delete(names, name)
				p.dirty = true
			}
		}
		if len(names) == 0 {
			delete(p.names, a)
		}
	}
}

// allows says whether a flow whose far end is known may go on: what is refused
// without a name may be pinned.
func (p *pins) allows(a netip.Addr, proto byte, port uint16) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return time.Now().Before(p.elems[pinKey{a, port, proto, false}])
}

var errPolicyChanged = errors.New("the policy was changed")

// pin makes a slot's answer count: when it returns nil, the kernel lets pass what
// policy pol opens for the name at those addresses. It fails if the slot has
// another policy by now.
func (n *Network) pin(s *slot, pol *policy.Policy, name string, addrs map[netip.Addr]time.Duration) error {
	n.rules.RLock()
	defer n.rules.RUnlock()
	p := s.pins
	p.change.Lock()
	defer p.change.Unlock()
	if s.pol.Load() != pol {
		return errPolicyChanged
	}
	now := time.Now()
	hosts := n.hostAddrs()
	want := map[pinKey]time.Time{}
	var gone []netip.Addr
	for a, life := range addrs {
		until := now.Add(life)
		gone = append(gone, p.note(a, name, until)...)
		for _, k := range keysFor(pol, name, a, hosts) {
			want[k] = until
		}
	}
	return n.openPins(s, want, gone, now)
}

// openPins extends what the kernel has by what is wanted, and takes away what was
// for addresses that are gone. The caller holds change.
func (n *Network) openPins(s *slot, want map[pinKey]time.Time, gone []netip.Addr, now time.Time) error {
	p := s.pins
	d := pinDiff{put: map[pinKey]time.Time{}, had: map[pinKey]bool{}}
	p.mu.Lock()
	for k, until := range want {
		// a few seconds more are not worth a transaction
		have, ok := p.elems[k]
		if !ok || have.Add(pinSlack/2).Before(until) {
			d.put[k], d.had[k] = until, ok
		}
	}
	for len(p.elems)+len(d.put) > maxPinElems {
		more := p.oldest(max(len(p.names)/4, 1), want)
		if len(more) == 0 {
			break
		}
		gone = append(gone, more...)
		for k := range p.elems {
			if _, wanted := want[k]; !wanted && slices.Contains(more, k.addr) {
				d.drop = append(d.drop, k)
				delete(p.elems, k) // in the kernel until the transaction, which comes now
			}
		}
	}
	for k := range p.elems {
		if _, wanted := want[k]; !wanted && slices.Contains(gone, k.addr) {
			d.drop = append(d.drop, k)
		}
	}
	p.mu.Unlock()
	if len(d.put)+len(d.drop) == 0 {
		return nil
	}
	err := n.router.nft(func(c *nftables.Conn) error { return d.queue(c, s, now) })
	if err == nil {
		err = n.opts.reach("pins: rules")
	}
	if err != nil {
		return err
	}
	d.done(p)
	return nil
}

// pinDiff is a change of a slot's pins in the kernel.
type pinDiff struct {
	put  map[pinKey]time.Time
	had  map[pinKey]bool // of put, those that the kernel may have already
	drop []pinKey
}

// queue adds the change to a transaction. Elements that the kernel may have are
// replaced: older kernels do not change the timeout of one. Those that are to go
// may have timed out already.
func (d *pinDiff) queue(c *nftables.Conn, s *slot, now time.Time) error {
	var drop, put [2][]nftables.SetElement
	which := func(k pinKey) int {
		if k.proxied {
			return 1
		}
		return 0
	}
	for _, k := range d.drop {
		drop[which(k)] = append(drop[which(k)], k.element(s.veth, time.Second))
	}
	for k, until := range d.put {
		e := k.element(s.veth, until.Sub(now))
		if d.had[k] {
			drop[which(k)] = append(drop[which(k)], e)
		}
		put[which(k)] = append(put[which(k)], e)
	}
	for i, set := range []*nftables.Set{setPinned(), setProxied()} {
		if err := (change{set, drop[i]}).apply(c, false); err != nil {
			return err
		}
		if err := addElements(c, set, put[i]); err != nil {
			return err
		}
	}
	return nil
}

// done notes the change in memory when it was made.
func (d *pinDiff) done(p *pins) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range d.drop {
		delete(p.elems, k)
	}
	for k, until := range d.put {
		p.elems[k] = until
	}
}

// diff is what makes the kernel's elements those of want.
func (p *pins) diff(want map[pinKey]time.Time) pinDiff {
	p.mu.Lock()
	defer p.mu.Unlock()
	d := pinDiff{put: map[pinKey]time.Time{}, had: map[pinKey]bool{}}
	for k := range p.elems {
		if _, ok := want[k]; !ok {
			d.drop = append(d.drop, k)
		}
	}
	for k, until := range want {
		if have, ok := p.elems[k]; !ok || have.Before(until) {
			d.put[k], d.had[k] = until, ok
		}
	}
	return d
}

// renew makes pins in use last.
func (n *Network) renew(s *slot, used map[pinUse]bool) error {
	pol := s.pol.Load()
	if pol == nil || len(used) == 0 {
		return nil
	}
	p := s.pins
	now := time.Now()
	until := now.Add(usedPin)
	addrs := map[string]map[netip.Addr]time.Duration{}
	p.mu.Lock()
	for u := range used {
		for name, t := range p.names[u.addr] {
			if (u.name == "" || u.name == name) && now.Before(t) && t.Before(now.Add(usedPin/2)) {
				if addrs[name] == nil {
					addrs[name] = map[netip.Addr]time.Duration{}
				}
				addrs[name][u.addr] = until.Sub(now)
			}
		}
	}
	p.mu.Unlock()
	for name, as := range addrs {
		if err := n.pin(s, pol, name, as); err != nil {
			return err
		}
	}
	return nil
}

// pinUse is an address in use, for one name or ("") any.
type pinUse struct {
	addr netip.Addr
	name string
}

// pinsFile holds a slot's pins, so that they survive the daemon.
const pinsFile = "pins.json"

type savedPin struct {
	Addr  netip.Addr `json:"addr"`
	Name  string     `json:"name"`
	Until time.Time  `json:"until"`
}

// save writes pins that changed. It is not synced, as the slot's record.
func (p *pins) save(dir string) error {
	p.mu.Lock()
	if !p.dirty {
		p.mu.Unlock()
		return nil
	}
	p.dirty = false
	var out []savedPin
	for a, names := range p.names {
		for name, until := range names {
			out = append(out, savedPin{a, name, until})
		}
	}
	p.mu.Unlock()
	b, err := json.Marshal(out)
	if err != nil {
		return err
	}
	return replaceFile(filepath.Join(dir, pinsFile), b)
}

// load reads what save wrote. Names that the policy does not give any more are
// left out by evaluate.
func (p *pins) load(dir string) {
	b, err := os.ReadFile(filepath.Join(dir, pinsFile))
	var in []savedPin
	if err != nil || json.Unmarshal(b, &in) != nil {
		return // they come again with the next answers
	}
	latest := time.Now().Add(usedPin) // a clock that was wrong is no reason to trust for ever
	for _, e := range in {
		if name, ok := policy.Name(e.Name); ok && e.Addr.Is4() {
			p.note(e.Addr, name, minTime(e.Until, latest))
		}
	}
	p.mu.Lock()
	p.dirty = false
	p.mu.Unlock()
}

func minTime(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
