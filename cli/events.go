package cli

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	v1 "vivarium/api/vivarium/v1"
)

func (a *app) eventsCmd() *cobra.Command {
	req := &v1.WatchEventsRequest{}
	var asJSON bool
	cmd := &cobra.Command{
		Use:               "events [-f] [SANDBOX]",
		Short:             "Show what happened, and with -f what happens",
		Args:              cobra.MaximumNArgs(1),
		ValidArgsFunction: a.completeSandboxes,
	}
	cmd.Flags().BoolVarP(&req.Follow, "follow", "f", false, "go on; without --after only with what is new")
	cmd.Flags().Int64Var(&req.After, "after", -1, "go on after this sequence number; -1 is from the oldest kept")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print them as JSON, one on a line")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 1 {
			req.SandboxId = args[0]
		}
		if req.Follow && !cmd.Flags().Changed("after") {
			req.After = 0
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		return c.Events(cmd.Context(), req, func(e *v1.Event) error {
			if asJSON {
				return a.printLine(e)
			}
			line := fmt.Sprintf("%s  %-6d  %-18s  %s  %s", e.Time.AsTime().Local().Format(time.RFC3339), e.Seq, e.Kind, orDash(e.SandboxId), e.Message)
			for _, k := range slices.Sorted(maps.Keys(e.Attrs)) {
				line += " " + k + "=" + e.Attrs[k]
			}
			return printed(a.Out, strings.TrimRight(clean(line), " ")+"\n")
		})
	}
	return cmd
}
