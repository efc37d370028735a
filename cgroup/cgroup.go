// Package cgroup holds the host's resource groups: one parent for everything
// that sandboxes use, so that together they cannot take what the host and the
// daemon need, and one group per machine below it. It speaks cgroup v1 (also
// beside an unused v2, "hybrid") and v2.
//
// Sources: cgroups(7), Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst.
package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/cgroups/v3"
	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// Limits of a group. Zero leaves a limit off.
type Limits struct {
	CPUWeight     int64 // thousandths of a core that are guaranteed: sets the share under contention
	CPULimit      int64 // thousandths of a core, hard
	MemoryRequest int64 // bytes protected from reclaim as far as the kernel does so
	MemoryLimit   int64 // bytes, hard
	Pids          int64 // host processes and threads
}

// Stats of a group as the kernel counts them.
type Stats struct {
	Memory     int64
	PeakMemory int64
	CPU        time.Duration
	Pids       int64
	OOMKills   int64
}

// period of the CPU quota. The kernel's own default.
const period = 100 * time.Millisecond

// hierarchy is what differs between v1 and v2.
type hierarchy interface {
	create(path string, l Limits) error
	update(path string, l Limits) error
	exists(path string) bool
	children(path string) ([]string, error)
	procs(path string) ([]int, error)
	stats(path string) (Stats, error)
	remove(path string) error
	// oom gives a file that can be read once for each time that the group ran
	// out of memory, and when it is removed; nil where the kernel then ends
	// everything in the group by itself.
	oom(path string) (*os.File, error)
	// spawn runs fn, which starts a process and returns its pid, so that the
	// process is in the group when spawn returns.
	spawn(path string, fn func(Entry) (int, error)) error
}

// Mode names the kind of hierarchy that this host has: v1, hybrid, v2, or none.
func Mode() string {
	switch cgroups.Mode() {
	case cgroups.Legacy:
		return "v1"
	case cgroups.Hybrid:
		return "hybrid"
	case cgroups.Unified:
		return "v2"
	}
	return "none"
}

// Parent is the group that holds all machines of one daemon.
type Parent struct {
	h    hierarchy
	path string
}

// OpenParent makes or finds the parent group at path, such as /vivarium, and
// sets its limits.
func OpenParent(path string, l Limits) (*Parent, error) {
	path = filepath.Clean("/" + path)
	if path == "/" {
		return nil, sandbox.Invalid.Errorf("cgroup parent %q: must name a group below the root", path)
	}
	h, err := newHierarchy()
	if err != nil {
		return nil, err
	}
	p := &Parent{h: h, path: path}
	if err := h.create(path, l); err != nil {
		return nil, kinded("create cgroup "+path, err)
	}
	return p, nil
}

func newHierarchy() (hierarchy, error) {
	switch cgroups.Mode() {
	case cgroups.Legacy, cgroups.Hybrid:
		return newV1(), nil
	case cgroups.Unified:
		return newV2(), nil
	}
	return nil, sandbox.Unsupported.Errorf("no cgroup hierarchy is mounted").WithHint("mount cgroup2 on /sys/fs/cgroup, as every current distribution does at boot")
}

// kinded gives a host failure its kind.
func kinded(what string, err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EAGAIN):
		return sandbox.Exhausted.Errorf("%s: %w", what, err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM), errors.Is(err, unix.EROFS):
		return sandbox.Unsupported.Errorf("%s: %w", what, err).WithHint("run as root with /sys/fs/cgroup writable; `viv doctor` says more")
	case errors.Is(err, fs.ErrNotExist):
		return sandbox.NotFound.Errorf("%s: %w", what, err)
	}
	return sandbox.Internal.Errorf("%s: %w", what, err)
}

// New makes a group below the parent. Exists if it is there.
func (p *Parent) New(name string, l Limits) (*Group, error) {
	g, err := p.group(name)
	if err != nil {
		return nil, err
	}
	if p.h.exists(g.path) {
		return nil, sandbox.Exists.Errorf("cgroup %s exists", g.path)
	}
	if err := p.h.create(g.path, l); err != nil {
		// what a failed create left is empty, so removing it cannot fail for a
		// reason that the caller could act on
		_ = p.h.remove(g.path)
		return nil, kinded("create cgroup "+g.path, err)
	}
	return g, nil
}

// Load finds a group below the parent.
func (p *Parent) Load(name string) (*Group, error) {
	g, err := p.group(name)
	if err != nil {
		return nil, err
	}
	if !p.h.exists(g.path) {
		return nil, sandbox.NotFound.Errorf("cgroup %s does not exist", g.path)
	}
	return g, nil
}

func (p *Parent) group(name string) (*Group, error) {
	if name == "" || strings.ContainsAny(name, "/\x00") || strings.HasPrefix(name, ".") {
		return nil, sandbox.Invalid.Errorf("cgroup name %q", name)
	}
	return &Group{h: p.h, path: filepath.Join(p.path, name)}, nil
}

