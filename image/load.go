package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"vivarium/sandbox"
)

// Load reads images from an archive: a tar, perhaps compressed by gzip or
// zstd, of an OCI layout, of docker save, or of a root file system. Errors:
// Invalid, Exhausted, Unsupported, NotFound if it has no image for the platform.
func (s *Store) Load(ctx context.Context, tenant string, r io.Reader, o LoadOptions) ([]*Image, error) {
	l, err := s.newLoader(tenant, o)
	if err != nil {
		return nil, err
	}
	imgs, err := l.load(ctx, r)
	return imgs, kinded(err, "load image")
}

// LoadPath is Load from a file, or from the directory of an OCI layout.
func (s *Store) LoadPath(ctx context.Context, tenant, file string, o LoadOptions) ([]*Image, error) {
	l, err := s.newLoader(tenant, o)
	if err != nil {
		return nil, err
	}
	imgs, err := l.loadPath(ctx, file)
	if errors.Is(err, os.ErrNotExist) && sandbox.KindOf(err) == sandbox.Internal {
		return nil, sandbox.NotFound.Errorf("load image: %w", err)
	}
	return imgs, kinded(err, "load image")
}

// loader is one load.
type loader struct {
	s      *Store
	tenant string
	o      LoadOptions
	want   v1.Platform
	tag    string // familiar form of o.Tag; "" if none
	meter  *meter
}

func (s *Store) newLoader(tenant string, o LoadOptions) (*loader, error) {
	l := &loader{s: s, tenant: tenant, o: o, meter: &meter{report: o.Progress}}
	if o.Progress == nil {
		l.meter.report = func(Progress) {}
	}
	var err error
	if l.want, err = parsePlatform(o.Platform); err != nil {
		return nil, err
	}
	if o.Tag != "" {
		if l.tag, err = parseTag(o.Tag); err != nil {
			return nil, err
		}
	}
	switch o.Format {
	case Auto, OCILayout, Docker, RootFS:
		return l, nil
	}
	return nil, sandbox.Invalid.Errorf("unknown image format %.32q", o.Format).WithHint("it is one of oci-layout, docker, rootfs")
}

func (l *loader) loadPath(ctx context.Context, file string) ([]*Image, error) {
	fi, err := os.Stat(file)
	if err != nil {
		return nil, err
	}
	switch {
	case fi.IsDir():
		if l.o.Format != Auto && l.o.Format != OCILayout {
			return nil, sandbox.Invalid.Errorf("%s is a directory, which only an OCI layout can be", file)
		}
		root, err := os.OpenRoot(file)
		if err != nil {
			return nil, err
		}
		defer root.Close()
		return l.layout(ctx, dirBlobs{root})
	case !fi.Mode().IsRegular():
		return nil, sandbox.Invalid.Errorf("%s is neither a file nor a directory", file)
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return l.load(ctx, f)
}

func (l *loader) load(ctx context.Context, r io.Reader) ([]*Image, error) {
	size := sizeOf(r)
	if l.o.Format == RootFS {
		l.meter.stage("convert", size)
		return l.rootfs(ctx, r)
	}
	f, ok := seekable(r)
	if !ok {
		l.meter.stage("read", size)
		var err error
		if f, err = l.s.spool(ctx, &hashReader{r: r, tick: l.meter.add}); err != nil {
			return nil, err
		}
	}
	defer f.Close()
	l.meter.stage("convert", sizeOf(f))
	t, found, err := scanTar(ctx, f, l.o.Format != Auto)
	if err != nil {
		return nil, err
	}
	if l.o.Format != Auto && found != l.o.Format {
		// docker save writes both; the caller may want either.
		if l.o.Format != OCILayout || found != Docker {
			return nil, sandbox.Invalid.Errorf("archive is of the format %s, not %s", found, l.o.Format)
		}
		found = OCILayout
	}
	switch found {
	case Docker:
		return l.docker(ctx, t)
	case OCILayout:
		return l.layout(ctx, t)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	return l.rootfs(ctx, f)
}

// rootfs loads the tar of a root file system as one layer.
func (l *loader) rootfs(ctx context.Context, r io.Reader) ([]*Image, error) {
	if l.o.Config != nil {
		cfg := l.o.Config.clone()
		if err := cfg.check(); err != nil {
			return nil, err
		}
		l.o.Config = &cfg
	}
	src := layerSource{open: func(context.Context) (io.ReadCloser, error) { return io.NopCloser(ctxReader{ctx, r}), nil }}
	b, err := l.s.convert(ctx, []layerSource{src}, l.meter.add)
	if err != nil {
		return nil, err
	}
	return l.record(ctx, b, "rootfs")
}

// record publishes a converted image that came without a config, under one
// that we make.
func (l *loader) record(ctx context.Context, b *built, form string) ([]*Image, error) {
	c := ociConfig{OS: l.want.OS, Architecture: l.want.Architecture, Variant: l.want.Variant}
	cfg := Config{}
	if l.o.Config != nil {
		cfg = l.o.Config.clone()
	}
	c.setConfig(cfg)
	c.RootFS.Type = "layers"
	for _, d := range b.diffIDs {
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, d.String())
	}
	raw, err := json.Marshal(c)
	if err != nil {
		b.remove()
		return nil, err
	}
	img := l.image(digestOf(raw), digestOf(raw), form)
	img.Config, img.Platform, img.Created = cfg, platformString(l.want), time.Now().UTC()
	return l.publish(ctx, img, b, nil)
}

// setConfig is the opposite of what parseConfig reads.
func (c *ociConfig) setConfig(from Config) {
	to := &c.Config
	to.Env, to.WorkingDir, to.User, to.StopSignal, to.Labels = from.Env, from.WorkingDir, from.User, from.StopSignal, from.Labels
	to.Entrypoint, to.Cmd = from.Entrypoint, from.Cmd
	to.ExposedPorts, to.Volumes = set(from.ExposedPorts), set(from.Volumes)
}

func set(list []string) map[string]struct{} {
	if len(list) == 0 {
		return nil
	}
	m := map[string]struct{}{}
	for _, s := range list {
		m[s] = struct{}{}
	}
	return m
}

func digestOf(b []byte) v1.Hash {
	sum := sha256.Sum256(b)
	return v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum[:])}
}

