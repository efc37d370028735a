package store

import (
	"context"
	"database/sql"
	"errors"

	"modernc.org/sqlite"
	lib "modernc.org/sqlite/lib"

	"vivarium/sandbox"
)

// kinded gives a failure of SQLite its kind (https://sqlite.org/rescode.html).
func kinded(what string, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, sql.ErrNoRows) {
		return sandbox.NotFound.Errorf("%s: no such row", what)
	}
	switch { // whoever asked has gone away
	case errors.Is(err, context.DeadlineExceeded):
		return sandbox.Timeout.Errorf("%s: %w", what, err)
	case errors.Is(err, context.Canceled):
		return sandbox.Unavailable.Errorf("%s: %w", what, err)
	}
	var e *sqlite.Error
	if errors.As(err, &e) {
		switch e.Code() & 0xff {
		case lib.SQLITE_FULL:
			return sandbox.Exhausted.Errorf("%s: %w", what, err).WithHint("free disk space below the data directory")
		case lib.SQLITE_CONSTRAINT:
			return sandbox.Exists.Errorf("%s: %w", what, err)
		}
	}
	return sandbox.Internal.Errorf("%s: %w", what, err)
}
