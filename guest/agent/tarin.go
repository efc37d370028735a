package agent

import (
	"archive/tar"
	"errors"
	"io"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

const (
	maxDirTimes  = 100_000 // directories whose time is set at the end
	maxLinkSteps = 40
	maxDepth     = 4096
)

// unpacker extracts an archive below a directory and nowhere else. It walks by
// openat and O_NOFOLLOW, one element at a time. Symbolic links that were there
// before are followed within the directory, as if it were the root; one that
// the archive itself made is refused as part of a name (B2).
type unpacker struct {
	a    *Agent
	c    *conn
	who  *account
	req  *wire.TarIn
	root int // descriptor of the directory
	done wire.Done
	made map[[2]uint64]struct{} // symbolic links of this archive
	dirs []dirTime

	// the parent of the last entry: most follow each other in a directory
	lastDir  string
	lastFD   int
	lastReal []string // the real directories that lead to it
}

type dirTime struct {
	name string
	t    time.Time
}

// tarIn answers TTarIn: extracts what comes until TEnd.
func (a *Agent) tarIn(c *conn, p []byte) error {
	req, err := wire.DecodeTarIn(p)
	if err != nil {
		return err
	}
	who, dest, err := request(req.User, req.Path)
	if err != nil {
		return c.refuse(err)
	}
	u := &unpacker{a: a, c: c, who: who, req: &req, root: -1, lastFD: -1, made: map[[2]uint64]struct{}{}}
	err = a.files.as(who, func() (err error) {
		if req.Parents {
			if err := mkdirAll(path.Clean(dest), 0o777); err != nil {
				return err
			}
		}
		u.root, err = openRetry(dest, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return c.refuse(fileError("extract to", req.Path, err))
	}
	defer u.close()
	in := &upload{c: c}
	if err := u.extract(in); err != nil {
		if in.err != nil && in.err != io.EOF {
			return in.err
		}
		if in.err == io.EOF {
			return c.fail(u.kind(err))
		}
		return c.refuse(u.kind(err))
	}
	// What follows the archive's end is padding.
	for {
		if _, err := in.next(); err == io.EOF {
			break
		} else if err != nil {
			return err
		}
	}
	return c.frame(wire.TDone, u.done.Append)
}

func (u *unpacker) close() {
	if u.lastFD >= 0 {
		unix.Close(u.lastFD)
	}
	unix.Close(u.root)
}

// kind makes a damaged archive Invalid.
func (u *unpacker) kind(err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, tar.ErrFieldTooLong) {
		return sandbox.Invalid.Errorf("damaged archive: %w", err)
	}
	return fileError("extract to", u.req.Path, err)
}

func (u *unpacker) extract(r io.Reader) error {
	t := tar.NewReader(r)
	for {
		h, err := t.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		u.done.Entries++
		if u.req.MaxEntries > 0 && u.done.Entries > u.req.MaxEntries {
			return sandbox.Exhausted.Errorf("archive of more than %d entries", u.req.MaxEntries)
		}
		if h.Size < 0 || u.req.MaxBytes > 0 && h.Size > u.req.MaxBytes-u.done.Bytes {
			return sandbox.Exhausted.Errorf("archive of more than %d bytes", u.req.MaxBytes)
		}
		if err := u.entry(h, t); err != nil {
			var e *sandbox.Error
			if errors.As(err, &e) || errors.Is(err, io.ErrUnexpectedEOF) {
				return err
			}
			return fileError("extract", h.Name, err)
		}
	}
	// Directories' times last: what was put into them has changed them.
	return u.a.files.as(u.who, func() error {
		for _, d := range u.dirs {
			parent, base, err := u.parent(d.name, false)
			if err != nil {
				continue
			}
			unix.UtimesNanoAt(parent, base, times(d.t), unix.AT_SYMLINK_NOFOLLOW)
		}
		return nil
	})
}

func times(t time.Time) []unix.Timespec {
	return []unix.Timespec{{Nsec: unix.UTIME_OMIT}, {Sec: t.Unix(), Nsec: int64(t.Nanosecond())}}
}

// elements takes a name apart and refuses what leads upwards. Absolute names
// become relative.
func elements(name string) ([]string, error) {
	if strings.IndexByte(name, 0) >= 0 {
		return nil, sandbox.Invalid.Errorf("name with a NUL byte in the archive")
	}
	var l []string
	for e := range strings.SplitSeq(name, "/") {
		switch e {
		case "", ".":
		case "..":
			return nil, sandbox.Invalid.Errorf("%q in the archive leads out of the destination", clip(name, 256))
		default:
			if l = append(l, e); len(l) > maxDepth {
				return nil, sandbox.Invalid.Errorf("name of more than %d elements in the archive", maxDepth)
			}
		}
	}
	return l, nil
}

// parent returns a descriptor of the directory that an entry belongs in, valid
// until the next call, and its last element ("." for the destination itself).
// Missing directories are made where create is true.
func (u *unpacker) parent(name string, create bool) (int, string, error) {
	l, err := elements(name)
	if err != nil {
		return -1, "", err
	}
	if len(l) == 0 {
		return u.root, ".", nil
	}
	base := l[len(l)-1]
	l = l[:len(l)-1]
	if len(l) == 0 {
		return u.root, base, nil
	}
	key := strings.Join(l, "/")
	if u.lastFD >= 0 && key == u.lastDir {
		return u.lastFD, base, nil
	}
	from, real := u.root, []string(nil)
	if u.lastFD >= 0 && strings.HasPrefix(key, u.lastDir+"/") {
		// Below the last one: go on from there, or deep trees take for ever.
		from, real = u.lastFD, u.lastReal
		l = l[strings.Count(u.lastDir, "/")+1:]
	}
	fd, real, err := u.walk(from, real, l, create)
	if err != nil {
		return -1, "", err
	}
	if u.lastFD >= 0 {
		unix.Close(u.lastFD)
	}
	u.lastFD, u.lastDir, u.lastReal = fd, key, real
	return fd, base, nil
}

// walk opens the directory that the elements lead to from the directory from,
// which real leads to from the root by real directories. It returns those that
// lead to the new one.
func (u *unpacker) walk(from int, real, todo []string, create bool) (fd int, _ []string, err error) {
	todo = append([]string(nil), todo...)
	fd, err = dup(from)
	if err != nil {
		return -1, nil, err
	}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	for links := 0; len(todo) > 0; {
		e := todo[0]
		todo = todo[1:]
		if e == ".." {
			// From a link: as far as the root, which is its own parent.
			real = slices.Clip(real[:max(len(real)-1, 0)])
			if err := u.reopen(&fd, real); err != nil {
				return fd, nil, err
			}
			continue
		}
		next, err := openDir(fd, e)
		if err == unix.ENOENT && create {
			if err = unix.Mkdirat(fd, e, 0o777); err == nil || err == unix.EEXIST {
				next, err = openDir(fd, e)
			}
		}
		if err == unix.ELOOP || err == unix.ENOTDIR {
			var st unix.Stat_t
			if serr := unix.Fstatat(fd, e, &st, unix.AT_SYMLINK_NOFOLLOW); serr != nil || st.Mode&unix.S_IFMT != unix.S_IFLNK {
				return fd, nil, unix.ENOTDIR
			}
			if _, ours := u.made[[2]uint64{st.Dev, st.Ino}]; ours {
				return fd, nil, sandbox.Invalid.Errorf("an entry of the archive leads through the symbolic link %q of the same archive", clip(e, 256))
			}
			if links++; links > maxLinkSteps {
				return fd, nil, unix.ELOOP
			}
			to := readlinkat(fd, e)
			if strings.HasPrefix(to, "/") {
				real = nil
				if err := u.reopen(&fd, real); err != nil {
					return fd, nil, err
				}
			}
			var l []string
			for e := range strings.SplitSeq(to, "/") {
				if e != "" && e != "." {
					l = append(l, e)
				}
			}
			if todo = append(l, todo...); len(todo) > 2*maxDepth {
				return fd, nil, unix.ENAMETOOLONG
			}
			continue
		}
		if err != nil {
			return fd, nil, err
		}
		unix.Close(fd)
		fd = next
		real = append(real, e)
	}
	return fd, real, nil
}

// reopen makes *fd the directory at real, by real directories only.
func (u *unpacker) reopen(fd *int, real []string) error {
	cur, err := dup(u.root)
	if err != nil {
		return err
	}
	for _, e := range real {
		next, err := openDir(cur, e)
		unix.Close(cur)
		if err != nil {
			return err
		}
		cur = next
	}
	unix.Close(*fd)
	*fd = cur
	return nil
}

func dup(fd int) (int, error) { return unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3) }

// entry extracts one entry.
func (u *unpacker) entry(h *tar.Header, r io.Reader) error {
	mode := uint32(h.Mode) & 0o7777
	switch h.Typeflag {
	case tar.TypeDir:
		return u.a.files.as(u.who, func() error { return u.directory(h, mode) })
	case tar.TypeReg, tar.TypeGNUSparse, tar.TypeCont:
		return u.regular(h, mode, r)
	case tar.TypeSymlink:
		return u.a.files.as(u.who, func() error {
			at, base, err := u.clear(h.Name)
			if err != nil {
				return err
			}
			if err := unix.Symlinkat(h.Linkname, at, base); err != nil {
				return err
			}
			var st unix.Stat_t
			if err := unix.Fstatat(at, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
				return err
			}
			if len(u.made) >= maxLinks {
				return sandbox.Exhausted.Errorf("archive of more than %d symbolic links", maxLinks)
			}
			u.made[[2]uint64{st.Dev, st.Ino}] = struct{}{}
			return u.finishAt(at, base, h, 0)
		})
	case tar.TypeLink:
		return u.a.files.as(u.who, func() error { return u.hardLink(h) })
	case tar.TypeFifo, tar.TypeChar, tar.TypeBlock:
		return u.a.files.as(u.who, func() error {
			at, base, err := u.clear(h.Name)
			if err != nil {
				return err
			}
			kind := map[byte]uint32{tar.TypeFifo: unix.S_IFIFO, tar.TypeChar: unix.S_IFCHR, tar.TypeBlock: unix.S_IFBLK}[h.Typeflag]
			if err := unix.Mknodat(at, base, kind|mode&0o777, int(unix.Mkdev(uint32(h.Devmajor), uint32(h.Devminor)))); err != nil {
				return err
			}
			return u.finishAt(at, base, h, mode)
		})
	}
	return nil // global headers and what else there is
}

// clear makes the place of an entry free: a file or link that is there goes.
func (u *unpacker) clear(name string) (int, string, error) {
	at, base, err := u.parent(name, true)
	if err != nil {
		return -1, "", err
	}
	if base == "." {
		return -1, "", unix.EISDIR
	}
	err = unix.Unlinkat(at, base, 0)
	if err == unix.EISDIR || err == unix.EPERM {
		err = unix.Unlinkat(at, base, unix.AT_REMOVEDIR)
		if u.lastDir != "" && err == nil {
			u.forgetDir()
			at, base, err = u.parent(name, true)
		}
	}
	if err != nil && err != unix.ENOENT {
		return -1, "", err
	}
	return at, base, nil
}

func (u *unpacker) forgetDir() {
	if u.lastFD >= 0 {
		unix.Close(u.lastFD)
	}
	u.lastFD, u.lastDir, u.lastReal = -1, "", nil
}

func (u *unpacker) directory(h *tar.Header, mode uint32) error {
	at, base, err := u.parent(h.Name, true)
	if err != nil {
		return err
	}
	if base == "." {
		return nil // the destination stays as it is
	}
	err = unix.Mkdirat(at, base, 0o700)
	if err == unix.EEXIST {
		var st unix.Stat_t
		if err := unix.Fstatat(at, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFDIR:
		case unix.S_IFLNK:
			if _, ours := u.made[[2]uint64{st.Dev, st.Ino}]; !ours {
				return nil // such as /bin -> usr/bin: it stays
			}
			fallthrough
		default:
			if err := unix.Unlinkat(at, base, 0); err != nil {
				return err
			}
			if err := unix.Mkdirat(at, base, 0o700); err != nil {
				return err
			}
		}
	} else if err != nil {
		return err
	}
	fd, err := openDir(at, base)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if len(u.dirs) < maxDirTimes {
		u.dirs = append(u.dirs, dirTime{h.Name, h.ModTime})
	}
	return u.finish(fd, h, mode)
}

// regular writes a file that did not exist, leaving out blocks of zeros.
func (u *unpacker) regular(h *tar.Header, mode uint32, r io.Reader) error {
	fd := -1
	err := u.a.files.as(u.who, func() error {
		at, base, err := u.clear(h.Name)
		if err != nil {
			return err
		}
		fd, err = unix.Openat(at, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		return err
	})
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	buf := *chunks.Get().(*[]byte)
	defer chunks.Put(&buf)
	var n int64
	hole := false
	for {
		m, err := io.ReadFull(r, buf)
		if m > 0 {
			b := buf[:m]
			if hole = zeros(b); hole {
				_, werr := unix.Seek(fd, int64(m), unix.SEEK_CUR)
				if werr != nil {
					return werr
				}
			} else if werr := u.a.writeAll(fd, b); werr != nil {
				return werr
			}
			n += int64(m)
			u.done.Bytes += int64(m)
			// a hole is made without a byte of the archive: as large as it says
			if hole && n%(64<<20) == 0 && u.c.gone() {
				return errClosed
			}
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF && n == h.Size {
			break
		}
		if err != nil {
			return err
		}
	}
	if hole {
		if err := unix.Ftruncate(fd, n); err != nil {
			return err
		}
	}
	return u.a.files.as(u.who, func() error { return u.finish(fd, h, mode) })
}

func zeros(b []byte) bool {
	for len(b) >= 8 {
		if b[0]|b[1]|b[2]|b[3]|b[4]|b[5]|b[6]|b[7] != 0 {
			return false
		}
		b = b[8:]
	}
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

func (u *unpacker) hardLink(h *tar.Header) error {
	from, fromBase, err := u.parent(h.Linkname, false)
	if err != nil {
		return err
	}
	from, err = dup(from)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	var st unix.Stat_t
	if err := unix.Fstatat(from, fromBase, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return sandbox.Invalid.Errorf("hard link %q in the archive leads to %q, which is not there", clip(h.Name, 256), clip(h.Linkname, 256))
	}
	at, base, err := u.clear(h.Name)
	if err != nil {
		return err
	}
	return unix.Linkat(from, fromBase, at, base, 0)
}

// finish sets what the header says of a file that is open.
func (u *unpacker) finish(fd int, h *tar.Header, mode uint32) error {
	if u.req.Owners {
		if err := unix.Fchown(fd, h.Uid, h.Gid); err != nil {
			return err
		}
	}
	for k, v := range h.PAXRecords {
		name, ok := strings.CutPrefix(k, "SCHILY.xattr.")
		if !ok || strings.HasPrefix(name, "trusted.overlay.") {
			continue
		}
		err := unix.Fsetxattr(fd, name, []byte(v), 0)
		if err != nil && err != unix.EOPNOTSUPP && err != unix.EPERM && err != unix.ENOSYS {
			return err
		}
	}
	if err := unix.Fchmod(fd, mode); err != nil {
		return err
	}
	return unix.UtimesNanoAt(unix.AT_FDCWD, "/proc/self/fd/"+itoa(fd), times(h.ModTime), 0)
}

// finishAt does that for what cannot be opened.
func (u *unpacker) finishAt(at int, base string, h *tar.Header, mode uint32) error {
	if u.req.Owners {
		if err := unix.Fchownat(at, base, h.Uid, h.Gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
	}
	if mode != 0 {
		// Not a link: it was just made, exclusively.
		if err := unix.Fchmodat(at, base, mode, 0); err != nil {
			return err
		}
	}
	return unix.UtimesNanoAt(at, base, times(h.ModTime), unix.AT_SYMLINK_NOFOLLOW)
}
