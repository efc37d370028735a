package cli

import "github.com/spf13/cobra"

func (a *app) rmCmd() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:               "rm [-f] SANDBOX...",
		Short:             "Forget sandboxes that ended; with -f kill them first",
		Args:              atLeast("SANDBOX"),
		ValidArgsFunction: a.completeSandboxes,
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "kill those that still run")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		return eachArg(args, func(ref string) error {
			err := named(cmd.Context(), c, ref, func(ref string) error { return c.Remove(cmd.Context(), ref, force) })
			if err != nil {
				return err
			}
			return printed(a.Out, ref+"\n")
		})
	}
	return cmd
}
