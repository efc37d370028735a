package image

import (
	"context"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"

	"vivarium/sandbox"
)

const debianSources = `Types: deb deb-src
# a comment
URIs: http://deb.example.org/debian
Suites: bookworm bookworm-updates bookworm-backports
Components: main contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://deb.example.org/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Enabled: no
Types: deb
URIs: http://deb.example.org/off
Suites: bookworm
Components: main
`

// host makes a directory that looks like a host to BuildBase.
func host(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, data := range files {
		p := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		program(t, p, data)
	}
	return root
}

// program writes a file that can be executed at once: a process that another test
// forks meanwhile does not have it open for writing (ETXTBSY).
func program(t *testing.T, path, data string) {
	t.Helper()
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	if err := os.WriteFile(path, []byte(data), 0o755); err != nil {
		t.Fatal(err)
	}
}

const osRelease = "PRETTY_NAME=\"Debian\"\nID=debian\nVERSION_CODENAME=bookworm\n"

func TestPlanBase(t *testing.T) {
	t.Parallel()
	etc := host(t, map[string]string{
		"etc/os-release":                                                 osRelease,
		"etc/apt/sources.list.d/debian.sources":                          debianSources,
		"etc/apt/sources.list.d/node.sources":                            "Types: deb\nURIs: https://other.example/node_20.x\nSuites: nodistro\nComponents: main\nSigned-By: /k/other.gpg\n",
		"etc/apt/sources.list.d/vendor.list":                             "deb [arch=amd64 signed-by=/k/vendor.gpg] https://vendor.example/debian bookworm main\n",
		"etc/apt/sources.list.d/cd.list":                                 "deb cdrom:[x]/ bookworm main\ndeb http://u:p@deb.example.org/debian bookworm main\n# deb http://x/debian bookworm main\ndeb-src http://x/debian bookworm main\n",
		"etc/apt/sources.list":                                           "deb http://mirror.example/debian bookworm main\n",
		"etc/apt/sources.list.d/liar.list":                               "deb http://liar.example/debian bookworm main\n",
		"var/lib/apt/lists/liar.example_debian_dists_bookworm_InRelease": "Origin: Liar Inc\n",
		"bin/tool": "#!/bin/sh\n",
	})
	p, err := planBase(BaseOptions{Etc: etc, Tool: etc + "/bin/tool", With: []string{"build"}, Packages: []string{"jq", "git"}})
	if err != nil {
		t.Fatal(err)
	}
	key := "/usr/share/keyrings/debian-archive-keyring.gpg"
	want := []aptSource{
		{"http://mirror.example/debian", []string{"bookworm"}, []string{"main"}, ""},
		{"http://deb.example.org/debian", []string{"bookworm", "bookworm-updates"}, []string{"main"}, key},
		{"http://deb.example.org/debian-security", []string{"bookworm-security"}, []string{"main"}, key},
	}
	if !reflect.DeepEqual(p.sources, want) {
		t.Errorf("sources:\n%v\nwant\n%v", p.sources, want)
	}
	if got := parseDeb822(formatDeb822(want)); !reflect.DeepEqual(got, want) {
		t.Errorf("written and read again: %v", got)
	}
	for _, n := range []string{"git", "jq", "build-essential", "debian-archive-keyring", "python3"} {
		if !slices.Contains(p.packages, n) {
			t.Errorf("no %s among %v", n, p.packages)
		}
	}
	if p, err = planBase(BaseOptions{Etc: etc, Tool: "x", Suite: "trixie"}); err != nil || p.sources[2].Suites[0] != "trixie-security" {
		t.Errorf("other release: %+v, %v", p, err)
	}
	for _, o := range []BaseOptions{{Suite: "../x"}, {Suite: "-o"}, {Packages: []string{"--x"}}, {Packages: []string{"a b"}}, {With: []string{"no such"}}} {
		o.Etc, o.Tool = etc, "x"
		_, err := planBase(o)
		wantKind(t, err, sandbox.Invalid)
	}
}

func TestPlanBaseUnsupported(t *testing.T) {
	t.Parallel()
	for name, files := range map[string]map[string]string{
		"other distribution": {"etc/os-release": "ID=fedora\nVERSION_CODENAME=forty\n"},
		"no sources":         {"etc/os-release": osRelease},
		"no os-release":      {},
	} {
		_, err := planBase(BaseOptions{Etc: host(t, files), Tool: "x"})
		wantKind(t, err, sandbox.Unsupported)
		if name != "no os-release" && sandbox.HintOf(err) == "" {
			t.Errorf("%s: no hint", name)
		}
	}
}

