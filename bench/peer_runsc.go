package bench

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"vivarium/sandbox"
)

// runscPeer is `runsc run` of the same gVisor, as a container engine would call
// it: root, its own platform and file system defaults.
type runscPeer struct {
	bin, dir, rootfs string
	n                int
	kept             string
	network          string // as its flag has it; "" is none
	netns            string // "" is one of its own
}

func (p *runscPeer) args(verb string, rest ...string) []string {
	network := p.network
	if network == "" {
		network = "none"
	}
	return append([]string{"--root", filepath.Join(p.dir, "state"), "--network=" + network, verb}, rest...)
}

// bundle writes the config of a container that runs argv.
func (p *runscPeer) bundle(name string, argv []string) (string, error) {
	dir := filepath.Join(p.dir, name)
	if _, err := os.Stat(filepath.Join(dir, "config.json")); err == nil {
		return dir, nil
	}
	// Docker's default capabilities
	caps := []string{
		"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
		"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
	}
	spec := specs.Spec{
		Version:  "1.2.1",
		Hostname: "peer",
		Root:     &specs.Root{Path: p.rootfs},
		Process: &specs.Process{
			Args: argv, Cwd: "/", Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
			Capabilities: &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps},
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"ro"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs"},
		},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{{Type: "pid"}, {Type: "ipc"}, {Type: "uts"}, {Type: "mount"}, {Type: "network", Path: p.netns}},
		},
	}
	raw, err := json.Marshal(spec)
	if err != nil {
		return "", sandbox.Internal.Errorf("encode config: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", sandbox.Internal.Errorf("make bundle: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), raw, 0o644); err != nil {
		return "", sandbox.Internal.Errorf("write config: %w", err)
	}
	return dir, nil
}

func (p *runscPeer) run(ctx context.Context) (time.Duration, error) {
	b, err := p.bundle("hello", hello)
	if err != nil {
		return 0, err
	}
	p.n++
	return greeting(timed(ctx, p.bin, p.args("run", "--bundle", b, p.id())...))
}

// id is unique among all that may run on this machine.
func (p *runscPeer) id() string {
	return "viv-bench-" + strconv.Itoa(os.Getpid()) + "-" + strconv.Itoa(p.n)
}

func (p *runscPeer) keep(ctx context.Context) error {
	b, err := p.bundle("keep", []string{"/bin/sleep", "86400"})
	if err != nil {
		return err
	}
	p.n++
	p.kept = p.id()
	return detached(ctx, p.bin, p.args("run", "--detach", "--bundle", b, p.kept)...)
}

func (p *runscPeer) exec(ctx context.Context) (time.Duration, error) {
	return done(timed(ctx, p.bin, p.args("exec", p.kept, nothing[0])...))
}

func (p *runscPeer) close(ctx context.Context) error {
	if p.kept == "" {
		return nil
	}
	return detached(ctx, p.bin, p.args("delete", "--force", p.kept)...)
}
