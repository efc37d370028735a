package structure

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
)

const module = "vivarium"

// rule says what of ours a package may import. A name ending in /... is a
// package with all below it.
type rule struct {
	pkg string
	may []string
	why string
}

// rules has every package that is part of a program. Tests, fixtures and
// generated code are not in it: nothing that is may import them.
var rules = []rule{
	{"sandbox", nil,
		"the domain: everybody speaks its words, so it can depend on nobody"},
	{"store", []string{"sandbox"}, "it keeps records and tokens, and decides nothing"},
	{"spool", []string{"sandbox"}, "files of bytes"},
	{"cgroup", []string{"sandbox"}, "the host's own words"},
	{"network", []string{"sandbox", "network/policy", "network/proxy"}, "it knows slots and policies, not who has them"},
	{"network/policy", []string{"sandbox"}, "data and arithmetic: every place that decides gives the same answer"},
	{"network/proxy", []string{"sandbox", "network/policy"}, "a listener that judges; how connections get to it is the network's"},
	{"network/setup", []string{"sandbox", "config", "network", "network/policy"}, "what the configuration says of the network, for the daemon and doctor"},
	{"secret", []string{"sandbox", "network/policy"}, "values and what is done with them; where they are kept comes through an interface"},
	{"packagecache", []string{"sandbox", "network/policy"}, "a server for sandboxes' package tools"},
	{"network/preset", []string{"sandbox", "network/policy"}, "reads the host's settings, changes nothing"},
	{"tunnel", []string{"sandbox"}, "the way in: a listener of its own, apart from the API"},
	{"image", []string{"sandbox", "image/..."}, "images are the same for both runtimes"},
	{"image/erofsimg", nil, "a file format"},
	{"image/layer", []string{"sandbox", "image/erofsimg"}, "from one file format to another"},
	{"guest", []string{"sandbox", "guest/wire"}, "the host's side of a byte stream, whatever runtime carries it"},
	{"guest/wire", []string{"sandbox"}, "both sides' common words: small, for it goes into every sandbox"},
	{"guest/agent", []string{"sandbox", "guest/wire"}, "runs inside every sandbox: what it imports costs memory there"},
	{"runtime/gvisor", []string{"sandbox", "cgroup", "guest/wire", "runtime/gvisor/..."},
		"a runtime starts machines for whoever asks; it knows neither the engine nor a front door"},
	{"runtime/gvisor/...", []string{"sandbox", "cgroup", "runtime/gvisor/..."}, "parts that start a sentry or speak to it, and go into its binary"},
	{"runtime/gvisor/launch", nil, "what every sentry is first: it starts in 1 ms for it has nothing in it, and shuts in for it can be read in one sitting"},
	{"runtime/runtimetest", []string{"sandbox", "guest", "guest/wire", "image/erofsimg"},
		"the contract of every runtime: a runtime's tests import it, it imports no runtime"},
	{"engine", []string{"sandbox", "guest", "guest/wire", "image", "network", "network/policy", "network/proxy", "secret", "spool", "store"},
		"the one place that decides; runtimes reach it as an interface, front doors are above it"},
	{"server", []string{"sandbox", "api/..."}, "who may call, and how errors look; no state, no OS calls"},
	{"server/native", []string{"sandbox", "api/...", "server", "engine", "image", "network/policy", "secret", "tunnel"},
		"an adapter: it turns messages into calls"},
	{"client", []string{"sandbox", "api/..."}, "for programs of others: it must stay small"},
	{"config", []string{"sandbox", "network/policy"}, "values, checked by themselves"},
	{"assets", []string{"sandbox", "runtime/gvisor", "image/erofsimg"}, "the programs inside viv, and the images made of them"},
	{"assets/pack", nil, "a tool of the build"},
	{"version", nil, "two strings"},
	{"doctor", []string{"sandbox", "assets", "cgroup", "network", "runtime/gvisor"},
		"it tries what the daemon will do, with the daemon's own code"},
	{"bench", []string{"sandbox", "api/...", "client"}, "a benchmark talks to a daemon as any client does"},
	{"bench/...", []string{"sandbox", "api/...", "client", "bench"}, "as bench"},
	{"cli", []string{"sandbox", "api/...", "client", "config", "bench", "doctor", "network/preset", "network/setup", "cli/tree"},
		"verbs are clients; what serve runs in this process comes through Hooks"},
	{"cli/tree", []string{"sandbox"}, "writes what a sandbox sends to this disk, and nothing else"},
	{"daemon", []string{"sandbox", "assets", "cgroup", "config", "engine", "image", "network", "network/...", "packagecache", "runtime/...", "secret", "server/...", "store", "tunnel", "version"},
		"it puts the parts together; nothing but a main imports it"},
	{"cmd/viv", []string{"cli", "daemon", "doctor", "version", "config"}, "a main"},
	{"cmd/viv-guest", []string{"guest/agent"}, "a main"},
	{"cmd/viv-sentry", []string{"runtime/gvisor/..."}, "a main, without the runtime itself"},
	{"cmd/viv-start", []string{"runtime/gvisor/launch"}, "a main"},
}

