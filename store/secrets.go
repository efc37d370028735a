package store

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"

	"vivarium/sandbox"
)

const secretColumns = "SELECT tenant, name, version, record, sealed FROM secrets"

func scanSecret(row interface{ Scan(...any) error }) (sandbox.SecretRow, error) {
	var r sandbox.SecretRow
	return r, kinded("read secret", row.Scan(&r.Tenant, &r.Name, &r.Version, &r.Record, &r.Sealed))
}

// Secret implements secret.Store.
func (s *Store) Secret(ctx context.Context, tenant, name string) (sandbox.SecretRow, error) {
	return scanSecret(s.read.QueryRowContext(ctx, secretColumns+" WHERE tenant = ? AND name = ?", tenant, name))
}

// Secrets implements secret.Store.
func (s *Store) Secrets(ctx context.Context, tenant string) ([]sandbox.SecretRow, error) {
	rows, err := s.read.QueryContext(ctx, secretColumns+" WHERE tenant = ? ORDER BY name", tenant)
	if err != nil {
		return nil, kinded("list secrets", err)
	}
	defer rows.Close()
	var all []sandbox.SecretRow
	for rows.Next() {
		r, err := scanSecret(rows)
		if err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	return all, kinded("list secrets", rows.Err())
}

// PutSecret implements secret.Store.
func (s *Store) PutSecret(_ context.Context, r sandbox.SecretRow) error {
	return s.submit(func(tx *sql.Tx) error {
		q := "UPDATE secrets SET version = ?3, record = ?4, sealed = ?5 WHERE tenant = ?1 AND name = ?2 AND version = ?3 - 1"
		if r.Version == 1 {
			q = "INSERT INTO secrets (tenant, name, version, record, sealed) VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT DO NOTHING"
		}
		return oneRow(tx, sandbox.Conflict.Errorf("secret %s was changed at the same time", r.Name), q, r.Tenant, r.Name, r.Version, r.Record, r.Sealed)
	}).Wait()
}

// oneRow runs a statement that changes one row, else the answer is none.
func oneRow(tx *sql.Tx, none error, q string, args ...any) error {
	r, err := tx.Exec(q, args...)
	if err != nil {
		return kinded("write secret", err)
	}
	n, err := r.RowsAffected()
	if err != nil {
		return kinded("write secret", err)
	}
	if n != 1 {
		return none
	}
	return nil
}

// DeleteSecret implements secret.Store.
func (s *Store) DeleteSecret(_ context.Context, tenant, name string) error {
	return s.submit(func(tx *sql.Tx) error {
		return oneRow(tx, sandbox.NotFound.Errorf("secret %s does not exist", name), "DELETE FROM secrets WHERE tenant = ? AND name = ?", tenant, name)
	}).Wait()
}

// SecretBinding implements secret.Store.
func (s *Store) SecretBinding(ctx context.Context, tenant, id string) ([]byte, error) {
	var state []byte
	err := s.read.QueryRowContext(ctx, "SELECT state FROM secret_bindings WHERE tenant = ? AND sandbox = ?", tenant, id).Scan(&state)
	return state, kinded("read secrets of sandbox "+id, err)
}

// PutSecretBinding implements secret.Store.
func (s *Store) PutSecretBinding(_ context.Context, tenant, id string, state []byte) error {
	return s.submit(func(tx *sql.Tx) error {
		_, err := tx.Exec("INSERT OR REPLACE INTO secret_bindings (tenant, sandbox, state) VALUES (?,?,?)", tenant, id, state)
		return kinded("write secrets of sandbox "+id, err)
	}).Wait()
}

// DeleteSecretBinding implements secret.Store.
func (s *Store) DeleteSecretBinding(_ context.Context, tenant, id string) error {
	return s.submit(func(tx *sql.Tx) error {
		_, err := tx.Exec("DELETE FROM secret_bindings WHERE tenant = ? AND sandbox = ?", tenant, id)
		return kinded("delete secrets of sandbox "+id, err)
	}).Wait()
}

const secretCheck = "secret_check"

// SecretCheck implements secret.Store.
func (s *Store) SecretCheck(ctx context.Context) ([]byte, error) {
	v, err := s.Meta(ctx, secretCheck)
	if err != nil || v == "" {
		return nil, err
	}
	b, err := hex.DecodeString(v)
	if err != nil {
		return nil, sandbox.Internal.Errorf("read check of secrets: %w", err)
	}
	return b, nil
}

// SetSecretCheck implements secret.Store.
func (s *Store) SetSecretCheck(_ context.Context, check []byte) error {
	return s.SetMeta(secretCheck, hex.EncodeToString(check)).Wait()
}

// ResetSecrets implements secret.Store.
func (s *Store) ResetSecrets(context.Context) error {
	return s.submit(func(tx *sql.Tx) error {
		var errs []error
		for _, q := range []string{"DELETE FROM secrets", "DELETE FROM secret_bindings", "DELETE FROM meta WHERE key = '" + secretCheck + "'"} {
			_, err := tx.Exec(q)
			errs = append(errs, kinded("delete all secrets", err))
		}
		return errors.Join(errs...)
	}).Wait()
}
