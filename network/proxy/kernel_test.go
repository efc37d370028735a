package proxy

import (
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The kernel tells where a redirected connection was going, and knows nothing of one
// that was not.
func TestOriginalDst(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root, for a network namespace")
	}
	type result struct {
		dst, direct netip.AddrPort
		directErr   error
		err         error
	}
	done := make(chan result)
	go func() {
		// The thread is in another namespace and dies with this goroutine.
		runtime.LockOSThread()
		var r result
		defer func() { done <- r }()
		if r.err = unix.Unshare(unix.CLONE_NEWNET); r.err != nil {
			return
		}
		h, err := netlink.NewHandle()
		if err != nil {
			r.err = err
			return
		}
		defer h.Close()
		lo, err := h.LinkByName("lo")
		if err == nil {
			err = h.LinkSetUp(lo)
		}
		if err == nil {
			err = h.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, Scope: unix.RT_SCOPE_LINK})
		}
		if err != nil {
			r.err = err
			return
		}
		ln, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			r.err = err
			return
		}
		defer ln.Close()
		if r.err = redirect(addrPort(ln.Addr())); r.err != nil {
			return
		}
		ask := func(to string) (netip.AddrPort, error, error) {
			c, err := net.DialTimeout("tcp4", to, 5*time.Second)
			if err != nil {
				return netip.AddrPort{}, nil, err
			}
			defer c.Close()
			s, err := ln.Accept()
			if err != nil {
				return netip.AddrPort{}, nil, err
			}
			defer s.Close()
			dst, err := originalDst(s)
			return dst, err, nil
		}
		var derr error
		if r.dst, derr, r.err = ask("93.184.216.34:443"); r.err == nil {
			r.err = derr
		}
		if r.err == nil {
			r.direct, r.directErr, r.err = ask(ln.Addr().String())
		}
	}()
	r := <-done
	if r.err != nil {
		t.Fatal(r.err)
	}
	if r.dst != at(addrA, 443) {
		t.Errorf("redirected: %s", r.dst)
	}
	// connection tracking answers with the listener's own address, or not at all
	if r.directErr == nil && r.direct.Addr() != netip.MustParseAddr("127.0.0.1") {
		t.Errorf("direct: %s", r.direct)
	}
}

// redirect sends TCP to port 443 to another address.
func redirect(to netip.AddrPort) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	tbl := c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "t"})
	ch := c.AddChain(&nftables.Chain{Name: "o", Table: tbl, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityNATDest})
	a := to.Addr().As4()
	c.AddRule(&nftables.Rule{Table: tbl, Chain: ch, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binaryutil.BigEndian.PutUint16(443)},
		&expr.Immediate{Register: 1, Data: a[:]},
		&expr.Immediate{Register: 2, Data: binaryutil.BigEndian.PutUint16(to.Port())},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1, RegProtoMin: 2},
	}})
	return c.Flush()
}
