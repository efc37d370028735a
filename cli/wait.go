package cli

import (
	"time"

	"github.com/spf13/cobra"

	v1 "vivarium/api/vivarium/v1"
)

func (a *app) waitCmd() *cobra.Command {
	var state string
	var timeout time.Duration
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "wait SANDBOX [EXEC]",
		Short: "Wait until a sandbox or an exec has ended, and print its exit code",
		Long:  "Wait until a sandbox has ended and print the exit code of its main command, or why it ended where it has none. With EXEC wait for that command instead.",
		Args:  cobra.RangeArgs(1, 2),
	}
	cmd.ValidArgsFunction = a.completeSandboxes
	cmd.Flags().StringVar(&state, "until", "ended", "ended, running or ready")
	cmd.Flags().DurationVar(&timeout, "timeout", 0, "wait at most so long; 0 is without end")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the sandbox or exec as JSON")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		if len(args) == 2 {
			e, err := c.WaitExec(cmd.Context(), args[0], args[1], timeout)
			switch {
			case err != nil:
				return err
			case asJSON:
				return a.printJSON(e)
			case e.Exit == nil:
				return printed(a.Out, e.State+"\n")
			}
			return printed(a.Out, itoa(e.Exit.Code)+"\n")
		}
		var sb *v1.Sandbox
		err = named(cmd.Context(), c, args[0], func(ref string) (err error) {
			sb, err = c.Wait(cmd.Context(), ref, state, timeout)
			return err
		})
		switch d := sb.GetDeath(); {
		case err != nil:
			return err
		case asJSON:
			return a.printJSON(sb)
		case d == nil:
			return printed(a.Out, sb.Stage+"\n")
		case d.HasExit:
			return printed(a.Out, itoa(d.Exit.Code)+"\n")
		default:
			return printed(a.Out, d.Reason+"\n")
		}
	}
	return cmd
}
