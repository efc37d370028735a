package cli

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
)

func (a *app) execCmd() *cobra.Command {
	var interactive, tty, detach, asJSON bool
	var env []string
	var workdir, user, id string
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "exec [FLAGS] SANDBOX -- COMMAND [ARG...]",
		Short: "Run a command in a running sandbox and pass its exit code on",
		Long:  "Run a command in a running sandbox. The command does not depend on this process: with --id it can be found again, and `viv logs SANDBOX ID` shows its output.",
		Example: `  viv exec box -- apt-get install -y jq
  viv exec -it box -- bash`,
		Args: atLeast("SANDBOX"),
	}
	fs := cmd.Flags()
	fs.SetInterspersed(false)
	fs.BoolVarP(&interactive, "interactive", "i", false, "pass standard input on")
	fs.BoolVarP(&tty, "tty", "t", false, "give the command a terminal")
	fs.BoolVarP(&detach, "detach", "d", false, "print the exec's id and leave it running")
	fs.StringArrayVarP(&env, "env", "e", nil, "KEY=VALUE, or KEY to take it from here; may be repeated")
	fs.StringVarP(&workdir, "workdir", "w", "", "working directory")
	fs.StringVarP(&user, "user", "u", "", "name, uid, name:group or uid:gid")
	fs.DurationVar(&timeout, "timeout", 0, "kill its whole process tree after this time")
	fs.StringVar(&id, "id", "", "id of the exec; the same id again joins the same exec")
	fs.BoolVar(&asJSON, "json", false, "with -d: print the exec as JSON")
	cmd.ValidArgsFunction = a.completeSandboxes
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ref, argv, err := splitCommand(args)
		if err != nil {
			return err
		}
		if len(argv) == 0 {
			return usage("the command is missing: viv exec %s -- COMMAND", ref)
		}
		if timeout < 0 || cmd.Flags().Changed("timeout") && timeout == 0 {
			return usage("--timeout must be more than 0")
		}
		spec := &v1.ExecSpec{Argv: argv, Workdir: workdir, User: user}
		if spec.Env, err = keyValues("env", env, a.Getenv); err != nil {
			return err
		}
		if interactive {
			spec.Stdin = string(sandbox.StdinPipe)
		}
		if timeout > 0 {
			spec.Timeout = durationpb.New(timeout)
		}
		c, err := a.client()
		if err != nil {
			return failed(err)
		}
		defer c.Close()
		if detach {
			if tty {
				return usage("-d excludes -t")
			}
			e, err := c.StartExec(cmd.Context(), ref, id, spec)
			if err != nil {
				return failed(err)
			}
			if asJSON {
				return a.printJSON(e)
			}
			return printed(a.Out, e.Id+"\n")
		}
		return failed(a.exec(cmd.Context(), c, ref, id, spec, interactive, tty))
	}
	return cmd
}

func (a *app) exec(ctx context.Context, c *client.Client, ref, id string, spec *v1.ExecSpec, interactive, tty bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	t := a.newTerminal()
	if tty {
		if interactive && t.in == nil {
			return sandbox.Invalid.Errorf("standard input is not a terminal").WithHint("leave out -t")
		}
		rows, cols := t.dimensions()
		spec.Pty = &v1.WindowSize{Rows: rows, Cols: cols}
	}
	defer t.restore()
	var terr error
	var e *v1.Exec
	conv := &session{app: a, c: c, stdin: readerIf(interactive, a.In), tty: tty}
	end, err := conv.run(ctx, &v1.AttachRequest{SandboxId: ref, Id: id, Spec: spec}, func(x *v1.Exec) {
		e = x
		watchSignals(ctx, func(s syscall.Signal) { go func() { _ = c.Signal(ctx, x.SandboxId, x.Id, int(s)) }() })
		if tty {
			terr = t.raw()
			t.watchSize(ctx, func(rows, cols uint32) { _ = c.Resize(ctx, x.SandboxId, x.Id, rows, cols) })
		}
	})
	t.restore()
	var ec *exitCode
	switch {
	case errors.As(err, &ec): // nobody reads what it writes: it is told as in a pipe
		_ = c.Signal(ctx, e.SandboxId, e.Id, int(syscall.SIGPIPE))
		return err
	case err != nil:
		return err
	case terr != nil:
		return sandbox.Internal.Errorf("set up the terminal: %w", terr)
	case end.Exit == nil:
		return a.lost(c, e)
	}
	return exitOf(end.Exit)
}

// lost says why an exec has no status.
func (a *app) lost(c *client.Client, e *v1.Exec) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if sb, err := c.Get(ctx, e.SandboxId); err == nil && sb.Death != nil {
		d := sb.Death
		if d.Reason == string(sandbox.ReasonExited) { // of the main command, which is another one
			return sandbox.Gone.Errorf("the sandbox's main command ended, and this one with it")
		}
		return deathError(d)
	}
	return sandbox.Unavailable.Errorf("the command was lost: its exit status is unknown")
}
