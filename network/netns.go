package network

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/google/nftables"
	mdnetlink "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// nsFile opens a network namespace by path and makes sure that it is one: a
// half-made bind mount is an ordinary empty file.
func nsFile(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		f.Close()
		return nil, fmt.Errorf("statfs %s: %w", path, err)
	}
	if st.Type != unix.NSFS_MAGIC {
		f.Close()
		return nil, fmt.Errorf("%s: %w", path, errNotNetns)
	}
	return f, nil
}

var errNotNetns = errors.New("not a network namespace")

// currentNS opens the network namespace of the calling thread.
func currentNS() (*os.File, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return os.Open("/proc/thread-self/ns/net")
}

// newNetns makes a network namespace, runs setup on a thread inside it, and
// binds it to path. On error nothing is left at path.
func newNetns(path string, setup func(ns *os.File) error) error {
	errc := make(chan error, 1)
	go func() {
		// Never unlocked: the thread ends with the goroutine, so no other
		// goroutine can ever run in the wrong namespace.
		runtime.LockOSThread()
		errc <- makeNetns(path, setup)
	}()
	return <-errc
}

func makeNetns(path string, setup func(ns *os.File) error) (err error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("unshare network namespace: %w", err)
	}
	if err := disableIPv6(); err != nil {
		return err
	}
	ns, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	defer ns.Close()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o600)
	if err != nil {
		return err
	}
	f.Close()
	defer func() {
		if err != nil {
			dropNetns(path)
		}
	}()
	if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind network namespace to %s: %w", path, err)
	}
	return setup(ns)
}

// dropNetns takes a namespace's bind mount and file away; both may be missing.
func dropNetns(path string) error {
	for {
		// More than one mount can lie on the file after a crash.
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err == nil {
			continue
		}
		if err != unix.EINVAL && err != unix.ENOENT {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
		break
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// disableIPv6 turns IPv6 off for all present and future interfaces of the
// calling thread's namespace. A kernel without IPv6 has nothing to turn off.
func disableIPv6() error {
	for _, c := range []string{"all", "default"} {
		if err := setSysctl("ipv6/conf/"+c+"/disable_ipv6", "1"); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return nil
}

// setSysctl writes /proc/sys/net/NAME in the calling thread's namespace.
func setSysctl(name, value string) error {
	f, err := os.OpenFile(filepath.Join("/proc/sys/net", name), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteString(value); err != nil {
		return fmt.Errorf("set %s: %w", name, err)
	}
	return nil
}

func getSysctl(name string) (string, error) {
	b, err := os.ReadFile(filepath.Join("/proc/sys/net", name))
	return strings.TrimSpace(string(b)), err
}

// nsThread runs functions on one operating system thread that stays in one
// network namespace, which spares a switch per call, and holds a routing
// netlink handle of that namespace that any thread may use.
type nsThread struct {
	reqs chan func()
	done chan struct{}
	h    *netlink.Handle
	conn *nftables.Conn // only on the thread; nil until needed and after an error
}

// startThread starts a thread in ns, which may be closed afterwards.
func startThread(ns *os.File) (*nsThread, error) {
	t := &nsThread{reqs: make(chan func()), done: make(chan struct{})}
	errc := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked, see newNetns
		defer close(t.done)
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			errc <- fmt.Errorf("enter network namespace: %w", err)
			return
		}
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER)
		if err != nil {
			errc <- fmt.Errorf("open netlink: %w", err)
			return
		}
		t.h = h
		errc <- nil
		for f := range t.reqs {
			f()
		}
		if t.conn != nil {
			t.conn.CloseLasting()
		}
	}()
	if err := <-errc; err != nil {
		return nil, err
	}
	return t, nil
}

// do runs f on the thread and returns its error.
func (t *nsThread) do(f func() error) error {
	errc := make(chan error, 1)
	t.reqs <- func() { errc <- f() }
	return <-errc
}

// nft builds a batch with build and commits it as one transaction.
func (t *nsThread) nft(build func(c *nftables.Conn) error) error {
	return t.do(func() error {
		return t.withNft(func(c *nftables.Conn) error {
			if err := build(c); err != nil {
				return err
			}
			return c.Flush()
		})
	})
}

// withNft calls f, on the thread, with a connection that lasts: closing one
// makes the kernel wait until all that was deleted is freed, some 10 ms. After
// an error, answers may be left unread in the socket, so it is replaced.
func (t *nsThread) withNft(f func(c *nftables.Conn) error) error {
	if t.conn == nil {
		// One transaction of a large network, or of a policy with thousands of
		// rules, is beyond the default buffers; the kernel acknowledges each part.
		big := func(c *mdnetlink.Conn) error {
			return errors.Join(c.SetWriteBuffer(16<<20), c.SetReadBuffer(32<<20))
		}
		c, err := nftables.New(nftables.AsLasting(), nftables.WithSockOptions(big))
		if err != nil {
			return fmt.Errorf("open nftables: %w", err)
		}
		t.conn = c
	}
	err := f(t.conn)
	if err != nil {
		t.conn.CloseLasting()
		t.conn = nil
	}
	return err
}

func (t *nsThread) stop() {
	close(t.reqs)
	<-t.done
	t.h.Close()
}

// dump calls a function that lists kernel objects again while the list was
// changed under it. After some tries the last list will do: it lacks at most
// what came or went meanwhile, and every list is looked at again later.
func dump[T any](list func() ([]T, error)) (out []T, err error) {
	err = retryDump(func() error { out, err = list(); return err })
	return out, err
}

func retryDump(f func() error) error {
	for range 10 {
		if err := f(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return err
		}
	}
	return nil
}
