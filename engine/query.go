package engine

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"vivarium/sandbox"
)

func itoa(n int) string { return strconv.Itoa(n) }

func sortExecs(l []sandbox.Exec) {
	slices.SortFunc(l, func(a, b sandbox.Exec) int { return a.Started.Compare(b.Started) })
}

func notFound(ref string) error {
	return sandbox.NotFound.Errorf("sandbox %q does not exist", ref).WithHint("`viv ps -a` lists those that do")
}

// find gives the living box of an id or name, or the record of one that ended.
// Another tenant's do not exist.
func (e *Engine) find(ctx context.Context, tenant, ref string) (*box, sandbox.Sandbox, error) {
	e.mu.Lock()
	id, named := e.names[tenant+"/"+ref]
	if !named {
		id = ref
	}
	b, ok := e.boxes[id]
	e.mu.Unlock()
	if ok && b.tenant == tenant {
		return b, b.record(), nil
	}
	if !strings.HasPrefix(ref, "sb-") {
		return nil, sandbox.Sandbox{}, notFound(ref)
	}
	sb, err := e.store.Sandbox(ctx, tenant, ref)
	if errors.Is(err, sandbox.NotFound) {
		return nil, sandbox.Sandbox{}, notFound(ref)
	}
	return nil, sb, err
}

// living is find for what needs a living one.
func (e *Engine) living(ctx context.Context, tenant, ref string) (*box, error) {
	b, sb, err := e.find(ctx, tenant, ref)
	if err != nil {
		return nil, err
	}
	if b == nil {
		why := "unknown"
		if sb.Death != nil {
			why = deathText(sb.Death)
		}
		return nil, sandbox.Gone.Errorf("sandbox %s has ended: %s", sb.ID, why)
	}
	return b, nil
}

func (e *Engine) byID(ctx context.Context, tenant, id string) (sandbox.Sandbox, error) {
	_, sb, err := e.find(ctx, tenant, id)
	return sb, err
}

// Get finds a sandbox by id, or a living one by name.
func (e *Engine) Get(ctx context.Context, tenant, ref string) (sandbox.Sandbox, error) {
	_, sb, err := e.find(ctx, tenant, ref)
	return sb, err
}

// defaultList and maxList bound one answer of List.
const (
	defaultList = 1000
	maxList     = 10_000
)

// List gives a tenant's sandboxes, oldest first.
func (e *Engine) List(ctx context.Context, tenant string, f Filter) ([]sandbox.Sandbox, error) {
	if f.Limit <= 0 {
		f.Limit = defaultList
	}
	f.Limit = min(f.Limit, maxList)
	var all []sandbox.Sandbox
	add := func(sb sandbox.Sandbox) {
		if f.Name != "" && sb.Spec.Name != f.Name || sb.ID <= f.After || len(f.Stages) > 0 && !slices.Contains(f.Stages, sb.Stage) {
			return
		}
		for k, v := range f.Tags {
			if got, ok := sb.Spec.Tags[k]; !ok || got != v {
				return
			}
		}
		all = append(all, sb)
	}
	e.mu.Lock()
	boxes := make([]*box, 0, len(e.boxes))
	for _, b := range e.boxes {
		if b.tenant == tenant {
			boxes = append(boxes, b)
		}
	}
	e.mu.Unlock()
	seen := map[string]bool{}
	for _, b := range boxes {
		seen[b.id] = true
		add(b.record())
	}
	if f.Ended || slices.Contains(f.Stages, sandbox.StageEnded) {
		living := len(all)
		for after, more := f.After, true; more && len(all)-living < f.Limit; {
			ended, err := e.store.Ended(ctx, tenant, f.Name, after, f.Removed, page)
			if err != nil {
				return nil, err
			}
			for _, sb := range ended {
				if after = sb.ID; !seen[sb.ID] {
					add(sb)
				}
			}
			more = len(ended) == page
		}
	}
	slices.SortFunc(all, func(a, b sandbox.Sandbox) int { return cmp.Compare(a.ID, b.ID) })
	if len(all) > f.Limit {
		all = all[:f.Limit]
	}
	return all, nil
}

