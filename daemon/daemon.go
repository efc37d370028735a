// Package daemon puts the parts of `viv serve` together: it locks the data
// directory, opens the sockets, builds the engine and what it stands on, makes
// the first token, and serves until its context ends. Sandboxes go on running
// then.
package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"vivarium/config"
	"vivarium/sandbox"
	"vivarium/server"
	"vivarium/server/native"
)

// closeTimeout bounds how long the parts may take to close.
const closeTimeout = 20 * time.Second

// parts are what the front door is served from.
type parts struct {
	engine     native.Engine
	images     native.Images
	imageInUse func(id string) bool
	buildBase  native.BuildBase
	secrets    native.Secrets
	tunnels    native.Tunnels
	tokens     server.TokenStore
	// close stops what was built, in reverse order, and leaves sandboxes
	// running. May be nil.
	close func(ctx context.Context) error
}

// builder makes the parts.
type builder func(ctx context.Context, cfg *config.Config, log *slog.Logger) (*parts, error)

// Run serves until ctx ends. Its errors are those of a start that failed; a
// stop is no error.
func Run(ctx context.Context, cfg *config.Config) error {
	// of a root whose umask is tight, the sentries could not start their program;
	// what is private has a mode that says so
	unix.Umask(0o022)
	log := newLogger(cfg.Log, os.Stderr)
	slog.SetDefault(log)
	return run(ctx, cfg, log, build, nil)
}

// run is Run with the parts and a hook for tests, which is called once the
// daemon answers.
func run(ctx context.Context, cfg *config.Config, log *slog.Logger, build builder, ready func([]net.Addr)) (err error) {
	// passable, not readable, for others: the sentries, which are nobody, start
	// their program from below it; all else in it is for root only
	if err := os.MkdirAll(cfg.DataDir, 0o711); err != nil {
		return sandbox.Invalid.Errorf("make data directory: %w", err)
	}
	lock, err := lockDir(cfg.DataDir)
	if err != nil {
		return err
	}
	defer lock.Close()
	// Before the parts are built, which takes time after a crash: clients that
	// come meanwhile wait instead of being refused.
	srv, err := server.Listen(server.Options{
		Listen: cfg.Listen, Public: cfg.ListenPublic, UnixSocket: cfg.UnixSocket, Log: log,
	})
	if err != nil {
		return err
	}
	defer srv.Close()
	p, err := build(ctx, cfg, log)
	if err != nil {
		return err
	}
	defer func() {
		if p.close == nil {
			return
		}
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		err = errors.Join(err, p.close(cctx))
	}()
	tokens := server.NewTokens(p.tokens)
	if err := firstToken(ctx, filepath.Join(cfg.DataDir, "token"), tokens); err != nil {
		return err
	}
	native.Register(srv, native.Backend{
		Engine: p.engine, Images: p.images, Tokens: tokens, ImageInUse: p.imageInUse, Secrets: p.secrets, Tunnels: p.tunnels, BuildBase: p.buildBase,
	}, &server.Interceptor{Tokens: tokens, Log: log})
	for _, a := range srv.Addrs() {
		log.Info("listening", "network", a.Network(), "address", a.String())
	}
	_, _ = sd.SdNotify(false, sd.SdNotifyReady) // no systemd is fine
	if ready != nil {
		ready(srv.Addrs())
	}
	err = srv.Serve(ctx)
	_, _ = sd.SdNotify(false, sd.SdNotifyStopping)
	log.Info("stopped; sandboxes go on running")
	return err
}

// lockDir sees to it that one daemon has a data directory.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, sandbox.Invalid.Errorf("lock data directory: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, sandbox.Conflict.Errorf("another daemon has the data directory %s", dir).
			WithHint("stop it first, or use another --data-dir")
	}
	return f, nil
}
