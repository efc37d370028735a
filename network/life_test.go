package network

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"vivarium/sandbox"

	"vivarium/network/policy"
)

// inventory lists what a network can leave behind: links, addresses, routes and
// nftables tables of the host, its forwarding flags, mounts and files.
func (l *lab) inventory() []string {
	l.t.Helper()
	var out []string
	add := func(format string, a ...any) { out = append(out, fmt.Sprintf(format, a...)) }
	links, err := l.host.h.LinkList()
	must(l.t, err)
	for _, k := range links {
		add("link %s", k.Attrs().Name)
	}
	addrs, err := l.host.h.AddrList(nil, netlink.FAMILY_ALL)
	must(l.t, err)
	for _, a := range addrs {
		add("addr %s", a.IPNet)
	}
	routes, err := l.host.h.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{}, netlink.RT_FILTER_TABLE)
	must(l.t, err)
	for _, r := range routes {
		add("route %s", r)
	}
	must(l.t, l.host.do(func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		ts, err := c.ListTables()
		for _, t := range ts {
			add("table %s", t.Name)
		}
		fs, _ := filepath.Glob("/proc/sys/net/ipv4/conf/*/*")
		fs = append(fs, "/proc/sys/net/ipv4/ip_forward")
		for _, f := range fs {
			b, err := os.ReadFile(f)
			if err != nil {
				continue
			}
			add("%s %s", f, bytes.TrimSpace(b))
		}
		return err
	}))
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	must(l.t, err)
	for _, m := range strings.Split(string(mounts), "\n") {
		if strings.Contains(m, l.dir) || strings.Contains(m, "viv-"+l.opts.Instance) {
			add("mount %s", strings.Fields(m)[4])
		}
	}
	fs, _ := filepath.Glob("/run/netns/viv-" + l.opts.Instance)
	var cookie uint64
	must(l.t, l.host.do(func() (err error) { cookie, err = netnsCookie(); return }))
	reg, _ := filepath.Glob(filepath.Join(registryDir, fmt.Sprint(cookie)+"*"))
	data, _ := filepath.Glob(filepath.Join(l.opts.Dir, "*"))
	out = append(append(append(out, fs...), reg...), data...)
	sort.Strings(out)
	return out
}

func TestDestroyLeavesNothing(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	before := l.inventory()
	l.opts.Pool = 3
	n, err := Open(context.Background(), l.opts)
	must(t, err)
	l.acquire(n, sandbox.NetworkPublic)
	s, _ := l.acquire(n, sandbox.NetworkNone)
	must(t, n.Release(context.Background(), s.ID))
	during := l.inventory()
	router := enterPlace(t, n.routerPath()) // keeps the namespace for a look
	must(t, n.Destroy(context.Background()))
	after := l.inventory()
	links, err := router.h.LinkList()
	if err != nil || len(links) != 1 {
		t.Errorf("%d links in the router, %v", len(links), err)
	}
	if len(during) <= len(before) {
		t.Fatal("the inventory sees nothing")
	}
	if a, b := strings.Join(before, "\n"), strings.Join(after, "\n"); a != b {
		t.Errorf("left behind:\n%s", diff(before, after))
	}
}

func diff(a, b []string) string {
	m := map[string]int{}
	for _, x := range a {
		m[x]--
	}
	for _, x := range b {
		m[x]++
	}
	var out []string
	for x, k := range m {
		if k != 0 {
			out = append(out, fmt.Sprintf("%+d %s", k, x))
		}
	}
	return strings.Join(out, "\n")
}

// TestRealHost makes, takes over and destroys a network on the machine itself.
// Nothing is sent: there is no slot with an open policy.
func TestRealHost(t *testing.T) {
	l := newLab(t)
	ns, err := currentNS()
	must(t, err)
	defer ns.Close()
	th, err := startThread(ns)
	must(t, err)
	t.Cleanup(th.stop)
	l.host = &place{"", th}
	l.opts.HostNetns = ""
	l.opts.Pool = 1
	before := l.inventory()
	n, err := Open(context.Background(), l.opts)
	must(t, err)
	s, err := n.Acquire(context.Background(), AcquireOptions{Owner: "a"})
	must(t, err)
	n.Close()
	n, err = Open(context.Background(), l.opts)
	must(t, err)
	if lost, err := n.Reconcile(context.Background(), map[string]string{s.ID: "a"}); err != nil || len(lost) != 0 {
		t.Errorf("reconcile: lost %v, %v", lost, err)
	}
	must(t, n.Destroy(context.Background()))
	if d := diff(before, l.inventory()); d != "" {
		t.Errorf("left behind:\n%s", d)
	}
}

