package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"vivarium/network/policy"
	"vivarium/network/proxy"
	"vivarium/sandbox"
)

// tendEvery is how often the host is looked at for changes: a new way out, a
// new address of its own, rules or flags that somebody took away.
const tendEvery = 5 * time.Second

// Network is one daemon's network on this host. Its methods may be called from
// several goroutines at once.
type Network struct {
	opts   Options
	dir    string
	log    *slog.Logger
	lock   *os.File // Dir belongs to one daemon at a time
	cookie uint64   // of the host namespace

	host, router *nsThread
	counters     *counterReader // of the watcher's thread alone
	slow         *nsThread      // also in the router, for what waits for the kernel's big network lock
	dialer       *nsThread      // also in the router, makes the sockets of proxy and local services
	watcher      *nsThread      // also in the router, reads counters
	hostNS       *os.File
	routerNS     *os.File
	uplink, up0  netlink.Link
	subnet       netip.Prefix
	mtu          int  // bytes, of every link
	fresh        bool // Open found nothing of an earlier daemon
	dns          *dnsServer
	proxy        *proxy.Server
	flows        *flowLog
	saved        savedPolicies
	none         *policy.Policy
	hosts        atomic.Pointer[[]netip.Addr] // the host's own addresses
	listings     map[string]listing           // of our tables, as they should be; of the router's thread alone
	progs        map[string]*program          // of the router's thread alone

	ctx       context.Context
	cancel    context.CancelFunc
	wake      chan struct{}
	alarm     chan struct{} // rules were found missing or altered
	altered   atomic.Bool   // the router's, when they were last read back
	tended    chan struct{}
	watched   chan struct{}
	wakeFlows chan chan struct{} // those who want the counters now; closed when they were read
	last      chan chan struct{} // closed when all counters were read and told

	ops sync.WaitGroup // calls under way; Close and Destroy wait for them

	// rules is held for reading by what adds or changes one slot, in the kernel
	// and in memory, and for writing by what replaces the whole router table
	// from memory. It comes before mu.
	rules sync.RWMutex

	// mu guards what follows, and busy, Owner and Policy of each slot. Who made
	// a slot busy may read the latter two without it.
	mu     sync.Mutex
	closed bool
	facts  hostFacts
	lent   []string
	slots  map[string]*slot
	byAddr map[netip.Addr]*slot
	pool   []*slot
	dead   []*slot         // released, closed, to be destroyed
	used   map[uint32]bool // numbers in use or not yet forgotten
	next   uint32

	dying  []*slot   // their interfaces may still be there; used by tend
	buried time.Time // when they were last looked at; used by tend
}

// state is what must be known before the kernel can be asked.
type state struct {
	Instance string       `json:"instance"`
	Subnet   netip.Prefix `json:"subnet"`
}

