package cli

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
)

// cleanupTimeout bounds what run does after its command, or after a signal.
const cleanupTimeout = 30 * time.Second

func (a *app) runCmd() *cobra.Command {
	var interactive, tty, detach, remove, asJSON bool
	cmd := &cobra.Command{
		Use:   "run [FLAGS] IMAGE [-- COMMAND [ARG...]]",
		Short: "Create a sandbox, run a command in it, pass its exit code on and remove it",
		Example: `  viv run base -- python3 -c 'print(6*7)'
  viv run -it base -- bash
  tar c . | viv run -i base -- tar t`,
		Args: atLeast("IMAGE"),
	}
	flags := addSpecFlags(cmd)
	cmd.Flags().SetInterspersed(false)
	cmd.Flags().BoolVarP(&interactive, "interactive", "i", false, "pass standard input on")
	cmd.Flags().BoolVarP(&tty, "tty", "t", false, "give the command a terminal")
	cmd.Flags().BoolVarP(&detach, "detach", "d", false, "print the id and leave it running")
	cmd.Flags().BoolVar(&remove, "rm", true, "remove it when it has ended (with -d the default is false)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "with -d: print the sandbox as JSON")
	cmd.ValidArgsFunction = a.completeImages
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		spec, err := flags.spec(a, args)
		if err != nil {
			return err
		}
		c, err := a.client()
		if err != nil {
			return failed(err)
		}
		defer c.Close()
		if detach {
			if interactive || tty {
				return usage("-d excludes -i and -t")
			}
			spec.Remove = cmd.Flags().Changed("rm") && remove
			sb, err := c.Create(cmd.Context(), spec, client.CreateOptions{Wait: true, Prove: flags.prove})
			if err != nil {
				return failed(err)
			}
			if asJSON {
				return a.printJSON(sb)
			}
			return printed(a.Out, sb.Id+"\n")
		}
		r := &runner{app: a, c: c, spec: spec, interactive: interactive, tty: tty, remove: remove, prove: flags.prove}
		return failed(r.run(cmd.Context()))
	}
	return cmd
}

// runner is one `viv run` in the foreground.
type runner struct {
	*app
	c                        *client.Client
	spec                     *v1.SandboxSpec
	interactive, tty, remove bool
	prove                    bool

	id      string
	running atomic.Bool
	signals atomic.Int32
}

// run does everything but tell the error. Whatever happens the sandbox is
// removed if that was asked for, and the terminal is what it was.
func (r *runner) run(ctx context.Context) (err error) {
	t := r.newTerminal()
	if r.tty {
		if r.interactive && t.in == nil {
			return sandbox.Invalid.Errorf("standard input is not a terminal").WithHint("leave out -t")
		}
		r.spec.Pty = true
		r.spec.PtyRows, r.spec.PtyCols = t.dimensions()
	}
	r.spec.Stdin = r.interactive
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	sb, err := r.c.Create(ctx, r.spec, client.CreateOptions{Prove: r.prove})
	if err != nil {
		return err
	}
	r.id = sb.Id
	if r.remove {
		defer func() { err = r.cleanup(err) }()
	}
	watchSignals(ctx, func(s syscall.Signal) { r.signal(ctx, cancel, s) })
	if _, err := r.c.Wait(ctx, r.id, "running", 0); err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		// It may have ended already, which is no failure of a short command.
		if err, over := r.ended(ctx, err); over {
			return err
		}
	}
	r.running.Store(true)
	defer t.restore()
	var terr error
	conv := &session{app: r.app, c: r.c, stdin: readerIf(r.interactive, r.In), tty: r.tty}
	e, err := conv.run(ctx, &v1.AttachRequest{SandboxId: r.id, Id: sandbox.MainExec}, func(*v1.Exec) {
		if r.tty {
			terr = t.raw()
			t.watchSize(ctx, func(rows, cols uint32) { _ = r.c.Resize(ctx, r.id, sandbox.MainExec, rows, cols) })
		}
	})
	t.restore()
	var ec *exitCode
	switch cause := context.Cause(ctx); {
	case cause != nil:
		return cause
	case errors.As(err, &ec):
		return err
	case err != nil:
		return r.why(ctx, err)
	case terr != nil:
		return sandbox.Internal.Errorf("set up the terminal: %w", terr)
	}
	return r.exit(ctx, e)
}

