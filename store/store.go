// Package store keeps the node's truth in SQLite: sandboxes, execs, events,
// idempotency keys, tokens and secrets, which come encrypted. One goroutine
// writes; what arrives while a transaction is being made durable goes into the
// next one together (group commit), so that many creates share one fsync. WAL,
// synchronous=FULL: what Commit reported is there after a power cut.
//
// Every row carries its tenant in its key.
package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	_ "modernc.org/sqlite" // driver "sqlite"

	"vivarium/sandbox"
)

// schema is applied at every start; it may only grow, by further statements.
// user_version counts them.
var schema = []string{
	`CREATE TABLE sandboxes (
		tenant TEXT NOT NULL, id TEXT NOT NULL, name TEXT NOT NULL, alive INTEGER NOT NULL, removed INTEGER NOT NULL,
		ended INTEGER NOT NULL, guest_key BLOB NOT NULL, record TEXT NOT NULL,
		PRIMARY KEY (tenant, id)) WITHOUT ROWID;
	CREATE UNIQUE INDEX sandbox_names ON sandboxes (tenant, name) WHERE alive = 1 AND name <> '';
	CREATE INDEX sandbox_ended ON sandboxes (ended) WHERE alive = 0;
	CREATE INDEX sandbox_alive ON sandboxes (alive) WHERE alive = 1;
	CREATE TABLE execs (
		tenant TEXT NOT NULL, sandbox TEXT NOT NULL, id TEXT NOT NULL, record TEXT NOT NULL,
		PRIMARY KEY (tenant, sandbox, id)) WITHOUT ROWID;
	CREATE TABLE events (
		seq INTEGER PRIMARY KEY, time INTEGER NOT NULL, tenant TEXT NOT NULL, sandbox TEXT NOT NULL,
		kind TEXT NOT NULL, message TEXT NOT NULL, attrs TEXT NOT NULL);
	CREATE INDEX event_sandbox ON events (tenant, sandbox, seq);
	CREATE TABLE idempotency (
		tenant TEXT NOT NULL, key TEXT NOT NULL, sandbox TEXT NOT NULL, spec TEXT NOT NULL, time INTEGER NOT NULL,
		PRIMARY KEY (tenant, key)) WITHOUT ROWID;
	CREATE TABLE tokens (
		id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, admin INTEGER NOT NULL,
		hash BLOB NOT NULL UNIQUE, created INTEGER NOT NULL, last_used INTEGER NOT NULL);
	CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);`,
	`CREATE TABLE flows (
		tenant TEXT NOT NULL, sandbox TEXT NOT NULL, key TEXT NOT NULL, seq INTEGER NOT NULL, record TEXT NOT NULL,
		PRIMARY KEY (tenant, sandbox, key)) WITHOUT ROWID;
	CREATE INDEX flow_seq ON flows (tenant, sandbox, seq);`,
	// record is what anybody may know of a secret; sealed and state are encrypted
	`CREATE TABLE secrets (
		tenant TEXT NOT NULL, name TEXT NOT NULL, version INTEGER NOT NULL, record BLOB NOT NULL, sealed BLOB NOT NULL,
		PRIMARY KEY (tenant, name));
	CREATE TABLE secret_bindings (
		tenant TEXT NOT NULL, sandbox TEXT NOT NULL, state BLOB NOT NULL,
		PRIMARY KEY (tenant, sandbox));`,
	`CREATE TABLE tunnels (
		tenant TEXT NOT NULL, id TEXT NOT NULL, sandbox TEXT NOT NULL, record TEXT NOT NULL,
		PRIMARY KEY (tenant, id)) WITHOUT ROWID;
	CREATE INDEX tunnel_sandbox ON tunnels (tenant, sandbox);`,
}

// Store is the open database.
type Store struct {
	write *sql.DB // one connection; only the writer uses it
	read  *sql.DB

	mu     sync.Mutex
	queue  []job     // guarded by mu
	due    time.Time // when the queue must be written, unless it is empty; guarded by mu
	closed bool      // guarded by mu
	wake   chan struct{}
	done   chan struct{}
}

type job struct {
	fn func(*sql.Tx) error
	p  *Pending
}

// Open opens or makes DIR/state.db.
func Open(ctx context.Context, dir string) (*Store, error) {
	path := filepath.Join(dir, "state.db")
	// before SQLite makes it: the file holds keys of guests
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, sandbox.Internal.Errorf("open store: %w", err)
	}
	f.Close()
	const pragmas = "?_pragma=journal_mode(wal)&_pragma=synchronous(full)&_pragma=busy_timeout(10000)&_pragma=foreign_keys(1)&_txlock=immediate"
	s := &Store{wake: make(chan struct{}, 1), done: make(chan struct{})}
	if s.write, err = sql.Open("sqlite", "file:"+path+pragmas); err != nil {
		return nil, sandbox.Internal.Errorf("open store: %w", err)
	}
	s.write.SetMaxOpenConns(1)
	if s.read, err = sql.Open("sqlite", "file:"+path+pragmas+"&_pragma=query_only(1)"); err != nil {
		return nil, sandbox.Internal.Errorf("open store: %w", err)
	}
	s.read.SetMaxOpenConns(4)
	if err := s.migrate(ctx); err != nil {
		s.write.Close()
		s.read.Close()
		return nil, err
	}
	go s.writer()
	return s, nil
}