// A tool that is not the real one shows how it is called, and what becomes of
// its failures.
func TestBuildBaseTool(t *testing.T) {
	t.Parallel()
	tool := `#!/bin/sh
printf '%s\n' "$@" > "$TMPDIR/../../args"
mkdir r r/etc r/mnt; echo x > r/etc/hostname; echo y > r/etc/keep
mount -t tmpfs none r/mnt && echo leaked > r/mnt/f
tar -C r --one-file-system -c .
`
	etc := host(t, map[string]string{
		"etc/os-release":                                osRelease,
		"etc/apt/sources.list.d/debian.sources":         debianSources,
		"usr/share/keyrings/debian-archive-keyring.gpg": "KEY",
		"bin/mmdebstrap":                                tool,
		"bin/fail":                                      "#!/bin/sh\necho 'E: Unable to locate package zzz' >&2; exit 100\n",
		"bin/down":                                      "#!/bin/sh\necho 'E: Failed to fetch http://x' >&2; exit 100\n",
		"bin/hang":                                      "#!/bin/sh\nsleep 1000 & sleep 1000\n",
	})
	s := open(t, Options{})
	ctx := context.Background()
	img, err := s.BuildBase(ctx, "t", BaseOptions{Etc: etc, Tool: etc + "/bin/mmdebstrap"})
	if err != nil {
		t.Fatal(err)
	}
	if img.Tags[0] != BaseTag || img.Config.Cmd[0] != "bash" || img.Source != "base:debian/bookworm" {
		t.Errorf("image: %+v", img)
	}
	f := files(t, img)
	wantFile(t, f, "etc/hostname", "")
	wantFile(t, f, "etc/keep", "y\n")
	wantFile(t, f, "usr/share/keyrings/debian-archive-keyring.gpg", "KEY")
	wantFile(t, f, "etc/apt/apt.conf.d/90vivarium", aptSettings)
	wantNone(t, f, "mnt/f")
	args, err := os.ReadFile(filepath.Join(s.opt.Dir, "args"))
	if err != nil || !strings.Contains(string(args), "--variant=minbase\n") || !strings.Contains(string(args), "\nbookworm\n-\n") {
		t.Errorf("arguments: %s, %v", args, err)
	}
	_, err = s.BuildBase(ctx, "t", BaseOptions{Etc: etc, Tool: etc + "/bin/fail"})
	wantKind(t, err, sandbox.Invalid)
	_, err = s.BuildBase(ctx, "t", BaseOptions{Etc: etc, Tool: etc + "/bin/down"})
	wantKind(t, err, sandbox.Unavailable)
	short, cancel := context.WithCancel(ctx)
	hung := &notify{ch: make(chan struct{})}
	go func() { <-hung.ch; cancel() }()
	program(t, etc+"/bin/hang", "#!/bin/sh\necho here >&2\nsleep 1000 & sleep 1000\n")
	_, err = s.BuildBase(short, "t", BaseOptions{Etc: etc, Tool: etc + "/bin/hang", Out: hung})
	wantKind(t, err, sandbox.Unavailable)
	wantClean(t, s)
}

// notify closes ch at the first write.
type notify struct{ ch chan struct{} }

func (n *notify) Write(p []byte) (int, error) {
	select {
	case <-n.ch:
	default:
		close(n.ch)
	}
	return len(p), nil
}

// The real thing takes half a minute and a package mirror: VIV_TEST_BASE names
// a directory where the image is left for a look.
func TestBuildBaseReal(t *testing.T) {
	dir := os.Getenv("VIV_TEST_BASE")
	if dir == "" {
		t.Skip("set VIV_TEST_BASE to a directory to build a base image from this host's package mirror")
	}
	s := open(t, Options{Dir: dir})
	img, err := s.BuildBase(context.Background(), "t", BaseOptions{Out: os.Stderr, Tool: os.Getenv("VIV_TEST_BASE_TOOL")})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", img)
	f := files(t, img)
	for _, n := range []string{"usr/bin/python3", "usr/bin/git", "usr/bin/curl", "usr/bin/apt-get", "etc/ssl/certs/ca-certificates.crt", "etc/apt/sources.list.d/debian.sources"} {
		if _, err := f.Open(n); err != nil {
			t.Errorf("%s: %v", n, err)
		}
	}
	wantClean(t, s)
}
