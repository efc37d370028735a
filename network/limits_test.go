package network

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"vivarium/sandbox"
)

// TestFairness: a policy's own limits hold, in both directions and through the proxy.
func TestFairness(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone("x.test. 60 IN A 8.8.8.8")
	var got atomic.Int64
	must(t, l.internet.do(func() error {
		ln, err := net.Listen("tcp", "8.8.8.8:7000")
		if err != nil {
			return err
		}
		t.Cleanup(func() { ln.Close() })
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					k, _ := io.Copy(io.Discard, c)
					got.Add(k)
				}()
			}
		}()
		return nil
	}))
	n := l.open()
	p := rules(t, modeAllow, "allow 8.8.8.8")
	p.BytesPerSecond, p.ConnsPerSecond = 64<<10, 5
	s, in := l.acquireUnder(n, p)
	// The bucket holds a second's worth and a little; datagrams over it are lost.
	sink := l.internet.listenAll(t, "8.8.8.8:7001")
	must(t, in.do(func() error {
		fd, err := unixUDP()
		if err != nil {
			return err
		}
		defer fd.close()
		for range 1000 { // 1 MB
			fd.sendBytes(netip.MustParseAddr("8.8.8.8"), 7001, make([]byte, 1000))
		}
		return nil
	}))
	in.sendUDP("8.8.8.8:7002")
	time.Sleep(100 * time.Millisecond)
	if k := sink(); k < 20 || k > 400 {
		t.Errorf("%d of 1000 datagrams of 1000 bytes passed at 64 KiB/s", k)
	}
	// New flows: 5 a second and a burst of ten.
	tap := l.internet.tap(t, "eth0")
	for i := range 100 {
		in.sendUDP(fmt.Sprintf("8.8.8.8:%d", 8000+i))
	}
	l.host.sendUDP("8.8.8.8:9")
	if k := len(tap.until(t, marker)); k > 60 {
		t.Errorf("%d of 100 new flows passed at 5 a second", k)
	}
	if _, err := n.ReadBack(context.Background(), s.ID); err != nil {
		t.Error(err)
	}
	// Without a limit of its own a slot has the node's.
	_, free := l.acquireUnder(n, rules(t, modeAllow, "allow 8.8.8.8"))
	c, err := free.dial("tcp", "8.8.8.8:7000", 3*time.Second)
	must(t, err)
	c.Write(make([]byte, 1<<20))
	c.(*net.TCPConn).CloseWrite()
	c.SetDeadline(time.Now().Add(10 * time.Second))
	c.Read(make([]byte, 1))
	c.Close()
	if got.Load() != 1<<20 {
		t.Errorf("%d bytes arrived", got.Load())
	}
}

// TestSource: packets of a slot, and what the proxy dials for it, leave with the
// address that its policy chose.
func TestSource(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone("x.test. 60 IN A 8.8.8.8")
	l.host.addr(t, "eth0", "5.5.5.77/32")
	l.opts.Sources = []netip.Addr{netip.MustParseAddr("5.5.5.77")}
	l.internet.serve(t, "8.8.8.8:7000")
	_, hits := l.internet.web(t, "8.8.8.8:80")
	n := l.open()
	from := func(in *place) string {
		t.Helper()
		c, err := in.dial("tcp", "8.8.8.8:7000", 3*time.Second)
		must(t, err)
		defer c.Close()
		c.SetDeadline(time.Now().Add(5 * time.Second))
		line, err := bufio.NewReader(c).ReadString('\n')
		must(t, err)
		return strings.Split(line, ":")[0]
	}
	last := func() string {
		hits.mu.Lock()
		defer hits.mu.Unlock()
		return strings.Split(hits.from[len(hits.from)-1], ":")[0]
	}
	p := rules(t, modeAllow, "allow 8.8.8.8:7000", "allow x.test")
	plain, out := l.acquireUnder(n, p)
	p.Source = l.opts.Sources[0]
	s, in := l.acquireUnder(n, p)
	for _, c := range []struct {
		s    *Slot
		in   *place
		want string
	}{{s, in, "5.5.5.77"}, {plain, out, "5.5.5.2"}} {
		if got := from(c.in); got != c.want {
			t.Errorf("direct: from %s, want %s", got, c.want)
		}
		c.in.resolve(t, c.s, "x.test.")
		if _, err := c.in.get(nil, "x.test", "8.8.8.8:80"); err != nil || last() != c.want {
			t.Errorf("proxied: from %s, want %s, %v", last(), c.want, err)
		}
	}
	// A restart keeps it, another policy ends it.
	n.Close()
	n2, err := Open(context.Background(), l.opts)
	must(t, err)
	defer n2.Close()
	if got := from(in); got != "5.5.5.77" {
		t.Errorf("after a restart: from %s", got)
	}
	p.Source = netip.Addr{}
	_, err = n2.SetPolicy(context.Background(), s.ID, p)
	must(t, err)
	if got := from(in); got != "5.5.5.2" {
		t.Errorf("after a change: from %s", got)
	}
}

