package daemon

import (
	"context"
	"log/slog"

	"vivarium/config"
	"vivarium/sandbox"
)

// build makes the parts that a node consists of, from the store up.
func build(ctx context.Context, cfg *config.Config, log *slog.Logger) (*parts, error) {
	return nil, sandbox.Unsupported.Errorf("this build has no engine")
}
