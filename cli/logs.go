package cli

import (
	"errors"

	"github.com/spf13/cobra"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/sandbox"
)

func (a *app) logsCmd() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use:               "logs [-f] SANDBOX [EXEC]",
		Short:             "Show the output of a sandbox's main command, or of an exec, also after it ended",
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: a.completeSandboxes,
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until the command has ended")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		id := sandbox.MainExec
		if len(args) == 2 {
			id = args[1]
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		err = named(cmd.Context(), c, args[0], func(ref string) error {
			_, err := c.Output(cmd.Context(), &v1.ReadOutputRequest{SandboxId: ref, Id: id, Follow: follow}, a.Out, a.Err)
			return err
		})
		if errors.Is(err, sandbox.NotFound) && len(args) == 1 {
			if _, gerr := c.Get(cmd.Context(), args[0]); gerr == nil {
				return sandbox.NotFound.Errorf("sandbox %s has no main command", args[0]).
					WithHint("`viv inspect --execs %s` lists its execs, and `viv logs %s EXEC` shows the output of one", args[0], args[0])
			}
		}
		return err
	}
	return cmd
}
