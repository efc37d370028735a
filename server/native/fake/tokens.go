package fake

import (
	"context"
	"sync"
	"time"

	"vivarium/sandbox"
	"vivarium/server"
)

// Tokens is a server.TokenStore in memory.
type Tokens struct {
	mu      sync.Mutex
	byHash  map[sandbox.TokenHash]sandbox.Token
	Lookups int
}

var _ server.TokenStore = (*Tokens)(nil)

// LookupToken implements server.TokenStore.
func (s *Tokens) LookupToken(_ context.Context, h sandbox.TokenHash) (sandbox.Token, sandbox.TokenHash, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Lookups++
	t, ok := s.byHash[h]
	if !ok {
		return sandbox.Token{}, h, sandbox.NotFound.Errorf("no such token")
	}
	return t, h, nil
}

// CreateToken implements server.TokenStore.
func (s *Tokens) CreateToken(_ context.Context, t sandbox.Token, h sandbox.TokenHash) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byHash == nil {
		s.byHash = map[sandbox.TokenHash]sandbox.Token{}
	}
	s.byHash[h] = t
	return nil
}

// ListTokens implements server.TokenStore.
func (s *Tokens) ListTokens(context.Context) ([]sandbox.Token, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []sandbox.Token
	for _, t := range s.byHash {
		out = append(out, t)
	}
	return out, nil
}

// RevokeToken implements server.TokenStore.
func (s *Tokens) RevokeToken(_ context.Context, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for h, t := range s.byHash {
		if t.ID == id {
			delete(s.byHash, h)
			return nil
		}
	}
	return sandbox.NotFound.Errorf("no token %q", id)
}

// TouchToken implements server.TokenStore.
func (s *Tokens) TouchToken(context.Context, string, time.Time) error { return nil }
