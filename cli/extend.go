package cli

import (
	"time"

	"github.com/spf13/cobra"
)

func (a *app) extendCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:               "extend SANDBOX TIME",
		Short:             "Give a running sandbox more time: it ends so long from now",
		Example:           "  viv extend box 30m",
		Args:              exactly("SANDBOX", "TIME"),
		ValidArgsFunction: a.completeSandboxes,
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the sandbox as JSON")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		d, err := time.ParseDuration(args[1])
		if err != nil || d <= 0 {
			return usage("%q is not a time such as 30m", args[1])
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		sb, err := c.Extend(cmd.Context(), args[0], d)
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(sb)
		}
		return printed(a.Out, sb.Deadline.AsTime().Local().Format(time.RFC3339)+"\n")
	}
	return cmd
}
