package store

import (
	"context"
	"database/sql"
	"encoding/json"

	"vivarium/sandbox"
)

// PutExec writes an exec as it now is.
func (s *Store) PutExec(x sandbox.Exec) *Pending {
	return s.submitLazily(func(tx *sql.Tx) error {
		raw, err := json.Marshal(x)
		if err != nil {
			return sandbox.Internal.Errorf("encode exec: %w", err)
		}
		_, err = tx.Exec("INSERT OR REPLACE INTO execs (tenant, sandbox, id, record) VALUES (?,?,?,?)", x.Tenant, x.SandboxID, x.ID, string(raw))
		return kinded("write exec", err)
	})
}

// ForgetExec deletes one.
func (s *Store) ForgetExec(tenant, sandboxID, id string) *Pending {
	return s.submitLazily(func(tx *sql.Tx) error {
		_, err := tx.Exec("DELETE FROM execs WHERE tenant = ? AND sandbox = ? AND id = ?", tenant, sandboxID, id)
		return kinded("forget exec", err)
	})
}

// Execs reads all of one sandbox.
func (s *Store) Execs(ctx context.Context, tenant, sandboxID string) ([]sandbox.Exec, error) {
	rows, err := s.read.QueryContext(ctx, "SELECT record FROM execs WHERE tenant = ? AND sandbox = ?", tenant, sandboxID)
	if err != nil {
		return nil, kinded("list execs", err)
	}
	defer rows.Close()
	var all []sandbox.Exec
	for rows.Next() {
		var raw string
		if err := rows.Scan(&raw); err != nil {
			return nil, kinded("list execs", err)
		}
		var x sandbox.Exec
		if err := json.Unmarshal([]byte(raw), &x); err != nil {
			return nil, sandbox.Internal.Errorf("decode exec: %w", err)
		}
		all = append(all, x)
	}
	return all, kinded("list execs", rows.Err())
}