// Open makes the network or, if an earlier daemon left it, takes it over as it
// stands: slots in use keep their policy and their flows. Slots that nobody
// claims by Reconcile stay until it is called.
// Errors: Invalid (options), Conflict (Dir, instance or subnet is in use),
// Exhausted (no free subnet), Internal (the kernel refused).
func Open(ctx context.Context, o Options) (*Network, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	none, err := o.Compile(sandbox.NetworkPolicy{Mode: sandbox.NetworkNone})
	if err != nil {
		return nil, err
	}
	n := &Network{opts: o, none: none, dir: filepath.Join(o.Dir, "net"), log: o.Logger,
		slots: map[string]*slot{}, byAddr: map[netip.Addr]*slot{}, progs: map[string]*program{}, flows: newFlowLog(), used: map[uint32]bool{}, wake: make(chan struct{}, 1), alarm: make(chan struct{}, 1),
		tended: make(chan struct{}), watched: make(chan struct{}), wakeFlows: make(chan chan struct{}), last: make(chan chan struct{})}
	if err := n.open(ctx); err != nil {
		if n.fresh {
			// Nothing of it was there before and nobody uses it.
			err = errors.Join(err, n.teardown(context.WithoutCancel(ctx)))
		}
		n.closeFiles()
		if sandbox.KindOf(err) == sandbox.Internal {
			return nil, sandbox.Internal.Errorf("open network: %w", err)
		}
		return nil, fmt.Errorf("open network: %w", err)
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	go n.tend()
	go n.watch()
	n.wakeUp()
	return n, nil
}

func (n *Network) open(ctx context.Context) (err error) {
	if err := os.MkdirAll(n.slotsDir(), 0o700); err != nil {
		return err
	}
	if n.lock, err = os.OpenFile(filepath.Join(n.dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600); err != nil {
		return err
	}
	lctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	if err := flock(lctx, n.lock); err != nil {
		return sandbox.Conflict.Errorf("network directory %s is in use by another daemon: %w", n.dir, err)
	}
	if err := n.enterHost(); err != nil {
		return err
	}
	if err := n.host.do(func() (err error) { n.cookie, err = netnsCookie(); return }); err != nil {
		return fmt.Errorf("identify host namespace: %w", err)
	}
	r, err := lockRegistry(ctx, n.cookie)
	if err != nil {
		return err
	}
	defer r.unlock()
	if n.facts, err = n.readHost(); err != nil {
		return err
	}
	addrs := n.facts.addrs
	n.hosts.Store(&addrs)
	n.mtu = n.facts.mtu
	n.boundConns()
	if err := n.loadState(); err != nil {
		return err
	}
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"make router", n.ensureRouter},
		{"configure router", func() error { return n.router.do(routerSysctls) }},
		{"make uplink", n.ensureUplink},
		{"open policies", n.openPolicies},
		{"load slots", n.loadSlots},
		{"read counters", n.takeCounters},
	} {
		if err := n.run(step.name, step.do); err != nil {
			return err
		}
	}
	if err := n.rebuild(r); err != nil {
		return err
	}
	for _, s := range n.slots {
		if s.Owner == "" {
			n.pool = append(n.pool, s)
		}
		n.dns.set(s.addr, s.dns, s.policy)
	}
	return nil
}

