package doctor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Flags of statfs(2).
const (
	stReadOnly = 1
	stNoExec   = 8
)

// filesystems that are not an ordinary disk, by the magic of statfs(2).
var filesystems = map[int64]struct {
	name     string
	severity Severity
	effect   string
}{
	unix.TMPFS_MAGIC:           {"tmpfs", Warning, "images and state use memory and are lost at the next boot"},
	unix.RAMFS_MAGIC:           {"ramfs", Warning, "images and state use memory and are lost at the next boot"},
	unix.NFS_SUPER_MAGIC:       {"NFS", Error, "the store's locks and shared memory do not work over a network"},
	unix.SMB_SUPER_MAGIC:       {"SMB", Error, "the store's locks and shared memory do not work over a network"},
	unix.SMB2_SUPER_MAGIC:      {"SMB", Error, "the store's locks and shared memory do not work over a network"},
	unix.CIFS_SUPER_MAGIC:      {"CIFS", Error, "the store's locks and shared memory do not work over a network"},
	unix.V9FS_MAGIC:            {"9P", Error, "the store's locks and shared memory do not work over it"},
	unix.FUSE_SUPER_MAGIC:      {"FUSE", Warning, "whether it keeps what the store was promised depends on the file system behind it"},
	unix.MSDOS_SUPER_MAGIC:     {"FAT", Error, "it has no permissions and no files beyond 4 GiB"},
	unix.OVERLAYFS_SUPER_MAGIC: {"overlay", Note, "this looks like a container's own root: images and state go with it"},
}

