package network

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

const ethtoolSGRO = 0x2c // ETHTOOL_SGRO of linux/ethtool.h

// enableGRO turns generic receive offload on for a veth in the calling thread's
// namespace. For a veth that also means a receive ring and a turn of its own
// (NAPI), where otherwise all interfaces share one queue per processor, which a
// single flooding slot can keep full so that everybody loses packets. A kernel
// that cannot do it does without.
func enableGRO(ifc string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	value := struct{ cmd, data uint32 }{ethtoolSGRO, 1}
	req := struct {
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte // the union in struct ifreq is longer than a pointer
	}{data: unsafe.Pointer(&value)}
	copy(req.name[:unix.IFNAMSIZ-1], ifc)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req))); errno != 0 && errno != unix.EOPNOTSUPP {
		return fmt.Errorf("turn receive offload on: %w", errno)
	}
	return nil
}
