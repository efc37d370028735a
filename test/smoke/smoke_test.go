// Package smoke checks that the whole works at all.
package smoke

import (
	"bytes"
	"testing"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/test/fixture"
)

func TestHello(t *testing.T) {
	d := fixture.Start(t, "pool: {size: 1}\n")
	sb, err := d.Client.Create(t.Context(), &v1.SandboxSpec{Image: fixture.Image, Network: &v1.NetworkPolicy{Mode: "none"}}, client.CreateOptions{Wait: true})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	x, err := d.Client.RunExec(t.Context(), sb.Id, "", &v1.ExecSpec{Argv: []string{"sh", "-c", "echo hello; exit 3"}}, &out, &out)
	if err != nil {
		t.Fatal(err)
	}
	if out.String() != "hello\n" || x.Exit.Code != 3 {
		t.Errorf("%q, exit %d", out.String(), x.Exit.Code)
	}
}
