package image

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"time"

	_ "modernc.org/sqlite" // the driver
)

// schema is created once; version 1 is PRAGMA user_version.
const schema = `
CREATE TABLE IF NOT EXISTS images (
	tenant TEXT NOT NULL, id TEXT NOT NULL,
	digest TEXT NOT NULL, source TEXT NOT NULL, platform TEXT NOT NULL, config TEXT NOT NULL,
	size INTEGER NOT NULL, disk INTEGER NOT NULL, created INTEGER NOT NULL, used INTEGER NOT NULL,
	xattrs INTEGER NOT NULL,
	PRIMARY KEY (tenant, id)) STRICT;
CREATE TABLE IF NOT EXISTS tags (
	tenant TEXT NOT NULL, name TEXT NOT NULL, id TEXT NOT NULL,
	PRIMARY KEY (tenant, name)) STRICT;
CREATE TABLE IF NOT EXISTS pulls (
	tenant TEXT NOT NULL, id TEXT NOT NULL, repo TEXT NOT NULL, digest TEXT NOT NULL,
	PRIMARY KEY (tenant, id, repo, digest)) STRICT;
PRAGMA user_version = 1;`

// db is the durable part of the metadata. The Store keeps all of it in memory
// and writes through.
type db struct{ sql *sql.DB }

func openDB(ctx context.Context, path string) (*db, error) {
	s, err := sql.Open("sqlite", "file:"+path+"?_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)&_pragma=busy_timeout(5000)")
	if err != nil {
		return nil, err
	}
	s.SetMaxOpenConns(1)
	var version int
	if err := s.QueryRowContext(ctx, "PRAGMA user_version").Scan(&version); err != nil {
		s.Close()
		return nil, err
	}
	if version > 1 {
		s.Close()
		return nil, fmt.Errorf("image database is of version %d, newer than this program", version)
	}
	if _, err := s.ExecContext(ctx, schema); err != nil {
		s.Close()
		return nil, err
	}
	return &db{s}, nil
}

// pull is one proof that a tenant may have an image: the manifest with digest
// came from repo for its credentials.
type pull struct{ Tenant, ID, Repo, Digest string }

// load reads everything.
func (d *db) load(ctx context.Context) (images []*Image, tags []tagRow, pulls []pull, err error) {
	err = d.each(ctx, "SELECT tenant, id, digest, source, platform, config, size, disk, created, used, xattrs FROM images", func(r *sql.Rows) error {
		var i Image
		var cfg string
		var created, used, xattrs int64
		if err := r.Scan(&i.Tenant, &i.ID, &i.Digest, &i.Source, &i.Platform, &cfg, &i.Size, &i.Disk, &created, &used, &xattrs); err != nil {
			return err
		}
		if err := json.Unmarshal([]byte(cfg), &i.Config); err != nil {
			return err
		}
		i.Created, i.LastUsed = fromUnix(created), fromUnix(used)
		if xattrs != 0 {
			i.Xattrs = "yes" // the Store puts the path here
		}
		images = append(images, &i)
		return nil
	})
	if err != nil {
		return
	}
	err = d.each(ctx, "SELECT tenant, name, id FROM tags", func(r *sql.Rows) error {
		var t tagRow
		tags = append(tags, t)
		p := &tags[len(tags)-1]
		return r.Scan(&p.Tenant, &p.Name, &p.ID)
	})
	if err != nil {
		return
	}
	err = d.each(ctx, "SELECT tenant, id, repo, digest FROM pulls", func(r *sql.Rows) error {
		var p pull
		if err := r.Scan(&p.Tenant, &p.ID, &p.Repo, &p.Digest); err != nil {
			return err
		}
		pulls = append(pulls, p)
		return nil
	})
	return
}

type tagRow struct{ Tenant, Name, ID string }

func (d *db) each(ctx context.Context, query string, fn func(*sql.Rows) error) error {
	rows, err := d.sql.QueryContext(ctx, query)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := fn(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// stmt is one statement of a transaction.
type stmt struct {
	query string
	args  []any
}

// apply runs statements in one transaction, durable on return.
func (d *db) apply(ctx context.Context, stmts ...stmt) error {
	tx, err := d.sql.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	for _, s := range stmts {
		if _, err := tx.ExecContext(ctx, s.query, s.args...); err != nil {
			return err
		}
	}
	return tx.Commit()
}

func putImage(i *Image) (stmt, error) {
	cfg, err := json.Marshal(i.Config)
	if err != nil {
		return stmt{}, err
	}
	xattrs := 0
	if i.Xattrs != "" {
		xattrs = 1
	}
	return stmt{"INSERT OR REPLACE INTO images (tenant, id, digest, source, platform, config, size, disk, created, used, xattrs) VALUES (?,?,?,?,?,?,?,?,?,?,?)",
		[]any{i.Tenant, i.ID, i.Digest, i.Source, i.Platform, string(cfg), i.Size, i.Disk, toUnix(i.Created), toUnix(i.LastUsed), xattrs}}, nil
}

func putTag(tenant, name, id string) stmt {
	return stmt{"INSERT OR REPLACE INTO tags (tenant, name, id) VALUES (?,?,?)", []any{tenant, name, id}}
}

func deleteTag(tenant, name string) stmt {
	return stmt{"DELETE FROM tags WHERE tenant=? AND name=?", []any{tenant, name}}
}

func putPull(p pull) stmt {
	return stmt{"INSERT OR IGNORE INTO pulls (tenant, id, repo, digest) VALUES (?,?,?,?)", []any{p.Tenant, p.ID, p.Repo, p.Digest}}
}

func touchImage(tenant, id string, used time.Time) stmt {
	return stmt{"UPDATE images SET used=? WHERE tenant=? AND id=?", []any{toUnix(used), tenant, id}}
}

// deleteImage removes an image of a tenant with all that belongs to it.
func deleteImage(tenant, id string) []stmt {
	a := []any{tenant, id}
	return []stmt{
		{"DELETE FROM tags WHERE tenant=? AND id=?", a},
		{"DELETE FROM pulls WHERE tenant=? AND id=?", a},
		{"DELETE FROM images WHERE tenant=? AND id=?", a},
	}
}

// toUnix gives nanoseconds since 1970, 0 for the zero time and for times that
// do not fit.
func toUnix(t time.Time) int64 {
	if t.IsZero() || t.Year() < 1970 || t.Year() > 2200 {
		return 0
	}
	return t.UnixNano()
}

func fromUnix(n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	return time.Unix(0, n).UTC()
}
