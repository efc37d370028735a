package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"gvisor.dev/gvisor/pkg/sentry/seccheck"
)

// What quick reaches into gVisor for is still what it takes it for: trace points
// are left out by it, and are there without it.
func TestQuick(t *testing.T) {
	if os.Getenv("VIV_TEST_NOT_QUICK") == "" {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestQuick$")
		cmd.Env = []string{"VIV_TEST_NOT_QUICK=1"}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
		quick()
		seccheck.Initialize()
		if n := len(seccheck.Points); n != 0 {
			t.Errorf("%d trace points all the same: gVisor has renamed what guards them", n)
		}
		return
	}
	seccheck.Initialize()
	if len(seccheck.Points) == 0 {
		t.Error("no trace points without quick: there is nothing to leave out any more")
	}
}

// A linked variable whose type has changed is not noticed by compiler or linker,
// and writes over what lies next to it.
func TestLinkedTypes(t *testing.T) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "gvisor.dev/gvisor").Output()
	if err != nil {
		t.Fatal(err)
	}
	for file, decl := range map[string]string{
		"pkg/sentry/seccheck/metadata.go":         `(?m)^var initOnce sync\.Once$`,
		"runsc/boot/filter/filter_precompiled.go": `(?m)^\s*precompiledPrograms map\[string\]precompiledseccomp\.Program\b`,
		"pkg/sync/aliases.go":                     `(?m)^\s*Once = sync\.Once$`,
	} {
		b, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(out)), file))
		if err != nil {
			t.Error(err)
			continue
		}
		if !regexp.MustCompile(decl).Match(b) {
			t.Errorf("%s does not declare %s", file, decl)
		}
	}
}