// TestInstancesShareAHost runs two networks in one host namespace; the first to
// go must not take the other's forwarding away, the last must restore it.
func TestInstancesShareAHost(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.internet.serve(t, "8.8.8.8:80")
	before := l.inventory()
	a, err := Open(context.Background(), l.opts)
	must(t, err)
	o := l.opts
	o.Dir, o.Instance = filepath.Join(l.dir, "other"), "x"+l.opts.Instance[:5]
	b, err := Open(context.Background(), o)
	must(t, err)
	if a.subnet.Overlaps(b.subnet) {
		t.Errorf("subnets %s and %s overlap", a.subnet, b.subnet)
	}
	sa, pa := l.acquire(a, sandbox.NetworkPublic)
	_, pb := l.acquire(b, sandbox.NetworkPublic)
	talk := func(p *place) {
		t.Helper()
		c, err := p.dial("tcp", "8.8.8.8:80", 5*time.Second)
		must(t, err)
		defer c.Close()
		_, err = bufio.NewReader(c).ReadString('\n')
		must(t, err)
	}
	talk(pa)
	talk(pb)
	// A neighbour of another instance is as far as one's own.
	sink := pa.listenUDP(t, "0.0.0.0:9000")
	pb.sendUDP(netip.AddrPortFrom(sa.Addr, 9000).String())
	talk(pb)
	if from := sink(); from != "" {
		t.Errorf("a slot of the other instance reached this one from %s", from)
	}
	must(t, a.Destroy(context.Background()))
	talk(pb)
	must(t, b.Destroy(context.Background()))
	os.RemoveAll(o.Dir)
	if d := diff(before, l.inventory()); d != "" {
		t.Errorf("left behind:\n%s", d)
	}
	// The same instance name from another directory is refused, as is the same
	// directory twice.
	n := l.open()
	o.Instance = l.opts.Instance
	if _, err := Open(context.Background(), o); !errors.Is(err, sandbox.Conflict) {
		t.Errorf("same instance, other directory: %v", err)
	}
	if _, err := Open(context.Background(), l.opts); !errors.Is(err, sandbox.Conflict) {
		t.Errorf("same directory: %v", err)
	}
	n.Close()
}

// TestForwardingIsRespected: a host that is a router already, or becomes one
// later, is not restricted by us.
func TestForwardingIsRespected(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	n := l.open()
	inside := l.private.tap(t, "eth0")
	must(t, l.host.do(func() error { return setSysctl("ipv4/ip_forward", "1") }))
	must(t, n.refresh())
	l.internet.sendUDP("10.0.0.2:9")
	inside.until(t, toAddr("10.0.0.2")) // fails if it does not come
	must(t, n.Destroy(context.Background()))
	must(t, l.host.do(func() error {
		if v, err := getSysctl("ipv4/conf/eth0/forwarding"); v != "1" {
			t.Errorf("forwarding of the host's own was turned off: %q, %v", v, err)
		}
		return nil
	}))
}

func TestReuseForgetsFlows(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.internet.serve(t, "8.8.8.8:80")
	l.opts.Subnet = netip.MustParsePrefix("10.255.0.0/27") // 12 slots: numbers come round
	n := l.open()
	s, in := l.acquire(n, sandbox.NetworkPublic)
	c, err := in.dial("tcp", "8.8.8.8:80", 5*time.Second)
	must(t, err)
	defer c.Close()
	flows := func(th *nsThread) (k int) {
		fs, err := th.h.ConntrackTableList(netlink.ConntrackTable, netlink.FAMILY_V4)
		must(t, err)
		for _, f := range fs {
			if flowsOf(func(a netip.Addr) bool { return a == s.Addr }).MatchConntrackFlow(f) {
				k++
			}
		}
		return k
	}
	if flows(n.router) == 0 || flows(n.host) == 0 {
		t.Fatalf("no flow to forget: router %d, host %d", flows(n.router), flows(n.host))
	}
	must(t, n.Release(context.Background(), s.ID))
	must(t, n.Release(context.Background(), s.ID)) // twice is no error
	seen := map[string]bool{s.ID: true}
	for range 30 { // more than there are, so every number is used again
		s2, err := n.Acquire(context.Background(), AcquireOptions{Owner: "x"})
		if errors.Is(err, sandbox.Exhausted) {
			time.Sleep(time.Millisecond) // numbers come back in the background
			continue
		}
		must(t, err)
		if seen[s2.ID] {
			t.Errorf("slot id %s came twice", s2.ID)
		}
		seen[s2.ID] = true
		if s2.Addr == s.Addr && flows(n.router)+flows(n.host) != 0 {
			t.Error("the address came back with its predecessor's flows")
		}
		must(t, n.Release(context.Background(), s2.ID))
	}
}

