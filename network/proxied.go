package network

import (
	"context"
	"net"
	"net/netip"
	"net/url"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/network/policy"
	"vivarium/network/proxy"
)

// startProxy listens where redirected connections arrive. When nobody does, they
// are refused: nothing goes past the proxy for want of it.
func (n *Network) startProxy() error {
	addr := net.TCPAddrFromAddrPort(netip.AddrPortFrom(n.proxyAddr(), proxyPort))
	var ln net.Listener
	err := n.dialer.do(func() (err error) { ln, err = net.ListenTCP("tcp4", addr); return })
	if err != nil {
		return err
	}
	n.proxy, err = proxy.Serve(proxy.Options{
		Listener: ln,
		Slot:     n.proxySlot,
		Dial: func(ctx context.Context, s proxy.Slot, dst netip.AddrPort) (net.Conn, error) {
			return n.dialFor(ctx, s.(*proxied).s, dst)
		},
		DialUpstream: n.dialUpstream,
		Log:          n.flows.proxied,
	})
	return err
}

func (n *Network) stopProxy() {
	if n.proxy != nil {
		n.proxy.Close()
	}
}

// proxied is a slot as the proxy sees it.
type proxied struct {
	n *Network
	s *slot
}

func (n *Network) proxySlot(a netip.Addr) proxy.Slot {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := n.byAddr[a]
	if s == nil || s.pol.Load() == nil {
		return nil
	}
	return &proxied{n, s}
}

func (p *proxied) ID() string                  { return p.s.ID }
func (p *proxied) Names(a netip.Addr) []string { return p.s.pins.of(a) }
func (p *proxied) Policy() *policy.Policy      { return p.s.pol.Load() }

func (p *proxied) Decide(f policy.Flow) policy.Verdict {
	pol := p.s.pol.Load()
	if pol == nil {
		return policy.Verdict{Rule: "the slot is closed"}
	}
	return pol.Decide(f, p.n.hostAddrs()...)
}

func (p *proxied) Injector() proxy.Injector {
	if i := p.s.injector.Load(); i != nil {
		return *i
	}
	return nil
}

func (p *proxied) Upstream() *url.URL {
	if pol := p.s.pol.Load(); pol != nil && pol.Upstream != "" {
		return p.n.opts.Proxies[pol.Upstream]
	}
	return nil
}

// dialUpstream connects to an upstream proxy, from the host's namespace and
// wherever it is: the operator chose it.
func (n *Network) dialUpstream(ctx context.Context, _ proxy.Slot, u *url.URL) (net.Conn, error) {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	if port == "" {
		port = "1080"
	}
	host := u.Hostname()
	if _, err := netip.ParseAddr(host); err != nil {
		addrs, err := n.Lookup(ctx, host)
		if err != nil {
			return nil, err
		}
		host = addrs[0].String()
	}
	return n.dialHost(ctx, "tcp4", net.JoinHostPort(host, port))
}

// dialFor connects for a slot from inside the router, where rules and routes judge
// the connection once more. Its source is the slot's gateway: so the host can tell
// whose it is, and when the slot goes, so does the address.
func (n *Network) dialFor(ctx context.Context, s *slot, dst netip.AddrPort) (net.Conn, error) {
	var fd int
	err := n.dialer.do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), "dial")
	defer f.Close() // net.FileConn has one of its own
	for _, o := range []struct{ level, opt, value int }{
		{unix.SOL_SOCKET, unix.SO_MARK, dialMark},
		{unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1},
		{unix.SOL_TCP, unix.TCP_NODELAY, 1},
	} {
		if err := unix.SetsockoptInt(fd, o.level, o.opt, o.value); err != nil {
			return nil, os.NewSyscallError("setsockopt", err)
		}
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: s.gw.As4()}); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	err = unix.Connect(fd, &unix.SockaddrInet4{Addr: dst.Addr().As4(), Port: int(dst.Port())})
	if err == unix.EINPROGRESS {
		err = waitConnect(ctx, f)
	}
	if err != nil {
		return nil, os.NewSyscallError("connect", err)
	}
	return net.FileConn(f)
}

// waitConnect waits until a connection is made or ctx ends.
func waitConnect(ctx context.Context, f *os.File) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(time.Unix(1, 0)) })
	defer stop()
	var soerr error
	err = rc.Write(func(fd uintptr) bool {
		v, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		switch {
		case err != nil:
			soerr = err
		case v != 0:
			soerr = unix.Errno(v)
		default:
			// A socket that is still connecting has no peer.
			if _, err := unix.Getpeername(int(fd)); err != nil {
				return false
			}
		}
		return true
	})
	if err == nil {
		err = soerr
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}
