package store

import (
	"context"
	"database/sql"
	"time"

	"vivarium/sandbox"
)

const tokenColumns = "SELECT id, tenant, name, admin, created, last_used, hash FROM tokens"

func scanToken(row interface{ Scan(...any) error }) (sandbox.Token, sandbox.TokenHash, error) {
	var t sandbox.Token
	var created, used int64
	var raw []byte
	var hash sandbox.TokenHash
	if err := row.Scan(&t.ID, &t.Tenant, &t.Name, &t.Admin, &created, &used, &raw); err != nil {
		return t, hash, kinded("read token", err)
	}
	if len(raw) != len(hash) {
		return t, hash, sandbox.Internal.Errorf("token %s: hash of %d bytes", t.ID, len(raw))
	}
	copy(hash[:], raw)
	t.Created, t.LastUsed = timeOf(created), timeOf(used)
	return t, hash, nil
}

// LookupToken implements server.TokenStore.
func (s *Store) LookupToken(ctx context.Context, hash sandbox.TokenHash) (sandbox.Token, sandbox.TokenHash, error) {
	return scanToken(s.read.QueryRowContext(ctx, tokenColumns+" WHERE hash = ?", hash[:]))
}

// CreateToken implements server.TokenStore.
func (s *Store) CreateToken(_ context.Context, t sandbox.Token, hash sandbox.TokenHash) error {
	return s.submit(func(tx *sql.Tx) error {
		_, err := tx.Exec("INSERT INTO tokens (id, tenant, name, admin, hash, created, last_used) VALUES (?,?,?,?,?,?,?)",
			t.ID, t.Tenant, t.Name, t.Admin, hash[:], unix(t.Created), unix(t.LastUsed))
		return kinded("write token", err)
	}).Wait()
}

// ListTokens implements server.TokenStore.
func (s *Store) ListTokens(ctx context.Context) ([]sandbox.Token, error) {
	rows, err := s.read.QueryContext(ctx, tokenColumns+" ORDER BY id")
	if err != nil {
		return nil, kinded("list tokens", err)
	}
	defer rows.Close()
	var all []sandbox.Token
	for rows.Next() {
		t, _, err := scanToken(rows)
		if err != nil {
			return nil, err
		}
		all = append(all, t)
	}
	return all, kinded("list tokens", rows.Err())
}

// RevokeToken implements server.TokenStore.
func (s *Store) RevokeToken(_ context.Context, id string) error {
	return s.submit(func(tx *sql.Tx) error {
		r, err := tx.Exec("DELETE FROM tokens WHERE id = ?", id)
		if err != nil {
			return kinded("revoke token", err)
		}
		if n, err := r.RowsAffected(); err != nil || n == 0 {
			return sandbox.NotFound.Errorf("token %s does not exist", id)
		}
		return nil
	}).Wait()
}

// TouchToken implements server.TokenStore.
func (s *Store) TouchToken(_ context.Context, id string, at time.Time) error {
	s.submit(func(tx *sql.Tx) error {
		_, err := tx.Exec("UPDATE tokens SET last_used = ? WHERE id = ?", unix(at), id)
		return kinded("touch token", err)
	})
	return nil
}
