package agent

import (
	"path"

	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// direntBuf is how much of a directory is read at a time.
const direntBuf = 32 << 10

// dirents calls fn for every name that one getdents64 call returned. It works
// on bytes: names need not be UTF-8.
func dirents(b []byte, fn func(name []byte, typ byte)) {
	for len(b) >= 19 {
		n := int(b[16]) | int(b[17])<<8
		if n < 19 || n > len(b) {
			return
		}
		name := b[19:n]
		for i, c := range name {
			if c == 0 {
				name = name[:i]
				break
			}
		}
		if s := string(name); s != "." && s != ".." && s != "" {
			fn(name, b[18])
		}
		b = b[n:]
	}
}

func getdents(fd int, buf []byte) (int, error) {
	for {
		n, err := unix.Getdents(fd, buf)
		if err != unix.EINTR {
			return n, err
		}
	}
}

// openDir opens a directory, and never what a symbolic link leads to. Not with
// O_DIRECTORY: together with it gVisor ignores O_NOFOLLOW (its
// vfs.ResolvingPath.ShouldFollowSymlink), where open(2) lets neither win.
func openDir(at int, name string) (int, error) {
	var fd int
	var err error
	for {
		fd, err = unix.Openat(at, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
		if err != unix.EINTR {
			break
		}
	}
	if err == unix.ENXIO { // a socket
		return -1, unix.ENOTDIR
	}
	if err != nil {
		return -1, err
	}
	var st unix.Stat_t
	if err = unix.Fstat(fd, &st); err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
		err = unix.ENOTDIR
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// list answers TList: pages of files, at most o.N in all.
func (a *Agent) list(c *conn, p []byte) error {
	o, err := wire.DecodePathOp(p)
	if err != nil {
		return err
	}
	who, name, err := request(o.User, o.Path)
	if err != nil {
		return c.fail(err)
	}
	fd := -1
	err = a.files.as(who, func() (err error) {
		fd, err = openRetry(name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		return err
	})
	if err != nil {
		return c.fail(fileError("list", o.Path, err))
	}
	defer unix.Close(fd)
	limit := o.N
	if limit <= 0 {
		limit = 1 << 40
	}
	buf := make([]byte, direntBuf)
	var page []byte
	var done wire.Done
	for !done.More {
		n := 0
		// A page holds what one read of the directory gives: at most some
		// thousand files; their targets could be long, so it may be cut in two.
		page = page[:0]
		var pages [][]byte
		err := a.files.as(who, func() (err error) {
			if n, err = getdents(fd, buf); err != nil {
				return err
			}
			dirents(buf[:n], func(name []byte, _ byte) {
				if done.Entries >= limit {
					done.More = true
					return
				}
				var st unix.Stat_t
				nm := string(name)
				if unix.Fstatat(fd, nm, &st, unix.AT_SYMLINK_NOFOLLOW) != nil {
					return // gone meanwhile
				}
				f := fileOf(nm, &st)
				if st.Mode&unix.S_IFMT == unix.S_IFLNK {
					f.Target = readlinkat(fd, nm)
				}
				page = f.Append(page)
				done.Entries++
				if len(page) > wire.MaxChunk-2*wire.MaxPath {
					pages = append(pages, page)
					page = nil
				}
			})
			return nil
		})
		if err != nil {
			return c.fail(fileError("list", o.Path, err))
		}
		if len(page) > 0 {
			pages = append(pages, page)
		}
		for _, b := range pages {
			if err := c.frame(wire.TPage, func(h []byte) []byte { return append(h, b...) }); err != nil {
				return err
			}
		}
		if n == 0 {
			break
		}
	}
	return c.frame(wire.TDone, done.Append)
}

// remove removes a file, or with o.Flag a whole tree.
func (a *Agent) remove(o wire.PathOp) error {
	who, p, err := request(o.User, o.Path)
	if err != nil {
		return err
	}
	if p = path.Clean(p); p == "/" {
		return sandbox.Invalid.Errorf("the root directory cannot be removed")
	}
	err = a.files.as(who, func() error {
		err := unix.Unlink(p)
		if err == nil || err == unix.ENOENT {
			return err
		}
		var st unix.Stat_t
		if unix.Lstat(p, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return err
		}
		if err = unix.Rmdir(p); err == nil || !o.Flag || err != unix.ENOTEMPTY && err != unix.EEXIST {
			return err
		}
		return removeTree(p)
	})
	return fileError("remove", o.Path, err)
}

// level is a directory on the way down, to be recognised on the way up.
type level struct {
	name     string
	dev, ino uint64
}

// removeTree removes the directory p. It holds one descriptor however deep the
// tree is (A14), walks by openat and never through a symbolic link, and on the
// way up checks that ".." is where it came from, should somebody move
// directories meanwhile.
func removeTree(p string) error {
	parent, err := openRetry(path.Dir(p), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(parent)
	base := path.Base(p)
	cur, err := openDir(parent, base)
	if err != nil {
		return err
	}
	defer func() { unix.Close(cur) }()
	var stack []level // above cur, below parent
	buf := make([]byte, direntBuf)
	for {
		down, err := clearDir(cur, buf)
		if err != nil {
			return err
		}
		if down != "" {
			var st unix.Stat_t
			if err := unix.Fstat(cur, &st); err != nil {
				return err
			}
			next, err := openDir(cur, down)
			if err != nil {
				return err
			}
			stack = append(stack, level{down, st.Dev, st.Ino})
			unix.Close(cur)
			cur = next
			continue
		}
		if len(stack) == 0 {
			return unix.Unlinkat(parent, base, unix.AT_REMOVEDIR)
		}
		up := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		next, err := unix.Openat(cur, "..", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		if err != nil {
			return err
		}
		unix.Close(cur)
		cur = next
		var st unix.Stat_t
		if err := unix.Fstat(cur, &st); err != nil {
			return err
		}
		if st.Dev != up.dev || st.Ino != up.ino {
			return unix.EBUSY
		}
		if err := unix.Unlinkat(cur, up.name, unix.AT_REMOVEDIR); err != nil && err != unix.ENOENT {
			return err
		}
	}
}

// clearDir unlinks what is in dir until it meets a directory that is not empty,
// whose name it returns; "" means that dir is empty now.
func clearDir(dir int, buf []byte) (down string, err error) {
	for {
		if _, err := unix.Seek(dir, 0, 0); err != nil {
			return "", err
		}
		n, err := getdents(dir, buf)
		if err != nil {
			return "", err
		}
		left := 0
		var failed error
		dirents(buf[:n], func(name []byte, typ byte) {
			if down != "" || failed != nil {
				return
			}
			left++
			nm := string(name)
			var err error = unix.EISDIR
			if typ != unix.DT_DIR {
				err = unix.Unlinkat(dir, nm, 0)
			}
			if err == unix.EISDIR || err == unix.EPERM {
				if e := unix.Unlinkat(dir, nm, unix.AT_REMOVEDIR); e != unix.ENOTDIR {
					err = e
				}
			}
			switch err {
			case nil, unix.ENOENT:
			case unix.ENOTEMPTY, unix.EEXIST:
				down = nm
			default:
				failed = err
			}
		})
		if failed != nil || down != "" || left == 0 {
			return down, failed
		}
	}
}
