package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
)

func (a *app) imageCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "image",
		Short: "Make, name, show and remove images",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	list := a.imagesCmd()
	list.Use = "ls"
	cmd.AddCommand(a.imageBaseCmd(), a.imageTagCmd(), a.imageRmCmd(), a.imageInspectCmd(), a.imagePruneCmd(), list)
	return cmd
}

func (a *app) imageBaseCmd() *cobra.Command {
	req := &v1.BuildBaseRequest{}
	var quiet, asJSON bool
	cmd := &cobra.Command{
		Use:   "base",
		Short: "Make a Debian base image from the distribution's packages, without any image registry",
		Long:  "Make a Debian base image (python3, git, curl, ca-certificates) from the distribution's packages. The mirror is the one in the host's own apt sources. Needs debootstrap or mmdebstrap on the daemon's host.",
		Args:  exactly(),
	}
	fs := cmd.Flags()
	fs.StringVar(&req.Tag, "tag", "", "name of the image (default base:latest)")
	fs.StringVar(&req.Suite, "suite", "", "release, such as bookworm")
	fs.StringSliceVar(&req.Packages, "package", nil, "more packages; may be repeated")
	fs.BoolVar(&req.BuildTools, "build-tools", false, "also compilers and make")
	fs.BoolVarP(&quiet, "quiet", "q", false, "print only the id")
	fs.BoolVar(&asJSON, "json", false, "print the image as JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		p := a.newProgress("base image")
		img, err := c.BuildBase(cmd.Context(), req, p.image)
		p.end(err)
		if err != nil {
			return err
		}
		return a.printImages([]*v1.Image{img}, quiet, asJSON)
	}
	return cmd
}

func (a *app) imageTagCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:               "tag IMAGE NAME",
		Short:             "Give an image another name",
		Args:              exactly("IMAGE", "NAME"),
		ValidArgsFunction: a.completeImages,
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the image as JSON")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		img, err := c.TagImage(cmd.Context(), args[0], args[1])
		if err != nil || !asJSON {
			return err
		}
		return a.printJSON(img)
	}
	return cmd
}

func (a *app) imageRmCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:               "rm IMAGE...",
		Short:             "Remove names of images, and with the last name the image",
		Args:              atLeast("IMAGE"),
		ValidArgsFunction: a.completeImages,
	}
	return a.removal(cmd, "no error where there is no such image", func(ctx context.Context, c *client.Client, ref string, force bool) error {
		return c.RemoveImage(ctx, ref, force)
	})
}

func (a *app) imageInspectCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:               "inspect IMAGE...",
		Short:             "Show everything known about images, as JSON",
		Args:              atLeast("IMAGE"),
		ValidArgsFunction: a.completeImages,
	}
	cmd.Flags().Bool("json", true, "JSON is what it prints anyway")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		var list []*v1.Image
		err = eachArg(args, func(ref string) error {
			img, err := c.GetImage(cmd.Context(), ref)
			if err == nil {
				list = append(list, img)
			}
			return err
		})
		if err != nil {
			return err
		}
		return a.printImages(list, false, true)
	}
	return cmd
}

func (a *app) imagePruneCmd() *cobra.Command {
	var all, asJSON bool
	cmd := &cobra.Command{
		Use:   "prune [-a]",
		Short: "Remove images that nothing names, and what is over the disk budget; with -a all that no sandbox uses",
		Args:  exactly(),
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "all that no sandbox uses")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print what was freed as JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		freed, n, err := c.PruneImages(cmd.Context(), all)
		if err != nil {
			return err
		}
		if asJSON {
			return a.writeJSON(map[string]int64{"freed": freed, "removed": int64(n)})
		}
		return printed(a.Out, fmt.Sprintf("removed %d images, %s\n", n, bytesText(freed)))
	}
	return cmd
}
