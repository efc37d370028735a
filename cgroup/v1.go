package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// v1 uses just the controllers that a limit or a figure of ours needs; each
// further hierarchy costs a directory per machine.
//
// github.com/containerd/cgroups is not used for the groups themselves: it can
// only move a process that already runs, and the memory a sentry takes before
// the move stays charged to the daemon's own group.
type v1 struct {
	mounts []string // distinct directories of the hierarchies, in no order
	by     map[string]string
}

var v1Controllers = []string{"memory", "cpu", "cpuacct", "pids"}

func newV1() *v1 {
	h := &v1{by: map[string]string{}}
	seen := map[string]bool{}
	for _, c := range v1Controllers {
		dir := filepath.Join("/sys/fs/cgroup", c)
		real, err := filepath.EvalSymlinks(dir) // cpu is often a link to cpu,cpuacct
		if err != nil {
			continue
		}
		h.by[c] = real
		if !seen[real] {
			seen[real] = true
			h.mounts = append(h.mounts, real)
		}
	}
	return h
}

func (h *v1) create(path string, l Limits) error {
	for _, m := range h.mounts {
		if err := os.MkdirAll(m+path, 0o755); err != nil {
			return err
		}
	}
	return h.update(path, l)
}

func (h *v1) update(path string, l Limits) error {
	set := func(controller, file string, value int64) error {
		m, ok := h.by[controller]
		if !ok {
			return fmt.Errorf("controller %s is not mounted: %w", controller, fs.ErrNotExist)
		}
		return writeFile(m+path, file, strconv.FormatInt(value, 10))
	}
	if l.CPUWeight > 0 {
		if err := set("cpu", "cpu.shares", shares(l.CPUWeight)); err != nil {
			return err
		}
	}
	if l.CPULimit > 0 {
		// a kernel without CONFIG_CFS_BANDWIDTH has no quota: fail, do not run
		// without the limit that was asked for
		if err := set("cpu", "cpu.cfs_period_us", period.Microseconds()); err != nil {
			return err
		}
		if err := set("cpu", "cpu.cfs_quota_us", quota(l.CPULimit)); err != nil {
			return err
		}
	}
	if l.MemoryLimit > 0 {
		if err := set("memory", "memory.limit_in_bytes", l.MemoryLimit); err != nil {
			return err
		}
		// swap would let a sandbox grow past its limit; the file exists only
		// with swap accounting, without which there is nothing to bound
		if err := set("memory", "memory.memsw.limit_in_bytes", l.MemoryLimit); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if l.MemoryRequest > 0 {
		if err := set("memory", "memory.soft_limit_in_bytes", l.MemoryRequest); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if l.Pids > 0 {
		if err := set("pids", "pids.max", l.Pids); err != nil {
			return err
		}
	}
	return nil
}

func (h *v1) exists(path string) bool {
	for _, m := range h.mounts {
		if _, err := os.Stat(m + path); err == nil {
			return true
		}
	}
	return false
}

func (h *v1) children(path string) ([]string, error) {
	seen := map[string]bool{}
	var names []string
	for _, m := range h.mounts {
		sub, err := subdirs(m + path)
		if err != nil {
			return nil, err
		}
		for _, n := range sub {
			if !seen[n] {
				seen[n] = true
				names = append(names, n)
			}
		}
	}
	return names, nil
}

func subdirs(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

func (h *v1) procs(path string) ([]int, error) {
	m, ok := h.by["memory"]
	if !ok && len(h.mounts) > 0 {
		m = h.mounts[0]
	}
	return readPids(filepath.Join(m+path, "cgroup.procs"))
}

func readPids(file string) ([]int, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var pids []int
	s := bufio.NewScanner(f)
	for s.Scan() {
		pid, err := strconv.Atoi(s.Text())
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", file, err)
		}
		pids = append(pids, pid)
	}
	return pids, s.Err()
}

func (h *v1) stats(path string) (Stats, error) {
	var s Stats
	var err error
	get := func(controller, file string) int64 {
		m, ok := h.by[controller]
		if !ok || err != nil {
			return 0
		}
		var n int64
		n, err = readInt(filepath.Join(m+path, file))
		return n
	}
	s.Memory = get("memory", "memory.usage_in_bytes")
	s.PeakMemory = get("memory", "memory.max_usage_in_bytes")
	s.CPU = time.Duration(get("cpuacct", "cpuacct.usage"))
	s.Pids = get("pids", "pids.current")
	if err != nil {
		return s, err
	}
	kv, err := readKV(filepath.Join(h.by["memory"]+path, "memory.oom_control"))
	if err != nil {
		return s, err
	}
	s.OOMKills = kv["oom_kill"]
	return s, nil
}

func readInt(file string) (int64, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", file, err)
	}
	return n, nil
}

// readKV reads a file of "key number" lines.
func readKV(file string) (map[string]int64, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	kv := map[string]int64{}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) != 2 {
			continue
		}
		if n, err := strconv.ParseInt(f[1], 10, 64); err == nil {
			kv[f[0]] = n
		}
	}
	return kv, nil
}

