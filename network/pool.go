package network

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// AcquireOptions says for whom a slot is and what it may reach.
type AcquireOptions struct {
	Owner  string // 1 to 128 bytes; Reconcile compares it
	Policy sandbox.NetworkPolicy
}

// maxOwner keeps a slot's record within metaSize, JSON's escapes included.
const maxOwner = 128

// Acquire hands out a slot from the pool, or makes one when the pool is empty,
// with the policy in force. When the policy cannot be installed the slot is
// destroyed and an error returned: there is never a slot with less than its
// policy. Errors: Invalid, Exhausted (no address left), Unavailable (closed),
// Internal.
func (n *Network) Acquire(ctx context.Context, o AcquireOptions) (*Slot, error) {
	if o.Owner == "" {
		return nil, sandbox.Invalid.Errorf("network: slot without owner")
	}
	if len(o.Owner) > maxOwner {
		return nil, sandbox.Invalid.Errorf("network: owner of %d bytes: at most %d", len(o.Owner), maxOwner)
	}
	p, err := n.Compile(o.Policy)
	if err != nil {
		return nil, err
	}
	if err := n.enter(); err != nil {
		return nil, err
	}
	defer n.ops.Done()
	s, err := n.takeSlot(ctx)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	s.Owner = o.Owner
	n.mu.Unlock()
	if err := n.setPolicy(s, p); err != nil {
		n.discard(s)
		return nil, sandbox.Internal.Errorf("acquire slot: %w", err)
	}
	out := n.export(s)
	n.letGo(s)
	return out, nil
}

// takeSlot returns a busy slot that belongs to nobody.
func (n *Network) takeSlot(ctx context.Context) (*slot, error) {
	n.mu.Lock()
	if k := len(n.pool); k > 0 {
		s := n.pool[k-1]
		n.pool = n.pool[:k-1]
		s.busy = true
		n.mu.Unlock()
		n.wakeUp()
		return s, nil
	}
	n.mu.Unlock()
	n.wakeUp()
	if err := ctx.Err(); err != nil {
		return nil, sandbox.Timeout.Errorf("acquire slot: %w", err)
	}
	return n.grow(true)
}

// grow makes a slot and registers it.
func (n *Network) grow(busy bool) (*slot, error) {
	n.mu.Lock()
	i, ok := n.freeNumber()
	n.mu.Unlock()
	if !ok {
		return nil, sandbox.Exhausted.Errorf("network: all %d slots of %s are in use", n.maxSlots(), n.subnet).
			WithHint("remove sandboxes, or configure a larger subnet")
	}
	n.rules.RLock()
	defer n.rules.RUnlock()
	s, err := n.makeSlot(i)
	n.mu.Lock()
	defer n.mu.Unlock()
	if err != nil {
		delete(n.used, i)
		return nil, sandbox.Internal.Errorf("%w", err)
	}
	s.busy = busy
	n.slots[s.ID], n.byAddr[s.addr] = s, s
	if !busy {
		n.pool = append(n.pool, s)
	}
	return s, nil
}

// freeNumber takes the next number round the subnet, so that an address rests
// as long as possible before somebody else has it. The caller holds mu.
func (n *Network) freeNumber() (uint32, bool) {
	m := n.maxSlots()
	for range m {
		i := n.next % m
		n.next = i + 1
		if !n.used[i] {
			n.used[i] = true
			return i, true
		}
	}
	return 0, false
}

// change is a set and elements that are to be in it or not.
type change struct {
	set   *nftables.Set
	elems []nftables.SetElement
}

// apply queues what makes the elements present or absent, whatever they were:
// an element may be added twice, and is added before it is removed.
func (e change) apply(c *nftables.Conn, present bool) error {
	if err := addElements(c, e.set, e.elems); err != nil || present {
		return err
	}
	for elems := e.elems; len(elems) > 0; {
		k := min(len(elems), 256)
		if err := c.SetDeleteElements(e.set, elems[:k]); err != nil {
			return err
		}
		elems = elems[k:]
	}
	return nil
}

// replace queues what makes e's elements present, and absent those of old that
// differ. Both are of one set; an element is its key and where that leads.
func (e change) replace(c *nftables.Conn, old change) error {
	same := func(a, b nftables.SetElement) bool {
		return bytes.Equal(a.Key, b.Key) && (a.VerdictData == nil || *a.VerdictData == *b.VerdictData)
	}
	var gone []nftables.SetElement
	for _, o := range old.elems {
		if !slices.ContainsFunc(e.elems, func(k nftables.SetElement) bool { return same(k, o) }) {
			gone = append(gone, o)
		}
	}
	if err := (change{e.set, gone}).apply(c, false); err != nil {
		return err
	}
	return addElements(c, e.set, e.elems)
}

