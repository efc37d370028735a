package image

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"vivarium/sandbox"
)

// BaseTag is the name that the base image gets unless asked otherwise.
const BaseTag = "base:latest"

// BaseOptions says what goes into a base image.
type BaseOptions struct {
	// Suite is the release, such as "bookworm"; "" is the host's own.
	Suite string
	// With names groups of packages to add; see BaseGroups.
	With []string
	// Packages are further packages by name.
	Packages []string
	// Tag names the image; "" is BaseTag.
	Tag string
	// Out gets the output of the tool that builds, line by line; may be nil.
	Out io.Writer
	// Tool is the path of mmdebstrap or debootstrap; "" looks for them.
	Tool string
	// Etc is the host's root for apt's files and os-release; "" is "/".
	Etc string
}

// BaseGroups are the groups of packages that BaseOptions.With may name.
var BaseGroups = map[string][]string{
	"build": {"build-essential", "pkg-config"},
	"pip":   {"python3-pip", "python3-venv", "python3-dev"},
	"net":   {"iproute2", "iputils-ping", "bind9-dnsutils", "netcat-openbsd"},
	"tools": {"less", "vim-tiny", "procps", "file", "jq", "ripgrep", "unzip", "xz-utils", "openssh-client"},
	"node":  {"nodejs", "npm"},
	"go":    {"golang-go"},
}

// basePackages are in every base image.
var basePackages = []string{"apt", "ca-certificates", "curl", "git", "python3"}

// packageName is what Debian Policy 5.6.1 allows.
var packageName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z0-9][a-z0-9+.-]{1,127}$`) })

var suiteName = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z][a-z0-9]{1,31}$`) })

// basePlan is a base image thought through.
type basePlan struct {
	distro   distro
	suite    string
	sources  []aptSource
	packages []string
	tool     string // path
	etc      string
}

// planBase checks the options and the host. Errors: Invalid, Unsupported.
func planBase(o BaseOptions) (*basePlan, error) {
	p := &basePlan{etc: o.Etc}
	if p.etc == "" {
		p.etc = "/"
	}
	id, host, err := hostRelease(p.etc)
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(distros, func(d distro) bool { return d.ID == id })
	if i < 0 {
		return nil, sandbox.Unsupported.Errorf("a base image can be made on Debian and Ubuntu; this host is %q", id).
			WithHint("pull an image from a registry instead (viv pull debian), or load one (viv load)")
	}
	p.distro = distros[i]
	if p.suite = o.Suite; p.suite == "" {
		p.suite = host
	}
	if !suiteName().MatchString(p.suite) {
		return nil, sandbox.Invalid.Errorf("bad release name %.40q", p.suite)
	}
	all, err := readSources(filepath.Join(p.etc, "etc/apt"))
	if err != nil {
		return nil, err
	}
	p.sources = distroSources(all, p.distro, host, p.suite, filepath.Join(p.etc, "var/lib/apt/lists"))
	if len(p.sources) == 0 {
		return nil, sandbox.Unsupported.Errorf("apt on this host has no %s repository for %s that can be reached over HTTP", p.distro.ID, host).
			WithHint("add one to /etc/apt/sources.list.d, or pull an image from a registry (viv pull debian)")
	}
	p.packages = append(slices.Clone(basePackages), p.distro.Keyring)
	for _, g := range o.With {
		pkgs, ok := BaseGroups[g]
		if !ok {
			return nil, sandbox.Invalid.Errorf("unknown group of packages %.40q", g).WithHint("it is one of: %s", strings.Join(groupNames(), ", "))
		}
		p.packages = append(p.packages, pkgs...)
	}
	for _, n := range o.Packages {
		if !packageName().MatchString(n) {
			return nil, sandbox.Invalid.Errorf("bad package name %.40q", n)
		}
		p.packages = append(p.packages, n)
	}
	slices.Sort(p.packages)
	p.packages = slices.Compact(p.packages)
	p.tool, err = findTool(o.Tool)
	return p, err
}

func groupNames() []string {
	var out []string
	for g := range BaseGroups {
		out = append(out, g)
	}
	slices.Sort(out)
	return out
}

