package bench

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"vivarium/sandbox"
)

// podmanPeer is `podman --runtime runsc run --rm` on the root filesystem as it
// is, which spares it the making of a layer.
type podmanPeer struct {
	bin, runsc, dir, rootfs string
	kept                    string
}

func (p *podmanPeer) args(verb string, rest ...string) []string {
	// storage of its own, so that nothing of the user's is touched; limits are
	// left as they are, since they cannot be raised on every host
	return append([]string{
		"--root", filepath.Join(p.dir, "storage"), "--runroot", filepath.Join(p.dir, "run"), "--tmpdir", filepath.Join(p.dir, "tmp"),
		"--cgroup-manager", "cgroupfs", "--events-backend", "none", "--runtime", p.runsc, "--runtime-flag", "root=" + filepath.Join(p.dir, "runsc"), verb,
	}, rest...)
}

func (p *podmanPeer) run(ctx context.Context) (time.Duration, error) {
	return greeting(timed(ctx, p.bin, p.args("run", "--rm", "--network", "none", "--ulimit", "host", "--rootfs", p.rootfs, hello[0], hello[1])...))
}

func (p *podmanPeer) keep(ctx context.Context) error {
	p.kept = "viv-bench-" + strconv.Itoa(os.Getpid())
	return detached(ctx, p.bin, p.args("run", "--detach", "--name", p.kept, "--network", "none", "--ulimit", "host", "--rootfs", p.rootfs, "/bin/sleep", "86400")...)
}

func (p *podmanPeer) exec(ctx context.Context) (time.Duration, error) {
	return done(timed(ctx, p.bin, p.args("exec", p.kept, nothing[0])...))
}

func (p *podmanPeer) close(ctx context.Context) error {
	if p.kept == "" {
		return nil
	}
	return detached(ctx, p.bin, p.args("rm", "--force", "--time", "0", p.kept)...)
}

// bwrapPeer is what the host itself needs: namespaces and no more.
type bwrapPeer struct{ bin, rootfs string }

func (p *bwrapPeer) run(ctx context.Context) (time.Duration, error) {
	return greeting(timed(ctx, p.bin, "--unshare-all", "--die-with-parent", "--bind", p.rootfs, "/", "--proc", "/proc", "--dev", "/dev", hello[0], hello[1]))
}

func (*bwrapPeer) keep(context.Context) error { return failing("bwrap keeps no container") }
func (*bwrapPeer) exec(context.Context) (time.Duration, error) {
	return 0, failing("bwrap has no exec")
}
func (*bwrapPeer) close(context.Context) error { return nil }

// detached runs a command whose children may outlive it: what it says goes to a
// file, since a pipe would stay open as long as they live.
func detached(ctx context.Context, bin string, args ...string) error {
	f, err := os.CreateTemp("", "viv-bench-out-")
	if err != nil {
		return sandbox.Internal.Errorf("run %s: %w", bin, err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	cmd, cancel := command(ctx, bin, args...)
	defer cancel()
	cmd.Stdout, cmd.Stderr = f, f
	if err := cmd.Run(); err != nil {
		said := make([]byte, maxSaid)
		n, _ := f.ReadAt(said, 0)
		return sandbox.Internal.Errorf("run %s %s: %w: %s", filepath.Base(bin), args, err, said[:n])
	}
	return nil
}
