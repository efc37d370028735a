package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// Peers are what a daemon can be compared with.
var Peers = []string{"runsc", "podman", "bwrap"}

// peersOf says which peers do what a bench measures; bwrap has no exec.
var peersOf = map[string][]string{"tti": Peers, "exec": {"runsc", "podman"}, "net": {"runsc"}}

// peer runs commands in its own way, on the same root filesystem, without a
// network (which makes it quicker).
type peer interface {
	// run runs hello from nothing and returns the time to its first output. It
	// returns when everything of it is gone.
	run(ctx context.Context) (time.Duration, error)
	// keep starts a container that stays until close.
	keep(ctx context.Context) error
	// exec runs nothing in it and returns the time until its status was known.
	exec(ctx context.Context) (time.Duration, error)
	close(ctx context.Context) error
}

// samples by peer.
type samples map[string][]time.Duration

// peerSet are the peers of one run, in the order they run in.
type peerSet struct {
	dir   string
	names []string
	by    map[string]peer
	say   func(format string, args ...any)
}

// openPeers finds the peers that are installed, names the others as missing and
// gives those found the image's root filesystem.
func (r *run) openPeers(ctx context.Context) (_ *peerSet, err error) {
	s := &peerSet{by: map[string]peer{}, say: r.say}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if len(r.Peers) == 0 {
		return s, nil
	}
	if !local(ctx, r.Server) {
		for _, p := range r.Peers {
			r.res.Missing[p] = "the daemon is on another machine"
		}
		return s, nil
	}
	if os.Geteuid() != 0 {
		for _, p := range r.Peers {
			r.res.Missing[p] = "it would run without root's rights: run the bench as root"
		}
		return s, nil
	}
	if s.dir, err = os.MkdirTemp("", "viv-bench-"); err != nil {
		return nil, sandbox.Internal.Errorf("make directory for peers: %w", err)
	}
	if err := os.Chmod(s.dir, 0o711); err != nil { // runsc's own processes are nobody's
		return nil, sandbox.Internal.Errorf("make directory for peers: %w", err)
	}
	rootfs := filepath.Join(s.dir, "rootfs")
	for _, name := range r.Peers {
		p, why, err := r.newPeer(ctx, name, filepath.Join(s.dir, name), rootfs)
		if err != nil {
			return nil, err
		}
		if p == nil {
			r.res.Missing[name] = why
			continue
		}
		s.names = append(s.names, name)
		s.by[name] = p
	}
	if len(s.names) == 0 {
		return s, nil
	}
	r.say("unpack the image's root filesystem for %s", strings.Join(s.names, ", "))
	if err := r.unpack(ctx, rootfs); err != nil {
		return nil, err
	}
	r.res.note("peers have the same root filesystem, as a directory that they write to, and no network")
	return s, nil
}

// newPeer returns nil and the reason where the peer is not installed.
func (r *run) newPeer(ctx context.Context, name, dir, rootfs string) (peer, string, error) {
	bin, why := find(name)
	if why != "" {
		return nil, why, nil
	}
	if err := os.Mkdir(dir, 0o711); err != nil {
		return nil, "", sandbox.Internal.Errorf("make directory of %s: %w", name, err)
	}
	switch name {
	case "runsc":
		if why := r.sameVersion(ctx, bin); why != "" {
			return nil, why, nil
		}
		return &runscPeer{bin: bin, dir: dir, rootfs: rootfs}, "", nil
	case "podman":
		// the same runsc below it
		rs, why := find("runsc")
		if why == "" {
			why = r.sameVersion(ctx, rs)
		}
		if why != "" {
			return nil, "podman would need runsc: " + why, nil
		}
		return &podmanPeer{bin: bin, runsc: rs, dir: dir, rootfs: rootfs}, "", nil
	default:
		return &bwrapPeer{bin: bin, rootfs: rootfs}, "", nil
	}
}

// find looks beside this program first, where bench/peers.sh puts runsc.
func find(name string) (path, why string) {
	if self, err := os.Executable(); err == nil {
		p := filepath.Join(filepath.Dir(self), name)
		if fi, err := os.Stat(p); err == nil && fi.Mode().IsRegular() && fi.Mode().Perm()&0o111 != 0 {
			return p, ""
		}
	}
	p, err := exec.LookPath(name)
	if err != nil {
		return "", "not installed: bench/peers.sh does it"
	}
	if p, err = filepath.Abs(p); err != nil {
		return "", err.Error()
	}
	return p, ""
}

