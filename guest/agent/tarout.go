package agent

import (
	"bytes"
	"errors"
	"path"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

const (
	maxTarName  = 256 << 10 // bytes of an entry's name
	maxTarNames = 64 << 20  // bytes of names held, of directories on the way and of links
	maxLinks    = 1 << 20   // files with more than one name that are remembered; others are packed again
	maxExtents  = 8 << 10   // of a sparse file
)

// packer streams a tree as a tar archive.
type packer struct {
	a     *Agent
	c     *conn
	out   outflow
	who   *account
	buf   []byte // at most wire.MaxChunk, sent when full
	done  wire.Done
	links map[[2]uint64]string
	held  int // bytes of names in links
	names int // bytes of names in directories on the way
}

// tarOut answers TTarOut: packs a path and all below it. The names in the
// archive start with o.Other, by default the path's last element; "." leaves
// only what is below it.
func (a *Agent) tarOut(c *conn, p []byte) error {
	o, err := wire.DecodePathOp(p)
	if err != nil {
		return err
	}
	who, name, err := request(o.User, o.Path)
	if err != nil {
		return c.fail(err)
	}
	buf := *chunks.Get().(*[]byte)
	k := &packer{a: a, c: c, out: outflow{c: c}, who: who, buf: buf[:0], links: map[[2]uint64]string{}}
	defer chunks.Put(&buf)
	prefix := o.Other
	if prefix == "" {
		prefix = path.Base(path.Clean(name))
	}
	if prefix == "/" {
		prefix = "."
	}
	err = k.tree(name, prefix, o.Flag)
	if err == nil {
		err = k.put(make([]byte, 2*tarBlock))
	}
	if err == nil {
		err = k.flush()
	}
	if err != nil {
		if errors.Is(err, errSend) {
			return err
		}
		return c.fail(fileError("pack", o.Path, err))
	}
	return c.frame(wire.TDone, k.done.Append)
}

var errSend = errors.New("connection to the host lost")

func (k *packer) flush() error {
	if len(k.buf) == 0 {
		return nil
	}
	if k.out.data(k.buf) != nil {
		return errSend
	}
	k.done.Bytes += int64(len(k.buf))
	k.buf = k.buf[:0]
	return nil
}

func (k *packer) put(b []byte) error {
	for len(b) > 0 {
		n := copy(k.buf[len(k.buf):cap(k.buf)], b)
		k.buf = k.buf[:len(k.buf)+n]
		b = b[n:]
		if len(k.buf) == cap(k.buf) {
			if err := k.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// dir is a directory on the way.
type dir struct {
	level
	cut   int      // how much of the path leads to it
	names []string // still to be packed
}

// tree packs name and what is below it with one descriptor for directories, as
// removeTree does.
func (k *packer) tree(name, prefix string, follow bool) error {
	at := unix.AT_FDCWD
	if follow {
		// The link itself is resolved by the kernel: pack what it leads to.
		name = strings.TrimRight(name, "/") + "/."
		var st unix.Stat_t
		err := k.a.files.as(k.who, func() error { return unix.Stat(name, &st) })
		if err == unix.ENOTDIR {
			name = strings.TrimSuffix(name, "/.")
		} else if err != nil {
			return err
		}
	}
	cur, names, err := k.entry(at, name, prefix, follow)
	if err != nil || cur < 0 {
		return err
	}
	defer func() { unix.Close(cur) }()
	// One path for all: one each, in a deep tree, would take its depth squared.
	var path []byte
	if prefix != "." {
		path = append(path, prefix...)
	}
	stack := []dir{{cut: len(path), names: names}}
	for {
		d := &stack[len(stack)-1]
		if len(d.names) == 0 {
			if len(stack) == 1 {
				return nil
			}
			up := d.level
			stack = stack[:len(stack)-1]
			var st unix.Stat_t
			err := k.a.files.as(k.who, func() error {
				next, err := unix.Openat(cur, "..", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
				if err != nil {
					return err
				}
				unix.Close(cur)
				cur = next
				return unix.Fstat(cur, &st)
			})
			if err != nil {
				return err
			}
			if st.Dev != up.dev || st.Ino != up.ino {
				return sandbox.Conflict.Errorf("a directory was moved while it was packed")
			}
			continue
		}
		n := d.names[0]
		d.names = d.names[1:]
		k.names -= len(n)
		path = path[:d.cut]
		if len(path) > 0 {
			path = append(path, '/')
		}
		if path = append(path, n...); len(path) > maxTarName {
			return unix.ENAMETOOLONG
		}
		next, names, err := k.entry(cur, n, string(path), false)
		if err == unix.ENOENT {
			continue // gone meanwhile
		}
		if err != nil {
			return err
		}
		if next >= 0 {
			var st unix.Stat_t
			if err := unix.Fstat(cur, &st); err != nil {
				unix.Close(next)
				return err
			}
			stack = append(stack, dir{level{"", st.Dev, st.Ino}, len(path), names})
			unix.Close(cur)
			cur = next
		}
	}
}

// entry packs one file. For a directory it returns a descriptor and the names
// in it.
func (k *packer) entry(at int, name, as string, follow bool) (sub int, names []string, err error) {
	var st unix.Stat_t
	e := tarEntry{name: as}
	fd := -1
	first := ""
	err = k.a.files.as(k.who, func() error {
		flags := unix.AT_SYMLINK_NOFOLLOW
		if follow {
			flags = 0
		}
		if err := unix.Fstatat(at, name, &st, flags); err != nil {
			return err
		}
		id := [2]uint64{st.Dev, st.Ino}
		dir := st.Mode&unix.S_IFMT == unix.S_IFDIR
		if !dir && st.Nlink > 1 {
			if first = k.links[id]; first != "" {
				return nil
			}
			if len(k.links) < maxLinks && k.held+len(as) <= maxTarNames {
				k.links[id] = as
				k.held += len(as)
			}
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG, unix.S_IFDIR:
			// no O_DIRECTORY: see openDir
			open := unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NONBLOCK | unix.O_NOCTTY
			if !follow {
				open |= unix.O_NOFOLLOW
			}
			var err error
			if fd, err = unix.Openat(at, name, open, 0); err != nil {
				return err
			}
			var st2 unix.Stat_t
			if err := unix.Fstat(fd, &st2); err != nil {
				return err
			}
			if st2.Mode&unix.S_IFMT != st.Mode&unix.S_IFMT {
				return unix.ENOENT // replaced meanwhile
			}
			st = st2
			if !dir {
				if err := notOurs(fd, name); err != nil {
					return err
				}
			}
			e.xattrs = xattrs(fd)
		case unix.S_IFLNK:
			e.link = readlinkat(at, name)
		}
		if dir {
			names, err = k.list(fd)
			return err
		}
		return nil
	})
	if err != nil {
		if fd >= 0 {
			unix.Close(fd)
		}
		return -1, nil, err
	}
	e.mode, e.uid, e.gid, e.sec, e.nsec = st.Mode, st.Uid, st.Gid, st.Mtim.Sec, st.Mtim.Nsec
	if first != "" {
		e.kind, e.link = '1', first
		return -1, nil, k.header(&e)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		e.kind, e.name = '5', as+"/"
		if err := k.header(&e); err != nil {
			unix.Close(fd)
			return -1, nil, err
		}
		return fd, names, nil
	case unix.S_IFREG:
		defer unix.Close(fd)
		return -1, nil, k.regular(fd, &e, &st)
	case unix.S_IFLNK:
		e.kind = '2'
	case unix.S_IFIFO:
		e.kind = '6'
	case unix.S_IFCHR, unix.S_IFBLK:
		e.kind = '3'
		if st.Mode&unix.S_IFMT == unix.S_IFBLK {
			e.kind = '4'
		}
		e.devMajor, e.devMinor = unix.Major(st.Rdev), unix.Minor(st.Rdev)
	default:
		return -1, nil, nil // a socket: tar has no word for it
	}
	return -1, nil, k.header(&e)
}

func (k *packer) header(e *tarEntry) error {
	k.done.Entries++
	return k.put(e.append(nil))
}

// list reads the names in a directory.
func (k *packer) list(fd int) ([]string, error) {
	var names []string
	buf := make([]byte, direntBuf)
	for {
		n, err := getdents(fd, buf)
		if err != nil {
			return nil, err
		}
		if n == 0 {
			slices.Sort(names)
			return names, nil
		}
		dirents(buf[:n], func(name []byte, _ byte) {
			names = append(names, string(name))
			k.names += len(name)
		})
		if k.names > maxTarNames {
			return nil, sandbox.Exhausted.Errorf("directories with more than %d MiB of names", maxTarNames>>20)
		}
	}
}

// regular packs a file: exactly as many bytes as the header says, whatever
// happens to the file meanwhile.
func (k *packer) regular(fd int, e *tarEntry, st *unix.Stat_t) error {
	e.kind, e.size = '0', max(st.Size, 0)
	m := &sparseMap{off: []int64{0}, len: []int64{e.size}}
	if st.Size > 64<<10 && st.Blocks*512 < st.Size {
		if s := extents(fd, st.Size); s != nil {
			m, e.sparse, e.realSize = s, s, st.Size
		}
	}
	var head []byte
	if e.sparse != nil {
		head = m.append(nil)
		e.size = int64(len(head))
		for _, l := range m.len {
			e.size += l
		}
	}
	if err := k.header(e); err != nil {
		return err
	}
	if err := k.put(head); err != nil {
		return err
	}
	for i := range m.off {
		if err := k.bytes(fd, m.off[i], m.len[i]); err != nil {
			return err
		}
	}
	return k.put(pad(nil, e.size))
}

func (k *packer) bytes(fd int, off, n int64) error {
	for n > 0 {
		b := k.buf[len(k.buf):cap(k.buf)]
		b = b[:min(int64(len(b)), n)]
		m, err := k.a.pread(fd, b, off)
		if err != nil {
			return err
		}
		if m == 0 { // it became shorter
			clear(b)
			m = len(b)
		}
		k.buf = k.buf[:len(k.buf)+m]
		off += int64(m)
		n -= int64(m)
		if len(k.buf) == cap(k.buf) {
			if err := k.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// extents finds where a file has data; nil where that is not known, or where
// there are too many pieces.
func extents(fd int, size int64) *sparseMap {
	m := &sparseMap{}
	for off := int64(0); off < size; {
		d, err := unix.Seek(fd, off, unix.SEEK_DATA)
		if err == unix.ENXIO {
			break
		}
		if err != nil || d < off {
			return nil
		}
		h, err := unix.Seek(fd, d, unix.SEEK_HOLE)
		if err != nil || h <= d {
			return nil
		}
		d, h = min(d, size), min(h, size)
		m.off, m.len = append(m.off, d), append(m.len, h-d)
		if off = h; len(m.off) > maxExtents {
			return nil
		}
	}
	return m
}

// xattrs reads the extended attributes of a file, within bounds.
func xattrs(fd int) (all [][2]string) {
	list := make([]byte, 16<<10)
	n, err := unix.Flistxattr(fd, list)
	if err != nil || n <= 0 {
		return nil
	}
	var val []byte
	for name := range bytes.SplitSeq(bytes.TrimRight(list[:n], "\x00"), []byte{0}) {
		if val == nil {
			val = make([]byte, 64<<10)
		}
		key := string(name)
		if n, err := unix.Fgetxattr(fd, key, val); err == nil && key != "" && !strings.Contains(key, "=") {
			all = append(all, [2]string{key, string(val[:n])})
		}
		if len(all) == 32 {
			break
		}
	}
	return all
}
