package agent

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// dropCaps gives up capabilities for this process and everything it will start:
// out of the bounding set, so that no exec brings them back, and out of every
// set of every thread (capabilities(7)). CAP_SYS_RESOURCE alone stays with this
// process: the limit on processes is for what it starts, and a Go program that
// cannot have one more thread dies.
func dropCaps(caps []int) error {
	if len(caps) == 0 {
		return nil
	}
	for _, c := range caps {
		if _, _, e := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, uintptr(c), 0); e != 0 {
			return sandbox.Internal.Errorf("drop capability %d: %w", c, e)
		}
	}
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return sandbox.Internal.Errorf("read capabilities: %w", err)
	}
	for _, c := range caps {
		if c == unix.CAP_SYS_RESOURCE {
			continue
		}
		bit := uint32(1) << (c % 32)
		d := &data[c/32]
		d.Effective &^= bit
		d.Permitted &^= bit
		d.Inheritable &^= bit
	}
	if _, _, e := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&hdr)), uintptr(unsafe.Pointer(&data[0])), 0); e != 0 {
		return sandbox.Internal.Errorf("drop capabilities: %w", e)
	}
	return nil
}
