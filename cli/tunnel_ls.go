package cli

import (
	"strconv"
	"strings"

	"github.com/spf13/cobra"
)

func (a *app) tunnelListCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ls [SANDBOX]",
		Short: "List open tunnels, of a sandbox or of all",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usage("%s takes at most one SANDBOX", cmd.CommandPath())
			}
			return nil
		},
		ValidArgsFunction: a.completeSandboxes,
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print them as JSON")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		list, err := c.ListTunnels(cmd.Context(), strings.Join(args, ""))
		if err != nil {
			return err
		}
		if asJSON {
			return printList(a, list)
		}
		rows := make([][]string, len(list))
		for i, t := range list {
			who := "all"
			switch {
			case t.Spec.GetToken():
				who = "token"
			case len(t.Spec.GetAllow()) > 0:
				who = ""
			}
			who = strings.TrimSpace(who + " " + strings.Join(t.Spec.GetAllow(), " "))
			rows[i] = []string{t.Id, t.SandboxId, strconv.Itoa(int(t.Spec.GetPort())) + "/" + t.Spec.GetKind(), tunnelPlace(t), who, ago(t.Created)}
		}
		return a.table([]string{"ID", "SANDBOX", "PORT", "ADDRESS", "FOR", "AGE"}, rows)
	}
	return cmd
}
