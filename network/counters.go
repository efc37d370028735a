package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

const (
	pollEvery = 5 * time.Second // counters, when nobody asks
	saveEvery = time.Second     // pins that changed
	// pollSoonest keeps somebody who asks all the time from making it a habit.
	pollSoonest = 200 * time.Millisecond
	lastWait    = 2 * time.Second
)

// watch reads counters and tells of them, saves pins and keeps those in use alive.
func (n *Network) watch() {
	defer close(n.watched)
	poll, save := time.NewTicker(pollEvery), time.NewTicker(saveEvery)
	defer poll.Stop()
	defer save.Stop()
	var soon <-chan time.Time
	var asked []chan struct{}
	last := time.Time{}
	for {
		select {
		case <-n.ctx.Done():
			n.poll()
			n.savePins()
			return
		case done := <-n.wakeFlows:
			if asked = append(asked, done); soon == nil {
				soon = time.After(pollSoonest - time.Since(last))
			}
		case <-soon:
			n.poll()
			soon, last = nil, time.Now()
			for _, d := range asked {
				close(d)
			}
			asked = nil
		case done := <-n.last:
			waiting := []chan struct{}{done}
			for more := true; more; {
				select {
				case d := <-n.last:
					waiting = append(waiting, d)
				default:
					more = false
				}
			}
			n.poll()
			for _, d := range waiting {
				close(d)
			}
		case <-poll.C:
			n.poll()
		case <-save.C:
			n.savePins()
		}
	}
}

// lastFlows waits until all that was seen of a slot that is closed has been told.
func (n *Network) lastFlows(string) {
	done := make(chan struct{})
	t := time.NewTimer(lastWait)
	defer t.Stop()
	select {
	case n.last <- done:
	case <-n.watched:
		return
	case <-t.C:
		return
	}
	select {
	case <-done:
	case <-n.watched:
	case <-t.C:
	}
}

// poll reads all counters, keeps pins in use alive, and tells of the rest.
func (n *Network) poll() {
	used := map[*slot]map[pinUse]bool{}
	if err := n.readCounters(used); err != nil && n.ctx.Err() == nil {
		n.log.Warn("read counters", "err", err)
	}
	if n.proxy != nil {
		rs := n.proxy.Active("")
		n.flows.active(rs)
		n.mu.Lock()
		for _, r := range rs {
			if s := n.slots[r.Slot]; s != nil && r.Name != "" {
				use(used, s, pinUse{r.Addr, r.Name})
			}
		}
		n.mu.Unlock()
	}
	for s, us := range used {
		if err := n.renew(s, us); err != nil && !errors.Is(err, errPolicyChanged) && n.ctx.Err() == nil {
			n.log.Warn("renew pins", "slot", s.ID, "err", err)
		}
	}
	for slot, ds := range n.flows.take() {
		if n.opts.OnFlows != nil && len(ds) > 0 {
			n.opts.OnFlows(slot, ds)
		}
	}
}

func use(m map[*slot]map[pinUse]bool, s *slot, u pinUse) {
	if m[s] == nil {
		m[s] = map[pinUse]bool{}
	}
	m[s][u] = true
}

func (n *Network) savePins() {
	n.mu.Lock()
	ss := make([]*slot, 0, len(n.slots))
	for _, s := range n.slots {
		if s.Owner != "" {
			ss = append(ss, s)
		}
	}
	n.mu.Unlock()
	now := time.Now()
	for _, s := range ss {
		s.pins.purge(now)
		// A slot that has just ended has no directory any more.
		if err := s.pins.save(s.dir); err != nil && n.ctx.Err() == nil {
			n.log.Debug("save pins", "slot", s.ID, "err", err)
		}
	}
}

// takeCounters reads what an earlier daemon's rules counted since it last looked,
// before they are replaced.
func (n *Network) takeCounters() error {
	if ok, err := n.router.hasTables(routerTable); err != nil || !ok {
		return err
	}
	if err := n.readCounters(nil); err != nil {
		n.log.Warn("read counters of an earlier daemon", "err", err) // nothing that matters to a sandbox
	}
	return nil
}

