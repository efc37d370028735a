package network

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// Finding is one thing that Check looked at.
type Finding struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail,omitempty"` // what was seen
	Effect string `json:"effect,omitempty"` // what does not work because of it; empty when OK
	Fix    string `json:"fix,omitempty"`    // what exactly to do; empty when OK
}

// Check looks at whether this host can carry a network with options o. It
// changes nothing: what it tries, it tries in a namespace that ends with it.
// The one thing it sends is a question for the root's name servers to each of
// the host's resolvers. It takes at most about 5 s.
func Check(ctx context.Context, o Options) []Finding {
	if o.Dir == "" {
		o.Dir = os.TempDir()
	}
	if o.Instance == "" {
		o.Instance = "check"
	}
	var out []Finding
	add := func(name string, err error, detail, effect, fix string) bool {
		f := Finding{Name: name, OK: err == nil, Detail: detail}
		if err != nil {
			f.Detail, f.Effect, f.Fix = err.Error(), effect, fix
			if h := sandbox.HintOf(err); h != "" {
				f.Fix = h
			}
		}
		out = append(out, f)
		return err == nil
	}
	if !add("network options", o.check(), "", "the daemon does not start", "correct the network section of the configuration") {
		return out
	}
	const none = "sandboxes have no network"
	if !add("network namespaces", tryNamespace(), "", none, "run as root, with CAP_NET_ADMIN and CAP_SYS_ADMIN, on a kernel with CONFIG_NET_NS and CONFIG_VETH (modprobe veth)") {
		return out
	}
	add("nftables", inScratch(tryNftables), "", none, "modprobe nf_tables nft_ct nft_nat nft_masq nft_fib_inet nft_limit nft_connlimit nft_reject_inet, on a kernel of version 5.10 or later")
	add("routing rules", inScratch(tryRules), "", none, "use a kernel with CONFIG_IP_MULTIPLE_TABLES")

	n := &Network{opts: o, dir: filepath.Join(o.Dir, "net")}
	if err := n.enterHost(); err != nil {
		add("host namespace", err, "", none, "correct the path of the host's network namespace")
		return out
	}
	defer n.closeFiles()
	f, err := n.readHost()
	if !add("host network", err, fmt.Sprintf("addresses %v, ways out %v", f.addrs, f.egress), none, "") {
		return out
	}
	err = nil
	if len(f.egress) == 0 {
		err = errors.New("no route to a public address")
	}
	add("way out", err, strings.Join(f.egress, ", "), "sandboxes reach nothing outside", "give the host a default route: ip route add default via GATEWAY")
	add("forwarding", n.host.do(func() error { return tryForwarding(f.egress) }), "", "sandboxes reach nothing outside", "make /proc/sys/net writable for the daemon")
	net, err := n.chooseSubnet(f)
	if _, lerr := n.host.h.LinkByName(n.uplinkName()); lerr == nil {
		err, net = nil, o.Subnet // in use, by the daemon that this is about
	}
	add("subnet", err, net.String(), "the daemon does not start", "set a free subnet in the network section of the configuration")
	err = n.host.do(otherFirewalls)
	add("other firewalls", err, "", "sandboxes reach nothing outside: the host's own firewall drops what it forwards",
		fmt.Sprintf("let it forward from and to %s, with Docker's chains: iptables -I DOCKER-USER -i %[1]s -j ACCEPT; iptables -I DOCKER-USER -o %[1]s -j ACCEPT", n.uplinkName()))
	u := n.newUpstream()
	servers, _ := u.list()
	if len(servers) == 0 {
		add("resolver", errors.New("none configured"), "", "names do not resolve in sandboxes", "name a resolver in /etc/resolv.conf or in the network section of the configuration")
	}
	for _, s := range servers {
		qctx, cancel := context.WithTimeout(ctx, 1500*time.Millisecond)
		m, err := u.askOne(qctx, s, dns.Question{Name: ".", Qtype: dns.TypeNS, Qclass: dns.ClassINET})
		cancel()
		detail := s.String()
		if err == nil {
			detail += " answers " + dns.RcodeToString[m.Rcode]
		} else {
			err = fmt.Errorf("resolver %s: %w", s, err)
		}
		add("resolver", err, detail, "names do not resolve in sandboxes, or slowly", "correct /etc/resolv.conf, or name a resolver in the network section of the configuration")
	}
	return out
}

// enterHost starts the thread in the host's namespace.
func (n *Network) enterHost() (err error) {
	if n.opts.HostNetns == "" {
		n.hostNS, err = currentNS()
	} else {
		n.hostNS, err = nsFile(n.opts.HostNetns)
	}
	if err != nil {
		return fmt.Errorf("open host namespace: %w", err)
	}
	n.host, err = startThread(n.hostNS)
	return err
}

// inScratch runs f on a thread in a namespace that ends with it.
func inScratch(f func() error) error {
	errc := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			errc <- fmt.Errorf("unshare network namespace: %w", err)
			return
		}
		errc <- f()
	}()
	return <-errc
}

