package server

import (
	"context"
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"vivarium/sandbox"
)

type memStore struct {
	byHash  map[sandbox.TokenHash]sandbox.Token
	lookups int
	touched int
	found   func() // called with what was found in hand; may be nil
}

func (s *memStore) LookupToken(_ context.Context, h sandbox.TokenHash) (sandbox.Token, sandbox.TokenHash, error) {
	s.lookups++
	if t, ok := s.byHash[h]; ok {
		if s.found != nil {
			s.found()
		}
		return t, h, nil
	}
	return sandbox.Token{}, h, sandbox.NotFound.Errorf("none")
}

func (s *memStore) CreateToken(_ context.Context, t sandbox.Token, h sandbox.TokenHash) error {
	s.byHash[h] = t
	return nil
}
func (s *memStore) ListTokens(context.Context) ([]sandbox.Token, error) {
	return slices.Collect(maps.Values(s.byHash)), nil
}

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
	store := &memStore{byHash: map[sandbox.TokenHash]sandbox.Token{}}
	tokens := NewTokens(store)
	now := time.Now()
	tokens.now = func() time.Time { return now }
	tok, secret, err := tokens.Create(t.Context(), sandbox.Token{Tenant: "acme", Name: "ci"})
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

// A call that found its token just before that was revoked neither goes on nor
// keeps it in the cache.
func TestRevokeMeanwhile(t *testing.T) {
	t.Parallel()
	store := &memStore{byHash: map[sandbox.TokenHash]sandbox.Token{}}
	tokens := NewTokens(store)
	tok, secret, err := tokens.Create(t.Context(), sandbox.Token{Tenant: "acme"})
	if err != nil {
		t.Fatal(err)
	}
	store.found = func() {
		store.found = nil
		if err := tokens.Revoke(t.Context(), tok.ID); err != nil {
			t.Error(err)
		}
	}
	if _, _, _, err := tokens.Begin(t.Context(), "Bearer "+secret); !errors.Is(err, sandbox.Denied) {
		t.Errorf("begin: %v", err)
	}
	if _, err := tokens.Authenticate(t.Context(), "Bearer "+secret); !errors.Is(err, sandbox.Denied) {
		t.Errorf("afterwards: %v", err)
	}
}

// What was begun with a token ends with it, and nothing else does.
func TestRevokeEndsCalls(t *testing.T) {
	t.Parallel()
	tokens := NewTokens(&memStore{byHash: map[sandbox.TokenHash]sandbox.Token{}})
	tok, secret, err := tokens.Create(t.Context(), sandbox.Token{Tenant: "acme"})
	if err != nil {
		t.Fatal(err)
	}
	_, other, err := tokens.Create(t.Context(), sandbox.Token{Tenant: "acme"})
	if err != nil {
		t.Fatal(err)
	}
	begin := func(secret string) (context.Context, func()) {
		ctx, got, end, err := tokens.Begin(t.Context(), "Bearer "+secret)
		if err != nil || got.Tenant != "acme" {
			t.Fatalf("%+v, %v", got, err)
		}
		return ctx, end
	}
	first, endFirst := begin(secret)
	second, endSecond := begin(secret)
	third, endThird := begin(other)
	endFirst()
	if err := tokens.Revoke(t.Context(), tok.ID); err != nil {
		t.Fatal(err)
	}
	if err := context.Cause(first); !errors.Is(err, context.Canceled) {
		t.Errorf("one that was over: %v", err)
	}
	if err := context.Cause(second); !errors.Is(err, sandbox.Denied) {
		t.Errorf("one in progress: %v", err)
	}
	if err := third.Err(); err != nil {
		t.Errorf("of another token: %v", err)
	}
	endSecond()
	endThird()
	if len(tokens.calls) != 0 {
		t.Errorf("kept: %v", tokens.calls)
	}
}

// Without any token of an administrator the next start would take up again the
// secret in the file of the first, which may be what was revoked.
func TestRevokeLastAdmin(t *testing.T) {
	t.Parallel()
	tokens := NewTokens(&memStore{byHash: map[sandbox.TokenHash]sandbox.Token{}})
	first, secret, err := tokens.Create(t.Context(), sandbox.Token{Tenant: "default", Admin: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := tokens.Create(t.Context(), sandbox.Token{Tenant: "a"}); err != nil {
		t.Fatal(err)
	}
	if err := tokens.Revoke(t.Context(), first.ID); !errors.Is(err, sandbox.Conflict) || sandbox.HintOf(err) == "" {
		t.Errorf("the last one: %v", err)
	}
	if _, err := tokens.Authenticate(t.Context(), "Bearer "+secret); err != nil {
		t.Error(err)
	}
	if _, _, err := tokens.Create(t.Context(), sandbox.Token{Tenant: "default", Admin: true}); err != nil {
		t.Fatal(err)
	}
	if err := tokens.Revoke(t.Context(), first.ID); err != nil {
		t.Errorf("with another one: %v", err)
	}
}

// E2: a tenant's name is safe in a path, a log line and a metric.
func TestTenantNames(t *testing.T) {
	t.Parallel()
	tokens := NewTokens(&memStore{byHash: map[sandbox.TokenHash]sandbox.Token{}})
	for _, name := range []string{"", "..", "a/b", "A", "a\n", "-a", string(make([]byte, 64)), "a b"} {
		if _, _, err := tokens.Create(t.Context(), sandbox.Token{Tenant: name}); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("%q: %v", name, err)
		}
	}
}
