package cli

import (
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	v1 "vivarium/api/vivarium/v1"
)

func itoa(n int32) string { return strconv.FormatInt(int64(n), 10) }

func until(t *timestamppb.Timestamp) time.Duration { return time.Until(t.AsTime()) }

func (a *app) inspectCmd() *cobra.Command {
	var execs bool
	cmd := &cobra.Command{
		Use:               "inspect SANDBOX...",
		Short:             "Show everything known about sandboxes, as JSON",
		Args:              atLeast("SANDBOX"),
		ValidArgsFunction: a.completeSandboxes,
	}
	cmd.Flags().BoolVar(&execs, "execs", false, "show the sandbox's execs instead")
	cmd.Flags().Bool("json", true, "JSON is what it prints anyway")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		if execs {
			var list []*v1.Exec
			for _, ref := range args {
				err := named(cmd.Context(), c, ref, func(ref string) error {
					l, err := c.ListExecs(cmd.Context(), ref)
					list = append(list, l...)
					return err
				})
				if err != nil {
					return err
				}
			}
			return printList(a, list)
		}
		list := make([]*v1.Sandbox, 0, len(args))
		err = eachArg(args, func(ref string) error {
			return named(cmd.Context(), c, ref, func(ref string) error {
				sb, err := c.Get(cmd.Context(), ref)
				if err == nil {
					list = append(list, sb)
				}
				return err
			})
		})
		switch {
		case len(args) == 1 && err == nil:
			return a.printJSON(list[0])
		case len(args) > 1:
			if perr := printList(a, list); perr != nil {
				return perr
			}
		}
		return err
	}
	return cmd
}
