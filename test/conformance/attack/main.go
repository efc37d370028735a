// Command attack is what the conformance tests run inside a sandbox where a
// shell is not enough. Each verb tries one thing and says on standard output how
// far it got; the tests judge from outside.
package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

var verbs = map[string]func(args []string){
	"inodes":   inodes,
	"fds":      fds,
	"threads":  threads,
	"deep":     deep,
	"orphans":  orphans,
	"calls":    calls,
	"suid":     suid,
	"caps":     caps,
	"trace":    trace,
	"swap":     swap,
	"crash":    crash,
	"connect":  connect,
	"handles":  handles,
	"listen":   listen,
	"atomic":   atomicReads,
	"devices":  devices,
	"userns":   userns,
	"truncate": truncate,
}

func main() {
	if len(os.Args) < 2 || verbs[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "no such attack")
		os.Exit(64)
	}
	verbs[os.Args[1]](os.Args[2:])
}

func number(args []string, i int) int {
	n, err := strconv.Atoi(args[i])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(64)
	}
	return n
}

// inodes makes empty files until it cannot.
func inodes(args []string) {
	dir, most := args[0], number(args, 1)
	for i := range most {
		sub := filepath.Join(dir, strconv.Itoa(i/1000))
		if i%1000 == 0 {
			if err := os.MkdirAll(sub, 0o755); err != nil {
				fmt.Println(i, err)
				return
			}
		}
		f, err := os.Create(filepath.Join(sub, strconv.Itoa(i)))
		if err != nil {
			fmt.Println(i, err)
			return
		}
		f.Close()
	}
	fmt.Println(most, "made")
}

// fds opens one kind of descriptor until it cannot, and then waits.
func fds(args []string) {
	kind, most := args[0], number(args, 1)
	var l unix.Rlimit
	_ = unix.Getrlimit(unix.RLIMIT_NOFILE, &l)
	l.Cur = l.Max
	_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &l)
	var err error
	n := 0
	for n < most && err == nil {
		switch kind {
		case "file":
			_, err = unix.Open("/tmp/"+strconv.Itoa(n), unix.O_RDWR|unix.O_CREAT, 0o600)
		case "image":
			_, err = unix.Open("/bin/busybox", unix.O_RDONLY, 0)
		case "pipe":
			var p [2]int
			err = unix.Pipe(p[:])
		case "socket":
			_, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		case "unix":
			_, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
		case "eventfd":
			_, err = unix.Eventfd(0, 0)
		case "epoll":
			_, err = unix.EpollCreate1(0)
		case "inotify":
			_, err = unix.InotifyInit1(0)
		case "timerfd":
			_, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, 0)
		case "memfd":
			_, err = unix.MemfdCreate("x", 0)
		case "packet":
			_, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
		case "netlink":
			_, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, 0)
		case "proc":
			_, err = unix.Open("/proc/self/status", unix.O_RDONLY, 0)
		case "pty":
			_, err = unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY, 0)
		}
		n++
	}
	fmt.Println(n, err)
	_, _ = io.Copy(io.Discard, os.Stdin) // hold them until told to go
}

// threads makes threads until it cannot.
func threads(args []string) {
	most := number(args, 0)
	var mu sync.Mutex
	mu.Lock()
	for i := range most {
		started := make(chan struct{})
		go func() {
			runtime.LockOSThread()
			close(started)
			select {}
		}()
		<-started
		if i%50 == 0 {
			fmt.Println(i)
		}
	}
	fmt.Println(most, "made")
}

// deep makes directories within each other.
func deep(args []string) {
	if err := os.Chdir(args[0]); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	for i := range number(args, 1) {
		if err := unix.Mkdir("d", 0o755); err != nil {
			fmt.Println(i, err)
			os.Exit(1)
		}
		if err := unix.Chdir("d"); err != nil {
			fmt.Println(i, err)
			os.Exit(1)
		}
	}
	if err := os.WriteFile("bottom", []byte("x"), 0o644); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println("made")
}

