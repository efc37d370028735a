package spawn

import (
	"errors"
	"os"
	"strings"
	"testing"

	"vivarium/sandbox"
)

const shutIn = "Name:\tviv-sentry\nUid:\t70\t70\t70\t70\nGid:\t70\t70\t70\t70\nGroups:\t \n" +
	"CapInh:\t0000000000000000\nCapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nCapBnd:\t0000000000000000\nCapAmb:\t0000000000000000\n" +
	"NoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1\n"

const emptyRoot = "54 91 0:40 / / ro,nosuid,nodev,noexec,relatime - tmpfs viv-root rw,uid=70,gid=70\n"

// F1: each of what a sentry must not have, and each of what it must, is missed.
func TestLoose(t *testing.T) {
	t.Parallel()
	if what := loose(shutIn, emptyRoot, 70); what != "" {
		t.Fatalf("as it must be: %s", what)
	}
	lines := strings.SplitAfter(strings.TrimSuffix(shutIn, "\n"), "\n")
	for i, line := range lines {
		if strings.HasPrefix(line, "Name") || strings.HasPrefix(line, "Seccomp_") {
			continue
		}
		if loose(strings.Join(append(append([]string{}, lines[:i]...), lines[i+1:]...), ""), emptyRoot, 70) == "" {
			t.Errorf("without %q", line)
		}
	}
	for _, c := range [][2]string{
		{"Uid:\t70\t70\t70\t70", "Uid:\t70\t70\t0\t70"}, {"Gid:\t70", "Gid:\t0"}, {"Uid:\t70\t70\t70\t70", "Uid:\t71\t71\t71\t71"}, {"Groups:\t ", "Groups:\t0 "},
		{"CapInh:\t00", "CapInh:\t01"}, {"CapPrm:\t00", "CapPrm:\t01"}, {"CapEff:\t00", "CapEff:\t01"}, {"CapBnd:\t00", "CapBnd:\t01"}, {"CapAmb:\t00", "CapAmb:\t01"},
		{"NoNewPrivs:\t1", "NoNewPrivs:\t0"}, {"Seccomp:\t2", "Seccomp:\t0"}, {"Seccomp:\t2", "Seccomp:\t1"},
	} {
		changed := strings.Replace(shutIn, c[0], c[1], 1)
		if changed == shutIn || loose(changed, emptyRoot, 70) == "" {
			t.Errorf("with %q", c[1])
		}
	}
	for _, mounts := range []string{
		"", strings.Replace(emptyRoot, "ro,", "rw,", 1), strings.Replace(emptyRoot, "tmpfs", "ext4", 1),
		strings.Replace(emptyRoot, " - ", " shared:1 - ", 1), strings.Replace(emptyRoot, " - ", " master:1 - ", 1),
		emptyRoot + "55 54 0:41 / /proc ro - tmpfs viv-proc rw\n", "55 54 0:41 / /proc ro, - tmpfs viv-proc rw\n",
	} {
		if loose(shutIn, mounts, 70) == "" {
			t.Errorf("with mounts %q", mounts)
		}
	}
}

func TestConfined(t *testing.T) {
	t.Parallel()
	if err := confined(os.Getpid(), os.Getuid()); !errors.Is(err, sandbox.Internal) {
		t.Errorf("this test itself: %v", err)
	}
}
