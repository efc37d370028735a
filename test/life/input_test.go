package life

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
)

// badInput is what the specification names: each gives one of the error kinds,
// and what can be done about it where that is not plain from the message.
func badInput(t *testing.T, e *env) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	down := l.Addr().String()
	l.Close() // nobody listens there now
	for name, c := range map[string]struct {
		change func(*v1.SandboxSpec)
		kind   sandbox.Kind
		says   string
		hint   bool
	}{
		"unknown image":       {func(s *v1.SandboxSpec) { s.Image, s.Pull = "no-such:1", "never" }, sandbox.NotFound, "no-such", true},
		"bad reference":       {func(s *v1.SandboxSpec) { s.Image = "UPPER CASE:::" }, sandbox.Invalid, "UPPER", false},
		"no image":            {func(s *v1.SandboxSpec) { s.Image = "" }, sandbox.Invalid, "image", true},
		"registry down":       {func(s *v1.SandboxSpec) { s.Image = down + "/x:1" }, sandbox.Unavailable, down, true},
		"runtime vm":          {func(s *v1.SandboxSpec) { s.Runtime = "vm" }, sandbox.Unsupported, "vm", true},
		"unknown runtime":     {func(s *v1.SandboxSpec) { s.Runtime = "docker" }, sandbox.Invalid, "docker", false},
		"negative cpu":        {func(s *v1.SandboxSpec) { s.Resources.CpuLimitMilli = -1 }, sandbox.Invalid, "cpu", false},
		"cpu beyond the host": {func(s *v1.SandboxSpec) { s.Resources.CpuRequestMilli = 1 << 40 }, sandbox.Invalid, "cpu", false},
		"negative memory":     {func(s *v1.SandboxSpec) { s.Resources.MemoryLimit = -1 }, sandbox.Invalid, "memory", false},
		"memory beyond it":    {func(s *v1.SandboxSpec) { s.Resources.MemoryLimit = 1 << 50 }, sandbox.Invalid, "memory", false},
		"too little memory":   {func(s *v1.SandboxSpec) { s.Resources.MemoryLimit = 1 }, sandbox.Invalid, "memory", false},
		"negative disk":       {func(s *v1.SandboxSpec) { s.Resources.Disk = -1 }, sandbox.Invalid, "disk", false},
		"too little disk":     {func(s *v1.SandboxSpec) { s.Resources.Disk = 1 }, sandbox.Invalid, "disk", false},
		"negative pids":       {func(s *v1.SandboxSpec) { s.Resources.Pids = -1 }, sandbox.Invalid, "pids", false},
		"too many pids":       {func(s *v1.SandboxSpec) { s.Resources.Pids = 1 << 40 }, sandbox.Invalid, "pids", false},
		"request over limit":  {func(s *v1.SandboxSpec) { s.Resources.CpuRequestMilli, s.Resources.CpuLimitMilli = 100, 50 }, sandbox.Invalid, "limit", false},
		"negative timeout":    {func(s *v1.SandboxSpec) { s.Timeout = dur(-time.Second) }, sandbox.Invalid, "timeout", false},
		"long timeout":        {func(s *v1.SandboxSpec) { s.Timeout = dur(3 * time.Hour) }, sandbox.Invalid, "2h", false},
		"negative idle":       {func(s *v1.SandboxSpec) { s.IdleTimeout = dur(-time.Second) }, sandbox.Invalid, "idle", false},
		"network":             {func(s *v1.SandboxSpec) { s.Network = &v1.NetworkPolicy{Mode: "host"} }, sandbox.Invalid, "host", false},
		"pull":                {func(s *v1.SandboxSpec) { s.Pull = "perhaps" }, sandbox.Invalid, "perhaps", false},
		"probe of nothing":    {func(s *v1.SandboxSpec) { s.Probe = &v1.Probe{} }, sandbox.Invalid, "probe", false},
		"probe of both":       {func(s *v1.SandboxSpec) { s.Probe = &v1.Probe{TcpPort: 1, Command: []string{"a"}} }, sandbox.Invalid, "probe", false},
		"probe port":          {func(s *v1.SandboxSpec) { s.Probe = &v1.Probe{TcpPort: 70000} }, sandbox.Invalid, "port", false},
		"capability":          {func(s *v1.SandboxSpec) { s.Capabilities = &v1.Capabilities{Add: []string{"CAP_EVERYTHING"}} }, sandbox.Invalid, "CAP_EVERYTHING", false},
		"host name":           {func(s *v1.SandboxSpec) { s.Hostname = "a b" }, sandbox.Invalid, "host", false},
		"host name, newline":  {func(s *v1.SandboxSpec) { s.Hostname = "a\n127.0.0.1 b" }, sandbox.Invalid, "host", false},
		"huge command":        {func(s *v1.SandboxSpec) { s.Command = []string{strings.Repeat("x", 2<<20)} }, sandbox.Invalid, "command", true},
		"no user":             {func(s *v1.SandboxSpec) { s.User = "a\nb" }, sandbox.Invalid, "user", false},
		"relative directory":  {func(s *v1.SandboxSpec) { s.Workdir = "tmp" }, sandbox.Invalid, "workdir", false},
	} {
		s := spec()
		s.Resources = &v1.Resources{}
		c.change(s)
		sb, err := e.c.Create(t.Context(), s, client.CreateOptions{Wait: true})
		if err == nil {
			e.removeLater(t, sb.Id)
		}
		is(t, name, err, c.kind, c.says, c.hint)
		if sandbox.KindOf(err) == sandbox.Internal {
			t.Errorf("%s: called a defect of ours: %v", name, err)
		}
	}
	// zero is the default, not nothing
	s := spec()
	s.Resources = &v1.Resources{}
	sb := e.create(t, s)
	if r := sb.Spec.Resources; r.MemoryLimit != 256<<20 || r.CpuRequestMilli != 10 || r.Pids == 0 || r.Disk == 0 {
		t.Errorf("%v", r)
	}
	// what is wrong with a main command is its status
	for name, c := range map[string]struct {
		s    *v1.SandboxSpec
		code int32
	}{
		"workdir missing": {&v1.SandboxSpec{Workdir: "/no/such", Command: []string{"true"}}, 126},
		"unknown user":    {&v1.SandboxSpec{User: "no-such", Command: []string{"true"}}, 126},
		"not executable":  {&v1.SandboxSpec{Command: []string{"/etc/passwd"}}, 126},
		"not found":       {&v1.SandboxSpec{Command: []string{"no-such"}}, 127},
	} {
		c.s.Image = spec().Image
		sb := e.create(t, c.s)
		if d := e.death(t, sb.Id); d.Exit.GetCode() != c.code || d.Exit.GetError() == "" || d.Exit.GetErrorKind() == "" {
			t.Errorf("%s: %v", name, d)
		}
	}
}

