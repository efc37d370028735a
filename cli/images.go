package cli

import (
	"strings"

	"github.com/spf13/cobra"
)

func (a *app) imagesCmd() *cobra.Command {
	var quiet, asJSON bool
	cmd := &cobra.Command{
		Use:   "images",
		Short: "List images",
		Args:  exactly(),
	}
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "only ids")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print them as JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		list, err := c.ListImages(cmd.Context())
		if err != nil {
			return err
		}
		switch {
		case asJSON:
			return printList(a, list)
		case quiet:
			var b strings.Builder
			for _, i := range list {
				b.WriteString(i.Id + "\n")
			}
			return printed(a.Out, b.String())
		}
		var rows [][]string
		for _, i := range list {
			tags := i.Tags
			if len(tags) == 0 {
				tags = []string{"<none>"}
			}
			for _, t := range tags {
				rows = append(rows, []string{t, shortID(i.Id), i.Platform, bytesText(i.Size), ago(i.LastUsed)})
			}
		}
		return a.table([]string{"IMAGE", "ID", "PLATFORM", "SIZE", "USED"}, rows)
	}
	return cmd
}

// shortID is enough of an image's id to name it.
func shortID(id string) string {
	if len(id) > 15 {
		return id[:15]
	}
	return id
}