// List names the groups below the parent.
func (p *Parent) List() ([]string, error) {
	names, err := p.h.children(p.path)
	if err != nil {
		return nil, kinded("list cgroup "+p.path, err)
	}
	return names, nil
}

// Stats of all machines together.
func (p *Parent) Stats() (Stats, error) { return p.h.stats(p.path) }

// Remove removes the parent, which must be empty.
func (p *Parent) Remove() error {
	if err := p.h.remove(p.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return kinded("remove cgroup "+p.path, err)
	}
	return nil
}

// Group is the resource group of one machine.
type Group struct {
	h    hierarchy
	path string
}

// Path below the root of the hierarchy.
func (g *Group) Path() string { return g.path }

// Update sets new limits.
func (g *Group) Update(l Limits) error {
	if err := g.h.update(g.path, l); err != nil {
		return kinded("limit cgroup "+g.path, err)
	}
	return nil
}

// Entry is how a new process comes to be in a group from its beginning, so that
// all of its memory is charged there.
type Entry struct {
	Dir   *os.File   // for SysProcAttr.CgroupFD; nil without cgroup v2
	Tasks []*os.File // the process writes "0" to each before it executes its program; empty with cgroup v2
}

// Spawn runs fn, which starts a process and returns its pid. With cgroup v1, one
// that did not enter by Entry.Tasks is moved, with its descendants, after fn. On
// error the process may be running outside: the caller kills it.
func (g *Group) Spawn(fn func(Entry) (pid int, err error)) error { return g.h.spawn(g.path, fn) }

// WatchOOM calls fn once when a process of the group was killed because the
// group ran out of memory; the kernel kills one, and leaves the others to
// themselves. With cgroup v2 it ends all of them, and fn is not called. The
// watch ends with the returned file, which may be nil, or with the group.
func (g *Group) WatchOOM(fn func()) (io.Closer, error) {
	f, err := g.h.oom(g.path)
	if err != nil {
		return nil, kinded("watch cgroup "+g.path, err)
	}
	if f == nil {
		return nil, nil
	}
	go func() {
		var b [8]byte // eventfd(2)
		for {
			if _, err := f.Read(b[:]); err != nil {
				return // closed
			}
			// told when memory has run out, which is before anything is killed
			for range 100 {
				s, err := g.h.stats(g.path)
				if err != nil {
					return // removed
				}
				if s.OOMKills > 0 {
					fn()
					return
				}
				time.Sleep(10 * time.Millisecond)
			}
		}
	}()
	return f, nil
}

// Stats of the group.
func (g *Group) Stats() (Stats, error) {
	s, err := g.h.stats(g.path)
	if err != nil {
		return Stats{}, kinded("read cgroup "+g.path, err)
	}
	return s, nil
}

// Procs are the pids of the processes in the group.
func (g *Group) Procs() ([]int, error) {
	pids, err := g.h.procs(g.path)
	if err != nil {
		return nil, kinded("read cgroup "+g.path, err)
	}
	return pids, nil
}

// Kill sends SIGKILL to everything in the group until it is empty.
func (g *Group) Kill(ctx context.Context) error {
	wait := time.Millisecond
	for {
		pids, err := g.h.procs(g.path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return kinded("read cgroup "+g.path, err)
		}
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			// the group is re-read until it is empty: a pid that is gone is fine
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		select {
		case <-ctx.Done():
			return sandbox.Timeout.Errorf("kill cgroup %s: %d processes do not end", g.path, len(pids))
		case <-time.After(wait):
		}
		if wait < 50*time.Millisecond {
			wait *= 2
		}
	}
}

// Remove removes the group, which must be empty. Idempotent.
func (g *Group) Remove() error {
	// a zombie that was just reaped may hold the group for a moment
	var err error
	for wait := time.Millisecond; wait < 300*time.Millisecond; wait *= 2 {
		if err = g.h.remove(g.path); err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		time.Sleep(wait)
	}
	return kinded("remove cgroup "+g.path, err)
}

// shares turns thousandths of a core into v1 CPU shares: 1024 per core, and
// never below the kernel's minimum.
func shares(milli int64) int64 { return max(2, milli*1024/1000) }

func quota(milli int64) int64 {
	// the kernel takes no quota below 1 ms
	return max(1000, milli*period.Microseconds()/1000)
}

// writeFile writes to a control file. The path is part of the error.
func writeFile(dir, name, value string) error {
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("set %s to %s: %w", name, value, err)
	}
	return nil
}

// At gives the group at a path below the root of the hierarchies, which must
// exist: for a process that was told the path of a group.
func At(path string) (*Group, error) {
	h, err := newHierarchy()
	if err != nil {
		return nil, err
	}
	g := &Group{h: h, path: filepath.Clean("/" + path)}
	if !h.exists(g.path) {
		return nil, sandbox.NotFound.Errorf("cgroup %s does not exist", g.path)
	}
	return g, nil
}
