package gvisor

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"gvisor.dev/gvisor/pkg/log"
)

// emitter hands gVisor's own log lines to ours, all as debug: what matters
// comes back as errors.
type emitter struct{ l *slog.Logger }

// Emit implements log.Emitter.
func (e emitter) Emit(_ int, level log.Level, _ time.Time, format string, v ...any) {
	if e.l.Enabled(context.Background(), slog.LevelDebug) {
		e.l.Debug(fmt.Sprintf(format, v...), "from", "gvisor", "gvisor_level", level.String())
	}
}
