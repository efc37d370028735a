package engine

import (
	"errors"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"vivarium/network"
	"vivarium/sandbox"
)

// node is an engine that can check specs, and nothing else.
func node() *Engine {
	return &Engine{
		runtimes: map[string]sandbox.Runtime{sandbox.RuntimeGVisor: nil},
		opts: Options{
			Network: &network.Network{}, // of which it asks what a policy is worth
			Defaults: sandbox.Spec{
				Runtime: sandbox.RuntimeGVisor, Network: sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic}, Timeout: 5 * time.Minute, IdleTimeout: time.Minute,
				Resources: sandbox.Resources{CPURequest: 100, CPULimit: 2000, MemoryRequest: 128 << 20, MemoryLimit: 1 << 30, Disk: 10 << 30, Pids: 1024},
			},
			Limits: Limits{CPU: 4000, Memory: 4 << 30, MaxDisk: 20 << 30, MaxPids: 4096, MaxTimeout: time.Hour},
		},
	}
}

func TestCompleteDefaults(t *testing.T) {
	t.Parallel()
	got, err := node().complete(sandbox.Spec{Image: "i", Probe: &sandbox.Probe{TCPPort: 80}})
	if err != nil {
		t.Fatal(err)
	}
	want := node().opts.Defaults
	want.Image, want.Pull = "i", sandbox.PullMissing
	want.Probe = &sandbox.Probe{TCPPort: 80, Interval: 100 * time.Millisecond, Timeout: 5 * time.Second}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	// a default never goes against what was asked for
	for _, r := range []struct{ ask, want sandbox.Resources }{
		{sandbox.Resources{CPURequest: 3000}, sandbox.Resources{CPURequest: 3000, CPULimit: 3000}},
		{sandbox.Resources{CPULimit: 50}, sandbox.Resources{CPURequest: 50, CPULimit: 50}},
		{sandbox.Resources{MemoryRequest: 2 << 30}, sandbox.Resources{MemoryRequest: 2 << 30, MemoryLimit: 2 << 30}},
		{sandbox.Resources{MemoryLimit: 64 << 20}, sandbox.Resources{MemoryRequest: 64 << 20, MemoryLimit: 64 << 20}},
	} {
		got, err := node().complete(sandbox.Spec{Image: "i", Resources: r.ask})
		if err != nil {
			t.Errorf("%+v: %v", r.ask, err)
		}
		if r.want.CPULimit != 0 && (got.Resources.CPURequest != r.want.CPURequest || got.Resources.CPULimit != r.want.CPULimit) ||
			r.want.MemoryLimit != 0 && (got.Resources.MemoryRequest != r.want.MemoryRequest || got.Resources.MemoryLimit != r.want.MemoryLimit) {
			t.Errorf("%+v gives %+v", r.ask, got.Resources)
		}
	}
}