// orphans starts processes whose parent is gone at once.
func orphans(args []string) {
	n := number(args, 0)
	if len(args) > 1 { // one of the parents
		for range n {
			if _, err := syscall.ForkExec("/bin/true", []string{"true"}, nil); err != nil {
				fmt.Println(err)
			}
		}
		return
	}
	const each = 50
	for range n / each {
		pid, err := syscall.ForkExec("/proc/self/exe", []string{"attack", "orphans", strconv.Itoa(each), "parent"}, &syscall.ProcAttr{Files: []uintptr{0, 1, 2}})
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		_, _ = unix.Wait4(pid, nil, 0, nil)
	}
	fmt.Println("made")
}

// calls tries the system calls that a sandbox without the capabilities for them
// must be refused, and prints those that succeed.
func calls([]string) {
	runtime.LockOSThread()
	_ = os.MkdirAll("/tmp/m/old", 0o755)
	name, _ := unix.BytePtrFromString("x")
	try := func(what string, f func() error) {
		err := f()
		var e unix.Errno
		if errors.As(err, &e) {
			fmt.Println(what, unix.ErrnoName(e))
		} else {
			fmt.Println(what, err)
		}
	}
	raw := func(nr uintptr, a ...uintptr) func() error {
		return func() error {
			for len(a) < 6 {
				a = append(a, 0)
			}
			_, _, e := unix.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5])
			if e != 0 {
				return e
			}
			return nil
		}
	}
	try("mount_tmpfs", func() error { return unix.Mount("x", "/tmp/m", "tmpfs", 0, "") })
	try("mount_proc", func() error { return unix.Mount("x", "/tmp/m", "proc", 0, "") })
	try("mount_bind", func() error { return unix.Mount("/", "/tmp/m", "", unix.MS_BIND, "") })
	try("remount", func() error { return unix.Mount("", "/", "", unix.MS_REMOUNT|unix.MS_BIND, "") })
	try("umount", func() error { return unix.Unmount("/proc", unix.MNT_DETACH) })
	try("umount_guest", func() error { return unix.Unmount("/.viv", unix.MNT_DETACH) })
	try("pivot_root", func() error { return unix.PivotRoot("/tmp/m", "/tmp/m/old") })
	try("unshare_mount", func() error { return unix.Unshare(unix.CLONE_NEWNS) })
	try("unshare_net", func() error { return unix.Unshare(unix.CLONE_NEWNET) })
	try("unshare_pid", func() error { return unix.Unshare(unix.CLONE_NEWPID) })
	try("unshare_uts", func() error { return unix.Unshare(unix.CLONE_NEWUTS) })
	try("unshare_ipc", func() error { return unix.Unshare(unix.CLONE_NEWIPC) })
	try("setns", func() error {
		fd, err := unix.Open("/proc/1/ns/mnt", unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Setns(fd, unix.CLONE_NEWNS)
	})
	try("sethostname", func() error { return unix.Sethostname([]byte("evil")) })
	try("settimeofday", func() error { return unix.Settimeofday(&unix.Timeval{Sec: 1}) })
	try("reboot", func() error { return unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF) })
	try("swapon", raw(unix.SYS_SWAPON, uintptr(unsafe.Pointer(name))))
	try("init_module", raw(unix.SYS_INIT_MODULE, uintptr(unsafe.Pointer(name)), 1, uintptr(unsafe.Pointer(name))))
	try("kexec_load", raw(unix.SYS_KEXEC_LOAD))
	try("iopl", raw(172, 3)) // iopl on amd64
	try("bpf", raw(unix.SYS_BPF, 0, uintptr(unsafe.Pointer(name)), 1))
	try("perf_event_open", raw(unix.SYS_PERF_EVENT_OPEN, uintptr(unsafe.Pointer(name)), 0, ^uintptr(0), ^uintptr(0)))
	try("open_by_handle_at", func() error {
		_, err := unix.OpenByHandleAt(unix.AT_FDCWD, unix.NewFileHandle(1, []byte{2, 0, 0, 0, 0, 0, 0, 0}), 0)
		return err
	})
	try("fanotify", raw(unix.SYS_FANOTIFY_INIT, 0, 0))
	try("syslog", raw(unix.SYS_SYSLOG, 2, uintptr(unsafe.Pointer(name)), 1))
	try("acct", raw(unix.SYS_ACCT, uintptr(unsafe.Pointer(name))))
	try("quotactl", raw(unix.SYS_QUOTACTL, 0))
	try("io_uring", raw(unix.SYS_IO_URING_SETUP, 1, 0))
	try("userfaultfd", raw(unix.SYS_USERFAULTFD, 0))
	try("fsopen", raw(unix.SYS_FSOPEN, uintptr(unsafe.Pointer(name))))
	try("nice", func() error { return unix.Setpriority(unix.PRIO_PROCESS, 0, -20) })
	try("rlimit", func() error {
		l := unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}
		return unix.Setrlimit(unix.RLIMIT_NPROC, &l)
	})
}