// readCounters adds what the kernel counted since the last time to the log. used
// gets the addresses that slots sent something to; nil: nobody wants them.
func (n *Network) readCounters(used map[*slot]map[pinUse]bool) error {
	byVeth := map[string]*slot{}
	n.mu.Lock()
	for _, s := range n.slots {
		byVeth[s.veth] = s
	}
	// Those that were just released are told of for the last time.
	for _, s := range n.dead {
		if byVeth[s.veth] == nil {
			byVeth[s.veth] = s
		}
	}
	n.mu.Unlock()
	return n.watcher.do(func() error {
		r, err := n.counterReader()
		if err != nil {
			return err
		}
		var errs []error
		for _, kind := range []struct {
			set  *nftables.Set
			fill func(d *FlowDelta, c counts)
			ok   bool
		}{
			{setOut(), func(d *FlowDelta, c counts) { d.BytesOut = c.bytes }, true},
			{setIn(), func(d *FlowDelta, c counts) { d.BytesIn = c.bytes }, true},
			{setOpened(), func(d *FlowDelta, c counts) { d.Flows = c.packets }, true},
			{setRefused(), func(d *FlowDelta, c counts) { d.Flows = c.packets }, false},
		} {
			err := r.read(kind.set.Name, func(key []byte, c counts) {
				s := byVeth[cString(key[:unix.IFNAMSIZ])]
				if s == nil || len(key) < 28 {
					return
				}
				a, _ := netip.AddrFromSlice(key[16:20])
				port := binary.BigEndian.Uint16(key[24:26])
				d := n.describe(s, a, key[20], port, kind.ok)
				kind.fill(&d, c)
				n.flows.add(s.ID, d)
				if used != nil && kind.ok {
					use(used, s, pinUse{addr: a})
				}
			})
			errs = append(errs, err)
		}
		errs = append(errs, r.read(setUnlogged().Name, func(key []byte, c counts) {
			if s := byVeth[cString(key[:unix.IFNAMSIZ])]; s != nil {
				n.flows.add(s.ID, FlowDelta{Uncounted: c.packets})
			}
		}))
		if err := errors.Join(errs...); err != nil {
			// answers may be left unread in the socket
			r.c.Close()
			n.counters = nil
			return err
		}
		return nil
	})
}

// describe is a delta without its counts: what a destination is called, and which
// rule decides about it.
func (n *Network) describe(s *slot, a netip.Addr, proto byte, port uint16, allowed bool) FlowDelta {
	d := FlowDelta{Allowed: allowed, Target: sandbox.FlowTarget{Addr: a, Port: port, Protocol: protoName(proto)}}
	if d.Target.Protocol == "" {
		d.Target.Protocol = strconv.Itoa(int(proto))
	}
	names := s.pins.of(a)
	n.mu.Lock()
	p := s.policy
	n.mu.Unlock()
	hosts := n.hostAddrs()
	if len(names) == 0 {
		names = []string{""}
	}
	for i, name := range names {
		v := p.Decide(policy.Flow{Name: name, Addr: a, Port: port, Protocol: protoName(proto)}, hosts...)
		if v.Allowed == allowed || i == 0 {
			d.Target.Name, d.Rule = name, v.Rule
		}
		if v.Allowed == allowed {
			return d
		}
	}
	if !allowed {
		d.Rule = "allowed for its name, or over a limit: " + d.Rule
	}
	return d
}

