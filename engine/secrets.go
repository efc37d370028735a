package engine

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"

	"vivarium/guest"
	"vivarium/sandbox"
	"vivarium/secret"
)

const maxSecrets = 64

// wantsSecrets says whether a spec has anything that the proxy puts in, or that
// is put into the environment.
func wantsSecrets(s sandbox.Spec) bool { return len(s.Secrets)+len(s.Network.Headers) > 0 }

func (e *Engine) checkSecrets(s sandbox.Spec) error {
	if !wantsSecrets(s) {
		return nil
	}
	if e.opts.Secrets == nil {
		return sandbox.Unsupported.Errorf("this daemon keeps no secrets")
	}
	if len(s.Secrets) > maxSecrets {
		return sandbox.Invalid.Errorf("%d secrets: at most %d", len(s.Secrets), maxSecrets)
	}
	return nil
}

// bind gives the box its secrets: placeholders, a CA, and whom they are for. The
// policy that it is created with is to name what is inspected.
func (b *box) bind(ctx context.Context) error {
	sb := b.record()
	if !wantsSecrets(sb.Spec) {
		return nil
	}
	spec := secret.BindSpec{Tenant: b.tenant, Sandbox: b.id, Headers: sb.Spec.Network.Headers, Lifetime: b.e.opts.Limits.MaxTimeout}
	for _, name := range sb.Spec.Secrets {
		spec.Uses = append(spec.Uses, secret.Use{Name: name})
	}
	s, err := b.e.opts.Secrets.Bind(ctx, spec)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.secrets = s
	b.rec.Spec.Network.Inspect = s.Hosts()
	return nil
}

// inject lets the proxy put the box's secrets into requests.
func (b *box) inject() error {
	b.mu.Lock()
	s, slot := b.secrets, b.rec.Slot
	b.mu.Unlock()
	if s == nil || len(s.Hosts()) == 0 {
		return nil
	}
	return b.e.opts.Network.SetInjector(slot, s)
}

// rebind takes up the secrets of a box that was found again. One that had some
// and gets none goes on without: its requests to their hosts are refused.
func (b *box) rebind(ctx context.Context) {
	if !wantsSecrets(b.record().Spec) || b.e.opts.Secrets == nil {
		return
	}
	s, err := b.e.opts.Secrets.Restore(ctx, b.tenant, b.id)
	if err == nil {
		b.mu.Lock()
		b.secrets = s
		b.mu.Unlock()
		err = b.inject()
	}
	if err != nil {
		b.e.log.Error("take up secrets", "sandbox", b.id, "err", err)
	}
}

// unbind forgets what the box had of the secrets.
func (b *box) unbind() {
	if !wantsSecrets(b.record().Spec) || b.e.opts.Secrets == nil {
		return
	}
	if err := b.e.opts.Secrets.Release(context.Background(), b.tenant, b.id); err != nil {
		b.e.log.Error("release secrets", "sandbox", b.id, "err", err)
	}
}

// trust puts the CA of the box where the programs inside look for CAs.
func (b *box) trust(ctx context.Context) error {
	b.mu.Lock()
	s, env := b.secrets, mergedEnv(&b.rec)
	b.mu.Unlock()
	if s == nil || len(s.Hosts()) == 0 {
		return nil
	}
	c, err := b.guest(ctx)
	if err != nil {
		return err
	}
	t, err := s.TrustFiles(secret.Inside{Env: env, Read: func(path string) ([]byte, error) { return readInside(ctx, c, path) }})
	if err != nil {
		return err
	}
	for _, f := range t.Files {
		if _, err := c.WriteFile(ctx, "root", f.Path, bytes.NewReader(f.Data), guest.WriteOptions{Attr: guest.Attr{Mode: &f.Mode}, Parents: true}); err != nil {
			return sandbox.KindOf(err).Errorf("let the sandbox trust its CA: write %s: %w", f.Path, err).
				WithHint("the proxy that puts secrets into requests is trusted through the image's CA certificates; the image must let root write there")
		}
	}
	if len(t.Skipped) > 0 {
		b.e.log.Info("CA stores that the sandbox's CA could not be added to", "sandbox", b.id, "why", strings.Join(t.Skipped, "; "))
	}
	b.mu.Lock()
	under := maps.Clone(b.rec.Base.Under)
	if under == nil {
		under = map[string]string{}
	}
	maps.Copy(under, t.Env)
	b.rec.Base.Under = under
	b.mu.Unlock()
	return nil
}

// readInside reads a file of a sandbox, up to what a bundle of CAs may have.
func readInside(ctx context.Context, c *guest.Client, path string) ([]byte, error) {
	r, err := c.ReadFile(ctx, "root", path, 0, secret.MaxTrustFile+1)
	if errors.Is(err, sandbox.NotFound) {
		return nil, fs.ErrNotExist
	}
	if err != nil {
		return nil, err
	}
	defer r.Close()
	p, err := io.ReadAll(io.LimitReader(r, secret.MaxTrustFile+1))
	if err == nil && len(p) > secret.MaxTrustFile {
		err = sandbox.Exhausted.Errorf("%s is larger than %d bytes", path, secret.MaxTrustFile)
	}
	return p, err
}

// inspected are the domains whose requests the proxy has to read for the sake of
// the sandbox's secrets.
func (b *box) inspected() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.secrets == nil {
		return nil
	}
	return slices.Clone(b.secrets.Hosts())
}

// environment is what every command gets besides what is recorded of it: values
// of plain secrets are in no record.
func (b *box) environment() map[string]string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.secrets == nil {
		return nil
	}
	return b.secrets.Environment().Vars()
}
