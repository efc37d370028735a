package launch

import (
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestArguments(t *testing.T) {
	args := strings.Fields("runsc-sandbox --platform=systrap --panic-log-fd=3 boot --bundle=/b --setup-root --io-fds=4 --sink-fds=9 --sink-fds=10 id")
	p := arguments(args)
	if !slices.Equal(p.files, []int{9, 10}) || !p.found {
		t.Errorf("files %v, found %t", p.files, p.found)
	}
	if p := arguments(strings.Fields("runsc-sandbox boot --setup-root=true --sink-fds=9 id")); p.found {
		t.Error("another flag is taken for " + setupRoot)
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

// child has this test's program do a step, as its environment says, in a process
// of its own: what it does cannot be undone.
const child = "VIV_TEST_LAUNCH"

func TestMain(m *testing.M) {
	if os.Getenv(child) == "" && !slices.Equal(os.Args[1:], []string{umounter}) {
		os.Exit(m.Run())
	}
	runtime.LockOSThread()
	Main()
}

// run is what the program says, run as root of a user namespace or, as a sentry
// is, as nobody of one.
func run(t *testing.T, as int, args ...string) string {
	t.Helper()
	log, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command("/proc/self/exe", append(args, panicLog+"3", ours+"0")...)
	cmd.Env = []string{child + "=1"}
	cmd.ExtraFiles = []*os.File{log}
	ids := []syscall.SysProcIDMap{{ContainerID: as, HostID: 65534, Size: 1}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC,
		UidMappings: ids, GidMappings: ids, Credential: &syscall.Credential{Uid: uint32(as), Gid: uint32(as)},
		AmbientCaps: []uintptr{unix.CAP_SYS_ADMIN, unix.CAP_SYS_CHROOT, unix.CAP_SETPCAP},
	}
	if err := cmd.Run(); err == nil {
		t.Error("it succeeded")
	}
	said, err := os.ReadFile(log.Name())
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(said))
}

// What is not as it is meant to be ends in an error, not in a sentry.
func TestRefuses(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it runs as another user of a namespace")
	}
	for name, c := range map[string]struct {
		as   int
		args []string
		want string
	}{
		"another way to start":  {nobody, []string{"boot"}, "viv-start: find --setup-root: invalid argument"},
		"another user":          {0, []string{"boot", setupRoot}, "viv-start: give up privileges: run as 0:0"},
		"what is not a program": {nobody, []string{"boot", setupRoot}, "viv-start: start sentry: permission denied"},
	} {
		if got := run(t, c.as, c.args...); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
