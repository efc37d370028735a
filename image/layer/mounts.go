package layer

import (
	"vivarium/image/erofsimg"
)

// mountPoints are the directories that runtimes mount on or write below. An
// image is read-only, so they are there from the start. Forced ones replace
// whatever else an image has in their place.
var mountPoints = []struct {
	path  []string
	perm  uint16
	force bool
}{
	{[]string{"proc"}, 0o555, true},
	{[]string{"sys"}, 0o555, true},
	{[]string{"dev"}, 0o755, true},
	{[]string{"dev", "pts"}, 0o755, true},
	{[]string{"dev", "shm"}, 0o1777, true},
	{[]string{".viv"}, 0o755, true},
	{[]string{"tmp"}, 0o1777, false},
	{[]string{"run"}, 0o755, false},
	{[]string{"etc"}, 0o755, false},
	{[]string{"root"}, 0o700, false},
}

// mountFiles are files that runtimes mount over.
var mountFiles = []string{"hosts", "hostname", "resolv.conf"}

// EnsureMountPoints adds what a runtime needs to find in an image: /proc, /sys,
// /dev with pts and shm, /tmp, /run, /etc, /root, the reserved directory /.viv,
// and /etc/hosts, /etc/hostname and /etc/resolv.conf.
func (m *Merger) EnsureMountPoints() error {
	m.t.cur++
	for _, p := range mountPoints {
		parent, err := m.t.walkDirs(p.path[:len(p.path)-1], true)
		if err != nil {
			return err
		}
		name := p.path[len(p.path)-1]
		l, ok := parent.dir.Children[name]
		if ok && (l.IsDir() || !p.force) {
			continue
		}
		if err := m.t.put(parent.dir, name, erofsimg.NewDir(p.perm)); err != nil {
			return err
		}
	}
	etc, err := m.t.walkDirs([]string{"etc"}, false)
	if err != nil || etc == nil {
		return nil // /etc is something odd, and its owner's business
	}
	for _, name := range mountFiles {
		if m.regular(etc, name) {
			continue
		}
		n := &erofsimg.Node{Mode: erofsimg.TypeRegular | 0o644}
		if err := m.t.put(etc.dir, name, n); err != nil {
			return err
		}
	}
	return nil
}

// regular reports whether name in the directory at c is a regular file, or a
// link that ends at one.
func (m *Merger) regular(c *cursor, name string) bool {
	for range maxHops {
		l, ok := c.dir.Children[name]
		if !ok || !l.IsSymlink() {
			return ok && l.IsRegular()
		}
		var err error
		if c, name, err = m.t.follow(c, l.Target()); err != nil || c == nil {
			return false
		}
	}
	return false
}
