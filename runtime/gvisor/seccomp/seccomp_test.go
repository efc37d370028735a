package seccomp

import (
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"gvisor.dev/gvisor/pkg/seccomp"
	"gvisor.dev/gvisor/pkg/sentry/platform"
	_ "gvisor.dev/gvisor/pkg/sentry/platform/systrap"
	"gvisor.dev/gvisor/runsc/boot/filter"
	"gvisor.dev/gvisor/runsc/boot/filter/config"
)

// What a sentry installs is, to the last instruction, what gVisor would compile
// in its place.
func TestProgram(t *testing.T) {
	if forVersion == "" {
		t.Skip("no program for this architecture")
	}
	systrap, err := platform.Lookup("systrap")
	if err != nil {
		t.Fatal(err)
	}
	if os.Getpid() != 1 { // as a sentry is; one rule has it in it
		for _, nice := range []int{0, 7} { // another has the process's priority, of when it began
			cmd := exec.Command("nice", "-n", strconv.Itoa(nice), "/proc/self/exe", "-test.run=^TestProgram$")
			cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
			exe, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			cmd.Args[3] = exe // nice's own otherwise
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("nice %d: %v: %s", nice, err, out)
			}
		}
		return
	}
	if Use() {
		t.Error("a sentry without a version uses the program")
	}
	if n := len(filter.ListPrecompiled()); n != 0 {
		t.Errorf("gVisor has %d programs of its own: is this one needed?", n)
	}
	add()
	for _, fd := range []uint32{3, 6, 1000} {
		opts := config.Options{Platform: systrap.PrecompiledSeccompInfo()[0], ControllerFD: fd}
		p, ok := filter.GetPrecompiled(opts.ConfigKey())
		if !ok {
			t.Fatalf("gVisor does not find %s; it has %q; run go generate", opts.ConfigKey(), filter.ListPrecompiled())
		}
		got, err := p.RenderInstructions(opts.Vars())
		if err != nil {
			t.Fatal(err)
		}
		rules, deny := config.Rules(opts)
		fresh := seccomp.Program{
			RuleSets: []seccomp.RuleSet{{Rules: deny}, {Rules: rules, Action: seccomp.Allow}},
			Options:  config.SeccompOptions(opts),
		}
		want, _, err := fresh.Build()
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, want) {
			t.Errorf("controller %d: %d instructions, not the %d that gVisor compiles; run go generate", fd, len(got), len(want))
		}
	}
}

func TestVersion(t *testing.T) {
	if forVersion == "" {
		t.Skip("no program for this architecture")
	}
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Version}}", "gvisor.dev/gvisor").Output()
	if err != nil {
		t.Fatal(err)
	}
	if v := strings.TrimSpace(string(out)); v != forVersion {
		t.Errorf("compiled for gVisor %s, go.mod has %s; run go generate", forVersion, v)
	}
}
