package secret

import (
	"context"
	"crypto/x509"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"vivarium/sandbox"
)

// Row is a secret as the store keeps it.
type Row = sandbox.SecretRow

// Store keeps rows. Its writes are durable when they return. NotFound: no such row.
type Store interface {
	Secret(ctx context.Context, tenant, name string) (Row, error)
	// Secrets are a tenant's, by name.
	Secrets(ctx context.Context, tenant string) ([]Row, error)
	// PutSecret writes row if the one that is there has version row.Version-1 (0:
	// none is there), else it is a Conflict.
	PutSecret(ctx context.Context, row Row) error
	DeleteSecret(ctx context.Context, tenant, name string) error

	SecretBinding(ctx context.Context, tenant, sandbox string) ([]byte, error)
	PutSecretBinding(ctx context.Context, tenant, sandbox string, state []byte) error
	// DeleteSecretBinding is nil if there is none.
	DeleteSecretBinding(ctx context.Context, tenant, sandbox string) error

	// SecretCheck is what SetSecretCheck wrote, nil if it never did.
	SecretCheck(ctx context.Context) ([]byte, error)
	SetSecretCheck(ctx context.Context, check []byte) error
	// ResetSecrets deletes all secrets, bindings and the check, of all tenants.
	ResetSecrets(ctx context.Context) error
}

// Vault keeps secrets and what sandboxes have of them. It may be used by several
// goroutines at once.
type Vault struct {
	// Roots verify the real servers; nil: those of the host. Set before Bind.
	Roots *x509.CertPool

	key   key
	store Store

	// change is held for writing while secrets change, and for reading from when
	// a binding reads its secrets until it is in live: it then misses no change.
	change sync.RWMutex

	mu   sync.Mutex
	live map[id]*Binding // guarded by mu
}

type id struct{ tenant, sandbox string }

// checkText is sealed at the first start, to tell whether the key is still that one.
var checkText = []byte("vivarium")

// Open reads DIR/secret.key, which it makes if nothing was ever sealed. Conflict:
// the file is lost, or not the one that the store's rows were sealed with.
func Open(ctx context.Context, dir string, store Store) (*Vault, error) {
	check, err := store.SecretCheck(ctx)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, KeyFile)
	k, err := readKey(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist) && check == nil:
		if k, err = makeKey(dir); err != nil {
			return nil, err
		}
	case errors.Is(err, fs.ErrNotExist):
		return nil, sandbox.Conflict.Errorf("%s is missing: the secrets of this data directory cannot be read without it", path).
			WithHint("restore the file from a backup; if it is lost for good so are the values: `viv serve --reset-secrets` deletes them all, to be set again")
	case err != nil:
		return nil, err
	}
	place := []byte("check")
	if check == nil {
		if check, err = k.seal(checkText, place); err != nil {
			return nil, err
		}
		if err := store.SetSecretCheck(ctx, check); err != nil {
			return nil, err
		}
	}
	if _, err := k.open(check, place); err != nil {
		return nil, sandbox.Conflict.Errorf("%s is not the key that the secrets of this data directory were written with", path).
			WithHint("restore the file from the backup that the database is from; if it is lost for good so are the values: `viv serve --reset-secrets` deletes them all, to be set again")
	}
	return &Vault{key: k, store: store, live: map[id]*Binding{}}, nil
}

