package runtimetest

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// Slots gives machines network namespaces that have nothing but a loopback
// interface, and knows which are held.
type Slots struct {
	dir string

	mu   sync.Mutex
	n    int
	held map[string]string // slot to owner; guarded by mu
}

// NewSlots makes namespaces below a directory of t's. It must be on a file
// system that can hold bind mounts.
func NewSlots(t testing.TB, dir string) *Slots {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	s := &Slots{dir: dir, held: map[string]string{}}
	t.Cleanup(func() {
		for id := range s.held { // those the test failed about
			_ = s.Release(context.Background(), id)
		}
	})
	return s
}

// Acquire makes a namespace.
func (s *Slots) Acquire(ctx context.Context, owner string) (sandbox.Slot, error) {
	if err := ctx.Err(); err != nil {
		return sandbox.Slot{}, sandbox.Timeout.Errorf("acquire slot: %w", err)
	}
	s.mu.Lock()
	s.n++
	n := s.n
	id := fmt.Sprintf("slot%d", n)
	s.held[id] = owner
	s.mu.Unlock()
	path := filepath.Join(s.dir, id)
	err := make(chan error, 1)
	go func() {
		// never unlocked: the thread ends with the goroutine, and nothing else
		// runs in the namespace it is in
		runtime.LockOSThread()
		err <- namespace(path)
	}()
	if err := <-err; err != nil {
		return sandbox.Slot{}, sandbox.Internal.Errorf("make slot: %w", err)
	}
	return sandbox.Slot{ID: id, Netns: path, Address: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 255, byte(n >> 8), byte(n)}), 32)}, nil
}

// namespace makes a network namespace with loopback up, and binds it to path.
func namespace(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	f.Close()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr); err != nil {
		return fmt.Errorf("loopback up: %w", err)
	}
	if err := unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind namespace: %w", err)
	}
	return nil
}

// Release removes one.
func (s *Slots) Release(_ context.Context, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.held[id]; !ok {
		return sandbox.NotFound.Errorf("slot %s", id)
	}
	path := filepath.Join(s.dir, id)
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
		return sandbox.Internal.Errorf("unmount slot: %w", err)
	}
	if err := os.Remove(path); err != nil {
		return sandbox.Internal.Errorf("remove slot: %w", err)
	}
	delete(s.held, id)
	return nil
}

// Held are the slots of an owner, of all with "".
func (s *Slots) Held(owner string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ids []string
	for id, o := range s.held {
		if owner == "" || o == owner {
			ids = append(ids, id+" of "+o)
		}
	}
	return ids
}

// Forget drops the slots of an owner for whom nobody is left to release them, as
// the network's own reconciliation does after a restart.
func (s *Slots) Forget(ctx context.Context, alive func(owner string) bool) error {
	s.mu.Lock()
	var lost []string
	for id, o := range s.held {
		if !alive(o) {
			lost = append(lost, id)
		}
	}
	s.mu.Unlock()
	for _, id := range lost {
		if err := s.Release(ctx, id); err != nil {
			return err
		}
	}
	return nil
}
