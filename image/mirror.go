package image

import (
	"fmt"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"

	"vivarium/sandbox"
)

// place is one place to pull a repository from.
type place struct {
	repo   name.Repository
	mirror bool
}

// places lists where to ask for a repository: its mirrors in order, then the
// registry itself.
func (s *Store) places(r name.Repository) ([]place, error) {
	var out []place
	keys := []string{r.RegistryStr()}
	if r.RegistryStr() == name.DefaultRegistry {
		keys = append(keys, "docker.io")
	}
	for _, k := range keys {
		for _, m := range s.opt.Mirrors[k] {
			p, err := s.mirror(m, r)
			if err != nil {
				return nil, err
			}
			out = append(out, place{p, true})
		}
	}
	return append(out, place{repo: r}), nil
}

// mirror returns the repository that stands for r at a mirror. A mirror with
// "http://" is added to the insecure ones by Open.
func (s *Store) mirror(m string, r name.Repository) (name.Repository, error) {
	m = strings.TrimPrefix(strings.TrimPrefix(m, "https://"), "http://")
	n, err := name.NewRepository(strings.TrimSuffix(m, "/")+"/"+r.RepositoryStr(), name.StrictValidation)
	if err != nil {
		return n, sandbox.Invalid.Errorf("bad mirror %q: %w", m, err).WithHint("write it as host[:port][/prefix]")
	}
	if host, _, _ := strings.Cut(m, "/"); n.RegistryStr() != host && n.RegistryStr() != name.DefaultRegistry {
		return n, sandbox.Invalid.Errorf("bad mirror %q: its host needs a dot or a port", m)
	}
	return n, nil
}

// checkMirrors refuses a bad configuration when the store is opened.
func (s *Store) checkMirrors() error {
	r, err := name.NewRepository("library/x")
	if err != nil {
		return sandbox.Internal.Errorf("check mirrors: %w", err)
	}
	for reg, list := range s.opt.Mirrors {
		for _, m := range list {
			if _, err := s.mirror(m, r); err != nil {
				return fmt.Errorf("mirrors of %s: %w", reg, err)
			}
		}
	}
	return nil
}

// plainMirrors returns the hosts of mirrors that are written with http://.
func plainMirrors(mirrors map[string][]string) []string {
	var out []string
	for _, list := range mirrors {
		for _, m := range list {
			if rest, ok := strings.CutPrefix(m, "http://"); ok {
				host, _, _ := strings.Cut(rest, "/")
				out = append(out, host)
			}
		}
	}
	return out
}
