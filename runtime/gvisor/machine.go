package gvisor

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/specutils"

	"vivarium/cgroup"
	"vivarium/runtime/gvisor/control"
	"vivarium/runtime/gvisor/forward"
	"vivarium/sandbox"
)

// killTimeout bounds the end of a machine: SIGKILL to all of it, then the wait
// until the kernel has let go.
const killTimeout = 10 * time.Second

// machine is one pod.
type machine struct {
	r     *Runtime
	id    string
	slot  sandbox.Slot
	group *cgroup.Group
	pid   int    // of the sentry
	old   string // sentry binary, where it is of another gVisor version
	done  chan struct{}
	pidfd *os.File

	warm *warmth // nil unless its guest was started ahead; set before it is handed out

	mu      sync.Mutex
	started bool // for a sandbox; guarded by mu
	removed bool // guarded by mu
}

var _ sandbox.Warm = (*machine)(nil)

// warmth is what the guest of a warm machine was started with.
type warmth struct {
	image string
	res   sandbox.Resources
	key   []byte
}

// suits says whether what runs is what spec would start.
func (w *warmth) suits(image string, res sandbox.Resources, caps sandbox.Capabilities) bool {
	return w.image == image && w.res.Disk == res.Disk && w.res.Pids == res.Pids && len(caps.Add)+len(caps.Drop) == 0
}

// WarmKey implements sandbox.Warm.
func (m *machine) WarmKey() []byte {
	if m.warm == nil {
		return nil
	}
	return m.warm.key
}

// WarmSetup implements sandbox.Warm.
func (m *machine) WarmSetup(s sandbox.StartSpec) (sandbox.GuestSetup, error) { return setup(m.slot, s) }

func (m *machine) ID() string { return m.id }

func (m *machine) Slot() string { return m.slot.ID }

func (m *machine) Address() netip.Addr { return m.slot.Address.Addr() }

func (m *machine) Done() <-chan struct{} { return m.done }

func (m *machine) main() string { return m.id + "-main" }

// watch closes done when the sentry has died. It waits in the runtime's poller:
// a thread per machine would be a thousand threads.
func (m *machine) watch() error {
	fd, err := unix.PidfdOpen(m.pid, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		close(m.done)
		return nil
	}
	if err != nil {
		return sandbox.Internal.Errorf("watch sentry: %w", err)
	}
	// the pid may have been given to another process since it was written down:
	// then it is not in our group
	pids, err := m.group.Procs()
	if err != nil {
		unix.Close(fd)
		return err
	}
	if !contains(pids, m.pid) {
		unix.Close(fd)
		close(m.done)
		return nil
	}
	m.pidfd = os.NewFile(uintptr(fd), "pidfd:"+strconv.Itoa(m.pid))
	raw, err := m.pidfd.SyscallConn()
	if err != nil {
		return sandbox.Internal.Errorf("watch sentry: %w", err)
	}
	oom, err := m.group.WatchOOM(func() {
		m.r.log.Info("machine ran out of memory", "machine", m.id)
		ctx, cancel := context.WithTimeout(context.Background(), killTimeout)
		defer cancel()
		if err := m.Kill(ctx); err != nil {
			m.r.log.Error("kill machine", "machine", m.id, "err", err)
		}
	})
	if err != nil {
		m.pidfd.Close()
		return err
	}
	go func() {
		if oom != nil {
			defer oom.Close()
		}
		// pidfd_open(2): readable once the process has terminated
		if err := raw.Read(func(fd uintptr) bool {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(fds, 0)
			return err == nil && n > 0
		}); err != nil {
			m.r.log.Error("watch sentry", "machine", m.id, "err", err)
			return
		}
		// reap it if it is our child; ECHILD if an earlier daemon's
		_, _ = unix.Wait4(m.pid, nil, unix.WNOHANG, nil)
		close(m.done)
	}()
	return nil
}

func contains(pids []int, pid int) bool {
	for _, p := range pids {
		if p == pid {
			return true
		}
	}
	return false
}

// Start implements sandbox.Machine: it runs the guest on the sandbox's image.
func (m *machine) Start(ctx context.Context, s sandbox.StartSpec) error {
	m.mu.Lock()
	if m.started {
		m.mu.Unlock()
		return sandbox.Conflict.Errorf("machine %s was started before", m.id)
	}
	m.started = true
	m.mu.Unlock()
	// a pooled machine was booted with the size of its class
	if err := m.group.Update(limits(s.Resources)); err != nil {
		return err
	}
	if w := m.warm; w != nil {
		if !w.suits(s.ImagePath, s.Resources, s.Capabilities) || !bytes.Equal(w.key, s.GuestKey) {
			return sandbox.Conflict.Errorf("machine %s was started for something else", m.id)
		}
		return m.r.opts.Fail("start.done")
	}
	return m.start(ctx, s, false)
}

