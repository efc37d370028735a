package cli

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/sandbox"
)

func (a *app) networkCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "network",
		Short: "Set, show, explain and prove what a sandbox may reach",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.networkSetCmd(), a.networkShowCmd(), a.networkExplainCmd(), a.networkProveCmd(), a.networkLogCmd(), a.networkPresetCmd())
	return cmd
}

func (a *app) networkSetCmd() *cobra.Command {
	var prove, asJSON bool
	cmd := &cobra.Command{
		Use:               "set [FLAGS] SANDBOX",
		Short:             "Replace the policy of a running sandbox",
		Long:              "Replace the policy of a running sandbox. Open connections that the new policy does not allow are cut within a second.",
		Args:              exactly("SANDBOX"),
		ValidArgsFunction: a.completeSandboxes,
	}
	flags := addPolicyFlags(cmd.Flags())
	cmd.Flags().BoolVar(&prove, "prove", false, "try it from inside as well")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print what is in force as JSON")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		p, err := flags.policy()
		if err != nil {
			return err
		}
		if p == nil {
			return usage("no policy is given: say --network, --allow or --deny")
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		applied, proof, err := c.SetNetwork(cmd.Context(), args[0], p, prove)
		if err != nil {
			return err
		}
		if asJSON {
			err = a.printJSON(&v1.SetNetworkResponse{Applied: applied, Proof: proof})
		} else if err = a.printPolicy(applied); err == nil && proof != nil {
			err = a.printProof(proof)
		}
		if err == nil && proof != nil && proof.Result != sandbox.ProofEnforced {
			err = &exitCode{code: exitError}
		}
		return err
	}
	return cmd
}

func (a *app) networkShowCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:               "show SANDBOX",
		Short:             "Show the policy in force, read back from where it is enforced",
		Args:              exactly("SANDBOX"),
		ValidArgsFunction: a.completeSandboxes,
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print it as JSON")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		p, err := c.Network(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(p)
		}
		return a.printPolicy(p)
	}
	return cmd
}

func (a *app) printPolicy(p *v1.AppliedPolicy) error {
	lines := []string{"mode  " + p.Policy.Mode}
	for i, r := range p.Policy.Rules {
		lines = append(lines, fmt.Sprintf("%4d  %-5s %s", i+1, r.Action, r.Match))
	}
	for _, h := range p.Policy.Headers {
		for k := range h.Headers { // not the value: it may be somebody's
			lines = append(lines, "      header "+k+" for "+h.Domain)
		}
	}
	for _, kv := range [][2]string{{"inspect", strings.Join(p.Policy.Inspect, " ")}, {"upstream", p.Policy.Upstream}, {"source", p.Policy.Source}} {
		if kv[1] != "" {
			lines = append(lines, "      "+kv[0]+" "+kv[1])
		}
	}
	if p.Policy.ResolveAny {
		lines = append(lines, "      every name resolves")
	}
	lines = append(lines, "hash  "+p.Hash)
	return printed(a.Out, cleanLines(lines))
}

func (a *app) networkExplainCmd() *cobra.Command {
	var asJSON bool
	var proto string
	cmd := &cobra.Command{
		Use:   "explain [FLAGS] [SANDBOX] HOST[:PORT]",
		Short: "Say whether a host may be reached, and which rule says so",
		Long:  "Say whether a host may be reached, and which rule says so: by a sandbox, or under a policy given with flags. The port is 443 unless said. Exits with 1 when it is denied.",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) < 1 || len(args) > 2 {
				return usage("%s takes [SANDBOX] and HOST[:PORT]", cmd.CommandPath())
			}
			return nil
		},
	}
	flags := addPolicyFlags(cmd.Flags())
	cmd.Flags().StringVar(&proto, "protocol", "tcp", "tcp, udp or icmp")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the answer as JSON")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		req := &v1.ExplainNetworkRequest{Protocol: proto}
		p, err := flags.policy()
		if err != nil {
			return err
		}
		switch {
		case len(args) == 2 && p == nil:
			req.SandboxId = args[0]
		case len(args) == 1 && p != nil:
			req.Policy = p
		default:
			return usage("want either a sandbox or the flags of a policy, and a host")
		}
		req.Host = args[len(args)-1]
		if host, port, err := net.SplitHostPort(req.Host); err == nil {
			n, err := strconv.ParseUint(port, 10, 16)
			if err != nil || n == 0 {
				return usage("port %q is not between 1 and 65535", port)
			}
			req.Host, req.Port = host, uint32(n)
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		x, err := c.ExplainNetwork(cmd.Context(), req)
		if err != nil {
			return err
		}
		if asJSON {
			err = a.printJSON(x)
		} else {
			err = a.printExplanation(x)
		}
		if err == nil && !x.Allowed {
			err = &exitCode{code: exitError}
		}
		return err
	}
	return cmd
}

