package image

import (
	"bytes"
	"context"
	"math/rand/v2"
	"strings"
	"testing"

	"vivarium/sandbox"
)

// A pull or load ends before it takes what the host keeps in reserve, however
// much there was when it began, and leaves nothing behind.
func TestReserve(t *testing.T) {
	t.Parallel()
	random := make([]byte, 96<<20)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(random) // always whole
	whole := tarOf(t, ent{name: "f", data: string(random)})
	reg := newRegistry(t)
	ref := reg.push(t, "a/b:1", testImage(t, whole))
	for name, make := range map[string]func(s *Store) error{
		"rootfs": func(s *Store) error {
			_, err := s.Load(context.Background(), "a", bytes.NewReader(whole), LoadOptions{Format: RootFS, Tag: "x:1"})
			return err
		},
		"auto": func(s *Store) error {
			_, err := s.Load(context.Background(), "a", bytes.NewReader(whole), LoadOptions{Tag: "x:1"})
			return err
		},
		"pull": func(s *Store) error {
			_, err := s.Pull(context.Background(), "a", ref, PullOptions{})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const reserve = 1 << 30
			s := open(t, Options{Reserve: reserve})
			looks := int64(0)
			s.free = func() (int64, error) { looks++; return reserve + 200<<20 - looks*40<<20, nil }
			err := make(s)
			wantKind(t, err, sandbox.Exhausted)
			if sandbox.HintOf(err) == "" || !strings.Contains(err.Error(), "reserve") {
				t.Errorf("%v", err)
			}
			if looks > 6 {
				t.Errorf("it went on for %d looks", looks)
			}
			wantClean(t, s)
			s.free = func() (int64, error) { return 2 * reserve, nil }
			if err := make(s); err != nil {
				t.Error(err)
			}
		})
	}
}
