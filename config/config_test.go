package config

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"vivarium/sandbox"
)

func load(t *testing.T, text string, src Source) (*Config, error) {
	t.Helper()
	if text != "" {
		src.File = filepath.Join(t.TempDir(), "config.yaml")
		if err := os.WriteFile(src.File, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return Load(src)
}

// The reference says what Default does, and names every setting.
func TestReference(t *testing.T) {
	t.Parallel()
	got := &Config{}
	where := places{}
	if err := got.parse("reference.yaml", []byte(Reference), where); err != nil {
		t.Fatal(err)
	}
	want := Default()
	got.Images.Mirrors, got.Network.Presets, got.Network.Upstreams, got.Cache.Upstreams = nil, nil, nil, nil // an empty mapping and none are the same
	if !reflect.DeepEqual(got, want) {
		t.Errorf("the reference parses to\n%+v\nand the defaults are\n%+v", got, want)
	}
	for _, p := range Paths() {
		if where[p] == "" {
			t.Errorf("%s is not in the reference", p)
		}
	}
	if _, err := load(t, Reference, Source{}); err != nil {
		t.Errorf("the reference is not valid: %v", err)
	}
}

func TestPrecedence(t *testing.T) {
	t.Parallel()
	file := "pool:\n  size: 3\nlog: {level: debug}\nspool:\n  per_exec: 1MiB\nnetwork:\n  grants:\n    - prefix: 192.0.2.0/24\n      ports: [443, 80]\n"
	c, err := load(t, file, Source{
		Environ: []string{"VIV_POOL_SIZE=4", "VIV_LOG_LEVEL=warn", "VIV_TOKEN=x", "VIV_NETWORK_RESOLVERS=[192.0.2.1]", "HOME=/"},
		Set:     []Setting{{Path: "pool.size", Value: "5"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if c.Pool.Size != 5 || c.Log.Level != "warn" || c.Spool.PerExec != 1<<20 || c.Listen != "127.0.0.1:7878" {
		t.Errorf("got %+v", c)
	}
	if want := []Grant{{"192.0.2.0/24", []int{443, 80}}}; !reflect.DeepEqual(c.Network.Grants, want) {
		t.Errorf("grants are %v", c.Network.Grants)
	}
	if !reflect.DeepEqual(c.Network.Resolvers, []string{"192.0.2.1"}) {
		t.Errorf("resolvers are %v", c.Network.Resolvers)
	}
	if c.UnixSocket != "/var/lib/vivarium/viv.sock" {
		t.Errorf("the socket is %s", c.UnixSocket)
	}
}

func TestErrorsNameThePlace(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ name, file, want string }{
		{"range", "log:\n  level: info\npool:\n  size: 257\n", "config.yaml:4: pool.size: must be between 0 and 256"},
		{"unknown", "pool:\n  sise: 1\n", "config.yaml:2: pool.sise: is not a setting; did you mean size?"},
		{"unknown group", "\npoool: {}\n", "config.yaml:2: poool: is not a setting; did you mean pool?"},
		{"type", "pool:\n  size: many\n", `config.yaml:2: pool.size: "many" is not a whole number`},
		{"size", "spool:\n  per_exec: 12 bananas\n", `config.yaml:2: spool.per_exec: "12 bananas" is not a size`},
		{"negative", "spool:\n  per_exec: -1\n", `config.yaml:2: spool.per_exec: "-1" is not a size`},
		{"duration", "defaults:\n  timeout: 5\n", `config.yaml:2: defaults.timeout: "5" is not a time`},
		{"null", "pool:\n  size:\n", "config.yaml:2: pool.size: has no value"},
		{"list", "network:\n  resolvers: 192.0.2.1\n", "config.yaml:2: network.resolvers: is not a list"},
		{"group", "pool: 8\n", "config.yaml:1: pool: is not a group of settings"},
		{"twice", "pool:\n  size: 1\n  size: 2\n", "config.yaml:3"},
		{"syntax", "pool:\n  size: [1\n", "config.yaml:"},
		{"bool", "listen_public: maybe\n", `config.yaml:1: listen_public: "maybe" is neither true nor false`},
		{"public", "listen: 0.0.0.0:7878\n", "config.yaml:1: listen: \"0.0.0.0:7878\" can be reached"},
		{"cross", "defaults:\n  memory_limit: 8MiB\n", "config.yaml:2: defaults.memory_limit: 8MiB is less than defaults.memory_request, 16MiB"},
		{"grant", "network:\n  grants:\n    - prefix: 10.0.0.1/8\n", "did you mean 10.0.0.0/8"},
		{"grant of all", "network:\n  grants:\n    - prefix: 0.0.0.0/0\n", "config.yaml:3: network.grants[0]: prefix \"0.0.0.0/0\" would grant everything"},
		{"users of the system", "uids:\n  first: 0\n", "config.yaml:2: uids.first: must be between 1000 and 2147483647"},
		{"negative users", "uids:\n  first: 2147483000\n", "uids.count: 65536 from 2147483000 on end beyond 2147483647"},
		{"nobody", "uids: {first: 60000}\n", "config.yaml:1: uids.first: the range 60000 to 125535 has nobody in it, 65534"},
		{"few users", "uids:\n  count: 2007\n", "config.yaml:2: uids.count: 2007 is less than limits.max_sandboxes and pool.size together, 2008"},
		{"alias", "log:\n  level: &a info\n", "config.yaml:2: log.level: is not a single value"},
		{"two documents", "pool: {size: 1}\n---\npool: {size: 2}\n", "more than one document"},
		{"relative", "data_dir: var\n", `config.yaml:1: data_dir: "var" is not a clean absolute path`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, err := load(t, tt.file, Source{})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %s", err, tt.want)
			}
			if err != nil && sandbox.KindOf(err) != sandbox.Invalid {
				t.Errorf("kind is %v", sandbox.KindOf(err))
			}
		})
	}
	for _, tt := range []struct {
		src  Source
		want string
	}{
		{Source{Environ: []string{"VIV_POOL_SIZE=900"}}, "environment VIV_POOL_SIZE: pool.size: must be between 0 and 256"},
		{Source{Environ: []string{"VIV_POLL_SIZE=1"}}, "environment: VIV_POLL_SIZE: is not a setting"},
		{Source{Set: []Setting{{Path: "log.level", Value: "loud", Flag: "--log-level"}}}, `--log-level: log.level: "loud" is not one of debug, info, warn, error`},
		{Source{Set: []Setting{{Path: "log", Value: "x"}}}, "is a group of settings"},
		{Source{Set: []Setting{{Path: "log.level.x", Value: "x"}}}, "is not a setting"},
		{Source{File: "/nonexistent/config.yaml"}, "no such file"},
	} {
		if _, err := Load(tt.src); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("got %v, want %s", err, tt.want)
		}
	}
}

// All mistakes of a file are told at once.
func TestAllErrors(t *testing.T) {
	t.Parallel()
	_, err := load(t, "pool:\n  size: x\nlog:\n  colour: red\n", Source{})
	if err == nil || !strings.Contains(err.Error(), "yaml:2:") || !strings.Contains(err.Error(), "yaml:4:") {
		t.Errorf("got %v", err)
	}
}

func TestUnits(t *testing.T) {
	t.Parallel()
	for s, want := range map[string]Size{"0": 0, "1": 1, "1k": 1024, "1.5GiB": 3 << 29, "10MB": 10_000_000, "2 GiB": 2 << 30, "512m": 512 << 20} {
		if got, err := ParseSize(s); err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "x", "1e9", "0x10", "-1", "Inf", "99999999TiB", "1..2", "MiB"} {
		if got, err := ParseSize(s); err == nil {
			t.Errorf("ParseSize(%q) = %d", s, got)
		}
	}
	for s, want := range map[string]CPU{"2": 2000, "0.5": 500, "250m": 250, ".1": 100} {
		if got, err := ParseCPU(s); err != nil || got != want {
			t.Errorf("ParseCPU(%q) = %d, %v", s, got, err)
		}
	}
	if d, err := ParseDuration("1h30m"); err != nil || d.D() != 90*time.Minute {
		t.Errorf("ParseDuration = %v, %v", d, err)
	}
}

func FuzzConfig(f *testing.F) {
	f.Add([]byte(Reference))
	f.Add([]byte("a: &a [*a]\nb: {<<: *a}\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c := Default()
		if err := c.parse("config.yaml", b, places{}); err != nil && sandbox.KindOf(err) != sandbox.Invalid {
			t.Errorf("kind is %v: %v", sandbox.KindOf(err), err)
		}
	})
}