// holdTimeout is long for what holds a slot, which takes milliseconds.
const holdTimeout = 10 * time.Second

// hold makes a slot in use busy, after whoever has it now.
func (n *Network) hold(ctx context.Context, id string) (*slot, error) {
	ctx, cancel := context.WithTimeout(ctx, holdTimeout)
	defer cancel()
	for {
		n.mu.Lock()
		s := n.slots[id]
		if s == nil || s.Owner == "" {
			n.mu.Unlock()
			return nil, sandbox.NotFound.Errorf("network: no slot %q", id)
		}
		if !s.busy {
			s.busy = true
			n.mu.Unlock()
			return s, nil
		}
		n.mu.Unlock()
		select {
		case <-ctx.Done():
			return nil, sandbox.Conflict.Errorf("network: slot %s is being changed: %w", id, ctx.Err())
		case <-time.After(time.Millisecond):
		}
	}
}

func (n *Network) letGo(s *slot) {
	n.mu.Lock()
	s.busy = false
	n.mu.Unlock()
}

// Release closes a slot at once and destroys it in the background; it is never
// handed out again, and its address only after the host's and the router's
// connection tracking have forgotten it. An unknown slot is no error.
// Errors: Conflict, Internal.
func (n *Network) Release(ctx context.Context, slotID string) error {
	if err := n.enter(); err != nil {
		return err
	}
	defer n.ops.Done()
	s, err := n.hold(ctx, slotID)
	if errors.Is(err, sandbox.NotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	n.mu.Lock()
	opened := s.opened
	n.mu.Unlock()
	n.shut(s)
	s.closed = true
	if opened {
		n.lastFlows(s.ID) // while whoever gets them still knows the slot
	}
	n.discard(s)
	return nil
}

// shut makes a busy slot reach nothing: what is open ends, too.
func (n *Network) shut(s *slot) {
	s.pol.Store(nil)
	n.dns.drop(s.addr)
	n.mu.Lock()
	delete(n.byAddr, s.addr)
	n.mu.Unlock()
	n.proxy.Drop(s.ID)
	n.rules.RLock()
	defer n.rules.RUnlock()
	s.pins.change.Lock()
	defer s.pins.change.Unlock()
	if err := n.closeSlots(s); err != nil {
		// The interface goes next, which closes it for good.
		n.log.Warn("close slot", "slot", s.ID, "err", err)
	}
	if err := n.setSource(s, netip.Addr{}); err != nil {
		n.log.Warn("take source address away", "slot", s.ID, "err", err)
	}
}

// discard closes a busy slot and queues it for destruction.
func (n *Network) discard(s *slot) {
	// Without its record the slot is an orphan to whoever opens next.
	if err := os.Remove(filepath.Join(s.dir, metaFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		n.log.Warn("remove slot record", "slot", s.ID, "err", err)
	}
	if !s.closed {
		n.shut(s)
	}
	n.mu.Lock()
	delete(n.slots, s.ID)
	n.dead = append(n.dead, s)
	n.mu.Unlock()
	n.wakeUp()
}

// Reconcile releases every slot that is in use but not by the owner named in
// live, and returns those ids of live that do not exist or have another owner:
// their sandboxes have no network any more. The pool is not touched. It belongs
// between Open and the first Acquire.
func (n *Network) Reconcile(ctx context.Context, live map[string]string) (lost []string, err error) {
	var stale []string
	n.mu.Lock()
	for id, owner := range live {
		if s := n.slots[id]; s == nil || s.Owner != owner || owner == "" {
			lost = append(lost, id)
		}
	}
	for id, s := range n.slots {
		if s.Owner != "" && live[id] != s.Owner {
			stale = append(stale, id)
		}
	}
	n.mu.Unlock()
	var errs []error
	for _, id := range stale {
		if err := n.Release(ctx, id); err != nil {
			errs = append(errs, err)
		}
	}
	return lost, errors.Join(errs...)
}

// raise has the rules looked at now: something of them is missing.
func (n *Network) raise() {
	select {
	case n.alarm <- struct{}{}:
	default:
	}
}

func (n *Network) wakeUp() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// tend is the background worker: it destroys released slots, refills the pool
// and looks after the host, one thing at a time.
func (n *Network) tend() {
	defer close(n.tended)
	tick := time.NewTicker(tendEvery)
	defer tick.Stop()
	backoff := time.Duration(0)
	var again, dying <-chan time.Time
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-tick.C:
			if err := n.refresh(); err != nil && n.ctx.Err() == nil {
				n.log.Error("check network", "err", err)
			}
		case <-n.alarm:
			if err := n.refresh(); err != nil && n.ctx.Err() == nil {
				n.log.Error("repair network", "err", err)
			}
		case <-n.wake:
		case <-dying:
		case <-again:
			again = nil
		}
		dying = nil
		if n.bury() > 0 {
			dying = time.After(n.buryEvery())
		}
		if again != nil {
			continue // still backing off
		}
		if err := n.refill(); err != nil && n.ctx.Err() == nil {
			backoff = min(max(2*backoff, 100*time.Millisecond), 30*time.Second)
			again = time.After(backoff)
			n.log.Error("refill pool", "err", err, "retry", backoff)
		} else {
			backoff = 0
		}
	}
}

