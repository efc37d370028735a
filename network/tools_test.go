package network

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"io"
	"log"
	"math/big"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// udpSocket sends without a connection, many datagrams quickly.
type udpSocket int

func unixUDP() (udpSocket, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	return udpSocket(fd), err
}

func (s udpSocket) send(to netip.Addr, port int) { s.sendBytes(to, port, []byte("x")) }

func (s udpSocket) sendBytes(to netip.Addr, port int, b []byte) {
	_ = unix.Sendto(int(s), b, 0, &unix.SockaddrInet4{Addr: to.As4(), Port: port})
}

func (s udpSocket) close() { unix.Close(int(s)) }

// listenAll counts datagrams.
func (p *place) listenAll(t testing.TB, addr string) func() int {
	t.Helper()
	var pc net.PacketConn
	must(t, p.do(func() (err error) { pc, err = net.ListenPacket("udp4", addr); return }))
	t.Cleanup(func() { pc.Close() })
	var n atomic.Int64
	go func() {
		b := make([]byte, 2048)
		for {
			if _, _, err := pc.ReadFrom(b); err != nil {
				return
			}
			n.Add(1)
		}
	}()
	return func() int { return int(n.Load()) }
}

// pusher sends datagrams from an address that is served to whoever the router on the
// host's side would take them for: to the host's address, on all its likely ports.
func (p *place) pusher(t testing.TB, from string) func() {
	t.Helper()
	src := netip.MustParseAddrPort(from)
	var fd int
	must(t, p.do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_UDP); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrInet4{Addr: src.Addr().As4()})
	}))
	t.Cleanup(func() { unix.Close(fd) })
	return func() {
		for port := 1024; port < 65536; port++ {
			b := []byte{byte(src.Port() >> 8), byte(src.Port()), byte(port >> 8), byte(port), 0, 12, 0, 0, 'p', 'u', 's', 'h'}
			_ = unix.Sendto(fd, b, 0, &unix.SockaddrInet4{Addr: [4]byte{5, 5, 5, 2}})
		}
	}
}

// sendProto writes a packet of any protocol.
func (p *place) sendProto(t testing.TB, s *Slot, dst netip.Addr, proto byte) {
	t.Helper()
	_ = p.do(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		b := make([]byte, 40)
		b[0], b[8], b[9] = 0x45, 64, proto
		copy(b[12:], s.Addr.AsSlice())
		copy(b[16:], dst.AsSlice())
		return unix.Sendto(fd, b, 0, &unix.SockaddrInet4{Addr: dst.As4()})
	})
}

var discardLog = log.New(io.Discard, "", 0)

type netAddr string

func (a netAddr) Network() string { return "tcp" }
func (a netAddr) String() string  { return string(a) }

func selfSigned(t testing.TB, names ...string) (tls.Certificate, *x509.CertPool) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	tpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, DNSNames: names,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, tpl, tpl, &key.PublicKey, key)
	must(t, err)
	c, err := x509.ParseCertificate(der)
	must(t, err)
	pool := x509.NewCertPool()
	pool.AddCert(c)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pool
}
