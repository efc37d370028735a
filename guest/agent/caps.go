package agent

import (
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// dropCaps takes capabilities from everything that this process will start: out
// of the bounding set, so that no exec brings them back (capabilities(7)), and
// out of the inheritable set. This process gives them up as well, in every
// thread, but for wire.KeptCaps.
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
		bit := uint32(1) << (c % 32)
		d := &data[c/32]
		d.Inheritable &^= bit
		if slices.Contains(wire.KeptCaps, c) {
			continue
		}
		d.Effective &^= bit
		d.Permitted &^= bit
	}
	if _, _, e := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&hdr)), uintptr(unsafe.Pointer(&data[0])), 0); e != 0 {
		return sandbox.Internal.Errorf("drop capabilities: %w", e)
	}
	return nil
}