// TestE4FlowsOfTheDead: a daemon that dies while it destroys a slot leaves flows
// to the next one.
func TestE4FlowsOfTheDead(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.internet.serve(t, "8.8.8.8:80")
	n := l.open()
	dead, in := l.acquire(n, sandbox.NetworkPublic)
	alive, in2 := l.acquire(n, sandbox.NetworkPublic)
	for _, p := range []*place{in, in2} {
		c, err := p.dial("tcp", "8.8.8.8:80", 5*time.Second)
		must(t, err)
		defer c.Close()
	}
	n.Close()
	must(t, dropSlotDir(filepath.Dir(dead.NetnsPath)))
	n, err := Open(context.Background(), l.opts)
	must(t, err)
	defer n.Close()
	for _, th := range []*nsThread{n.router, n.host} {
		fs, err := th.h.ConntrackTableList(netlink.ConntrackTable, netlink.FAMILY_V4)
		must(t, err)
		kept := false
		for _, f := range fs {
			a, _ := netip.AddrFromSlice(f.Forward.SrcIP.To4())
			if a == dead.Addr {
				t.Errorf("a flow of the dead: %s", f)
			}
			kept = kept || a == alive.Addr
		}
		if !kept {
			t.Error("a flow of the living was forgotten")
		}
	}
	if _, err := n.router.h.LinkByName(dead.HostVeth); !isNotFound(err) {
		t.Errorf("its interface is still there: %v", err)
	}
}

func TestExhausted(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.opts.Subnet = netip.MustParsePrefix("10.255.0.0/27")
	n := l.open()
	for range n.maxSlots() {
		_, err := n.Acquire(context.Background(), AcquireOptions{Owner: "x"})
		must(t, err)
	}
	if _, err := n.Acquire(context.Background(), AcquireOptions{Owner: "x"}); !errors.Is(err, sandbox.Exhausted) || sandbox.HintOf(err) == "" {
		t.Errorf("one too many: %v, hint %q", err, sandbox.HintOf(err))
	}
}

// TestC17OpenFlows: a policy change cuts what is open, and opens again.
func TestC17OpenFlows(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.internet.serve(t, "8.8.8.8:80")
	n := l.open()
	s, in := l.acquire(n, sandbox.NetworkPublic)
	c, err := in.dial("tcp", "8.8.8.8:80", 5*time.Second)
	must(t, err)
	defer c.Close()
	r := bufio.NewReader(c)
	_, err = r.ReadString('\n')
	must(t, err)
	pub := s.Applied
	none, err := n.SetPolicy(context.Background(), s.ID, sandbox.NetworkPolicy{Mode: sandbox.NetworkNone})
	must(t, err)
	if none.Hash == pub.Hash || len(none.Hash) != 64 {
		t.Errorf("hashes %q, %q", none.Hash, pub.Hash)
	}
	outside := l.internet.tap(t, "eth0")
	_, err = c.Write([]byte("cut?\n"))
	must(t, err)
	_, other := l.acquire(n, sandbox.NetworkPublic)
	other.sendUDP("8.8.8.8:9")
	if got := outside.until(t, toAddr("8.8.8.8")); len(got) != 0 {
		t.Errorf("reached the outside: %v", got)
	}
	again, err := n.SetPolicy(context.Background(), s.ID, sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic})
	must(t, err)
	if again.Hash != pub.Hash {
		t.Errorf("same policy, other hash")
	}
	c.SetReadDeadline(time.Now().Add(20 * time.Second))
	if line, err := r.ReadString('\n'); !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("the flow was not cut: %q, %v", line, err)
	}
	c2, err := in.dial("tcp", "8.8.8.8:80", 5*time.Second)
	must(t, err)
	c2.Close()
	if _, err := n.SetPolicy(context.Background(), s.ID, sandbox.NetworkPolicy{Mode: "open"}); !errors.Is(err, sandbox.Invalid) {
		t.Errorf("unknown mode: %v", err)
	}
	if _, err := n.SetPolicy(context.Background(), "s0-none", sandbox.NetworkPolicy{}); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("unknown slot: %v", err)
	}
}