// refill makes slots until the pool is full.
func (n *Network) refill() error {
	for n.ctx.Err() == nil {
		n.mu.Lock()
		need, dead := n.opts.Pool-len(n.pool), len(n.dead)
		n.mu.Unlock()
		if need <= 0 {
			return nil
		}
		if dead > 0 {
			n.drop()
		}
		if _, err := n.grow(false); err != nil {
			return err
		}
	}
	return nil
}

// linkGrace is how long the kernel has for taking a dead slot's interface away
// with its namespace, which it does for many at once and so at less cost, and
// with less waiting for others, than one by one. A sandbox that still runs
// keeps the namespace, and loses the interface after this time.
const linkGrace = time.Second

// buryEvery is how long after a look at dying slots the next one is. To forget
// flows, the kernel reads its whole connection table, which takes some 3 ms
// even where that is empty; so it is done for many slots at once, unless numbers
// run short.
func (n *Network) buryEvery() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.used)*2 > int(n.maxSlots()) {
		return 50 * time.Millisecond
	}
	return time.Second
}

// bury moves the destruction of released slots on: namespaces first, then,
// when an interface has gone, the flows are forgotten and the number is given
// back. It returns how many are not finished. Only tend calls it.
func (n *Network) bury() int {
	n.drop()
	if len(n.dying) == 0 || time.Since(n.buried) < n.buryEvery() {
		return len(n.dying)
	}
	n.buried = time.Now()
	return n.forgetDying()
}

// drop lets the namespaces of released slots go.
func (n *Network) drop() {
	n.mu.Lock()
	fresh := n.dead
	n.dead = nil
	n.mu.Unlock()
	now := time.Now()
	for _, s := range fresh {
		if err := dropSlotDir(s.dir); err != nil {
			// Its number stays taken; the next Open tries again.
			n.log.Error("destroy slot", "slot", s.ID, "err", err)
			continue
		}
		s.dropped = now
		n.dying = append(n.dying, s)
	}
}

// forgetDying finishes those dying slots whose interfaces have gone, or had
// their time, and returns how many are left.
func (n *Network) forgetDying() int {
	now := time.Now()
	var rest []*slot
	gone := map[netip.Addr]bool{}
	var numbers []uint32
	for _, s := range n.dying {
		l, err := n.router.h.LinkByName(s.veth)
		if err != nil && !isNotFound(err) {
			n.log.Error("find interface", "slot", s.ID, "err", err)
			rest = append(rest, s)
			continue
		}
		if err == nil {
			if now.Sub(s.dropped) < linkGrace {
				rest = append(rest, s)
				continue
			}
			if err := n.router.h.LinkDel(l); err != nil && !isNotFound(err) {
				n.log.Error("remove interface", "slot", s.ID, "err", err)
				rest = append(rest, s)
				continue
			}
		}
		gone[s.addr], gone[s.gw] = true, true
		numbers = append(numbers, s.N)
	}
	if err := n.forgetFlows(gone); err != nil {
		n.log.Error("forget flows", "err", err) // all of them stay dying
		return len(n.dying)
	}
	n.dying = rest
	n.mu.Lock()
	for _, i := range numbers {
		delete(n.used, i)
	}
	n.mu.Unlock()
	return len(rest)
}

// flowsOf matches the connection-tracking entries of addresses.
type flowsOf func(netip.Addr) bool

func (match flowsOf) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	a, _ := netip.AddrFromSlice(f.Forward.SrcIP.To4())
	b, _ := netip.AddrFromSlice(f.Reverse.SrcIP.To4())
	return match(a) || match(b)
}

func (n *Network) forgetFlows(addrs map[netip.Addr]bool) error {
	if len(addrs) == 0 {
		return nil
	}
	return n.forget(func(a netip.Addr) bool { return addrs[a] })
}

// forget removes entries from the router's and the host's connection tracking.
func (n *Network) forget(match flowsOf) error {
	var errs []error
	for _, t := range []*nsThread{n.router, n.host} {
		err := retryDump(func() error {
			_, err := t.h.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, match)
			return err
		})
		// No entry, or no connection tracking yet.
		if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