// Wait returns when the sandbox has got that far; Gone or the error of its death
// certificate if it ends before that; Timeout when ctx ends.
func (e *Engine) Wait(ctx context.Context, tenant, ref string, until Until) (sandbox.Sandbox, error) {
	switch until {
	case UntilEnded, UntilRunning, UntilReady:
	default:
		return sandbox.Sandbox{}, sandbox.Invalid.Errorf("wait until %q: want running, ready or ended", until)
	}
	b, sb, err := e.find(ctx, tenant, ref)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if b == nil {
		return sb, outcome(sb, until)
	}
	return e.waitBox(ctx, b, until)
}

func (e *Engine) waitBox(ctx context.Context, b *box, until Until) (sandbox.Sandbox, error) {
	for {
		b.mu.Lock()
		sb, changed := b.rec, b.changed
		b.mu.Unlock()
		switch {
		case sb.Stage == sandbox.StageEnded:
			// what a caller is told to have ended is in the store, and its name free
			if err := b.waitGone(ctx); err != nil {
				return sb, err
			}
			return sb, outcome(sb, until)
		case until == UntilRunning && sb.Stage.Usable(), until == UntilReady && sb.Stage == sandbox.StageRunning:
			return sb, nil
		}
		select {
		case <-changed:
		case <-b.quit:
			return sb, sandbox.Unavailable.Errorf("the daemon is stopping")
		case <-ctx.Done():
			return sb, sandbox.Timeout.Errorf("wait for sandbox %s to be %s, it is in stage %s: %w", b.id, until, sb.Stage, ctx.Err())
		}
	}
}

// outcome is what a wait for one that has ended comes to.
func outcome(sb sandbox.Sandbox, until Until) error {
	d := sb.Death
	switch {
	case until == UntilEnded || d == nil:
		return nil
	case d.Reason == sandbox.ReasonFailed && d.Kind != "":
		err := d.Kind.Errorf("sandbox %s failed in stage %s: %s", sb.ID, d.Stage, d.Message)
		if d.Hint != "" {
			err = err.WithHint("%s", d.Hint)
		}
		return err
	case !sb.Started.IsZero() && until == UntilRunning:
		return nil // it ran, and is over already
	}
	return sandbox.Gone.Errorf("sandbox %s has ended: %s", sb.ID, deathText(d))
}

// Extend sets the sandbox's deadline to timeout from now.
func (e *Engine) Extend(ctx context.Context, tenant, ref string, timeout time.Duration) (sandbox.Sandbox, error) {
	b, err := e.living(ctx, tenant, ref)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if timeout <= 0 {
		return sandbox.Sandbox{}, sandbox.Invalid.Errorf("timeout of %s: must be positive", timeout)
	}
	if err := e.checkTimeout(timeout); err != nil {
		return sandbox.Sandbox{}, err
	}
	return b.change(func(sb *sandbox.Sandbox) { sb.Deadline = time.Now().Add(timeout) })
}

// SetTags replaces all tags.
func (e *Engine) SetTags(ctx context.Context, tenant, ref string, tags map[string]string) (sandbox.Sandbox, error) {
	b, err := e.living(ctx, tenant, ref)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := checkTags(tags); err != nil {
		return sandbox.Sandbox{}, err
	}
	return b.change(func(sb *sandbox.Sandbox) { sb.Spec.Tags = tags })
}

// change changes the record durably.
func (b *box) change(fn func(*sandbox.Sandbox)) (sandbox.Sandbox, error) {
	b.mu.Lock()
	if b.ending != nil {
		b.mu.Unlock()
		return sandbox.Sandbox{}, b.endedError()
	}
	fn(&b.rec)
	sb := b.rec
	p := b.e.store.Put(sb)
	b.mu.Unlock()
	b.watchDeadline()
	return sb, p.Wait()
}

// Usage is what the host measures of a living sandbox; of one that ended, its
// peak.
func (e *Engine) Usage(ctx context.Context, tenant, ref string) (sandbox.Usage, error) {
	b, sb, err := e.find(ctx, tenant, ref)
	if err != nil {
		return sandbox.Usage{}, err
	}
	if b == nil {
		if sb.Death != nil {
			return sandbox.Usage{PeakMemory: sb.Death.PeakMemory, OOM: sb.Death.OOM}, nil
		}
		return sandbox.Usage{}, nil
	}
	b.mu.Lock()
	m := b.machine
	b.mu.Unlock()
	if m == nil {
		return sandbox.Usage{}, nil
	}
	return m.Usage()
}
