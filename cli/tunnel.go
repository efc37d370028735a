package cli

import (
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	v1 "vivarium/api/vivarium/v1"
)

func (a *app) tunnelCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "tunnel",
		Short: "Let others in to ports of a sandbox",
		Long:  "Let others in to ports of a sandbox: by a URL, or by a port of the host. A tunnel is closed with its sandbox. For yourself alone, port-forward does without.",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.tunnelOpenCmd(), a.tunnelListCmd(), a.tunnelCloseCmd(), a.tunnelTokenCmd())
	return cmd
}

// tunnelSpec reads PORT[/KIND].
func tunnelSpec(s string) (*v1.TunnelSpec, error) {
	port, kind, ok := strings.Cut(s, "/")
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || ok && kind != "https" && kind != "h2" && kind != "tcp" {
		return nil, usage("%q is not a port such as 8080, 50051/h2 or 5432/tcp", s)
	}
	return &v1.TunnelSpec{Port: uint32(n), Kind: kind}, nil
}

// tunnelPlace is where a tunnel is.
func tunnelPlace(t *v1.Tunnel) string {
	if t.Url != "" {
		return t.Url
	}
	return t.Address
}