func (s *Store) migrate(ctx context.Context) error {
	var version int
	if err := s.write.QueryRowContext(ctx, "PRAGMA user_version").Scan(&version); err != nil {
		return sandbox.Internal.Errorf("read store version: %w", err)
	}
	if version > len(schema) {
		return sandbox.Conflict.Errorf("the data directory was written by a newer version (store version %d, this one knows %d)", version, len(schema)).
			WithHint("start that version, or restore the backup that was made before the upgrade")
	}
	for ; version < len(schema); version++ {
		tx, err := s.write.BeginTx(ctx, nil)
		if err != nil {
			return sandbox.Internal.Errorf("migrate store: %w", err)
		}
		if _, err := tx.ExecContext(ctx, schema[version]); err != nil {
			return sandbox.Internal.Errorf("migrate store: %w", errors.Join(err, tx.Rollback()))
		}
		if _, err := tx.ExecContext(ctx, fmt.Sprintf("PRAGMA user_version = %d", version+1)); err != nil {
			return sandbox.Internal.Errorf("migrate store: %w", errors.Join(err, tx.Rollback()))
		}
		if err := tx.Commit(); err != nil {
			return sandbox.Internal.Errorf("migrate store: %w", err)
		}
	}
	return nil
}

// Close writes what is queued and closes the database.
func (s *Store) Close() error {
	s.mu.Lock()
	already := s.closed
	s.closed = true
	s.mu.Unlock()
	if already {
		return nil
	}
	s.poke()
	<-s.done
	return errors.Join(s.write.Close(), s.read.Close())
}

func (s *Store) poke() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Pending is a write that was queued.
type Pending struct {
	done chan struct{}

	mu    sync.Mutex
	err   error         // set before done is closed
	ended bool          // guarded by mu
	then  []func(error) // guarded by mu
}

// Wait returns when the write is durable, or failed.
func (p *Pending) Wait() error {
	<-p.done
	return p.err
}

// Then calls fn when the write is durable, or failed: on the writer's goroutine,
// so fn must not wait for anything.
func (p *Pending) Then(fn func(error)) {
	p.mu.Lock()
	if !p.ended {
		p.then = append(p.then, fn)
		p.mu.Unlock()
		return
	}
	p.mu.Unlock()
	fn(p.err)
}

func (p *Pending) end(err error) {
	p.mu.Lock()
	p.err, p.ended = err, true
	then := p.then
	p.then = nil
	p.mu.Unlock()
	close(p.done)
	for _, fn := range then {
		fn(err)
	}
}

// lazily is how long a write that nobody waits for may lie, so that it shares
// its transaction: a command that takes a few milliseconds is then one commit
// after it has ended, not two while it runs.
const lazily = 20 * time.Millisecond

// submit queues a write. Writes are made in the order of submission.
func (s *Store) submit(fn func(*sql.Tx) error) *Pending { return s.enqueue(fn, time.Now()) }

// submitLazily queues a write that nobody waits for.
func (s *Store) submitLazily(fn func(*sql.Tx) error) *Pending {
	return s.enqueue(fn, time.Now().Add(lazily))
}

func (s *Store) enqueue(fn func(*sql.Tx) error, due time.Time) *Pending {
	j := job{fn: fn, p: &Pending{done: make(chan struct{})}}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		j.p.end(sandbox.Unavailable.Errorf("the store is closed"))
		return j.p
	}
	if len(s.queue) == 0 || due.Before(s.due) {
		s.due = due
	}
	s.queue = append(s.queue, j)
	s.mu.Unlock()
	s.poke()
	return j.p
}

// Flush returns when everything that was submitted before is durable.
func (s *Store) Flush() error {
	return s.submit(func(*sql.Tx) error { return nil }).Wait()
}

// batch bounds how many writes share a transaction.
const batch = 512

func (s *Store) writer() {
	defer close(s.done)
	for {
		s.mu.Lock()
		wait := time.Until(s.due)
		if len(s.queue) == 0 {
			wait = time.Hour
		}
		if wait > 0 && !s.closed {
			s.mu.Unlock()
			t := time.NewTimer(wait)
			select {
			case <-s.wake:
			case <-t.C:
			}
			t.Stop()
			continue
		}
		if len(s.queue) == 0 { // closed
			s.mu.Unlock()
			return
		}
		jobs := s.queue
		if len(jobs) > batch {
			jobs = jobs[:batch:batch]
		}
		s.queue = s.queue[len(jobs):]
		s.mu.Unlock()
		s.commit(jobs)
	}
}

// commit makes one transaction of the jobs. A job that fails is undone alone,
// so that it does not take its neighbours with it.
func (s *Store) commit(jobs []job) {
	errs := make([]error, len(jobs))
	err := func() error {
		tx, err := s.write.Begin()
		if err != nil {
			return err
		}
		for i, j := range jobs {
			if _, err := tx.Exec("SAVEPOINT job"); err != nil {
				return errors.Join(err, tx.Rollback())
			}
			if errs[i] = j.fn(tx); errs[i] != nil {
				if _, err := tx.Exec("ROLLBACK TO job"); err != nil {
					return errors.Join(err, tx.Rollback())
				}
			}
			if _, err := tx.Exec("RELEASE job"); err != nil {
				return errors.Join(err, tx.Rollback())
			}
		}
		return tx.Commit()
	}()
	for i, j := range jobs {
		if errs[i] == nil && err != nil {
			errs[i] = kinded("write to store", err)
		}
		j.p.end(errs[i])
	}
}
