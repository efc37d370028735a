package agent

import (
	"bytes"
	"os"
	"runtime"
	"runtime/debug"
	"sort"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// maxCalls bounds the calls that are worked on at a time on one connection.
const maxCalls = 64

// control serves calls, many at a time.
func (a *Agent) control(c *conn) {
	slots := make(chan struct{}, maxCalls)
	for {
		t, p, err := c.r.Next()
		if err != nil || t != wire.TCall {
			return
		}
		d := wire.NewDec(p)
		id, method := d.Uint(1<<62), wire.Method(d.Uint(255))
		if d.Bad() {
			return
		}
		if method == wire.MPing { // behind nothing that takes long, unless there are maxCalls of that
			if !a.reply(c, id, method, nil) {
				return
			}
			continue
		}
		body := bytes.Clone(d.Rest())
		slots <- struct{}{}
		go func() {
			defer func() { <-slots }()
			if !a.reply(c, id, method, body) {
				c.close()
			}
		}()
	}
}

// once serves a single call. True means that the connection is free again.
func (a *Agent) once(c *conn, p []byte) bool {
	d := wire.NewDec(p)
	id, method := d.Uint(1<<62), wire.Method(d.Uint(255))
	return !d.Bad() && a.reply(c, id, method, bytes.Clone(d.Rest()))
}

func (a *Agent) reply(c *conn, id uint64, m wire.Method, p []byte) bool {
	fill, err := a.call(m, p)
	if err != nil {
		return c.frame(wire.TFail, func(b []byte) []byte { return wire.AppendFail(b, id, err) }) == nil
	}
	return c.frame(wire.TReply, func(b []byte) []byte {
		b = wire.AppendUint(b, id)
		if fill != nil {
			b = fill(b)
		}
		return b
	}) == nil
}

var errRequest = sandbox.Invalid.Errorf("malformed request")

// call does what a control call asks and returns what appends the answer.
func (a *Agent) call(m wire.Method, p []byte) (func([]byte) []byte, error) {
	d := wire.NewDec(p)
	switch m {
	case wire.MPing:
		pong := wire.Pong{Version: wire.Version, Boot: a.bootID, Now: time.Now(), Uptime: time.Since(a.boot)}
		return pong.Append, nil
	case wire.MExecs:
		after := d.String(wire.MaxID)
		if d.End() != nil {
			return nil, errRequest
		}
		return a.list1(after), nil
	case wire.MSignal:
		id, sig := d.String(wire.MaxID), int(d.Uint(64))
		if d.End() != nil {
			return nil, errRequest
		}
		a.mu.Lock()
		e := a.execs[id]
		a.mu.Unlock()
		if e == nil {
			return nil, sandbox.NotFound.Errorf("no exec %q in the sandbox", id)
		}
		return nil, e.kill(sig)
	case wire.MHostname:
		name := d.String(255)
		if d.End() != nil {
			return nil, errRequest
		}
		return nil, prepare(&wire.Setup{Hostname: name})
	case wire.MPrepare:
		s, err := wire.DecodeSetup(p)
		if err != nil {
			return nil, errRequest
		}
		return nil, prepare(&s)
	case wire.MTime:
		ns := d.Int()
		if d.End() != nil {
			return nil, errRequest
		}
		ts := unix.NsecToTimespec(ns)
		if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
			return nil, sandbox.Unsupported.Errorf("set clock: %w", err)
		}
		return nil, nil
	case wire.MStats:
		s := a.stats()
		return s.Append, nil
	case wire.MRekey:
		nonce, masked := d.Bytes(wire.KeySize), d.Bytes(wire.KeySize)
		if d.End() != nil || len(nonce) != wire.KeySize || len(masked) != wire.KeySize {
			return nil, errRequest
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		a.key = wire.Mask(a.key, nonce, masked)
		return nil, nil
	case wire.MXattrs:
		l, err := wire.DecodeXattrs(p)
		if err != nil {
			return nil, errRequest
		}
		return nil, setXattrs(l)
	case wire.MProbe:
		port := int(d.Uint(65535))
		if d.End() != nil {
			return nil, errRequest
		}
		open := probe(port)
		return func(b []byte) []byte { return wire.AppendBool(b, open) }, nil
	case wire.MReach:
		r, err := wire.DecodeReach(p)
		if err != nil {
			return nil, errRequest
		}
		got := reach(r)
		return got.Append, nil
	}
	return a.fileCall(m, p)
}

func (a *Agent) fileCall(m wire.Method, p []byte) (func([]byte) []byte, error) {
	if m == wire.MSetAttr {
		s, err := wire.DecodeSetAttr(p)
		if err != nil {
			return nil, errRequest
		}
		return nil, a.setAttr(s)
	}
	o, err := wire.DecodePathOp(p)
	if err != nil {
		return nil, errRequest
	}
	switch m {
	case wire.MStat:
		f, err := a.stat(o)
		return f.Append, err
	case wire.MMkdir:
		return nil, a.mkdir(o)
	case wire.MRemove:
		return nil, a.remove(o)
	case wire.MRename:
		return nil, a.rename(o)
	case wire.MSymlink:
		return nil, a.symlink(o)
	}
	return nil, sandbox.Unsupported.Errorf("this guest does not know call %d", m).WithHint("it may be older than the daemon")
}

// list1 makes one page of the list of execs, in order of ids.
func (a *Agent) list1(after string) func([]byte) []byte {
	a.mu.Lock()
	var all []*execution
	for id, e := range a.execs {
		if id > after {
			all = append(all, e)
		}
	}
	a.mu.Unlock()
	sort.Slice(all, func(i, j int) bool { return all[i].id < all[j].id })
	const page = 512
	more := len(all) > page
	all = all[:min(len(all), page)]
	return func(b []byte) []byte {
		b = wire.AppendExecsHead(b, more, len(all))
		for _, e := range all {
			e.mu.Lock()
			i := wire.ExecInfo{ID: e.id, PID: e.pid, Exited: e.done, StdoutFirst: e.out[0].ring.base, StdoutLen: e.out[0].ring.end, StderrFirst: e.out[1].ring.base, StderrLen: e.out[1].ring.end}
			if e.in != nil {
				i.StdinN = e.in.taken
			}
			e.mu.Unlock()
			b = i.Append(b)
		}
		return b
	}
}

func (a *Agent) stats() wire.Stats {
	s := wire.Stats{Processes: len(processes()), Goroutines: runtime.NumGoroutine()}
	a.mu.Lock()
	s.Execs = len(a.execs)
	a.mu.Unlock()
	a.reaper.mu.Lock()
	s.Orphans = a.reaper.orphans
	a.reaper.mu.Unlock()
	kb := func(file, field string) int64 {
		b, _ := os.ReadFile(file)
		for line := range strings.Lines(string(b)) {
			if v, ok := strings.CutPrefix(line, field+":"); ok {
				n, _ := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(v), "kB")), 10, 64)
				return n
			}
		}
		return 0
	}
	s.MemTotal, s.MemFree = kb("/proc/meminfo", "MemTotal")<<10, kb("/proc/meminfo", "MemAvailable")<<10
	s.Threads, s.RSS = int(kb("/proc/self/status", "Threads")), kb("/proc/self/status", "VmRSS")<<10
	if l, err := os.ReadDir("/proc/self/fd"); err == nil {
		s.FDs = len(l) - 1
	}
	return s
}

