package agent

import (
	"bytes"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// account is who a command or a file operation runs as.
type account struct {
	name     string
	uid, gid uint32
	groups   []uint32 // supplementary, gid not included
	home     string
}

// maxDB bounds /etc/passwd and /etc/group, which anybody inside may have
// written.
const maxDB = 4 << 20

// database is one of the two files, kept as long as it does not change.
type database struct {
	path string
	mu   sync.Mutex
	id   [5]int64
	data []byte
}

var passwd, group = &database{path: "/etc/passwd"}, &database{path: "/etc/group"}

func (d *database) read() []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	var st unix.Stat_t
	if unix.Stat(d.path, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil
	}
	if d.data != nil && identity(&st) == d.id {
		return d.data
	}
	fd, opened, err := openRegular(d.path, unix.O_RDONLY, 0) // it may be a FIFO by now
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), d.path)
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxDB))
	if err != nil {
		return nil
	}
	d.data, d.id = b, identity(opened)
	return b
}

// identity changes whenever a file does.
func identity(st *unix.Stat_t) [5]int64 {
	return [5]int64{int64(st.Ino), st.Size, st.Mtim.Sec, st.Mtim.Nsec, st.Ctim.Nsec}
}

// each calls fn with the fields of every line until it returns false.
func (d *database) each(fields int, fn func(f []string) bool) {
	for line := range bytes.Lines(d.read()) {
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 || line[0] == '#' || len(line) > 1<<20 {
			continue
		}
		f := strings.Split(string(line), ":")
		if len(f) >= fields && !fn(f) {
			return
		}
	}
}

func parseID(s string) (uint32, bool) {
	v, err := strconv.ParseUint(s, 10, 31)
	return uint32(v), err == nil
}

// lookup finds spec: "", name, uid, name:group, uid:gid and the mixtures, as
// Docker does. An explicit group means no supplementary groups.
func lookup(spec string) (*account, error) {
	who, grp, hasGroup := strings.Cut(spec, ":")
	if who == "" {
		who = "0"
	}
	id, numeric := parseID(who)
	a := &account{uid: id, home: "/"}
	found := false
	passwd.each(4, func(f []string) bool {
		uid, ok := parseID(f[2])
		if !ok || (f[0] != who && (!numeric || uid != id)) {
			return true
		}
		a.name, a.uid = f[0], uid
		a.gid, _ = parseID(f[3])
		if len(f) > 5 && f[5] != "" {
			a.home = f[5]
		}
		found = true
		return false
	})
	switch {
	case !found && !numeric && who == "root":
		a.name, a.home = "root", "/root"
	case !found && !numeric:
		return nil, sandbox.NotFound.Errorf("no user %q in the sandbox", clip(who, 64)).WithHint("use a user of the image, or a numeric id")
	case !found && a.uid == 0:
		a.name, a.home = "root", "/root"
	}
	if hasGroup && grp != "" {
		gid, num := parseID(grp)
		ok := num
		group.each(3, func(f []string) bool {
			if f[0] != grp {
				return true
			}
			g, valid := parseID(f[2])
			if valid {
				gid, ok = g, true
			}
			return !valid
		})
		if !ok {
			return nil, sandbox.NotFound.Errorf("no group %q in the sandbox", clip(grp, 64)).WithHint("use a group of the image, or a numeric id")
		}
		a.gid = gid
		return a, nil
	}
	if a.name != "" {
		group.each(4, func(f []string) bool {
			g, ok := parseID(f[2])
			if ok && g != a.gid && len(a.groups) < 1024 && slices.Contains(strings.Split(f[3], ","), a.name) {
				a.groups = append(a.groups, g)
			}
			return true
		})
	}
	return a, nil
}

func clip(s string, n int) string {
	if len(s) > n {
		return s[:n] + "…"
	}
	return s
}
