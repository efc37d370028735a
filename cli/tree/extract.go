package tree

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"

	"vivarium/sandbox"
)

// Bounds of what an archive from a sandbox may make us hold or do. The bytes of
// files are not bounded: how much there is to copy is the user's affair.
const (
	maxEntries   = 10_000_000
	maxEntryPath = 4096
	maxDeferred  = 256 << 20 // bytes of names kept for the end
)

// Options say how to extract.
type Options struct {
	Owner bool                    // keep owner and group by number
	Warn  func(name, what string) // called for what is left out; may be nil
}

// untar writes a tar stream that a sandbox made below root. The stream is
// hostile (B2): it writes nowhere else whatever it says.
//
//   - Every operation goes through os.Root, which does not leave its directory.
//   - Names with .. or a leading / end it; nothing is written through a
//     symbolic link, neither one of the stream, which are made last of all, nor
//     one that was there.
//   - Files are written under another name and renamed, so that an existing
//     link or special file is replaced and not followed.
//   - Devices, FIFOs and sockets are left out, setuid, setgid and sticky bits
//     are dropped.
type untar struct {
	root  *os.Root
	owner bool                    // keep owner and group
	warn  func(name, what string) // what was left out
	later map[string]tar.Header   // links, by name
	order []string                // of later
	dirs  []tar.Header            // whose mode and time are set at the end
	held  int                     // bytes in later and dirs
	top   string                  // first element of every name
	rel   bool                    // names are relative to the root itself
	ok    map[string]struct{}     // parents that were looked at
	seq   int
	stats struct{ entries, bytes int64 }
}

func newUntar(root *os.Root, o Options) *untar {
	u := &untar{root: root, owner: o.Owner, warn: o.Warn, later: map[string]tar.Header{}, ok: map[string]struct{}{}}
	if u.warn == nil {
		u.warn = func(string, string) {}
	}
	return u
}

func refuse(name, format string, args ...any) error {
	return sandbox.Denied.Errorf("refused %q from the sandbox's archive: %s", name, fmt.Sprintf(format, args...))
}

// extract reads the whole stream. All names have one first element, that of
// what was asked for, which is taken off; or else begin with "./".
func (u *untar) extract(r io.Reader) error {
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return u.finish()
		}
		if err != nil {
			if sandbox.KindOf(err) != sandbox.Internal {
				return err // of the stream that carries it
			}
			return sandbox.Invalid.Errorf("read archive: %w", err)
		}
		if u.stats.entries++; u.stats.entries > maxEntries {
			return sandbox.Exhausted.Errorf("the archive has more than %d entries", maxEntries)
		}
		name, err := u.name(h)
		if err != nil {
			return err
		}
		if err := u.entry(name, h, tr); err != nil {
			return err
		}
	}
}

// name is the path of an entry below the root, "." for the root itself.
func (u *untar) name(h *tar.Header) (string, error) {
	p, err := safeName(h.Name)
	if err != nil {
		return "", err
	}
	if u.stats.entries == 1 {
		u.rel = p == "."
		u.top, _, _ = strings.Cut(p, "/")
	}
	if u.rel {
		return p, nil
	}
	top, rest, _ := strings.Cut(p, "/")
	if top != u.top {
		return "", refuse(h.Name, "it is not in %q", u.top)
	}
	if rest == "" {
		rest = "."
	}
	return rest, nil
}

// safeName is a name of an archive as a clean relative path.
func safeName(name string) (string, error) {
	switch {
	case len(name) > maxEntryPath:
		return "", refuse(name[:64]+"...", "its name is longer than %d bytes", maxEntryPath)
	case name == "" || strings.IndexByte(name, 0) >= 0:
		return "", refuse(name, "it has no proper name")
	case strings.HasPrefix(name, "/"):
		return "", refuse(name, "its name is absolute")
	}
	for _, el := range strings.Split(name, "/") {
		if el == ".." {
			return "", refuse(name, "its name leads out of the destination")
		}
	}
	return path.Clean(name), nil
}

func (u *untar) entry(name string, h *tar.Header, r io.Reader) error {
	if name == "." && h.Typeflag != tar.TypeDir {
		return refuse(h.Name, "a directory was asked for")
	}
	if err := u.parents(name); err != nil {
		return err
	}
	// A later entry of the same name replaces an earlier one.
	delete(u.later, name)
	switch h.Typeflag {
	case tar.TypeReg:
		return u.file(name, h, r)
	case tar.TypeDir:
		return u.dir(name, h)
	case tar.TypeSymlink, tar.TypeLink:
		return u.keep(name, h)
	case tar.TypeXGlobalHeader:
		return nil
	case tar.TypeChar, tar.TypeBlock:
		u.warn(name, "a device")
	case tar.TypeFifo:
		u.warn(name, "a FIFO")
	default:
		u.warn(name, "of an unknown type")
	}
	return nil
}

