package cli

import (
	"io"
	"os"

	"github.com/spf13/cobra"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/cli/tree"
	"vivarium/sandbox"
)

func (a *app) loadCmd() *cobra.Command {
	first := &v1.LoadImageRequest{Config: &v1.ImageConfig{}}
	var asJSON, quiet bool
	var input string
	cmd := &cobra.Command{
		Use:   "load [FLAGS] [FILE|DIRECTORY]",
		Short: "Load images from an OCI layout, a docker save archive or a root filesystem tar",
		Long:  "Load images from an OCI layout (directory or tar), a `docker save` archive, or a tar of a root filesystem; compressed or not. Without FILE the archive is read from standard input.",
		Args:  cobra.MaximumNArgs(1),
	}
	fs := cmd.Flags()
	fs.StringVarP(&input, "input", "i", "", "the file, as docker load has it")
	fs.StringVar(&first.Tag, "tag", "", "name for the image")
	fs.StringVar(&first.Format, "format", "auto", "auto, oci, docker or rootfs")
	fs.StringArrayVar(&first.Config.Env, "env", nil, "rootfs: KEY=VALUE; may be repeated")
	fs.StringVar(&first.Config.WorkingDir, "workdir", "", "rootfs: working directory")
	fs.StringVar(&first.Config.User, "user", "", "rootfs: user")
	fs.StringArrayVar(&first.Config.Entrypoint, "entrypoint", nil, "rootfs: one argument of the entrypoint; may be repeated")
	fs.StringArrayVar(&first.Config.Cmd, "cmd", nil, "rootfs: one argument of the command; may be repeated")
	fs.BoolVarP(&quiet, "quiet", "q", false, "print only ids")
	fs.BoolVar(&asJSON, "json", false, "print the images as JSON")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 1 {
			if input != "" {
				return usage("FILE is given twice")
			}
			input = args[0]
		}
		r, total, err := a.openInput(input)
		if err != nil {
			return err
		}
		defer r.Close()
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		name := input
		if name == "" || name == "-" {
			name = "standard input"
		}
		p := a.newProgress(name)
		list, err := c.LoadImage(cmd.Context(), first, p.reader(r, "load", total))
		p.end(err)
		if err != nil {
			return err
		}
		return a.printImages(list, quiet, asJSON)
	}
	return cmd
}

// openInput opens a file, makes a tar of a directory, or takes standard input.
func (a *app) openInput(name string) (io.ReadCloser, int64, error) {
	if name == "" || name == "-" {
		if _, tty := terminal(a.In); tty {
			return nil, 0, sandbox.Invalid.Errorf("standard input is a terminal").WithHint("name a file, or pipe an archive in")
		}
		return io.NopCloser(a.In), 0, nil
	}
	fi, err := os.Stat(name)
	if err != nil {
		return nil, 0, sandbox.Invalid.Errorf("open archive: %w", err)
	}
	if fi.IsDir() {
		return tree.Pack(name, ".", false), 0, nil
	}
	f, err := os.Open(name)
	if err != nil {
		return nil, 0, sandbox.Invalid.Errorf("open archive: %w", err)
	}
	return f, fi.Size(), nil
}
