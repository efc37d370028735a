package agent

import (
	"errors"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// fileError gives a failed system call on a path its kind.
func fileError(what, name string, err error) error {
	if err == nil {
		return nil
	}
	var e *sandbox.Error
	if errors.As(err, &e) {
		return err
	}
	var no unix.Errno
	k := sandbox.Internal
	if errors.As(err, &no) {
		switch no {
		case unix.ENOENT:
			k = sandbox.NotFound
		case unix.EEXIST:
			k = sandbox.Exists
		case unix.EACCES, unix.EPERM, unix.EROFS:
			k = sandbox.Denied
		case unix.ENOSPC, unix.EDQUOT, unix.EMFILE, unix.ENFILE, unix.ENOMEM, unix.EMLINK:
			k = sandbox.Exhausted
		case unix.EBUSY, unix.ENOTEMPTY, unix.ETXTBSY, unix.EXDEV, unix.EAGAIN:
			k = sandbox.Conflict
		case unix.EOPNOTSUPP, unix.ENOSYS:
			k = sandbox.Unsupported
		case unix.ENOTDIR, unix.EISDIR, unix.ELOOP, unix.ENAMETOOLONG, unix.EINVAL, unix.ENXIO, unix.ENODEV, unix.ESPIPE, unix.EFBIG:
			k = sandbox.Invalid
		}
		err = no
	}
	return k.Errorf("%s %s: %w", what, clip(name, 512), err)
}

// location is the absolute path that p means: relative ones are from the root.
func location(p string) (string, error) {
	if p == "" || strings.IndexByte(p, 0) >= 0 {
		return "", sandbox.Invalid.Errorf("empty path, or one with a NUL byte")
	}
	if !strings.HasPrefix(p, "/") {
		p = "/" + p
	}
	return p, nil
}

// request resolves the user and the path of a file request.
func request(user, p string) (*account, string, error) {
	who, err := lookup(user)
	if err != nil {
		return nil, "", err
	}
	p, err = location(p)
	return who, p, err
}

func fileOf(name string, st *unix.Stat_t) wire.File {
	return wire.File{Name: name, Size: max(st.Size, 0), Mode: st.Mode, UID: st.Uid, GID: st.Gid, Sec: st.Mtim.Sec, Nsec: st.Mtim.Nsec}
}

// openRegular opens a regular file and nothing else: a FIFO or device would
// hang or have effects (B4). O_NONBLOCK makes the open itself safe.
func openRegular(p string, flags int, perm uint32) (int, *unix.Stat_t, error) {
	fd, err := openRetry(p, flags|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, perm)
	if err != nil {
		if err == unix.ENXIO {
			err = unix.EINVAL
		}
		return -1, nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return -1, nil, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		unix.Close(fd)
		return -1, nil, notRegular(p, st.Mode)
	}
	if err := notOurs(fd, p); err != nil {
		unix.Close(fd)
		return -1, nil, err
	}
	return fd, &st, nil
}

func openRetry(p string, flags int, perm uint32) (int, error) {
	for {
		fd, err := unix.Open(p, flags, perm)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

func notRegular(p string, mode uint32) error {
	what := map[uint32]string{unix.S_IFDIR: "a directory", unix.S_IFIFO: "a FIFO", unix.S_IFCHR: "a device", unix.S_IFBLK: "a device", unix.S_IFSOCK: "a socket"}[mode&unix.S_IFMT]
	if what == "" {
		what = "not a regular file"
	}
	return sandbox.Invalid.Errorf("%s is %s", clip(p, 512), what).WithHint("only regular files can be read and written here; use a command for others")
}

const procMagic = 0x9fa0

// notOurs refuses the guest's own files in /proc, its memory above all: a link
// to them in a place where the host reads or writes would let a process inside
// use the guest against itself.
func notOurs(fd int, p string) error {
	var fs unix.Statfs_t
	if unix.Fstatfs(fd, &fs) != nil || fs.Type != procMagic {
		return nil
	}
	name, err := os.Readlink("/proc/self/fd/" + itoa(fd))
	if err != nil {
		return fileError("look at", p, err)
	}
	for _, own := range [...]string{"/proc/" + itoa(os.Getpid()), "/proc/self", "/proc/thread-self"} {
		if name == own || strings.HasPrefix(name, own+"/") {
			return sandbox.Denied.Errorf("%s belongs to the guest itself", clip(p, 512))
		}
	}
	return nil
}

func (a *Agent) stat(o wire.PathOp) (wire.File, error) {
	who, p, err := request(o.User, o.Path)
	if err != nil {
		return wire.File{}, err
	}
	var f wire.File
	err = a.files.as(who, func() error {
		var st unix.Stat_t
		flags := unix.AT_SYMLINK_NOFOLLOW
		if o.Flag {
			flags = 0
		}
		if err := unix.Fstatat(unix.AT_FDCWD, p, &st, flags); err != nil {
			return err
		}
		f = fileOf(o.Path, &st)
		if st.Mode&unix.S_IFMT == unix.S_IFLNK {
			f.Target = readlinkat(unix.AT_FDCWD, p)
		}
		return nil
	})
	return f, fileError("stat", o.Path, err)
}

func readlinkat(dir int, name string) string {
	b := make([]byte, wire.MaxPath)
	n, err := unix.Readlinkat(dir, name, b)
	if err != nil {
		return ""
	}
	return string(b[:n])
}

func (a *Agent) mkdir(o wire.PathOp) error {
	who, p, err := request(o.User, o.Path)
	if err != nil {
		return err
	}
	mode := uint32(0o777)
	if o.N > 0 {
		mode = uint32(o.N) & 0o7777
	}
	err = a.files.as(who, func() error {
		if o.Flag {
			if err := mkdirAll(path.Dir(path.Clean(p)), 0o777); err != nil {
				return err
			}
		}
		err := unix.Mkdir(p, mode)
		if err == unix.EEXIST && o.Flag {
			var st unix.Stat_t
			if unix.Stat(p, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
				return nil
			}
		}
		if err == nil && o.N > 0 {
			err = unix.Chmod(p, mode) // whatever the umask is
		}
		return err
	})
	return fileError("make directory", o.Path, err)
}

// mkdirAll makes p and what is missing above it, without recursion.
func mkdirAll(p string, mode uint32) error {
	var missing []string
	for p != "/" && p != "." {
		err := unix.Mkdir(p, mode)
		if err == nil {
			break
		}
		if err == unix.EEXIST || err == unix.EISDIR {
			break
		}
		if err != unix.ENOENT {
			return err
		}
		if len(missing) > wire.MaxPath/2 {
			return unix.ENAMETOOLONG
		}
		missing = append(missing, p)
		p = path.Dir(p)
	}
	for i := len(missing) - 1; i >= 0; i-- {
		if err := unix.Mkdir(missing[i], mode); err != nil && err != unix.EEXIST {
			return err
		}
	}
	return nil
}

func (a *Agent) rename(o wire.PathOp) error {
	who, p, err := request(o.User, o.Path)
	if err != nil {
		return err
	}
	to, err := location(o.Other)
	if err != nil {
		return err
	}
	err = a.files.as(who, func() error {
		if o.Flag {
			return unix.Renameat2(unix.AT_FDCWD, p, unix.AT_FDCWD, to, unix.RENAME_NOREPLACE)
		}
		return unix.Rename(p, to)
	})
	return fileError("rename", o.Path, err)
}

func (a *Agent) symlink(o wire.PathOp) error {
	who, p, err := request(o.User, o.Path)
	if err != nil {
		return err
	}
	if o.Other == "" || strings.IndexByte(o.Other, 0) >= 0 {
		return sandbox.Invalid.Errorf("a symbolic link needs a target")
	}
	return fileError("make link", o.Path, a.files.as(who, func() error { return unix.Symlink(o.Other, p) }))
}

func (a *Agent) setAttr(o wire.SetAttr) error {
	who, p, err := request(o.User, o.Path)
	if err != nil {
		return err
	}
	err = a.files.as(who, func() error {
		at := &o.Attr
		if at.UID != nil || at.GID != nil {
			if err := unix.Chown(p, optional(at.UID), optional(at.GID)); err != nil {
				return err
			}
		}
		if at.Mode != nil {
			if err := unix.Chmod(p, *at.Mode); err != nil {
				return err
			}
		}
		if at.ModTime != nil {
			return unix.UtimesNanoAt(unix.AT_FDCWD, p, modTimes(at), 0)
		}
		return nil
	})
	return fileError("set attributes of", o.Path, err)
}

func optional(v *uint32) int {
	if v == nil {
		return -1
	}
	return int(*v)
}

func modTimes(a *wire.Attr) []unix.Timespec {
	return []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Sec: a.ModTime.Unix(), Nsec: int64(a.ModTime.Nanosecond())}}
}
