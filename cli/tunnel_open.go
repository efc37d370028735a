package cli

import "github.com/spf13/cobra"

func (a *app) tunnelOpenCmd() *cobra.Command {
	var allow []string
	var token, asJSON bool
	cmd := &cobra.Command{
		Use:     "open [FLAGS] SANDBOX PORT[/https|/h2|/tcp]",
		Short:   "Open a way in to a port, and print where it is",
		Long:    "Open a way in to a port, and print where it is. https (the default) is TLS for programs that speak HTTP/1.1, WebSockets included; h2 for those that speak HTTP/2 without TLS, such as gRPC servers; tcp passes bytes, on a port of the host. Whoever reaches the listener and knows the address is let in, unless --allow or --token says otherwise.",
		Example: "  viv tunnel open box 8080\n  viv tunnel open --allow 192.0.2.0/24 box 5432/tcp\n  viv tunnel open --token box 3000",
		Args:    exactly("SANDBOX", "PORT"), ValidArgsFunction: a.completeSandboxes,
	}
	cmd.Flags().StringArrayVar(&allow, "allow", nil, "network of clients that may come, such as 192.0.2.0/24; may be repeated")
	cmd.Flags().BoolVar(&token, "token", false, "only with a token: viv tunnel token")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the tunnel as JSON")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		spec, err := tunnelSpec(args[1])
		if err != nil {
			return err
		}
		spec.Allow, spec.Token = allow, token
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		t, err := c.OpenTunnel(cmd.Context(), args[0], spec)
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(t)
		}
		return printed(a.Out, tunnelPlace(t)+"\n")
	}
	return cmd
}
