package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

const v2Mount = "/sys/fs/cgroup"

// v2Controllers are needed in every group of ours.
const v2Controllers = "+cpu +memory +pids"

type v2 struct{ mount string }

func newV2() *v2 { return &v2{mount: v2Mount} }

func (h *v2) create(path string, l Limits) error {
	// controllers must be switched on in every ancestor
	dir := h.mount
	for part := range filepathParts(path) {
		if err := writeFile(dir, "cgroup.subtree_control", v2Controllers); err != nil {
			return err
		}
		dir = filepath.Join(dir, part)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return h.update(path, l)
}

func (h *v2) update(path string, l Limits) error {
	dir := h.mount + path
	if l.CPUWeight > 0 {
		// the kernel's own mapping of 2..262144 shares to a weight of 1..10000
		w := 1 + (shares(l.CPUWeight)-2)*9999/262142
		if err := writeFile(dir, "cpu.weight", strconv.FormatInt(max(1, min(10000, w)), 10)); err != nil {
			return err
		}
	}
	if l.CPULimit > 0 {
		if err := writeFile(dir, "cpu.max", fmt.Sprintf("%d %d", quota(l.CPULimit), period.Microseconds())); err != nil {
			return err
		}
	}
	if l.MemoryLimit > 0 {
		if err := writeFile(dir, "memory.max", strconv.FormatInt(l.MemoryLimit, 10)); err != nil {
			return err
		}
		// all or nothing: half a sandbox is none. From Linux 4.19 on.
		if err := writeFile(dir, "memory.oom.group", "1"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := writeFile(dir, "memory.swap.max", "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if l.MemoryRequest > 0 {
		if err := writeFile(dir, "memory.low", strconv.FormatInt(l.MemoryRequest, 10)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if l.Pids > 0 {
		if err := writeFile(dir, "pids.max", strconv.FormatInt(l.Pids, 10)); err != nil {
			return err
		}
	}
	return nil
}

func (h *v2) exists(path string) bool {
	_, err := os.Stat(h.mount + path)
	return err == nil
}

func (h *v2) children(path string) ([]string, error) { return subdirs(h.mount + path) }

func (h *v2) procs(path string) ([]int, error) {
	return readPids(filepath.Join(h.mount+path, "cgroup.procs"))
}

func (h *v2) stats(path string) (Stats, error) {
	dir := h.mount + path
	var s Stats
	var err error
	if s.Memory, err = readInt(filepath.Join(dir, "memory.current")); err != nil {
		return s, err
	}
	// memory.peak is there from Linux 5.19 on
	if s.PeakMemory, err = readInt(filepath.Join(dir, "memory.peak")); errors.Is(err, fs.ErrNotExist) {
		s.PeakMemory = s.Memory
	} else if err != nil {
		return s, err
	}
	if s.Pids, err = readInt(filepath.Join(dir, "pids.current")); err != nil {
		return s, err
	}
	cpu, err := readKV(filepath.Join(dir, "cpu.stat"))
	if err != nil {
		return s, err
	}
	s.CPU = time.Duration(cpu["usage_usec"]) * time.Microsecond
	events, err := readKV(filepath.Join(dir, "memory.events"))
	if err != nil {
		return s, err
	}
	s.OOMKills = events["oom_kill"]
	return s, nil
}

func (h *v2) remove(path string) error {
	if err := unix.Rmdir(h.mount + path); err != nil && err != unix.ENOENT {
		return err
	}
	return nil
}

func (h *v2) oom(string) (*os.File, error) { return nil, nil }

func (h *v2) spawn(path string, fn func(Entry) (int, error)) error {
	dir, err := os.Open(h.mount + path)
	if err != nil {
		return kinded("open cgroup "+path, err)
	}
	defer dir.Close()
	_, err = fn(Entry{Dir: dir})
	return err
}

// filepathParts yields the names along an absolute path.
func filepathParts(path string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for len(path) > 0 {
			if path[0] == '/' {
				path = path[1:]
				continue
			}
			i := 0
			for i < len(path) && path[i] != '/' {
				i++
			}
			if !yield(path[:i]) {
				return
			}
			path = path[i:]
		}
	}
}