// TestC18FailClosed takes the router's rules away: nothing can be acquired, a
// closed slot stays closed, and the rules come back with the next look.
func TestC18FailClosed(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.opts.Pool = 2
	n := l.open()
	_, closed := l.acquire(n, sandbox.NetworkNone)
	open, pub := l.acquire(n, sandbox.NetworkPublic)
	// The background worker must not repair it under us.
	stopWorkers(n)
	delTable(t, n.router, routerTable)
	for _, m := range []sandbox.NetworkMode{sandbox.NetworkNone, sandbox.NetworkPublic} {
		for range 3 { // from the pool and beyond
			if _, err := n.Acquire(context.Background(), AcquireOptions{Owner: "x", Policy: sandbox.NetworkPolicy{Mode: m}}); !errors.Is(err, sandbox.Internal) {
				t.Errorf("acquire %s without rules: %v", m, err)
			}
		}
	}
	if _, err := n.SetPolicy(context.Background(), open.ID, sandbox.NetworkPolicy{Mode: sandbox.NetworkNone}); !errors.Is(err, sandbox.Internal) {
		t.Errorf("set policy without rules: %v", err)
	}
	outside := l.internet.tap(t, "eth0")
	closed.sendUDP("8.8.8.8:7")
	pub.sendUDP("8.8.8.8:7") // its policy could not be set, so it is closed too
	must(t, n.refresh())
	_, after := l.acquire(n, sandbox.NetworkPublic)
	after.sendUDP("8.8.8.8:9")
	if got := outside.until(t, func(ip []byte) bool { return toAddr("8.8.8.8")(ip) && ip[23] == 9 }); len(got) != 0 {
		t.Errorf("reached the outside: %v", got)
	}
	n.mu.Lock()
	if len(n.slots)-len(n.pool) != 3 {
		t.Errorf("%d slots in use, want 3", len(n.slots)-len(n.pool))
	}
	n.mu.Unlock()
}

// TestC18NoTables takes all of the router's rules away: what was open leads nowhere
// from that moment on, until they are back.
func TestC18NoTables(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	n := l.open()
	_, pub := l.acquire(n, sandbox.NetworkPublic)
	outside := l.internet.tap(t, "eth0")
	pub.sendUDP("8.8.8.8:9") // it is open
	if got := outside.until(t, func(ip []byte) bool { return toAddr("8.8.8.8")(ip) && ip[23] == 9 }); len(got) != 0 {
		t.Errorf("reached the outside: %v", got)
	}
	stopWorkers(n)
	delTable(t, n.router, routerTable)
	delTable(t, n.router, gateTable)
	outside = l.internet.tap(t, "eth0")
	pub.sendUDP("8.8.8.8:7")
	must(t, n.refresh())
	pub.sendUDP("8.8.8.8:9")
	if got := outside.until(t, func(ip []byte) bool { return toAddr("8.8.8.8")(ip) && ip[23] == 9 }); len(got) != 0 {
		t.Errorf("reached the outside without rules: %v", got)
	}
}

// TestC18Repairs: a failure for want of rules has them put back without waiting
// for the next look.
func TestC18Repairs(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.internet.serve(t, "8.8.8.8:80")
	n := l.open()
	delTable(t, n.router, routerTable)
	delTable(t, n.router, gateTable)
	failed := 0
	for {
		s, err := n.Acquire(context.Background(), AcquireOptions{Owner: "x", Policy: sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic}})
		if err != nil {
			failed++
			time.Sleep(10 * time.Millisecond)
			continue
		}
		in := enterPlace(t, s.NetnsPath)
		c, err := in.dial("tcp", "8.8.8.8:80", 5*time.Second)
		must(t, err)
		c.Close()
		break
	}
	if failed == 0 {
		t.Error("acquired without rules")
	}
	if ok, err := n.router.hasTables(routerTable, gateTable); err != nil || !ok {
		t.Errorf("tables: %v, %v", ok, err)
	}
}

