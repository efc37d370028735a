// Package conformance attacks from inside a sandbox and judges from outside:
// the list of isolation conformance, by the ids of its lines. Besides its own
// claim, every attack must leave a neighbour sandbox and the daemon usable; that
// is asked after each, and not measured here.
package conformance

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
	"vivarium/test/fixture"
)

const (
	mib = 1 << 20
	// limit is for what should not take long; the machines that run this are
	// busy.
	limit = 2 * time.Minute
	// image has, besides busybox, the program attack.
	image = "attack:test"
)

// attackProgram is built once for all tests.
var attackProgram struct {
	sync.Once
	data []byte
	err  error
}

func buildAttack() ([]byte, error) {
	dir, err := os.MkdirTemp("", "attack")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w", "-o", dir+"/attack", "./attack")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build attack: %w: %s", err, out)
	}
	return os.ReadFile(dir + "/attack")
}

// lab is a daemon with a neighbour that is asked after every attack.
type lab struct {
	*fixture.Daemon
	neighbour *box
	creating  sync.Mutex // so that a new machine is known to be the new sandbox's
}

const labConfig = `
pool: {size: 0}
defaults: {network: none, cpu_request: 10m, cpu_limit: 2, memory_request: 16MiB, memory_limit: 256MiB, disk: 512MiB, pids: 128}
spool: {per_exec: 1MiB, per_sandbox: 64MiB}
`

func newLab(t *testing.T) *lab {
	t.Helper()
	return newLabWith(t, labConfig)
}

func newLabWith(t *testing.T, config string) *lab {
	t.Helper()
	return newLabOn(t, config, fixture.Host{})
}

func newLabOn(t *testing.T, config string, host fixture.Host) *lab {
	t.Helper()
	attackProgram.Do(func() { attackProgram.data, attackProgram.err = buildAttack() })
	if attackProgram.err != nil {
		t.Fatal(attackProgram.err)
	}
	l := &lab{Daemon: fixture.StartOn(t, fixture.Dir(t), config, host)}
	var tree bytes.Buffer
	w := tar.NewWriter(&tree)
	r := tar.NewReader(bytes.NewReader(fixture.Busybox(t)))
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(w, r); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.WriteHeader(&tar.Header{Name: "bin/attack", Mode: 0o755, Size: int64(len(attackProgram.data))}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(attackProgram.data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Client.LoadImage(within(t), &v1.LoadImageRequest{Tag: image, Format: "rootfs", Config: &v1.ImageConfig{Cmd: []string{"sh"}, Env: []string{"PATH=/bin:/sbin"}}}, &tree); err != nil {
		t.Fatal(err)
	}
	l.neighbour = l.box(t, nil)
	return l
}

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}

// attack runs one test of the list, beside others, and asks the neighbour and
// the daemon afterwards.
func (l *lab) attack(t *testing.T, name string, fn func(t *testing.T)) {
	t.Run(name, func(t *testing.T) {
		t.Parallel()
		defer func() {
			if got := l.neighbour.as(t).sh("echo usable"); got != "usable" {
				t.Errorf("the neighbour says %q", got)
			}
			if _, err := l.Client.Info(within(t)); err != nil {
				t.Errorf("the daemon: %v", err)
			}
		}()
		fn(t)
	})
}

// box is one sandbox.
type box struct {
	t       testing.TB
	l       *lab
	id      string
	machine string // of the runtime: names its cgroup and directory; unknown where there is a pool
}

// as is the same sandbox for another test.
func (b *box) as(t testing.TB) *box {
	c := *b
	c.t = t
	return &c
}

// box makes a sandbox; change alters what it is asked to be.
func (l *lab) box(t testing.TB, change func(*v1.SandboxSpec)) *box {
	t.Helper()
	spec := &v1.SandboxSpec{Image: image, Resources: &v1.Resources{}}
	if change != nil {
		change(spec)
	}
	l.creating.Lock()
	defer l.creating.Unlock()
	before := l.machines(t)
	sb, err := l.Client.Create(within(t), spec, client.CreateOptions{Wait: true})
	if err != nil {
		t.Fatalf("create: %v\n%s", err, l.Log())
	}
	b := &box{t: t, l: l, id: sb.Id}
	for m := range l.machines(t) {
		if !before[m] {
			b.machine = m
		}
	}
	t.Cleanup(func() {
		if err := l.Client.Remove(within(t), b.id, true); err != nil {
			t.Errorf("remove: %v", err)
		}
	})
	return b
}

func (l *lab) machines(t testing.TB) map[string]bool {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(l.Dir, "gv", "m"))
	if err != nil {
		t.Fatal(err)
	}
	m := map[string]bool{}
	for _, e := range entries {
		m[e.Name()] = true
	}
	return m
}

