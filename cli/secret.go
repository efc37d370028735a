package cli

import (
	"bytes"
	"errors"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	v1 "vivarium/api/vivarium/v1"
)

// maxSecret bounds a value, in bytes.
const maxSecret = 64 << 10

func (a *app) secretCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "secret",
		Short: "Keep values that stay outside of sandboxes",
		Long:  "Keep values that stay outside of sandboxes. Inside there is a placeholder; the proxy puts the value into the headers of requests to the secret's hosts, and to no others.",
		Args:  cobra.NoArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.secretSetCmd(), a.secretListCmd(), a.secretRmCmd())
	return cmd
}

func (a *app) secretSetCmd() *cobra.Command {
	s := &v1.Secret{}
	var file string
	var plain, asJSON bool
	cmd := &cobra.Command{
		Use:   "set [FLAGS] NAME",
		Short: "Keep a value, read from standard input, or replace it",
		Long:  "Keep a value, read from standard input, or replace it. It is never an argument, for arguments are seen by everybody. One newline at its end is taken away. Sandboxes that use the secret get the new value with their next request.",
		Args:  exactly("NAME"),
	}
	cmd.Flags().StringArrayVar(&s.Hosts, "host", nil, "whom it may be sent to: example.com, *.example.com; may be repeated")
	cmd.Flags().StringVar(&s.Env, "env", "", "variable inside (default: the name)")
	cmd.Flags().StringVar(&s.Prefix, "prefix", "", "what the placeholder begins with, for programs that look at it, such as ghp_")
	cmd.Flags().BoolVar(&s.Query, "query", false, "also put it into the query of URLs")
	cmd.Flags().BoolVar(&plain, "plain", false, "not bound to a host: the value itself is in the environment inside")
	cmd.Flags().StringVar(&file, "file", "", "read the value from this file")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print what is kept as JSON, without the value")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		s.Name = args[0]
		if plain == (len(s.Hosts) > 0) {
			return usage("say --host for whom it is, or --plain to have the value itself inside")
		}
		value, err := a.readSecret(file)
		if err != nil {
			return err
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		kept, err := c.SetSecret(cmd.Context(), s, value)
		clear(value)
		if err != nil {
			return err
		}
		if asJSON {
			return a.printJSON(kept)
		}
		return printed(a.Out, kept.Name+"\n")
	}
	return cmd
}

func (a *app) readSecret(file string) ([]byte, error) {
	in := a.In
	switch {
	case file != "":
		f, err := os.Open(file)
		if err != nil {
			return nil, usage("--file: %w", err)
		}
		defer f.Close()
		in = f
	default:
		if f, ok := a.In.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
			if err := printed(a.Err, "value (not shown): "); err != nil {
				return nil, err
			}
			v, err := term.ReadPassword(int(f.Fd()))
			return v, errors.Join(err, printed(a.Err, "\n"))
		}
	}
	if in == nil {
		return nil, usage("no value: it is read from standard input")
	}
	v, err := io.ReadAll(io.LimitReader(in, maxSecret+2))
	if err != nil {
		return nil, usage("read the value: %w", err)
	}
	v = bytes.TrimSuffix(bytes.TrimSuffix(v, []byte("\n")), []byte("\r"))
	if len(v) == 0 || len(v) > maxSecret {
		return nil, usage("the value has %d bytes: want 1 to %d", len(v), maxSecret)
	}
	return v, nil
}

func (a *app) secretListCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ls",
		Short: "List secrets; their values are shown nowhere",
		Args:  exactly(),
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print them as JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		list, err := c.ListSecrets(cmd.Context())
		if err != nil {
			return err
		}
		if asJSON {
			return printList(a, list)
		}
		rows := make([][]string, len(list))
		for i, s := range list {
			hosts := strings.Join(s.Hosts, " ")
			if hosts == "" {
				hosts = "(in the environment)"
			}
			rows[i] = []string{s.Name, hosts, s.Env, ago(s.Updated)}
		}
		return a.table([]string{"NAME", "HOSTS", "VARIABLE", "AGE"}, rows)
	}
	return cmd
}

func (a *app) secretRmCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "rm NAME...",
		Short: "Forget secrets; their placeholders then go out as they are, and header rules with them fail",
		Args:  atLeast("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := a.client()
			if err != nil {
				return err
			}
			defer c.Close()
			return eachArg(args, func(name string) error {
				if err := c.RemoveSecret(cmd.Context(), name); err != nil {
					return err
				}
				return printed(a.Out, name+"\n")
			})
		},
	}
}
