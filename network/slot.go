package network

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"vivarium/network/policy"
	"vivarium/network/proxy"
	"vivarium/sandbox"
)

// Slot is one sandbox's network.
type Slot struct {
	// ID is unique for the life of Dir, never used again.
	ID string
	// NetnsPath is the bind mount of the slot's network namespace. It holds an
	// up loopback and eth0 with Addr/Bits, a default route via Gateway, and a
	// permanent neighbour entry for Gateway.
	NetnsPath string
	Addr      netip.Addr
	Bits      int
	Gateway   netip.Addr
	// DNS is the only resolver that answers.
	DNS netip.Addr
	// MAC is eth0's address.
	MAC net.HardwareAddr
	// HostVeth is the other end of eth0, in the router namespace.
	HostVeth string
	// MTU of eth0 in bytes.
	MTU int
	// Applied is the policy in force when the slot was handed out.
	Applied sandbox.AppliedPolicy
}

// slotMeta is what a slot's directory keeps; the rest is derived from N or read
// from the kernel. Its presence says that the slot was made completely.
type slotMeta struct {
	ID     string     `json:"id"`
	N      uint32     `json:"n"`
	Owner  string     `json:"owner,omitempty"` // empty: in the pool
	Policy slotPolicy `json:"policy"`
}

type slot struct {
	slotMeta
	policy  *policy.Policy // in force; changed by use
	dir     string
	veth    string
	addr    netip.Addr
	gw      netip.Addr
	dns     *dnsClient
	dropped time.Time // when its namespace was let go; used by tend
	busy    bool      // a policy change or release is under way; guarded by Network.mu
	opened  bool      // something may have passed; guarded by Network.mu

	// pol is what DNS and proxy go by; nil while the slot is closed.
	pol      atomic.Pointer[policy.Policy]
	injector atomic.Pointer[proxy.Injector]
	pins     *pins
	// kernel is what the rules hold, next what they may hold besides since a
	// transaction failed. They are changed by who made the slot busy, on the
	// router's thread.
	kernel, next *slotKernel
	source       netip.Addr // in the host's table; invalid: none
	closed       bool       // for good; of who made the slot busy
}

// use makes p the slot's policy in memory. The caller holds Network.mu.
func (s *slot) use(p *policy.Policy) {
	s.opened = s.opened || opens(p.Mode)
	s.policy, s.Policy = p, slotPolicy{Mode: p.Mode}
}

const (
	netnsFile = "netns"
	metaFile  = "meta.json"
	// firstSlot is the offset of the first slot's pair of addresses.
	firstSlot = 8
)

func (n *Network) maxSlots() uint32 { return (uint32(1)<<(32-n.subnet.Bits()) - firstSlot) / 2 }

func (n *Network) slotsDir() string { return filepath.Join(n.dir, "slots") }

func (n *Network) vethName(i uint32) string {
	return "v" + n.opts.Instance + "-" + strconv.FormatUint(uint64(i), 10)
}

func (n *Network) newSlot(m slotMeta) *slot {
	s := &slot{slotMeta: m, dir: filepath.Join(n.slotsDir(), m.ID), veth: n.vethName(m.N)}
	s.gw, s.addr = n.addr(firstSlot+2*m.N), n.addr(firstSlot+2*m.N+1)
	s.pins = newPins()
	s.dns = newDNSClient(s, n.opts.DNSRate)
	s.use(n.none)
	return s
}

// macs are locally administered and derived from the address: the slot's end
// and the router's.
func (s *slot) macs() (inside, router net.HardwareAddr) {
	b := s.addr.As4()
	return net.HardwareAddr{0x02, 0x76, b[0], b[1], b[2], b[3]}, net.HardwareAddr{0x06, 0x76, b[0], b[1], b[2], b[3]}
}

func (s *slot) netns() string { return filepath.Join(s.dir, netnsFile) }

func (n *Network) export(s *slot) *Slot {
	in, _ := s.macs()
	return &Slot{ID: s.ID, NetnsPath: s.netns(), Addr: s.addr, Bits: 31, Gateway: s.gw, DNS: n.dnsAddr(),
		MAC: in, HostVeth: s.veth, MTU: n.mtu, Applied: applied(s.policy)}
}

// metaSize is the length of a slot's record on disk, padded with spaces.
const metaSize = 1024

// saveMeta overwrites the slot's record in one write of one length, which a
// killed daemon has done wholly or not at all. It is not synced: what takes
// unwritten pages away takes the kernel's side of the slot away as well.
func (s *slot) saveMeta() error {
	b, err := json.Marshal(s.slotMeta)
	if err != nil {
		return err
	}
	if len(b) > metaSize {
		return sandbox.Invalid.Errorf("slot record of %d bytes is too long", len(b))
	}
	b = append(b, bytes.Repeat([]byte{' '}, metaSize-len(b))...)
	f, err := os.OpenFile(filepath.Join(s.dir, metaFile), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Close())
}

