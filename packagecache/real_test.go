package packagecache_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"vivarium/network/preset"
	"vivarium/packagecache"
)

// These tests use the real tools against the registries that this host is set up
// for, read at run time. They skip where a tool or its registry is not there:
// what the registries must never do to us is tested against fakes.

// real is a cache of the host's own registries, on loopback.
type real struct {
	*packagecache.Cache
	base netip.AddrPort
	env  []string // the host's, with what Setup adds
}

var settings = sync.OnceValue(func() preset.Result { return preset.FromHost(context.Background()) })

func startReal(t *testing.T, kind, tool string) *real {
	t.Helper()
	if testing.Short() {
		t.Skip("uses the network")
	}
	if _, err := exec.LookPath(tool); err != nil {
		t.Skipf("no %s here", tool)
	}
	ups := settings().Upstreams
	if len(ups[kind]) == 0 {
		t.Skipf("the host has no setting for %s", kind)
	}
	// Reachable at all? A host without a way out has nothing to test with.
	reachable := slices.ContainsFunc(ups[kind], func(u preset.Upstream) bool {
		_, rest, _ := strings.Cut(u.URL, "://")
		host, _, _ := strings.Cut(rest, "/")
		if !strings.Contains(host, ":") {
			host += map[bool]string{true: ":443", false: ":80"}[strings.HasPrefix(u.URL, "https")]
		}
		conn, err := net.DialTimeout("tcp", host, 5*time.Second)
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	})
	if !reachable {
		t.Skipf("no upstream for %s can be reached", kind)
	}
	conv := func(us []preset.Upstream) (out []packagecache.Upstream) {
		for _, u := range us {
			out = append(out, packagecache.Upstream{Name: u.Name, URL: u.URL, Also: u.Also})
		}
		return out
	}
	dialer := &net.Dialer{Timeout: 20 * time.Second}
	c, err := packagecache.Open(packagecache.Config{Dir: t.TempDir(), Tenant: func(netip.Addr) string { return "t" }, Dial: dialer.DialContext,
		Debian: conv(ups[preset.Debian]), NPM: conv(ups[preset.NPM]), PyPI: conv(ups[preset.PyPI]), Go: conv(ups[preset.Go])})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- c.Serve(ln) }()
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	r := &real{Cache: c, base: netip.MustParseAddrPort(ln.Addr().String())}
	env, _ := c.Setup(r.base)
	r.env = os.Environ()
	for k, v := range env {
		r.env = append(r.env, k+"="+v)
	}
	return r
}

// run runs a tool in a folder, in an environment where only the cache answers:
// any other way out goes to a proxy that is not there.
func (r *real) run(t *testing.T, dir string, env []string, argv ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = dir
	cmd.Env = append(append(slices.Clone(r.env), "HTTPS_PROXY=http://127.0.0.1:9", "https_proxy=http://127.0.0.1:9", "HTTP_PROXY=http://127.0.0.1:9", "http_proxy=http://127.0.0.1:9",
		"NO_PROXY=127.0.0.1", "no_proxy=127.0.0.1"), env...)
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
	return string(out)
}

// twice runs fn with an empty cache and with a full one, and checks that the
// second time next to nothing is fetched.
func (r *real) twice(t *testing.T, kind string, fn func(t *testing.T)) {
	t.Helper()
	fn(t)
	first := r.Stats()
	if first.Kinds[kind].Misses == 0 || first.Fetched == 0 {
		t.Fatalf("nothing came through the cache: %+v", first)
	}
	fn(t)
	second := r.Stats()
	if more := second.Fetched - first.Fetched; more > first.Fetched/10 || second.Kinds[kind].Hits <= first.Kinds[kind].Hits {
		t.Errorf("the second time %d bytes were fetched, the first %d: %+v", more, first.Fetched, second)
	}
}

