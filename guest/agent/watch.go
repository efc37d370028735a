package agent

import (
	"encoding/binary"
	"os"
	"path"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

const (
	maxWatches = 8192 // directories that one recursive watch follows
	watchMask  = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_CLOSE_WRITE | unix.IN_DELETE | unix.IN_MOVED_FROM |
		unix.IN_MOVED_TO | unix.IN_ATTRIB | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_EXCL_UNLINK
	// renameWait is how long the second half of a rename may follow the first.
	renameWait = 20 * time.Millisecond
)

// watcher passes on what inotify tells of a directory. Its queue is the
// kernel's, which is bounded and tells when it overflows (B10).
type watcher struct {
	a         *Agent
	c         *conn
	who       *account
	root      string
	recursive bool
	f         *os.File
	fd        int
	dirs      map[int32]string // by watch descriptor, relative to root: "" is root
	out       []byte           // events to be sent
	gone      bool             // the root is no more
	// the first half of a rename
	from   string
	cookie uint32
	isDir  bool
}

// watch answers TWatch until the host closes the connection or the directory
// is removed. Paths in events are relative to it.
func (a *Agent) watch(c *conn, p []byte) error {
	o, err := wire.DecodePathOp(p)
	if err != nil {
		return err
	}
	who, name, err := request(o.User, o.Path)
	if err != nil {
		return c.fail(err)
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return c.fail(fileError("watch", o.Path, err))
	}
	w := &watcher{a: a, c: c, who: who, root: path.Clean(name), recursive: o.Flag, fd: fd, f: os.NewFile(uintptr(fd), "inotify"), dirs: map[int32]string{}}
	defer w.f.Close()
	if err := w.add("", false); err != nil {
		return c.fail(fileError("watch", o.Path, err))
	}
	if err := c.frame(wire.TReady, nil); err != nil {
		return err
	}
	if len(w.out) > 0 {
		if err := w.flush(); err != nil {
			return err
		}
	}
	var once sync.WaitGroup
	once.Go(func() { // the host says nothing more: it closes
		c.r.Next()
		w.f.Close()
	})
	if err = w.run(); err == nil {
		var done wire.Done
		c.frame(wire.TDone, done.Append)
	}
	c.close()
	once.Wait()
	return errClosed
}

// maxTold bounds the events that wait to be sent.
const maxTold = 1 << 20

// add watches the directory rel and, if so asked, those below it. With tell it
// reports what is in them: it was made before the watch was there.
func (w *watcher) add(rel string, tell bool) error {
	todo := []string{rel}
	for len(todo) > 0 {
		d := todo[0]
		todo = todo[1:]
		full := w.root
		if d != "" {
			full += "/" + d
		}
		err := w.a.files.as(w.who, func() error {
			flags := uint32(watchMask)
			if d != "" {
				flags |= unix.IN_ONLYDIR | unix.IN_DONT_FOLLOW
			}
			// inotify_add_watch(2) wants permission to read, but gVisor does not ask
			fd, err := openRetry(full, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
			if err != nil {
				return err
			}
			unix.Close(fd)
			wd, err := unix.InotifyAddWatch(w.fd, full, flags)
			if err != nil {
				return err
			}
			w.dirs[int32(wd)] = d
			if !w.recursive {
				return nil
			}
			fd, err = openRetry(full, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
			if err == unix.ENOTDIR {
				return nil
			}
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			buf := make([]byte, direntBuf)
			for {
				n, err := getdents(fd, buf)
				if err != nil || n == 0 {
					return err
				}
				dirents(buf[:n], func(name []byte, typ byte) {
					rel := join(d, string(name))
					if tell && len(w.out) > maxTold {
						w.event(sandbox.FileEvent{Op: sandbox.FileOverflow})
						tell = false
					}
					if tell {
						w.event(sandbox.FileEvent{Op: sandbox.FileCreated, Path: rel})
					}
					if typ == unix.DT_UNKNOWN {
						var st unix.Stat_t
						if unix.Fstatat(fd, string(name), &st, unix.AT_SYMLINK_NOFOLLOW) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
							typ = unix.DT_DIR
						}
					}
					if typ == unix.DT_DIR && len(todo)+len(w.dirs) < 2*maxWatches {
						todo = append(todo, rel)
					}
				})
			}
		})
		switch {
		case err != nil && d == "": // what is to be watched itself
			return err
		case err == unix.ENOSPC || len(w.dirs) >= maxWatches && len(todo) > 0:
			w.event(sandbox.FileEvent{Op: sandbox.FileOverflow})
			return nil
		}
	}
	return nil
}

func join(dir, name string) string {
	if dir == "" || name == "" {
		return dir + name
	}
	return dir + "/" + name
}

func (w *watcher) event(e sandbox.FileEvent) {
	if len(e.Path) > wire.MaxPath || len(e.From) > wire.MaxPath {
		e = sandbox.FileEvent{Op: sandbox.FileOverflow}
	}
	w.out = wire.AppendEvent(w.out, e)
}

func (w *watcher) run() error {
	buf := make([]byte, 64<<10)
	for !w.gone {
		if w.cookie != 0 {
			w.f.SetReadDeadline(time.Now().Add(renameWait))
		}
		n, err := w.f.Read(buf)
		if w.cookie != 0 {
			w.f.SetReadDeadline(time.Time{})
		}
		if err != nil && !os.IsTimeout(err) {
			return err
		}
		if err != nil {
			w.movedAway()
		}
		w.take(buf[:max(n, 0)])
		if err := w.flush(); err != nil {
			return err
		}
	}
	return nil
}

// take reads inotify events.
func (w *watcher) take(b []byte) {
	for len(b) >= unix.SizeofInotifyEvent {
		wd := int32(binary.NativeEndian.Uint32(b))
		mask := binary.NativeEndian.Uint32(b[4:])
		cookie := binary.NativeEndian.Uint32(b[8:])
		n := int(binary.NativeEndian.Uint32(b[12:]))
		b = b[unix.SizeofInotifyEvent:]
		if n > len(b) {
			return
		}
		name := unix.ByteSliceToString(b[:n])
		b = b[n:]
		if mask&unix.IN_Q_OVERFLOW != 0 {
			w.event(sandbox.FileEvent{Op: sandbox.FileOverflow})
			continue
		}
		dir, known := w.dirs[wd]
		if mask&unix.IN_IGNORED != 0 {
			delete(w.dirs, wd)
			w.gone = w.gone || known && dir == ""
			continue
		}
		if !known {
			continue
		}
		w.one(join(dir, name), name, dir, mask, cookie)
	}
}

func (w *watcher) one(p, name, dir string, mask, cookie uint32) {
	isDir := mask&unix.IN_ISDIR != 0
	if w.cookie != 0 && (mask&unix.IN_MOVED_TO == 0 || cookie != w.cookie) {
		w.movedAway()
	}
	switch {
	case mask&unix.IN_MOVED_FROM != 0:
		w.from, w.cookie, w.isDir = p, cookie, isDir
	case mask&unix.IN_MOVED_TO != 0:
		e := sandbox.FileEvent{Op: sandbox.FileCreated, Path: p}
		if w.cookie != 0 {
			e.Op, e.From = sandbox.FileRenamed, w.from
			w.cookie = 0
			if isDir {
				w.moved(w.from, p)
			}
		}
		w.event(e)
		if isDir && w.recursive && e.From == "" {
			w.add(p, true)
		}
	case mask&unix.IN_CREATE != 0:
		w.event(sandbox.FileEvent{Op: sandbox.FileCreated, Path: p})
		if isDir && w.recursive {
			w.add(p, true)
		}
	case mask&unix.IN_DELETE != 0:
		w.event(sandbox.FileEvent{Op: sandbox.FileRemoved, Path: p})
	case mask&(unix.IN_MODIFY|unix.IN_CLOSE_WRITE) != 0:
		w.event(sandbox.FileEvent{Op: sandbox.FileModified, Path: p})
	case mask&unix.IN_ATTRIB != 0:
		if name != "" || dir == "" { // of a directory below, its own watch tells too
			w.event(sandbox.FileEvent{Op: sandbox.FileAttrib, Path: p})
		}
	case mask&(unix.IN_DELETE_SELF|unix.IN_MOVE_SELF) != 0:
		if dir == "" && name == "" {
			w.event(sandbox.FileEvent{Op: sandbox.FileRemoved})
			w.gone = true
		}
	}
}

// movedAway: the second half of a rename did not come, so it went elsewhere.
func (w *watcher) movedAway() {
	if w.cookie == 0 {
		return
	}
	w.cookie = 0
	w.event(sandbox.FileEvent{Op: sandbox.FileRemoved, Path: w.from})
	if w.isDir {
		for wd, d := range w.dirs {
			if d == w.from || len(d) > len(w.from) && d[:len(w.from)] == w.from && d[len(w.from)] == '/' {
				unix.InotifyRmWatch(w.fd, uint32(wd))
				delete(w.dirs, wd)
			}
		}
	}
}

// moved renames the directories that are watched.
func (w *watcher) moved(from, to string) {
	for wd, d := range w.dirs {
		if d == from {
			w.dirs[wd] = to
		} else if len(d) > len(from) && d[:len(from)] == from && d[len(from)] == '/' {
			w.dirs[wd] = to + d[len(from):]
		}
	}
}

// flush sends what there is, in frames.
func (w *watcher) flush() error {
	for len(w.out) > 0 {
		b := w.out
		if len(b) > wire.MaxChunk {
			// Cut between two events.
			d, n := wire.NewDec(b), 0
			for n < wire.MaxChunk-2*wire.MaxPath-16 {
				n = len(b) - d.SkipEvent()
			}
			b = b[:n]
		}
		if err := w.c.frame(wire.TEvents, func(h []byte) []byte { return append(h, b...) }); err != nil {
			return err
		}
		w.out = w.out[len(b):]
	}
	if cap(w.out) > 64<<10 {
		w.out = nil
	}
	return nil
}