// E2: names, tags, keys and paths cannot become something else than they are.
func injection(t *testing.T, e *env) {
	hostile := []string{
		"../../etc", "a/b", "/etc/passwd", "..", ".", "a b", "$(touch /tmp/viv-pwned)", "`id`", "a;b", "a|b", "a&b", "a\nb", "a\r\nlevel=ERROR", "a\x00b", "a\x1b[2J",
		"-rf", "--force", "'", `"`, `a"} 1`, "%s%n", "ünïcode", "\u202e", strings.Repeat("a", 64), "sb-mine", "main\n", "*", "~", "a\\b",
	}
	for _, h := range hostile {
		s := spec()
		s.Name = h
		_, err := e.c.Create(t.Context(), s, client.CreateOptions{})
		is(t, fmt.Sprintf("name %q", h), err, sandbox.Invalid, "", false)
		_, err = e.c.List(t.Context(), &v1.ListSandboxesRequest{Name: h})
		if h != "sb-mine" {
			is(t, fmt.Sprintf("list %q", h), err, sandbox.Invalid, "", false)
		}
		_, err = e.c.Get(t.Context(), h)
		if k := sandbox.KindOf(err); k != sandbox.Invalid && k != sandbox.NotFound {
			t.Errorf("get %q: %v", h, err)
		}
	}
	// values are kept as they are where they are only data
	s := spec("sleep", "1000")
	s.Tags = map[string]string{"sql": `'; DROP TABLE sandboxes; --`, "html": "<script>alert(1)</script>", "a/b.c-d_e": "$(id) `id` %s {{.}}"}
	s.Env = map[string]string{"ODD": "a\nb=c\t$(id)", "a b": "c"}
	sb := e.create(t, s)
	if got, err := e.c.Get(t.Context(), sb.Id); err != nil || fmt.Sprint(got.Spec.Tags) != fmt.Sprint(s.Tags) || got.Spec.Env["ODD"] != s.Env["ODD"] {
		t.Errorf("%v, %v", got, err)
	}
	if l, err := e.c.List(t.Context(), &v1.ListSandboxesRequest{Tags: map[string]string{"sql": s.Tags["sql"]}}); err != nil || len(l) != 1 {
		t.Errorf("%v, %v", l, err)
	}
	if out, _ := e.run(t, sb.Id, "sh", "-c", `echo "$ODD"`); out != s.Env["ODD"]+"\n" {
		t.Errorf("%q", out)
	}
	for k, v := range map[string]string{"": "empty", "a b": "blank", "a\nb": "newline", strings.Repeat("k", 64): "long", "v": "a\nb", "w": "a\x00b", "x": "\xff"} {
		_, err := e.c.SetTags(t.Context(), sb.Id, map[string]string{k: v})
		if v == "\xff" { // does not get past the encoding
			if err == nil {
				t.Error("a tag that is no UTF-8")
			}
			continue
		}
		is(t, fmt.Sprintf("tag %q=%q", k, v), err, sandbox.Invalid, "tag", false)
	}
	// arguments are not a shell's
	for _, a := range []string{"$(id)", "`id`", "a b", "a;id", "*", "-n\n", "\x01\xff"} {
		if a == "\x01\xff" { // strings of protobuf are UTF-8
			continue
		}
		if out, _ := e.run(t, sb.Id, "printf", "%s", a); out != a {
			t.Errorf("%q became %q", a, out)
		}
	}
	// a file's name is bytes
	path := []byte("/tmp/\xff\xfe\n'\"$(id) -rf")
	if _, err := e.c.WriteFile(t.Context(), &v1.WriteFileRequest{SandboxId: sb.Id, Path: path}, strings.NewReader("x")); err != nil {
		t.Error(err)
	}
	if i, err := e.c.Stat(t.Context(), sb.Id, string(path), "", false); err != nil || i.Size != 1 {
		t.Errorf("%v, %v", i, err)
	}
	_, err := e.c.Stat(t.Context(), sb.Id, "/tmp/a\x00b", "", false)
	is(t, "a path with NUL", err, sandbox.Invalid, "NUL", false)
	for _, p := range []string{"/tmp/viv-pwned", filepath.Join(e.Dir, "viv-pwned")} {
		if _, err := os.Lstat(p); err == nil {
			t.Errorf("%s exists on the host", p)
		}
	}
	// each record of the log is one line that begins as the log's lines do
	for line := range strings.Lines(e.Log()) {
		if !strings.HasPrefix(line, "time=") && !strings.HasPrefix(line, "{") && strings.TrimSpace(line) != "" && !strings.Contains(line, "time=") {
			t.Errorf("a line of somebody else's in the log: %q", line)
		}
	}
}
