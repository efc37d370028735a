package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// registryDir holds one file per host namespace that has a Network. It lies
// under /run because it describes kernel state, which a reboot takes away too.
const registryDir = "/run/vivarium-net"

// registry is what all instances in one host namespace share: which interfaces
// were made to forward by one of us (so the last to go sets them back), and,
// through its lock, the choice of subnets. Holding a *registry is holding the
// lock; keep it short.
type registry struct {
	f    *os.File
	path string
	// Lent are interfaces whose forwarding flag was 0 before we set it.
	Lent map[string]bool `json:"lent"`
}

// netnsCookie is unique for a namespace until reboot, unlike its inode number.
func netnsCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	return unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
}

// lockRegistry waits at most 30 s for the registry of the host namespace that
// cookie names.
func lockRegistry(ctx context.Context, cookie uint64) (*registry, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	path := filepath.Join(registryDir, fmt.Sprintf("%d.json", cookie))
	for {
		if err := os.MkdirAll(registryDir, 0o700); err != nil {
			return nil, fmt.Errorf("make registry directory: %w", err)
		}
		f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if errors.Is(err, os.ErrNotExist) {
			continue // the last instance took the directory away just now
		}
		if err != nil {
			return nil, fmt.Errorf("open registry: %w", err)
		}
		if err := flock(ctx, f); err != nil {
			f.Close()
			return nil, fmt.Errorf("lock registry: %w", err)
		}
		if !sameFile(f, path) {
			f.Close() // removed while we waited
			continue
		}
		r := &registry{f: f, path: path, Lent: map[string]bool{}}
		// An unreadable registry is one that was being written when its writer
		// died. What it would have said about this change is not yet in force.
		if b, err := os.ReadFile(path); err == nil && len(b) > 0 {
			_ = json.Unmarshal(b, r)
		}
		if r.Lent == nil {
			r.Lent = map[string]bool{}
		}
		return r, nil
	}
}

// flock takes an exclusive lock, trying again until ctx ends.
func flock(ctx context.Context, f *os.File) error {
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return nil
		}
		if err != unix.EWOULDBLOCK && err != unix.EINTR {
			return err
		}
		select {
		case <-ctx.Done():
			return sandbox.Timeout.Errorf("wait for lock on %s: %w", f.Name(), ctx.Err())
		case <-time.After(wait):
		}
	}
}

func sameFile(f *os.File, path string) bool {
	a, err := f.Stat()
	if err != nil {
		return false
	}
	b, err := os.Stat(path)
	return err == nil && os.SameFile(a, b)
}

// save writes the registry. It must be called before the change it records is
// made, so that a crash between the two loses nothing.
func (r *registry) save() error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	// Written whole beside the locked file's own inode would lose the lock, so
	// in place: a short record in one write.
	if _, err := r.f.WriteAt(b, 0); err != nil {
		return fmt.Errorf("write registry: %w", err)
	}
	return r.f.Truncate(int64(len(b)))
}

func (r *registry) unlock() { r.f.Close() }

// remove deletes the registry and unlocks it.
func (r *registry) remove() {
	os.Remove(r.path)
	r.f.Close()
	os.Remove(registryDir) // only succeeds when empty
}