// makeSlot makes slot number i, closed. On error nothing is left of it.
func (n *Network) makeSlot(i uint32) (_ *slot, err error) {
	var r [4]byte
	rand.Read(r[:])
	s := n.newSlot(slotMeta{ID: fmt.Sprintf("s%d-%s", i, hex.EncodeToString(r[:])), N: i})
	if err := os.Mkdir(s.dir, 0o700); err != nil {
		return nil, fmt.Errorf("make slot directory: %w", err)
	}
	defer func() {
		if err != nil {
			n.unmakeSlot(s)
		}
	}()
	err = newNetns(s.netns(), func(ns *os.File) error { return n.wireSlot(s, ns) })
	if err != nil {
		return nil, fmt.Errorf("make slot: %w", err)
	}
	err = n.router.nft(func(c *nftables.Conn) error { return c.SetAddElements(setSlots(), slotKey(s)) })
	if err == nil {
		err = n.opts.reach("slot: register")
	}
	if err != nil {
		n.raise()
		return nil, fmt.Errorf("register slot: %w", err)
	}
	err = s.saveMeta()
	if err == nil {
		err = n.opts.reach("slot: save")
	}
	if err != nil {
		return nil, fmt.Errorf("save slot: %w", err)
	}
	return s, nil
}

// wireSlot runs on a thread inside the new namespace.
func (n *Network) wireSlot(s *slot, ns *os.File) error {
	in, out := s.macs()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr, attrs.Group = s.veth, n.mtu, out, slotGroup
	rh := n.router.h
	err := rh.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerHardwareAddr: in, PeerNamespace: netlink.NsFd(ns.Fd())})
	if err != nil {
		return fmt.Errorf("make veth: %w", err)
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	rl, err := rh.LinkByName(s.veth)
	if err != nil {
		return fmt.Errorf("find veth: %w", err)
	}
	eth0, err := h.LinkByName("eth0")
	if err != nil {
		return fmt.Errorf("find eth0: %w", err)
	}
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find loopback: %w", err)
	}
	pair := func(a netip.Addr) *netlink.Addr { return &netlink.Addr{IPNet: ipNet31(a)} }
	neigh := func(index int, a netip.Addr, mac net.HardwareAddr) *netlink.Neigh {
		return &netlink.Neigh{LinkIndex: index, Family: unix.AF_INET, State: unix.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: mac}
	}
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"bring loopback up", func() error { return h.LinkSetUp(lo) }},
		{"set router address", func() error { return rh.AddrAdd(rl, pair(s.gw)) }},
		{"give veth a queue", func() error { return n.slow.do(func() error { return enableGRO(s.veth) }) }},
		{"bring veth up", func() error { return rh.LinkSetUp(rl) }},
		// Permanent entries: nobody has to ask, and no answer can change them.
		{"set router neighbour", func() error { return rh.NeighSet(neigh(rl.Attrs().Index, s.addr, in)) }},
		{"set address", func() error { return h.AddrAdd(eth0, pair(s.addr)) }},
		{"bring eth0 up", func() error { return h.LinkSetUp(eth0) }},
		{"set neighbour", func() error { return h.NeighSet(neigh(eth0.Attrs().Index, s.gw, out)) }},
		{"set default route", func() error {
			return h.RouteAdd(&netlink.Route{LinkIndex: eth0.Attrs().Index, Gw: s.gw.AsSlice()})
		}},
	} {
		err := step.do()
		if err == nil {
			err = n.opts.reach("slot: " + step.what)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return nil
}

func ipNet31(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(31, 32)}
}

// closeSlots takes every permission of slots away in one transaction.
func (n *Network) closeSlots(ss ...*slot) error {
	now := time.Now()
	err := n.router.do(func() error {
		err := n.router.withNft(func(c *nftables.Conn) error {
			for _, s := range ss {
				if err := (change{setSlots(), slotKey(s)}).apply(c, false); err != nil {
					return err
				}
				for _, e := range n.presence(s, s.kernel) {
					if err := e.apply(c, false); err != nil {
						return err
					}
				}
				d := s.pins.diff(nil)
				if err := d.queue(c, s, now); err != nil {
					return err
				}
			}
			return c.Flush()
		})
		if err == nil {
			for _, s := range ss {
				if s.kernel != nil {
					n.usePrograms(s.kernel.program, nil)
				}
				s.kernel = nil
			}
		}
		return err
	})
	for _, s := range ss {
		s.pins.shut()
		if err != nil || s.next != nil {
			n.closeByForce(s)
		}
	}
	return err
}

