package spawn

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"vivarium/sandbox"
)

// confined looks at a sentry as the kernel has it, after its seccomp filter is
// said to be in place and before anything of a tenant's is in it: whatever went
// another way than was meant, in this gVisor version or on this kernel, ends the
// boot. Tests (F1) look at more, and at every thread.
func confined(pid, uid int) error {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return sandbox.Internal.Errorf("look at the sentry: %w", err)
	}
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		return sandbox.Internal.Errorf("look at the sentry: %w", err)
	}
	if what := loose(string(status), string(mounts), uid); what != "" {
		return sandbox.Internal.Errorf("the sentry is not shut in: %s", what)
	}
	return nil
}

// loose names what is not as it must be in proc_pid_status(5) and
// proc_pid_mountinfo(5).
func loose(status, mounts string, uid int) string {
	id, none := strconv.Itoa(uid), "0000000000000000"
	want := map[string][]string{
		"Uid": {id, id, id, id}, "Gid": {id, id, id, id}, "Groups": nil,
		"CapInh": {none}, "CapPrm": {none}, "CapEff": {none}, "CapBnd": {none}, "CapAmb": {none},
		"NoNewPrivs": {"1"}, "Seccomp": {"2"}, // a filter
	}
	for line := range strings.Lines(status) {
		k, v, _ := strings.Cut(line, ":")
		w, ok := want[k]
		if !ok {
			continue
		}
		if !slices.Equal(strings.Fields(v), w) {
			return strings.TrimSpace(line)
		}
		delete(want, k)
	}
	for k := range want {
		return "no " + k
	}
	line, rest, _ := strings.Cut(mounts, "\n")
	f := strings.Fields(line) // ids, device, root, mount point, options, without optional ones
	if rest != "" || len(f) < 8 || f[4] != "/" || !strings.HasPrefix(f[5], "ro,") || f[6] != "-" || f[7] != "tmpfs" {
		return fmt.Sprintf("mounts %.200q", mounts)
	}
	return ""
}
