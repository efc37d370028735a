package image

import (
	"bytes"
	"context"
	"encoding/json"
	"runtime"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"vivarium/sandbox"
)

// parsePlatform reads "os/arch[/variant]"; "" is this machine's.
func parsePlatform(s string) (v1.Platform, error) {
	if s == "" {
		return v1.Platform{OS: "linux", Architecture: runtime.GOARCH}, nil
	}
	parts := strings.Split(s, "/")
	if len(parts) < 2 || len(parts) > 3 || slices.Contains(parts, "") || len(s) > 128 {
		return v1.Platform{}, sandbox.Invalid.Errorf("bad platform %.128q", s).WithHint("write it as os/arch[/variant], such as linux/amd64")
	}
	p := v1.Platform{OS: parts[0], Architecture: parts[1]}
	if len(parts) == 3 {
		p.Variant = parts[2]
	}
	return p, nil
}

func platformString(p v1.Platform) string {
	s := p.OS + "/" + p.Architecture
	if p.Variant != "" {
		s += "/" + p.Variant
	}
	return s
}

// matches reports whether an image for have runs where want is asked for.
func matches(have, want v1.Platform) bool {
	return have.OS == want.OS && have.Architecture == want.Architecture && (want.Variant == "" || have.Variant == want.Variant)
}

// pick chooses the manifest for a platform from an index. NotFound names what
// there is.
func pick(b []byte, want v1.Platform) (v1.Descriptor, error) {
	var idx v1.IndexManifest
	if err := json.Unmarshal(b, &idx); err != nil {
		return v1.Descriptor{}, sandbox.Invalid.Errorf("read image index: %w", err)
	}
	var have []string
	for _, d := range idx.Manifests {
		if d.Platform == nil || d.Platform.OS == "unknown" {
			continue // an attestation or some other artefact
		}
		if matches(*d.Platform, want) {
			return d, nil
		}
		if len(have) < 20 {
			have = append(have, platformString(*d.Platform))
		}
	}
	if len(idx.Manifests) == 1 && idx.Manifests[0].Platform == nil {
		return idx.Manifests[0], nil // its config will say
	}
	return v1.Descriptor{}, sandbox.NotFound.Errorf("no image for platform %s", platformString(want)).
		WithHint("there are: %s", strings.Join(have, ", "))
}

// manifests fetches a manifest or an index by tag or digest.
type manifests func(ctx context.Context, id string) ([]byte, types.MediaType, v1.Hash, error)

// resolved is an image's manifest.
type resolved struct {
	manifest *v1.Manifest
	digest   v1.Hash
	digests  []v1.Hash // of the manifest and the indexes that led to it
}

// resolve follows indexes to the manifest for a platform.
func resolve(ctx context.Context, get manifests, id string, want v1.Platform) (*resolved, error) {
	r := &resolved{}
	for range 4 {
		b, mt, digest, err := get(ctx, id)
		if err != nil {
			return nil, err
		}
		r.digests = append(r.digests, digest)
		switch kindOf(b, mt) {
		case "manifest":
			r.digest = digest
			r.manifest, err = parseManifest(b)
			return r, err
		case "index":
			d, err := pick(b, want)
			if err != nil {
				return nil, err
			}
			id = d.Digest.String()
		case "schema1":
			return nil, sandbox.Unsupported.Errorf("manifest of Docker's old schema 1").WithHint("push the image again with a current Docker")
		default:
			return nil, sandbox.Invalid.Errorf("manifest of the unknown type %.80q", mt)
		}
	}
	return nil, sandbox.Invalid.Errorf("image indexes are nested too deep")
}

// kindOf tells manifests and indexes apart, by what they hold where the media
// type is missing.
func kindOf(b []byte, mt types.MediaType) string {
	var probe struct {
		MediaType     types.MediaType   `json:"mediaType"`
		SchemaVersion int               `json:"schemaVersion"`
		Manifests     []json.RawMessage `json:"manifests"`
		Config        json.RawMessage   `json:"config"`
	}
	if err := json.Unmarshal(b, &probe); err != nil {
		return ""
	}
	if probe.MediaType != "" {
		mt = probe.MediaType
	}
	switch {
	case mt == types.OCIImageIndex || mt == types.DockerManifestList:
		return "index"
	case mt == types.OCIManifestSchema1 || mt == types.DockerManifestSchema2:
		return "manifest"
	case probe.SchemaVersion == 1:
		return "schema1"
	case probe.Config != nil && probe.Manifests == nil:
		return "manifest"
	case probe.Manifests != nil && probe.Config == nil:
		return "index"
	}
	return ""
}

// parseManifest reads and checks an image manifest.
func parseManifest(b []byte) (*v1.Manifest, error) {
	m, err := v1.ParseManifest(bytes.NewReader(b))
	if err != nil {
		return nil, sandbox.Invalid.Errorf("read manifest: %w", err)
	}
	if m.Config.Size < 0 || m.Config.Size > maxConfig {
		return nil, sandbox.Invalid.Errorf("image config of %d bytes is too large", m.Config.Size)
	}
	for _, d := range append([]v1.Descriptor{m.Config}, m.Layers...) {
		if _, err := sha256Hash(d.Digest.String()); err != nil {
			return nil, err
		}
		if d.Size < 0 {
			return nil, sandbox.Invalid.Errorf("manifest with a negative size")
		}
		if strings.Contains(string(d.MediaType), "encrypted") {
			return nil, sandbox.Unsupported.Errorf("the image is encrypted").WithHint("decrypt it before pulling")
		}
	}
	return m, nil
}

// checkLayers compares a manifest with its config and the limits.
func checkLayers(m *v1.Manifest, p *parsed, l Limits) error {
	if len(m.Layers) != len(p.DiffIDs) {
		return sandbox.Invalid.Errorf("not an image: manifest has %d layers, config %d", len(m.Layers), len(p.DiffIDs))
	}
	if len(m.Layers) > l.Layers {
		return sandbox.Exhausted.Errorf("image has %d layers, more than %d", len(m.Layers), l.Layers)
	}
	total := int64(0)
	for _, d := range m.Layers {
		if total += d.Size; d.Size > l.LayerBytes || total > l.ImageBytes {
			return sandbox.Exhausted.Errorf("image is larger than the limit of %d MiB", l.ImageBytes>>20).
				WithHint("raise the image limits in the daemon's configuration if you trust this image")
		}
	}
	return nil
}