// TestReadBack compares what was applied with what the kernel has.
func TestReadBack(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	n := l.open()
	stopWorkers(n) // what is found altered would be repaired under us
	ctx := context.Background()
	s, _ := l.acquire(n, sandbox.NetworkPublic)
	check := func(want sandbox.AppliedPolicy, wantErr bool, what string) {
		t.Helper()
		got, err := n.ReadBack(ctx, s.ID)
		if (err != nil) != wantErr || err == nil && got.Hash != want.Hash {
			t.Errorf("%s: %v, %v", what, got, err)
		}
	}
	check(s.Applied, false, "public")
	a, err := n.SetPolicy(ctx, s.ID, sandbox.NetworkPolicy{})
	must(t, err)
	check(a, false, "none")
	if got, err := n.Slot(s.ID); err != nil || got.Applied.Hash != a.Hash || got.NetnsPath != s.NetnsPath {
		t.Errorf("slot: %v, %v", got, err)
	}
	sl := n.slots[s.ID]
	must(t, n.router.nft(func(c *nftables.Conn) error { return c.SetAddElements(setGate(), openKey(sl)) }))
	check(a, true, "gate opened behind our back")
	must(t, n.router.nft(func(c *nftables.Conn) error { return c.SetAddElements(mapPolicy(), policyEntry(sl, chainPublic)) }))
	check(a, true, "opened behind our back")
	must(t, n.router.nft(func(c *nftables.Conn) error { return c.SetAddElements(setOpen(), openKey(sl)) }))
	check(a, true, "opened wholly behind our back")
	delTable(t, n.router, routerTable)
	check(a, true, "no rules")
	if _, err := n.ReadBack(ctx, "s9-x"); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("unknown slot: %v", err)
	}
	if _, err := n.Slot("s9-x"); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("unknown slot: %v", err)
	}
	if st := n.Stats(); st.InUse != 1 || st.Capacity < 8000 {
		t.Errorf("stats: %+v", st)
	}
}

// TestC18DaemonGone: without the daemon DNS is silent, flows go on.
func TestC18DaemonGone(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.internet.serve(t, "8.8.8.8:80")
	n := l.open()
	s, in := l.acquire(n, sandbox.NetworkPublic)
	n.Close()
	if r, err := in.lookup(s, "tcp", "a.example.", 1); err == nil {
		t.Errorf("an answer: %v", r)
	}
	c, err := in.dial("tcp", "8.8.8.8:80", 5*time.Second)
	must(t, err)
	c.Close()
	if _, err := n.Acquire(context.Background(), AcquireOptions{Owner: "x"}); !errors.Is(err, sandbox.Unavailable) {
		t.Errorf("acquire after close: %v", err)
	}
}

// child is what a test daemon, a process to be killed, is told.
type child struct {
	Opts Options
	Loop bool
}

// TestMain is also the daemon that the crash tests kill.
func TestMain(m *testing.M) {
	if os.Getenv("NETWORK_TEST_DAEMON") != "" {
		if err := daemon(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func daemon() error {
	var c child
	if err := json.NewDecoder(os.Stdin).Decode(&c); err != nil {
		return err
	}
	ctx := context.Background()
	n, err := Open(ctx, c.Opts)
	if err != nil {
		return err
	}
	if !c.Loop {
		s, err := n.Acquire(ctx, AcquireOptions{Owner: "survivor", Policy: sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic}})
		if err != nil {
			return err
		}
		if _, err := n.Acquire(ctx, AcquireOptions{Owner: "forgotten", Policy: sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic}}); err != nil {
			return err
		}
		json.NewEncoder(os.Stdout).Encode(s)
		select {}
	}
	var held []string
	for i := 0; ; i++ {
		s, err := n.Acquire(ctx, AcquireOptions{Owner: "loop", Policy: sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic}})
		if err != nil {
			return err
		}
		if held = append(held, s.ID); len(held) > 3 {
			if err := n.Release(ctx, held[0]); err != nil {
				return err
			}
			held = held[1:]
		}
		fmt.Println(i)
	}
}

// startDaemon starts a child and returns its output and a function that kills it.
func (l *lab) startDaemon(loop bool) (*bufio.Reader, func()) {
	l.t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "NETWORK_TEST_DAEMON=1")
	o := l.opts
	o.Logger = nil
	b, err := json.Marshal(child{o, loop})
	must(l.t, err)
	cmd.Stdin = bytes.NewReader(b)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	must(l.t, err)
	must(l.t, cmd.Start())
	killed := false
	kill := func() {
		if !killed {
			killed = true
			cmd.Process.Kill()
			io.Copy(io.Discard, out)
			cmd.Wait()
		}
	}
	l.t.Cleanup(kill)
	return bufio.NewReader(out), kill
}

