package cli

import (
	"io"
	"strings"

	"github.com/spf13/cobra"

	v1 "vivarium/api/vivarium/v1"
)

func (a *app) pullCmd() *cobra.Command {
	req := &v1.PullImageRequest{}
	var asJSON, quiet, passwordStdin bool
	cmd := &cobra.Command{
		Use:   "pull REFERENCE",
		Short: "Fetch an image from a registry",
		Args:  exactly("REFERENCE"),
	}
	fs := cmd.Flags()
	fs.StringVar(&req.Policy, "policy", "always", "always asks the registry, missing only if it is not here")
	fs.StringVar(&req.Platform, "platform", "", "os/arch[/variant]; default is the host's")
	fs.StringVar(&req.Username, "username", "", "for the registry; default is what the daemon's keychain has")
	fs.BoolVar(&passwordStdin, "password-stdin", false, "read the password from standard input")
	fs.BoolVarP(&quiet, "quiet", "q", false, "print only the id")
	fs.BoolVar(&asJSON, "json", false, "print the image as JSON")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		req.Ref = args[0]
		if passwordStdin {
			b, err := io.ReadAll(io.LimitReader(a.In, 64<<10))
			if err != nil {
				return err
			}
			req.Password = strings.TrimRight(string(b), "\r\n")
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		p := a.newProgress(args[0])
		img, err := c.PullImage(cmd.Context(), req, p.image)
		p.end(err)
		if err != nil {
			return err
		}
		return a.printImages([]*v1.Image{img}, quiet, asJSON)
	}
	return cmd
}

func (a *app) printImages(list []*v1.Image, quiet, asJSON bool) error {
	if asJSON {
		if len(list) == 1 {
			return a.printJSON(list[0])
		}
		return printList(a, list)
	}
	for _, i := range list {
		line := imageLine(i)
		if quiet {
			line = i.Id + "\n"
		}
		if err := printed(a.Out, line); err != nil {
			return err
		}
	}
	return nil
}
