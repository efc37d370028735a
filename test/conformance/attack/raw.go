package main

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// raw sends packets that no honest stack would: "SOURCE..." "DESTINATION...", each
// a list with commas, by raw sockets and in frames of its own making. What matters
// is what arrives; it says how much it could send.
func raw(args []string) {
	srcs, dsts := strings.Split(args[0], ","), strings.Split(args[1], ",")
	eth, err := net.InterfaceByName("eth0")
	if err != nil {
		fmt.Println(err)
		return
	}
	// of a slot's interface the MAC tells the address, whoever has taken that away
	m := eth.HardwareAddr
	own := netip.AddrFrom4([4]byte{m[2], m[3], m[4], m[5]})
	srcs = append(srcs, own.String())
	b4 := own.As4()
	router := net.HardwareAddr{0x06, 0x76, b4[0], b4[1], b4[2], b4[3]}
	var sent, refused int
	var last error
	count := func(err error) {
		if err == nil {
			sent++
			return
		}
		refused++
		last = err
	}
	ipfd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW)
	fmt.Println("raw socket:", err)
	pkfd, perr := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, int(unix.ETH_P_ALL<<8))
	fmt.Println("packet socket:", perr)
	frame := func(dst, src net.HardwareAddr, ether uint16, payload []byte) {
		if perr != nil {
			return
		}
		f := slices.Concat(dst, src, binary.BigEndian.AppendUint16(nil, ether), payload)
		for len(f) < 60 {
			f = append(f, 0)
		}
		to := &unix.SockaddrLinklayer{Ifindex: eth.Index, Halen: 6, Protocol: ether>>8 | ether<<8}
		copy(to.Addr[:], dst)
		count(unix.Sendto(pkfd, f, 0, to))
	}
	everybody := net.HardwareAddr{255, 255, 255, 255, 255, 255}
	other := net.HardwareAddr{0x02, 0x76, b4[0], b4[1], b4[2], b4[3] + 2} // the next slot's
	for _, s := range srcs {
		for _, d := range dsts {
			src, dst := netip.MustParseAddr(s), netip.MustParseAddr(d)
			for _, p := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMP, unix.IPPROTO_SCTP, unix.IPPROTO_GRE, unix.IPPROTO_ESP, unix.IPPROTO_IGMP, unix.IPPROTO_IPIP, unix.IPPROTO_IPV6, unix.IPPROTO_UDPLITE, unix.IPPROTO_DCCP, 253} {
				if s == own.String() && p == unix.IPPROTO_TCP {
					continue // an honest one: its stack would answer
				}
				pkt := packet4(src, dst, p, nil)
				if err == nil {
					a := dst.As4()
					count(unix.Sendto(ipfd, pkt, 0, &unix.SockaddrInet4{Addr: a}))
				}
				for _, to := range []net.HardwareAddr{router, everybody, other} {
					frame(to, eth.HardwareAddr, unix.ETH_P_IP, pkt)
				}
				frame(router, other, unix.ETH_P_IP, pkt)
				// with the loose source route option (RFC 791, 3.1)
				o := dst.As4()
				frame(router, eth.HardwareAddr, unix.ETH_P_IP, packet4(src, dst, p, []byte{131, 7, 4, o[0], o[1], o[2], o[3], 0}))
				// in a VLAN, and in two
				frame(router, eth.HardwareAddr, unix.ETH_P_8021Q, slices.Concat([]byte{0, 1, 8, 0}, pkt))
				frame(router, eth.HardwareAddr, unix.ETH_P_8021AD, slices.Concat([]byte{0, 1, 0x81, 0, 0, 2, 8, 0}, pkt))
				// in two fragments, the ports in the first alone
				for _, off := range []uint16{0x2000, 1} {
					f := slices.Clone(pkt)
					binary.BigEndian.PutUint16(f[6:], off)
					sum4(f)
					frame(router, eth.HardwareAddr, unix.ETH_P_IP, f)
				}
			}
			// TCP that belongs to no connection
			for _, flags := range []byte{0, 1, 4, 16, 17, 18, 20, 41, 63} {
				frame(router, eth.HardwareAddr, unix.ETH_P_IP, withFlags(packet4(src, dst, unix.IPPROTO_TCP, nil), flags))
			}
			// ARP: I am your gateway, and your neighbour
			for _, op := range []byte{1, 2} {
				sa, da := src.As4(), dst.As4()
				frame(everybody, eth.HardwareAddr, unix.ETH_P_ARP, slices.Concat([]byte{0, 1, 8, 0, 6, 4, 0, op}, eth.HardwareAddr, sa[:], router, da[:]))
			}
		}
	}
	// IPv6: a datagram, a neighbour advertisement, a router advertisement
	for _, d := range []string{"2a00:1::1", "fd00:ec2::254", "ff02::1", "fe80::1"} {
		for _, p := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_ICMPV6, unix.IPPROTO_TCP} {
			dst, src := netip.MustParseAddr(d).As16(), netip.MustParseAddr("2a00:1::2").As16()
			pkt := slices.Concat([]byte{0x60, 0, 0, 0, 0, 16, p, 64}, src[:], dst[:], []byte{134, 0, 35, 40, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0})
			frame(router, eth.HardwareAddr, unix.ETH_P_IPV6, pkt)
			frame(net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}, eth.HardwareAddr, unix.ETH_P_IPV6, pkt)
		}
	}
	fmt.Println("sent", sent, "refused", refused, last)
}

// packet4 is an IPv4 packet with 24 bytes to say, port 9000 where there are ports.
func packet4(src, dst netip.Addr, proto byte, options []byte) []byte {
	body := make([]byte, 24)
	binary.BigEndian.PutUint16(body[0:], 4000)
	binary.BigEndian.PutUint16(body[2:], 9000)
	switch proto {
	case unix.IPPROTO_TCP:
		body[12], body[13] = 5<<4, 2 // SYN
		body[14] = 16
	case unix.IPPROTO_UDP, unix.IPPROTO_UDPLITE:
		body[5] = 24
	case unix.IPPROTO_ICMP:
		body[0], body[1] = 8, 0
		copy(body[2:4], []byte{0, 0})
		binary.BigEndian.PutUint16(body[2:], ^checksum(body))
	}
	head := 20 + len(options)
	p := make([]byte, head, head+len(body))
	p[0] = 4<<4 | byte(head/4)
	binary.BigEndian.PutUint16(p[2:], uint16(head+len(body)))
	p[8], p[9] = 64, proto
	s, d := src.As4(), dst.As4()
	copy(p[12:], s[:])
	copy(p[16:], d[:])
	copy(p[20:], options)
	sum4(p)
	return append(p, body...)
}

// withFlags sets the flags of TCP, with a checksum that is right: a wrong one is
// another way to be invalid.
func withFlags(p []byte, flags byte) []byte {
	p[20+13] = flags
	sumTCP(p)
	return p
}

func sumTCP(p []byte) {
	body := p[20:]
	body[16], body[17] = 0, 0
	pseudo := slices.Concat(p[12:20], []byte{0, unix.IPPROTO_TCP, 0, byte(len(body))}, body)
	binary.BigEndian.PutUint16(body[16:], ^checksum(pseudo))
}

func sum4(p []byte) {
	p[10], p[11] = 0, 0
	binary.BigEndian.PutUint16(p[10:], ^checksum(p[:int(p[0]&15)*4]))
}

func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}