// TestE4Adopt kills a daemon with SIGKILL while a flow is open.
func TestE4Adopt(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	before := l.inventory()
	l.internet.serve(t, "8.8.8.8:80")
	l.opts.Pool = 2
	out, kill := l.startDaemon(false)
	line, err := out.ReadBytes('\n')
	must(t, err)
	var s Slot
	must(t, json.Unmarshal(line, &s))
	in := enterPlace(t, s.NetnsPath)
	c, err := in.dial("tcp", "8.8.8.8:80", 5*time.Second)
	must(t, err)
	defer c.Close()
	r := bufio.NewReader(c)
	_, err = r.ReadString('\n')
	must(t, err)
	echo := func(msg string) {
		t.Helper()
		c.SetDeadline(time.Now().Add(20 * time.Second))
		fmt.Fprintln(c, msg)
		if got, err := r.ReadString('\n'); err != nil || got != msg+"\n" {
			t.Fatalf("%s: %q, %v", msg, got, err)
		}
	}
	echo("alive")
	kill()
	echo("daemon dead")
	n, err := Open(context.Background(), l.opts)
	must(t, err)
	echo("adopted")
	lost, err := n.Reconcile(context.Background(), map[string]string{s.ID: "survivor", "s9-gone": "x"})
	must(t, err)
	if len(lost) != 1 || lost[0] != "s9-gone" {
		t.Errorf("lost %v", lost)
	}
	echo("reconciled")
	n.mu.Lock()
	for id, sl := range n.slots {
		if sl.Owner != "" && id != s.ID {
			t.Errorf("slot %s of %q is still there", id, sl.Owner)
		}
	}
	n.mu.Unlock()
	must(t, n.Destroy(context.Background()))
	if d := diff(before, l.inventory()); d != "" {
		t.Errorf("left behind:\n%s", d)
	}
}

// TestE4KilledAnywhere kills a daemon that makes and releases slots as fast as
// it can, after some output each time, and checks what the next one finds.
func TestE4KilledAnywhere(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	before := l.inventory()
	l.opts.Pool = 3
	for _, after := range []int{0, 1, 3, 7, 12} {
		out, kill := l.startDaemon(true)
		for range after {
			if _, err := out.ReadString('\n'); err != nil {
				t.Fatal(err)
			}
		}
		kill()
	}
	n, err := Open(context.Background(), l.opts)
	must(t, err)
	if _, err := n.Reconcile(context.Background(), nil); err != nil {
		t.Error(err)
	}
	stopWorkers(n)
	for n.drop(); n.forgetDying() > 0; n.drop() {
		time.Sleep(time.Millisecond)
	}
	want := map[string]bool{}
	for _, s := range n.slots {
		want[s.ID] = true
		if s.Owner != "" {
			t.Errorf("slot %s is still %q's", s.ID, s.Owner)
		}
	}
	entries, err := os.ReadDir(n.slotsDir())
	must(t, err)
	for _, e := range entries {
		if !want[e.Name()] {
			t.Errorf("%s is left", e.Name())
		}
	}
	links, err := n.router.h.LinkList()
	must(t, err)
	if len(links) != 2+len(n.slots) {
		t.Errorf("%d links in the router for %d slots", len(links), len(n.slots))
	}
	must(t, n.router.do(func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		for _, k := range []struct {
			set  *nftables.Set
			want int
		}{{setSlots(), len(n.slots)}, {setOpen(), 0}, {mapPolicy(), 0}, {setGate(), 0}} {
			es, err := c.GetSetElements(k.set)
			if err != nil {
				return err
			}
			if len(es) != k.want {
				t.Errorf("set %s has %d elements, want %d", k.set.Name, len(es), k.want)
			}
		}
		return nil
	}))
	must(t, n.Destroy(context.Background()))
	if d := diff(before, l.inventory()); d != "" {
		t.Errorf("left behind:\n%s", d)
	}
}

