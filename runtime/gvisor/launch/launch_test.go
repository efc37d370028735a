package launch

import (
	"slices"
	"strings"
	"testing"
)

func TestArguments(t *testing.T) {
	args := strings.Fields("runsc-sandbox --platform=systrap --panic-log-fd=3 boot --bundle=/b --setup-root --io-fds=4 --sink-fds=9 --sink-fds=10 id")
	p := arguments(args)
	if !slices.Equal(p.files, []int{9, 10}) {
		t.Errorf("files %v", p.files)
	}
	want := "runsc-sandbox --platform=systrap --panic-log-fd=3 boot --bundle=/b --setup-root=false --proc-mount-sync-fd=7 --io-fds=4 id"
	if got := strings.Join(p.with([]string{"--setup-root=false", "--proc-mount-sync-fd=7"}), " "); got != want {
		t.Errorf("the sentry gets\n%s, want\n%s", got, want)
	}
}

func TestChosen(t *testing.T) {
	for in, want := range map[string]string{"always [madvise] never": "madvise", "[always] never": "always", "always": "", "[always": "", "": ""} {
		if got := chosen(in); got != want {
			t.Errorf("chosen(%q) = %q, want %q", in, got, want)
		}
	}
}
