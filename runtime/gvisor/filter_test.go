package gvisor_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/bpf"
	"gvisor.dev/gvisor/pkg/seccomp"
	"gvisor.dev/gvisor/pkg/sentry/platform"
	_ "gvisor.dev/gvisor/pkg/sentry/platform/systrap"
	"gvisor.dev/gvisor/runsc/boot/filter/config"

	"vivarium/runtime/runtimetest"
	"vivarium/sandbox"
)

// compileFilter has this test's program write the filter for the controller
// that it names, instead of tests.
const compileFilter = "VIV_TEST_COMPILE_FILTER"

// compiled is what gVisor compiles for a sentry on systrap with its network
// inside and nothing else, and what it allows.
func compiled(controller uint32) ([]bpf.Instruction, seccomp.SyscallRules, error) {
	systrap, err := platform.Lookup("systrap")
	if err != nil {
		return nil, seccomp.SyscallRules{}, err
	}
	opts := config.Options{Platform: systrap.PrecompiledSeccompInfo()[0], ControllerFD: controller}
	rules, deny := config.Rules(opts)
	p := seccomp.Program{
		RuleSets: []seccomp.RuleSet{{Rules: deny}, {Rules: rules, Action: seccomp.Allow}},
		Options:  config.SeccompOptions(opts),
	}
	insns, _, err := p.Build()
	return insns, rules, err
}

// writeFilter writes it as the kernel has it. One rule has the process's id, so
// this runs as process 1, as sentries do.
func writeFilter(controller string) error {
	fd, err := strconv.ParseUint(controller, 10, 32)
	if err != nil {
		return err
	}
	insns, _, err := compiled(uint32(fd))
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(bpf.ToBytecode(insns))
	return err
}

// F1: the filter that the kernel holds for a sentry, read back from it, is to the
// last instruction what gVisor compiles for the options that are meant: not one
// for a wider set of them, nor one that was kept and is out of date.
func TestF01Filter(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	r := l.open(t, runtimetest.Options{})
	t.Cleanup(func() { r.Close() })
	m, err := r.Boot(t.Context(), sandbox.BootSpec{Resources: runtimetest.Resources})
	if err != nil {
		t.Fatal(err)
	}
	defer remove(t, m)
	pid := sentryOf(t, l.processes(t, m.ID()))
	cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		t.Fatal(err)
	}
	fd := regexp.MustCompile(`\x00--controller-fd=(\d+)\x00`).FindSubmatch(cmdline)
	if fd == nil {
		t.Fatalf("no controller in %q", cmdline)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{compileFilter + "=" + string(fd[1])}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	cmd.Stderr = os.Stderr
	want, err := cmd.Output()
	if err != nil || len(want) == 0 {
		t.Fatalf("compile: %d bytes, %v", len(want), err)
	}
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	if err != nil || len(tasks) < 2 {
		t.Fatalf("threads %v, %v", tasks, err)
	}
	for _, task := range tasks {
		tid, err := strconv.Atoi(filepath.Base(task))
		if err != nil {
			t.Fatal(err)
		}
		got, n, err := installed(tid)
		if err == unix.ESRCH {
			continue // it has ended
		}
		if err != nil {
			t.Fatalf("read the filter of thread %d: %v", tid, err)
		}
		if n != 1 {
			t.Errorf("thread %d has %d filters", tid, n)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("thread %d has a filter of %d bytes that is not the %d of gVisor for these options", tid, len(got), len(want))
		}
	}
}

// installed reads the filters of a thread (PTRACE_SECCOMP_GET_FILTER in
// ptrace(2)): the newest, and how many there are.
func installed(tid int) (filter []byte, n int, err error) {
	runtime.LockOSThread() // the tracer is a thread
	defer runtime.UnlockOSThread()
	const seize, interrupt, getFilter = 0x4206, 0x4207, 0x420c
	request := func(what, addr, data uintptr) (int, error) {
		n, _, e := unix.Syscall6(unix.SYS_PTRACE, what, uintptr(tid), addr, data, 0, 0)
		if e != 0 {
			return 0, e
		}
		return int(n), nil
	}
	if _, err := request(seize, 0, 0); err != nil {
		return nil, 0, err
	}
	defer unix.PtraceDetach(tid)
	if _, err := request(interrupt, 0, 0); err != nil {
		return nil, 0, err
	}
	var ws unix.WaitStatus
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		got, err := unix.Wait4(tid, &ws, unix.WALL|unix.WNOHANG, nil)
		if err != nil && err != unix.EINTR {
			return nil, 0, err
		}
		if got == tid {
			break
		}
		if time.Now().After(end) {
			return nil, 0, unix.ETIMEDOUT
		}
	}
	if !ws.Stopped() {
		return nil, 0, unix.ESRCH
	}
	for ; ; n++ {
		count, err := request(getFilter, uintptr(n), 0)
		if err == unix.ENOENT {
			return filter, n, nil
		}
		if err != nil {
			return nil, 0, err
		}
		if n == 0 {
			filter = make([]byte, count*8) // struct sock_filter
			if _, err := request(getFilter, 0, uintptr(unsafe.Pointer(&filter[0]))); err != nil {
				return nil, 0, err
			}
		}
	}
}

