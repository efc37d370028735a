package cli

import (
	"context"

	"github.com/spf13/cobra"

	"vivarium/client"
)

func (a *app) rmCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:               "rm [-f] SANDBOX...",
		Short:             "Forget sandboxes that ended; with -f kill them first",
		Args:              atLeast("SANDBOX"),
		ValidArgsFunction: a.completeSandboxes,
	}
	return a.removal(cmd, "kill those that still run", func(ctx context.Context, c *client.Client, ref string, force bool) error {
		return named(ctx, c, ref, func(ref string) error { return c.Remove(ctx, ref, force) })
	})
}

// removal makes cmd remove what its arguments name, each by remove, and print
// the names of those that it has removed.
func (a *app) removal(cmd *cobra.Command, forceUsage string, remove func(ctx context.Context, c *client.Client, ref string, force bool) error) *cobra.Command {
	var force bool
	cmd.Flags().BoolVarP(&force, "force", "f", false, forceUsage)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		return eachArg(args, func(ref string) error {
			if err := remove(cmd.Context(), c, ref, force); err != nil {
				return err
			}
			return printed(a.Out, clean(ref)+"\n")
		})
	}
	return cmd
}