// never says what must stay apart whatever the table above becomes. Through
// says whether it also holds for what is imported by what is imported.
var never = []struct {
	pkg, not string
	through  bool
	why      string
}{
	{"sandbox", "...", true, "the domain depends on nobody"},
	{"server/...", "runtime/...", true, "a front door must work with every runtime"},
	{"runtime/...", "server/...", true, "a runtime serves whoever starts machines"},
	{"runtime/...", "engine", true, "a runtime decides nothing"},
	{"engine", "server", false, "front doors are above the engine"},
	{"engine", "runtime/...", true, "the engine knows runtimes as an interface"},
	{"runtime/gvisor/spawn", "runtime/gvisor", true, "it goes into the sentry's binary, and the runtime does not"},
	{"runtime/gvisor/forward", "runtime/gvisor", true, "as above"},
	{"client", "engine", true, "a client is a client"},
	{"client", "server/...", true, "a client is a client"},
	{"...", "cmd/...", true, "a main is nobody's library"},
	{"guest/agent", "engine", true, "what runs inside has nothing of the host's"},
}

// listed is what `go list -json` tells of a package.
type listed struct {
	ImportPath string
	Name       string
	Dir        string
	Doc        string
	Imports    []string
	Deps       []string
	GoFiles    []string
}

// packages lists the module once; testing shares it.
var packages = sync.OnceValues(func() ([]listed, error) {
	cmd := exec.Command("go", "list", "-json=ImportPath,Name,Dir,Doc,Imports,Deps,GoFiles", "./...")
	cmd.Dir = root()
	asCaller(cmd)
	out, err := cmd.Output()
	if err != nil {
		var ee *exec.ExitError
		if errors.As(err, &ee) {
			return nil, errors.New(string(ee.Stderr))
		}
		return nil, err
	}
	var list []listed
	for d := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p listed
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return list, nil
		} else if err != nil {
			return nil, err
		}
		list = append(list, p)
	}
})

// asCaller gives a command to whoever called sudo, so that nothing in that
// user's build cache becomes root's.
func asCaller(cmd *exec.Cmd) {
	uid, uerr := strconv.ParseUint(os.Getenv("SUDO_UID"), 10, 32)
	gid, gerr := strconv.ParseUint(os.Getenv("SUDO_GID"), 10, 32)
	if uerr == nil && gerr == nil && os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	}
}

func root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(filepath.Dir(filepath.Dir(file)))
}

func list(t *testing.T) []listed {
	t.Helper()
	l, err := packages()
	if err != nil {
		t.Fatalf("list packages: %v", err)
	}
	if len(l) < len(rules) {
		t.Fatalf("go list found only %d packages", len(l))
	}
	return l
}

// ours is an import path without the module, "" if it is not ours.
func ours(path string) string {
	rest, ok := strings.CutPrefix(path, module+"/")
	if !ok {
		return ""
	}
	return rest
}

// matches says whether a pattern as in rules covers a package.
func matches(pattern, pkg string) bool {
	if pattern == "..." {
		return true
	}
	if base, ok := strings.CutSuffix(pattern, "/..."); ok {
		return pkg == base || strings.HasPrefix(pkg, base+"/")
	}
	return pattern == pkg
}

// outside are packages that no rule is about: only tests use them, or they are
// generated.
func outside(pkg string) bool {
	return matches("test/...", pkg) || matches("api/...", pkg) || pkg == "server/native/fake"
}

// ruleOf finds the rule of a package: its own before that of a whole subtree.
func ruleOf(pkg string) (rule, bool) {
	var found rule
	ok := false
	for _, r := range rules {
		if r.pkg == pkg {
			return r, true
		}
		if matches(r.pkg, pkg) {
			found, ok = r, true
		}
	}
	return found, ok
}