// never are system calls that a sentry has no rule for, whatever the arguments:
// by name, so that a new version of gVisor that has one is looked at.
var never = map[string]uintptr{
	"add_key": unix.SYS_ADD_KEY, "keyctl": unix.SYS_KEYCTL, "request_key": unix.SYS_REQUEST_KEY,
	"mount": unix.SYS_MOUNT, "umount2": unix.SYS_UMOUNT2, "pivot_root": unix.SYS_PIVOT_ROOT, "chroot": unix.SYS_CHROOT,
	"move_mount": unix.SYS_MOVE_MOUNT, "open_tree": unix.SYS_OPEN_TREE, "fsopen": unix.SYS_FSOPEN,
	"setns": unix.SYS_SETNS, "unshare": unix.SYS_UNSHARE,
	"execve": unix.SYS_EXECVE, "execveat": unix.SYS_EXECVEAT,
	"openat": unix.SYS_OPENAT, "openat2": unix.SYS_OPENAT2, "open_by_handle_at": unix.SYS_OPEN_BY_HANDLE_AT,
	"chdir": unix.SYS_CHDIR, "fchdir": unix.SYS_FCHDIR,
	"connect": unix.SYS_CONNECT, "bind": unix.SYS_BIND,
	"bpf": unix.SYS_BPF, "perf_event_open": unix.SYS_PERF_EVENT_OPEN, "userfaultfd": unix.SYS_USERFAULTFD,
	"io_uring_setup": unix.SYS_IO_URING_SETUP, "io_uring_register": unix.SYS_IO_URING_REGISTER,
	"init_module": unix.SYS_INIT_MODULE, "finit_module": unix.SYS_FINIT_MODULE, "kexec_load": unix.SYS_KEXEC_LOAD,
	"process_vm_readv": unix.SYS_PROCESS_VM_READV, "process_vm_writev": unix.SYS_PROCESS_VM_WRITEV, "pidfd_getfd": unix.SYS_PIDFD_GETFD, "kill": unix.SYS_KILL,
	"setuid": unix.SYS_SETUID, "setgroups": unix.SYS_SETGROUPS, "capset": unix.SYS_CAPSET, "seccomp": unix.SYS_SECCOMP,
}

// F1: what no sentry may ask of the host, judged by the filter itself.
func TestF01FilterDenies(t *testing.T) {
	insns, rules, err := compiled(3)
	if err != nil {
		t.Fatal(err)
	}
	program, err := bpf.Compile(insns, false)
	if err != nil {
		t.Fatal(err)
	}
	arch := uint32(unix.AUDIT_ARCH_X86_64)
	if runtime.GOARCH == "arm64" {
		arch = unix.AUDIT_ARCH_AARCH64
	}
	// verdict on a struct seccomp_data
	verdict := func(nr uintptr, arch uint32, args ...uint64) uint32 {
		b := make([]byte, 64)
		binary.NativeEndian.PutUint32(b, uint32(nr))
		binary.NativeEndian.PutUint32(b[4:], arch)
		for i, a := range args {
			binary.NativeEndian.PutUint64(b[16+8*i:], a)
		}
		v, err := bpf.Exec[bpf.NativeEndian](program, b)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	const allow, kill, futexWake = 0x7fff0000, 0x80000000, 1 | 128 // SECCOMP_RET_ALLOW, SECCOMP_RET_KILL_PROCESS
	if v := verdict(unix.SYS_FUTEX, arch, 0, futexWake, 1); v != allow {
		t.Fatalf("futex: %#x: nothing is shown by what follows", v)
	}
	for name, nr := range never {
		if rules.Has(nr) {
			t.Errorf("gVisor has a rule for %s", name)
		}
		if v := verdict(nr, arch); v != kill {
			t.Errorf("%s: %#x", name, v)
		}
	}
	for name, v := range map[string]uint32{
		"ptrace seize":                 verdict(unix.SYS_PTRACE, arch, 0x4206),
		"ptrace poke":                  verdict(unix.SYS_PTRACE, arch, unix.PTRACE_POKEDATA),
		"another's tgsigqueueinfo":     verdict(unix.SYS_RT_TGSIGQUEUEINFO, arch, 1<<31),
		"executable mapping of a file": verdict(unix.SYS_MMAP, arch, 0, 4096, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_PRIVATE, 9),
		"another architecture":         verdict(unix.SYS_FUTEX, unix.AUDIT_ARCH_I386, 0, futexWake, 1),
		"clone of a namespace":         verdict(unix.SYS_CLONE, arch, unix.CLONE_NEWUSER),
	} {
		if v != kill {
			t.Errorf("%s: %#x", name, v)
		}
	}
}
