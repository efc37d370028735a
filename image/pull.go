package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sync/errgroup"

	"vivarium/sandbox"
)

// sourcePull starts the Source of images that can be fetched again.
const sourcePull = "pull:"

// parallelLayers is how many layers of one image are fetched at a time.
const parallelLayers = 3

// errVanished says that an image was removed while another pull relied on it.
var errVanished = errors.New("image was removed meanwhile")

// Pull returns an image for a tenant, fetching it if the policy says so. Pulls
// of one reference by one tenant at one time are one pull. The errors: Invalid
// for a bad reference or a hostile or corrupt image, NotFound, Denied,
// Unavailable if the registry cannot be reached, Exhausted for limits and a
// full disk, Timeout, Unsupported.
func (s *Store) Pull(ctx context.Context, tenant, ref string, o PullOptions) (*Image, error) {
	want, err := parsePlatform(o.Platform)
	if err != nil {
		return nil, err
	}
	if o.Policy != Always {
		img, err := s.Get(ctx, tenant, ref)
		if err == nil && (o.Platform == "" || img.Platform == platformString(want)) {
			return img, nil
		}
		if err == nil {
			err = sandbox.NotFound.Errorf("image %q is for %s", ref, img.Platform)
		}
		if o.Policy == Never || isID(ref) || !errors.Is(err, sandbox.NotFound) {
			return nil, err
		}
	}
	r, err := parseRef(ref)
	if err != nil {
		return nil, err
	}
	if _, ok := r.(name.Digest); ok {
		if _, err := sha256Hash(r.Identifier()); err != nil {
			return nil, err
		}
	}
	key := fmt.Sprintf("%q %q %q %s", tenant, r.Name(), platformString(want), authKey(ctx, o.Auth))
	return s.fly.do(ctx, key, o.Progress, func(ctx context.Context, report func(Progress)) (*Image, error) {
		p := &puller{s: s, tenant: tenant, ref: r, want: want, auth: o.Auth, meter: &meter{report: report}}
		img, err := p.pull(ctx)
		if errors.Is(err, errVanished) {
			p.alone = true
			img, err = p.pull(ctx)
		}
		if err != nil {
			return nil, kinded(registryError(err, familiar(r)), "pull image "+familiar(r))
		}
		return img, nil
	})
}