// run does one step of opening.
func (n *Network) run(name string, do func() error) error {
	err := do()
	if err == nil {
		err = n.opts.reach(name)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// loadState fixes instance and subnet for the life of Dir. The record is
// written before anything it names is made.
func (n *Network) loadState() error {
	path := filepath.Join(n.dir, "state.json")
	b, err := os.ReadFile(path)
	if err == nil {
		var st state
		if err := json.Unmarshal(b, &st); err != nil {
			return sandbox.Conflict.Errorf("read %s: %w", path, err).WithHint("move %s away", n.dir)
		}
		if st.Instance != n.opts.Instance {
			return sandbox.Conflict.Errorf("%s belongs to instance %q, not %q", n.dir, st.Instance, n.opts.Instance)
		}
		// A reboot, or somebody's new route, can have taken the subnet; with
		// the uplink standing it is ours by definition.
		_, uerr := n.host.h.LinkByName(n.uplinkName())
		want := n.opts.Subnet
		if st.Subnet.IsValid() && (uerr == nil || (!want.IsValid() || want == st.Subnet) && !overlapsAny(n.facts.taken, st.Subnet)) {
			if want.IsValid() && want != st.Subnet {
				return sandbox.Conflict.Errorf("subnet is %s, not %s, while the network stands", st.Subnet, want).
					WithHint("stop all sandboxes and destroy the network first")
			}
			n.subnet = st.Subnet
			return nil
		}
	} else if !errors.Is(err, os.ErrNotExist) {
		return err
	} else {
		if _, err := n.host.h.LinkByName(n.uplinkName()); err == nil {
			return sandbox.Conflict.Errorf("instance %q is in use by another data directory", n.opts.Instance).
				WithHint("choose another instance, or remove what is left of it: ip link delete %s; ip netns delete viv-%s", n.uplinkName(), n.opts.Instance)
		}
		if ns, err := nsFile(n.routerPath()); err == nil {
			ns.Close()
			return sandbox.Conflict.Errorf("instance %q is in use by another data directory", n.opts.Instance).
				WithHint("choose another instance, or remove what is left of it: ip netns delete viv-%s", n.opts.Instance)
		}
	}
	if n.subnet, err = n.chooseSubnet(n.facts); err != nil {
		return err
	}
	n.fresh = true
	if b, err = json.Marshal(state{n.opts.Instance, n.subnet}); err != nil {
		return err
	}
	return writeFile(path, b)
}

// replaceFile replaces path whole, without waiting for the disk.
func replaceFile(path string, b []byte) error {
	if err := os.WriteFile(path+".tmp", b, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

// writeFile replaces path durably.
func writeFile(path string, b []byte) error {
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// rebuild puts all rules, addresses, routes and flags in place, rules first,
// and starts DNS. It is the same for a new network and one that is taken over.
func (n *Network) rebuild(r *registry) error {
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"evaluate policies", n.reevaluate},
		{"note forwarding", func() (err error) { n.lent, err = n.ensureForwarding(r, n.facts.egress); return }},
		{"install host table", func() error { return n.installHost(n.facts, n.lent) }},
		{"install router table", n.installRouter},
		{"configure uplink", n.configureHost},
		{"configure routes", n.configureRouter},
		{"forward uplink", n.forwardUplink},
		{"cut flows", n.cutAll},
		{"start proxy", n.startProxy},
		{"start DNS", n.startDNS},
		{"forward host", func() error { return n.forward(n.facts.egress) }},
	} {
		if err := n.run(step.name, step.do); err != nil {
			return err
		}
	}
	return nil
}

// forwardUplink lets the router forward what comes in from outside. Slots'
// interfaces forward from the start.
func (n *Network) forwardUplink() error {
	return n.slow.do(func() error {
		const flag = "ipv4/conf/" + routerUplink + "/forwarding"
		if v, err := getSysctl(flag); err == nil && v == "1" {
			return nil
		}
		return setSysctl(flag, "1")
	})
}

// refresh repairs what others changed and follows changes of the host.
func (n *Network) refresh() error {
	ctx, cancel := context.WithTimeout(n.ctx, 10*time.Second)
	defer cancel()
	n.dns.reload()
	f, err := n.readHost()
	if err != nil {
		return err
	}
	r, err := lockRegistry(ctx, n.cookie)
	if err != nil {
		return err
	}
	defer r.unlock()
	lent, err := n.ensureForwarding(r, f.egress)
	if err != nil {
		return err
	}
	hostOK, err := n.host.hasTables(n.hostTable())
	if err != nil {
		return err
	}
	routerOK, err := n.router.hasTables(routerTable, gateTable)
	if err != nil {
		return err
	}
	if !hostOK || !routerOK {
		n.log.Error("rules were removed by somebody else; putting them back", "host", !hostOK, "router", !routerOK)
	}
	if n.altered.Swap(false) && routerOK {
		n.log.Error("the router's rules were altered by somebody else; replacing them")
		routerOK = false
	}
	n.mu.Lock()
	hostSame := slices.Equal(f.egress, n.facts.egress) && slices.Equal(lent, n.lent)
	addrsSame := slices.Equal(f.addrs, n.facts.addrs)
	n.facts, n.lent = f, lent
	n.hosts.Store(&f.addrs)
	n.mu.Unlock()
	if !hostOK || !hostSame {
		if err := n.installHost(f, lent); err != nil {
			return fmt.Errorf("install host table: %w", err)
		}
	}
	if !routerOK {
		n.rules.Lock()
		n.mu.Lock()
		err := n.installRouter()
		n.mu.Unlock()
		n.rules.Unlock()
		if err != nil {
			n.altered.Store(true)
			return fmt.Errorf("install router table: %w", err)
		}
	} else if !addrsSame {
		err := n.router.nft(func(c *nftables.Conn) error {
			c.FlushSet(setHost())
			return addElements(c, setHost(), addrElems(f.addrs))
		})
		if err != nil {
			return fmt.Errorf("update host addresses: %w", err)
		}
	}
	// The rest is cheap to put in place again whether it is missing or not.
	if err := n.ensureUplink(); err != nil {
		return err
	}
	if err := n.configureHost(); err != nil {
		return err
	}
	if err := n.configureRouter(); err != nil {
		return err
	}
	if err := n.forwardUplink(); err != nil {
		return err
	}
	if err := n.dropPrograms(); err != nil {
		return fmt.Errorf("remove unused rules: %w", err)
	}
	if err := n.dropPolicies(); err != nil {
		return fmt.Errorf("remove unused policies: %w", err)
	}
	return n.forward(f.egress)
}

// enter begins a call, which must end with n.ops.Done.
func (n *Network) enter() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return sandbox.Unavailable.Errorf("network: closed")
	}
	n.ops.Add(1)
	return nil
}

// Close ends the daemon's part. Everything in the kernel stays for the running
// sandboxes; DNS stops answering.
func (n *Network) Close() {
	n.mu.Lock()
	was := n.closed
	n.closed = true
	n.mu.Unlock()
	if was {
		return
	}
	n.cancel()
	<-n.tended
	<-n.watched
	n.ops.Wait()
	n.closeFiles()
}

func (n *Network) closeFiles() {
	if n.dns != nil {
		n.dns.stop()
	}
	n.stopProxy()
	if n.counters != nil {
		n.counters.c.Close()
	}
	for _, t := range []*nsThread{n.router, n.slow, n.dialer, n.watcher, n.host} {
		if t != nil {
			t.stop()
		}
	}
	for _, f := range []*os.File{n.routerNS, n.hostNS, n.lock} {
		if f != nil {
			f.Close()
		}
	}
}

// Destroy ends everything: slots, router, uplink, rules; flags are set back and
// the state directory is removed. Sandboxes that still run lose their network.
// It goes on after an error and returns all of them. n is closed afterwards.
func (n *Network) Destroy(ctx context.Context) error {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return sandbox.Unavailable.Errorf("network: closed")
	}
	n.closed = true
	n.mu.Unlock()
	n.cancel()
	<-n.tended
	<-n.watched
	n.ops.Wait()
	n.dns.stop()
	n.stopProxy()
	err := n.teardown(ctx)
	n.closeFiles()
	if err != nil {
		return sandbox.Internal.Errorf("destroy network: %w", err)
	}
	return nil
}

