package cli

import (
	"fmt"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"vivarium/bench"
)

// exitInterrupted is what a shell gives a command that SIGINT ended.
const exitInterrupted = 128 + int(syscall.SIGINT)

func (a *app) benchCmd() *cobra.Command {
	o := bench.Options{}
	cmd := &cobra.Command{
		Use:   "bench tti|exec|density|churn|io|net",
		Short: "Measure the daemon, and others on the same machine in the same run",
		Long: `Measure the daemon as any client sees it:
  tti      from create to the first byte of output
  exec     a round trip of /bin/true in a running sandbox
  density  memory and CPU of an idle sandbox, many alive
  churn    create, exec and remove by 8 clients, per second
  io       1 GiB of standard output, of a file written and of one read
  net      bytes, new connections and changes under network policies

tti and exec are compared with runsc of the same version and podman on top of
it, tti also with bwrap, net with runsc: those that are installed. This must run
as root on the daemon's machine. bench/peers.sh installs what is missing.

net makes an outside world at 198.18.0.2, in a network namespace of its own. For
its time the daemon's configuration needs:
` + bench.WorldConfig,
		Args:      exactly("BENCH"),
		ValidArgs: bench.Benches,
	}
	fs := cmd.Flags()
	fs.IntVarP(&o.N, "n", "n", 0, "how many times (tti 50, exec 200, density 100, churn 400, io 3, net 10)")
	fs.StringVar(&o.Runtime, "runtime", "gvisor", "gvisor or vm")
	fs.StringVar(&o.Image, "image", "base", "image to use, with echo, true, sleep and head in it")
	fs.Float64Var(&o.Rate, "rate", 5, "tti: arrivals per second; 0 is one after the other")
	fs.BoolVar(&o.PoolOff, "pool-off", false, "tti, churn: ask for a size that the pool does not hold")
	fs.StringSliceVar(&o.Peers, "peer", nil, "runsc, podman or bwrap; may be repeated (default: all that are installed)")
	fs.BoolVar(&o.JSON, "json", false, "print one JSON object")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		o.Bench = args[0]
		switch {
		case !slices.Contains(bench.Benches, o.Bench):
			return usage("there is no bench %q: they are %s", o.Bench, strings.Join(bench.Benches, ", "))
		case o.N < 0 || o.N > bench.MaxN || o.N == 0 && fs.Changed("n"):
			return usage("-n is not between 1 and %d", bench.MaxN)
		case o.Rate < 0 || o.Rate > bench.MaxRate:
			return usage("--rate is not between 0 and %d", bench.MaxRate)
		}
		for _, p := range o.Peers {
			if !slices.Contains(bench.Peers, p) {
				return usage("there is no peer %q: they are %s", p, strings.Join(bench.Peers, ", "))
			}
		}
		o.Server, o.Token = a.address(), a.secret()
		o.Out, o.Err = a.Out, a.Err
		// what it made is removed after a Ctrl-C as well
		ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		err := bench.Run(ctx, o)
		if err != nil && ctx.Err() != nil {
			return &exitCode{exitInterrupted, fmt.Errorf("stopped before there was a result: %w", err)}
		}
		return err
	}
	cmd.AddCommand(a.benchPeerCmd())
	return cmd
}

// benchPeerCmd is what bench net calls in the sandbox.
func (a *app) benchPeerCmd() *cobra.Command {
	return &cobra.Command{
		Use: bench.PeerVerb + " JOBS", Hidden: true, Args: exactly("JOBS"),
		RunE: func(cmd *cobra.Command, args []string) error { return bench.NetPeer(cmd.Context(), args[0], a.Out) },
	}
}
