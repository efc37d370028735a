package proxy

import (
	"encoding/binary"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// originalDst asks the kernel where a redirected connection was going. Errors:
// Invalid (it was not redirected).
func originalDst(c net.Conn) (netip.AddrPort, error) {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return netip.AddrPort{}, sandbox.Internal.Errorf("%T is not TCP", c)
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, sandbox.Unavailable.Errorf("look at connection: %w", err)
	}
	var dst netip.AddrPort
	var serr error
	err = raw.Control(func(fd uintptr) {
		// The answer is a struct sockaddr_in, 16 bytes; this call, which is for
		// another option, happens to take 20 and to return them as they are.
		var m *unix.IPv6Mreq
		if m, serr = unix.GetsockoptIPv6Mreq(int(fd), unix.SOL_IP, unix.SO_ORIGINAL_DST); serr == nil {
			b := m.Multiaddr
			dst = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:4]))
		}
	})
	if err == nil {
		err = serr
	}
	if err != nil {
		return netip.AddrPort{}, sandbox.Invalid.Errorf("find original destination: %w", err)
	}
	return dst, nil
}