// Reset deletes all secrets and the key, for a key that is lost. No Vault may be
// open.
func Reset(ctx context.Context, dir string, store Store) error {
	if err := store.ResetSecrets(ctx); err != nil {
		return err
	}
	if err := os.Remove(filepath.Join(dir, KeyFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return sandbox.Internal.Errorf("remove key of secrets: %w", err)
	}
	return nil
}

func place(r Row) [][]byte {
	return [][]byte{[]byte("secret"), []byte(r.Tenant), []byte(r.Name), binary.BigEndian.AppendUint64(nil, uint64(r.Version)), r.Record}
}

// Set makes a secret or replaces it whole; s.Created, Updated and Version are set.
// Running sandboxes that have it get the new value from their next request on,
// for those of its hosts that it had when they started; one whose kind changed
// is gone for them. The caller keeps v. Errors: Invalid, Exhausted.
func (v *Vault) Set(ctx context.Context, s Secret, val Value) (Secret, error) {
	if err := s.check(val); err != nil {
		return Secret{}, err
	}
	v.change.Lock()
	defer v.change.Unlock()
	now := time.Now().UTC().Truncate(time.Microsecond)
	s.Created, s.Updated, s.Version = now, now, 1
	old, err := v.store.Secret(ctx, s.Tenant, s.Name)
	switch {
	case errors.Is(err, sandbox.NotFound):
		all, err := v.store.Secrets(ctx, s.Tenant)
		if err != nil {
			return Secret{}, err
		}
		if len(all) >= MaxSecrets {
			return Secret{}, sandbox.Exhausted.Errorf("there are %d secrets, which is the most there can be", len(all)).WithHint("delete some with viv secret rm")
		}
	case err != nil:
		return Secret{}, err
	default:
		s.Version = old.Version + 1
		if o, err := describe(old); err == nil { // else: replacing it mends it
			s.Created = o.Created
		}
	}
	row := Row{Tenant: s.Tenant, Name: s.Name, Version: s.Version}
	if row.Record, err = json.Marshal(s); err != nil {
		return Secret{}, sandbox.Internal.Errorf("encode secret %s: %w", s.Name, err)
	}
	if row.Sealed, err = v.key.seal(val.bytes(), place(row)...); err != nil {
		return Secret{}, err
	}
	if err := v.store.PutSecret(ctx, row); err != nil {
		return Secret{}, err
	}
	for _, b := range v.of(s.Tenant) {
		b.update(s, val.text())
	}
	return s, nil
}

// Get tells about a secret. Errors: NotFound.
func (v *Vault) Get(ctx context.Context, tenant, name string) (Secret, error) {
	r, err := v.row(ctx, tenant, name)
	if err != nil {
		return Secret{}, err
	}
	return describe(r)
}

// List tells about a tenant's secrets, by name.
func (v *Vault) List(ctx context.Context, tenant string) ([]Secret, error) {
	rows, err := v.store.Secrets(ctx, tenant)
	if err != nil {
		return nil, err
	}
	all := make([]Secret, 0, len(rows))
	for _, r := range rows {
		s, err := describe(r)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

// Delete forgets a secret. Running sandboxes lose it with their next request: a
// placeholder then stays what it is. Errors: NotFound.
func (v *Vault) Delete(ctx context.Context, tenant, name string) error {
	v.change.Lock()
	defer v.change.Unlock()
	if err := v.store.DeleteSecret(ctx, tenant, name); err != nil {
		if errors.Is(err, sandbox.NotFound) {
			return noSecret(name)
		}
		return err
	}
	for _, b := range v.of(tenant) {
		b.update(Secret{Tenant: tenant, Name: name}, "")
	}
	return nil
}

func noSecret(name string) error {
	return sandbox.NotFound.Errorf("no secret %q", clip(name)).WithHint("viv secret ls lists them; viv secret set makes one")
}

func (v *Vault) row(ctx context.Context, tenant, name string) (Row, error) {
	r, err := v.store.Secret(ctx, tenant, name)
	if errors.Is(err, sandbox.NotFound) {
		return r, noSecret(name)
	}
	return r, err
}

// read is a secret with its value.
func (v *Vault) read(ctx context.Context, tenant, name string) (Secret, Value, error) {
	r, err := v.row(ctx, tenant, name)
	if err != nil {
		return Secret{}, Value{}, err
	}
	if r.Tenant != tenant || r.Name != name {
		return Secret{}, Value{}, sandbox.Internal.Errorf("read secret %s: the store gave another", clip(name))
	}
	plain, err := v.key.open(r.Sealed, place(r)...)
	if err != nil {
		return Secret{}, Value{}, sandbox.Internal.Errorf("read secret %s: %w", name, err).
			WithHint("its row was changed by something other than the daemon; set it again")
	}
	s, err := describe(r)
	return s, own(plain), err
}

// describe reads what anybody may know of a secret.
func describe(r Row) (Secret, error) {
	var s Secret
	if err := json.Unmarshal(r.Record, &s); err != nil {
		return s, sandbox.Internal.Errorf("decode secret %s: %w", clip(r.Name), err)
	}
	s.Tenant, s.Name, s.Version = r.Tenant, r.Name, r.Version
	return s, nil
}

// of are the bindings of a tenant's running sandboxes.
func (v *Vault) of(tenant string) []*Binding {
	v.mu.Lock()
	defer v.mu.Unlock()
	var all []*Binding
	for i, b := range v.live {
		if i.tenant == tenant {
			all = append(all, b)
		}
	}
	return all
}
