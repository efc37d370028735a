package cli

import (
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	v1 "vivarium/api/vivarium/v1"
)

func (a *app) tunnelTokenCmd() *cobra.Command {
	req := &v1.CreateConnectTokenRequest{}
	var port uint16
	var life time.Duration
	var asJSON, link bool
	cmd := &cobra.Command{
		Use:   "token [FLAGS] SANDBOX",
		Short: "Make a token that lets its holder in to a port",
		Long:  "Make a token that lets its holder in to a port, and print the URL and the token. A client sends it as `Authorization: Bearer`, or a browser opens the link (--link), which leaves a cookie. It is void when its time is over or the tunnel is closed. The program inside gets --metadata as the header X-Verified-User-Data and may believe it.",
		Args:  exactly("SANDBOX"), ValidArgsFunction: a.completeSandboxes,
	}
	cmd.Flags().Uint16Var(&port, "port", 8080, "that it leads to")
	cmd.Flags().StringVar(&req.Metadata, "metadata", "", "what the program inside is told of the holder, at most 512 bytes")
	cmd.Flags().DurationVar(&life, "for", 0, "how long it counts; at most, and by default, the sandbox's time")
	cmd.Flags().BoolVar(&link, "link", false, "print one URL with the token in it, for a browser")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print both as JSON")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if cmd.Flags().Changed("for") {
			if life <= 0 {
				return usage("--for must be more than 0")
			}
			req.Lifetime = durationpb.New(life)
		}
		req.SandboxId, req.Port = args[0], uint32(port)
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		t, err := c.CreateConnectToken(cmd.Context(), req)
		switch {
		case err != nil:
			return err
		case asJSON:
			return a.printJSON(t)
		case link:
			return printed(a.Out, t.Url+"/?vivarium_token="+t.Token+"\n")
		}
		return printed(a.Out, t.Url+"\n"+t.Token+"\n")
	}
	return cmd
}
