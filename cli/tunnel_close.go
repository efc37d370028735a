package cli

import (
	"context"
	"strings"

	"github.com/spf13/cobra"
)

func (a *app) tunnelCloseCmd() *cobra.Command {
	return &cobra.Command{
		Use:               "close TUNNEL...",
		Short:             "Close tunnels and cut what goes through them; their tokens are void",
		Args:              atLeast("TUNNEL"),
		ValidArgsFunction: a.completeTunnels,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			defer c.Close()
			return eachArg(args, func(id string) error {
				if err := c.CloseTunnel(cmd.Context(), id); err != nil {
					return err
				}
				return printed(a.Out, id+"\n")
			})
		},
	}
}

func (a *app) completeTunnels(cmd *cobra.Command, _ []string, prefix string) ([]string, cobra.ShellCompDirective) {
	c, err := a.client()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	defer c.Close()
	ctx := cmd.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, completionTime)
	defer cancel()
	list, err := c.ListTunnels(ctx, "")
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var out []string
	for _, t := range list {
		if strings.HasPrefix(t.Id, prefix) {
			out = append(out, cobra.CompletionWithDesc(t.Id, clean(tunnelPlace(t))))
		}
	}
	return out, cobra.ShellCompDirectiveNoFileComp
}
