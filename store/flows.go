package store

import (
	"context"
	"database/sql"
	"encoding/json"

	"vivarium/sandbox"
)

// PutFlows writes destinations of one sandbox as they now are. One that is there
// already, under the same key, is replaced.
func (s *Store) PutFlows(tenant, sandboxID string, rs map[string]sandbox.FlowRecord) *Pending {
	return s.submitLazily(func(tx *sql.Tx) error {
		for key, r := range rs {
			raw, err := json.Marshal(r)
			if err != nil {
				return sandbox.Internal.Errorf("encode flow: %w", err)
			}
			if _, err := tx.Exec("INSERT OR REPLACE INTO flows (tenant, sandbox, key, seq, record) VALUES (?,?,?,?,?)", tenant, sandboxID, key, r.Seq, string(raw)); err != nil {
				return kinded("write flow", err)
			}
		}
		return nil
	})
}

// Flows reads at most limit destinations of one sandbox that changed after a
// sequence number, in the order of their change, with their keys.
func (s *Store) Flows(ctx context.Context, tenant, sandboxID string, after int64, limit int) (keys []string, rs []sandbox.FlowRecord, err error) {
	rows, err := s.read.QueryContext(ctx, "SELECT key, record FROM flows WHERE tenant = ? AND sandbox = ? AND seq > ? ORDER BY seq LIMIT ?", tenant, sandboxID, after, limit)
	if err != nil {
		return nil, nil, kinded("list flows", err)
	}
	defer rows.Close()
	for rows.Next() {
		var key, raw string
		if err := rows.Scan(&key, &raw); err != nil {
			return nil, nil, kinded("list flows", err)
		}
		var r sandbox.FlowRecord
		if err := json.Unmarshal([]byte(raw), &r); err != nil {
			return nil, nil, sandbox.Internal.Errorf("decode flow: %w", err)
		}
		keys, rs = append(keys, key), append(rs, r)
	}
	return keys, rs, kinded("list flows", rows.Err())
}