func cString(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

// counts of a set's element.
type counts struct{ packets, bytes int64 }

// counterReader lists elements and what was added to their counters since the last
// time. Kernels from 6.5 on do that themselves; for older ones, the last values are
// remembered.
type counterReader struct {
	n       *Network
	c       *netlink.Conn
	noReset bool                         // it is such an older kernel
	last    map[string]map[string]counts // by set and key
}

// counterReader returns, on the watcher's thread, one that lasts: closing a socket
// of nftables makes the kernel wait until all that was deleted is freed.
func (n *Network) counterReader() (*counterReader, error) {
	if n.counters != nil {
		return n.counters, nil
	}
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	if err := c.SetReadBuffer(1 << 20); err != nil {
		c.Close()
		return nil, fmt.Errorf("set netlink buffer: %w", err)
	}
	n.counters = &counterReader{n: n, c: c}
	return n.counters, nil
}

const msgGetSetElemReset = 33 // NFT_MSG_GETSETELEM_RESET, linux/netfilter/nf_tables.h

// read calls fn for every element of a set that was counted since the last time.
func (r *counterReader) read(set string, fn func(key []byte, c counts)) error {
	if !r.noReset {
		err := r.dump(msgGetSetElemReset, set, fn)
		if !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EOPNOTSUPP) {
			return err
		}
		r.noReset = true
	}
	seen := map[string]counts{}
	err := r.dump(unix.NFT_MSG_GETSETELEM, set, func(key []byte, c counts) {
		was := r.last[set][string(key)]
		seen[string(key)] = c
		if c.packets < was.packets || c.bytes < was.bytes {
			was = counts{} // it had timed out and began anew
		}
		if d := (counts{c.packets - was.packets, c.bytes - was.bytes}); d != (counts{}) {
			fn(key, d)
		}
	})
	if r.last == nil {
		r.last = map[string]map[string]counts{}
	}
	r.last[set] = seen
	return err
}

func (r *counterReader) dump(msg uint16, set string, fn func(key []byte, c counts)) error {
	ae := netlink.NewAttributeEncoder()
	ae.String(unix.NFTA_SET_ELEM_LIST_TABLE, routerTable)
	ae.String(unix.NFTA_SET_ELEM_LIST_SET, set)
	b, err := ae.Encode()
	if err != nil {
		return err
	}
	req := netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | msg), Flags: netlink.Request | netlink.Dump},
		Data:   append([]byte{unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0}, b...),
	}
	if _, err := r.c.Send(req); err != nil {
		return fmt.Errorf("list set %s: %w", set, err)
	}
	msgs, err := r.c.Receive()
	if errors.Is(err, unix.ENOENT) {
		return nil // somebody took the table away; it is put back
	}
	if err != nil {
		return fmt.Errorf("list set %s: %w", set, err)
	}
	for _, m := range msgs {
		if len(m.Data) < 4 {
			continue
		}
		if err := eachElement(m.Data[4:], fn); err != nil {
			return fmt.Errorf("read set %s: %w", set, err)
		}
	}
	return nil
}

// eachElement decodes NFTA_SET_ELEM_LIST_ELEMENTS.
func eachElement(b []byte, fn func(key []byte, c counts)) error {
	ad, err := netlink.NewAttributeDecoder(b)
	if err != nil {
		return err
	}
	for ad.Next() {
		if ad.Type() != unix.NFTA_SET_ELEM_LIST_ELEMENTS {
			continue
		}
		ad.Nested(func(list *netlink.AttributeDecoder) error {
			for list.Next() {
				list.Nested(func(e *netlink.AttributeDecoder) error {
					var key []byte
					var c counts
					for e.Next() {
						switch e.Type() {
						case unix.NFTA_SET_ELEM_KEY:
							e.Nested(func(d *netlink.AttributeDecoder) error {
								for d.Next() {
									key = d.Bytes() // NFTA_DATA_VALUE
								}
								return nil
							})
						case unix.NFTA_SET_ELEM_EXPR:
							e.Nested(func(x *netlink.AttributeDecoder) error { return decodeCounter(x, &c) })
						}
					}
					if len(key) >= unix.IFNAMSIZ && c != (counts{}) {
						fn(key, c)
					}
					return nil
				})
			}
			return nil
		})
	}
	return ad.Err()
}

func decodeCounter(x *netlink.AttributeDecoder, c *counts) error {
	for x.Next() {
		if x.Type() != unix.NFTA_EXPR_DATA {
			continue
		}
		x.Nested(func(d *netlink.AttributeDecoder) error {
			d.ByteOrder = binary.BigEndian
			for d.Next() {
				switch d.Type() {
				case unix.NFTA_COUNTER_BYTES:
					c.bytes = int64(d.Uint64())
				case unix.NFTA_COUNTER_PACKETS:
					c.packets = int64(d.Uint64())
				}
			}
			return nil
		})
	}
	return nil
}
