package engine

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"vivarium/sandbox"
)

// monotonic says whether a time carries a reading of the monotonic clock
// (package time: String shows it as m=).
func monotonic(t time.Time) bool { return strings.Contains(t.String(), " m=") }

// E6: a clock that is set moves no deadline. What a daemon made itself and what
// it read back from the store are both held on the monotonic clock.
func TestDeadlineClock(t *testing.T) {
	t.Parallel()
	e := &Engine{ctx: context.Background()}
	rec := sandbox.Sandbox{ID: "sb-1", Deadline: time.Now().Add(time.Hour)}
	raw, err := json.Marshal(rec)
	if err != nil {
		t.Fatal(err)
	}
	var back sandbox.Sandbox
	if err := json.Unmarshal(raw, &back); err != nil {
		t.Fatal(err)
	}
	if monotonic(back.Deadline) {
		t.Fatal("the store keeps more than wall time: this test tests nothing")
	}
	b := e.newBox(back)
	if !monotonic(b.rec.Deadline) {
		t.Error("a deadline that was read back follows the wall clock")
	}
	if d := b.rec.Deadline.Sub(rec.Deadline).Abs(); d > time.Second {
		t.Errorf("it moved by %s", d)
	}
	if b := e.newBox(sandbox.Sandbox{}); !b.rec.Deadline.IsZero() {
		t.Errorf("none became %s", b.rec.Deadline)
	}
}

// A stage that an earlier daemon entered is over with a time that is not
// negative, wherever the clock was set to meanwhile.
func TestStageClock(t *testing.T) {
	t.Parallel()
	b := (&Engine{ctx: context.Background()}).newBox(sandbox.Sandbox{Stages: []sandbox.StageTime{{Stage: sandbox.StageGuest, Entered: time.Now().Add(time.Hour).Round(0)}}})
	before := b.rec
	b.mu.Lock()
	b.setStage(sandbox.StageRunning, 0)
	b.mu.Unlock()
	if took := b.rec.Stages[0].Took; took <= 0 {
		t.Errorf("took %s", took)
	}
	if before.Stages[0].Took != 0 || len(before.Stages) != 1 {
		t.Errorf("a record that was handed out changed: %+v", before.Stages)
	}
}