// TestImports holds the table of rules.
func TestImports(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range list(t) {
		pkg := ours(p.ImportPath)
		if len(p.GoFiles) == 0 || outside(pkg) {
			continue
		}
		r, ok := ruleOf(pkg)
		if !ok {
			t.Errorf("%s has no rule: say in test/structure what it may import, and why", pkg)
			continue
		}
		seen[r.pkg] = true
		for _, imp := range p.Imports {
			imp = ours(imp)
			if imp == "" || slices.ContainsFunc(r.may, func(m string) bool { return matches(m, imp) }) {
				continue
			}
			t.Errorf("%s imports %s: it may import only %v (%s)", pkg, imp, r.may, r.why)
		}
	}
	for _, r := range rules {
		if !seen[r.pkg] && !strings.HasSuffix(r.pkg, "/...") {
			t.Errorf("the rule for %s is about no package", r.pkg)
		}
	}
}

// TestNeverImports holds what must stay apart, also through others.
func TestNeverImports(t *testing.T) {
	for _, p := range list(t) {
		pkg := ours(p.ImportPath)
		if outside(pkg) {
			continue
		}
		for _, n := range never {
			if !matches(n.pkg, pkg) {
				continue
			}
			imports := p.Imports
			if n.through {
				imports = p.Deps
			}
			for _, imp := range imports {
				if imp = ours(imp); imp != "" && matches(n.not, imp) {
					t.Errorf("%s depends on %s: %s", pkg, imp, n.why)
				}
			}
		}
	}
}

// TestNoTestCodeInPrograms sees to it that fixtures and fakes stay out of what
// is shipped.
func TestNoTestCodeInPrograms(t *testing.T) {
	for _, p := range list(t) {
		if !matches("cmd/...", ours(p.ImportPath)) {
			continue
		}
		for _, d := range p.Deps {
			if d == "testing" || outside(ours(d)) && !matches("api/...", ours(d)) {
				t.Errorf("%s contains %s", p.ImportPath, d)
			}
		}
	}
}

// lean are the programs that are in every sandbox, or started with each, and
// what would make them large.
var lean = map[string]map[string]string{
	"cmd/viv-guest": {
		"gvisor.dev/gvisor":                          "the guest is inside the sandbox, gVisor around it",
		"google.golang.org/grpc":                     "9 MB",
		"google.golang.org/protobuf":                 "its reflection costs start-up time and memory in every sandbox",
		"connectrpc.com/connect":                     "an HTTP server for one peer",
		"net/http":                                   "4 MB, and a parser that faces hostile bytes",
		"crypto/tls":                                 "the stream is the host's own",
		"encoding/json":                              "reflection, for what the wire format does in less",
		"modernc.org/sqlite":                         "no state",
		"github.com/google/nftables":                 "no network of its own to set up",
		"github.com/vishvananda/netlink":             "no network of its own to set up",
		"github.com/google/go-containerregistry":     "no images",
		"github.com/spf13/cobra":                     "no command line",
		"github.com/klauspost/compress":              "nothing is compressed inside",
		"vivarium/engine":                            "the host's",
		"vivarium/server":                            "the host's",
		"vivarium/image":                             "the host's",
		"vivarium/network":                           "the host's",
		"vivarium/api":                               "the host's",
		"plugin":                                     "static, or nothing",
		"github.com/containerd/cgroups/v3/cgroup1":   "the host's",
		"github.com/containerd/containerd":           "another runtime",
		"gvisor.dev/gvisor/pkg/sentry/socket/plugin": "cgo",
	},
	"cmd/viv-start": {
		"gvisor.dev/gvisor": "it is there to start without it",
		"fmt":               "tables to set up at every boot",
		"encoding/json":     "as above",
		"vivarium/sandbox":  "as above",
	},
	"cmd/viv-sentry": {
		"modernc.org/sqlite":                     "every boot starts this binary: what is in it costs start-up time",
		"github.com/google/go-containerregistry": "as above",
		"connectrpc.com/connect":                 "as above",
		"github.com/spf13/cobra":                 "as above",
		"vivarium/engine":                        "the host's",
		"vivarium/server":                        "the host's",
		"vivarium/image":                         "the host's",
	},
}

// TestLeanPrograms is a negative dependency test.
func TestLeanPrograms(t *testing.T) {
	found := 0
	for _, p := range list(t) {
		bad, ok := lean[ours(p.ImportPath)]
		if !ok {
			continue
		}
		found++
		for _, d := range p.Deps {
			for b, why := range bad {
				if d == b || strings.HasPrefix(d, b+"/") {
					t.Errorf("%s contains %s: %s", p.ImportPath, d, why)
				}
			}
		}
	}
	if found != len(lean) {
		t.Errorf("found %d of %d programs", found, len(lean))
	}
}
