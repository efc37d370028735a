package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/term"

	"vivarium/config"
	"vivarium/sandbox"
	"vivarium/server/native/fake"
)

type result struct {
	code     int
	out, err string
}

// viv runs one command line against a node, in this process.
func viv(t *testing.T, n *fake.Node, stdin io.Reader, args ...string) result {
	t.Helper()
	env := map[string]string{"VIV_DATA_DIR": t.TempDir(), "FROM_HERE": "value"}
	if n != nil {
		env["VIV_SERVER"], env["VIV_TOKEN"] = n.HTTP, n.Admin
	}
	return vivEnv(t, env, Hooks{Version: "test"}, stdin, args...)
}

func vivEnv(t *testing.T, env map[string]string, h Hooks, stdin io.Reader, args ...string) result {
	t.Helper()
	if stdin == nil {
		stdin = strings.NewReader("")
	}
	var out, errOut bytes.Buffer
	s := Streams{In: stdin, Out: &out, Err: &errOut, Getenv: func(k string) string { return env[k] }}
	for k, v := range env {
		s.Environ = append(s.Environ, k+"="+v)
	}
	code := Run(t.Context(), args, s, h)
	return result{code, out.String(), errOut.String()}
}

func (r result) is(t *testing.T, code int, out string) {
	t.Helper()
	if r.code != code || r.out != out {
		t.Errorf("exit code %d and output %q, want %d and %q; stderr %q", r.code, r.out, code, out, r.err)
	}
}

// fails checks the exit code and that the error says something.
func (r result) fails(t *testing.T, code int, say ...string) {
	t.Helper()
	if r.code != code {
		t.Errorf("exit code %d, want %d; stderr %q", r.code, code, r.err)
	}
	for _, s := range say {
		if !strings.Contains(r.err, s) {
			t.Errorf("stderr %q does not say %q", r.err, s)
		}
	}
}

func TestRun(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	viv(t, n, nil, "run", "debian:base", "--", "echo", "hi").is(t, 0, "hi\n")
	viv(t, n, nil, "run", "debian:base", "echo", "-n", "hi").is(t, 0, "hi")
	r := viv(t, n, nil, "run", "debian:base", "--", "sh", "-c", "echo out; echo err >&2; exit 42")
	if r.is(t, 42, "out\n"); r.err != "err\n" {
		t.Errorf("stderr is %q", r.err)
	}
	viv(t, n, nil, "run", "debian:base", "--", "sh", "-c", "kill -9 $$").is(t, 137, "") // D12
	viv(t, n, nil, "run", "-e", "A=b c", "-e", "FROM_HERE", "-e", "NOT_SET", "x", "--", "sh", "-c", `echo "$A $FROM_HERE ${NOT_SET-none}"`).is(t, 0, "b c value none\n")
	viv(t, n, nil, "run", "x", "--", "/no/such/program").fails(t, 127, "no such program")
	viv(t, n, nil, "run", "missing", "--", "true").fails(t, 125, "no image", "pull it")
	viv(t, n, nil, "run", "x", "--network=none", "--", "true").fails(t, 2, "--network=none comes after x")
	viv(t, n, nil, "run", "--bogus", "x").fails(t, 2, "unknown flag")
	viv(t, n, nil, "run").fails(t, 2, "takes at least one IMAGE")
	if left := n.Engine.Boxes(); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	viv(t, n, nil, "run", "--rm=false", "--name", "kept", "x", "--", "true").is(t, 0, "")
	if left := n.Engine.Boxes(); len(left) != 1 || left[0].Spec.Name != "kept" {
		t.Errorf("kept: %v", left)
	}
}

// Every byte of standard input and output arrives as it is.
func TestRunIsEightBitClean(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	in := make([]byte, 1<<20)
	for i := range in {
		in[i] = byte(i ^ i>>8)
	}
	r := viv(t, n, bytes.NewReader(in), "run", "-i", "x", "--", "cat")
	if r.code != 0 || r.out != string(in) {
		t.Errorf("exit code %d, %d bytes of %d, %q", r.code, len(r.out), len(in), r.err)
	}
	// Without -i there is no input.
	viv(t, n, strings.NewReader("x"), "run", "x", "--", "cat").is(t, 0, "")
}

