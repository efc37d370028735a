package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// memAvailable is MemAvailable of proc_meminfo(5) in bytes, the middle one of
// five readings.
func (r *run) memAvailable(ctx context.Context) (int64, error) {
	var all []float64
	for range 5 {
		n, err := field("/proc/meminfo", "MemAvailable")
		if err != nil {
			return 0, err
		}
		all = append(all, float64(n))
		if err := r.pause(ctx, 100*time.Millisecond); err != nil {
			return 0, err
		}
	}
	return int64(median(all)), nil
}

// field is the value, in bytes, of a "Name:  123 kB" line.
func field(file, name string) (int64, error) {
	f, err := os.Open(file)
	if err != nil {
		return 0, sandbox.Unsupported.Errorf("read memory: %w", err)
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if rest, ok := strings.CutPrefix(s.Text(), name+":"); ok {
			w := strings.Fields(rest)
			if len(w) == 0 {
				break
			}
			n, err := strconv.ParseInt(w[0], 10, 64)
			if err != nil {
				return 0, sandbox.Internal.Errorf("read %s of %s: %w", name, file, err)
			}
			return n << 10, nil
		}
	}
	return 0, sandbox.Unsupported.Errorf("%s has no %s", file, name)
}

// busy notes a machine that has other things to do: its figures are not worth
// much.
func (r *run) busy() {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return
	}
	if load, over := overloaded(string(b), runtime.NumCPU()); over {
		r.res.note("the machine was busy before: load average %s on %d CPUs", load, runtime.NumCPU())
	}
}

// overloaded looks at the load of the last minute (proc_loadavg(5)).
func overloaded(loadavg string, cpus int) (string, bool) {
	f := strings.Fields(loadavg)
	if len(f) == 0 {
		return "", false
	}
	x, err := strconv.ParseFloat(f[0], 64)
	return f[0], err == nil && x > float64(cpus)
}

func statusFile(pid int) string { return fmt.Sprintf("/proc/%d/status", pid) }

// residentSize of a process in bytes.
func residentSize(pid int) (int64, error) { return field(statusFile(pid), "VmRSS") }

// cpuTime a process has used, user and system; proc_pid_stat(5).
func cpuTime(pid int) (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, sandbox.Unsupported.Errorf("read CPU time: %w", err)
	}
	return parseCPUTime(string(b))
}

// userHz is the kernel's unit of CPU time in proc files: USER_HZ, 100 on every
// architecture that we run on (time(7)).
const userHz = 100

func parseCPUTime(stat string) (time.Duration, error) {
	// the name in parentheses may hold anything, so count from its end
	i := strings.LastIndexByte(stat, ')')
	f := strings.Fields(stat[i+1:])
	if i < 0 || len(f) < 13 {
		return 0, sandbox.Internal.Errorf("read CPU time: not a stat line")
	}
	var ticks int64
	for _, s := range f[11:13] { // utime and stime, fields 14 and 15
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return 0, sandbox.Internal.Errorf("read CPU time: %w", err)
		}
		ticks += n
	}
	return time.Duration(ticks) * time.Second / userHz, nil
}

// watchMemory follows the resident size of a process and returns, when it is
// called, by how much it grew at most.
func watchMemory(pid int) func() int64 {
	if pid == 0 {
		return func() int64 { return 0 }
	}
	before, err := residentSize(pid)
	if err != nil {
		return func() int64 { return 0 }
	}
	// 5 makes VmHWM begin anew (proc_pid_clear_refs(5)); where it is refused the
	// readings are what there is
	exact := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0) == nil
	peak := before
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		t := time.NewTicker(50 * time.Millisecond)
		defer t.Stop()
		for {
			select {
			case <-stop:
				return
			case <-t.C:
				if n, err := residentSize(pid); err == nil {
					peak = max(peak, n)
				}
			}
		}
	})
	return func() int64 {
		close(stop)
		wg.Wait()
		if exact {
			if n, err := field(statusFile(pid), "VmHWM"); err == nil {
				peak = max(peak, n)
			}
		}
		return peak - before
	}
}

// findDaemon is the pid of the process of this machine that answers at addr, 0
// where it is another machine's or cannot be seen.
func findDaemon(ctx context.Context, addr string) int {
	if path, ok := strings.CutPrefix(addr, "unix://"); ok {
		return peerOf(ctx, path)
	}
	ap, err := serverAddr(ctx, addr)
	if err != nil {
		return 0
	}
	inode := ""
	for _, file := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		b, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		if inode = listener(string(b), ap.Port()); inode != "" {
			break
		}
	}
	if inode == "" || !ap.Addr().IsLoopback() && !isLocal(ap.Addr()) {
		return 0
	}
	return ownerOf(inode)
}

// local says whether the server is of this machine.
func local(ctx context.Context, addr string) bool {
	if strings.HasPrefix(addr, "unix://") {
		return true
	}
	ap, err := serverAddr(ctx, addr)
	return err == nil && (ap.Addr().IsLoopback() || isLocal(ap.Addr()))
}

func serverAddr(ctx context.Context, addr string) (netip.AddrPort, error) {
	if !strings.Contains(addr, "://") {
		addr = "http://" + addr
	}
	u, err := url.Parse(addr)
	if err != nil {
		return netip.AddrPort{}, err
	}
	port := u.Port()
	if port == "" {
		port = "80"
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return netip.AddrPort{}, err
	}
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", u.Hostname())
	if err != nil {
		return netip.AddrPort{}, err
	}
	if len(ips) == 0 {
		return netip.AddrPort{}, errors.New("no address")
	}
	return netip.AddrPortFrom(ips[0].Unmap(), uint16(n)), nil
}

func isLocal(a netip.Addr) bool {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	for _, x := range all {
		if p, err := netip.ParsePrefix(x.String()); err == nil && p.Addr().Unmap() == a {
			return true
		}
	}
	return false
}

// peerOf asks the kernel who listens on a unix socket (unix(7), SO_PEERCRED).
func peerOf(ctx context.Context, path string) int {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return 0
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0
	}
	pid := 0
	_ = raw.Control(func(fd uintptr) {
		if cr, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = int(cr.Pid)
		}
	})
	return pid
}

// listener is the inode of the socket that listens on a port, from a table in
// the form of proc_net(5).
func listener(table string, port uint16) string {
	const listen = "0A" // TCP_LISTEN
	for _, line := range strings.Split(table, "\n") {
		f := strings.Fields(line)
		if len(f) < 10 || f[3] != listen {
			continue
		}
		_, p, ok := strings.Cut(f[1], ":")
		if n, err := strconv.ParseUint(p, 16, 16); ok && err == nil && uint16(n) == port {
			return f[9]
		}
	}
	return ""
}

func ownerOf(inode string) int {
	want := "socket:[" + inode + "]"
	fds, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		return 0
	}
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err == nil && to == want {
			pid, err := strconv.Atoi(strings.Split(fd, "/")[2])
			if err != nil {
				return 0
			}
			return pid
		}
	}
	return 0
}