func (a *app) printExplanation(x *v1.ExplainNetworkResponse) error {
	word := map[bool]string{true: "allowed", false: "denied"}
	line := word[x.Allowed] + " by " + x.Rule
	switch x.Via {
	case "proxy":
		line += "; the proxy checks the name"
	case "inspected":
		line += "; the proxy reads the requests"
	}
	lines := []string{line}
	for _, d := range x.Addresses {
		lines = append(lines, fmt.Sprintf("  %-15s  %s by %s", d.Address, word[d.Allowed], d.Rule))
	}
	return printed(a.Out, cleanLines(lines))
}

func (a *app) networkProveCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:               "prove SANDBOX",
		Short:             "Try the policy from inside: enforced or failed",
		Long:              "Try the policy from inside: a canary in the sandbox tries an address, the metadata address and a name that are denied, and a name that is allowed, and the rules are read back from the kernel. Exits with 1 when the policy is not enforced.",
		Args:              exactly("SANDBOX"),
		ValidArgsFunction: a.completeSandboxes,
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the proof as JSON")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		p, err := c.ProveNetwork(cmd.Context(), args[0])
		if err != nil {
			return err
		}
		if asJSON {
			err = a.printJSON(p)
		} else {
			err = a.printProof(p)
		}
		if err == nil && p.Result != sandbox.ProofEnforced {
			err = &exitCode{code: exitError}
		}
		return err
	}
	return cmd
}

func (a *app) printProof(p *v1.Proof) error {
	rows := make([][]string, len(p.Checks))
	for i, k := range p.Checks {
		rows[i] = []string{map[bool]string{true: "ok", false: "FAILED"}[k.Ok], k.What, k.Target, k.Want, k.Got, orDash(k.Detail)}
	}
	if err := printed(a.Out, clean(p.Result)+"\n"); err != nil {
		return err
	}
	return a.table([]string{"", "CHECK", "TARGET", "WANT", "GOT", "DETAIL"}, rows)
}

func (a *app) networkLogCmd() *cobra.Command {
	req := &v1.WatchFlowsRequest{}
	var asJSON, denied bool
	cmd := &cobra.Command{
		Use:               "log [-f] SANDBOX",
		Short:             "Show every destination that a sandbox reached or was refused",
		Args:              exactly("SANDBOX"),
		ValidArgsFunction: a.completeSandboxes,
	}
	cmd.Flags().BoolVarP(&req.Follow, "follow", "f", false, "go on until the sandbox has ended")
	cmd.Flags().Int64Var(&req.After, "after", 0, "go on after this sequence number")
	cmd.Flags().BoolVar(&denied, "denied", false, "only what was refused")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print them as JSON, one on a line")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		req.SandboxId = args[0]
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		return c.Flows(cmd.Context(), req, func(r *v1.FlowRecord) error {
			switch {
			case denied && r.Allowed:
				return nil
			case asJSON:
				return a.printLine(r)
			}
			return printed(a.Out, clean(flowLine(r))+"\n")
		})
	}
	return cmd
}

func flowLine(r *v1.FlowRecord) string {
	at := r.Last.AsTime().Local().Format(time.RFC3339)
	if r.Uncounted > 0 {
		return fmt.Sprintf("%s  %-7s  %d flows to further destinations, not listed", at, "more", r.Uncounted)
	}
	what := "refused"
	if r.Allowed {
		what = "reached"
	}
	to := r.Name
	switch {
	case r.Name == "":
		to = r.Address
	case r.Address != "":
		to += " (" + r.Address + ")"
	}
	if r.Port != 0 {
		to += fmt.Sprintf(":%d", r.Port)
	}
	line := fmt.Sprintf("%s  %-7s  %s/%s  %d flows, %d B out, %d B in", at, what, to, r.Protocol, r.Flows, r.BytesOut, r.BytesIn)
	if r.ExecId != "" {
		line += "  exec " + r.ExecId
	}
	if r.Rule != "" {
		line += "  " + r.Rule
	}
	return line
}

// cleanLines joins lines, each without control characters.
func cleanLines(lines []string) string {
	var b strings.Builder
	for _, l := range lines {
		b.WriteString(clean(l) + "\n")
	}
	return b.String()
}