func TestCompleteRefuses(t *testing.T) {
	t.Parallel()
	tags := map[string]string{}
	for i := range maxTags + 1 {
		tags[strings.Repeat("k", i+1)] = ""
	}
	for name, c := range map[string]struct {
		change func(*sandbox.Spec)
		kind   sandbox.Kind
		says   string
	}{
		"vm":                   {func(s *sandbox.Spec) { s.Runtime = "vm" }, sandbox.Unsupported, "vm"},
		"runtime":              {func(s *sandbox.Spec) { s.Runtime = "docker" }, sandbox.Invalid, "gvisor or vm"},
		"no image":             {func(s *sandbox.Spec) { s.Image = "" }, sandbox.Invalid, "image"},
		"name with a slash":    {func(s *sandbox.Spec) { s.Name = "a/b" }, sandbox.Invalid, "name"},
		"name of dots":         {func(s *sandbox.Spec) { s.Name = ".." }, sandbox.Invalid, "name"},
		"name with a newline":  {func(s *sandbox.Spec) { s.Name = "a\nb" }, sandbox.Invalid, "name"},
		"name ends in newline": {func(s *sandbox.Spec) { s.Name = "a\n" }, sandbox.Invalid, "name"},
		"name that is an id":   {func(s *sandbox.Spec) { s.Name = "sb-x" }, sandbox.Invalid, "id"},
		"long name":            {func(s *sandbox.Spec) { s.Name = strings.Repeat("a", 64) }, sandbox.Invalid, "63"},
		"too many tags":        {func(s *sandbox.Spec) { s.Tags = tags }, sandbox.Invalid, "tags"},
		"a tag too long":       {func(s *sandbox.Spec) { s.Tags = map[string]string{"a": strings.Repeat("b", maxTagBytes)} }, sandbox.Invalid, "tags"},
		"an empty tag":         {func(s *sandbox.Spec) { s.Tags = map[string]string{"": "x"} }, sandbox.Invalid, "tag"},
		"env with =":           {func(s *sandbox.Spec) { s.Env = map[string]string{"A=B": "c"} }, sandbox.Invalid, "environment"},
		"env without name":     {func(s *sandbox.Spec) { s.Env = map[string]string{"": "c"} }, sandbox.Invalid, "environment"},
		"env with NUL":         {func(s *sandbox.Spec) { s.Env = map[string]string{"A": "\x00"} }, sandbox.Invalid, "environment"},
		"negative cpu":         {func(s *sandbox.Spec) { s.Resources.CPULimit = -1 }, sandbox.Invalid, "negative"},
		"negative memory":      {func(s *sandbox.Spec) { s.Resources.MemoryRequest = -1 }, sandbox.Invalid, "negative"},
		"negative pids":        {func(s *sandbox.Spec) { s.Resources.Pids = -5 }, sandbox.Invalid, "negative"},
		"request above limit":  {func(s *sandbox.Spec) { s.Resources.CPURequest, s.Resources.CPULimit = 2, 1 }, sandbox.Invalid, "above"},
		"memory above limit":   {func(s *sandbox.Spec) { s.Resources.MemoryRequest, s.Resources.MemoryLimit = 2<<30, 1<<30 }, sandbox.Invalid, "above"},
		"cpu beyond the node":  {func(s *sandbox.Spec) { s.Resources.CPURequest = 5000 }, sandbox.Invalid, "4000"},
		"memory beyond it":     {func(s *sandbox.Spec) { s.Resources.MemoryLimit = 5 << 30 }, sandbox.Invalid, "4096 MiB"},
		"too little memory":    {func(s *sandbox.Spec) { s.Resources.MemoryLimit = 1 << 20 }, sandbox.Invalid, "32 MiB"},
		"too little disk":      {func(s *sandbox.Spec) { s.Resources.Disk = 1 }, sandbox.Invalid, "1 MiB"},
		"too much disk":        {func(s *sandbox.Spec) { s.Resources.Disk = 1 << 62 }, sandbox.Invalid, "20480 MiB"},
		"too few pids":         {func(s *sandbox.Spec) { s.Resources.Pids = 1 }, sandbox.Invalid, "16"},
		"too many pids":        {func(s *sandbox.Spec) { s.Resources.Pids = 1 << 40 }, sandbox.Invalid, "4096"},
		"negative timeout":     {func(s *sandbox.Spec) { s.Timeout = -1 }, sandbox.Invalid, "negative"},
		"long timeout":         {func(s *sandbox.Spec) { s.Timeout = 2 * time.Hour }, sandbox.Invalid, "1h0m0s"},
		"negative idle":        {func(s *sandbox.Spec) { s.IdleTimeout = -1 }, sandbox.Invalid, "negative"},
		"network":              {func(s *sandbox.Spec) { s.Network.Mode = "host" }, sandbox.Invalid, "public, none or allowlist"},
		"pull":                 {func(s *sandbox.Spec) { s.Pull = "sometimes" }, sandbox.Invalid, "pull"},
		"probe of nothing":     {func(s *sandbox.Spec) { s.Probe = &sandbox.Probe{} }, sandbox.Invalid, "probe"},
		"probe of both":        {func(s *sandbox.Spec) { s.Probe = &sandbox.Probe{TCPPort: 1, Command: []string{"a"}} }, sandbox.Invalid, "probe"},
		"probe back in time":   {func(s *sandbox.Spec) { s.Probe = &sandbox.Probe{TCPPort: 1, Interval: -1} }, sandbox.Invalid, "probe"},
		"host name":            {func(s *sandbox.Spec) { s.Hostname = "a b" }, sandbox.Invalid, "host name"},
		"long host name":       {func(s *sandbox.Spec) { s.Hostname = strings.Repeat("a", 64) }, sandbox.Invalid, "host name"},
	} {
		s := sandbox.Spec{Image: "i"}
		c.change(&s)
		if _, err := node().complete(s); !errors.Is(err, c.kind) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v (%s)", name, err, sandbox.KindOf(err))
		}
	}
}

// What a caller gave is not changed under him.
func TestCompleteCopies(t *testing.T) {
	t.Parallel()
	p := &sandbox.Probe{TCPPort: 80, Interval: 1}
	got, err := node().complete(sandbox.Spec{Image: "i", Probe: p})
	if err != nil || p.Interval != 1 || p.Timeout != 0 {
		t.Errorf("%+v, %v", p, err)
	}
	if got.Probe.Interval < minProbe {
		t.Errorf("a probe every %s", got.Probe.Interval)
	}
}

