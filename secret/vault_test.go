package secret

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"vivarium/sandbox"
	"vivarium/store"
)

// theValue is looked for in everything that is printed.
const theValue = "s3cr3t-value-of-tests/+="

func openStore(t testing.TB, dir string) *store.Store {
	t.Helper()
	s, err := store.Open(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func open(t testing.TB) *Vault {
	t.Helper()
	dir := t.TempDir()
	v, err := Open(t.Context(), dir, openStore(t, dir))
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func put(t testing.TB, v *Vault, s Secret, value string) Secret {
	t.Helper()
	if s.Tenant == "" {
		s.Tenant = "a"
	}
	out, err := v.Set(t.Context(), s, NewValue([]byte(value)))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func bind(t testing.TB, v *Vault, s BindSpec) *Binding {
	t.Helper()
	if s.Tenant == "" {
		s.Tenant = "a"
	}
	if s.Sandbox == "" {
		s.Sandbox = "sb-1"
	}
	b, err := v.Bind(t.Context(), s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// C19, E8: whatever prints a value prints [secret].
func TestValuePrintsNowhere(t *testing.T) {
	t.Parallel()
	v := open(t)
	put(t, v, Secret{Name: "KEY", Hosts: []string{"api.example.com"}}, theValue)
	put(t, v, Secret{Name: "PLAIN"}, theValue)
	b := bind(t, v, BindSpec{Uses: []Use{{Name: "KEY"}, {Name: "PLAIN"}}})
	b.plan("api.example.com")
	val := NewValue([]byte(theValue))
	type holder struct {
		v Value
		V Value
		p *Value
		b *Binding
		e Environment
		m map[string]Value
	}
	h := holder{val, val, &val, b, b.Environment(), map[string]Value{"x": val}}
	caKey, err := b.ca.key.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for _, x := range []any{val, &val, h, &h, []Value{val}, b, v, v.key, b.Environment(), struct{ B *Binding }{b}} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d", "%t", "%10v"} {
			fmt.Fprintf(&out, verb+"\n", x)
		}
		j, err := json.Marshal(x)
		fmt.Fprintln(&out, string(j), err)
	}
	for _, l := range []*slog.Logger{slog.New(slog.NewTextHandler(&out, nil)), slog.New(slog.NewJSONHandler(&out, nil))} {
		l.Info("x", "value", val, "holder", h, "binding", b, "environment", b.Environment(), "vault", v)
	}
	fmt.Fprintln(&out, errors.New(fmt.Sprint(val)))
	all := out.String()
	for _, bad := range []string{theValue, fmt.Sprint([]byte(theValue)), strings.Trim(fmt.Sprint([]byte(theValue)), "[]"), fmt.Sprintf("%x", theValue), fmt.Sprintf("%X", theValue),
		strings.Trim(fmt.Sprint(caKey), "[]"), fmt.Sprintf("%x", caKey), strings.Trim(fmt.Sprint(v.key.v.bytes()), "[]"), fmt.Sprintf("%x", v.key.v.bytes())} {
		if strings.Contains(all, bad) {
			t.Errorf("%q was printed", bad)
		}
	}
	if !strings.Contains(all, hidden) {
		t.Error("nothing was printed")
	}
	val.Clear()
	if val.Len() != 0 {
		t.Error("not cleared")
	}
	if (Value{}).Len() != 0 || fmt.Sprint(Value{}) != hidden {
		t.Error("the empty value")
	}
}

func TestSetChecks(t *testing.T) {
	t.Parallel()
	v := open(t)
	long := strings.Repeat("x", MaxValue)
	for _, c := range []struct {
		s     Secret
		value string
		ok    bool
	}{
		{Secret{Name: "A"}, "x", true},
		{Secret{Name: "A"}, long, true},
		{Secret{Name: "A"}, long + "x", false},
		{Secret{Name: "A"}, "", false},
		{Secret{Name: "A"}, "two\nlines", true}, // a plain one may
		{Secret{Name: "A"}, "nul\x00", false},
		{Secret{Name: "A"}, "\xff\xfe", false},
		{Secret{Name: "A", Prefix: "ghp_"}, "x", false},
		{Secret{Name: "A", Query: true}, "x", false},
		{Secret{Name: ""}, "x", false},
		{Secret{Name: "1A"}, "x", false},
		{Secret{Name: "A-B"}, "x", false},
		{Secret{Name: "A", Env: "A=B"}, "x", false},
		{Secret{Name: strings.Repeat("A", 65)}, "x", false},
		{Secret{Name: "A", Hosts: []string{"api.example.com"}}, strings.Repeat("x", MaxBound), true},
		{Secret{Name: "A", Hosts: []string{"api.example.com"}}, strings.Repeat("x", MaxBound+1), false},
		{Secret{Name: "A", Hosts: []string{"*"}}, "x", false},
		{Secret{Name: "A", Hosts: []string{"*.com"}}, "x", false},
		{Secret{Name: "A", Hosts: []string{"10.0.0.1"}}, "x", false},
		{Secret{Name: "A", Hosts: []string{"a b"}}, "x", false},
		{Secret{Name: "A", Hosts: []string{"*.example.com"}, Prefix: "sk-", Query: true}, "x", true},
		{Secret{Name: "A", Hosts: []string{"a.example"}, Prefix: "a b"}, "x", false},
		{Secret{Name: "A", Hosts: []string{"a.example"}, Prefix: strings.Repeat("a", 17)}, "x", false},
		// CR and LF would be another header; the rest no server takes
		{Secret{Name: "A", Hosts: []string{"a.example"}}, "x\r\nEvil: 1", false},
		{Secret{Name: "A", Hosts: []string{"a.example"}}, "x\n", false},
		{Secret{Name: "A", Hosts: []string{"a.example"}}, "x\x7f", false},
		{Secret{Name: "A", Hosts: []string{"a.example"}}, " x", false},
		{Secret{Name: "A", Hosts: []string{"a.example"}}, "x y\tz", true},
	} {
		c.s.Tenant = "a"
		_, err := v.Set(t.Context(), c.s, NewValue([]byte(c.value)))
		if (err == nil) != c.ok || err != nil && !errors.Is(err, sandbox.Invalid) {
			t.Errorf("%+v with %d bytes: %v", c.s, len(c.value), err)
		}
		if err != nil && len(c.value) > 3 && strings.Contains(err.Error(), c.value) {
			t.Errorf("the error has the value: %v", err)
		}
	}
	if _, err := v.Set(t.Context(), Secret{Name: "A"}, NewValue([]byte("x"))); err == nil {
		t.Error("a secret of nobody")
	}
}

func TestSetGetListDelete(t *testing.T) {
	t.Parallel()
	v := open(t)
	ctx := t.Context()
	first := put(t, v, Secret{Name: "KEY", Hosts: []string{"B.example.", "*.a.example", "b.example"}}, "one-value")
	if first.Version != 1 || first.Env != "KEY" || strings.Join(first.Hosts, " ") != "*.a.example b.example" || first.Kind() != Bound || first.Created.IsZero() {
		t.Errorf("%+v", first)
	}
	second := put(t, v, Secret{Name: "KEY", Env: "OTHER"}, "two-value")
	if second.Version != 2 || second.Kind() != Plain || !second.Created.Equal(first.Created) || second.Updated.Before(first.Updated) {
		t.Errorf("%+v", second)
	}
	got, err := v.Get(ctx, "a", "KEY")
	if err != nil || fmt.Sprint(got) != fmt.Sprint(second) {
		t.Errorf("%+v, %v; want %+v", got, err, second)
	}
	put(t, v, Secret{Name: "ANOTHER"}, "x")
	put(t, v, Secret{Tenant: "b", Name: "KEY"}, "of b")
	l, err := v.List(ctx, "a")
	if err != nil || len(l) != 2 || l[0].Name != "ANOTHER" || l[1].Name != "KEY" {
		t.Errorf("%+v, %v", l, err)
	}
	if _, err := v.Get(ctx, "b", "ANOTHER"); !errors.Is(err, sandbox.NotFound) { // E1
		t.Errorf("another tenant's: %v", err)
	}
	if err := v.Delete(ctx, "b", "ANOTHER"); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("another tenant's: %v", err)
	}
	if err := v.Delete(ctx, "a", "KEY"); err != nil {
		t.Error(err)
	}
	if _, err := v.Bind(ctx, BindSpec{Tenant: "a", Sandbox: "s", Uses: []Use{{Name: "KEY"}}}); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("bound after deletion: %v", err)
	}
	if s, val, err := v.read(ctx, "b", "KEY"); err != nil || val.text() != "of b" || s.Tenant != "b" {
		t.Errorf("%+v, %v", s, err)
	}
}

// swapped is a store whose rows somebody has changed.
type swapped struct {
	Store
	change func(*Row)
}

func (s swapped) Secret(ctx context.Context, tenant, name string) (Row, error) {
	r, err := s.Store.Secret(ctx, tenant, name)
	s.change(&r)
	return r, err
}

// A row does not open as another's, with another version, or with other hosts.
func TestRowsAreWhereTheyWereWritten(t *testing.T) {
	t.Parallel()
	v := open(t)
	put(t, v, Secret{Name: "MINE", Hosts: []string{"a.example"}}, theValue)
	put(t, v, Secret{Name: "MINE", Hosts: []string{"a.example"}}, theValue)
	put(t, v, Secret{Name: "OTHER", Hosts: []string{"evil.example"}}, theValue+"2")
	put(t, v, Secret{Tenant: "b", Name: "MINE", Hosts: []string{"a.example"}}, theValue+"3")
	real := v.store
	other, err := real.Secret(t.Context(), "a", "OTHER")
	if err != nil {
		t.Fatal(err)
	}
	of, err := real.Secret(t.Context(), "b", "MINE")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]func(*Row){
		"another's value":        func(r *Row) { r.Sealed = other.Sealed },
		"another tenant's value": func(r *Row) { r.Sealed, r.Record, r.Version = of.Sealed, of.Record, of.Version },
		"another's record":       func(r *Row) { r.Record = other.Record },
		"another's whole row":    func(r *Row) { *r = other },
		"another tenant's row":   func(r *Row) { *r = of },
		"an older version":       func(r *Row) { r.Version = 1 },
		"one bit":                func(r *Row) { r.Sealed = bytes.Clone(r.Sealed); r.Sealed[30] ^= 1 },
		"half of it":             func(r *Row) { r.Sealed = r.Sealed[:20] },
		"more hosts": func(r *Row) {
			r.Record = bytes.Replace(bytes.Clone(r.Record), []byte("a.example"), []byte("b.example"), 1)
		},
	} {
		v.store = swapped{real, c}
		if _, _, err := v.read(t.Context(), "a", "MINE"); !errors.Is(err, sandbox.Internal) {
			t.Errorf("%s: %v", name, err)
		} else if strings.Contains(err.Error(), theValue) {
			t.Errorf("%s: the value is in the error", name)
		}
	}
	v.store = real
	if _, val, err := v.read(t.Context(), "a", "MINE"); err != nil || val.text() != theValue {
		t.Errorf("unchanged: %v", err)
	}
}

func TestNothingReadableOnDisk(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := openStore(t, dir)
	v, err := Open(t.Context(), dir, s)
	if err != nil {
		t.Fatal(err)
	}
	put(t, v, Secret{Name: "KEY", Hosts: []string{"a.example"}}, theValue)
	put(t, v, Secret{Name: "PLAIN"}, theValue+"-plain")
	b := bind(t, v, BindSpec{Uses: []Use{{Name: "KEY"}, {Name: "PLAIN"}}})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	caKey, err := b.ca.key.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	files, _ := filepath.Glob(filepath.Join(dir, "*"))
	if len(files) < 2 {
		t.Fatal(files)
	}
	for _, f := range files {
		raw, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for what, bad := range map[string][]byte{"the value": []byte(theValue), "the CA's key": caKey, "a placeholder": []byte(b.saved.Entries[0].Placeholder)} {
			if bytes.Contains(raw, bad) {
				t.Errorf("%s has %s", filepath.Base(f), what)
			}
		}
	}
}

func TestKeyFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := openStore(t, dir)
	v, err := Open(t.Context(), dir, s)
	if err != nil {
		t.Fatal(err)
	}
	put(t, v, Secret{Name: "KEY"}, theValue)
	path := filepath.Join(dir, KeyFile)
	fi, err := os.Lstat(path)
	if err != nil || fi.Mode() != 0o600 {
		t.Fatalf("%v, %v", fi.Mode(), err)
	}
	if l, _ := filepath.Glob(path + ".*"); len(l) != 0 {
		t.Errorf("left over: %v", l)
	}
	again, err := Open(t.Context(), dir, s)
	if err != nil {
		t.Fatal(err)
	}
	if _, val, err := again.read(t.Context(), "a", "KEY"); err != nil || val.text() != theValue {
		t.Errorf("after a restart: %v", err)
	}
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(what string, kind sandbox.Kind) {
		t.Helper()
		_, err := Open(t.Context(), dir, s)
		if !errors.Is(err, kind) || sandbox.HintOf(err) == "" {
			t.Errorf("%s: %v, hint %q", what, err, sandbox.HintOf(err))
		}
	}
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	refused("readable by a group", sandbox.Denied)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	refused("lost", sandbox.Conflict)
	if _, err := os.Stat(path); err == nil {
		t.Error("a lost key was made anew")
	}
	if _, err := makeKey(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := makeKey(dir); err == nil {
		t.Error("a key was overwritten")
	}
	refused("another", sandbox.Conflict)
	for _, bad := range []string{"", "x", keyHead, keyHead + "AAAA", string(good[:20]), string(good[len(keyHead):])} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		refused(fmt.Sprintf("%q", bad), sandbox.Internal)
	}
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), dir, s); err != nil {
		t.Errorf("the key is back: %v", err)
	}
	if err := Reset(t.Context(), dir, s); err != nil {
		t.Error(err)
	}
	fresh, err := Open(t.Context(), dir, s)
	if err != nil {
		t.Fatalf("after the reset: %v", err)
	}
	if l, err := fresh.List(t.Context(), "a"); err != nil || len(l) != 0 {
		t.Errorf("after the reset: %v, %v", l, err)
	}
}
