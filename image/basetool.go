package image

import (
	"bytes"
	"context"
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

// run runs the tool in dir and writes the tar of what it made to w.
func (p *basePlan) run(ctx context.Context, dir string, w io.Writer, out io.Writer) error {
	list := filepath.Join(dir, p.distro.ID+".sources")
	if err := os.WriteFile(list, formatDeb822(p.sources), 0o644); err != nil {
		return err
	}
	include := strings.Join(p.packages, ",")
	if strings.Contains(filepath.Base(p.tool), "mmdebstrap") {
		return runTool(ctx, dir, w, out, p.tool,
			"--variant=minbase", "--mode=root", "--format=tar", "--include="+include,
			`--aptopt=APT::Install-Recommends "false"`, p.suite, "-", list)
	}
	root := filepath.Join(dir, "root")
	args := []string{"--variant=minbase", "--include=" + include, "--components=" + strings.Join(p.components(), ",")}
	if k := p.keyring(); k != "" {
		args = append(args, "--keyring="+k)
	}
	if err := runTool(ctx, dir, nil, out, p.tool, append(args, p.suite, root, p.mirror())...); err != nil {
		return err
	}
	return tarDir(ctx, w, root)
}

func (p *basePlan) components() []string {
	var out []string
	for _, s := range p.sources {
		out = append(out, s.Components...)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// mirror returns the repository of the release itself, all that debootstrap
// can take; updates come when somebody upgrades inside.
func (p *basePlan) mirror() string {
	for _, s := range p.sources {
		if slices.Contains(s.Suites, p.suite) {
			return s.URI
		}
	}
	return p.sources[0].URI
}

func (p *basePlan) keyring() string {
	for _, s := range p.sources {
		if filepath.IsAbs(s.SignedBy) {
			return s.SignedBy
		}
	}
	return ""
}

// runTool runs a program in a mount namespace of its own, so that no mount of
// its making outlives it, as a process group that is killed as a whole when
// the context ends. What it says goes to out, and its end into the error; with
// stdout nil that is what it writes to either of its outputs.
func runTool(ctx context.Context, dir string, stdout, out io.Writer, path string, args ...string) error {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir = dir
	cmd.Env = toolEnv(dir)
	tail := &tailWriter{next: out}
	cmd.Stdout, cmd.Stderr = stdout, tail
	if stdout == nil {
		cmd.Stdout = tail
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS, Setpgid: true, Pdeathsig: unix.SIGKILL}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	if cmd.Process != nil {
		unix.Kill(-cmd.Process.Pid, unix.SIGKILL) // what it left behind
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return toolError(filepath.Base(path), err, tail.String())
	}
	return nil
}

// toolEnv passes on what the tools need and nothing else of the daemon's.
func toolEnv(dir string) []string {
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8", "HOME=/root", "TMPDIR=" + dir, "DEBIAN_FRONTEND=noninteractive"}
	for _, k := range []string{"http_proxy", "https_proxy", "no_proxy"} {
		if v := os.Getenv(k); v != "" {
			env = append(env, k+"="+v)
		}
	}
	return env
}

// toolError makes a kind of what a tool said last.
func toolError(name string, err error, said string) error {
	has := func(words ...string) bool {
		return slices.ContainsFunc(words, func(w string) bool { return strings.Contains(said, w) })
	}
	last := said[max(0, len(said)-600):]
	switch {
	case has("No space left on device"):
		return sandbox.Exhausted.Errorf("%s: %w: no space left on device", name, err).WithHint("make room on the disk that holds the images")
	case has("Unable to locate package", "has no installation candidate", "Couldn't find these debs"):
		return sandbox.Invalid.Errorf("%s: %w: %s", name, err, last).WithHint("check the names of the packages and the release")
	case has("Could not resolve", "Temporary failure", "Could not connect", "Failed getting release file", "Failed to fetch", "Connection failed", "unable to download"):
		return sandbox.Unavailable.Errorf("%s: %w: %s", name, err, last).WithHint("check that apt-get update works on this host")
	}
	return sandbox.Internal.Errorf("%s: %w: %s", name, err, last)
}

// tailWriter passes on what is written and keeps its end.
type tailWriter struct {
	next io.Writer // may be nil
	buf  bytes.Buffer
}

const tailMax = 16 << 10

func (t *tailWriter) Write(p []byte) (int, error) {
	t.buf.Write(p)
	if n := t.buf.Len() - tailMax; n > 0 {
		t.buf.Next(n)
	}
	if t.next != nil {
		t.next.Write(p) // whoever watches must not break the build
	}
	return len(p), nil
}

func (t *tailWriter) String() string { return strings.TrimSpace(t.buf.String()) }
