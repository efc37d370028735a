package daemon

import (
	"io"
	"log/slog"

	"vivarium/config"
)

// newLogger makes the log. Both formats quote what they write, so that names
// and messages from outside cannot make lines of their own (E2).
func newLogger(c config.Log, w io.Writer) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(c.Level)) // was checked with the config
	o := &slog.HandlerOptions{Level: level}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}