// TestE4FailAnywhere makes each step fail: an Open that fails leaves nothing of
// a new network, an Acquire that fails leaves no slot and nothing open.
func TestE4FailAnywhere(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	ctx := context.Background()
	before := l.inventory()
	var steps []string
	note := func(s string) error { steps = append(steps, s); return nil }

	l.opts.failpoint = note
	n, err := Open(ctx, l.opts)
	must(t, err)
	opening := steps
	steps = nil
	_, err = n.Acquire(ctx, AcquireOptions{Owner: "x", Policy: sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic}})
	must(t, err)
	acquiring := steps
	must(t, n.Destroy(ctx))
	if len(opening) < 12 || len(acquiring) < 12 {
		t.Fatalf("steps: %q, %q", opening, acquiring)
	}
	boom := errors.New("boom")
	failAt := func(want string) func(string) error {
		return func(s string) error {
			if s == want {
				return boom
			}
			return nil
		}
	}
	for _, step := range opening {
		l.opts.failpoint = failAt(step)
		if n, err := Open(ctx, l.opts); !errors.Is(err, boom) || sandbox.KindOf(err) != sandbox.Internal {
			t.Fatalf("%s: %v, %v", step, n, err)
		}
		if d := diff(before, l.inventory()); d != "" {
			t.Fatalf("after failure to %s, left behind:\n%s", step, d)
		}
	}
	l.opts.failpoint = nil
	n = l.open()
	// From here on only this goroutine uses n.
	stopWorkers(n)
	for _, step := range acquiring {
		n.opts.failpoint = failAt(step)
		if s, err := n.Acquire(ctx, AcquireOptions{Owner: "x", Policy: sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic}}); !errors.Is(err, boom) || sandbox.KindOf(err) != sandbox.Internal {
			t.Fatalf("%s: %v, %v", step, s, err)
		}
		n.opts.failpoint = nil
		for n.drop(); n.forgetDying() > 0; n.drop() {
			time.Sleep(time.Millisecond)
		}
		links, err := n.router.h.LinkList()
		must(t, err)
		entries, err := os.ReadDir(n.slotsDir())
		must(t, err)
		must(t, n.router.do(func() error {
			return n.router.withNft(func(c *nftables.Conn) error {
				for _, set := range []*nftables.Set{setSlots(), setOpen(), mapPolicy(), setGate()} {
					es, err := c.GetSetElements(set)
					if err != nil || len(es) > 0 {
						t.Errorf("%s: set %s has %d elements, %v", step, set.Name, len(es), err)
					}
				}
				return nil
			})
		}))
		if len(links) != 2 || len(entries) != 0 || len(n.used) != 0 || len(n.slots) != 0 {
			t.Errorf("%s: %d links, %d directories, %d numbers, %d slots left", step, len(links), len(entries), len(n.used), len(n.slots))
		}
	}
}

// TestManyAtOnce: callers in parallel never share a slot or an address.
func TestManyAtOnce(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.opts.Pool = 4
	n := l.open()
	var mu sync.Mutex
	held := map[netip.Addr]string{}
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range 8 {
				s, err := n.Acquire(context.Background(), AcquireOptions{Owner: fmt.Sprint(w), Policy: sandbox.NetworkPolicy{Mode: []sandbox.NetworkMode{sandbox.NetworkNone, sandbox.NetworkPublic}[i%2]}})
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				if other, ok := held[s.Addr]; ok {
					t.Errorf("%s has the address of %s", s.ID, other)
				}
				held[s.Addr] = s.ID
				mu.Unlock()
				if _, err := n.SetPolicy(context.Background(), s.ID, sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic}); err != nil {
					t.Error(err)
				}
				mu.Lock()
				delete(held, s.Addr)
				mu.Unlock()
				if err := n.Release(context.Background(), s.ID); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	wg.Wait()
	if lost, err := n.Reconcile(context.Background(), nil); err != nil || len(lost) != 0 {
		t.Errorf("lost %v, %v", lost, err)
	}
}

// TestReboot: the kernel's side is gone, as after a reboot; what is left on disk
// is cleared away and a new network stands.
func TestReboot(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.internet.serve(t, "8.8.8.8:80")
	before := l.inventory()
	l.opts.Pool = 1
	n, err := Open(context.Background(), l.opts)
	must(t, err)
	s, err := n.Acquire(context.Background(), AcquireOptions{Owner: "a", Policy: sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic}})
	must(t, err)
	n.Close()
	up, err := l.host.h.LinkByName(n.uplinkName())
	must(t, err)
	must(t, l.host.h.LinkDel(up))
	delTable(t, l.host.nsThread, n.hostTable())
	must(t, dropNetns(n.routerPath()))
	mounts, err := filepath.Glob(filepath.Join(n.slotsDir(), "*", netnsFile))
	must(t, err)
	for _, m := range mounts {
		must(t, unix.Unmount(m, unix.MNT_DETACH))
	}
	n, err = Open(context.Background(), l.opts)
	must(t, err)
	lost, err := n.Reconcile(context.Background(), map[string]string{s.ID: "a"})
	if err != nil || len(lost) != 1 {
		t.Errorf("lost %v, %v", lost, err)
	}
	_, in := l.acquire(n, sandbox.NetworkPublic)
	c, err := in.dial("tcp", "8.8.8.8:80", 5*time.Second)
	must(t, err)
	c.Close()
	must(t, n.Destroy(context.Background()))
	if d := diff(before, l.inventory()); d != "" {
		t.Errorf("left behind:\n%s", d)
	}
}