// prepare writes what a sandbox needs before its first exec. An image without
// /etc gets one.
func prepare(s *wire.Setup) error {
	var first error
	note := func(err error) {
		if first == nil {
			first = err
		}
	}
	write := func(name, text string, mode uint32) {
		if text == "" {
			return
		}
		// An image may have a link here, to a file that a service it does not run
		// would make: replaced by a file, as container engines do.
		var st unix.Stat_t
		if unix.Lstat(name, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK {
			unix.Unlink(name)
		}
		fd, err := openRetry(name, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, mode)
		if err == unix.ENOENT {
			unix.Mkdir("/etc", 0o755)
			fd, err = openRetry(name, unix.O_WRONLY|unix.O_CREAT|unix.O_TRUNC|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, mode)
		}
		if err == nil {
			_, err = unix.Write(fd, []byte(text))
			unix.Close(fd)
		}
		note(fileError("write", name, err))
	}
	for _, dir := range s.Unmount {
		if err := unix.Unmount(dir, 0); err != nil && err != unix.EINVAL && err != unix.ENOENT {
			note(sandbox.Unsupported.Errorf("unmount %s: %w", dir, err))
		}
	}
	if s.Hostname != "" {
		var u unix.Utsname
		if unix.Uname(&u) != nil || unix.ByteSliceToString(u.Nodename[:]) != s.Hostname {
			if err := unix.Sethostname([]byte(s.Hostname)); err != nil {
				note(sandbox.Unsupported.Errorf("set host name: %w", err))
			}
		}
		write("/etc/hostname", s.Hostname+"\n", 0o644)
	}
	write("/etc/hosts", s.Hosts, 0o644)
	write("/etc/resolv.conf", s.ResolvConf, 0o644)
	write("/etc/machine-id", s.MachineID, 0o444)
	for _, dir := range s.Dirs {
		if p, err := location(dir); err == nil {
			note(fileError("make directory", dir, mkdirAll(p, 0o777)))
		}
	}
	if err := dropCaps(s.DropCaps); err != nil {
		return err // Internal: whatever else went wrong, nothing may run with them
	}
	return first
}

// setXattrs sets attributes as root, all that it can, and returns the first
// error.
func setXattrs(l []wire.Xattr) (first error) {
	for _, x := range l {
		p, err := location(x.Path)
		if err == nil {
			err = fileError("set "+x.Name+" of", x.Path, unix.Lsetxattr(p, x.Name, []byte(x.Value), 0))
		}
		if err != nil && first == nil {
			first = err
		}
	}
	return first
}

const (
	trimBytes = 2 << 20         // a transfer of more leaves garbage behind
	trimAfter = 3 * time.Second // it; more transfers may follow
)

// trim gives memory back to the system some time after large transfers: in a
// sandbox that idles it would be kept for ever.
func (a *Agent) trim() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.trimming {
		return
	}
	a.trimming = true
	time.AfterFunc(trimAfter, func() {
		a.mu.Lock()
		a.trimming = false
		a.mu.Unlock()
		runtime.GC() // a pool lets go of its buffers at the second collection
		debug.FreeOSMemory()
	})
}
