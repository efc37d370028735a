package cli

import (
	"fmt"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"vivarium/config"
	"vivarium/doctor"
	"vivarium/network/setup"
)

func (a *app) doctorCmd() *cobra.Command {
	var asJSON bool
	o := doctor.Options{}
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what this host lacks or has wrong, the effect, and the exact fix",
		Long: `Look at whether this host can carry sandboxes, with the daemon's own
configuration. It changes nothing; what it makes to try something, up to the
boot of a machine, is gone when it ends. The exit code is 1 if something that is
needed is missing.`,
		Args: exactly(),
	}
	src := addConfigFlags(cmd)
	cmd.Flags().IntVar(&o.Sandboxes, "sandboxes", 100, "how many shall be alive at once, for what is said about the host's limits")
	cmd.Flags().BoolVar(&o.NoBoot, "no-boot", false, "do not try to boot a machine")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the findings as JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if o.Sandboxes < 1 || o.Sandboxes > 100_000 {
			return usage("--sandboxes is not between 1 and 100000")
		}
		cfg, err := src.load(a)
		if err != nil {
			return err
		}
		if err := doctorOptions(&o, cfg); err != nil {
			return err
		}
		ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		findings := doctor.Run(ctx, o)
		if asJSON {
			err = a.writeJSON(findings)
		} else {
			err = a.printFindings(findings)
		}
		if err == nil && doctor.Failed(findings) {
			return &exitCode{code: exitError}
		}
		return err
	}
	return cmd
}

// doctorOptions takes what matters from the configuration.
func doctorOptions(o *doctor.Options, cfg *config.Config) error {
	o.DataDir, o.UnixSocket = cfg.DataDir, cfg.UnixSocket
	o.CPURequest, o.MemoryRequest = int64(cfg.Defaults.CPURequest), int64(cfg.Defaults.MemoryRequest)
	o.ReserveCPU, o.ReserveMemory, o.ReserveDisk = int64(cfg.Reserve.CPU), int64(cfg.Reserve.Memory), int64(cfg.Reserve.Disk)
	o.FirstUID, o.UIDs = cfg.UIDs.First, cfg.UIDs.Count
	var err error
	o.Network, err = setup.Options(cfg)
	return err
}

func (a *app) printFindings(findings []doctor.Finding) error {
	count := map[doctor.Severity]int{}
	for _, f := range findings {
		mark := "ok"
		if !f.OK {
			mark = string(f.Severity)
			count[f.Severity]++
		}
		s := fmt.Sprintf("%-8s %s", clean(mark), clean(f.Name))
		if f.Detail != "" {
			s += ": " + clean(f.Detail)
		}
		s += "\n"
		if !f.OK {
			if f.Effect != "" {
				s += "         effect: " + clean(f.Effect) + "\n"
			}
			if f.Fix != "" {
				s += "         fix:    " + clean(f.Fix) + "\n"
			}
		}
		if err := printed(a.Out, s); err != nil {
			return err
		}
	}
	sum := "\nsandboxes can run here"
	if n := count[doctor.Error]; n > 0 {
		sum = fmt.Sprintf("\nsandboxes cannot run here as they should: %d to mend", n)
	}
	return printed(a.Out, fmt.Sprintf("%s; %d warnings, %d notes\n", sum, count[doctor.Warning], count[doctor.Note]))
}