// TestRepair: what somebody else takes away on the host comes back.
func TestRepair(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.internet.serve(t, "8.8.8.8:80")
	n := l.open()
	stopWorkers(n) // the test looks after it itself
	_, in := l.acquire(n, sandbox.NetworkPublic)
	talk := func(what string) {
		t.Helper()
		must(t, n.refresh())
		c, err := in.dial("tcp", "8.8.8.8:80", 5*time.Second)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		c.Close()
	}
	talk("before")
	delTable(t, l.host.nsThread, n.hostTable())
	talk("host table")
	delTable(t, n.router, routerTable)
	talk("router table")
	must(t, l.host.do(func() error { return setSysctl("ipv4/ip_forward", "0") })) // sets every interface's flag
	talk("forwarding")
	must(t, l.host.h.RouteDel(&netlink.Route{Dst: ipNet(n.subnet)}))
	talk("route")
	must(t, l.host.h.LinkSetDown(n.uplink))
	talk("uplink down")
	must(t, l.host.h.LinkDel(n.uplink))
	talk("uplink")

	// The host gets another address: it is closed at once, by rules and routes.
	hs := l.host.serve(t, "0.0.0.0:2222")
	l.host.addr(t, "eth0", "7.7.7.7/32")
	must(t, n.refresh())
	if c, err := in.dial("tcp", "7.7.7.7:2222", 5*time.Second); err == nil {
		c.Close()
		t.Error("a new address of the host was reached")
	}
	if hs.hits() != 0 {
		t.Error("the host was reached")
	}
	rs, err := n.router.h.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: slotRoutes, Dst: ipNet(netip.MustParsePrefix("7.7.7.7/32"))}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_DST)
	if err != nil || len(rs) != 1 {
		t.Errorf("routes for the new address: %v, %v", rs, err)
	}
}

// TestConnsBounded: one slot cannot fill the connection tables.
func TestConnsBounded(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.opts.MaxConns = 20
	n := l.open()
	s, in := l.acquire(n, sandbox.NetworkPublic)
	outside := l.internet.tap(t, "eth0")
	for i := range 60 {
		in.sendUDP(fmt.Sprintf("8.8.8.8:%d", 1000+i))
	}
	_, other := l.acquire(n, sandbox.NetworkPublic)
	other.sendUDP("1.2.3.4:9")
	if got := outside.until(t, toAddr("1.2.3.4")); len(got) != 20 {
		t.Errorf("%d flows passed, want 20", len(got))
	}
	fs, err := n.host.h.ConntrackTableList(netlink.ConntrackTable, netlink.FAMILY_V4)
	must(t, err)
	k := 0
	for _, f := range fs {
		if f.Forward.SrcIP.Equal(net.IP(s.Addr.AsSlice())) {
			k++
		}
	}
	if k > 20 {
		t.Errorf("%d entries on the host", k)
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	p := netip.MustParsePrefix
	good := Options{Dir: "/x", Instance: "a"}
	for name, f := range map[string]func(*Options){
		"no dir":            func(o *Options) { o.Dir = "" },
		"instance":          func(o *Options) { o.Instance = "Too-long" },
		"small subnet":      func(o *Options) { o.Subnet = p("10.0.0.0/28") },
		"public subnet":     func(o *Options) { o.Subnet = p("8.8.0.0/18") },
		"host bits":         func(o *Options) { o.Subnet = p("10.0.0.1/18") },
		"IPv6 subnet":       func(o *Options) { o.Subnet = p("fd00::/64") },
		"pool":              func(o *Options) { o.Pool = -1 },
		"grant everything":  func(o *Options) { o.Grants = []policy.Grant{{Prefix: p("0.0.0.0/0")}} },
		"grant loopback":    func(o *Options) { o.Grants = []policy.Grant{{Prefix: p("127.0.0.1/32")}} },
		"grant multicast":   func(o *Options) { o.Grants = []policy.Grant{{Prefix: p("224.0.0.1/32")}} },
		"grant IPv6":        func(o *Options) { o.Grants = []policy.Grant{{Prefix: p("fd00::/8")}} },
		"grant host bits":   func(o *Options) { o.Grants = []policy.Grant{{Prefix: p("10.0.0.1/8")}} },
		"grant port 0":      func(o *Options) { o.Grants = []policy.Grant{{Prefix: p("10.0.0.0/8"), Ports: []uint16{0}}} },
		"grant nothing":     func(o *Options) { o.Grants = []policy.Grant{{}} },
		"deny IPv6":         func(o *Options) { o.Deny = []netip.Prefix{p("::/0")} },
		"too many grants":   func(o *Options) { o.Grants = make([]policy.Grant, maxGrants+1) },
		"negative DNS rate": func(o *Options) { o.DNSRate = -1 },
	} {
		o := good
		f(&o)
		if err := o.check(); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := good.check(); err != nil {
		t.Error(err)
	}
}