// parents makes the directories that lead to name and sees to it that they are
// directories.
func (u *untar) parents(name string) error {
	dir := path.Dir(name)
	if dir == "." {
		return nil
	}
	if _, ok := u.ok[dir]; ok {
		return nil
	}
	for i := 0; i <= len(dir); i++ {
		if i < len(dir) && dir[i] != '/' {
			continue
		}
		p := dir[:i]
		if _, ok := u.later[p]; ok {
			return refuse(name, "%q is a link", p)
		}
		fi, err := u.root.Lstat(p)
		if errors.Is(err, fs.ErrNotExist) {
			if err = u.root.Mkdir(p, 0o755); err == nil {
				continue
			}
		}
		if err != nil {
			return u.failed("make directory", err)
		}
		if !fi.IsDir() {
			return refuse(name, "%q is not a directory", p)
		}
	}
	if len(u.ok) > 1024 { // a cache, not a list
		clear(u.ok)
	}
	u.ok[dir] = struct{}{}
	return nil
}

// Extract writes what r gives below root. The stream has one tree, whose names
// all begin with the same element, which is left off, or with "./".
// Errors: Denied for what a hostile stream wants, Exhausted for a full disk and
// for bounds, Conflict where something is in the way, Invalid for no archive;
// errors of r are returned as they are. What was written before stays.
func Extract(root *os.Root, r io.Reader, o Options) error { return newUntar(root, o).extract(r) }

// WriteFile writes one file below root as Extract does: under another name,
// with a rename. Of h it takes mode, time and owner.
func WriteFile(root *os.Root, name string, h *tar.Header, r io.Reader, o Options) error {
	return newUntar(root, o).file(name, h, r)
}

// WriteLink makes one symbolic link below root, in the place of what is there
// unless that is a directory.
func WriteLink(root *os.Root, name, target string) error {
	return newUntar(root, Options{}).link(name, tar.Header{Typeflag: tar.TypeSymlink, Linkname: target})
}

func (u *untar) failed(what string, err error) error {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return sandbox.Exhausted.Errorf("%s: %w", what, err).WithHint("make room on this machine and copy again")
	case errors.Is(err, fs.ErrPermission):
		return sandbox.Denied.Errorf("%s: %w", what, err)
	}
	return sandbox.Conflict.Errorf("%s: %w", what, err)
}

func (u *untar) file(name string, h *tar.Header, r io.Reader) error {
	if fi, err := u.root.Lstat(name); err == nil && fi.IsDir() {
		return sandbox.Conflict.Errorf("%q is a directory here and a file in the sandbox", name)
	}
	f, tmp, err := u.temp(name)
	if err != nil {
		return u.failed("create file", err)
	}
	defer func() {
		f.Close()
		if tmp != "" {
			_ = u.root.Remove(tmp)
		}
	}()
	n, err := io.Copy(f, r)
	u.stats.bytes += n
	if err != nil {
		if sandbox.KindOf(err) != sandbox.Internal {
			return err
		}
		return u.failed("write file", err)
	}
	if u.owner {
		if err := f.Chown(h.Uid, h.Gid); err != nil {
			return u.failed("set owner", err)
		}
	}
	if err := f.Chmod(h.FileInfo().Mode().Perm()); err != nil {
		return u.failed("set mode", err)
	}
	if err := f.Close(); err != nil {
		return u.failed("write file", err)
	}
	u.times(tmp, h)
	if err := u.root.Rename(tmp, name); err != nil {
		return u.failed("rename", err)
	}
	tmp = ""
	return nil
}

// temp makes a file beside name that nobody else has.
func (u *untar) temp(name string) (*os.File, string, error) {
	for {
		u.seq++
		tmp := path.Join(path.Dir(name), fmt.Sprintf(".viv-cp-%d-%d", os.Getpid(), u.seq))
		f, err := u.root.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if errors.Is(err, fs.ErrExist) && u.seq < 1<<30 {
			continue
		}
		return f, tmp, err
	}
}

