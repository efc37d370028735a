package engine

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"vivarium/sandbox"
	"vivarium/store"
)

// Kinds of events.
const (
	eventCreated = "sandbox.created"
	eventStage   = "sandbox.stage"
	eventReady   = "sandbox.ready"
	eventEnded   = "sandbox.ended"
	eventRemoved = "sandbox.removed"
	eventFound   = "sandbox.recovered"
	eventExec    = "exec.started"
	eventExit    = "exec.ended"
)

// events numbers what happens and hands it to the store; whoever follows reads
// it back from there, so that a slow follower holds nothing up.
type events struct {
	store eventStore
	log   *slog.Logger

	mu      sync.Mutex
	seq     int64         // guarded by mu
	stored  int64         // up to here they are in the store; guarded by mu
	changed chan struct{} // closed when an event was stored; guarded by mu
}

// eventStore is what this needs of store.Store.
type eventStore interface {
	AddEvent(e sandbox.Event) *store.Pending
	Events(ctx context.Context, tenant, sandboxID string, after int64, limit int) ([]sandbox.Event, error)
}

func newEvents(s eventStore, log *slog.Logger, last int64) *events {
	return &events{store: s, log: log, seq: last, stored: last, changed: make(chan struct{})}
}

func (v *events) emit(tenant, sandboxID, kind, message string, attrs map[string]string) {
	v.mu.Lock()
	v.seq++
	seq := v.seq
	// under the lock, so that the numbers reach the store in order
	p := v.store.AddEvent(sandbox.Event{Seq: seq, Time: time.Now(), Tenant: tenant, SandboxID: sandboxID, Kind: kind, Message: message, Attrs: attrs})
	v.mu.Unlock()
	p.Then(func(err error) {
		if err != nil {
			v.log.Error("store event", "kind", kind, "sandbox", sandboxID, "err", err)
		}
		v.mu.Lock()
		v.stored = max(v.stored, seq) // they are stored in order
		close(v.changed)
		v.changed = make(chan struct{})
		v.mu.Unlock()
	})
}

// now gives the newest number, the one up to which all are stored, and what tells
// of the next one that is.
func (v *events) now() (seq, stored int64, changed <-chan struct{}) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.seq, v.stored, v.changed
}

// page is how many events are read at once.
const page = 500

// Events calls fn with the tenant's events after seq (-1: from the oldest kept,
// 0: from now on), of one sandbox or all, in order.
func (e *Engine) Events(ctx context.Context, tenant, ref string, after int64, follow bool, fn func(sandbox.Event) error) error {
	id := ""
	if ref != "" {
		sb, err := e.Get(ctx, tenant, ref)
		if err != nil {
			return err
		}
		id = sb.ID
	}
	if after == 0 {
		after, _, _ = e.events.now()
	}
	// what a caller knows to have happened is to be in what he reads
	if err := e.store.Flush(); err != nil {
		return err
	}
	for {
		_, stored, changed := e.events.now()
		l, err := e.events.store.Events(ctx, tenant, id, after, page)
		if err != nil {
			return err
		}
		for _, ev := range l {
			if err := fn(ev); err != nil {
				return err
			}
			after = ev.Seq
		}
		if len(l) == page {
			continue
		}
		if !follow {
			return nil
		}
		// what others caused up to here is not read through again and again
		after = max(after, stored)
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-e.ctx.Done():
			return sandbox.Unavailable.Errorf("the daemon is stopping")
		}
	}
}
