package store

import (
	"errors"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"vivarium/sandbox"
)

func TestTunnels(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, dir)
	one := sandbox.Tunnel{
		ID: "tn-1", Tenant: "a", SandboxID: "sb-1", Name: "abc", Created: time.Now().UTC().Round(0),
		Spec: sandbox.TunnelSpec{Port: 80, Kind: sandbox.TunnelHTTPS, Allow: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, Token: true},
	}
	two := sandbox.Tunnel{ID: "tn-2", Tenant: "a", SandboxID: "sb-1", HostPort: 20001, Created: one.Created, Spec: sandbox.TunnelSpec{Port: 22, Kind: sandbox.TunnelTCP}}
	other := one
	other.Tenant = "b" // an id of another tenant's is another row (E1)
	for _, x := range []sandbox.Tunnel{one, two, other} {
		if err := s.PutTunnel(t.Context(), x); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.PutTunnel(t.Context(), one); !errors.Is(err, sandbox.Exists) {
		t.Errorf("twice: %v", err)
	}
	want := func(all ...sandbox.Tunnel) {
		t.Helper()
		got, err := open(t, dir).Tunnels(t.Context())
		if err != nil || !reflect.DeepEqual(got, all) {
			t.Errorf("%+v, want %+v, %v", got, all, err)
		}
	}
	want(one, two, other)
	if err := s.DeleteTunnel(t.Context(), "a", "tn-1"); err != nil {
		t.Fatal(err)
	}
	want(two, other)
	if err := s.DeleteTunnels(t.Context(), "a", "sb-1"); err != nil {
		t.Fatal(err)
	}
	want(other)
	if err := s.DeleteTunnel(t.Context(), "a", "tn-9"); err != nil {
		t.Errorf("one that is not there: %v", err)
	}
}