// closeByForce takes away whatever a slot may have in the kernel, one by one,
// where it is not known what that is.
func (n *Network) closeByForce(s *slot) {
	for _, k := range []*slotKernel{s.kernel, s.next} {
		for _, e := range append(n.presence(s, k), change{setSlots(), slotKey(s)}) {
			for _, el := range e.elems {
				_ = n.router.nft(func(c *nftables.Conn) error { // it may be gone already
					return c.SetDeleteElements(e.set, []nftables.SetElement{{Key: el.Key}})
				})
			}
		}
	}
}

// Groups mark interfaces in the router, so that many can be removed at once:
// one by one it takes some 20 ms each.
const (
	slotGroup  = 0x736c74
	strayGroup = 0x736c75
)

// removeGroup removes all interfaces of a group in the router.
func (n *Network) removeGroup(group uint32) error {
	return n.slow.do(func() error {
		req := nl.NewNetlinkRequest(unix.RTM_DELLINK, unix.NLM_F_ACK)
		req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
		req.AddData(nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(group)))
		_, err := req.Execute(unix.NETLINK_ROUTE, 0)
		if err != nil && !isNotFound(err) {
			return fmt.Errorf("remove interfaces of slots: %w", err)
		}
		return nil
	})
}

// unmakeSlot removes every trace of s from kernel and disk, except entries in
// connection tracking. Parts that are missing are no error.
func (n *Network) unmakeSlot(s *slot) error {
	var errs []error
	if err := os.Remove(filepath.Join(s.dir, metaFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		errs = append(errs, err)
	}
	if err := n.closeSlots(s); err != nil {
		errs = append(errs, fmt.Errorf("close slot: %w", err))
	}
	if l, err := n.router.h.LinkByName(s.veth); err == nil {
		if err := n.router.h.LinkDel(l); err != nil && !isNotFound(err) {
			errs = append(errs, fmt.Errorf("remove veth: %w", err))
		}
	} else if !isNotFound(err) {
		errs = append(errs, fmt.Errorf("find veth: %w", err))
	}
	if err := dropSlotDir(s.dir); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func dropSlotDir(dir string) error {
	if err := dropNetns(filepath.Join(dir, netnsFile)); err != nil {
		return err
	}
	for _, f := range []string{metaFile, pinsFile, pinsFile + ".tmp"} {
		if err := os.Remove(filepath.Join(dir, f)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// loadSlots reads the slots that were made completely and still stand, and
// removes what remains of others. It runs before anything else uses n.
func (n *Network) loadSlots() error {
	entries, err := os.ReadDir(n.slotsDir())
	if err != nil {
		return fmt.Errorf("list slots: %w", err)
	}
	links, err := dump(n.router.h.LinkList)
	if err != nil {
		return fmt.Errorf("list router links: %w", err)
	}
	stray := map[string]netlink.Link{}
	for _, l := range links {
		if strings.HasPrefix(l.Attrs().Name, "v"+n.opts.Instance+"-") {
			stray[l.Attrs().Name] = l
		}
	}
	for _, e := range entries {
		dir := filepath.Join(n.slotsDir(), e.Name())
		s := n.loadSlot(dir, e.Name())
		if s == nil || stray[s.veth] == nil {
			if err := dropSlotDir(dir); err != nil {
				return fmt.Errorf("remove half-made slot: %w", err)
			}
			continue
		}
		delete(stray, s.veth)
		n.slots[s.ID], n.byAddr[s.addr] = s, s
		n.used[s.N] = true
		n.next = max(n.next, s.N+1)
	}
	for _, l := range stray {
		if err := n.router.h.LinkSetGroup(l, strayGroup); err != nil && !isNotFound(err) {
			return fmt.Errorf("mark stray interface: %w", err)
		}
	}
	if len(stray) > 0 {
		if err := n.removeGroup(strayGroup); err != nil {
			return err
		}
	}
	// The daemon before us may have died between the end of a slot and that of
	// its flows.
	live := map[netip.Addr]bool{}
	for _, s := range n.slots {
		live[s.addr] = true
	}
	err = n.forget(func(a netip.Addr) bool {
		return n.subnet.Contains(a) && u32(a)-u32(n.subnet.Addr()) >= firstSlot && !live[a]
	})
	if err != nil {
		return fmt.Errorf("forget flows of former slots: %w", err)
	}
	return nil
}

// loadSlot returns nil for what is not a whole slot.
func (n *Network) loadSlot(dir, name string) *slot {
	b, err := os.ReadFile(filepath.Join(dir, metaFile))
	if err != nil {
		return nil
	}
	var m slotMeta
	if json.Unmarshal(b, &m) != nil || m.ID != name || m.N >= n.maxSlots() || n.used[m.N] {
		return nil
	}
	ns, err := nsFile(filepath.Join(dir, netnsFile))
	if err != nil {
		return nil
	}
	ns.Close()
	s := n.newSlot(m)
	if p := n.loadPolicy(s, m.Policy); opens(p.Mode) || !opens(m.Policy.Mode) {
		s.use(p)
		s.Policy.File = m.Policy.File
	}
	s.pins.load(dir)
	return s
}
