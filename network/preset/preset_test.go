package preset

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

// fixture is a host made of files, with tools that say what a test wants.
func fixture(t *testing.T, env []string, tools map[string]string, files ...string) Result {
	t.Helper()
	root := t.TempDir()
	for i := 0; i+1 < len(files); i += 2 {
		p := filepath.Join(root, files[i])
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(files[i+1]), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	res := read(t.Context(), host{root: root, home: "/home/me", env: env, run: func(_ context.Context, _ []string, argv ...string) (string, error) {
		if out, ok := tools[argv[0]]; ok {
			return out, nil
		}
		return "", errors.New("no such tool")
	}})
	for name, rules := range res.Presets {
		for _, text := range rules {
			if _, err := policy.ParseRule(sandbox.RuleAllow, text); err != nil {
				t.Errorf("preset %s: %v", name, err)
			}
		}
	}
	if s := fmt.Sprintf("%+v", res); strings.Contains(s, "secret") {
		t.Errorf("a password is in the result: %s", s)
	}
	return res
}

func wantRules(t *testing.T, res Result, preset string, want ...string) {
	t.Helper()
	if got := res.Presets[preset]; !slices.Equal(got, want) {
		t.Errorf("%s: rules %q, want %q", preset, got, want)
	}
}

func wantUpstreams(t *testing.T, res Result, preset string, want ...string) {
	t.Helper()
	var got []string
	names := map[string]bool{}
	for _, u := range res.Upstreams[preset] {
		got = append(got, strings.Join(append([]string{u.URL}, u.Also...), " "))
		if names[u.Name] || u.Name == "" {
			t.Errorf("%s: name %q twice or empty", preset, u.Name)
		}
		names[u.Name] = true
	}
	if !slices.Equal(got, want) {
		t.Errorf("%s: upstreams %q, want %q", preset, got, want)
	}
}

// wantWarnings checks that each text is in a warning, and that there are no more.
func wantWarnings(t *testing.T, res Result, want ...string) {
	t.Helper()
	if len(res.Warnings) != len(want) {
		t.Errorf("%d warnings, want %d: %+v", len(res.Warnings), len(want), res.Warnings)
	}
	for _, w := range want {
		if !slices.ContainsFunc(res.Warnings, func(x Warning) bool { return strings.Contains(x.Text, w) }) {
			t.Errorf("no warning has %q: %+v", w, res.Warnings)
		}
	}
}

func TestNothing(t *testing.T) {
	t.Parallel()
	res := fixture(t, nil, nil)
	if len(res.Presets)+len(res.Upstreams)+len(res.Warnings) > 0 || res.GoDirect {
		t.Errorf("from nothing: %+v", res)
	}
}

func TestApt(t *testing.T) {
	t.Parallel()
	res := fixture(t, []string{"http_proxy=http://me:secret@proxy.example.com:3128"}, nil,
		"etc/apt/sources.list", "# deb http://no.example.com/debian x main\ndeb http://deb.example.com/debian bookworm main # y\n"+
			"deb [arch=amd64 signed-by=/x] https://me:secret@tls.example.com:8443/a/ stable main\ndeb-src http://DEB.example.com/debian/ bookworm main\n"+
			"deb cdrom:[Debian]/ x main\ndeb mirror+file:/x y main\ndeb [broken http://no.example.com x\ndeb http://v6.example.com/$(ARCH) x main\ndeb http://[::1]/debian x main\ndeb http://192.0.2.7:81/debian ./\n",
		"etc/apt/sources.list.d/a.sources", "Types: deb\nURIs: http://deb.example.com/debian-security\n https://two.example.com/x\nSuites: s\n\n# c\nEnabled: no\nTypes: deb\nURIs: http://no.example.com/x\n\nTypes: deb\n#URIs: http://no.example.com\nURIs: https://three.example.com\n",
		"etc/apt/sources.list.d/b.list.save", "deb http://no.example.com/x y main\n",
		"etc/apt/apt.conf.d/01x", "// c\nAcquire { http { Proxy \"http://me:secret@apt-proxy.example.com:8080/\"; Proxy::direct.example.com \"DIRECT\"; }; };\n/* Acquire::http::Proxy \"http://no.example.com\"; */ APT::X {\"a\";\"b\";};\n",
		"etc/apt/apt.conf.d/02x.conf", "Acquire::https::Proxy \"https://b.example.com\";\n# Acquire::http::Proxy \"http://no.example.com\";\nacquire::http::Proxy-Auto-Detect \"/usr/bin/x\";",
		"etc/apt/apt.conf.d/x.disabled", "Acquire::http::Proxy \"http://no.example.com\";")
	wantRules(t, res, Debian, "deb.example.com:80", "tls.example.com:8443", "192.0.2.7:81/tcp", "two.example.com:443", "three.example.com:443")
	wantUpstreams(t, res, Debian, "http://deb.example.com/debian", "https://tls.example.com:8443/a", "http://192.0.2.7:81/debian", "http://deb.example.com/debian-security", "https://two.example.com/x", "https://three.example.com")
	wantWarnings(t, res, "tls.example.com has a user or password", "transport mirror+file", "variable", "IPv6 is off", "proxy at apt-proxy.example.com:8080", "proxy at b.example.com", "with a program", "proxy at proxy.example.com:3128")
}

func TestNPM(t *testing.T) {
	t.Parallel()
	tools := map[string]string{"npm": "https://default.example.com/\n"}
	res := fixture(t, nil, tools)
	wantRules(t, res, NPM, "default.example.com:443")
	wantUpstreams(t, res, NPM, "https://default.example.com")
	rc := "; c\nregistry=https://${HOST}/npm/\n//npm.example.com/:_authToken=secret\n@corp:registry = https://me:secret@corp.example.com:444/\nhttps-proxy=null\nproxy=http://p.example.com:1\n"
	res = fixture(t, []string{"HOST=npm.example.com"}, tools, "home/me/.npmrc", rc, "etc/npmrc", "registry=https://no.example.com/\n")
	wantRules(t, res, NPM, "npm.example.com:443", "corp.example.com:444")
	wantUpstreams(t, res, NPM, "https://npm.example.com/npm", "https://corp.example.com:444")
	wantWarnings(t, res, "corp.example.com has a user", "proxy at p.example.com:1")
	res = fixture(t, []string{"NPM_config_Registry=http://env.example.com", "npm_config_userconfig=/x/rc"}, tools, "home/me/.npmrc", rc, "x/rc", "audit=false")
	wantRules(t, res, NPM, "env.example.com:80")
}

func TestPip(t *testing.T) {
	t.Parallel()
	tools := map[string]string{"python3": "https://own.example.com/simple files.example.com\n"}
	res := fixture(t, nil, tools)
	wantRules(t, res, PyPI, "own.example.com:443", "files.example.com:443")
	wantUpstreams(t, res, PyPI, "https://own.example.com/simple files.example.com")
	wantWarnings(t, res)
	conf := "[global]\nindex-url = https://me:secret@a.example.com/simple/\nextra-index-url =\n  https://b.example.com/simple\n  https://own.example.com/simple/\ntrusted-host = x\n[list]\nindex-url = https://no.example.com\n"
	res = fixture(t, []string{"UV_INDEX=torch=https://t.example.com/whl"}, tools, "home/me/.config/pip/pip.conf", conf, "etc/pip.conf", "[global]\nindex_url=https://no.example.com/simple\n")
	wantRules(t, res, PyPI, "a.example.com:443", "b.example.com:443", "own.example.com:443", "files.example.com:443", "t.example.com:443")
	wantUpstreams(t, res, PyPI, "https://a.example.com/simple", "https://b.example.com/simple", "https://own.example.com/simple files.example.com", "https://t.example.com/whl")
	wantWarnings(t, res, "a.example.com has a user", "index at a.example.com", "index at b.example.com", "index at t.example.com")
	res = fixture(t, []string{"PIP_INDEX_URL=https://env.example.com/simple", "PIP_PROXY=p.example.com:8080"}, nil, "home/me/.config/pip/pip.conf", "[global]\nindex-url=https://no.example.com/simple")
	wantRules(t, res, PyPI, "env.example.com:443")
	wantWarnings(t, res, "index at env.example.com", "proxy at p.example.com:8080")
}

func TestGo(t *testing.T) {
	t.Parallel()
	res := fixture(t, nil, map[string]string{"go": "https://proxy.example.com,http://second.example.com/x|direct\nsum.example.com\n"})
	wantRules(t, res, Go, "proxy.example.com:443", "second.example.com:80", "sum.example.com:443")
	wantUpstreams(t, res, Go, "https://proxy.example.com", "http://second.example.com/x")
	wantWarnings(t, res, "(direct)")
	if !res.GoDirect {
		t.Error("direct was not seen")
	}
	res = fixture(t, []string{"GOSUMDB=sum.example.com+abc+key https://db.example.com:8443/x"}, nil, "usr/local/go/go.env", "# c\nGOPROXY=https://default.example.com,direct\nGOSUMDB=sum.golang\n",
		"home/me/.config/go/env", "GOPROXY=https://me:secret@mine.example.com\n")
	wantRules(t, res, Go, "mine.example.com:443", "db.example.com:8443")
	wantWarnings(t, res, "mine.example.com has a user")
	for _, off := range []string{"off", "direct", "file:///srv/go"} {
		if res := fixture(t, nil, map[string]string{"go": off + "\nsum.example.com\n"}); len(res.Presets)+len(res.Upstreams) > 0 {
			t.Errorf("%s: %+v", off, res)
		}
	}
}

// TestThisHost: whatever this machine's settings are, every rule is one, and no
// password gets out.
func TestThisHost(t *testing.T) {
	t.Parallel()
	res := FromHost(t.Context())
	for name, rules := range res.Presets {
		for _, text := range rules {
			if _, err := policy.ParseRule(sandbox.RuleAllow, text); err != nil || strings.Contains(text, "@") {
				t.Errorf("preset %s: %q: %v", name, text, err)
			}
		}
	}
	for kind, ups := range res.Upstreams {
		for _, u := range ups {
			if strings.Contains(u.URL, "@") {
				t.Errorf("%s upstream %s has a user", kind, u.Name)
			}
		}
	}
}

// FuzzSettings: no file breaks the readers.
func FuzzSettings(f *testing.F) {
	f.Add("deb [a] http://x y\n", "Types: deb\nURIs: http://x", "A { B \"c\"; };", "[global]\nindex-url=x")
	f.Fuzz(func(t *testing.T, list, stanzas, conf, rc string) {
		r := &reader{host: host{root: t.TempDir()}, ctx: t.Context(), out: Result{Presets: map[string][]string{}, Upstreams: map[string][]Upstream{}}}
		r.aptLines(list)
		r.aptStanzas(stanzas)
		for _, kv := range aptConf(conf) {
			r.aptProxy(kv[0], kv[1])
		}
		ini(rc, func(_, _, v string) { r.registry(PyPI, r.expand(v)) })
		for _, rules := range r.out.Presets {
			for _, text := range rules {
				if _, err := policy.ParseRule(sandbox.RuleAllow, text); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}
