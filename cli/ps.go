package cli

import (
	"strings"

	"github.com/spf13/cobra"

	v1 "vivarium/api/vivarium/v1"
)

func (a *app) psCmd() *cobra.Command {
	var all, quiet, asJSON bool
	var tags, stages []string
	req := &v1.ListSandboxesRequest{}
	cmd := &cobra.Command{
		Use:   "ps",
		Short: "List sandboxes",
		Args:  exactly(),
	}
	fs := cmd.Flags()
	fs.BoolVarP(&all, "all", "a", false, "also those that ended")
	fs.BoolVar(&req.Removed, "removed", false, "with -a: also the death certificates of those that were removed")
	fs.BoolVarP(&quiet, "quiet", "q", false, "only ids")
	fs.StringVar(&req.Name, "name", "", "only this name")
	fs.StringArrayVar(&tags, "tag", nil, "only with this KEY=VALUE; may be repeated")
	fs.StringSliceVar(&stages, "stage", nil, "only in these stages, such as running or ended")
	fs.Int32Var(&req.Limit, "limit", 0, "at most so many")
	fs.BoolVar(&asJSON, "json", false, "print them as JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		var err error
		if req.Tags, err = keyValues("tag", tags, nil); err != nil {
			return err
		}
		req.Ended, req.Stages = all, stages
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		list, err := c.List(cmd.Context(), req)
		if err != nil {
			return err
		}
		switch {
		case asJSON:
			return printList(a, list)
		case quiet:
			var b strings.Builder
			for _, s := range list {
				b.WriteString(s.Id + "\n")
			}
			return printed(a.Out, b.String())
		}
		rows := make([][]string, len(list))
		for i, s := range list {
			rows[i] = []string{s.Id, orDash(s.Spec.GetName()), s.Spec.GetImage(), stageText(s), ago(s.Created), left(s), orDash(command(s.Spec.GetCommand()))}
		}
		return a.table([]string{"ID", "NAME", "IMAGE", "STAGE", "AGE", "LEFT", "COMMAND"}, rows)
	}
	return cmd
}

func stageText(s *v1.Sandbox) string {
	if d := s.Death; d != nil {
		if d.HasExit && d.Reason == "exited" {
			return "exited " + itoa(d.Exit.Code)
		}
		return d.Reason
	}
	return s.Stage
}

// left is how long a sandbox has before its timeout.
func left(s *v1.Sandbox) string {
	if s.Death != nil || s.Deadline == nil {
		return "-"
	}
	return short(until(s.Deadline))
}