var goodNames = map[int64]string{unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs", 0x2fc12fc1: "zfs", unix.F2FS_SUPER_MAGIC: "f2fs"}

// existing is dir, or the nearest directory above it that exists.
func existing(dir string) string {
	for {
		if fi, err := os.Stat(dir); err == nil && fi.IsDir() || dir == "/" || dir == "." {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}

// maxSocketPath is what the address of a Unix socket holds (unix(7)), less the
// NUL.
const maxSocketPath = 107

// machineSocket stands for the longest path of a socket below the data
// directory: that of a machine.
const machineSocket = "/gv/s/runsc-01234567890123456789012345.sock"

func (d *doctor) dataDir() {
	at := existing(d.DataDir)
	detail := d.DataDir
	if at != d.DataDir {
		detail += ", which viv serve will make"
	}
	if fi, err := os.Lstat(d.DataDir); err == nil && !fi.IsDir() && at != d.DataDir {
		d.bad(Error, "data directory", d.DataDir+" is not a directory", "the daemon does not start", "choose another with --data-dir")
		return
	}
	d.ok("data directory", detail)
	if n := max(len(d.DataDir)+len(machineSocket), len(d.UnixSocket), len(d.DataDir)+len("/viv.sock")) - maxSocketPath; n > 0 {
		d.bad(Error, "data directory path", fmt.Sprintf("%d bytes too long for the sockets in it", n), "the daemon does not start", "choose a shorter --data-dir")
	}
	// the data directory's own mode is the daemon's affair
	if blocked := notTraversable(filepath.Dir(d.DataDir)); blocked != nil {
		d.bad(Error, "data directory access", fmt.Sprintf("%s may not be passed through by everyone", strings.Join(blocked, ", ")),
			"the sentry, which runs as a user of its own, cannot be started from it", "chmod o+x "+strings.Join(blocked, " ")+", or choose another --data-dir")
	}
	d.mount(at)
	d.file(at)
}

// notTraversable lists the directories on the way that others may not enter.
func notTraversable(dir string) (blocked []string) {
	for {
		if fi, err := os.Stat(dir); err == nil && fi.Mode().Perm()&0o001 == 0 {
			blocked = append([]string{dir}, blocked...)
		}
		if dir == "/" || dir == "." {
			return blocked
		}
		dir = filepath.Dir(dir)
	}
}

func (d *doctor) mount(at string) {
	st, err := d.statfs(at)
	if err != nil {
		d.bad(Error, "file system", fmt.Sprintf("%s: %v", at, err), "the daemon does not start", "choose another --data-dir")
		return
	}
	if st.Flags&stReadOnly != 0 {
		d.bad(Error, "file system", at+" is mounted read-only", "the daemon does not start", "mount -o remount,rw "+d.mountPoint(at)+", or choose another --data-dir")
	}
	if st.Flags&stNoExec != 0 {
		d.bad(Error, "noexec", at+" is mounted noexec", "the sentry cannot be started from it", "mount -o remount,exec "+d.mountPoint(at)+", or choose another --data-dir")
	}
	magic := int64(uint32(st.Type)) // some are negative where the field is 32 bits
	if f, ok := filesystems[magic]; ok {
		d.bad(f.severity, "file system", at+" is on "+f.name, f.effect, "choose a --data-dir on a local disk: ext4, xfs or btrfs")
		return
	}
	name := goodNames[magic]
	if name == "" {
		name = fmt.Sprintf("type %#x", magic)
	}
	d.ok("file system", name)
}

// mountPoint finds where the file system of a path is mounted.
func (d *doctor) mountPoint(path string) string {
	best := "/"
	for line := range strings.Lines(d.mounts()) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		// proc_pid_mounts(5): space and others are octal escapes
		at := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\134`, `\`).Replace(f[1])
		if (path == at || strings.HasPrefix(path, strings.TrimSuffix(at, "/")+"/")) && len(at) > len(best) {
			best = at
		}
	}
	return best
}

// file tries what the store and the sandboxes' disks need of a file system.
func (d *doctor) file(at string) {
	if d.euid != 0 || d.root != "" {
		return
	}
	f, err := os.CreateTemp(at, ".viv-doctor-")
	if err != nil {
		d.bad(Error, "write to data directory", err.Error(), "the daemon does not start", "choose another --data-dir")
		return
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		d.bad(Error, "file locks", "flock: "+err.Error(), "two daemons could use the data directory at once", "choose a --data-dir on a local disk")
	}
	const size = 1 << 20
	err = unix.Ftruncate(int(f.Fd()), size)
	if err == nil {
		err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, size)
	}
	if err != nil {
		d.bad(Warning, "holes in files", "fallocate: "+err.Error(), "what is deleted in a sandbox stays allocated on the host until the sandbox ends", "choose a --data-dir on ext4, xfs or btrfs")
		return
	}
	d.ok("write to data directory", "locks and holes work")
}

const (
	gib = 1 << 30
	mib = 1 << 20
	// minDisk is what a base image and a sandbox need.
	minDisk = 3 * gib
	// lowDisk is what is soon used up.
	lowDisk = 10 * gib
	// minInodes: the store has few files, about ten per sandbox.
	minInodes = 20_000
)

func (d *doctor) disk() {
	at := existing(d.DataDir)
	st, err := d.statfs(at)
	if err != nil {
		return // told already
	}
	free := int64(st.Bavail) * st.Bsize
	detail := fmt.Sprintf("%.1f GiB free of %.1f", float64(free)/gib, float64(int64(st.Blocks)*st.Bsize)/gib)
	fix := "free space on " + d.mountPoint(at) + " (viv image prune removes images that no sandbox uses), or choose another --data-dir"
	switch {
	case free < minDisk+d.ReserveDisk:
		d.bad(Error, "disk space", detail, "images do not fit, or creates are refused to keep the host's reserve", fix)
	case free < lowDisk+d.ReserveDisk:
		d.bad(Warning, "disk space", detail, "a few images or sandboxes fill it", fix)
	default:
		d.ok("disk space", detail)
	}
	if st.Files == 0 {
		return // btrfs and others make inodes as they are needed
	}
	detail = fmt.Sprintf("%d free of %d", st.Ffree, st.Files)
	switch {
	case st.Ffree < minInodes/10:
		d.bad(Error, "inodes", detail, "the daemon cannot make files", "remove small files on "+d.mountPoint(at)+", or choose another --data-dir")
	case st.Ffree < minInodes:
		d.bad(Warning, "inodes", detail, "a thousand sandboxes may use them up", "remove small files on "+d.mountPoint(at)+", or choose another --data-dir")
	default:
		d.ok("inodes", detail)
	}
}

// inUse says whether a daemon has the data directory.
func inUse(dir string) bool {
	f, err := os.Open(filepath.Join(dir, "lock"))
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB), unix.EWOULDBLOCK)
}