// image starts the description of an image with the given digests.
func (l *loader) image(config, manifest v1.Hash, form string) *Image {
	source := l.o.Source
	if source == "" || strings.HasPrefix(source, sourcePull) {
		source = "load:" + form
	}
	return &Image{ID: imageID(config), Digest: manifest.String(), Tenant: l.tenant, Source: source}
}

// publish records an image under the tag asked for, else those of the archive.
func (l *loader) publish(ctx context.Context, img *Image, b *built, tags []string) ([]*Image, error) {
	if l.tag != "" {
		tags = []string{l.tag}
	}
	img, err := l.s.publish(ctx, img, b, tags, nil)
	if err != nil {
		return nil, err
	}
	return []*Image{img}, nil
}

// readBlob reads a small file of an archive.
func readBlob(src blobs, name string, limit int64) ([]byte, error) {
	r, err := src.open(name)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	return readAll(r, limit, name)
}

// convert makes an image of layers that lie in an archive.
func (l *loader) convert(ctx context.Context, img *Image, raw []byte, layers []layerSource, tags []string) ([]*Image, error) {
	p, err := parseConfig(raw)
	if err != nil {
		return nil, err
	}
	if len(layers) != len(p.DiffIDs) {
		return nil, sandbox.Invalid.Errorf("not an image: archive has %d layers, config %d", len(layers), len(p.DiffIDs))
	}
	for i := range layers {
		layers[i].diffID = p.DiffIDs[i]
	}
	if p.Platform.OS == "" {
		p.Platform = l.want
	}
	img.Config, img.Platform, img.Created = p.Config, platformString(p.Platform), p.Created
	l.s.mu.RLock()
	t := l.s.tenants[l.tenant]
	have := t != nil && t.images[img.ID] != nil
	l.s.mu.RUnlock()
	if have {
		out, err := l.publish(ctx, img, nil, tags)
		if !errors.Is(err, errVanished) {
			return out, err
		}
	}
	b, err := l.s.convert(ctx, layers, l.meter.add)
	if err != nil {
		return nil, err
	}
	return l.publish(ctx, img, b, tags)
}

// dockerImage is an entry of docker save's manifest.json.
type dockerImage struct {
	Config   string
	RepoTags []string
	Layers   []string
}