func tryNamespace() error {
	return inScratch(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "a"
		if err := h.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "b"}); err != nil {
			return fmt.Errorf("make veth: %w", err)
		}
		return nil
	})
}

// tryNftables installs a table with every kind of piece that ours use.
func tryNftables() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	t := replaceTable(c, "check")
	ranges := t.rangeSet("ranges", special)
	ifs := t.set(&nftables.Set{Name: "ifs", KeyType: nftables.TypeIFName}, ifElems([]string{"a"}))
	pairs := t.set(&nftables.Set{Name: "pairs", KeyType: slotsType, Concatenation: true}, nil)
	conns := t.set(&nftables.Set{Name: "conns", KeyType: nftables.TypeIFName, Dynamic: true, Size: 16}, nil)
	rate := t.set(&nftables.Set{Name: "rate", KeyType: nftables.TypeIFName, Dynamic: true, Size: 16, HasTimeout: true, Timeout: time.Minute}, nil)
	t.chains("x")
	vm := t.set(&nftables.Set{Name: "vm", KeyType: nftables.TypeIFName, DataType: nftables.TypeVerdict, IsMap: true},
		[]nftables.SetElement{{Key: ifname("a"), VerdictData: &expr.Verdict{Kind: expr.VerdictGoto, Chain: "x"}}})
	t.hook("pre", nftables.ChainHookPrerouting, *nftables.ChainPriorityRaw, nftables.ChainPolicyDrop,
		rule(ifaceAndSource(), exprs{in(pairs, true)}, drop()),
		rule(daddrType(expr.CmpOpEq, unix.RTN_LOCAL), exprs{&expr.Notrack{}}, drop()))
	t.hook("refuse", nftables.ChainHookPrerouting, *nftables.ChainPriorityMangle, nftables.ChainPolicyAccept,
		rule(l4proto(unix.IPPROTO_TCP), exprs{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}}))
	t.hook("fwd", nftables.ChainHookForward, *nftables.ChainPriorityFilter, nftables.ChainPolicyDrop,
		rule(iifIn(ifs, false), daddrIn(ranges), ctState(expr.CtStateBitNEW), drop()),
		rule(oifGroup(expr.CmpOpNeq, uplinkGroup), drop()),
		rule(perIface(conns, &expr.Connlimit{Count: 1, Flags: expr.NFT_CONNLIMIT_F_INV}), drop()),
		rule(perIface(rate, &expr.Limit{Type: expr.LimitTypePkts, Rate: 1, Unit: expr.LimitTimeSecond, Burst: 1, Over: true}), drop()),
		exprs{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Lookup{SourceRegister: 1, DestRegister: 0, IsDestRegSet: true, SetName: vm.Name, SetID: vm.ID}})
	flowLogRules(t)
	t.base("proxy", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, *nftables.ChainPriorityNATDest, nftables.ChainPolicyAccept, rule(ctStatus(ipsDstNAT), exprs{
		&expr.Immediate{Register: 1, Data: []byte{127, 0, 0, 1}},
		&expr.Immediate{Register: 2, Data: binaryutil.BigEndian.PutUint16(proxyPort)},
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: unix.NFPROTO_IPV4, RegAddrMin: 1, RegProtoMin: 2},
	}))
	t.base("nat", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, *nftables.ChainPriorityNATSource, nftables.ChainPolicyAccept, exprs{&expr.Masq{}})
	if t.err != nil {
		return t.err
	}
	return c.Flush()
}

func tryRules() error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	r := netlink.NewRule()
	r.Family, r.Priority, r.Table, r.IifName = netlink.FAMILY_V4, 10, slotRoutes, "lo"
	if err := h.RuleAdd(r); err != nil {
		return fmt.Errorf("add routing rule: %w", err)
	}
	return h.RouteAdd(&netlink.Route{Table: slotRoutes, Type: unix.RTN_BLACKHOLE, Dst: ipNet(netip.MustParsePrefix("10.0.0.0/8"))})
}

// tryForwarding opens the flags for writing, without writing.
func tryForwarding(egress []string) error {
	for _, ifc := range append([]string{"default"}, egress...) {
		f, err := os.OpenFile("/proc/sys/net/ipv4/conf/"+ifc+"/forwarding", os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		f.Close()
	}
	return nil
}

// otherFirewalls finds chains of others that drop forwarded packets unless told
// otherwise: ours can only forbid more, not allow against them.
func otherFirewalls() error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	chains, err := c.ListChains()
	if err != nil {
		return nil // no nftables here is another finding's business
	}
	var names []string
	for _, ch := range chains {
		if ch.Hooknum == nil || *ch.Hooknum != *nftables.ChainHookForward || ch.Policy == nil || *ch.Policy != nftables.ChainPolicyDrop {
			continue
		}
		switch ch.Table.Family {
		case nftables.TableFamilyIPv4, nftables.TableFamilyINet:
			names = append(names, ch.Table.Name+" "+ch.Name)
		}
	}
	if len(names) > 0 {
		slices.Sort(names)
		return fmt.Errorf("these chains drop what the host forwards unless they have a rule for it: %s", strings.Join(names, ", "))
	}
	return nil
}
