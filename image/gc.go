package image

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"vivarium/sandbox"
)

// GC removes images that nobody needs: those without any name, and, while the
// disk budget is exceeded, those that were pulled by a tag, least recently used
// first, since they can be pulled again. Images that were loaded or built and
// have a name are never removed. Images that are pinned by Use stay, and those
// for which inUse (may be nil) is true.
func (s *Store) GC(ctx context.Context, inUse func(id string) bool) (GCReport, error) {
	s.commit.Lock()
	defer s.commit.Unlock()
	return s.collect(ctx, inUse, 0, true)
}

// makeRoom evicts until need more bytes fit into the budget. Exhausted if they
// cannot. The caller holds commit.
func (s *Store) makeRoom(ctx context.Context, need int64) error {
	if s.opt.DiskBudget <= 0 || s.used()+need <= s.opt.DiskBudget {
		return nil
	}
	rep, err := s.collect(ctx, s.opt.InUse, need, false)
	if err != nil {
		return err
	}
	if rep.Used+need > s.opt.DiskBudget {
		return sandbox.Exhausted.Errorf("image of %d MiB does not fit: images take %d MiB of the %d MiB they may",
			need>>20, rep.Used>>20, s.opt.DiskBudget>>20).
			WithHint("remove images, or raise the disk budget in the daemon's configuration")
	}
	return nil
}

// candidate is an image that may be evicted.
type candidate struct {
	tenant, id string
	tagged     bool
	used       time.Time
}

func (s *Store) collect(ctx context.Context, inUse func(string) bool, need int64, untagged bool) (GCReport, error) {
	var rep GCReport
	for _, c := range s.candidates() {
		over := s.opt.DiskBudget > 0 && s.used()+need > s.opt.DiskBudget
		if !over && (c.tagged || !untagged) {
			break
		}
		freed, err := s.drop(ctx, c.tenant, c.id, inUse)
		if errors.Is(err, sandbox.Conflict) {
			continue
		}
		if err != nil {
			return rep, err
		}
		rep.Removed = append(rep.Removed, c.id)
		rep.Freed += freed
	}
	rep.Used = s.used()
	return rep, nil
}

// candidates returns what may be evicted: images without a name first, then by
// last use.
func (s *Store) candidates() []candidate {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var out []candidate
	for name, t := range s.tenants {
		tagged := map[string]bool{}
		for _, id := range t.tags {
			tagged[id] = true
		}
		for id, i := range t.images {
			if tagged[id] && !strings.HasPrefix(i.Source, sourcePull) {
				continue
			}
			out = append(out, candidate{name, id, tagged[id], i.LastUsed})
		}
	}
	slices.SortFunc(out, func(a, b candidate) int {
		if a.tagged != b.tagged {
			if b.tagged {
				return -1
			}
			return 1
		}
		if c := a.used.Compare(b.used); c != 0 {
			return c
		}
		return strings.Compare(a.tenant+a.id, b.tenant+b.id)
	})
	return out
}

// used returns the bytes that all files take on disk, each counted once.
func (s *Store) used() int64 {
	s.mu.RLock()
	defer s.mu.RUnlock()
	seen := map[string]bool{}
	n := int64(0)
	for _, t := range s.tenants {
		for id, i := range t.images {
			if !seen[id] {
				seen[id] = true
				n += i.Disk
			}
		}
	}
	return n
}
