package crash

import (
	"bytes"
	"context"
	"os"
	"strings"
	"testing"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
	"vivarium/test/fixture"
)

// A create that was cut off, and that the next daemon goes on with, gives what was
// asked for: the CA of its secrets inside, and a policy that is proven.
func TestCreateWithSecrets(t *testing.T) {
	t.Parallel()
	d := fixture.Start(t, node)
	if _, err := d.Client.SetSecret(t.Context(), &v1.Secret{Name: "TOKEN", Hosts: []string{"api.example"}}, []byte("a value of some length")); err != nil {
		t.Fatal(err)
	}
	for _, step := range []string{"start.done", "create.main"} {
		t.Run(step, func(t *testing.T) {
			armed(d, step)
			done := make(chan error, 1)
			go func() {
				_, err := d.Client.Create(context.Background(), &v1.SandboxSpec{
					Name: "box", Image: fixture.Image, Secrets: []string{"TOKEN"},
					Network: &v1.NetworkPolicy{Mode: "allowlist", Headers: []*v1.HeaderRule{{Domain: "api.example", Headers: map[string]string{"X-Team": "a"}}}},
				}, client.CreateOptions{Wait: true, Prove: true})
				done <- err
			}()
			dies(t, d, step)
			<-done
			d.Run()
			sb, err := d.Client.Wait(t.Context(), "box", "running", patience)
			if err != nil || sb.Stage != "running" {
				t.Fatalf("%v, %v\n%s", sb, err, d.Log())
			}
			if sb.Proof.GetResult() != sandbox.ProofEnforced {
				t.Errorf("proof: %v", sb.Proof)
			}
			var out bytes.Buffer
			x, err := d.Client.RunExec(t.Context(), "box", "", &v1.ExecSpec{Argv: []string{"sh", "-c",
				`grep BEGIN /usr/local/share/ca-certificates/vivarium.crt && grep -q BEGIN "$SSL_CERT_FILE" && echo $TOKEN | grep viv_secret`}}, &out, &out)
			if err != nil || x.GetExit().GetCode() != 0 {
				t.Errorf("inside: %s, %v, %v", out.String(), x, err)
			}
			// whatever a sandbox was made with, it can be cut off, and let out again
			var a *v1.AppliedPolicy
			for _, mode := range []string{"none", "allowlist"} {
				var proof *v1.Proof
				a, proof, err = d.Client.SetNetwork(t.Context(), "box", &v1.NetworkPolicy{Mode: mode}, true)
				if err != nil || proof.GetResult() != sandbox.ProofEnforced || a.Policy.Mode != mode {
					t.Fatalf("set %s: %v, %v, %v", mode, a, proof, err)
				}
				if n := len(a.Policy.Headers); (n == 1) != (mode == "allowlist") {
					t.Errorf("set %s: %d header rules", mode, n)
				}
			}
			// the log has what happened until now
			tries := func() (n int64) {
				if err := d.Client.Flows(t.Context(), &v1.WatchFlowsRequest{SandboxId: "box"}, func(r *v1.FlowRecord) error {
					if r.Address == "169.254.169.254" && !r.Allowed {
						n += r.Flows
					}
					return nil
				}); err != nil {
					t.Error(err)
				}
				return n
			}
			before := tries()
			if _, err := d.Client.ProveNetwork(t.Context(), "box"); err != nil {
				t.Fatal(err)
			}
			if after := tries(); before == 0 || after <= before {
				t.Errorf("flows to the metadata address: %d, and %d after one more", before, after)
			}
			if got, err := d.Client.Get(t.Context(), "box"); err != nil || len(got.Spec.Secrets) != 1 {
				t.Errorf("its secrets: %v, %v", got.GetSpec().GetSecrets(), err)
			}
			// the operator changes his part: what is recorded is what is in force
			was := a
			d.Stop()
			if err := os.WriteFile(d.Config, []byte(strings.Replace(node, "pool: 2", "pool: 2, floor: {mode: public, rules: [deny "+step+".example]}", 1)), 0o600); err != nil {
				t.Fatal(err)
			}
			d.Run()
			now, err := d.Client.Network(t.Context(), "box")
			if err != nil || now.Hash == was.Hash {
				t.Errorf("under another floor: %v, %v", now, err)
			}
			got, err := d.Client.Get(t.Context(), "box")
			if err != nil || got.NetworkHash != now.GetHash() || got.Proof != nil {
				t.Errorf("recorded %s with proof %v, in force %s, %v", got.GetNetworkHash(), got.GetProof(), now.GetHash(), err)
			}
			if p, err := d.Client.ProveNetwork(t.Context(), "box"); err != nil || p.Result != sandbox.ProofEnforced {
				t.Errorf("proof: %v, %v", p, err)
			}
			removeAll(t, d)
		})
	}
}