// sameVersion says why runsc is not of the daemon's gVisor version.
func (r *run) sameVersion(ctx context.Context, runsc string) string {
	out, err := exec.CommandContext(ctx, runsc, "--version").Output()
	if err != nil {
		return "ask its version: " + err.Error()
	}
	first, _, _ := strings.Cut(string(out), "\n")
	if want := r.info.GvisorVersion; want == "" || !strings.Contains(first, want) {
		return fmt.Sprintf("%s is %q, the daemon has gVisor %s inside: bench/peers.sh builds that one", runsc, first, want)
	}
	return ""
}

// each runs fn on every peer and keeps the time it took, unless into is nil.
func (s *peerSet) each(ctx context.Context, fn func(peer, context.Context) (time.Duration, error), into samples) error {
	for _, name := range s.names {
		d, err := fn(s.by[name], ctx)
		if err != nil {
			return fmt.Errorf("peer %s: %w", name, err)
		}
		if into != nil {
			into[name] = append(into[name], d)
		}
	}
	return nil
}

// close removes what the peers have. What could not be removed is told on the
// error stream: it does not make the measurement wrong.
func (s *peerSet) close() {
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
	defer cancel()
	for _, name := range s.names {
		if err := s.by[name].close(ctx); err != nil {
			s.say("clean up after %s: %v", name, err)
		}
	}
	if s.dir == "" {
		return
	}
	// runsc keeps an empty network namespace mounted for its next run, podman its
	// storage if it was interrupted
	if err := unmountBelow(s.dir); err != nil {
		s.say("unmount what the peers used: %v", err)
	}
	if err := os.RemoveAll(s.dir); err != nil {
		s.say("remove what the peers used: %v", err)
	}
}

// unmountBelow unmounts everything below a directory, the last first.
func unmountBelow(dir string) error {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return err
	}
	var errs []error
	lines := strings.Split(string(b), "\n")
	for _, line := range slices.Backward(lines) {
		f := strings.Fields(line)
		if len(f) > 1 && strings.HasPrefix(f[1], dir+"/") {
			if err := unix.Unmount(f[1], unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", f[1], err))
			}
		}
	}
	return errors.Join(errs...)
}

// command is one that ends by itself in a moment: it is not interrupted with
// the bench, since what it had begun would stay behind.
func command(ctx context.Context, bin string, args ...string) (*exec.Cmd, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commandTimeout)
	cmd := exec.CommandContext(ctx, bin, args...)
	cmd.WaitDelay = 5 * time.Second
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // nor by a Ctrl-C
	return cmd, cancel
}

// commandTimeout bounds one command of a peer.
const commandTimeout = time.Minute

// maxSaid bounds what of a peer's complaints is kept.
const maxSaid = 4 << 10

// timed runs a command and returns when its first byte of output came and when
// it had ended, since its start, and all it wrote.
func timed(ctx context.Context, bin string, args ...string) (first, whole time.Duration, out []byte, err error) {
	if err := ctx.Err(); err != nil {
		return 0, 0, nil, err
	}
	cmd, cancel := command(ctx, bin, args...)
	defer cancel()
	said := &head{}
	cmd.Stderr = said
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return 0, 0, nil, sandbox.Internal.Errorf("run %s: %w", bin, err)
	}
	start := time.Now()
	if err := cmd.Start(); err != nil {
		return 0, 0, nil, sandbox.Internal.Errorf("run %s: %w", bin, err)
	}
	one := make([]byte, 1)
	_, rerr := io.ReadFull(pipe, one)
	first = time.Since(start)
	rest, _ := io.ReadAll(io.LimitReader(pipe, maxSaid))
	err = cmd.Wait()
	whole = time.Since(start)
	if err != nil {
		return 0, 0, nil, sandbox.Internal.Errorf("run %s %s: %w: %s", filepath.Base(bin), strings.Join(args, " "), err, said)
	}
	if rerr == nil {
		out = append(one, rest...)
	}
	return first, whole, out, nil
}

// greeting expects what hello writes.
func greeting(first, _ time.Duration, out []byte, err error) (time.Duration, error) {
	if err == nil && string(bytes.TrimRight(out, "\r\n")) != hello[1] {
		err = sandbox.Internal.Errorf("wrote %q", out)
	}
	return first, err
}

// head keeps the beginning of what is written to it.
type head struct{ b bytes.Buffer }

func (h *head) Write(p []byte) (int, error) {
	if room := maxSaid - h.b.Len(); room > 0 {
		h.b.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

func (h *head) String() string { return strings.TrimSpace(h.b.String()) }

// done turns the answer of timed into that of exec.
func done(_, whole time.Duration, _ []byte, err error) (time.Duration, error) { return whole, err }

// failing is for what a peer does not do.
func failing(what string) error {
	return sandbox.Unsupported.Errorf("%s: %w", what, errors.ErrUnsupported)
}
