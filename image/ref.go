package image

import (
	"strings"

	"github.com/google/go-containerregistry/pkg/name"

	"vivarium/sandbox"
)

// maxRef bounds a reference; the longest valid one is shorter.
const maxRef = 1024

// parseRef reads a reference as Docker does: "debian" is
// docker.io/library/debian:latest.
func parseRef(ref string) (name.Reference, error) {
	if len(ref) > maxRef {
		return nil, sandbox.Invalid.Errorf("image reference of %d bytes is too long", len(ref))
	}
	r, err := name.ParseReference(ref)
	if err != nil {
		return nil, sandbox.Invalid.Errorf("bad image reference %q: %w", ref, err).
			WithHint("write it as name[:tag], registry/name[:tag] or name@sha256:…")
	}
	return r, nil
}

// familiar returns a reference as Docker shows it, the form in which tags are
// stored: without docker.io and library, always with a tag or digest.
func familiar(r name.Reference) string {
	sep := ":"
	if _, ok := r.(name.Digest); ok {
		sep = "@"
	}
	return familiarRepo(r.Context()) + sep + r.Identifier()
}

func familiarRepo(r name.Repository) string {
	if r.RegistryStr() == name.DefaultRegistry {
		return strings.TrimPrefix(r.RepositoryStr(), "library/")
	}
	return r.RegistryStr() + "/" + r.RepositoryStr()
}

// idPrefix starts every image id.
const idPrefix = "im-"

// isID reports whether s is an id or a prefix of one that is long enough to be
// meant as such.
func isID(s string) bool {
	hex, ok := strings.CutPrefix(s, idPrefix)
	if !ok || len(hex) < 6 || len(hex) > 64 {
		return false
	}
	return strings.Trim(hex, "0123456789abcdef") == ""
}
