package engine

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"vivarium/sandbox"
)

// queue starts take in a goroutine and returns once it stands in line.
func (r *room) queue(t *testing.T, ctx context.Context, cpu, mem int64) <-chan error {
	t.Helper()
	r.mu.Lock()
	n := len(r.line)
	r.mu.Unlock()
	got := make(chan error, 1)
	go func() { got <- r.take(ctx, cpu, mem) }()
	for {
		r.mu.Lock()
		m := len(r.line)
		r.mu.Unlock()
		if m > n {
			return got
		}
		select {
		case err := <-got:
			t.Fatalf("did not stand in line: %v", err)
		default:
		}
	}
}

func waits(t *testing.T, what string, c <-chan error) {
	t.Helper()
	select {
	case err := <-c:
		t.Fatalf("%s was let in: %v", what, err)
	default:
	}
}

// Who comes first is served first: a large one is not starved by small ones that
// would fit.
func TestRoomOrder(t *testing.T) {
	t.Parallel()
	r := newRoom(Limits{CPU: 1000, Memory: 1 << 30, Queue: 10})
	ctx := t.Context()
	for range 2 {
		if err := r.take(ctx, 400, 1<<20); err != nil {
			t.Fatal(err)
		}
	}
	large := r.queue(t, ctx, 900, 1<<20)
	small := r.queue(t, ctx, 100, 1<<20) // would fit now
	waits(t, "the large one", large)
	waits(t, "the small one", small)
	r.give(400, 1<<20)
	waits(t, "the large one", large)
	waits(t, "the small one", small)
	r.give(400, 1<<20)
	if err := errors.Join(<-large, <-small); err != nil {
		t.Fatal(err)
	}
	r.give(900, 1<<20)
	r.give(100, 1<<20)
	if r.cpu != 0 || r.mem != 0 || r.count != 0 || len(r.line) != 0 {
		t.Errorf("left: %+v", r)
	}
}

// One that gives up lets those behind it in, and says what was full.
func TestRoomGivesUp(t *testing.T) {
	t.Parallel()
	r := newRoom(Limits{CPU: 1000, Memory: 1 << 30, Queue: 10})
	if err := r.take(t.Context(), 600, 512<<20); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	large := r.queue(t, ctx, 900, 1<<20)
	small := r.queue(t, t.Context(), 100, 1<<20)
	cancel()
	err := <-large
	if !errors.Is(err, sandbox.Exhausted) || sandbox.HintOf(err) == "" {
		t.Errorf("got %v", err)
	}
	for _, n := range []string{"900", "1000", "600", "1024", "512", "1 sandboxes"} {
		if !strings.Contains(err.Error(), n) {
			t.Errorf("%q does not say %s", err, n)
		}
	}
	if err := <-small; err != nil {
		t.Error(err)
	}
}

func TestRoomLimits(t *testing.T) {
	t.Parallel()
	r := newRoom(Limits{CPU: 1 << 40, Memory: 1 << 40, MaxSandboxes: 2, Queue: 1})
	for range 2 {
		if err := r.take(t.Context(), 1, 1); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	third := r.queue(t, ctx, 1, 1)
	if err := r.take(t.Context(), 1, 1); !errors.Is(err, sandbox.Exhausted) || sandbox.HintOf(err) == "" {
		t.Errorf("a line that is full: %v", err)
	}
	cancel()
	if err := <-third; !errors.Is(err, sandbox.Exhausted) {
		t.Error(err)
	}
	// Sandboxes found again have their room, whatever the limits say now.
	r.force(1, 1)
	if r.count != 3 {
		t.Errorf("%d alive", r.count)
	}
}

// Whatever comes and goes at once, what is promised never exceeds what there is,
// and nothing is lost.
func TestRoomChurn(t *testing.T) {
	t.Parallel()
	r := newRoom(Limits{CPU: 1000, Memory: 100, Queue: 1000})
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			cpu, mem := int64(i%5+1)*100, int64(i%3+1)*10
			for j := range 300 {
				ctx, cancel := context.WithCancel(context.Background())
				if j%3 == 0 {
					go cancel() // at any moment
				}
				if err := r.take(ctx, cpu, mem); err == nil {
					r.mu.Lock()
					if r.cpu > 1000 || r.mem > 100 {
						t.Errorf("promised %d, %d", r.cpu, r.mem)
					}
					r.mu.Unlock()
					r.give(cpu, mem)
				} else if !errors.Is(err, sandbox.Exhausted) {
					t.Error(err)
				}
				cancel()
			}
		})
	}
	wg.Wait()
	if r.cpu != 0 || r.mem != 0 || r.count != 0 || len(r.line) != 0 {
		t.Errorf("left: %d, %d, %d, %d in line", r.cpu, r.mem, r.count, len(r.line))
	}
}