// signal passes a signal on. Before the command runs, and at the third, it
// ends everything.
func (r *runner) signal(ctx context.Context, cancel context.CancelCauseFunc, s syscall.Signal) {
	n := r.signals.Add(1)
	if !r.running.Load() || n >= 3 {
		cancel(&exitCode{code: 128 + int(s)})
		return
	}
	go func() { _ = r.c.Signal(ctx, r.id, sandbox.MainExec, int(s)) }()
}

// cleanup removes the sandbox; err is what run ended with.
func (r *runner) cleanup(err error) error {
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
	defer cancel()
	rerr := r.c.Remove(ctx, r.id, true)
	if rerr == nil || errors.Is(rerr, sandbox.NotFound) {
		return err
	}
	var ec *exitCode
	if err != nil && !(errors.As(err, &ec) && ec.err == nil) {
		return err // the first trouble is the one to tell
	}
	fmt.Fprintf(r.Err, "viv: remove sandbox %s: %s\n", r.id, clean(rerr.Error()))
	return err
}

// ended looks at a sandbox whose start was not seen: over is false if its main
// command did run, so that there is output to show.
func (r *runner) ended(ctx context.Context, err error) (error, bool) {
	sb, gerr := r.c.Get(ctx, r.id)
	if gerr != nil || sb.Death == nil {
		return err, true
	}
	d := sb.Death
	if d.HasExit && d.Exit.Error == "" {
		return nil, false
	}
	if d.HasExit && d.Exit.Code != 0 {
		return &exitCode{int(d.Exit.Code), sandbox.Kind(d.Exit.ErrorKind).Errorf("%s", d.Exit.Error)}, true
	}
	return err, true
}

// why replaces the error of a stream that broke off by the reason for which the
// sandbox ended.
func (r *runner) why(ctx context.Context, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	sb, gerr := r.c.Get(ctx, r.id)
	if gerr != nil || sb.Death == nil {
		return err
	}
	return deathError(sb.Death)
}

// exit turns the exec as it ended into the exit code.
func (r *runner) exit(ctx context.Context, e *v1.Exec) error {
	if e != nil && e.Exit != nil {
		return exitOf(e.Exit)
	}
	// It has no status: the sandbox ended around it. Its certificate may take a
	// moment.
	wctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	sb, err := r.c.Wait(wctx, r.id, "ended", 0)
	if err != nil || sb.Death == nil {
		return sandbox.Unavailable.Errorf("the command was lost: its exit status is unknown")
	}
	return deathError(sb.Death)
}

// exitOf is the error for a command that ended; nil for success.
func exitOf(x *v1.ExitStatus) error {
	switch {
	case x.Error != "":
		code := int(x.Code)
		if code == 0 {
			code = exitFailed
		}
		kind := sandbox.Kind(x.ErrorKind)
		if kind == "" {
			kind = sandbox.Invalid
		}
		return &exitCode{code, kind.Errorf("%s", x.Error)}
	case x.TimedOut:
		return &exitCode{124, sandbox.Timeout.Errorf("the command's timeout ended it")} // as timeout(1)
	case x.Code != 0:
		return &exitCode{code: int(x.Code)}
	}
	return nil
}

// deathError says why a sandbox ended under its command.
func deathError(d *v1.Death) error {
	if d.HasExit && d.Reason == string(sandbox.ReasonExited) {
		return exitOf(d.Exit)
	}
	msg := d.Message
	if msg == "" {
		msg = "reason " + d.Reason
	}
	kind := sandbox.Kind(d.ErrorKind)
	if kind == "" {
		kind = sandbox.Gone
	}
	code := exitFailed
	switch sandbox.Reason(d.Reason) {
	case sandbox.ReasonOOM:
		code = 137
		kind = sandbox.Exhausted
		if d.Message == "" {
			msg = fmt.Sprintf("out of memory (peak %s)", bytesText(d.PeakMemory))
		}
		if d.Hint == "" {
			d.Hint = "give it more with --memory"
		}
	case sandbox.ReasonDisk:
		code = 137
		kind = sandbox.Exhausted
	case sandbox.ReasonTimeout, sandbox.ReasonIdle:
		code = 124
		kind = sandbox.Timeout
	case sandbox.ReasonStopped, sandbox.ReasonKilled:
		code = 137
	}
	return &exitCode{code, kind.Errorf("the sandbox ended: %s", msg).WithHint("%s", d.Hint)}
}
