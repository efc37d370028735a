package engine

import (
	"context"
	"fmt"
	"sync"
	"time"

	"vivarium/network"
	"vivarium/sandbox"
)

const (
	// maxFlows bounds the distinct destinations that are kept of one sandbox.
	// What comes beyond is counted.
	maxFlows  = 1024
	flowBatch = 256
)

// flowLog is what one sandbox reached and was refused. It is written down as it
// grows, so that it is there after the sandbox and the daemon have ended.
type flowLog struct {
	mu      sync.Mutex
	loaded  bool                           // guarded by mu
	records map[string]*sandbox.FlowRecord // by key; guarded by mu
	seq     int64                          // guarded by mu
	changed chan struct{}                  // closed when something was added; guarded by mu
}

// overflowKey is that of the record of what found no room.
const overflowKey = "overflow"

func flowKey(d network.FlowDelta) string {
	t := d.Target
	return fmt.Sprint(d.Allowed, " ", t.Name, " ", t.Addr, " ", t.Port, " ", t.Protocol)
}

// Flowed takes what the network saw of a slot since the last time.
func (e *Engine) Flowed(slot string, ds []network.FlowDelta) {
	b := e.bySlot(slot)
	if b == nil {
		return // it is of a sandbox that has ended, or is not known yet
	}
	l := &b.flows
	l.mu.Lock()
	defer l.mu.Unlock()
	l.load(e, b)
	exec := b.onlyExec()
	now := time.Now()
	put := map[string]sandbox.FlowRecord{}
	for _, d := range ds {
		key := flowKey(d)
		r := l.records[key]
		if r == nil && (len(l.records) >= maxFlows || d.Uncounted > 0) {
			key = overflowKey
			if r = l.records[key]; r == nil {
				r = &sandbox.FlowRecord{SandboxID: b.id, Tenant: b.tenant, First: now}
				l.records[key] = r
			}
			r.Uncounted += max(d.Uncounted, d.Flows, 1)
		} else {
			if r == nil {
				r = &sandbox.FlowRecord{SandboxID: b.id, Tenant: b.tenant, Allowed: d.Allowed, Target: d.Target, First: d.First, ExecID: exec}
				l.records[key] = r
			}
			if d.Rule != "" {
				r.Rule = d.Rule
			}
			if r.ExecID != exec { // more than one command uses it
				r.ExecID = ""
			}
			r.Flows += d.Flows
			r.BytesOut += d.BytesOut
			r.BytesIn += d.BytesIn
		}
		r.Last = now
		l.seq++
		r.Seq = l.seq
		put[key] = *r
	}
	p := e.store.PutFlows(b.tenant, b.id, put)
	p.Then(func(err error) {
		if err != nil {
			e.log.Error("store flows", "sandbox", b.id, "err", err)
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		close(l.changed)
		l.changed = make(chan struct{})
	})
}

// load reads what an earlier daemon wrote. The caller holds mu.
func (l *flowLog) load(e *Engine, b *box) {
	if l.loaded {
		return
	}
	l.loaded, l.records, l.changed = true, map[string]*sandbox.FlowRecord{}, make(chan struct{})
	if b.created != nil {
		return // this daemon made it
	}
	keys, rs, err := e.store.Flows(e.ctx, b.tenant, b.id, 0, maxFlows+1)
	if err != nil {
		e.log.Error("read flows", "sandbox", b.id, "err", err)
	}
	for i, r := range rs {
		l.records[keys[i]], l.seq = &r, r.Seq
	}
}

// wait is closed when there is more.
func (l *flowLog) wait(e *Engine, b *box) chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.load(e, b)
	return l.changed
}

// onlyExec is the command that runs, if it is the only one.
func (b *box) onlyExec() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	only := ""
	for id, x := range b.execs {
		select {
		case <-x.done:
			continue
		default:
		}
		if only != "" {
			return ""
		}
		only = id
	}
	return only
}

func (e *Engine) bySlot(slot string) *box {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.slots[slot]
}

// Flows calls fn with every destination that a sandbox reached or was refused
// and that changed after a sequence number, then, following, as they change
// until the sandbox has ended.
func (e *Engine) Flows(ctx context.Context, tenant, ref string, after int64, follow bool, fn func(sandbox.FlowRecord) error) error {
	sb, err := e.Get(ctx, tenant, ref)
	if err != nil {
		return err
	}
	for {
		e.mu.Lock()
		b := e.boxes[sb.ID]
		e.mu.Unlock()
		var more chan struct{}
		if b != nil {
			more = b.flows.wait(e, b) // before reading, so that nothing is missed
			e.opts.Network.PollFlows(ctx)
		}
		if err := e.store.Flush(); err != nil {
			return err
		}
		for {
			_, rs, err := e.store.Flows(ctx, tenant, sb.ID, after, flowBatch)
			if err != nil {
				return err
			}
			for _, r := range rs {
				after = r.Seq
				if err := fn(r); err != nil {
					return err
				}
			}
			if len(rs) < flowBatch {
				break
			}
		}
		if !follow || b == nil {
			return nil
		}
		tick := time.NewTimer(time.Second) // the network looks when it is asked
		select {
		case <-more:
		case <-tick.C:
		case <-b.gone: // once more, for what came last
		case <-ctx.Done():
			tick.Stop()
			return ctx.Err()
		}
		tick.Stop()
	}
}