// result is all that came of a command.
type result struct {
	out  string // both outputs
	exit *v1.ExitStatus
}

// run runs a command; err is the API's.
func (b *box) run(spec *v1.ExecSpec) (result, error) {
	var out bytes.Buffer
	if spec.Output == "" && spec.Pty == nil {
		spec.Output = "merged"
	}
	x, err := b.l.Client.RunExec(within(b.t), b.id, "", spec, &out, &out)
	if err != nil {
		return result{out: out.String()}, err
	}
	if x == nil || x.Exit == nil {
		return result{out: out.String()}, fmt.Errorf("exec without a status: %v", x)
	}
	return result{out.String(), x.Exit}, nil
}

// must runs a command that the API has to take.
func (b *box) must(argv ...string) result {
	b.t.Helper()
	return b.mustAs("", argv...)
}

func (b *box) mustAs(user string, argv ...string) result {
	b.t.Helper()
	r, err := b.run(&v1.ExecSpec{Argv: argv, User: user})
	if err != nil {
		b.t.Fatalf("%q: %v\n%s", argv, err, r.out)
	}
	return r
}

// sh runs a script that has to succeed, and gives what it wrote.
func (b *box) sh(script string, args ...string) string {
	b.t.Helper()
	return b.shAs("", script, args...)
}

func (b *box) shAs(user, script string, args ...string) string {
	b.t.Helper()
	r := b.mustAs(user, append([]string{"sh", "-c", script, "sh"}, args...)...)
	if r.exit.Code != 0 {
		b.t.Fatalf("%s: %v\n%s", script, r.exit, r.out)
	}
	return strings.TrimSpace(r.out)
}

// start starts a command and leaves it to itself.
func (b *box) start(argv ...string) string {
	b.t.Helper()
	x, err := b.l.Client.StartExec(within(b.t), b.id, "", &v1.ExecSpec{Argv: argv, Output: "merged"})
	if err != nil {
		b.t.Fatalf("start %q: %v", argv, err)
	}
	return x.Id
}

// says waits until a running command has written this.
func (b *box) says(id, want string) {
	b.t.Helper()
	ctx, cancel := context.WithCancel(within(b.t))
	defer cancel()
	var out bytes.Buffer
	_, err := b.l.Client.Output(ctx, &v1.ReadOutputRequest{SandboxId: b.id, Id: id, StderrOffset: -1, Follow: true}, until(&out, want, cancel), nil)
	if !strings.Contains(out.String(), want) {
		b.t.Fatalf("exec %s never said %q: %q, %v", id, want, out.String(), err)
	}
}

type untilWriter struct {
	*bytes.Buffer
	want string
	done func()
}

func until(b *bytes.Buffer, want string, done func()) io.Writer { return untilWriter{b, want, done} }

func (u untilWriter) Write(p []byte) (int, error) {
	n, err := u.Buffer.Write(p)
	if strings.Contains(u.Buffer.String(), u.want) {
		u.done()
	}
	return n, err
}

func (b *box) usage() *v1.Usage {
	b.t.Helper()
	sb, err := b.l.Client.Get(within(b.t), b.id)
	if err != nil {
		b.t.Fatal(err)
	}
	if sb.Usage == nil {
		b.t.Fatalf("no usage of a sandbox in stage %s", sb.Stage)
	}
	return sb.Usage
}