// suid says who it is; it is called through a copy of itself with the bit set.
func suid([]string) {
	fmt.Println(unix.Getuid(), unix.Geteuid())
}

// caps says what it may do: busybox could not, it gives up what the bit gives.
func caps([]string) {
	var data [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &data[0]); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("CapEff %x\nCapPrm %x\n", uint64(data[1].Effective)<<32|uint64(data[0].Effective), uint64(data[1].Permitted)<<32|uint64(data[0].Permitted))
	var bound uint64
	for c := range 64 {
		if set, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(c), 0, 0, 0); err == nil && set == 1 {
			bound |= 1 << c
		}
	}
	fmt.Printf("CapBnd %x\n", bound)
}

// userns makes a user namespace, in it one for mounts, and mounts there.
func userns([]string) {
	runtime.LockOSThread()
	cmd := []string{"attack", "calls"}
	pid, err := syscall.ForkExec("/proc/self/exe", cmd, &syscall.ProcAttr{
		Files: []uintptr{0, 1, 2},
		Sys:   &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS, UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}},
	})
	if err != nil {
		fmt.Println("userns", err)
		return
	}
	var st unix.WaitStatus
	_, _ = unix.Wait4(pid, &st, 0, nil)
	fmt.Println("userns made", st.ExitStatus())
}

// trace attaches to a process; "hold" keeps it stopped for ever.
func trace(args []string) {
	runtime.LockOSThread()
	pid := number(args, 0)
	if err := unix.PtraceAttach(pid); err != nil {
		fmt.Println("attach", err)
		if f, err := os.OpenFile(fmt.Sprintf("/proc/%d/mem", pid), os.O_RDWR, 0); err == nil {
			_, err = f.WriteAt([]byte{0}, 0x400000)
			fmt.Println("mem", err)
		} else {
			fmt.Println("mem", err)
		}
		return
	}
	fmt.Println("attached")
	if len(args) > 1 {
		select {}
	}
	_, _ = unix.Wait4(pid, nil, 0, nil)
	_ = unix.PtraceDetach(pid)
}

// swap changes a name between a directory and a symbolic link, as fast as it
// can.
func swap(args []string) {
	name, target := args[0], args[1]
	for i := 0; ; i++ {
		_ = os.Mkdir(name+".dir", 0o777)
		_ = os.WriteFile(name+".dir/file", []byte("inside"), 0o666)
		_ = os.Symlink(target, name+".link")
		if err := unix.Renameat2(unix.AT_FDCWD, name+".dir", unix.AT_FDCWD, name, unix.RENAME_EXCHANGE); err != nil {
			_ = os.RemoveAll(name)
			_ = os.Rename(name+".dir", name)
		}
		_ = os.RemoveAll(name)
		_ = os.Rename(name+".link", name)
		if i == 0 {
			fmt.Println("swapping")
		}
		_ = os.Remove(name)
	}
}

// crash dies of a signal with memory that must not leave the sandbox.
func crash([]string) {
	l := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	fmt.Println("core limit:", unix.Setrlimit(unix.RLIMIT_CORE, &l))
	signal.Reset(unix.SIGABRT)
	secret := []byte("core-" + "marker-inside")
	_ = unix.Kill(os.Getpid(), unix.SIGKILL-3) // SIGABRT, as raise would
	time.Sleep(10 * time.Second)
	runtime.KeepAlive(secret)
}

