package spawn

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/log"
	gcgroup "gvisor.dev/gvisor/runsc/cgroup"
	"gvisor.dev/gvisor/runsc/config"
	gflag "gvisor.dev/gvisor/runsc/flag"
	gsandbox "gvisor.dev/gvisor/runsc/sandbox"
	"gvisor.dev/gvisor/runsc/specutils"

	"vivarium/cgroup"
	"vivarium/sandbox"
)

// connFD is where Main finds its connection to the daemon.
const connFD = 3

// Main is the helper process: it starts one machine per request until the
// daemon is gone. Its argument is the path of viv-start.
func Main(starter string) error {
	conn := os.NewFile(connFD, "daemon")
	unix.CloseOnExec(connFD)
	if err := sink(); err != nil {
		return err
	}
	// a daemon that was started by sudo has groups, which sentries would inherit
	if groups, err := unix.Getgroups(); err != nil || len(groups) > 0 {
		if err := syscall.Setgroups(nil); err != nil { // of all threads
			return err
		}
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	if specutils.ExePath, err = filepath.Abs(starter); err != nil {
		return err
	}
	log.SetTarget(log.GoogleEmitter{Writer: &log.Writer{Next: io.Discard}})
	log.SetLevel(log.Warning) // what is not written need not be composed
	reap()
	in := json.NewDecoder(bufio.NewReader(conn))
	for {
		var req Request
		if err := in.Decode(&req); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		pid, err := start(req, exe)
		a := answer{Pid: pid}
		if err != nil {
			a = answer{Err: err.Error(), Kind: sandbox.KindOf(err)}
			a.Err = a.Err[:min(len(a.Err), maxAnswer/2)]
		}
		raw, err := json.Marshal(a)
		if err != nil {
			return err
		}
		if _, err := conn.Write(append(raw, '\n')); err != nil {
			if pid != 0 { // nobody knows of it: the daemon died meanwhile
				_ = unix.Kill(pid, unix.SIGKILL)
			}
			return err
		}
	}
}

// sink puts an empty file that cannot grow in the place of the standard files:
// gVisor gives them to the root container and to the sentry's user.
func sink() error {
	fd, err := unix.MemfdCreate("viv-stdio", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return err
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL); err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), "viv-stdio")
	os.Stdin, os.Stdout, os.Stderr = f, f, f
	return nil
}

// reap takes the status of sentries that have ended. Nobody here waits for them:
// the daemon watches them by pidfd.
func reap() {
	c := make(chan os.Signal, 1)
	signal.Notify(c, unix.SIGCHLD)
	go func() {
		for range c {
			for {
				// not a sentry that is being started: New waits for that itself, and
				// only when it fails
				pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
				if err != nil || pid <= 0 {
					break
				}
			}
		}
	}()
}

func newConfig(req Request) (*config.Config, error) {
	fs := gflag.NewFlagSet("viv", flag.ContinueOnError)
	config.RegisterFlags(fs)
	if err := fs.Parse(append(Flags(), "--root="+req.Sockets, "--panic-log="+req.PanicLog)); err != nil {
		return nil, sandbox.Internal.Errorf("set gVisor flags: %w", err)
	}
	conf, err := config.NewFromFlags(fs)
	if err != nil {
		return nil, sandbox.Internal.Errorf("configure gVisor: %w", err)
	}
	conf.Rootless = true // see as, and SentryArgs
	return conf, nil
}

// Flags are gVisor's settings for every machine.
func Flags() []string {
	return []string{
		"--platform=systrap",
		"--network=sandbox",
		"--directfs=false",        // lets the sentry run as a user of its own, without capabilities
		"--host-settings=ignore",  // viv doctor looks at the host
		"--ignore-cgroups",        // package cgroup makes them
		"--allow-suid",            // sudo inside; it elevates to nothing outside
		"--net-raw",               // ping inside; the slot's rules bind raw packets too
		"--oci-seccomp=false",     // the sentry is the boundary
		"--watchdog-action=panic", // a stuck sentry ends and says so, instead of hanging
	}
}

