package server

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"strings"
	"sync"
	"time"

	"vivarium/sandbox"
)

// TokenPrefix begins every secret, so that scanners for leaked secrets can
// find ours.
const TokenPrefix = "viv_"

// TokenStore keeps tokens. It must be safe for concurrent use.
type TokenStore interface {
	// LookupToken finds a token by the hash of its secret and returns the hash
	// that is stored with it; NotFound if there is none.
	LookupToken(ctx context.Context, hash sandbox.TokenHash) (sandbox.Token, sandbox.TokenHash, error)
	// CreateToken keeps a new token; Exists if its id is taken.
	CreateToken(ctx context.Context, t sandbox.Token, hash sandbox.TokenHash) error
	// ListTokens returns all tokens of all tenants.
	ListTokens(ctx context.Context) ([]sandbox.Token, error)
	// RevokeToken makes a token invalid; NotFound if there is none.
	RevokeToken(ctx context.Context, id string) error
	// TouchToken notes when a token was last used. It may be lossy.
	TouchToken(ctx context.Context, id string, at time.Time) error
}

// NewSecret makes the secret of a token and its hash.
func NewSecret() (string, sandbox.TokenHash) {
	var b [32]byte
	rand.Read(b[:]) // never fails: see its documentation
	s := TokenPrefix + base64.RawURLEncoding.EncodeToString(b[:])
	return s, HashSecret(s)
}

// HashSecret returns what a secret is looked up by.
func HashSecret(secret string) sandbox.TokenHash { return sha256.Sum256([]byte(secret)) }

// Bounds of the cache of tokens.
const (
	cachedTokens = 4096
	cacheFor     = 10 * time.Second
	touchEvery   = time.Minute
	maxSecret    = 256 // bytes
)

// Tokens checks secrets against a store, with a small cache in front, so that
// a call does not cost a query. Create and revoke through it.
type Tokens struct {
	store TokenStore
	now   func() time.Time

	revoking sync.Mutex // taken before mu

	mu      sync.Mutex
	cache   map[sandbox.TokenHash]cached
	revoked int                           // how many were; guarded by mu
	calls   map[string]map[*call]struct{} // in progress, by the token's id; guarded by mu
}

// call is one in progress, which ends when its token is revoked.
type call struct{ cancel context.CancelCauseFunc }

type cached struct {
	token  sandbox.Token
	until  time.Time
	noted  time.Time // when TouchToken was last called
	stored sandbox.TokenHash
}

// NewTokens returns a Tokens over a store.
func NewTokens(store TokenStore) *Tokens {
	return &Tokens{store: store, now: time.Now, cache: map[sandbox.TokenHash]cached{}, calls: map[string]map[*call]struct{}{}}
}

// Authenticate finds the token of an Authorization header: Denied if there is
// none that is valid.
func (t *Tokens) Authenticate(ctx context.Context, header string) (sandbox.Token, error) {
	tok, _, err := t.authenticate(ctx, header)
	return tok, err
}

// Begin is Authenticate for a call that may last: the context that it returns
// ends with Denied as its cause when the token is revoked. The caller calls end
// when the call is over.
func (t *Tokens) Begin(ctx context.Context, header string) (_ context.Context, _ sandbox.Token, end func(), err error) {
	for {
		tok, seen, err := t.authenticate(ctx, header)
		if err != nil {
			return nil, sandbox.Token{}, nil, err
		}
		t.mu.Lock()
		if t.revoked != seen { // it may have been this one
			t.mu.Unlock()
			continue
		}
		ctx, cancel := context.WithCancelCause(ctx)
		c := &call{cancel}
		if t.calls[tok.ID] == nil {
			t.calls[tok.ID] = map[*call]struct{}{}
		}
		t.calls[tok.ID][c] = struct{}{}
		t.mu.Unlock()
		return ctx, tok, func() {
			t.mu.Lock()
			delete(t.calls[tok.ID], c)
			if len(t.calls[tok.ID]) == 0 {
				delete(t.calls, tok.ID)
			}
			t.mu.Unlock()
			cancel(nil)
		}, nil
	}
}