// alive fails the test if the sandbox has ended.
func (b *box) alive() {
	b.t.Helper()
	sb, err := b.l.Client.Get(within(b.t), b.id)
	if err != nil {
		b.t.Fatal(err)
	}
	if sb.Stage != string(sandbox.StageRunning) {
		b.t.Fatalf("sandbox is in stage %s: %v", sb.Stage, sb.Death)
	}
}

// ended waits for the end of the sandbox.
func (b *box) ended() *v1.Death {
	b.t.Helper()
	sb, err := b.l.Client.Wait(within(b.t), b.id, "ended", limit)
	if err != nil {
		b.t.Fatalf("wait for the end: %v", err)
	}
	if sb.Death == nil {
		b.t.Fatalf("ended without a death certificate: %v", sb)
	}
	return sb.Death
}

// stop stops the sandbox, which has to work whatever goes on inside: the grace
// and no more than ten seconds (A13) is the deadline of the call.
func (b *box) stop(grace time.Duration) *v1.Death {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), grace+20*time.Second)
	defer cancel()
	sb, err := b.l.Client.Stop(ctx, b.id, grace)
	if err != nil {
		b.t.Fatalf("stop: %v", err)
	}
	if p := b.processes(); len(p) > 0 {
		b.t.Errorf("host processes after the stop: %v", p)
	}
	return sb.Death
}

// cgroup is the directory of the sandbox's group in the hierarchy that has this
// file.
func (b *box) cgroup(file string) string {
	b.t.Helper()
	for _, pattern := range []string{"/sys/fs/cgroup/*/vivarium-*/" + b.machine + "/" + file, "/sys/fs/cgroup/vivarium-*/" + b.machine + "/" + file} {
		m, err := filepath.Glob(pattern)
		if err == nil && len(m) > 0 {
			return m[0]
		}
	}
	return ""
}

// processes are the host pids of the sandbox, the sentry first.
func (b *box) processes() []int {
	b.t.Helper()
	f := b.cgroup("cgroup.procs")
	if f == "" {
		return nil
	}
	raw, err := os.ReadFile(f)
	if err != nil {
		return nil // removed meanwhile
	}
	var pids []int
	for _, s := range strings.Fields(string(raw)) {
		n, err := strconv.Atoi(s)
		if err != nil {
			b.t.Fatal(err)
		}
		pids = append(pids, n)
	}
	return pids
}

// sentry is the host pid of the sentry: the one that the others are children of.
func (b *box) sentry() int {
	b.t.Helper()
	in := map[int]bool{}
	for _, p := range b.processes() {
		in[p] = true
	}
	for p := range in {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p))
		if err != nil {
			continue
		}
		_, rest, _ := strings.Cut(string(raw), "PPid:")
		ppid, _ := strconv.Atoi(strings.Fields(rest)[0])
		if !in[ppid] {
			return p
		}
	}
	b.t.Fatal("no sentry")
	return 0
}

func countFDs(t testing.TB, pid int) int {
	t.Helper()
	e, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(e)
}

// statusNumber reads one line of /proc/PID/status.
func statusNumber(t testing.TB, pid int, key string) int64 {
	t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(raw), "\n"+key+":")
	if !ok {
		t.Fatalf("no %s in the status of %d", key, pid)
	}
	n, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// eventually waits for something that takes a moment.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

func small(r *v1.Resources) func(*v1.SandboxSpec) {
	return func(s *v1.SandboxSpec) {
		s.Resources.MemoryLimit, s.Resources.Disk, s.Resources.Pids, s.Resources.CpuLimitMilli = r.MemoryLimit, r.Disk, r.Pids, r.CpuLimitMilli
	}
}

// fields reads "key value" lines.
func fields(s string) map[string]string {
	m := map[string]string{}
	for line := range strings.Lines(s) {
		if k, v, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			m[strings.TrimSuffix(k, ":")] = strings.TrimSpace(v)
		}
	}
	return m
}

var waitRunning = client.CreateOptions{Wait: true}