// start runs the guest on an image.
func (m *machine) start(ctx context.Context, s sandbox.StartSpec, warm bool) error {
	r := m.r
	spec, err := r.mainSpec(m.id, m.slot, s, warm)
	if err != nil {
		return err
	}
	if err := r.opts.Fail("start.files"); err != nil {
		return err
	}
	image, err := os.Open(s.ImagePath)
	if err != nil {
		return sandbox.Internal.Errorf("open image: %w", err)
	}
	defer image.Close()
	guest, err := os.Open(r.opts.GuestImage)
	if err != nil {
		return sandbox.Internal.Errorf("open guest image: %w", err)
	}
	defer guest.Close()
	// named, so that its blocks can be counted, and removed with the directory
	upper, err := os.OpenFile(m.upper(), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return hostError("make upper file", err)
	}
	defer upper.Close()
	if err := r.opts.Fail("start.container"); err != nil {
		return err
	}
	ready, out, err := os.Pipe()
	if err != nil {
		return hostError("make a pipe", err)
	}
	defer ready.Close()
	cid := m.main()
	err = control.Call(ctx, m.socket(), boot.ContMgrCreateSubcontainer, &boot.CreateArgs{CID: cid}, nil)
	if err == nil {
		// the files in the order that boot.StartArgs documents: standard files,
		// what backs the writable layers, then the images
		err = control.Call(ctx, m.socket(), boot.ContMgrStartSubcontainer, &boot.StartArgs{
			Spec: spec, Conf: r.conf, CID: cid, NumGoferFilestoreFDs: 1,
			GoferMountConfs: []specutils.GoferMountConf{
				{Lower: specutils.Erofs, Upper: specutils.AnonOverlay, Size: strconv.FormatInt(s.Resources.Disk, 10)},
				{Lower: specutils.Erofs, Upper: specutils.NoOverlay},
			},
		}, []*os.File{r.null, out, r.null, upper, image, guest})
	}
	out.Close()
	if err != nil {
		return m.failure("start main container", err)
	}
	if err := m.listens(ctx, ready); err != nil {
		return err
	}
	return r.opts.Fail("start.done")
}

// listens waits until the guest says that it can be connected to. Trying until
// it can would cost the sentry, and so the start, more than the guest's own
// start does.
func (m *machine) listens(ctx context.Context, ready *os.File) error {
	stop := context.AfterFunc(ctx, func() { _ = ready.SetReadDeadline(time.Now()) })
	defer stop()
	var b [1]byte
	if _, err := ready.Read(b[:]); err != nil {
		if ctx.Err() != nil {
			return sandbox.Timeout.Errorf("the guest does not start: %w", ctx.Err())
		}
		return m.failure("start guest", err)
	}
	return nil
}

// socket is where the sentry takes calls.
func (m *machine) socket() string { return filepath.Join(m.r.opts.Dir, "s", "runsc-"+m.id+".sock") }

func (m *machine) upper() string { return filepath.Join(m.r.dir(m.id), "upper") }

// Dial implements sandbox.Machine.
func (m *machine) Dial(ctx context.Context) (net.Conn, error) {
	select {
	case <-m.done:
		return nil, sandbox.Gone.Errorf("machine %s has died", m.id)
	default:
	}
	if m.old != "" {
		return forward.DialWith(ctx, m.old, m.socket(), m.main(), GuestPort)
	}
	return forward.Dial(ctx, m.socket(), m.main(), GuestPort)
}

// Usage implements sandbox.Machine.
func (m *machine) Usage() (sandbox.Usage, error) {
	if m.group == nil {
		return sandbox.Usage{}, sandbox.Gone.Errorf("machine %s: its cgroup is gone", m.id)
	}
	s, err := m.group.Stats()
	if err != nil {
		return sandbox.Usage{}, err
	}
	u := sandbox.Usage{Memory: s.Memory, PeakMemory: s.PeakMemory, CPU: s.CPU, Pids: s.Pids, OOM: s.OOMKills > 0}
	var st unix.Stat_t
	if err := unix.Stat(m.upper(), &st); err == nil {
		u.Disk = st.Blocks * 512 // stat(2): in units of 512 bytes
	}
	return u, nil
}

// Kill implements sandbox.Machine.
func (m *machine) Kill(ctx context.Context) error {
	if m.group == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	// the sentry is process 1 of its namespace: with it the kernel ends all
	// of its stubs. By pidfd: the pid itself could be someone else's by now.
	if m.pidfd != nil {
		if raw, err := m.pidfd.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { _ = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) })
		}
	}
	select {
	case <-m.done:
	case <-ctx.Done():
	}
	return m.group.Kill(ctx)
}

// Remove implements sandbox.Machine.
func (m *machine) Remove(ctx context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.removed {
		return nil
	}
	if err := m.Kill(ctx); err != nil {
		return err
	}
	if err := m.r.remove(ctx, m.id, m.slot.ID); err != nil {
		return err
	}
	if m.pidfd != nil {
		m.pidfd.Close()
	}
	m.removed = true
	return nil
}

func isFull(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }
