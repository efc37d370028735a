package engine

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"vivarium/sandbox"
)

// reader notes from which number on events were last read.
type reader struct {
	eventStore
	after atomic.Int64
}

func (r *reader) Events(ctx context.Context, tenant, sandboxID string, after int64, limit int) ([]sandbox.Event, error) {
	r.after.Store(after)
	return r.eventStore.Events(ctx, tenant, sandboxID, after, limit)
}

// Whoever follows a quiet tenant does not read through what the others cause
// each time that something happens, and misses nothing of his own.
func TestFollowAmongOthers(t *testing.T) {
	t.Parallel()
	e := keeper(t)
	r := &reader{eventStore: e.store}
	e.events = newEvents(r, slog.New(slog.DiscardHandler), 0)
	emit := func(tenant string, n int) {
		for range n {
			e.events.emit(tenant, "sb-"+tenant, eventStage, "", nil)
		}
		if err := e.store.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	got := make(chan int64)
	done := make(chan error, 1)
	emit("quiet", 1)
	go func() {
		done <- e.Events(ctx, "quiet", "", -1, true, func(ev sandbox.Event) error { got <- ev.Seq; return nil })
	}()
	if seq := <-got; seq != 1 {
		t.Errorf("the first is %d", seq)
	}
	for i := range int64(5) {
		emit("busy", 99)
		emit("quiet", 1)
		if seq, want := <-got, 101+100*i; seq != want {
			t.Errorf("%d, want %d", seq, want)
		}
	}
	const last = 501 // of the quiet one's
	for range 1000 {
		if emit("busy", 1); r.after.Load() > last {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if at := r.after.Load(); at <= last {
		t.Errorf("reads all from %d on, whatever happens", at)
	}
	emit("quiet", 1)
	<-got
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
