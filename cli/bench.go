package cli

import (
	"slices"

	"github.com/spf13/cobra"

	"vivarium/sandbox"
)

var benches = []string{"tti", "exec", "density", "churn", "io"}

func (a *app) benchCmd() *cobra.Command {
	o := BenchOptions{}
	cmd := &cobra.Command{
		Use:   "bench tti|exec|density|churn|io",
		Short: "Measure the daemon, and with --peer others on the same machine in the same run",
		Long: `Measure the daemon as any client sees it:
  tti      from create to the first byte of output
  exec     a round trip of /bin/true in a running sandbox
  density  memory of an idle sandbox, many alive
  churn    create, exec and remove by 8 clients, per second
  io       1 GiB of standard output, up and down`,
		Args:      exactly("BENCH"),
		ValidArgs: benches,
	}
	fs := cmd.Flags()
	fs.IntVarP(&o.N, "n", "n", 0, "how many times; default by bench")
	fs.StringVar(&o.Runtime, "runtime", "gvisor", "gvisor or vm")
	fs.StringVar(&o.Image, "image", "debian:base", "image to use")
	fs.StringSliceVar(&o.Peers, "peer", nil, "runsc, podman or bwrap; may be repeated")
	fs.BoolVar(&o.JSON, "json", false, "print one JSON object")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if a.hooks.Bench == nil {
			return sandbox.Unsupported.Errorf("this build has no benchmarks")
		}
		o.Bench = args[0]
		if !slices.Contains(benches, o.Bench) {
			return usage("there is no bench %q: they are tti, exec, density, churn and io", o.Bench)
		}
		for _, p := range o.Peers {
			if !slices.Contains([]string{"runsc", "podman", "bwrap"}, p) {
				return usage("there is no peer %q: they are runsc, podman and bwrap", p)
			}
		}
		if o.N < 0 || o.N > 1_000_000 {
			return usage("-n is not between 1 and 1000000")
		}
		o.Server, o.Token, o.DataDir = a.address(), a.secret(), a.dir()
		o.Out, o.Err = a.Out, a.Err
		return a.hooks.Bench(cmd.Context(), o)
	}
	return cmd
}