func TestRealGo(t *testing.T) {
	t.Parallel()
	r := startReal(t, preset.Go, "go")
	dir := t.TempDir()
	mod := filepath.Join(dir, "go.mod")
	r.twice(t, packagecache.Go, func(t *testing.T) {
		if err := os.WriteFile(mod, []byte("module x.example/y\n\ngo 1.21\n\nrequire golang.org/x/sync v0.10.0\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		_ = os.Remove(filepath.Join(dir, "go.sum"))
		cache := t.TempDir()
		env := []string{"GOMODCACHE=" + cache, "GOFLAGS=-modcacherw -mod=mod", "GOTOOLCHAIN=local", "GONOSUMDB=", "GOPRIVATE=", "GOWORK=off"}
		r.run(t, dir, env, "go", "mod", "download", "all")
		r.run(t, dir, env, "go", "list", "-m", "-versions", "golang.org/x/sync")
		if b, err := os.ReadFile(filepath.Join(dir, "go.sum")); err != nil || !strings.Contains(string(b), "golang.org/x/sync v0.10.0 h1:") {
			t.Errorf("go.sum: %s, %v", b, err)
		}
	})
}

func TestRealNPM(t *testing.T) {
	t.Parallel()
	r := startReal(t, preset.NPM, "npm")
	dir := t.TempDir()
	write := func(s string) {
		if err := os.WriteFile(filepath.Join(dir, "package.json"), []byte(s), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r.twice(t, packagecache.NPM, func(t *testing.T) {
		write(`{"name":"x","version":"1.0.0","dependencies":{"debug":"4.3.4","@types/ms":"0.7.34"}}`)
		env := []string{"npm_config_cache=" + t.TempDir(), "npm_config_audit=false", "npm_config_fund=false", "npm_config_update_notifier=false"}
		_ = os.RemoveAll(filepath.Join(dir, "node_modules"))
		_ = os.Remove(filepath.Join(dir, "package-lock.json"))
		r.run(t, dir, env, "npm", "install", "--ignore-scripts")
		if _, err := os.Stat(filepath.Join(dir, "node_modules/ms/package.json")); err != nil {
			t.Error(err)
		}
		lock, err := os.ReadFile(filepath.Join(dir, "package-lock.json"))
		if err != nil || strings.Contains(string(lock), "127.0.0.1") {
			t.Errorf("the lock file has the cache in it: %s, %v", lock, err)
		}
		r.run(t, dir, env, "npm", "ci", "--ignore-scripts")
		// A lock file made with the default registry: npm moves its addresses to ours.
		var v map[string]any
		if err := json.Unmarshal(lock, &v); err != nil {
			t.Fatal(err)
		}
		for p, e := range v["packages"].(map[string]any) {
			if name, ok := strings.CutPrefix(p, "node_modules/"); ok {
				m := e.(map[string]any)
				m["resolved"] = fmt.Sprintf("%s/%s/-/%s-%s.tgz", settings().Upstreams[preset.NPM][0].URL, name, name[strings.LastIndex(name, "/")+1:], m["version"])
			}
		}
		lock, _ = json.Marshal(v)
		if err := os.WriteFile(filepath.Join(dir, "package-lock.json"), lock, 0o600); err != nil {
			t.Fatal(err)
		}
		r.run(t, dir, append(env, "npm_config_cache="+t.TempDir()), "npm", "ci", "--ignore-scripts")
	})
}

func TestRealPip(t *testing.T) {
	t.Parallel()
	r := startReal(t, preset.PyPI, "python3")
	if err := exec.CommandContext(t.Context(), "python3", "-m", "pip", "--version").Run(); err != nil {
		t.Skip("no pip here")
	}
	r.twice(t, packagecache.PyPI, func(t *testing.T) {
		dir := t.TempDir()
		r.run(t, dir, []string{"PIP_NO_CACHE_DIR=1", "PIP_FIND_LINKS=", "PIP_CERT=", "PIP_EXTRA_INDEX_URL="}, "python3", "-m", "pip", "download", "--disable-pip-version-check", "-d", dir, "requests==2.31.0")
		if m, _ := filepath.Glob(filepath.Join(dir, "urllib3-*.whl")); len(m) != 1 {
			t.Errorf("downloaded %v", m)
		}
	})
}

// TestRealApt runs apt-get with a root of its own: nothing of the host's state is
// changed.
func TestRealApt(t *testing.T) {
	t.Parallel()
	for _, way := range []string{"as its proxy", "as its mirror"} {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			r := startReal(t, preset.Debian, "apt-get")
			ups := settings().Upstreams[preset.Debian]
			i := slices.IndexFunc(ups, func(u preset.Upstream) bool {
				return strings.HasPrefix(u.URL, "http:") && strings.HasSuffix(u.URL, "/debian")
			})
			const keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
			if _, err := os.Stat(keys); err != nil || i < 0 {
				t.Skip("the host's apt has no Debian archive")
			}
			source := ups[i].URL
			if way == "as its mirror" {
				source = fmt.Sprintf("http://%s/debian/%s", r.base, ups[i].Name)
			}
			r.twice(t, packagecache.Debian, func(t *testing.T) { r.apt(t, keys, source) })
		})
	}
}

// codename of the host's release, of which it has the keys.
func codename(t *testing.T) string {
	t.Helper()
	b, _ := os.ReadFile("/etc/os-release")
	for line := range strings.Lines(string(b)) {
		if v, ok := strings.CutPrefix(line, "VERSION_CODENAME="); ok {
			return strings.TrimSpace(v)
		}
	}
	t.Skip("no Debian")
	return ""
}

func (r *real) apt(t *testing.T, keys, source string) {
	t.Helper()
	_, files := r.Setup(r.base)
	root := t.TempDir()
	for _, d := range []string{"etc/apt/apt.conf.d", "etc/apt/preferences.d", "etc/apt/sources.list.d", "state/lists/partial", "cache/archives/partial"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var conf strings.Builder
	for _, kv := range [][2]string{{"Dir::Etc", "etc/apt"}, {"Dir::Etc::parts", "etc/apt/apt.conf.d"}, {"Dir::State", "state"}, {"Dir::State::status", "status"}, {"Dir::Cache", "cache"}} {
		_, _ = fmt.Fprintf(&conf, "%s %q;\n", kv[0], filepath.Join(root, kv[1]))
	}
	conf.WriteString("APT::Sandbox::User \"root\"; Acquire::Languages \"none\"; Acquire::Check-Date \"false\"; Acquire::Check-Valid-Until \"false\"; APT::Architecture \"amd64\"; APT::Architectures {\"amd64\";};\n")
	for p, b := range map[string]string{
		"apt.conf": conf.String(), "status": "",
		"etc/apt/sources.list":                               fmt.Sprintf("deb [signed-by=%s] %s %s main\n", keys, source, codename(t)),
		"etc/apt/apt.conf.d/" + filepath.Base(files[0].Path): string(files[0].Data),
	} {
		if err := os.WriteFile(filepath.Join(root, p), []byte(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	env := []string{"APT_CONFIG=" + filepath.Join(root, "apt.conf"), "http_proxy="}
	r.run(t, root, env, "apt-get", "update", "-o", "Acquire::http::Timeout=30", "-o", "APT::Update::Error-Mode=any")
	r.run(t, root, env, "apt-get", "download", "hostname")
	if m, _ := filepath.Glob(filepath.Join(root, "hostname_*.deb")); len(m) != 1 {
		t.Errorf("downloaded %v", m)
	}
}
