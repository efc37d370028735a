package cli

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/spf13/cobra"
)

func (a *app) versionCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the versions of this program and of the daemon",
		Args:  exactly(),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print them as JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		type version struct {
			Version string `json:"version"`
			GVisor  string `json:"gvisor"`
			Go      string `json:"go,omitempty"`
		}
		v := struct {
			Client version  `json:"client"`
			Server *version `json:"server,omitempty"`
			Error  string   `json:"error,omitempty"`
		}{Client: version{a.hooks.Version, a.hooks.GVisorVersion, runtime.Version()}}
		ctx, cancel := context.WithTimeout(cmd.Context(), 2*time.Second)
		defer cancel()
		// The daemon's is extra: without one there is still an answer.
		if c, err := a.client(); err != nil {
			v.Error = err.Error()
		} else {
			defer c.Close()
			if i, err := c.Info(ctx); err != nil {
				v.Error = err.Error()
			} else {
				v.Server = &version{Version: i.Version, GVisor: i.GvisorVersion}
			}
		}
		if asJSON {
			return a.writeJSON(v)
		}
		s := fmt.Sprintf("client  %s (gVisor %s, %s)\n", v.Client.Version, v.Client.GVisor, v.Client.Go)
		if v.Server != nil {
			s += fmt.Sprintf("daemon  %s (gVisor %s)\n", clean(v.Server.Version), clean(v.Server.GVisor))
		} else {
			s += "daemon  " + clean(v.Error) + "\n"
		}
		return printed(a.Out, s)
	}
	return cmd
}
