package cli

import (
	"github.com/goccy/go-yaml"
	"github.com/spf13/cobra"

	"vivarium/network/preset"
)

func (a *app) networkPresetCmd() *cobra.Command {
	var asJSON, fromHost bool
	cmd := &cobra.Command{
		Use:   "preset [--from-host]",
		Short: "List the named lists of the daemon's configuration, or make some",
		Long:  "List the named lists of the daemon's configuration, which rules use as preset:NAME. With --from-host, print lists for the configuration, made from what this host's own package tools (apt, npm, pip, Go) are set to: to be looked at, edited and put there. No host name is built in.",
		Args:  exactly(),
	}
	cmd.Flags().BoolVar(&fromHost, "from-host", false, "make lists from this host's package tools; no daemon is asked")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print them as JSON")
	cmd.MarkFlagsMutuallyExclusive("from-host", "json")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if fromHost {
			return a.hostPresets(cmd)
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		list, err := c.Presets(cmd.Context())
		if err != nil {
			return err
		}
		if asJSON {
			return printList(a, list)
		}
		var rows [][]string
		for _, p := range list {
			for _, r := range p.Rules {
				rows = append(rows, []string{p.Name, r})
			}
		}
		return a.table([]string{"PRESET", "RULE"}, rows)
	}
	return cmd
}

// hostPresets prints a piece of configuration.
func (a *app) hostPresets(cmd *cobra.Command) error {
	r := preset.FromHost(cmd.Context())
	var c struct {
		Network struct {
			Presets map[string][]string `yaml:"presets"`
		} `yaml:"network"`
		Cache struct {
			GoDirect  bool                         `yaml:"go_direct"`
			Upstreams map[string][]preset.Upstream `yaml:"upstreams"`
		} `yaml:"cache"`
	}
	c.Network.Presets, c.Cache.Upstreams, c.Cache.GoDirect = r.Presets, r.Upstreams, r.GoDirect
	b, err := yaml.Marshal(c)
	if err != nil {
		return err
	}
	for _, w := range r.Warnings {
		if err := printed(a.Err, clean(w.Preset+": "+w.Text)+"\n"); err != nil {
			return err
		}
	}
	return printed(a.Out, string(b))
}
