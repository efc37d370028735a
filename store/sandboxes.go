package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"time"

	"vivarium/sandbox"
)

// unix is 0 for the zero time, else microseconds since 1970.
func unix(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

func timeOf(us int64) time.Time {
	if us == 0 {
		return time.Time{}
	}
	return time.UnixMicro(us)
}

// Create writes a new sandbox and, if key is not empty, that the key stands for
// it. Exists if the id, the name among the living, or the key is taken.
func (s *Store) Create(sb sandbox.Sandbox, key, spec string) *Pending {
	return s.submit(func(tx *sql.Tx) error {
		if err := put(tx, sb, ""); err != nil {
			return err
		}
		if key == "" {
			return nil
		}
		_, err := tx.Exec("INSERT INTO idempotency (tenant, key, sandbox, spec, time) VALUES (?,?,?,?,?)", sb.Tenant, key, sb.ID, spec, unix(sb.Created))
		return kinded("write idempotency key", err)
	})
}

// Put writes a sandbox as it now is.
func (s *Store) Put(sb sandbox.Sandbox) *Pending {
	return s.submit(func(tx *sql.Tx) error { return put(tx, sb, overwrite) })
}

// overwrite is for a row of the same key only: OR REPLACE would also delete the
// row of another sandbox that has the name.
const overwrite = ` ON CONFLICT (tenant, id) DO UPDATE SET name = excluded.name, alive = excluded.alive, removed = excluded.removed,
	ended = excluded.ended, guest_key = excluded.guest_key, record = excluded.record`

func put(tx *sql.Tx, sb sandbox.Sandbox, conflict string) error {
	raw, err := json.Marshal(sb)
	if err != nil {
		return sandbox.Internal.Errorf("encode sandbox: %w", err)
	}
	var ended int64
	if sb.Death != nil {
		ended = unix(sb.Death.Ended)
	}
	key := sb.GuestKey
	if key == nil {
		key = []byte{}
	}
	_, err = tx.Exec("INSERT INTO sandboxes (tenant, id, name, alive, removed, ended, guest_key, record) VALUES (?,?,?,?,?,?,?,?)"+conflict,
		sb.Tenant, sb.ID, sb.Spec.Name, sb.Stage.Alive(), sb.Removed, ended, key, string(raw))
	return kinded("write sandbox "+sb.ID, err)
}

func scan(row interface{ Scan(...any) error }) (sandbox.Sandbox, error) {
	var sb sandbox.Sandbox
	var raw string
	var key []byte
	if err := row.Scan(&key, &raw); err != nil {
		return sb, kinded("read sandbox", err)
	}
	if err := json.Unmarshal([]byte(raw), &sb); err != nil {
		return sb, sandbox.Internal.Errorf("decode sandbox: %w", err)
	}
	sb.GuestKey = key
	return sb, nil
}

// Sandbox reads one, living or not.
func (s *Store) Sandbox(ctx context.Context, tenant, id string) (sandbox.Sandbox, error) {
	return scan(s.read.QueryRowContext(ctx, "SELECT guest_key, record FROM sandboxes WHERE tenant = ? AND id = ?", tenant, id))
}

// Alive reads all living ones of all tenants.
func (s *Store) Alive(ctx context.Context) ([]sandbox.Sandbox, error) {
	return s.list(ctx, "SELECT guest_key, record FROM sandboxes WHERE alive = 1")
}

// Ended reads a tenant's ended ones with an id after that one, oldest id first, at
// most limit; of one name or ("") any, and those that were removed if removed is
// set.
func (s *Store) Ended(ctx context.Context, tenant, name, after string, removed bool, limit int) ([]sandbox.Sandbox, error) {
	return s.list(ctx, `SELECT guest_key, record FROM sandboxes
		WHERE tenant = ? AND id > ? AND alive = 0 AND removed <= ? AND (? = '' OR name = ?) ORDER BY id LIMIT ?`, tenant, after, removed, name, name, limit)
}

// EndedBefore reads those of all tenants that ended before t, at most limit.
func (s *Store) EndedBefore(ctx context.Context, t time.Time, limit int) ([]sandbox.Sandbox, error) {
	return s.list(ctx, "SELECT guest_key, record FROM sandboxes WHERE alive = 0 AND ended < ? LIMIT ?", unix(t), limit)
}

func (s *Store) list(ctx context.Context, query string, args ...any) ([]sandbox.Sandbox, error) {
	rows, err := s.read.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, kinded("list sandboxes", err)
	}
	defer rows.Close()
	var all []sandbox.Sandbox
	for rows.Next() {
		sb, err := scan(rows)
		if err != nil {
			return nil, err
		}
		all = append(all, sb)
	}
	return all, kinded("list sandboxes", rows.Err())
}

// Forget deletes a sandbox with its execs, idempotency keys and secrets' state.
func (s *Store) Forget(tenant, id string) *Pending {
	return s.submit(func(tx *sql.Tx) error {
		for _, q := range []string{
			"DELETE FROM execs WHERE tenant = ? AND sandbox = ?",
			"DELETE FROM idempotency WHERE tenant = ? AND sandbox = ?",
			"DELETE FROM secret_bindings WHERE tenant = ? AND sandbox = ?",
			"DELETE FROM flows WHERE tenant = ? AND sandbox = ?",
			"DELETE FROM sandboxes WHERE tenant = ? AND id = ?",
		} {
			if _, err := tx.Exec(q, tenant, id); err != nil {
				return kinded("forget sandbox "+id, err)
			}
		}
		return nil
	})
}

// Idempotent finds the sandbox that a key stands for, and the spec it was made
// with. NotFound if there is none.
func (s *Store) Idempotent(ctx context.Context, tenant, key string) (id, spec string, err error) {
	err = s.read.QueryRowContext(ctx, "SELECT sandbox, spec FROM idempotency WHERE tenant = ? AND key = ?", tenant, key).Scan(&id, &spec)
	return id, spec, kinded("read idempotency key", err)
}

// IDs are those of all tenants' sandboxes that were not removed: those whose
// output is kept.
func (s *Store) IDs(ctx context.Context) (map[string]bool, error) {
	rows, err := s.read.QueryContext(ctx, "SELECT id FROM sandboxes WHERE removed = 0")
	if err != nil {
		return nil, kinded("list sandbox ids", err)
	}
	defer rows.Close()
	ids := map[string]bool{}
	for rows.Next() {
		var id string
		if err := rows.Scan(&id); err != nil {
			return nil, kinded("list sandbox ids", err)
		}
		ids[id] = true
	}
	return ids, kinded("list sandbox ids", rows.Err())
}
