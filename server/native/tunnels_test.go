package native_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
	"vivarium/server/native/fake"
)

func TestTunnels(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c := dial(t, n.HTTP, n.Admin)
	sb := create(t, c, &v1.SandboxSpec{Name: "box"})
	web, err := c.OpenTunnel(t.Context(), "box", &v1.TunnelSpec{Port: 80, Allow: []string{"192.0.2.1", "198.51.100.0/24"}})
	if err != nil {
		t.Fatal(err)
	}
	if web.SandboxId != sb.Id || web.Spec.Kind != "https" || !strings.HasPrefix(web.Url, "https://") || strings.Join(web.Spec.Allow, " ") != "192.0.2.1 198.51.100.0/24" || web.Created == nil {
		t.Errorf("%v", web)
	}
	raw, err := c.OpenTunnel(t.Context(), sb.Id, &v1.TunnelSpec{Port: 22, Kind: "tcp"})
	if err != nil || !strings.HasPrefix(raw.Address, "127.0.0.1:") || raw.Url != "" {
		t.Errorf("%v, %v", raw, err)
	}
	tok, err := c.CreateConnectToken(t.Context(), &v1.CreateConnectTokenRequest{SandboxId: "box", Metadata: "me", Lifetime: durationpb.New(time.Minute)})
	if err != nil || tok.Url == "" || tok.Token == "" || time.Until(tok.Expires.AsTime()) > 2*time.Minute {
		t.Errorf("%v, %v", tok, err)
	}
	list, err := c.ListTunnels(t.Context(), "box")
	if err != nil || len(list) != 3 || list[2].Spec.Port != 8080 || !list[2].Spec.Token {
		t.Errorf("%v, %v", list, err)
	}
	got, err := c.Get(t.Context(), "box")
	if err != nil || len(got.Tunnels) != 3 || got.Tunnels[0].Url != web.Url {
		t.Errorf("%v, %v", got.GetTunnels(), err)
	}

	// another tenant knows none of it (E1)
	other := dial(t, n.HTTP, n.Token(t, "other", false))
	if l, err := other.ListTunnels(t.Context(), ""); err != nil || len(l) != 0 {
		t.Errorf("another tenant lists %v, %v", l, err)
	}
	for what, err := range map[string]error{
		"list":  second(other.ListTunnels(t.Context(), sb.Id)),
		"open":  second(other.OpenTunnel(t.Context(), sb.Id, &v1.TunnelSpec{Port: 80})),
		"close": other.CloseTunnel(t.Context(), web.Id),
		"token": second(other.CreateConnectToken(t.Context(), &v1.CreateConnectTokenRequest{SandboxId: sb.Id})),
	} {
		if !errors.Is(err, sandbox.NotFound) {
			t.Errorf("another tenant's %s: %v", what, err)
		}
	}

	for what, err := range map[string]error{
		"no spec":      second(c.OpenTunnel(t.Context(), "box", nil)),
		"no port":      second(c.OpenTunnel(t.Context(), "box", &v1.TunnelSpec{})),
		"large port":   second(c.OpenTunnel(t.Context(), "box", &v1.TunnelSpec{Port: 65536})),
		"kind":         second(c.OpenTunnel(t.Context(), "box", &v1.TunnelSpec{Port: 80, Kind: "udp"})),
		"network":      second(c.OpenTunnel(t.Context(), "box", &v1.TunnelSpec{Port: 80, Allow: []string{"here"}})),
		"bits":         second(c.OpenTunnel(t.Context(), "box", &v1.TunnelSpec{Port: 80, Allow: []string{"192.0.2.1/24"}})),
		"networks":     second(c.OpenTunnel(t.Context(), "box", &v1.TunnelSpec{Port: 80, Allow: make([]string, 257)})),
		"tcp token":    second(c.OpenTunnel(t.Context(), "box", &v1.TunnelSpec{Port: 80, Kind: "tcp", Token: true})),
		"no sandbox":   second(c.OpenTunnel(t.Context(), "", &v1.TunnelSpec{Port: 80})),
		"close":        c.CloseTunnel(t.Context(), "../x"),
		"metadata":     second(c.CreateConnectToken(t.Context(), &v1.CreateConnectTokenRequest{SandboxId: "box", Metadata: "a\r\nb"})),
		"token port":   second(c.CreateConnectToken(t.Context(), &v1.CreateConnectTokenRequest{SandboxId: "box", Port: 65536})),
		"lifetime":     second(c.CreateConnectToken(t.Context(), &v1.CreateConnectTokenRequest{SandboxId: "box", Lifetime: durationpb.New(0)})),
		"at create":    second(c.Create(t.Context(), &v1.SandboxSpec{Image: "debian:base", Tunnels: []*v1.TunnelSpec{{Port: 1}, {}}}, client.CreateOptions{})),
		"many at once": second(c.Create(t.Context(), &v1.SandboxSpec{Image: "debian:base", Tunnels: make([]*v1.TunnelSpec, 33)}, client.CreateOptions{})),
	} {
		if !errors.Is(err, sandbox.Invalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := c.CloseTunnel(t.Context(), web.Id); err != nil {
		t.Error(err)
	}
	if err := c.CloseTunnel(t.Context(), web.Id); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("close again: %v", err)
	}
	if log := n.Log.String(); strings.Contains(log, tok.Token) {
		t.Error("the token is in the log")
	}
}

func second[T any](_ T, err error) error { return err }
