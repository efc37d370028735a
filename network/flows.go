package network

import (
	"context"
	"sync"
	"time"

	"vivarium/network/proxy"
	"vivarium/sandbox"
)

// FlowDelta is what was seen of one destination of a slot since the last time.
type FlowDelta struct {
	Allowed  bool
	Target   sandbox.FlowTarget
	Rule     string // who decided, where known
	Flows    int64  // new connections, queries; packets of what was refused
	BytesOut int64
	BytesIn  int64
	First    time.Time
	// Uncounted are flows to destinations that found no room; then there is no
	// target.
	Uncounted int64
}

const (
	// maxFlowDeltas bounds the distinct destinations of a slot between two times
	// that they are told.
	maxFlowDeltas = 1024
	protocolDNS   = "dns"
)

// flowLog collects what kernel, proxy and DNS server saw until it is told.
type flowLog struct {
	mu    sync.Mutex
	slots map[string]*slotFlows
	conns map[uint64]proxyBytes // of proxied flows that go on
}

type slotFlows struct {
	deltas    map[flowID]*FlowDelta
	uncounted int64
}

type flowID struct {
	allowed bool
	target  sandbox.FlowTarget
}

type proxyBytes struct{ out, in int64 }

func newFlowLog() *flowLog {
	return &flowLog{slots: map[string]*slotFlows{}, conns: map[uint64]proxyBytes{}}
}

// add merges a delta.
func (l *flowLog) add(slot string, d FlowDelta) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.merge(slot, d)
}

func (l *flowLog) merge(slot string, d FlowDelta) {
	s := l.slots[slot]
	if s == nil {
		s = &slotFlows{deltas: map[flowID]*FlowDelta{}}
		l.slots[slot] = s
	}
	if d.Uncounted > 0 {
		s.uncounted += d.Uncounted
		return
	}
	id := flowID{d.Allowed, d.Target}
	o := s.deltas[id]
	if o == nil {
		if len(s.deltas) >= maxFlowDeltas {
			s.uncounted += max(d.Flows, 1)
			return
		}
		if d.First.IsZero() {
			d.First = time.Now()
		}
		s.deltas[id] = &d
		return
	}
	o.Flows += d.Flows
	o.BytesOut += d.BytesOut
	o.BytesIn += d.BytesIn
	if d.Rule != "" {
		o.Rule = d.Rule
	}
}

// take returns what was collected, and begins anew.
func (l *flowLog) take() map[string][]FlowDelta {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[string][]FlowDelta{}
	for id, s := range l.slots {
		ds := make([]FlowDelta, 0, len(s.deltas)+1)
		for _, d := range s.deltas {
			ds = append(ds, *d)
		}
		if s.uncounted > 0 {
			ds = append(ds, FlowDelta{Uncounted: s.uncounted, First: time.Now()})
		}
		out[id] = ds
	}
	l.slots = map[string]*slotFlows{}
	return out
}

// asked notes a query for a name.
func (l *flowLog) asked(slot, name, rule string, allowed bool) {
	l.add(slot, FlowDelta{Allowed: allowed, Target: sandbox.FlowTarget{Name: name, Protocol: protocolDNS}, Rule: rule, Flows: 1})
}

// proxied notes what the proxy says of a flow.
func (l *flowLog) proxied(r proxy.Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	d := FlowDelta{Allowed: r.Allowed, Rule: r.Rule, First: r.Start,
		Target: sandbox.FlowTarget{Name: r.Name, Addr: r.Addr, Port: r.Port, Protocol: sandbox.ProtocolTCP}}
	if !r.Allowed && r.Reason != "" {
		d.Rule = joinRule(r.Rule, r.Reason)
	}
	if !r.Allowed || r.End.IsZero() {
		d.Flows = 1
		if r.Allowed {
			l.conns[r.ID] = proxyBytes{}
		}
		l.merge(r.Slot, d)
		return
	}
	l.moved(r, d)
	delete(l.conns, r.ID)
}

// moved adds the bytes that went by since the last time. The caller holds mu.
func (l *flowLog) moved(r proxy.Record, d FlowDelta) {
	was, ok := l.conns[r.ID]
	if !ok {
		return
	}
	d.BytesOut, d.BytesIn = r.Sent-was.out, r.Received-was.in
	if d.BytesOut == 0 && d.BytesIn == 0 {
		return
	}
	l.conns[r.ID] = proxyBytes{r.Sent, r.Received}
	l.merge(r.Slot, d)
}

// active notes how far the proxy's open flows are.
func (l *flowLog) active(rs []proxy.Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range rs {
		l.moved(r, FlowDelta{Allowed: true, Rule: r.Rule, First: r.Start,
			Target: sandbox.FlowTarget{Name: r.Name, Addr: r.Addr, Port: r.Port, Protocol: sandbox.ProtocolTCP}})
	}
}

func joinRule(rule, reason string) string {
	if rule == "" {
		return reason
	}
	return rule + ": " + reason
}

// PollFlows has the counters read, and returns when what was seen until now has
// been told: soon, or when ctx ends.
func (n *Network) PollFlows(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, lastWait)
	defer cancel()
	done := make(chan struct{})
	select {
	case n.wakeFlows <- done:
	case <-n.watched:
		return
	case <-ctx.Done():
		return
	}
	select {
	case <-done:
	case <-n.watched:
	case <-ctx.Done():
	}
}