// findTool prefers mmdebstrap, which takes updates from several repositories at
// once and is faster.
func findTool(tool string) (string, error) {
	if tool != "" {
		return tool, nil
	}
	for _, n := range []string{"mmdebstrap", "debootstrap", "/usr/sbin/debootstrap"} {
		if path, err := exec.LookPath(n); err == nil {
			return path, nil
		}
	}
	return "", sandbox.Unsupported.Errorf("neither mmdebstrap nor debootstrap is installed").
		WithHint("apt-get install mmdebstrap")
}

// hostRelease returns the distribution and release of the host, from
// os-release(5).
func hostRelease(root string) (id, suite string, err error) {
	b, err := os.ReadFile(filepath.Join(root, "etc/os-release"))
	if err != nil {
		return "", "", sandbox.Unsupported.Errorf("find out the host's distribution: %w", err)
	}
	for line := range strings.Lines(string(b)) {
		k, v, _ := strings.Cut(strings.TrimSpace(line), "=")
		v = strings.Trim(v, `"'`)
		switch k {
		case "ID":
			id = v
		case "VERSION_CODENAME":
			suite = v
		}
	}
	if !suiteName().MatchString(suite) {
		return "", "", sandbox.Unsupported.Errorf("os-release of this host has no usable VERSION_CODENAME")
	}
	return id, suite, nil
}

// BuildBase makes a base image from the packages of the host's own
// distribution, fetched from the mirrors in the host's own apt sources, and
// records it for a tenant. It needs root, and reaches nothing but the mirrors.
// Errors: Unsupported with what to install, Invalid, Unavailable if a mirror
// does not answer, Exhausted.
func (s *Store) BuildBase(ctx context.Context, tenant string, o BaseOptions) (*Image, error) {
	p, err := planBase(o)
	if err != nil {
		return nil, kinded(err, "make base image")
	}
	if os.Geteuid() != 0 {
		return nil, sandbox.Unsupported.Errorf("a base image can only be made by root")
	}
	if o.Tag == "" {
		o.Tag = BaseTag
	}
	l, err := s.newLoader(tenant, LoadOptions{Tag: o.Tag, Source: fmt.Sprintf("base:%s/%s", p.distro.ID, p.suite)})
	if err != nil {
		return nil, err
	}
	img, err := l.base(ctx, p, o.Out)
	return img, kinded(err, "make base image")
}

// base builds in a directory of its own and loads the result: the tool's root
// file system as one layer, our settings as a second above it.
func (l *loader) base(ctx context.Context, p *basePlan, out io.Writer) (*Image, error) {
	dir, err := os.MkdirTemp(l.s.dir(tmpDir), "base-*")
	if err != nil {
		return nil, err
	}
	// The tool's mounts are in a namespace that has gone with it.
	defer os.RemoveAll(dir)
	settings, err := p.settings()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	pr, pw := io.Pipe()
	built := make(chan error, 1)
	go func() {
		err := p.run(ctx, dir, pw, out)
		pw.CloseWithError(err)
		built <- err
	}()
	l.o.Config = baseConfig()
	b, err := l.s.convert(ctx, []layerSource{
		{open: func(context.Context) (io.ReadCloser, error) { return pr, nil }},
		{open: func(context.Context) (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(settings)), nil }},
	}, l.meter.add)
	if err != nil {
		cancel()
		pr.CloseWithError(err)
	}
	if tool := <-built; tool != nil && (err == nil || sandbox.KindOf(err) != sandbox.Exhausted) {
		if b != nil {
			b.remove()
		}
		return nil, tool
	}
	if err != nil {
		return nil, err
	}
	imgs, err := l.record(ctx, b, "base")
	if err != nil {
		return nil, err
	}
	return imgs[0], nil
}

// baseConfig is how a base image runs.
func baseConfig() *Config {
	return &Config{
		Env: []string{
			"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
			"LANG=C.UTF-8",
			// Nobody is there to answer a package's questions.
			"DEBIAN_FRONTEND=noninteractive",
		},
		WorkingDir: "/root",
		Cmd:        []string{"bash"},
	}
}