// authenticate also returns how many tokens had been revoked when it began.
func (t *Tokens) authenticate(ctx context.Context, header string) (sandbox.Token, int, error) {
	scheme, secret, ok := strings.Cut(header, " ")
	secret = strings.TrimSpace(secret)
	if !ok || !strings.EqualFold(scheme, "Bearer") || len(secret) > maxSecret || !strings.HasPrefix(secret, TokenPrefix) {
		return sandbox.Token{}, 0, sandbox.Denied.Errorf("no valid token")
	}
	hash := HashSecret(secret)
	now := t.now()
	t.mu.Lock()
	c, ok := t.cache[hash]
	seen := t.revoked
	t.mu.Unlock()
	if !ok || now.After(c.until) {
		tok, stored, err := t.store.LookupToken(ctx, hash)
		if sandbox.KindOf(err) == sandbox.NotFound {
			return sandbox.Token{}, 0, sandbox.Denied.Errorf("no valid token")
		}
		if err != nil {
			return sandbox.Token{}, 0, err
		}
		c = cached{token: tok, until: now.Add(cacheFor), stored: stored, noted: c.noted}
	}
	// What is compared is a hash of a secret that only its owner knows, so that
	// how long a lookup takes tells nothing of use; this makes it independent of
	// how the store compares.
	if subtle.ConstantTimeCompare(hash[:], c.stored[:]) != 1 {
		return sandbox.Token{}, 0, sandbox.Denied.Errorf("no valid token")
	}
	if now.Sub(c.noted) > touchEvery {
		c.noted = now
		_ = t.store.TouchToken(ctx, c.token.ID, now) // lossy by its contract
	}
	t.mu.Lock()
	if len(t.cache) >= cachedTokens {
		clear(t.cache)
	}
	if t.revoked == seen { // else it may have been this one
		t.cache[hash] = c
	}
	t.mu.Unlock()
	return c.token, seen, nil
}

// ValidSecret says whether s has the form of a secret.
func ValidSecret(s string) bool {
	b, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(s, TokenPrefix))
	return err == nil && len(b) == 32 && strings.HasPrefix(s, TokenPrefix)
}

// Create makes a token and returns its secret, which is shown this once.
func (t *Tokens) Create(ctx context.Context, tok sandbox.Token) (sandbox.Token, string, error) {
	secret, hash := NewSecret()
	tok, err := t.create(ctx, tok, hash)
	if err != nil {
		return sandbox.Token{}, "", err
	}
	return tok, secret, nil
}

// Adopt makes a token of a secret that exists already.
func (t *Tokens) Adopt(ctx context.Context, tok sandbox.Token, secret string) error {
	if !ValidSecret(secret) {
		return sandbox.Invalid.Errorf("the secret has not the form of one")
	}
	_, err := t.create(ctx, tok, HashSecret(secret))
	return err
}

func (t *Tokens) create(ctx context.Context, tok sandbox.Token, hash sandbox.TokenHash) (sandbox.Token, error) {
	if err := checkTenant(tok.Tenant); err != nil {
		return sandbox.Token{}, err
	}
	if len(tok.Name) > 128 {
		return sandbox.Token{}, sandbox.Invalid.Errorf("the name of a token is at most 128 bytes long")
	}
	tok.ID = newID("tk-")
	tok.Created = t.now()
	return tok, t.store.CreateToken(ctx, tok, hash)
}

// List returns every token; never a secret.
func (t *Tokens) List(ctx context.Context) ([]sandbox.Token, error) { return t.store.ListTokens(ctx) }

// Revoke makes a token invalid at once, and ends the calls that were begun with
// it. Conflict for the last one with admin rights: without any, the next start
// would take up again what is in the file of the first.
func (t *Tokens) Revoke(ctx context.Context, id string) error {
	t.revoking.Lock()
	defer t.revoking.Unlock()
	all, err := t.store.ListTokens(ctx)
	if err != nil {
		return err
	}
	var last, others bool
	for _, tok := range all {
		last = last || tok.Admin && tok.ID == id
		others = others || tok.Admin && tok.ID != id
	}
	if last && !others {
		return sandbox.Conflict.Errorf("token %s is the last one with admin rights", id).
			WithHint("make another one first: `viv token create --admin`")
	}
	err = t.store.RevokeToken(ctx, id)
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.cache)
	t.revoked++
	if err != nil {
		return err
	}
	for c := range t.calls[id] {
		c.cancel(sandbox.Denied.Errorf("the token of this call was revoked"))
	}
	return nil
}
