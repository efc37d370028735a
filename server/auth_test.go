package server

import (
	"context"
	"errors"
	"testing"
	"time"

	"vivarium/sandbox"
)

type memStore struct {
	byHash  map[TokenHash]Token
	lookups int
	touched int
}

func (s *memStore) LookupToken(_ context.Context, h TokenHash) (Token, TokenHash, error) {
	s.lookups++
	if t, ok := s.byHash[h]; ok {
		return t, h, nil
	}
	return Token{}, h, sandbox.NotFound.Errorf("none")
}

func (s *memStore) CreateToken(_ context.Context, t Token, h TokenHash) error {
	s.byHash[h] = t
	return nil
}
func (s *memStore) ListTokens(context.Context) ([]Token, error) { return nil, nil }
func (s *memStore) RevokeToken(_ context.Context, id string) error {
	for h, t := range s.byHash {
		if t.ID == id {
			delete(s.byHash, h)
		}
	}
	return nil
}

func (s *memStore) TouchToken(context.Context, string, time.Time) error {
	s.touched++
	return nil
}

func TestTokens(t *testing.T) {
	t.Parallel()
	store := &memStore{byHash: map[TokenHash]Token{}}
	tokens := NewTokens(store)
	now := time.Now()
	tokens.now = func() time.Time { return now }
	tok, secret, err := tokens.Create(t.Context(), Token{Tenant: "acme", Name: "ci"})
	if err != nil {
		t.Fatal(err)
	}
	if !ValidSecret(secret) {
		t.Errorf("the secret %q has not the form of one", secret)
	}
	for range 3 {
		got, err := tokens.Authenticate(t.Context(), "Bearer "+secret)
		if err != nil || got.Tenant != "acme" || got.ID != tok.ID {
			t.Fatalf("got %+v, %v", got, err)
		}
	}
	if store.lookups != 1 || store.touched != 1 {
		t.Errorf("%d lookups and %d notes of use for 3 calls", store.lookups, store.touched)
	}
	if now = now.Add(cacheFor + 1); true {
		if _, err := tokens.Authenticate(t.Context(), "bearer "+secret); err != nil || store.lookups != 2 {
			t.Errorf("after the cache: %v, %d lookups", err, store.lookups)
		}
	}
	for _, h := range []string{"", secret, "Basic " + secret, "Bearer ", "Bearer x", "Bearer viv_", "Bearer " + secret + "x", "Bearer " + secret[:len(secret)-1]} {
		if _, err := tokens.Authenticate(t.Context(), h); !errors.Is(err, sandbox.Denied) {
			t.Errorf("%q: %v", h, err)
		}
	}
	if err := tokens.Revoke(t.Context(), tok.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := tokens.Authenticate(t.Context(), "Bearer "+secret); !errors.Is(err, sandbox.Denied) {
		t.Errorf("a revoked token: %v", err)
	}
}

// E2: a tenant's name is safe in a path, a log line and a metric.
func TestTenantNames(t *testing.T) {
	t.Parallel()
	tokens := NewTokens(&memStore{byHash: map[TokenHash]Token{}})
	for _, name := range []string{"", "..", "a/b", "A", "a\n", "-a", string(make([]byte, 64)), "a b"} {
		if _, _, err := tokens.Create(t.Context(), Token{Tenant: name}); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("%q: %v", name, err)
		}
	}
}
