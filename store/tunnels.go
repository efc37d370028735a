package store

import (
	"context"
	"database/sql"
	"encoding/json"

	"vivarium/sandbox"
)

// Tunnels implements tunnel.Store.
func (s *Store) Tunnels(ctx context.Context) ([]sandbox.Tunnel, error) {
	rows, err := s.read.QueryContext(ctx, "SELECT tenant, id, sandbox, record FROM tunnels ORDER BY tenant, id")
	if err != nil {
		return nil, kinded("list tunnels", err)
	}
	defer rows.Close()
	var all []sandbox.Tunnel
	for rows.Next() {
		var tenant, id, sb, record string
		if err := rows.Scan(&tenant, &id, &sb, &record); err != nil {
			return nil, kinded("read tunnel", err)
		}
		var t sandbox.Tunnel
		if err := json.Unmarshal([]byte(record), &t); err != nil {
			return nil, sandbox.Internal.Errorf("read tunnel %s: %w", id, err)
		}
		t.Tenant, t.ID, t.SandboxID = tenant, id, sb
		all = append(all, t)
	}
	return all, kinded("list tunnels", rows.Err())
}

// PutTunnel implements tunnel.Store.
func (s *Store) PutTunnel(_ context.Context, t sandbox.Tunnel) error {
	record, err := json.Marshal(t)
	if err != nil {
		return sandbox.Internal.Errorf("encode tunnel: %w", err)
	}
	return s.submit(func(tx *sql.Tx) error {
		_, err := tx.Exec("INSERT INTO tunnels (tenant, id, sandbox, record) VALUES (?,?,?,?)", t.Tenant, t.ID, t.SandboxID, string(record))
		return kinded("write tunnel", err)
	}).Wait()
}

// DeleteTunnel implements tunnel.Store.
func (s *Store) DeleteTunnel(_ context.Context, tenant, id string) error {
	return s.submit(func(tx *sql.Tx) error {
		_, err := tx.Exec("DELETE FROM tunnels WHERE tenant = ? AND id = ?", tenant, id)
		return kinded("delete tunnel", err)
	}).Wait()
}

// DeleteTunnels implements tunnel.Store.
func (s *Store) DeleteTunnels(_ context.Context, tenant, sandboxID string) error {
	return s.submit(func(tx *sql.Tx) error {
		_, err := tx.Exec("DELETE FROM tunnels WHERE tenant = ? AND sandbox = ?", tenant, sandboxID)
		return kinded("delete tunnels", err)
	}).Wait()
}