// TestUpstream: all TCP of a slot goes through the proxy that its policy chose, and
// nothing else passes.
func TestUpstream(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone("x.test. 60 IN A 8.8.8.8")
	pool, _ := l.internet.web(t, "8.8.8.8:443", "x.test")
	l.internet.serve(t, "8.8.8.8:7000")
	var asked atomic.Int32
	must(t, l.private.do(func() error {
		ln, err := net.Listen("tcp", "10.0.0.2:3128")
		if err != nil {
			return err
		}
		t.Cleanup(func() { ln.Close() })
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					br := bufio.NewReader(c)
					line, _ := br.ReadString('\n')
					for h := line; strings.TrimSpace(h) != ""; h, _ = br.ReadString('\n') {
					}
					asked.Add(1)
					to, err := l.internet.dial("tcp", strings.Fields(line)[1], time.Second)
					if err != nil {
						return
					}
					defer to.Close()
					io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
					go io.Copy(to, br)
					io.Copy(c, to)
				}()
			}
		}()
		return nil
	}))
	u, err := url.Parse("http://10.0.0.2:3128")
	must(t, err)
	l.opts.Proxies = map[string]*url.URL{"corp": u}
	n := l.open()
	p := rules(t, modePublic, "deny 8.8.8.8:7001")
	p.Upstream = "corp"
	s, in := l.acquireUnder(n, p)
	in.resolve(t, s, "x.test.")
	if b, err := in.get(pool, "x.test", "8.8.8.8:443"); err != nil {
		t.Errorf("%q, %v", b, err)
	}
	if !in.reaches("8.8.8.8:7000") || in.reaches("8.8.8.8:7001") {
		t.Error("other ports")
	}
	if asked.Load() != 2 {
		t.Errorf("the upstream proxy was asked %d times", asked.Load())
	}
	out := l.internet.tap(t, "eth0")
	in.sendUDP("8.8.8.8:443")
	in.ping("8.8.8.8")
	l.host.sendUDP("8.8.8.8:9")
	if got := out.until(t, marker); len(got) != 0 {
		t.Errorf("past the upstream proxy: %v", got)
	}
	if _, err := n.Compile(sandbox.NetworkPolicy{Mode: modePublic, Upstream: "nope"}); sandbox.KindOf(err) != sandbox.NotFound {
		t.Errorf("no such proxy: %v", err)
	}
}

// TestLocalService: a service inside the router is for open slots alone, and knows
// who asks.
func TestLocalService(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.opts.Local = []LocalService{{Name: "cache", Port: 80}}
	n := l.open()
	ln, err := n.LocalListener("cache")
	must(t, err)
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			a := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr()
			id, owner, ok := n.SlotOf(a)
			fmt.Fprintln(c, id, owner, ok)
			c.Close()
		}
	}()
	s, in := l.acquireUnder(n, rules(t, modeAllow))
	_, closed := l.acquire(n, sandbox.NetworkNone)
	addr := netip.AddrPortFrom(n.LocalAddr(), 80).String()
	c, err := in.dial("tcp", addr, 3*time.Second)
	must(t, err)
	defer c.Close()
	if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || line != s.ID+" owner true\n" {
		t.Errorf("%q, %v", line, err)
	}
	if c, err := l.host.dial("tcp", addr, 200*time.Millisecond); err == nil {
		c.Close()
		t.Error("reached from the host")
	}
	if closed.reaches(addr) || in.reaches(netip.AddrPortFrom(n.LocalAddr(), 81).String()) {
		t.Error("reached by who may not, or on another port")
	}
	_, err = n.SetPolicy(context.Background(), s.ID, sandbox.NetworkPolicy{Mode: sandbox.NetworkNone})
	must(t, err)
	if in.reaches(addr) {
		t.Error("reached after the slot was closed")
	}
	if _, err := n.LocalListener("nope"); sandbox.KindOf(err) != sandbox.NotFound {
		t.Error(err)
	}
}
