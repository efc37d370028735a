package tunnel

import (
	"crypto/rand"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"vivarium/sandbox"
)

const keySize = 32

// tokenKey reads the key of tokens, or makes it.
func tokenKey(dir string) ([]byte, error) {
	file := filepath.Join(dir, "token.key")
	b, err := os.ReadFile(file)
	if err == nil && len(b) == keySize {
		return b, nil
	}
	if err == nil {
		return nil, sandbox.Invalid.Errorf("%s has %d bytes, want %d", file, len(b), keySize).WithHint("remove it: connect tokens that were given out will no longer be taken")
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, sandbox.Internal.Errorf("read key of tokens: %w", err)
	}
	b = make([]byte, keySize)
	rand.Read(b) // never fails: see its documentation
	if err := writeFile(file, b, 0o600); err != nil {
		return nil, sandbox.Internal.Errorf("write key of tokens: %w", err)
	}
	return b, nil
}

// writeFile writes a file durably and as a whole, with its mode from the start.
func writeFile(file string, b []byte, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(file), ".tmp-*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // fails once it is renamed
	defer f.Close()
	if _, err := f.Write(b); err != nil {
		return err
	}
	if err := errors.Join(f.Chmod(mode), f.Sync()); err != nil {
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
