package doctor

import (
	"fmt"
	"runtime"
	"strconv"
	"strings"
)

// What a sandbox takes of the host while it is idle, measured: threads of the
// sentry and of the processes that run the guest, and descriptors of the daemon.
const (
	threadsEach = 20
	filesEach   = 6
)

func (d *doctor) limits() {
	want := int64(d.Sandboxes)
	enough := func(name, path, setting string, each, spare int64, effect string) {
		n, ok := d.number(path)
		if !ok {
			return
		}
		need := want*each + spare
		if n < need {
			d.bad(Warning, name, fmt.Sprintf("%s is %d, %d sandboxes need about %d", setting, n, want, need), effect,
				fmt.Sprintf("sysctl -w %s=%d, and the same in a file of /etc/sysctl.d", setting, 2*need))
			return
		}
		d.ok(name, fmt.Sprintf("%s is %d", setting, n))
	}
	enough("process ids", "/proc/sys/kernel/pid_max", "kernel.pid_max", threadsEach, 4096, "sandboxes do not start, or cannot fork")
	enough("threads", "/proc/sys/kernel/threads-max", "kernel.threads-max", threadsEach, 4096, "sandboxes do not start, or cannot fork")
	enough("open files of the host", "/proc/sys/fs/file-max", "fs.file-max", 200, 65536, "sandboxes do not start")
	// a sentry maps the memory of what runs inside piece by piece
	if n, ok := d.number("/proc/sys/vm/max_map_count"); ok && n < 65530 {
		d.bad(Warning, "memory maps", fmt.Sprintf("vm.max_map_count is %d", n), "a sandbox with many programs can end with an out-of-memory error", "sysctl -w vm.max_map_count=262144")
	}
	d.openFiles(want*filesEach + 1024)
}

// openFiles is the limit that the daemon would have: its own hard limit, to
// which Go raises the soft one.
func (d *doctor) openFiles(need int64) {
	s, err := d.read("/proc/self/limits")
	if err != nil {
		return
	}
	hard, ok := openFilesLimit(s)
	switch {
	case !ok:
	case hard < need:
		d.bad(Warning, "open files of a process", fmt.Sprintf("at most %d, %d sandboxes need about %d", hard, d.Sandboxes, need), "creates fail once they are used up",
			"raise it in the daemon's unit (LimitNOFILE=1048576), or with ulimit -Hn before viv serve")
	default:
		d.ok("open files of a process", strconv.FormatInt(hard, 10))
	}
}

func openFilesLimit(table string) (hard int64, ok bool) {
	for line := range strings.Lines(table) {
		rest, found := strings.CutPrefix(line, "Max open files")
		f := strings.Fields(rest)
		if !found || len(f) < 2 {
			continue
		}
		if f[1] == "unlimited" {
			return 1 << 40, true
		}
		n, err := strconv.ParseInt(f[1], 10, 64)
		return n, err == nil
	}
	return 0, false
}

// idleMemory is what an idle sandbox takes, with everything.
const idleMemory = 14 << 20

// room says how many sandboxes fit by what they are guaranteed.
func (d *doctor) room() {
	total, ok := d.memTotal()
	if !ok {
		return
	}
	memory, cpu := total-d.ReserveMemory, int64(runtime.NumCPU())*1000-d.ReserveCPU
	detail := fmt.Sprintf("%.1f GiB of memory, %d CPUs", float64(total)/gib, runtime.NumCPU())
	if d.MemoryRequest > 0 && d.CPURequest > 0 {
		detail += fmt.Sprintf("; room for %d sandboxes of default size at once", max(0, min(memory/d.MemoryRequest, cpu/d.CPURequest)))
	}
	if memory < 256<<20 {
		d.bad(Error, "memory", detail, "there is no room for a sandbox beside the host's reserve", "use a machine with 1 GiB of memory or more, or lower reserve.memory")
		return
	}
	if memory/idleMemory < int64(d.Sandboxes) {
		d.bad(Note, "memory", detail, fmt.Sprintf("about %d idle sandboxes fill it", memory/idleMemory), "use a machine with more memory for more")
		return
	}
	d.ok("memory", detail)
}

func (d *doctor) memTotal() (int64, bool) {
	s, err := d.read("/proc/meminfo")
	if err != nil {
		return 0, false
	}
	for line := range strings.Lines(s) {
		if rest, ok := strings.CutPrefix(line, "MemTotal:"); ok {
			if f := strings.Fields(rest); len(f) > 0 {
				n, err := strconv.ParseInt(f[0], 10, 64)
				return n << 10, err == nil
			}
		}
	}
	return 0, false
}