func (h *v1) remove(path string) error {
	var first error
	for _, m := range h.mounts {
		if err := unix.Rmdir(m + path); err != nil && err != unix.ENOENT && first == nil {
			first = err
		}
	}
	return first
}

// oom registers an eventfd for memory.oom_control (cgroup-v1/memory.rst, 10).
func (h *v1) oom(path string) (*os.File, error) {
	dir := h.by["memory"] + path
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "oom")
	ctl, err := os.Open(filepath.Join(dir, "memory.oom_control"))
	if err == nil {
		err = writeFile(dir, "cgroup.event_control", fmt.Sprintf("%d %d", fd, ctl.Fd()))
		ctl.Close()
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// spawn gives fn the group's tasks files. What did not enter by them is moved;
// the memory that it took before stays charged to this process's group then.
func (h *v1) spawn(path string, fn func(Entry) (int, error)) error {
	var e Entry
	defer func() {
		for _, f := range e.Tasks {
			f.Close() // fn may have done it
		}
	}()
	for _, m := range h.mounts {
		f, err := os.OpenFile(m+path+"/tasks", os.O_WRONLY, 0)
		if err != nil {
			return kinded("open cgroup "+path, err)
		}
		e.Tasks = append(e.Tasks, f)
	}
	pid, err := fn(e)
	if err != nil {
		return err
	}
	if h.inside(path, pid) {
		return nil
	}
	if err := h.move(path, pid); err != nil {
		return kinded("enter cgroup "+path, err)
	}
	return nil
}

// inside says whether a process is in the group in all hierarchies.
func (h *v1) inside(path string, pid int) bool {
	for _, m := range h.mounts {
		pids, err := readPids(m + path + "/cgroup.procs")
		if err != nil || !slices.Contains(pids, pid) {
			return false
		}
	}
	return true
}

// maxDescendants bounds how many processes a new process may have started
// before it is moved.
const maxDescendants = 256

// move brings a process and all its descendants into the group. A child that is
// forked meanwhile by a process already moved is born inside; so once a pass
// over the tree finds nothing outside, nothing is.
func (h *v1) move(path string, pid int) error {
	moved := map[int]bool{}
	for todo := []int{pid}; len(todo) > 0; {
		for _, p := range todo {
			for _, m := range h.mounts {
				err := writeFile(m+path, "cgroup.procs", strconv.Itoa(p))
				if errors.Is(err, unix.ESRCH) && p != pid {
					continue // it has ended
				}
				if err != nil {
					return err
				}
			}
			moved[p] = true
		}
		todo = todo[:0]
		for _, p := range descendants(pid) {
			if !moved[p] {
				todo = append(todo, p)
			}
		}
		if len(moved)+len(todo) > maxDescendants {
			return fmt.Errorf("process %d has more than %d descendants: %w", pid, maxDescendants, unix.EAGAIN)
		}
	}
	return nil
}

// descendants reads proc_pid_task_children(5).
func descendants(pid int) []int {
	var all []int
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil {
		return nil // only a malformed pattern
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // the thread has ended
		}
		for _, s := range strings.Fields(string(b)) {
			if child, err := strconv.Atoi(s); err == nil {
				all = append(append(all, child), descendants(child)...)
			}
		}
	}
	return all
}
