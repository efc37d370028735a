// Package cli is the command line, one file per verb. Verbs talk to a daemon
// through package client; the daemon that serve runs is given by the caller in
// Hooks, so that tests need no more than the verbs.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/config"
	"vivarium/sandbox"
)

// Hooks are what the caller gives.
type Hooks struct {
	Serve func(ctx context.Context, cfg *config.Config) error
	// ResetSecrets deletes all secrets of a data directory that no daemon uses.
	ResetSecrets func(ctx context.Context, cfg *config.Config) error
	Version      string
	// GVisorVersion is that of the library inside.
	GVisorVersion string
}

// Streams are what a command reads and writes. A terminal is recognised by
// being an *os.File.
type Streams struct {
	In     io.Reader
	Out    io.Writer
	Err    io.Writer
	Getenv func(string) string
	// Environ is the whole environment, for the config of serve.
	Environ []string
}

// DefaultDataDir is where the daemon keeps its data unless told otherwise.
const DefaultDataDir = "/var/lib/vivarium"

// Exit codes of run and exec for what is not the command's own; as docker has
// them.
const (
	exitError   = 1
	exitUsage   = 2
	exitFailed  = 125 // the sandbox or the daemon failed
	exitNotExec = 126 // the command cannot be executed
	exitMissing = 127 // the command does not exist
)

// exitCode ends the process with a code. With err it is told as well.
type exitCode struct {
	code int
	err  error
}

func (e *exitCode) Error() string {
	if e.err != nil {
		return e.err.Error()
	}
	return fmt.Sprintf("exit code %d", e.code)
}

func (e *exitCode) Unwrap() error { return e.err }

// failed is an error of run or exec that is not the command's.
func failed(err error) error {
	if err == nil {
		return nil
	}
	var ec *exitCode
	if errors.As(err, &ec) {
		return err
	}
	return &exitCode{exitFailed, err}
}

type app struct {
	Streams
	hooks   Hooks
	server  string
	token   string
	dataDir string
}

// New makes the command tree.
func New(s Streams, h Hooks) *cobra.Command {
	if s.Getenv == nil {
		s.Getenv = func(string) string { return "" }
	}
	a := &app{Streams: s, hooks: h}
	root := &cobra.Command{
		Use:           "viv",
		Short:         "Give every agent a computer of its own",
		Long:          "viv starts isolated sandboxes, runs commands in them and moves files in and out.\nA daemon does the work: `viv serve` starts it.",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetIn(s.In)
	root.SetOut(s.Out)
	root.SetErr(s.Err)
	root.CompletionOptions.DisableDefaultCmd = true
	root.PersistentFlags().StringVar(&a.server, "server", "", "address of the daemon: http://HOST:PORT or unix:///PATH (VIV_SERVER)")
	root.PersistentFlags().StringVar(&a.token, "token", "", "token to call it with (VIV_TOKEN)")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &exitCode{exitUsage, err} })
	root.AddCommand(
		a.serveCmd(), a.runCmd(), a.createCmd(), a.execCmd(), a.psCmd(), a.inspectCmd(), a.logsCmd(), a.cpCmd(),
		a.stopCmd(), a.rmCmd(), a.extendCmd(), a.eventsCmd(), a.waitCmd(), a.imagesCmd(), a.pullCmd(), a.loadCmd(),
		a.imageCmd(), a.networkCmd(), a.secretCmd(), a.tunnelCmd(), a.portForwardCmd(), a.doctorCmd(), a.benchCmd(), a.tokenCmd(), a.versionCmd(), a.completionCmd(),
	)
	return root
}

// Run runs one command line and returns the exit code.
func Run(ctx context.Context, args []string, s Streams, h Hooks) int {
	root := New(s, h)
	root.SetArgs(args)
	return Report(s.Err, root.ExecuteContext(ctx))
}

// Report tells an error on w and returns the exit code for it.
func Report(w io.Writer, err error) int {
	if err == nil {
		return 0
	}
	var ec *exitCode
	code := exitError
	if errors.As(err, &ec) {
		code = ec.code
		if ec.err == nil {
			return code
		}
		err = ec.err
	}
	for i, line := range strings.Split(strings.TrimSpace(err.Error()), "\n") {
		if i == 0 {
			line = "viv: " + line
		}
		fmt.Fprintln(w, clean(line))
	}
	if h := sandbox.HintOf(err); h != "" {
		fmt.Fprintln(w, "  "+clean(h))
	}
	return code
}

func (a *app) dir() string {
	if a.dataDir != "" {
		return a.dataDir
	}
	if d := a.Getenv("VIV_DATA_DIR"); d != "" {
		return d
	}
	return DefaultDataDir
}

// address finds the daemon: the flag, VIV_SERVER, its unix socket if that may
// be used, else the default port.
func (a *app) address() string {
	if a.server != "" {
		return a.server
	}
	if s := a.Getenv("VIV_SERVER"); s != "" {
		return s
	}
	sock := a.dir() + "/viv.sock"
	if fi, err := os.Stat(sock); err == nil && fi.Mode().Type() == os.ModeSocket {
		return "unix://" + sock
	}
	return "http://127.0.0.1:7878"
}

// secret finds the token: the flag, VIV_TOKEN, else the daemon's own file where
// this user may read it.
func (a *app) secret() string {
	if a.token != "" {
		return a.token
	}
	if s := a.Getenv("VIV_TOKEN"); s != "" {
		return s
	}
	f, err := os.Open(a.dir() + "/token")
	if err != nil {
		return ""
	}
	defer f.Close()
	b, _ := io.ReadAll(io.LimitReader(f, 256))
	return strings.TrimSpace(string(b))
}

// client returns a client of the daemon.
func (a *app) client() (*client.Client, error) { return client.New(a.address(), a.secret()) }

// usage is an error in how a command was called.
func usage(format string, args ...any) *exitCode {
	return &exitCode{exitUsage, sandbox.Invalid.Errorf(format, args...)}
}

// exactly and atLeast are cobra's checks with words for the arguments.
func exactly(words ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) != len(words) {
			return usage("%s takes %s", cmd.CommandPath(), strings.Join(words, " "))
		}
		return nil
	}
}

func atLeast(word string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return usage("%s takes at least one %s", cmd.CommandPath(), word)
		}
		return nil
	}
}

// each calls fn for every argument and goes on after an error.
func eachArg(args []string, fn func(string) error) error {
	var errs []error
	for _, arg := range args {
		if err := fn(arg); err != nil {
			if len(args) > 1 {
				err = &sandbox.Error{Kind: sandbox.KindOf(err), Msg: arg, Err: err}
			}
			errs = append(errs, err)
		}
	}
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

// named calls fn with a sandbox's id or name. A name is that of a living one;
// where there is none, the one that had it last and was not removed is meant.
func named(ctx context.Context, c *client.Client, ref string, fn func(ref string) error) error {
	err := fn(ref)
	if !errors.Is(err, sandbox.NotFound) {
		return err
	}
	if _, gerr := c.Get(ctx, ref); !errors.Is(gerr, sandbox.NotFound) {
		return err
	}
	list, lerr := c.List(ctx, &v1.ListSandboxesRequest{Name: ref, Ended: true})
	if lerr != nil {
		return err
	}
	for _, sb := range slices.Backward(list) {
		if !sb.Removed {
			return fn(sb.Id)
		}
	}
	return err
}
