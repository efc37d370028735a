package cli

import (
	"fmt"
	"io"
	"sync"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	v1 "vivarium/api/vivarium/v1"
)

// progress shows how far something is on a terminal, and nothing elsewhere.
type progress struct {
	p    *mpb.Progress
	what string

	mu   sync.Mutex
	step string
	bar  *mpb.Bar
}

func (a *app) newProgress(what string) *progress {
	p := &progress{what: clean(what)}
	if _, ok := terminal(a.Err); ok {
		p.p = mpb.New(mpb.WithOutput(a.Err), mpb.WithWidth(60))
	}
	return p
}

// set shows a step and how far it is; a total of 0 is unknown.
func (p *progress) set(step string, done, total int64) {
	if p.p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if step != p.step {
		if p.bar != nil {
			p.bar.SetTotal(-1, true)
		}
		p.step = step
		p.bar = p.p.AddBar(0,
			mpb.PrependDecorators(decor.Name(p.what+"  "+clean(step), decor.WC{C: decor.DindentRight | decor.DextraSpace})),
			mpb.AppendDecorators(decor.CountersKibiByte("% .1f / % .1f")),
		)
	}
	if total > 0 {
		p.bar.SetTotal(total, false)
	}
	p.bar.SetCurrent(done)
}

func (p *progress) image(m *v1.Progress) {
	if m.Step != "done" {
		p.set(m.Step, m.Done, m.Total)
	}
}

// end removes nothing: what was shown stays as it is.
func (p *progress) end(err error) {
	if p.p == nil {
		return
	}
	p.mu.Lock()
	if p.bar != nil {
		if err != nil {
			p.bar.Abort(false)
		} else {
			p.bar.SetTotal(-1, true)
		}
	}
	p.mu.Unlock()
	p.p.Wait()
}

// reader counts what is read for the bar.
func (p *progress) reader(r io.Reader, step string, total int64) io.Reader {
	if p.p == nil {
		return r
	}
	return &countingReader{r: r, seen: func(n int64) { p.set(step, n, total) }}
}

type countingReader struct {
	r    io.Reader
	n    int64
	seen func(int64)
}

func (c *countingReader) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += int64(n)
	c.seen(c.n)
	return n, err
}

func imageLine(i *v1.Image) string {
	name := i.Id
	if len(i.Tags) > 0 {
		name = i.Tags[0]
	}
	return fmt.Sprintf("%s  %s  %s\n", clean(name), i.Id, bytesText(i.Size))
}