// collect frees what earlier machines have left here.
var collect = func() *time.Timer {
	t := time.AfterFunc(time.Hour, func() { runtime.GC() })
	t.Stop()
	return t
}()

// start starts one machine.
func start(req Request, sentry string) (pid int, err error) {
	conf, err := newConfig(req)
	if err != nil {
		return 0, err
	}
	group, err := cgroup.At(req.Cgroup)
	if err != nil {
		return 0, err
	}
	image, err := os.Open(req.Image)
	if err != nil {
		return 0, sandbox.Internal.Errorf("open pause image: %w", err)
	}
	// what earlier machines have left open here
	if err := unix.CloseRange(connFD, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
		image.Close()
		return 0, sandbox.Unsupported.Errorf("mark descriptors close-on-exec: %w", err).WithHint("Linux 5.11 or newer is needed")
	}
	var sb *gsandbox.Sandbox
	err = group.Spawn(func(e cgroup.Entry) (int, error) {
		program, err := os.Open(sentry)
		if err != nil {
			return 0, sandbox.Internal.Errorf("open sentry: %w", err)
		}
		err = as(req.UID, func() (err error) {
			sb, err = gsandbox.New(conf, &gsandbox.Args{
				ID:                req.ID,
				Spec:              req.Spec,
				BundleDir:         req.Bundle,
				IOFiles:           []*os.File{image}, // closed by New
				GoferMountConfs:   specutils.GoferMountConfFlags{{Lower: specutils.Erofs, Upper: specutils.NoOverlay}},
				Cgroup:            sizes{req},
				CloneIntoCgroupFD: e.Dir,
				SinkFiles:         append([]*os.File{program}, e.Tasks...), // for viv-start; closed by New
			})
			return err
		})
		if err != nil {
			return 0, sandbox.Internal.Errorf("start sentry: %w", err)
		}
		if sb.UID != req.UID || sb.GID != req.UID {
			// before anything but gVisor has run in it
			return 0, sandbox.Internal.Errorf("start sentry: it runs as %d:%d, not as %d", sb.UID, sb.GID, req.UID)
		}
		sb.CgroupJSON.Cgroup = nil // ours; not gVisor's to use
		return sb.Getpid(), nil
	})
	if err == nil {
		if err = sb.StartRoot(conf, req.Spec); err != nil {
			err = sandbox.Internal.Errorf("start root container: %w", err)
		} else if err = confined(sb.Getpid(), req.UID); err == nil {
			// the sandboxes of a host that runs out of memory go first, not the host
			if err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", sb.Getpid()), []byte("500"), 0); err != nil {
				log.Warningf("set oom_score_adj: %v", err)
			}
			// its packet socket is the sentry's now; the copy here goes when it is
			// collected, which is not to take time from boots
			collect.Reset(time.Second)
			return sb.Getpid(), nil
		}
	}
	if sb != nil {
		_ = unix.Kill(sb.Getpid(), unix.SIGKILL) // our child
	}
	return 0, err
}

// sizes tells gVisor how big the machine is; the group itself is ours.
type sizes struct{ r Request }

var _ gcgroup.Cgroup = sizes{}

func (s sizes) Install(*specs.LinuxResources) error { return nil }
func (s sizes) Update(*specs.LinuxResources) error  { return nil }
func (s sizes) Uninstall() error                    { return nil }
func (s sizes) Join() (func(), error)               { return func() {}, nil }
func (s sizes) CloneIntoCgroup() (*os.File, error)  { return nil, errors.ErrUnsupported }
func (s sizes) CPUQuota() (int64, error) {
	if s.r.CPULimit == 0 {
		return -1, nil
	}
	return s.r.CPULimit * 100, nil // of a period of 100,000 us
}
func (s sizes) CPUPeriod() (int64, error) { return 100_000, nil }
func (s sizes) CPUUsage() (uint64, error) { return 0, nil }
func (s sizes) NumCPU() (int, error)      { return runtime.NumCPU(), nil }
func (s sizes) MemoryLimit() (uint64, error) {
	if s.r.MemoryLimit == 0 {
		return math.MaxUint64, nil
	}
	return uint64(s.r.MemoryLimit), nil
}
func (s sizes) MakePath(string) string { return "" }
