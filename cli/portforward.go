package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"vivarium/client"
	"vivarium/sandbox"
)

func (a *app) portForwardCmd() *cobra.Command {
	var address string
	cmd := &cobra.Command{
		Use:     "port-forward [FLAGS] SANDBOX [LOCAL:]REMOTE...",
		Short:   "Make ports of a sandbox ports of this machine, until interrupted",
		Long:    "Make ports of a sandbox ports of this machine, until interrupted. They listen on loopback, and go through the API: no tunnel is needed, and nobody else is let in but users of this machine. LOCAL 0 is any free port.",
		Example: "  viv port-forward box 8080\n  viv port-forward box 9000:80 0:5432",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) < 2 {
				return usage("%s takes SANDBOX and at least one [LOCAL:]REMOTE", cmd.CommandPath())
			}
			return nil
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			return a.completeSandboxes(cmd, args, prefix)
		},
	}
	cmd.Flags().StringVar(&address, "address", "127.0.0.1", "to listen on; others than loopback let in whoever reaches them")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		var all []forward
		for _, arg := range args[1:] {
			f, err := parseForward(arg)
			if err != nil {
				return err
			}
			all = append(all, f)
		}
		if net.ParseIP(address) == nil {
			return usage("--address: %q is not an address", address)
		}
		c, err := a.client()
		if err != nil {
			return err
		}
		defer c.Close()
		ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		return a.portForward(ctx, c, args[0], address, all)
	}
	return cmd
}

type forward struct{ local, remote uint16 }

func parseForward(s string) (forward, error) {
	l, r, ok := strings.Cut(s, ":")
	if !ok {
		r = l
	}
	remote, err := strconv.ParseUint(r, 10, 16)
	if err != nil || remote == 0 {
		return forward{}, usage("%q is not [LOCAL:]REMOTE, such as 8080 or 9000:80", s)
	}
	local, err := strconv.ParseUint(l, 10, 16)
	if err != nil {
		return forward{}, usage("%q is not [LOCAL:]REMOTE, such as 8080 or 9000:80", s)
	}
	return forward{uint16(local), uint16(remote)}, nil
}

// portForward listens until ctx ends, or the sandbox does.
func (a *app) portForward(ctx context.Context, c *client.Client, ref, address string, all []forward) error {
	sb, err := c.Get(ctx, ref)
	if err != nil {
		return err
	}
	if sb.Death != nil {
		return sandbox.Gone.Errorf("sandbox %s has ended", sb.Id)
	}
	var lns []net.Listener
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancelCause(ctx)
	defer wg.Wait()
	defer func() {
		cancel(nil)
		for _, l := range lns {
			_ = l.Close() // nothing waits for it
		}
	}()
	for _, f := range all {
		l, err := net.Listen("tcp", net.JoinHostPort(address, strconv.Itoa(int(f.local))))
		if err != nil {
			return sandbox.Conflict.Errorf("listen: %w", err).WithHint("choose another local port: LOCAL:REMOTE, with LOCAL 0 for any that is free")
		}
		lns = append(lns, l)
		if err := printed(a.Out, fmt.Sprintf("%s -> %d\n", l.Addr(), f.remote)); err != nil {
			return err
		}
	}
	for i, f := range all {
		wg.Go(func() { a.forward(ctx, c, sb.Id, lns[i], f.remote, cancel) })
	}
	wg.Go(func() {
		for ctx.Err() == nil {
			sb, err := c.Wait(ctx, sb.Id, "ended", 0)
			switch {
			case err == nil && sb.Death != nil:
				cancel(sandbox.Gone.Errorf("sandbox %s has ended: %s", sb.Id, clean(sb.Death.Reason)))
			case errors.Is(err, sandbox.Gone), errors.Is(err, sandbox.NotFound):
				cancel(err)
			default: // the daemon may be back soon
				select {
				case <-time.After(time.Second):
				case <-ctx.Done():
				}
			}
		}
	})
	<-ctx.Done()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

func (a *app) forward(ctx context.Context, c *client.Client, id string, l net.Listener, port uint16, stop func(error)) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		local, err := l.Accept()
		if err != nil {
			if ctx.Err() == nil {
				stop(sandbox.Internal.Errorf("accept: %w", err))
			}
			return
		}
		wg.Go(func() {
			defer local.Close()
			defer context.AfterFunc(ctx, func() { local.Close() })()
			inside, err := c.Dial(ctx, id, port)
			if err != nil {
				if errors.Is(err, sandbox.Gone) || errors.Is(err, sandbox.NotFound) {
					stop(err)
				} else if ctx.Err() == nil {
					_ = printed(a.Err, "viv: "+clean(err.Error())+"\n") // the next one may work
				}
				return
			}
			defer inside.Close()
			defer context.AfterFunc(ctx, func() { inside.Close() })()
			both(local, inside)
		})
	}
}

// both passes bytes each way. The end of what one side sends is passed on; when
// one breaks, both are cut.
func both(x, y net.Conn) {
	var wg sync.WaitGroup
	one := func(to, from net.Conn) {
		_, err := io.Copy(to, from)
		w, ok := to.(interface{ CloseWrite() error })
		if err != nil || !ok || w.CloseWrite() != nil {
			_ = to.Close()
			_ = from.Close()
		}
	}
	wg.Go(func() { one(x, y) })
	wg.Go(func() { one(y, x) })
	wg.Wait()
}