// teardown removes what stands of the network, which may be only a part of it.
func (n *Network) teardown(ctx context.Context) error {
	var errs []error
	// Forget flows before the interfaces go: nothing new can come afterwards
	// that is not closed already.
	gone := map[netip.Addr]bool{}
	for _, s := range n.slots {
		gone[s.addr], gone[s.gw] = true, true
	}
	for _, s := range append(n.dead, n.dying...) {
		gone[s.addr], gone[s.gw] = true, true
	}
	if err := n.removeHost(ctx); err != nil {
		errs = append(errs, err)
	}
	if n.router != nil && n.slow != nil {
		// A slot's namespace lives on while a sandbox uses it, and with it the
		// interface, if that is not removed by hand.
		if err := n.removeGroup(slotGroup); err != nil {
			errs = append(errs, err)
		}
		if err := n.forgetFlows(gone); err != nil {
			n.log.Warn("forget flows", "err", err)
		}
	}
	entries, err := os.ReadDir(n.slotsDir())
	if err != nil {
		errs = append(errs, err)
	}
	for _, e := range entries {
		if err := dropSlotDir(filepath.Join(n.slotsDir(), e.Name())); err != nil {
			errs = append(errs, err)
		}
	}
	if err := dropNetns(n.routerPath()); err != nil {
		errs = append(errs, err)
	}
	os.Remove(netnsDir) // only succeeds when empty
	if len(errs) == 0 {
		if err := os.RemoveAll(n.dir); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
