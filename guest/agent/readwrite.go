package agent

import (
	"encoding/hex"
	"errors"
	"io"
	"os"
	"path"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

func itoa(n int) string { return strconv.Itoa(n) }

// chunks holds buffers for file data.
var chunks = sync.Pool{New: func() any { b := make([]byte, wire.MaxChunk); return &b }}

// readFile answers TRead: the file's information, its bytes, the count.
func (a *Agent) readFile(c *conn, p []byte) error {
	r, err := wire.DecodeReadFile(p)
	if err != nil {
		return err
	}
	who, name, err := request(r.User, r.Path)
	if err != nil {
		return c.fail(err)
	}
	var fd int
	var st *unix.Stat_t
	err = a.files.as(who, func() (err error) {
		fd, st, err = openRegular(name, unix.O_RDONLY, 0)
		return err
	})
	if err != nil {
		return c.fail(fileError("read", r.Path, err))
	}
	defer unix.Close(fd)
	f := fileOf(r.Path, st)
	if err := c.frame(wire.TInfo, f.Append); err != nil {
		return err
	}
	buf := *chunks.Get().(*[]byte)
	defer chunks.Put(&buf)
	var done wire.Done
	out := outflow{c: c}
	for r.Len < 0 || done.Bytes < r.Len {
		b := buf
		if r.Len >= 0 && r.Len-done.Bytes < int64(len(b)) {
			b = b[:r.Len-done.Bytes]
		}
		n, err := a.pread(fd, b, r.Off+done.Bytes)
		if err != nil {
			return c.fail(fileError("read", r.Path, err))
		}
		if n == 0 {
			break // the end, perhaps a nearer one than before (B5)
		}
		done.Bytes += int64(n)
		if err := out.data(b[:n]); err != nil {
			return err
		}
	}
	return c.frame(wire.TDone, done.Append)
}

func (a *Agent) pread(fd int, b []byte, off int64) (n int, err error) {
	a.files.root <- struct{}{}
	defer func() { <-a.files.root }()
	for {
		if n, err = unix.Pread(fd, b, off); err == unix.ESPIPE {
			n, err = unix.Read(fd, b)
		}
		if err != unix.EINTR {
			return max(n, 0), err
		}
	}
}

// data sends a frame of bytes.
func (c *conn) data(p []byte) error {
	var head [wire.HeaderSize]byte
	wire.PutHeader(head[:], wire.TData, len(p))
	return c.send(head[:], p)
}

// outflow sends the bytes of a transfer, not more ahead of what the host has taken
// than gVisor's TCP takes in at once: where port forwarding has missed that there
// is something (see nudgeAfter), a nudge must still get through to it.
// The host gives credit once it was asked for some, which guests of earlier
// versions never do.
type outflow struct {
	c          *conn
	sent, told int64
	asked      bool
}

// creditPatience is how long credit may take before the host is nudged again.
const creditPatience = 2 * time.Second

func (o *outflow) data(p []byte) error {
	for o.sent-o.told+int64(len(p)) > wire.Window {
		if err := o.wait(); err != nil {
			return err
		}
	}
	o.sent += int64(len(p))
	return o.c.data(p)
}

// wait takes credit. A host that is gone closes the connection.
func (o *outflow) wait() error {
	if !o.asked {
		o.asked = true
		if err := o.c.frame(wire.TCredit, func(b []byte) []byte { return wire.AppendInt(b, 0) }); err != nil {
			return err
		}
	}
	if err := o.c.f.SetReadDeadline(time.Now().Add(creditPatience)); err != nil {
		return err
	}
	t, p, err := o.c.r.Next()
	if derr := o.c.f.SetReadDeadline(time.Time{}); err == nil {
		err = derr
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		o.c.wmu.Lock()
		o.c.nudgeLater()
		o.c.wmu.Unlock()
		return nil
	case err != nil:
		return err
	case t != wire.TCredit:
		return wire.ErrFrame
	}
	d := wire.NewDec(p)
	told := d.Int()
	if d.End() != nil || told < o.told || told > o.sent {
		return wire.ErrFrame
	}
	o.told = told
	return nil
}

// refuse reports a failed upload, and takes what the host has sent meanwhile:
// closing at once could destroy the report.
func (c *conn) refuse(err error) error {
	if err := c.fail(err); err != nil {
		return err
	}
	c.deadline(10 * time.Second)
	for {
		t, _, err := c.r.Next()
		if err != nil {
			return err
		}
		if t == wire.TEnd {
			c.deadline(0)
			return nil
		}
		if t != wire.TData {
			return wire.ErrFrame
		}
	}
}

// upload takes the bytes that the host sends, and says how far it is.
type upload struct {
	c     *conn
	tally wire.Tally
	last  int // bytes returned, not yet counted
	rest  []byte
	err   error
}

// next returns the next bytes, valid until the next call; at the end io.EOF.
// Asking for more says that the last ones are dealt with.
func (u *upload) next() ([]byte, error) {
	if u.err != nil {
		return nil, u.err
	}
	if total, tell := u.tally.Add(u.last); tell {
		if u.err = u.c.credit(total); u.err != nil {
			return nil, u.err
		}
	}
	t, b, err := u.c.r.Next()
	switch {
	case err != nil:
		// The connection's end is not the end of the upload: only TEnd is.
		if u.err = err; err == io.EOF {
			u.err = errClosed
		}
	case t == wire.TEnd:
		u.err = io.EOF
	case t != wire.TData:
		u.err = wire.ErrFrame
	}
	u.last = len(b)
	u.c.moved.Add(int64(len(b)))
	return b, u.err
}

// Read makes an io.Reader of it.
func (u *upload) Read(p []byte) (int, error) {
	for len(u.rest) == 0 {
		b, err := u.next()
		if err != nil {
			return 0, err
		}
		u.rest = b
	}
	n := copy(p, u.rest)
	u.rest = u.rest[n:]
	return n, nil
}

func (c *conn) credit(total int64) error {
	return c.frame(wire.TCredit, func(b []byte) []byte { return wire.AppendInt(b, total) })
}

// target is a file being written.
type target struct {
	fd   int
	name string // where it is to be
	temp string // where it is meanwhile; "" when in place
}

// writeFile answers TWrite: takes bytes until TEnd, then tells the result.
func (a *Agent) writeFile(c *conn, p []byte) error {
	w, err := wire.DecodeWriteFile(p)
	if err != nil {
		return err
	}
	who, name, err := request(w.User, w.Path)
	if err != nil {
		return c.refuse(err)
	}
	var t *target
	err = a.files.as(who, func() (err error) {
		t, err = openTarget(name, &w)
		return err
	})
	if err != nil {
		return c.refuse(fileError("write", w.Path, err))
	}
	defer func() {
		unix.Close(t.fd)
		if t.temp != "" {
			a.files.as(who, func() error { return unix.Unlink(t.temp) })
		}
	}()
	var done wire.Done
	in := &upload{c: c}
	for {
		b, err := in.next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if err := a.writeAll(t.fd, b); err != nil {
			return c.refuse(fileError("write", w.Path, err))
		}
		done.Bytes += int64(len(b))
	}
	done.InPlace = t.temp == ""
	if err := a.files.as(who, func() error { return t.commit(&w) }); err != nil {
		return c.fail(fileError("write", w.Path, err))
	}
	return c.frame(wire.TDone, done.Append)
}

func (a *Agent) writeAll(fd int, b []byte) error {
	a.files.root <- struct{}{}
	defer func() { <-a.files.root }()
	for len(b) > 0 {
		n, err := unix.Write(fd, b)
		if err != nil && err != unix.EINTR {
			return err
		}
		b = b[max(n, 0):]
	}
	return nil
}

// openTarget opens a temporary file beside name, or name itself where it is to
// be written in place or the directory does not let this user make files. What
// name links to is written, not the link.
func openTarget(name string, w *wire.WriteFile) (*target, error) {
	if w.Parents {
		if err := mkdirAll(path.Dir(path.Clean(name)), 0o777); err != nil {
			return nil, err
		}
	}
	for links := 0; ; links++ {
		to := readlinkat(unix.AT_FDCWD, name)
		if to == "" {
			break
		}
		if links == 40 {
			return nil, unix.ELOOP
		}
		if to[0] == '/' {
			name = to
		} else {
			name = path.Dir(name) + "/" + to
		}
	}
	var old unix.Stat_t
	exists := unix.Lstat(name, &old) == nil
	switch {
	case exists && old.Mode&unix.S_IFMT != unix.S_IFREG:
		return nil, notRegular(name, old.Mode)
	case exists && w.Exclusive:
		return nil, unix.EEXIST
	}
	var fs unix.Statfs_t
	if !w.InPlace && !w.Append && !(exists && unix.Statfs(name, &fs) == nil && fs.Type == procMagic) {
		t, err := openTemp(name, w, exists, &old)
		if err == nil {
			return t, nil
		}
		if err != unix.EACCES && err != unix.EPERM || !exists {
			return nil, err
		}
	}
	flags := unix.O_WRONLY
	switch {
	case w.Append:
		flags |= unix.O_APPEND | unix.O_CREAT
	case w.Exclusive:
		flags |= unix.O_CREAT | unix.O_EXCL
	default:
		flags |= unix.O_CREAT | unix.O_TRUNC
	}
	fd, _, err := openRegular(name, flags, 0o666)
	if err != nil {
		return nil, err
	}
	return &target{fd: fd, name: name}, nil
}

func openTemp(name string, w *wire.WriteFile, exists bool, old *unix.Stat_t) (*target, error) {
	var r [6]byte
	wire.Random(r[:])
	temp := path.Dir(name) + "/.viv-" + hex.EncodeToString(r[:])
	fd, err := openRetry(temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o666)
	if err != nil {
		return nil, err
	}
	if exists {
		// A file replaced keeps its owner and permissions, but for the bits that
		// writing removes as well.
		var st unix.Stat_t
		if err = unix.Fstat(fd, &st); err == nil && (st.Uid != old.Uid || st.Gid != old.Gid) {
			err = unix.Fchown(fd, int(old.Uid), int(old.Gid))
		}
		if err == nil {
			err = unix.Fchmod(fd, old.Mode&0o1777)
		}
		if err == nil {
			// Whoever may not write the file may not replace it either.
			err = unix.Faccessat(unix.AT_FDCWD, name, unix.W_OK, unix.AT_EACCESS)
		}
		if err != nil {
			unix.Close(fd)
			unix.Unlink(temp)
			return nil, err
		}
	}
	return &target{fd: fd, name: name, temp: temp}, nil
}

// commit makes what was written count.
func (t *target) commit(w *wire.WriteFile) error {
	at := &w.Attr
	if at.UID != nil || at.GID != nil {
		if err := unix.Fchown(t.fd, optional(at.UID), optional(at.GID)); err != nil {
			return err
		}
	}
	if at.Mode != nil {
		if err := unix.Fchmod(t.fd, *at.Mode); err != nil {
			return err
		}
	}
	if at.ModTime != nil {
		if err := unix.UtimesNanoAt(unix.AT_FDCWD, "/proc/self/fd/"+itoa(t.fd), modTimes(at), 0); err != nil {
			return err
		}
	}
	if w.Sync {
		if err := unix.Fsync(t.fd); err != nil {
			return err
		}
	}
	if t.temp == "" {
		return nil
	}
	flags := uint(0)
	if w.Exclusive {
		flags = unix.RENAME_NOREPLACE
	}
	var err error
	if flags != 0 {
		err = unix.Renameat2(unix.AT_FDCWD, t.temp, unix.AT_FDCWD, t.name, flags)
	} else {
		err = unix.Rename(t.temp, t.name)
	}
	if err == unix.EBUSY {
		return sandbox.Conflict.Errorf("%s is mounted and cannot be replaced", clip(t.name, 512)).WithHint("write it in place")
	}
	if err != nil {
		return err
	}
	t.temp = ""
	if w.Sync {
		if fd, err := openRetry(path.Dir(t.name), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err == nil {
			unix.Fsync(fd)
			unix.Close(fd)
		}
	}
	return nil
}
