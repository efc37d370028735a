package engine

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"maps"
	"path"

	"vivarium/guest"
	"vivarium/sandbox"
)

// Furnish is what a sandbox gets from its node: files, and variables below those
// of its image.
type Furnish struct {
	Env   map[string]string
	Files []FurnishFile
}

// FurnishFile is written only where its folder is there already: the image has no
// such program otherwise.
type FurnishFile struct {
	Path string
	Mode fs.FileMode
	Data []byte
}

// furnish tells the package tools inside where the node's cache is. What an image
// cannot take is not worth the sandbox: its packages then come from outside.
func (b *box) furnish(ctx context.Context) error {
	if b.e.opts.Furnish == nil || b.record().Spec.Network.Mode == sandbox.NetworkNone {
		return nil
	}
	f := b.e.opts.Furnish()
	c, err := b.guest(ctx)
	if err != nil {
		return err
	}
	for _, x := range f.Files {
		if _, err := c.Stat(ctx, "root", path.Dir(x.Path), true); errors.Is(err, sandbox.NotFound) {
			continue
		}
		if _, err := c.WriteFile(ctx, "root", x.Path, bytes.NewReader(x.Data), guest.WriteOptions{Attr: guest.Attr{Mode: &x.Mode}}); err != nil {
			if ctx.Err() != nil {
				return sandbox.Timeout.Errorf("set up package tools: %w", err)
			}
			b.e.log.Info("package tools without the cache", "sandbox", b.id, "file", x.Path, "err", err)
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	under := maps.Clone(f.Env)
	maps.Copy(under, b.rec.Base.Under)
	b.rec.Base.Under = under
	return nil
}

// SlotTenant says whose sandbox has a network slot, "" for nobody's, and its
// policy.
func (e *Engine) SlotTenant(slot string) (tenant string, p sandbox.NetworkPolicy) {
	b := e.bySlot(slot)
	if b == nil {
		return "", p
	}
	return b.tenant, b.record().Spec.Network
}
