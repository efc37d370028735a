package store

import (
	"errors"
	"testing"

	"vivarium/sandbox"
	"vivarium/secret"
)

var _ secret.Store = (*Store)(nil)

// E1, E8: rows of secrets are their tenant's, versions exclude each other, and what
// is about a sandbox goes with it.
func TestSecrets(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir)
	ctx := t.Context()
	row := sandbox.SecretRow{Tenant: "a", Name: "KEY", Version: 1, Record: []byte(`{"env":"KEY"}`), Sealed: []byte{1, 2, 3}}
	if err := s.PutSecret(ctx, row); err != nil {
		t.Fatal(err)
	}
	if err := s.PutSecret(ctx, row); !errors.Is(err, sandbox.Conflict) {
		t.Errorf("made twice: %v", err)
	}
	third := row
	third.Version = 3
	if err := s.PutSecret(ctx, third); !errors.Is(err, sandbox.Conflict) {
		t.Errorf("version 3 after 1: %v", err)
	}
	second := row
	second.Version, second.Sealed = 2, []byte{9}
	if err := s.PutSecret(ctx, second); err != nil {
		t.Error(err)
	}
	got, err := open(t, dir).Secret(ctx, "a", "KEY")
	if err != nil || got.Version != 2 || string(got.Sealed) != "\x09" || string(got.Record) != `{"env":"KEY"}` || got.Tenant != "a" || got.Name != "KEY" {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := s.Secret(ctx, "b", "KEY"); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("another tenant's: %v", err)
	}
	if err := s.DeleteSecret(ctx, "b", "KEY"); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("another tenant's: %v", err)
	}
	if l, err := s.Secrets(ctx, "b"); err != nil || len(l) != 0 {
		t.Errorf("another tenant's: %v, %v", l, err)
	}
	other := row
	other.Name = "AKEY"
	if err := s.PutSecret(ctx, other); err != nil {
		t.Error(err)
	}
	if l, err := s.Secrets(ctx, "a"); err != nil || len(l) != 2 || l[0].Name != "AKEY" {
		t.Errorf("%v, %v", l, err)
	}
	if err := s.DeleteSecret(ctx, "a", "KEY"); err != nil {
		t.Error(err)
	}
	if err := s.DeleteSecret(ctx, "a", "KEY"); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("deleted twice: %v", err)
	}
}

func TestSecretBindings(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir())
	ctx := t.Context()
	must(t, s.Create(sb("a", "sb-1", ""), "", ""))
	for _, state := range []string{"x", "y"} {
		if err := s.PutSecretBinding(ctx, "a", "sb-1", []byte(state)); err != nil {
			t.Fatal(err)
		}
	}
	if b, err := s.SecretBinding(ctx, "a", "sb-1"); err != nil || string(b) != "y" {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := s.SecretBinding(ctx, "b", "sb-1"); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("another tenant's: %v", err)
	}
	if err := s.DeleteSecretBinding(ctx, "b", "sb-1"); err != nil {
		t.Error(err)
	}
	must(t, s.Forget("a", "sb-1"))
	if _, err := s.SecretBinding(ctx, "a", "sb-1"); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("after the sandbox: %v", err)
	}
	if err := s.PutSecretBinding(ctx, "a", "sb-2", nil); err == nil {
		t.Error("nothing was taken for a state")
	}
	if err := s.PutSecretBinding(ctx, "a", "sb-2", []byte("z")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := s.DeleteSecretBinding(ctx, "a", "sb-2"); err != nil {
			t.Error(err)
		}
	}
	if c, err := s.SecretCheck(ctx); c != nil || err != nil {
		t.Errorf("%q, %v", c, err)
	}
	if err := s.SetSecretCheck(ctx, []byte{0, 255}); err != nil {
		t.Error(err)
	}
	if c, err := s.SecretCheck(ctx); string(c) != "\x00\xff" || err != nil {
		t.Errorf("%q, %v", c, err)
	}
	if err := s.PutSecretBinding(ctx, "a", "sb-3", []byte("z")); err != nil {
		t.Error(err)
	}
	if err := s.ResetSecrets(ctx); err != nil {
		t.Error(err)
	}
	if c, err := s.SecretCheck(ctx); c != nil || err != nil {
		t.Errorf("after the reset: %q, %v", c, err)
	}
	if _, err := s.SecretBinding(ctx, "a", "sb-3"); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("after the reset: %v", err)
	}
}
