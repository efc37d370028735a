package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"vivarium/assets"
	"vivarium/cgroup"
	"vivarium/network"
	"vivarium/runtime/gvisor"
	"vivarium/sandbox"
)

// lesser are findings about the network that leave sandboxes running.
var lesser = map[string]bool{"way out": true, "resolver": true, "other firewalls": true}

func (d *doctor) tryNetwork(ctx context.Context) {
	for _, f := range network.Check(ctx, d.Network) {
		if f.Name == "subnet" && f.OK && !d.Network.Subnet.IsValid() && inUse(d.DataDir) {
			f.Detail = "the daemon that is running has one"
		}
		s := Severity("")
		if !f.OK {
			s = Error
			if lesser[f.Name] {
				s = Warning
			}
		}
		d.found = append(d.found, Finding{Name: f.Name, OK: f.OK, Severity: s, Detail: f.Detail, Effect: f.Effect, Fix: f.Fix})
	}
}

// noSlots gives a machine a network namespace of its own, with nothing in it.
type noSlots struct{}

func (noSlots) Acquire(context.Context, string) (sandbox.Slot, error) { return sandbox.Slot{}, nil }
func (noSlots) Release(context.Context, string) error                 { return nil }

// tryBoot boots a machine and removes it: what all other checks are about.
func (d *doctor) tryBoot(ctx context.Context) {
	const name = "boot of a machine"
	at := ""
	for _, dir := range []string{d.DataDir, os.TempDir()} {
		if fi, err := os.Stat(dir); err == nil && fi.IsDir() && notTraversable(dir) == nil {
			at = dir
			break
		}
	}
	if at == "" {
		d.bad(Error, name, "not tried: there is no directory that everyone may pass through", "whether sandboxes start is unknown", "chmod o+x "+existing(d.DataDir))
		return
	}
	said := &tail{}
	usage, took, err := d.boot(ctx, at, slog.New(slog.NewTextHandler(said, &slog.HandlerOptions{Level: slog.LevelWarn})))
	if err != nil {
		detail := err.Error()
		if s := said.String(); s != "" {
			detail += "; it said: " + s
		}
		fix := sandbox.HintOf(err)
		if fix == "" {
			fix = "mend what is above; if nothing is, this is a defect: report it with the output of viv doctor --json"
		}
		d.bad(Error, name, detail, "sandboxes do not start", fix)
		return
	}
	d.ok(name, fmt.Sprintf("in %v below %s, %.1f MB", took.Round(time.Millisecond), at, float64(usage.Memory)/1e6))
}

func (d *doctor) boot(ctx context.Context, at string, log *slog.Logger) (usage sandbox.Usage, took time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, bootTimeout)
	defer cancel()
	dir, err := os.MkdirTemp(at, ".doctor")
	if err != nil {
		return usage, 0, sandbox.Internal.Errorf("make directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := os.Chmod(dir, 0o711); err != nil {
		return usage, 0, sandbox.Internal.Errorf("make directory: %w", err)
	}
	paths, err := assets.Install(filepath.Join(dir, "bin"))
	if err != nil {
		return usage, 0, err
	}
	parent, err := cgroup.OpenParent(fmt.Sprintf("/viv-doctor-%d", os.Getpid()), cgroup.Limits{})
	if err != nil {
		return usage, 0, err
	}
	defer func() { err = errors.Join(err, parent.Remove()) }()
	r, err := gvisor.Open(gvisor.Options{
		Dir: filepath.Join(dir, "m"), Sentry: paths.Sentry, Start: paths.Start, GuestImage: paths.GuestImage, PauseImage: paths.PauseImage,
		Slots: noSlots{}, Cgroups: parent, UIDs: gvisor.UIDs{First: d.FirstUID, Count: d.UIDs}, Logger: log,
	})
	if err != nil {
		return usage, 0, err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	start := time.Now()
	m, err := r.Boot(ctx, sandbox.BootSpec{Hostname: "doctor", Resources: sandbox.Resources{
		CPURequest: 100, CPULimit: 2000, MemoryRequest: 32 * mib, MemoryLimit: 256 * mib, Disk: 64 * mib, Pids: 64,
	}})
	if err != nil {
		return usage, 0, err
	}
	took = time.Since(start)
	usage, uerr := m.Usage()
	rctx, rcancel := context.WithTimeout(context.WithoutCancel(ctx), bootTimeout)
	defer rcancel()
	return usage, took, errors.Join(uerr, m.Remove(rctx))
}

// tail keeps the end of what is written to it, on one line.
type tail struct {
	mu sync.Mutex
	b  []byte
}

const maxTail = 2 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	if n := len(t.b) - maxTail; n > 0 {
		t.b = bytes.Clone(t.b[n:])
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.ReplaceAll(strings.TrimSpace(string(t.b)), "\n", " | ")
}
