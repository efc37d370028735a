package daemon

import (
	"context"
	"errors"

	"vivarium/config"
	"vivarium/secret"
	"vivarium/store"
)

// ResetSecrets deletes all secrets, of all tenants, and their key. No daemon may
// use the data directory.
func ResetSecrets(ctx context.Context, cfg *config.Config) error {
	st, err := store.Open(ctx, cfg.DataDir)
	if err != nil {
		return err
	}
	return errors.Join(secret.Reset(ctx, cfg.DataDir, st), st.Close())
}
