package tunnel

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http/cookiejar"
	"net/netip"
	"os"
	"syscall"
	"testing"

	"golang.org/x/net/websocket"

	"vivarium/sandbox"
)

func newJar(t *testing.T) *cookiejar.Jar {
	t.Helper()
	j, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func echoServer() *websocket.Server {
	return &websocket.Server{Handler: func(c *websocket.Conn) { _, _ = io.Copy(c, c) }}
}

// program is a TCP server inside.
func (l *lab) program(id string, port uint16, serve func(*net.TCPConn)) {
	l.t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { ln.Close() })
	l.inside(id, port, ln.Addr().String())
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go serve(c.(*net.TCPConn))
		}
	}()
}

func (l *lab) dialTCP(tun sandbox.Tunnel) *net.TCPConn {
	l.t.Helper()
	c, err := net.Dial("tcp", tun.Address)
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn)
}

// cutOff says whether a connection is reset before a byte comes back.
func (l *lab) cutOff(tun sandbox.Tunnel) bool {
	c, err := net.Dial("tcp", tun.Address)
	if err != nil {
		return errors.Is(err, syscall.ECONNRESET)
	}
	defer c.Close()
	b, err := io.ReadAll(c)
	return err != nil && len(b) == 0
}

// TestC16TCP: raw bytes, each way's end passed on, within the allow-list and the
// limit.
func TestC16TCP(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(o *Options) { o.MaxConnections = 2 })
	l.program("sb-1", 5432, func(c *net.TCPConn) { // answers when the client has said everything
		defer c.Close()
		b, _ := io.ReadAll(c)
		fmt.Fprintf(c, "%d", len(b))
	})
	tun := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 5432, Kind: sandbox.TunnelTCP})
	if l.addr() != "" {
		t.Error("the TLS listener is open for a tcp tunnel")
	}
	a, err := netip.ParseAddrPort(tun.Address)
	if err != nil || a.Port() < 21000 || a.Port() > 21999 || !a.Addr().IsLoopback() {
		t.Fatalf("address %s", tun.Address)
	}
	c := l.dialTCP(tun)
	if _, err := c.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(c); err != nil || string(b) != "1048576" {
		t.Errorf("%q, %v", b, err)
	}
	// the other way round: the program ends first
	l.program("sb-1", 5433, func(c *net.TCPConn) {
		_, _ = io.WriteString(c, "bye")
		_ = c.CloseWrite()
		b, _ := io.ReadAll(c)
		c.Close()
		if string(b) != "still here" {
			t.Errorf("after its end the program got %q", b)
		}
	})
	c = l.dialTCP(l.tunnel("sb-1", sandbox.TunnelSpec{Port: 5433, Kind: sandbox.TunnelTCP}))
	if b, err := io.ReadAll(c); err != nil || string(b) != "bye" {
		t.Errorf("%q, %v", b, err)
	}
	if _, err := io.WriteString(c, "still here"); err != nil {
		t.Error(err)
	}
	c.Close()
	eventually(t, "no connection to the inside", func() bool { l.mu.Lock(); defer l.mu.Unlock(); return l.open == 0 })

	// who is not listed is cut before anything is dialled
	n := l.dials()
	out := l.tunnel("sb-1", sandbox.TunnelSpec{Port: 5432, Kind: sandbox.TunnelTCP, Allow: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}})
	if !l.cutOff(out) || l.dials() != n {
		t.Error("who is not listed is let in")
	}
	// places
	one, two := l.dialTCP(tun), l.dialTCP(tun)
	eventually(t, "two are inside", func() bool { l.mu.Lock(); defer l.mu.Unlock(); return l.open == 2 })
	if !l.cutOff(tun) {
		t.Error("a third is let in")
	}
	// the end of the sandbox cuts what is open
	l.end("sb-1")
	for _, c := range []*net.TCPConn{one, two} {
		if b, err := io.ReadAll(c); len(b) > 0 {
			t.Errorf("%q, %v", b, err)
		}
	}
	if c, err := net.Dial("tcp", tun.Address); err == nil {
		c.Close()
		t.Error("listens after the end")
	}
	eventually(t, "no connection to the inside", func() bool { l.mu.Lock(); defer l.mu.Unlock(); return l.open == 0 })
}

// TestPortsRunOut: a range that is used up is told, and a port that was closed is
// given again.
func TestPortsRunOut(t *testing.T) {
	t.Parallel()
	first := uint16(22000 + os.Getpid()%400*2) // others may run this test, too
	l := newLab(t, func(o *Options) { o.Ports = Ports{first, first + 1} })
	spec := sandbox.TunnelSpec{Port: 1, Kind: sandbox.TunnelTCP}
	one := l.tunnel("sb-1", spec)
	l.tunnel("sb-2", spec)
	if _, err := l.m.Open(t.Context(), "a", "sb-1", spec); !errors.Is(err, sandbox.Exhausted) {
		t.Errorf("no port is left: %v", err)
	}
	if err := l.m.CloseTunnel(t.Context(), "a", one.ID); err != nil {
		t.Fatal(err)
	}
	if again := l.tunnel("sb-1", spec); again.Address != one.Address {
		t.Errorf("%s, want %s", again.Address, one.Address)
	}
	// nothing listens inside: cut
	if !l.cutOff(l.m.List("a", "sb-2")[0]) {
		t.Error("a connection to nothing is not cut")
	}
}
