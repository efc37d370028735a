package bench

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/oklog/ulid/v2"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
)

// RecoveryOptions say what Recovery works with.
type RecoveryOptions struct {
	Viv     string // program
	DataDir string // with the image in it, and no daemon on it
	Listen  string // host:port
	Image   string
	N       int // sandboxes that are alive
	Err     io.Writer
}

const (
	startTimeout = time.Minute
	stopTimeout  = time.Minute
)

// Recovery starts a daemon of its own, kills it with N sandboxes alive, starts
// it again and measures how long it takes from then until all of them answer an
// exec. It leaves neither sandboxes nor a daemon.
func Recovery(ctx context.Context, o RecoveryOptions) (_ *Result, err error) {
	if o.N < 1 || o.N > MaxN {
		return nil, sandbox.Invalid.Errorf("n of %d is not between 1 and %d", o.N, MaxN)
	}
	r := &run{
		Options: Options{Bench: "recovery", N: o.N, Runtime: sandbox.RuntimeGVisor, Image: o.Image, Server: "http://" + o.Listen, Err: o.Err},
		tag:     ulid.Make().String(),
	}
	r.res = newResult(r.Options)
	r.res.note("the daemon is killed (SIGKILL) and started again; value is the time from that start until all have run /bin/true")
	r.busy()
	d, err := startDaemon(o)
	if err != nil {
		return nil, err
	}
	defer func() {
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
		defer cancel()
		if r.c != nil {
			err = errors.Join(err, r.removeAll(cctx)) // connects anew after the restart
			r.c.Close()
		}
		err = errors.Join(err, d.stop())
	}()
	if err := r.reach(ctx, d, o.DataDir); err != nil {
		return nil, err
	}
	r.say("create %d sandboxes", r.N)
	ids := make([]string, r.N)
	if err := parallel(ctx, makers, r.N, func(ctx context.Context, i int) error {
		sb, err := r.c.Create(ctx, r.small(), client.CreateOptions{Wait: true})
		if err == nil {
			ids[i] = sb.Id
		}
		return err
	}); err != nil {
		return nil, err
	}
	if err := r.settle(ctx); err != nil {
		return nil, err
	}
	before, err := r.cpuOfAll(ctx, ids)
	if err != nil {
		return nil, err
	}
	r.say("kill the daemon and start it again")
	d.kill()
	r.c.Close()
	start := time.Now()
	again, err := startDaemon(o)
	if err != nil {
		return nil, err
	}
	d = again // for the cleanup
	if err := r.reach(ctx, d, o.DataDir); err != nil {
		return nil, err
	}
	r.res.detail("api_answers", time.Since(start).Seconds(), "s")
	took, _, err := r.execAll(ctx, ids)
	if err != nil {
		return nil, err
	}
	r.res.value(time.Since(start).Seconds(), "s")
	r.res.latency(took)
	if own, err := cpuTime(d.cmd.Process.Pid); err == nil {
		r.res.detail("daemon_cpu", own.Seconds(), "s")
	}
	after, err := r.cpuOfAll(ctx, ids)
	if err != nil {
		return nil, err
	}
	r.res.detail("sandboxes_cpu", (after - before).Seconds(), "s")
	list, err := r.c.List(ctx, &v1.ListSandboxesRequest{Tags: map[string]string{benchTag: r.tag}})
	if err != nil {
		return nil, err
	}
	if len(list) != r.N {
		return nil, sandbox.Internal.Errorf("%d of %d sandboxes are left after the restart", len(list), r.N)
	}
	return r.res, nil
}

// cpuOfAll is the CPU time that the sandboxes have used, as the daemon reads it
// from the host's cgroups.
func (r *run) cpuOfAll(ctx context.Context, ids []string) (time.Duration, error) {
	var sum atomic.Int64
	err := parallel(ctx, askers, len(ids), func(ctx context.Context, i int) error {
		sb, err := r.c.Get(ctx, ids[i])
		sum.Add(int64(sb.GetUsage().GetCpu().AsDuration()))
		return err
	})
	return time.Duration(sum.Load()), err
}

// reach connects once the daemon answers.
func (r *run) reach(ctx context.Context, d *daemonProcess, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	var last error
	for {
		if token, err := os.ReadFile(filepath.Join(dir, "token")); err == nil {
			c, err := client.New(r.Server, strings.TrimSpace(string(token)))
			if err != nil {
				return err
			}
			if r.info, last = c.Info(ctx); last == nil {
				r.c = c
				return nil
			}
			c.Close()
		}
		select {
		case err := <-d.ended:
			d.ended <- err
			return sandbox.Unavailable.Errorf("the daemon ended: %v: %s", err, d.said())
		case <-ctx.Done():
			return sandbox.Timeout.Errorf("the daemon does not answer: %v: %s", last, d.said())
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// daemonProcess is a daemon that this process started.
type daemonProcess struct {
	cmd   *exec.Cmd
	log   string
	ended chan error // has one value, put back by who takes it
}

func startDaemon(o RecoveryOptions) (*daemonProcess, error) {
	log, err := os.OpenFile(filepath.Join(o.DataDir, "bench.log"), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, sandbox.Internal.Errorf("start daemon: %w", err)
	}
	defer log.Close()
	d := &daemonProcess{cmd: exec.Command(o.Viv, "serve", "--data-dir", o.DataDir, "--listen", o.Listen), log: log.Name(), ended: make(chan error, 1)}
	d.cmd.Stdout, d.cmd.Stderr = log, log
	// a Ctrl-C is for us, who then stop it in order
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := d.cmd.Start(); err != nil {
		return nil, sandbox.Internal.Errorf("start daemon: %w", err)
	}
	go func() { d.ended <- d.cmd.Wait() }()
	return d, nil
}

func (d *daemonProcess) kill() {
	_ = d.cmd.Process.Kill()
	d.ended <- <-d.ended
}

func (d *daemonProcess) stop() error {
	_ = d.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	select {
	case err := <-d.ended:
		d.ended <- err
		return nil
	case <-time.After(stopTimeout):
		d.kill()
		return sandbox.Timeout.Errorf("the daemon did not stop in %v", stopTimeout)
	}
}

// said is the end of the daemon's log.
func (d *daemonProcess) said() string {
	b, err := os.ReadFile(d.log)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b[max(0, len(b)-maxSaid):]))
}