func TestRunFlags(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	r := viv(t, n, nil, "run", "-d", "--name", "full", "--hostname", "h", "--tag", "a=b", "--runtime", "gvisor", "--network", "none",
		"--pull", "never", "--cpus", "1.5", "--cpu-request", "250m", "-m", "512MiB", "--memory-request", "64m", "--disk", "1GiB",
		"--pids", "99", "-w", "/tmp", "-u", "1000:1000", "--entrypoint", "env", "--timeout", "90s", "--idle-timeout", "30s",
		"--cap-add", "net_admin", "--cap-drop", "ALL", "--probe-tcp", "80", "--probe-interval", "1s", "img", "--", "sleep", "1000")
	if r.code != 0 || !strings.HasPrefix(r.out, "sb-") {
		t.Fatalf("%+v", r)
	}
	s := n.Engine.Boxes()[0].Spec
	want := sandbox.Spec{
		Name: "full", Hostname: "h", Tags: map[string]string{"a": "b"}, Runtime: "gvisor", Network: sandbox.NetworkPolicy{Mode: "none"},
		Image: "img", Pull: "never", Workdir: "/tmp", User: "1000:1000", Entrypoint: []string{"env"}, Command: []string{"sleep", "1000"},
		Resources: sandbox.Resources{CPULimit: 1500, CPURequest: 250, MemoryLimit: 512 << 20, MemoryRequest: 64 << 20, Disk: 1 << 30, Pids: 99},
		Timeout:   90 * time.Second, IdleTimeout: 30 * time.Second,
		Capabilities: sandbox.Capabilities{Add: []string{"CAP_NET_ADMIN"}, Drop: []string{"ALL"}},
		Probe:        &sandbox.Probe{TCPPort: 80, Interval: time.Second},
	}
	if fmt.Sprintf("%+v %+v", s, *s.Probe) != fmt.Sprintf("%+v %+v", func() sandbox.Spec { w := want; w.Probe = s.Probe; return w }(), *want.Probe) {
		t.Errorf("the spec is\n%+v, want\n%+v", s, want)
	}
	for _, bad := range [][]string{
		{"--cpus", "0"}, {"--cpus", "x"}, {"-m", "0"}, {"-m", "-1"}, {"--disk", "0"}, {"--pids", "0"}, {"--timeout", "0s"},
		{"--timeout", "-1s"}, {"-e", "=x"}, {"--probe-tcp", "1", "--probe-cmd", "x"}, {"-d", "-i"}, {"--tag", "=b"},
	} {
		viv(t, n, nil, append(append([]string{"run"}, bad...), "img")...).fails(t, 2)
	}
}

func TestNoDaemon(t *testing.T) {
	t.Parallel()
	env := map[string]string{"VIV_SERVER": "unix://" + t.TempDir() + "/viv.sock"}
	vivEnv(t, env, Hooks{}, nil, "run", "x", "--", "true").fails(t, 125, "no daemon answers", "viv serve")
	vivEnv(t, env, Hooks{}, nil, "ps").fails(t, 1, "viv serve")
	vivEnv(t, map[string]string{"VIV_SERVER": "ftp://x"}, Hooks{}, nil, "ps").fails(t, 1, "server address")
}

