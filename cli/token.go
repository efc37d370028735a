package cli

import (
	"github.com/spf13/cobra"
)

func (a *app) tokenCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "token",
		Short: "Make, list and revoke tokens",
		Long:  "Make, list and revoke tokens. A token belongs to one tenant, whose objects are all that it sees. Only a token with admin rights may do this, such as the first one, in the file `token` of the data directory.",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.tokenCreateCmd(), a.tokenListCmd(), a.tokenRevokeCmd())
	return cmd
}

func (a *app) tokenCreateCmd() *cobra.Command {
	var tenant, name string
	var admin, asJSON bool
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Make a token and print its secret, which is shown this once",
		Args:  exactly(),
	}
	cmd.Flags().StringVar(&tenant, "tenant", "", "whose it is; made with its first token (default: your own)")
	cmd.Flags().StringVar(&name, "name", "", "what it is for")
	cmd.Flags().BoolVar(&admin, "admin", false, "it may manage tokens and the node")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print it as JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		t, secret, err := c.CreateToken(cmd.Context(), tenant, name, admin)
		if err != nil {
			return err
		}
		if asJSON {
			b, err := marshal(t)
			if err != nil {
				return err
			}
			return a.writeJSON(map[string]any{"token": b, "secret": secret})
		}
		return printed(a.Out, secret+"\n")
	}
	return cmd
}

func (a *app) tokenListCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List tokens; their secrets are kept nowhere",
		Args:  exactly(),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print them as JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		list, err := c.ListTokens(cmd.Context())
		if err != nil {
			return err
		}
		if asJSON {
			return printList(a, list)
		}
		rows := make([][]string, len(list))
		for i, t := range list {
			admin := "-"
			if t.Admin {
				admin = "admin"
			}
			rows[i] = []string{t.Id, t.Tenant, orDash(t.Name), admin, ago(t.Created), ago(t.LastUsed)}
		}
		return a.table([]string{"ID", "TENANT", "NAME", "RIGHTS", "AGE", "USED"}, rows)
	}
	return cmd
}

func (a *app) tokenRevokeCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "revoke ID...",
		Short: "Make tokens invalid at once",
		Args:  atLeast("ID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			defer c.Close()
			return eachArg(args, func(id string) error {
				if err := c.RevokeToken(cmd.Context(), id); err != nil {
					return err
				}
				return printed(a.Out, id+"\n")
			})
		},
	}
}