// authKey keeps pulls with different credentials apart.
func authKey(ctx context.Context, a authn.Authenticator) string {
	if a == nil {
		return ""
	}
	c, err := authn.Authorization(ctx, a)
	if err != nil {
		return fmt.Sprintf("%p", a)
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%q", *c))
	return hex.EncodeToString(sum[:])
}

// keychain returns where a tenant's credentials are.
func (s *Store) keychain(tenant string) authn.Keychain {
	if s.opt.Credentials == nil {
		return s.opt.Keychain
	}
	if k := s.opt.Credentials(tenant); k != nil {
		return k
	}
	return authn.NewMultiKeychain() // empty: anonymous
}

// puller is one pull.
type puller struct {
	s      *Store
	tenant string
	ref    name.Reference
	want   v1.Platform
	auth   authn.Authenticator
	meter  *meter
	alone  bool // do not rely on what other tenants have
}

// pull tries the mirrors and then the registry.
func (p *puller) pull(ctx context.Context) (*Image, error) {
	p.meter.stage("resolve", 0)
	places, err := p.s.places(p.ref.Context())
	if err != nil {
		return nil, err
	}
	rt, closeIdle := p.s.newTransport(p.tenant)
	defer closeIdle()
	for _, pl := range places {
		auth := p.auth
		if pl.mirror {
			auth = nil
		}
		var r *repo
		var res *resolved
		if r, err = p.s.openRepo(ctx, pl.repo, rt, p.s.keychain(p.tenant), auth); err == nil {
			res, err = resolve(ctx, r.manifest, p.ref.Identifier(), p.want)
		}
		if err == nil {
			var img *Image
			if img, err = p.from(ctx, r, res); err == nil {
				return img, nil
			}
		}
		if ctx.Err() != nil || errors.Is(err, errVanished) || errors.Is(err, sandbox.Exhausted) {
			return nil, err
		}
	}
	return nil, err
}

// from pulls a resolved image from one place.
func (p *puller) from(ctx context.Context, r *repo, res *resolved) (*Image, error) {
	var raw bytes.Buffer
	if err := r.blob(ctx, res.manifest.Config, &raw, nil); err != nil {
		return nil, err
	}
	cfg, err := parseConfig(raw.Bytes())
	if err != nil {
		return nil, err
	}
	if err := checkLayers(res.manifest, cfg, p.s.opt.Limits); err != nil {
		return nil, err
	}
	if cfg.Platform.OS != "" && !matches(cfg.Platform, p.want) {
		return nil, sandbox.NotFound.Errorf("no image for platform %s", platformString(p.want)).
			WithHint("this image is for %s", platformString(cfg.Platform))
	}
	if cfg.Platform.OS == "" {
		cfg.Platform = p.want
	}
	img := &Image{
		ID: imageID(res.manifest.Config.Digest), Digest: res.digest.String(), Tenant: p.tenant,
		Config: cfg.Config, Platform: platformString(cfg.Platform), Created: cfg.Created, Source: sourcePull + p.ref.Name(),
	}
	var b *built
	if !p.mayShare(img.ID, res.digest) {
		if b, err = p.fetch(ctx, r, res.manifest, cfg); err != nil {
			return nil, err
		}
	}
	var proofs []pull
	for _, d := range res.digests {
		proofs = append(proofs, pull{p.tenant, img.ID, p.ref.Context().Name(), d.String()})
	}
	return p.s.publish(ctx, img, b, []string{familiar(p.ref)}, proofs)
}

// mayShare reports whether the image's file is there and this tenant has shown
// that it may have it: because it has it already, or because it just got the
// manifest from the repository from which somebody else had it too.
func (p *puller) mayShare(id string, digest v1.Hash) bool {
	if p.alone {
		return false
	}
	p.s.mu.RLock()
	defer p.s.mu.RUnlock()
	if t := p.s.tenants[p.tenant]; t != nil && t.images[id] != nil {
		return true
	}
	for q := range p.s.pulls {
		if q.ID == id && q.Repo == p.ref.Context().Name() && q.Digest == digest.String() {
			return true
		}
	}
	return false
}

// fetch downloads the layers and converts them, each as soon as it and those
// below it are there.
func (p *puller) fetch(ctx context.Context, r *repo, m *v1.Manifest, cfg *parsed) (*built, error) {
	total := int64(0)
	for _, l := range m.Layers {
		total += l.Size
	}
	if err := p.s.checkSpace(total); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(p.s.dir(tmpDir), "pull-*")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	p.meter.stage("download", total)
	g, ctx := errgroup.WithContext(ctx)
	slots := make(chan struct{}, parallelLayers)
	layers := make([]layerSource, len(m.Layers))
	ready := make([]chan struct{}, len(m.Layers))
	for i := range m.Layers {
		ready[i] = make(chan struct{})
		file := fmt.Sprintf("%s/%d", dir, i)
		layers[i] = layerSource{
			diffID: cfg.DiffIDs[i],
			open: func(ctx context.Context) (io.ReadCloser, error) {
				select {
				case <-ready[i]:
					return os.Open(file)
				case <-ctx.Done():
					return nil, context.Cause(ctx)
				}
			},
			done: func() { os.Remove(file) },
		}
	}
	g.Go(func() error {
		inner, ctx := errgroup.WithContext(ctx)
		for i, l := range m.Layers {
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
				return inner.Wait()
			}
			inner.Go(func() error {
				defer func() { <-slots }()
				if err := p.download(ctx, r, l, fmt.Sprintf("%s/%d", dir, i)); err != nil {
					return err
				}
				close(ready[i])
				return nil
			})
		}
		return inner.Wait()
	})
	var b *built
	g.Go(func() (err error) {
		b, err = p.s.convert(ctx, layers, nil)
		return err
	})
	if err := g.Wait(); err != nil {
		if b != nil {
			b.remove()
		}
		return nil, err
	}
	return b, nil
}

// download fetches one layer into a file.
func (p *puller) download(ctx context.Context, r *repo, d v1.Descriptor, file string) error {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := r.blob(ctx, d, &roomWriter{f, room{s: p.s}}, p.meter.add); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return permanent{err}
	}
	return p.s.fail("downloaded")
}

// meter adds up progress and reports it a few times a second.
type meter struct {
	report func(Progress)
	mu     sync.Mutex
	p      Progress  // guarded by mu
	last   time.Time // guarded by mu
}

func (m *meter) stage(name string, total int64) {
	m.mu.Lock()
	m.p = Progress{Stage: name, Total: total}
	m.last = time.Now()
	p := m.p
	m.mu.Unlock()
	m.report(p)
}

func (m *meter) add(n int) {
	m.mu.Lock()
	m.p.Done += int64(n)
	p := m.p
	due := p.Done == p.Total || time.Since(m.last) > 100*time.Millisecond
	if due {
		m.last = time.Now()
	}
	m.mu.Unlock()
	if due {
		m.report(p)
	}
}
