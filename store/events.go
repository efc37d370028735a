package store

import (
	"context"
	"database/sql"
	"encoding/json"
	"time"

	"vivarium/sandbox"
)

// AddEvent writes an event under the number it has.
func (s *Store) AddEvent(e sandbox.Event) *Pending {
	return s.submitLazily(func(tx *sql.Tx) error {
		attrs, err := json.Marshal(e.Attrs)
		if err != nil {
			return sandbox.Internal.Errorf("encode event: %w", err)
		}
		_, err = tx.Exec("INSERT INTO events (seq, time, tenant, sandbox, kind, message, attrs) VALUES (?,?,?,?,?,?,?)",
			e.Seq, unix(e.Time), e.Tenant, e.SandboxID, e.Kind, e.Message, string(attrs))
		return kinded("write event", err)
	})
}

// LastEvent is the highest number in use.
func (s *Store) LastEvent(ctx context.Context) (int64, error) {
	var seq sql.NullInt64
	err := s.read.QueryRowContext(ctx, "SELECT max(seq) FROM events").Scan(&seq)
	return seq.Int64, kinded("read events", err)
}

const (
	eventColumns = "SELECT seq, time, tenant, sandbox, kind, message, attrs FROM events "
	eventsOfAll  = eventColumns + "WHERE tenant = ? AND seq > ? ORDER BY seq LIMIT ?"
	eventsOfOne  = eventColumns + "WHERE tenant = ? AND sandbox = ? AND seq > ? ORDER BY seq LIMIT ?"
)

// Events reads a tenant's events after seq, of one sandbox or (sandboxID "")
// all, in order, at most limit.
func (s *Store) Events(ctx context.Context, tenant, sandboxID string, after int64, limit int) ([]sandbox.Event, error) {
	// two queries, so that each is answered from an index
	query, args := eventsOfAll, []any{tenant, after, limit}
	if sandboxID != "" {
		query, args = eventsOfOne, []any{tenant, sandboxID, after, limit}
	}
	rows, err := s.read.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, kinded("read events", err)
	}
	defer rows.Close()
	var all []sandbox.Event
	for rows.Next() {
		var e sandbox.Event
		var us int64
		var attrs string
		if err := rows.Scan(&e.Seq, &us, &e.Tenant, &e.SandboxID, &e.Kind, &e.Message, &attrs); err != nil {
			return nil, kinded("read events", err)
		}
		e.Time = timeOf(us)
		if err := json.Unmarshal([]byte(attrs), &e.Attrs); err != nil {
			return nil, sandbox.Internal.Errorf("decode event: %w", err)
		}
		all = append(all, e)
	}
	return all, kinded("read events", rows.Err())
}

// TrimEvents deletes those from before t, but never the newest: its number must
// not be given out again.
func (s *Store) TrimEvents(t time.Time) *Pending {
	return s.submit(func(tx *sql.Tx) error {
		_, err := tx.Exec("DELETE FROM events WHERE time < ? AND seq < (SELECT max(seq) FROM events)", unix(t))
		return kinded("trim events", err)
	})
}
