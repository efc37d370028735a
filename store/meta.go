package store

import (
	"context"
	"database/sql"
	"errors"

	"vivarium/sandbox"
)

// Meta reads a value of the node's own, "" if it was never set.
func (s *Store) Meta(ctx context.Context, key string) (string, error) {
	var v string
	err := kinded("read "+key, s.read.QueryRowContext(ctx, "SELECT value FROM meta WHERE key = ?", key).Scan(&v))
	if errors.Is(err, sandbox.NotFound) {
		return "", nil
	}
	return v, err
}

// SetMeta writes one.
func (s *Store) SetMeta(key, value string) *Pending {
	return s.submit(func(tx *sql.Tx) error {
		_, err := tx.Exec("INSERT OR REPLACE INTO meta (key, value) VALUES (?,?)", key, value)
		return kinded("write "+key, err)
	})
}