// docker loads what docker save wrote.
func (l *loader) docker(ctx context.Context, src blobs) ([]*Image, error) {
	b, err := readBlob(src, "manifest.json", maxManifest)
	if err != nil {
		return nil, err
	}
	var list []dockerImage
	if err := json.Unmarshal(b, &list); err != nil {
		return nil, sandbox.Invalid.Errorf("read manifest.json: %w", err)
	}
	if len(list) == 0 {
		return nil, sandbox.Invalid.Errorf("archive holds no image")
	}
	var out []*Image
	for _, d := range list {
		raw, err := readBlob(src, d.Config, maxConfig)
		if err != nil {
			return out, err
		}
		if len(d.Layers) > l.s.opt.Limits.Layers {
			return out, sandbox.Exhausted.Errorf("image has %d layers, more than %d", len(d.Layers), l.s.opt.Limits.Layers)
		}
		var layers []layerSource
		for _, n := range d.Layers {
			layers = append(layers, layerSource{open: func(context.Context) (io.ReadCloser, error) { return src.open(n) }})
		}
		var tags []string
		for _, t := range d.RepoTags {
			tag, err := parseTag(t)
			if err != nil {
				return out, err
			}
			tags = append(tags, tag)
		}
		img := l.image(digestOf(raw), digestOf(raw), "docker")
		imgs, err := l.convert(ctx, img, raw, layers, tags)
		if err != nil {
			return out, err
		}
		out = append(out, imgs...)
	}
	return out, nil
}

// layout loads an OCI image layout (image-spec, image-layout.md).
func (l *loader) layout(ctx context.Context, src blobs) ([]*Image, error) {
	b, err := readBlob(src, "index.json", maxManifest)
	if err != nil {
		return nil, err
	}
	var idx v1.IndexManifest
	if err := json.Unmarshal(b, &idx); err != nil {
		return nil, sandbox.Invalid.Errorf("read index.json: %w", err)
	}
	get := func(_ context.Context, id string) ([]byte, types.MediaType, v1.Hash, error) {
		h, err := sha256Hash(id)
		if err != nil {
			return nil, "", h, err
		}
		b, err := readBlob(src, blobName(h), maxManifest)
		if err == nil && digestOf(b) != h {
			err = sandbox.Invalid.Errorf("manifest is corrupt: its digest is %s, not %s", digestOf(b), h)
		}
		return b, "", h, err
	}
	var out []*Image
	for _, d := range l.wanted(idx.Manifests) {
		res, err := resolve(ctx, get, d.Digest.String(), l.want)
		if err != nil {
			return out, err
		}
		imgs, err := l.manifest(ctx, src, res, tagsOf(d.Annotations))
		if err != nil {
			return out, err
		}
		out = append(out, imgs...)
	}
	if len(out) == 0 {
		return nil, sandbox.NotFound.Errorf("archive holds no image for platform %s", platformString(l.want))
	}
	return out, nil
}

// wanted leaves out what is for another platform.
func (l *loader) wanted(ds []v1.Descriptor) []v1.Descriptor {
	var out []v1.Descriptor
	for _, d := range ds {
		if d.Platform == nil || matches(*d.Platform, l.want) {
			out = append(out, d)
		}
	}
	return out
}

// tagsOf returns the names that an index gives an image: containerd writes a
// whole one, others at least a tag, which alone names nothing.
func tagsOf(annotations map[string]string) []string {
	for _, key := range []string{"io.containerd.image.name", "org.opencontainers.image.ref.name"} {
		ref := annotations[key]
		if !strings.ContainsAny(ref, ":/") {
			continue
		}
		if r, err := name.NewTag(ref, name.WeakValidation); err == nil {
			return []string{familiar(r)}
		}
	}
	return nil
}

func blobName(h v1.Hash) string { return path.Join("blobs", h.Algorithm, h.Hex) }

// manifest loads one image of a layout.
func (l *loader) manifest(ctx context.Context, src blobs, res *resolved, tags []string) ([]*Image, error) {
	m := res.manifest
	raw, err := readBlob(src, blobName(m.Config.Digest), maxConfig)
	if err != nil {
		return nil, err
	}
	if digestOf(raw) != m.Config.Digest {
		return nil, sandbox.Invalid.Errorf("image config is corrupt: its digest is %s, not %s", digestOf(raw), m.Config.Digest)
	}
	if len(m.Layers) > l.s.opt.Limits.Layers {
		return nil, sandbox.Exhausted.Errorf("image has %d layers, more than %d", len(m.Layers), l.s.opt.Limits.Layers)
	}
	var layers []layerSource
	for _, d := range m.Layers {
		layers = append(layers, layerSource{
			digest: d.Digest,
			open:   func(context.Context) (io.ReadCloser, error) { return src.open(blobName(d.Digest)) },
		})
	}
	return l.convert(ctx, l.image(m.Config.Digest, res.digest, "oci-layout"), raw, layers, tags)
}