// The daemon's own socket and token are found where they may be read.
func TestDefaultServer(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	dir := t.TempDir()
	if err := os.Symlink(n.Socket, dir+"/viv.sock"); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"VIV_DATA_DIR": dir}
	vivEnv(t, env, Hooks{}, nil, "ps", "-q").fails(t, 1, "token")
	if err := os.WriteFile(dir+"/token", []byte(n.Admin+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	vivEnv(t, env, Hooks{}, nil, "ps", "-q").is(t, 0, "")
	env["VIV_TOKEN"] = "viv_wrong"
	vivEnv(t, env, Hooks{}, nil, "ps", "-q").fails(t, 1, "token")
	vivEnv(t, env, Hooks{}, nil, "--token", n.Admin, "ps", "-q").is(t, 0, "")
}

// A sandbox that ends under its command says why.
func TestRunSandboxEnds(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	for _, tt := range []struct {
		death sandbox.Death
		code  int
		say   string
	}{
		{sandbox.Death{Reason: sandbox.ReasonOOM, OOM: true, PeakMemory: 64 << 20}, 137, "out of memory (peak 64.0 MiB)"},
		{sandbox.Death{Reason: sandbox.ReasonTimeout, Message: "its timeout of 5m0s passed"}, 124, "its timeout"},
		{sandbox.Death{Reason: sandbox.ReasonStopped}, 137, "stopped"},
	} {
		done := make(chan result, 1)
		go func() { done <- viv(t, n, nil, "run", "x", "--", "sh", "-c", "echo up; sleep 1000") }()
		n.Engine.End(running(t, n), tt.death)
		(<-done).fails(t, tt.code, tt.say)
	}
}

// running waits for a sandbox whose main command runs and returns its id.
func running(t *testing.T, n *fake.Node) string {
	t.Helper()
	for range 1000 {
		for _, b := range n.Engine.Boxes() {
			if b.Stage == sandbox.StageRunning {
				if e, err := n.Engine.GetExec(t.Context(), b.Tenant, b.ID, "main"); err == nil && e.StdoutLen > 0 {
					return b.ID
				}
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("no sandbox came to run")
	return ""
}

// Signals reach the command; before it runs they end everything. Not parallel:
// they reach every run of this process.
func TestSignals(t *testing.T) {
	n := fake.Serve(t)
	done := make(chan result, 1)
	go func() {
		done <- viv(t, n, nil, "run", "x", "--", "sh", "-c", "trap 'echo got; exit 5' USR1; echo up; while :; do sleep 0.02; done")
	}()
	running(t, n)
	time.Sleep(50 * time.Millisecond) // until run watches the output
	if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	(<-done).is(t, 5, "up\ngot\n")

	n.Engine.Hold = make(chan struct{})
	go func() { done <- viv(t, n, nil, "run", "x", "--", "true") }()
	for len(n.Engine.Boxes()) == 0 {
		time.Sleep(10 * time.Millisecond)
	}
	time.Sleep(50 * time.Millisecond)
	if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	(<-done).is(t, 143, "")
	if left := n.Engine.Boxes(); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	close(n.Engine.Hold)
}

// terminalRun is a `viv run -it` or exec on a real terminal.
type terminalRun struct {
	t    *testing.T
	ptmx *os.File
	tty  *os.File
	mu   sync.Mutex
	got  bytes.Buffer
	code chan int
}

func onTerminal(t *testing.T, n *fake.Node, args ...string) *terminalRun {
	t.Helper()
	ptmx, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	r := &terminalRun{t: t, ptmx: ptmx, tty: tty, code: make(chan int, 1)}
	t.Cleanup(func() { ptmx.Close(); tty.Close() })
	if err := pty.Setsize(ptmx, &pty.Winsize{Rows: 30, Cols: 100}); err != nil {
		t.Fatal(err)
	}
	go func() {
		buf := make([]byte, 4096)
		for {
			m, err := ptmx.Read(buf)
			r.mu.Lock()
			r.got.Write(buf[:m])
			r.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	env := map[string]string{"VIV_SERVER": n.HTTP, "VIV_TOKEN": n.Admin}
	go func() {
		r.code <- Run(context.Background(), args, Streams{In: tty, Out: tty, Err: tty, Getenv: func(k string) string { return env[k] }}, Hooks{})
	}()
	return r
}

func (r *terminalRun) keys(s string) {
	r.t.Helper()
	if _, err := io.WriteString(r.ptmx, s); err != nil {
		r.t.Fatal(err)
	}
}

// see waits until the terminal has shown s, and forgets what it showed.
func (r *terminalRun) see(s string) {
	r.t.Helper()
	for range 1000 {
		r.mu.Lock()
		got := r.got.String()
		if i := strings.Index(got, s); i >= 0 {
			r.got.Next(i + len(s))
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		time.Sleep(10 * time.Millisecond)
	}
	r.t.Fatalf("the terminal did not show %q but %q", s, r.got.String())
}

// D4: size, Ctrl-C and Ctrl-D on a real terminal, which is what it was at the
// end. Not parallel: SIGWINCH reaches the whole process.
func TestTerminal(t *testing.T) {
	n := fake.Serve(t)
	r := onTerminal(t, n, "run", "-it", "x", "--", "sh", "-i")
	before, err := term.GetState(int(r.tty.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	r.see("$ ")
	r.keys("stty size\r")
	r.see("30 100\r\n")
	if err := pty.Setsize(r.ptmx, &pty.Winsize{Rows: 40, Cols: 120}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(os.Getpid(), syscall.SIGWINCH); err != nil {
		t.Fatal(err)
	}
	for range 100 { // the size travels by a way of its own
		r.keys("stty size\r")
		time.Sleep(20 * time.Millisecond)
		r.mu.Lock()
		ok := strings.Contains(r.got.String(), "40 120\r\n")
		r.mu.Unlock()
		if ok {
			break
		}
	}
	r.see("40 120\r\n")
	r.keys("sleep 1000\r")
	r.see("sleep 1000\r\n")
	time.Sleep(100 * time.Millisecond)
	r.keys("\x03") // Ctrl-C
	r.keys("echo $((6*7))\r")
	r.see("42\r\n")
	r.keys("exit 3\r")
	if code := <-r.code; code != 3 {
		t.Errorf("exit code %d", code)
	}
	after, err := term.GetState(int(r.tty.Fd()))
	if err != nil || fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("the terminal is %v, was %v, %v", after, before, err)
	}
	if left := n.Engine.Boxes(); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}

	r = onTerminal(t, n, "run", "-it", "x", "--", "cat")
	r.keys("hello\r")
	r.see("hello\r\nhello\r\n")
	r.keys("\x04") // Ctrl-D
	if code := <-r.code; code != 0 {
		t.Errorf("exit code %d", code)
	}
	viv(t, n, nil, "create", "--name", "box", "x")
	r = onTerminal(t, n, "exec", "-it", "box", "--", "sh", "-c", "stty size; read x; exit 9")
	r.see("30 100\r\n")
	r.keys("\r")
	if code := <-r.code; code != 9 {
		t.Errorf("exit code %d", code)
	}
	viv(t, n, nil, "exec", "-it", "box", "--", "sh").fails(t, 125, "not a terminal", "leave out -t")
}

func TestExec(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	viv(t, n, nil, "create", "--name", "box", "x")
	r := viv(t, n, nil, "exec", "-e", "A=b", "-w", "/tmp", "box", "--", "sh", "-c", "pwd; echo $A >&2; exit 3")
	if r.is(t, 3, "/tmp\n"); r.err != "b\n" {
		t.Errorf("stderr is %q", r.err)
	}
	viv(t, n, strings.NewReader("in"), "exec", "-i", "box", "--", "cat").is(t, 0, "in")
	viv(t, n, nil, "exec", "box", "--", "/no/such").fails(t, 127, "no such program")
	viv(t, n, nil, "exec", "nobox", "--", "true").fails(t, 125, "no sandbox")
	viv(t, n, nil, "exec", "box").fails(t, 2, "the command is missing")
	viv(t, n, nil, "exec", "-d", "--id", "job", "box", "--", "sh", "-c", "echo done; exit 4").is(t, 0, "job\n")
	viv(t, n, nil, "wait", "box", "job").is(t, 0, "4\n")
	viv(t, n, nil, "logs", "-f", "box", "job").is(t, 0, "done\n")
	viv(t, n, nil, "exec", "--id", "job", "box", "--", "ignored").is(t, 4, "done\n")
	viv(t, n, nil, "logs", "box").fails(t, 1, "no main command", "viv inspect --execs box")
	var execs []map[string]any
	if err := json.Unmarshal([]byte(viv(t, n, nil, "inspect", "--execs", "box").out), &execs); err != nil || len(execs) < 3 {
		t.Errorf("execs: %v, %v", execs, err)
	}
}

func TestLists(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	viv(t, n, nil, "ps", "--json").is(t, 0, "[]\n")
	a := strings.TrimSpace(viv(t, n, nil, "create", "--name", "a", "--tag", "k=v", "x", "--", "sh", "-c", "echo out; sleep 1000").out)
	b := strings.TrimSpace(viv(t, n, nil, "create", "y").out)
	viv(t, n, nil, "ps", "-q").is(t, 0, a+"\n"+b+"\n")
	viv(t, n, nil, "ps", "-q", "--tag", "k=v").is(t, 0, a+"\n")
	viv(t, n, nil, "ps", "-q", "--name", "a").is(t, 0, a+"\n")
	viv(t, n, nil, "ps", "-q", "--stage", "ended").is(t, 0, "")
	viv(t, n, nil, "ps", "--stage", "bogus").fails(t, 1, "stage", "the stages are")
	out := viv(t, n, nil, "ps").out
	if !strings.Contains(out, "COMMAND") || !strings.Contains(out, `sh -c "echo out; sleep 1000"`) {
		t.Errorf("ps: %s", out)
	}
	var list []map[string]any
	if err := json.Unmarshal([]byte(viv(t, n, nil, "ps", "--json").out), &list); err != nil || len(list) != 2 || list[0]["id"] != a {
		t.Errorf("ps --json: %v, %v", list, err)
	}
	var one map[string]any
	if err := json.Unmarshal([]byte(viv(t, n, nil, "inspect", "a").out), &one); err != nil || one["id"] != a {
		t.Errorf("inspect: %v, %v", one, err)
	}
	viv(t, n, nil, "inspect", "nosuch").fails(t, 1, "no sandbox")
	viv(t, n, nil, "extend", "a", "1h").fails(t, 0)
	viv(t, n, nil, "extend", "a", "soon").fails(t, 2, "is not a time")
	viv(t, n, nil, "rm", "a").fails(t, 1, "still runs", "stop it first")
	viv(t, n, nil, "stop", "a").is(t, 0, "a\n")
	viv(t, n, nil, "wait", a).is(t, 0, "stopped\n")
	viv(t, n, nil, "logs", "a").is(t, 0, "out\n") // the name of one that ended
	viv(t, n, nil, "wait", "a").is(t, 0, "stopped\n")
	viv(t, n, nil, "inspect", "a").fails(t, 0)
	viv(t, n, nil, "rm", "-f", a, "nosuch", b).fails(t, 1, "nosuch: no sandbox")
	if left := n.Engine.Boxes(); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	events := viv(t, n, nil, "events").out
	if !strings.Contains(events, "sandbox.created") || !strings.Contains(events, "sandbox.removed") {
		t.Errorf("events: %s", events)
	}
	for line := range strings.Lines(viv(t, n, nil, "events", "--json").out) {
		if err := json.Unmarshal([]byte(line), &one); err != nil {
			t.Errorf("%v: %s", err, line)
		}
	}
}

func TestImageVerbs(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	if out := viv(t, n, nil, "pull", "alpine").out; !strings.HasPrefix(out, "alpine  im-alpine  4.0 KiB") {
		t.Errorf("pull: %q", out)
	}
	viv(t, n, nil, "pull", "down").fails(t, 1, "does not answer")
	viv(t, n, strings.NewReader("archive"), "load", "-q", "--tag", "loaded").is(t, 0, "im-loaded\n")
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "oci-layout"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	viv(t, n, nil, "load", "-q", "--tag", "layout", dir).is(t, 0, "im-layout\n")
	if n.Images.Loaded < 1024 {
		t.Errorf("of the layout %d bytes arrived", n.Images.Loaded)
	}
	viv(t, n, nil, "load", "/no/such/file").fails(t, 1, "no such file")
	viv(t, n, nil, "image", "tag", "loaded", "other").is(t, 0, "")
	viv(t, n, nil, "image", "base", "-q", "--tag", "base").is(t, 0, "im-base\n")
	viv(t, n, nil, "images", "-q").is(t, 0, "im-alpine\nim-loaded\nim-layout\nim-other\nim-base\n")
	if out := viv(t, n, nil, "images").out; !strings.Contains(out, "alpine") || !strings.Contains(out, "PLATFORM") {
		t.Errorf("images: %s", out)
	}
	var img map[string]any
	if err := json.Unmarshal([]byte(viv(t, n, nil, "image", "inspect", "base").out), &img); err != nil || img["id"] != "im-base" {
		t.Errorf("inspect: %v, %v", img, err)
	}
	viv(t, n, nil, "image", "rm", "other").is(t, 0, "other\n")
	viv(t, n, nil, "image", "rm", "other").fails(t, 1, "no image")
	viv(t, n, nil, "image", "rm", "-f", "other").is(t, 0, "other\n")
	viv(t, n, nil, "image", "prune").is(t, 0, "removed 1 images, 100 B\n")
}

func TestTokenVerbs(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	secret := strings.TrimSpace(viv(t, n, nil, "token", "create", "--tenant", "acme", "--name", "ci").out)
	env := map[string]string{"VIV_SERVER": n.Unix, "VIV_TOKEN": secret}
	vivEnv(t, env, Hooks{}, nil, "ps", "-q").is(t, 0, "")
	vivEnv(t, env, Hooks{}, nil, "token", "ls").fails(t, 1, "admin")
	var list []map[string]any
	if err := json.Unmarshal([]byte(viv(t, n, nil, "token", "ls", "--json").out), &list); err != nil || len(list) != 2 {
		t.Fatalf("ls: %v, %v", list, err)
	}
	if out := viv(t, n, nil, "token", "ls").out; strings.Contains(out, secret) || !strings.Contains(out, "acme") {
		t.Errorf("ls: %s", out)
	}
	for _, tok := range list {
		if tok["tenant"] == "acme" {
			viv(t, n, nil, "token", "revoke", tok["id"].(string)).fails(t, 0)
		}
	}
	vivEnv(t, env, Hooks{}, nil, "ps", "-q").fails(t, 1, "valid token")
}

func TestVersionAndCompletion(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	viv(t, n, nil, "create", "--name", "box-one", "x")
	if out := viv(t, n, nil, "version").out; !strings.Contains(out, "client  test") || !strings.Contains(out, "daemon  fake") {
		t.Errorf("version: %s", out)
	}
	r := viv(t, nil, nil, "--server", "unix:///no/such", "version")
	if r.code != 0 || !strings.Contains(r.out, "no daemon answers") {
		t.Errorf("version without a daemon: %+v", r)
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if r := viv(t, nil, nil, "completion", shell); r.code != 0 || !strings.Contains(r.out, "viv") {
			t.Errorf("%s: %+v", shell, r)
		}
	}
	viv(t, nil, nil, "completion", "csh").fails(t, 2, "bash, zsh and fish")
	for _, args := range [][]string{{"exec", "box"}, {"stop", "b"}, {"logs", ""}, {"cp", "box"}} {
		if r := viv(t, n, nil, append([]string{"__complete"}, args...)...); !strings.Contains(r.out, "box-one") {
			t.Errorf("%v: %+v", args, r)
		}
	}
}

func TestServe(t *testing.T) {
	t.Parallel()
	var got *config.Config
	h := Hooks{Serve: func(_ context.Context, c *config.Config) error { got = c; return nil }}
	vivEnv(t, nil, h, nil, "serve", "--print-config").is(t, 0, config.Reference)
	dir := t.TempDir()
	file := filepath.Join(dir, "config.yaml")
	if err := os.WriteFile(file, []byte("pool:\n  size: 2\nlisten: 127.0.0.1:1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"VIV_LISTEN": "127.0.0.1:2", "VIV_CONFIG": file}
	vivEnv(t, env, h, nil, "serve", "--data-dir", dir, "--set", "limits.queue=7").is(t, 0, "")
	if got == nil || got.Pool.Size != 2 || got.Listen != "127.0.0.1:2" || got.DataDir != dir || got.Limits.Queue != 7 {
		t.Errorf("config is %+v", got)
	}
	if err := os.WriteFile(file, []byte("pool:\n  size: 1000\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	vivEnv(t, env, h, nil, "serve").fails(t, 1, file+":2: pool.size: must be between 0 and 256")
	vivEnv(t, nil, h, nil, "serve", "--listen", "0.0.0.0:7878").fails(t, 1, "--listen: listen:", "listen_public")
	vivEnv(t, nil, Hooks{}, nil, "serve", "--data-dir", dir).fails(t, 1, "no daemon")
}

func TestDoctorAndBench(t *testing.T) {
	t.Parallel()
	viv(t, nil, nil, "doctor", "--sandboxes", "0").fails(t, 2, "--sandboxes is not between")
	viv(t, nil, nil, "doctor", "--set", "pool.size=-1").fails(t, 1, "--set pool.size: pool.size: must be between 0 and 256")
	viv(t, nil, nil, "bench").fails(t, 2, "takes BENCH")
	viv(t, nil, nil, "bench", "speed").fails(t, 2, "tti, exec")
	viv(t, nil, nil, "bench", "tti", "--peer", "docker").fails(t, 2, "runsc, podman")
	viv(t, nil, nil, "bench", "tti", "-n", "0").fails(t, 2, "-n is not between")
}

// What a sandbox says must not steer the terminal of whoever looks (E2).
func TestOutputIsClean(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	viv(t, n, nil, "create", "x", "--", "sh", "-c", "sleep 1000 # \x1b[2J\x1b]0;owned\a").fails(t, 0)
	if out := viv(t, n, nil, "ps").out; strings.ContainsAny(out, "\x1b\a") {
		t.Errorf("ps: %q", out)
	}
}