// Docker's rules: docs.docker.com/reference/dockerfile, "Understand how CMD and
// ENTRYPOINT interact", and docker run's --entrypoint, which clears CMD.
func TestMainCommand(t *testing.T) {
	t.Parallel()
	ent, cmd := []string{"ent", "-e"}, []string{"cmd", "-c"}
	for name, c := range map[string]struct {
		spec     sandbox.Spec
		ent, cmd []string
		want     []string
	}{
		"nothing asked":               {sandbox.Spec{}, ent, cmd, nil},
		"the image's":                 {sandbox.Spec{RunImageCommand: true}, ent, cmd, []string{"ent", "-e", "cmd", "-c"}},
		"the image's cmd alone":       {sandbox.Spec{RunImageCommand: true}, nil, cmd, cmd},
		"the image's entrypoint":      {sandbox.Spec{RunImageCommand: true}, ent, nil, ent},
		"the image has none":          {sandbox.Spec{RunImageCommand: true}, nil, nil, nil},
		"a command":                   {sandbox.Spec{Command: []string{"a"}}, nil, cmd, []string{"a"}},
		"a command after entrypoint":  {sandbox.Spec{Command: []string{"a"}}, ent, cmd, []string{"ent", "-e", "a"}},
		"a new entrypoint clears cmd": {sandbox.Spec{Entrypoint: []string{"n"}, RunImageCommand: true}, ent, cmd, []string{"n"}},
		"both":                        {sandbox.Spec{Entrypoint: []string{"n"}, Command: []string{"a"}}, ent, cmd, []string{"n", "a"}},
		"no entrypoint":               {sandbox.Spec{Entrypoint: []string{""}, Command: []string{"a"}}, ent, cmd, []string{"a"}},
		"nothing is left":             {sandbox.Spec{Entrypoint: []string{""}, RunImageCommand: true}, ent, cmd, nil},
	} {
		if got := mainCommand(c.spec, c.ent, c.cmd); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		if want := len(c.want) > 0; want && !wantsMain(c.spec) {
			t.Errorf("%s: has a main command, and does not want one", name)
		}
	}
	if &ent[0] == &mainCommand(sandbox.Spec{RunImageCommand: true}, ent, nil)[0] {
		t.Error("the image's own slice is handed out")
	}
}

func TestExecSpec(t *testing.T) {
	t.Parallel()
	sb := &sandbox.Sandbox{ID: "sb-ABC", Base: sandbox.Base{Env: []string{"PATH=/img", "A=img", "B=img", "C=img", "HOSTNAME=img", "broken"}, Workdir: "/img", User: "img"}}
	sb.Spec.Env = map[string]string{"B": "sb", "C": "sb"}
	x := sandbox.ExecSpec{Argv: []string{"a"}, Env: map[string]string{"C": "x"}}
	got := execSpec(sb, nil, x)
	if want := map[string]string{"PATH": "/img", "A": "img", "B": "sb", "C": "x", "HOSTNAME": "sb-abc"}; !maps.Equal(got.Env, want) {
		t.Errorf("env %v", got.Env)
	}
	if got.Workdir != "/img" || got.User != "img" {
		t.Errorf("%q, %q", got.Workdir, got.User)
	}
	sb.Spec.Workdir, sb.Spec.User, sb.Spec.Name = "/sb", "sb", "web"
	if got := execSpec(sb, nil, x); got.Workdir != "/sb" || got.User != "sb" || got.Env["HOSTNAME"] != "web" {
		t.Errorf("%q, %q, %q", got.Workdir, got.User, got.Env["HOSTNAME"])
	}
	sb.Spec.Hostname = "host"
	x.Workdir, x.User, x.Env = "/x", "x", map[string]string{"HOSTNAME": "mine"}
	if got := execSpec(sb, nil, x); got.Workdir != "/x" || got.User != "x" || got.Env["HOSTNAME"] != "mine" {
		t.Errorf("%q, %q, %q", got.Workdir, got.User, got.Env["HOSTNAME"])
	}
	if len(x.Env) != 1 {
		t.Errorf("the caller's own environment was changed: %v", x.Env)
	}
	if got := execSpec(&sandbox.Sandbox{}, nil, sandbox.ExecSpec{}); got.Workdir != "/" {
		t.Errorf("%q", got.Workdir)
	}
}
