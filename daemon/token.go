package daemon

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"vivarium/sandbox"
	"vivarium/server"
)

// DefaultTenant is the tenant of the first token.
const DefaultTenant = "default"

// firstToken makes a token with admin rights where there is none, and leaves
// its secret in a file that root alone may read.
//
// The file is written before the store: a crash in between leaves a file whose
// secret the next start takes up, never a store that nobody can enter. The same
// lets an operator who lost every admin token put a new secret there.
func firstToken(ctx context.Context, file string, tokens *server.Tokens) error {
	list, err := tokens.List(ctx)
	if err != nil {
		return err
	}
	for _, t := range list {
		if t.Admin {
			return nil
		}
	}
	b, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return sandbox.Internal.Errorf("read first token: %w", err)
	}
	secret := strings.TrimSpace(string(b))
	if !server.ValidSecret(secret) {
		secret, _ = server.NewSecret()
		if err := writeSecret(file, secret); err != nil {
			return sandbox.Internal.Errorf("write first token: %w", err)
		}
	}
	return tokens.Adopt(ctx, sandbox.Token{Tenant: DefaultTenant, Name: "first", Admin: true}, secret)
}

// writeSecret writes a file durably and as a whole.
func writeSecret(file, secret string) error {
	f, err := os.CreateTemp(filepath.Dir(file), ".token-*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // fails once it is renamed
	defer f.Close()
	if _, err := f.WriteString(secret + "\n"); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(f.Name(), file); err != nil {
		return err
	}
	d, err := os.Open(filepath.Dir(file))
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}