// connect talks to a port as a stranger would: silence, noise, floods.
func connect(args []string) {
	addr, kind, n := args[0], args[1], number(args, 2)
	var conns []net.Conn
	for range n {
		c, err := net.DialTimeout("tcp", addr, 5*time.Second)
		if err != nil {
			fmt.Println("refused after", len(conns), err)
			break
		}
		conns = append(conns, c)
		switch kind {
		case "noise":
			_, _ = c.Write([]byte("GET / HTTP/1.1\r\n\r\n"))
		case "zeros":
			_, _ = c.Write(make([]byte, 64<<10))
		case "ones":
			_, _ = c.Write([]byte(strings.Repeat("\xff", 4096)))
		}
	}
	fmt.Println("connected", len(conns))
	var got int
	for _, c := range conns {
		_ = c.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
		k, _ := c.Read(make([]byte, 4096))
		got += k
		if kind == "silence" {
			break
		}
	}
	fmt.Println("answers of", got, "bytes")
	if len(args) > 3 {
		_, _ = io.Copy(io.Discard, os.Stdin)
	}
}

// listen tries to share a port that another process listens on.
func listen(args []string) {
	port := number(args, 0)
	for _, addr := range [][4]byte{{127, 0, 0, 1}, {0, 0, 0, 0}} {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		if err != nil {
			fmt.Println(err)
			return
		}
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
		if err = unix.Bind(fd, &unix.SockaddrInet4{Port: port, Addr: addr}); err == nil {
			err = unix.Listen(fd, 10)
		}
		fmt.Println(net.IP(addr[:]), err)
	}
	fmt.Println("tried")
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// handles looks for descriptors that lead out of the root.
func handles([]string) {
	links, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	for _, l := range links {
		target, err := os.Readlink(l)
		if err != nil {
			continue
		}
		fmt.Println(l, target)
	}
	for _, l := range append(links, "/proc/1/root", "/proc/1/cwd", "/proc/self/root") {
		for _, up := range []string{"/..", "/../..", "/../../../../../../.."} {
			entries, err := os.ReadDir(l + up)
			if err != nil {
				continue
			}
			for _, e := range entries {
				if e.Name() == "machine.json" || e.Name() == "config.json" {
					fmt.Println("ESCAPE", l+up)
				}
			}
		}
	}
}

// atomicReads reads a file again and again, and says if it was ever neither of
// the two contents.
func atomicReads(args []string) {
	name := args[0]
	fmt.Println("reading")
	stop := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(stop)
	}()
	n := 0
	for {
		select {
		case <-stop:
			fmt.Println("whole", n)
			return
		default:
		}
		b, err := os.ReadFile(name)
		if err != nil || len(b) == 0 || strings.Trim(string(b), string(b[0])) != "" || len(b) != 1<<20 {
			fmt.Println("torn", len(b), err)
			os.Exit(1)
		}
		n++
	}
}

// devices makes device nodes of the host and opens them.
func devices([]string) {
	for _, d := range []struct {
		mode         uint32
		major, minor uint32
	}{{unix.S_IFBLK, 8, 0}, {unix.S_IFBLK, 254, 0}, {unix.S_IFBLK, 259, 0}, {unix.S_IFBLK, 7, 0}, {unix.S_IFCHR, 1, 1}, {unix.S_IFCHR, 1, 2}, {unix.S_IFCHR, 1, 4}, {unix.S_IFCHR, 1, 11}, {unix.S_IFCHR, 10, 232}, {unix.S_IFCHR, 10, 237}, {unix.S_IFCHR, 4, 0}} {
		name := fmt.Sprintf("/tmp/dev-%d-%d-%d", d.mode, d.major, d.minor)
		if err := unix.Mknod(name, d.mode|0o666, int(unix.Mkdev(d.major, d.minor))); err != nil {
			continue
		}
		fd, err := unix.Open(name, unix.O_RDWR|unix.O_NONBLOCK, 0)
		if err == nil {
			fmt.Println("OPENED", name)
			unix.Close(fd)
		}
	}
	fmt.Println("done")
}

// truncate makes a file longer and shorter for as long as it is let.
func truncate(args []string) {
	fmt.Println("truncating")
	for {
		_ = os.Truncate(args[0], 0)
		_ = os.Truncate(args[0], 8<<20)
	}
}