// times sets the time of a file; one that the filesystem cannot keep is no
// reason to fail.
func (u *untar) times(name string, h *tar.Header) {
	if !h.ModTime.IsZero() {
		_ = u.root.Chtimes(name, h.ModTime, h.ModTime)
	}
}

func (u *untar) dir(name string, h *tar.Header) error {
	if name != "." {
		fi, err := u.root.Lstat(name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			if err := u.root.Mkdir(name, 0o700); err != nil {
				return u.failed("make directory", err)
			}
		case err != nil:
			return u.failed("make directory", err)
		case !fi.IsDir():
			return refuse(name, "it is a directory there and something else here")
		}
	}
	return u.keepDir(tar.Header{Name: name, Mode: h.Mode, Uid: h.Uid, Gid: h.Gid, ModTime: h.ModTime})
}

func (u *untar) keepDir(h tar.Header) error {
	if err := u.hold(len(h.Name)); err != nil {
		return err
	}
	u.dirs = append(u.dirs, h)
	return nil
}

func (u *untar) hold(n int) error {
	if u.held += n + 128; u.held > maxDeferred {
		return sandbox.Exhausted.Errorf("the archive has more links and directories than can be kept in mind")
	}
	return nil
}

// keep notes a link to be made at the end.
func (u *untar) keep(name string, h *tar.Header) error {
	to := h.Linkname
	if h.Typeflag == tar.TypeLink {
		target, err := u.name(&tar.Header{Name: to})
		if err != nil {
			return err
		}
		to = target
	}
	if to == "" || len(to) > maxEntryPath || strings.IndexByte(to, 0) >= 0 {
		return refuse(h.Name, "its target is no proper name")
	}
	if err := u.hold(len(name) + len(to)); err != nil {
		return err
	}
	if _, twice := u.later[name]; !twice {
		u.order = append(u.order, name)
	}
	u.later[name] = tar.Header{Typeflag: h.Typeflag, Linkname: to, Uid: h.Uid, Gid: h.Gid}
	return nil
}

// finish makes the links, hard ones first, so that none of them can lead
// through a symbolic link of this archive, and sets what directories look like.
func (u *untar) finish() error {
	for _, kind := range []byte{tar.TypeLink, tar.TypeSymlink} {
		for _, name := range u.order {
			h, ok := u.later[name]
			if !ok || h.Typeflag != kind {
				continue
			}
			if kind == tar.TypeLink && u.later[h.Linkname].Typeflag == tar.TypeSymlink {
				// A second name of a symbolic link is a symbolic link.
				h.Typeflag, h.Linkname = tar.TypeSymlink, u.later[h.Linkname].Linkname
				u.later[name] = h
				continue
			}
			if err := u.link(name, h); err != nil {
				return err
			}
		}
	}
	for i := len(u.dirs) - 1; i >= 0; i-- {
		h := u.dirs[i]
		if fi, err := u.root.Lstat(h.Name); err != nil || !fi.IsDir() {
			continue
		}
		if u.owner {
			if err := u.root.Lchown(h.Name, h.Uid, h.Gid); err != nil {
				return u.failed("set owner", err)
			}
		}
		if err := u.root.Chmod(h.Name, fs.FileMode(h.Mode)&0o777); err != nil {
			return u.failed("set mode", err)
		}
		u.times(h.Name, &h)
	}
	return nil
}

func (u *untar) link(name string, h tar.Header) error {
	if err := u.parents(name); err != nil {
		return err
	}
	if fi, err := u.root.Lstat(name); err == nil {
		if fi.IsDir() {
			return sandbox.Conflict.Errorf("%q is a directory here and a link in the sandbox", name)
		}
		if err := u.root.Remove(name); err != nil {
			return u.failed("replace", err)
		}
	}
	if h.Typeflag == tar.TypeSymlink {
		if err := u.root.Symlink(h.Linkname, name); err != nil {
			return u.failed("make link", err)
		}
		if u.owner {
			if err := u.root.Lchown(name, h.Uid, h.Gid); err != nil {
				return u.failed("set owner", err)
			}
		}
		return nil
	}
	// The target must be a file of this destination, reached by directories.
	if err := u.parents(h.Linkname); err != nil {
		return err
	}
	fi, err := u.root.Lstat(h.Linkname)
	if err != nil || !fi.Mode().IsRegular() {
		return refuse(name, "it is a link to %q, which is not a file of the archive", h.Linkname)
	}
	if err := u.root.Link(h.Linkname, name); err != nil {
		return u.failed("make link", err)
	}
	return nil
}
