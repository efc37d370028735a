package engine

import (
	"fmt"
	"testing"
	"time"

	"vivarium/sandbox"
	"vivarium/store"
)

// A day's worth of sandboxes that ended is listed to its end, page by page, each
// once and in order.
func TestListEnded(t *testing.T) {
	t.Parallel()
	const n = 10_100
	e := keeper(t)
	var last *store.Pending
	for i := range n {
		sb := sandbox.Sandbox{ID: fmt.Sprintf("sb-%06d", i), Tenant: "a", Stage: sandbox.StageEnded, Death: &sandbox.Death{Ended: time.Unix(int64(n-i), 0)}}
		sb.Spec.Name, sb.Removed = fmt.Sprint("n", i), i%10 == 9
		last = e.store.Put(sb)
	}
	if err := last.Wait(); err != nil {
		t.Fatal(err)
	}
	for _, removed := range []bool{false, true} {
		want := n
		if !removed {
			want -= n / 10
		}
		got, after := 0, ""
		for {
			l, err := e.List(t.Context(), "a", Filter{Ended: true, Removed: removed, After: after, Limit: 4000})
			if err != nil {
				t.Fatal(err)
			}
			for _, sb := range l {
				if sb.ID <= after || sb.Removed && !removed {
					t.Fatalf("%s after %s, removed: %v", sb.ID, after, sb.Removed)
				}
				after = sb.ID
			}
			if got += len(l); len(l) < 4000 {
				break
			}
		}
		if got != want {
			t.Errorf("removed %v: %d of %d", removed, got, want)
		}
	}
	if l, err := e.List(t.Context(), "a", Filter{Ended: true, Name: "n7"}); err != nil || len(l) != 1 || l[0].ID != "sb-000007" {
		t.Errorf("by name: %v, %v", l, err)
	}
	if l, err := e.List(t.Context(), "b", Filter{Ended: true, Removed: true}); err != nil || len(l) != 0 {
		t.Errorf("another tenant's: %v, %v", l, err)
	}
}
