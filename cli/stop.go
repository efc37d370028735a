package cli

import (
	"time"

	"github.com/spf13/cobra"
)

func (a *app) stopCmd() *cobra.Command {
	grace := -time.Second
	var asJSON bool
	cmd := &cobra.Command{
		Use:               "stop SANDBOX...",
		Short:             "End sandboxes: SIGTERM, and SIGKILL after the grace",
		Args:              atLeast("SANDBOX"),
		ValidArgsFunction: a.completeSandboxes,
	}
	cmd.Flags().DurationVar(&grace, "grace", 10*time.Second, "time between SIGTERM and SIGKILL")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the sandboxes as JSON, one on a line")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if grace < 0 {
			return usage("--grace is below 0")
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		return eachArg(args, func(ref string) error {
			sb, err := c.Stop(cmd.Context(), ref, grace)
			if err != nil {
				return err
			}
			if asJSON {
				return a.printLine(sb)
			}
			return printed(a.Out, ref+"\n")
		})
	}
	return cmd
}
