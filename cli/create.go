package cli

import (
	"github.com/spf13/cobra"

	"vivarium/client"
)

func (a *app) createCmd() *cobra.Command {
	var o client.CreateOptions
	var wait, asJSON, stdin, remove bool
	cmd := &cobra.Command{
		Use:   "create [FLAGS] IMAGE [-- COMMAND [ARG...]]",
		Short: "Create a sandbox and print its id",
		Long:  "Create a sandbox and print its id. Without a command it lives until it is stopped or its timeout ends it, and `viv exec` runs commands in it.",
		Args:  atLeast("IMAGE"),
	}
	flags := addSpecFlags(cmd)
	var imageCommand bool
	cmd.Flags().SetInterspersed(false)
	cmd.Flags().StringVar(&o.IdempotencyKey, "idempotency-key", "", "the same key again gives the same sandbox")
	cmd.Flags().BoolVar(&wait, "wait", true, "return when it runs, not when it is queued")
	cmd.Flags().BoolVar(&o.WaitReady, "wait-ready", false, "return when its probe has passed")
	cmd.Flags().BoolVar(&imageCommand, "image-command", false, "run the image's own command")
	cmd.Flags().BoolVarP(&stdin, "interactive", "i", false, "the main command has a standard input")
	cmd.Flags().BoolVar(&remove, "rm", false, "remove it when it has ended")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the sandbox as JSON")
	cmd.ValidArgsFunction = a.completeImages
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		spec, err := flags.spec(a, args)
		if err != nil {
			return err
		}
		spec.RunImageCommand = imageCommand
		spec.Stdin, spec.Remove = stdin, remove
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		o.Wait, o.Prove = wait, flags.prove
		sb, err := c.Create(cmd.Context(), spec, o)
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(sb)
		}
		return printed(a.Out, sb.Id+"\n")
	}
	return cmd
}
