package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
)

// Sizes of bench net.
const (
	netFew, netMany = 10, 1000 // names that are allowed
	netAlive        = 200      // sandboxes while policies change
	netSlots        = 20       // created one after the other for the stage network
	netTurns        = 4        // of every policy in a round
	netConnects     = 10       // of each kind and turn
	netWarm         = 3
)

// netAlive is how many are alive while policies change.
func (r *run) alive() int {
	if r.quick {
		return 3
	}
	return netAlive
}

// netRun is a run of bench net.
type netRun struct {
	*run
	w       *world
	self    string // this program
	id      string // the sandbox
	peers   []netPeer
	moved   map[string][]float64       // MB/s
	took    map[string][]time.Duration // of connections and look-ups
	ordered []netPolicy
}

// netPeer sends from elsewhere.
type netPeer struct {
	name string
	run  func(ctx context.Context, jobs string) ([]byte, error)
	at   link
}

// net measures what policies cost: bytes, new connections, changes.
func (r *run) net(ctx context.Context) error {
	if !local(ctx, r.Server) {
		return sandbox.Unsupported.Errorf("bench net makes an outside world on the daemon's machine: this daemon is on another")
	}
	if os.Geteuid() != 0 {
		return sandbox.Denied.Errorf("bench net makes network namespaces: run it as root")
	}
	self, err := os.Executable()
	if err != nil {
		return sandbox.Internal.Errorf("find this program: %w", err)
	}
	host := r.host
	if host == nil {
		if host, err = thisNamespace(); err != nil {
			return err
		}
		defer host.close()
	}
	w, err := openWorld(host)
	if err != nil {
		return err
	}
	defer w.shut()
	b := &netRun{run: r, w: w, self: self, moved: map[string][]float64{}, took: map[string][]time.Duration{}}
	if err := b.granted(ctx); err != nil {
		return err
	}
	done, err := b.openPeers(ctx)
	if err != nil {
		return err
	}
	defer done()
	if err := b.slots(ctx); err != nil {
		return err
	}
	if err := b.bring(ctx); err != nil {
		return err
	}
	b.ordered = b.policies()
	for i := range r.N {
		r.say("round %d of %d", i+1, r.N)
		if err := b.bytes(ctx); err != nil {
			return r.why(ctx, b.id, err)
		}
		for k := range netTurns {
			if err := b.connections(ctx, i*netTurns+k); err != nil {
				return r.why(ctx, b.id, err)
			}
		}
	}
	if err := r.remove(ctx, b.id); err != nil {
		return err
	}
	if err := b.changes(ctx); err != nil {
		return err
	}
	b.report()
	return nil
}

// name is the i-th name of this run, which no cache has seen.
func (b *netRun) name(i int) string {
	return fmt.Sprintf("n%d-%s.%s", i, strings.ToLower(b.tag), worldZone)
}

// granted finds out whether the daemon lets the world be reached.
func (b *netRun) granted(ctx context.Context) error {
	for _, q := range []struct {
		host, rule, what string
		port             uint32
	}{
		{worldAddr.String(), worldAddr.String(), "its configuration does not grant " + worldAddr.String(), portHTTPDirect},
		{b.name(0), b.name(0), "it does not ask the resolver at " + address(worldAddr, 53), portHTTP},
	} {
		res, err := b.c.ExplainNetwork(ctx, &v1.ExplainNetworkRequest{
			Policy: allowing(q.rule), Host: q.host, Port: q.port, Protocol: "tcp",
		})
		if err != nil && q.host == worldAddr.String() {
			return err
		}
		ok := err == nil && res.Allowed
		if err == nil && q.host != worldAddr.String() {
			ok = slices.ContainsFunc(res.Addresses, func(a *v1.ExplainedAddress) bool { return a.Allowed && a.Address == worldAddr.String() })
		}
		if !ok {
			return sandbox.Conflict.Errorf("this daemon is not set up for bench net: %s", q.what).
				WithHint("for the time of the bench its configuration needs\n%s\nor use bench/run.sh, which starts a daemon of its own", WorldConfig)
		}
	}
	return nil
}

// allowing is an allow-list of rules.
func allowing(rules ...string) *v1.NetworkPolicy {
	p := &v1.NetworkPolicy{Mode: string(sandbox.NetworkAllowlist)}
	for _, m := range rules {
		p.Rules = append(p.Rules, &v1.PolicyRule{Action: string(sandbox.RuleAllow), Match: m})
	}
	return p
}

// netPolicy is a policy to measure connections under.
type netPolicy struct {
	name    string
	policy  *v1.NetworkPolicy
	targets []netTarget
	kinds   []string // of the targets
}

// named allows n names, of which the last is used, and the ports from 8000 on of
// the same address: what goes by name and what goes directly is then measured
// connection by connection, under one policy.
func (b *netRun) named(n int) (*v1.NetworkPolicy, string) {
	rules := make([]string, n, n+1)
	for i := range rules {
		rules[i] = b.name(i)
	}
	return allowing(append(rules, worldAddr.String()+":8000-9999/tcp")...), b.name(n - 1)
}

func (b *netRun) policies() []netPolicy {
	direct := netTarget{Addr: address(worldAddr, portHTTPDirect)}
	list := []netPolicy{
		{"public", &v1.NetworkPolicy{Mode: string(sandbox.NetworkPublic)}, []netTarget{direct}, []string{"public"}},
		{"address", allowing(worldAddr.String()), []netTarget{direct}, []string{"address"}},
	}
	for _, n := range []int{netFew, netMany} {
		p, name := b.named(n)
		// without the number: the direct one under the few is what a name is compared with
		k := fmt.Sprintf("_of_%d", n)
		list = append(list, netPolicy{"names" + k, p, []netTarget{
			direct, {Addr: fmt.Sprint(":", portHTTP), Name: name},
			{Addr: address(worldAddr, portTLSDirect), Name: "", TLS: true}, {Addr: fmt.Sprint(":", portTLS), Name: name, TLS: true},
		}, []string{"direct" + k, "name" + k, "direct_tls" + k, "name_tls" + k}})
	}
	return list
}

// slots creates sandboxes one after the other, while the pools are full, for the
// time that their network took.
func (b *netRun) slots(ctx context.Context) error {
	n := netSlots
	if b.quick {
		n = 2
	}
	b.say("create %d sandboxes", n)
	for range n {
		if err := b.ready(ctx); err != nil {
			return err
		}
		sb, err := b.c.Create(ctx, b.small(), client.CreateOptions{Wait: true})
		if err != nil {
			return err
		}
		for _, s := range sb.Stages {
			if s.Stage == string(sandbox.StageNetwork) && s.Took != nil {
				b.took["network"] = append(b.took["network"], s.Took.AsDuration())
			}
		}
		if err := b.remove(ctx, sb.Id); err != nil {
			return err
		}
	}
	return nil
}

// inside is where this program is in the sandbox.
const inside = "/root/viv"

// bring makes the sandbox and puts this program into it.
func (b *netRun) bring(ctx context.Context) error {
	sb, err := b.c.Create(ctx, b.spec(), client.CreateOptions{Wait: true})
	if err != nil {
		return err
	}
	b.id = sb.Id
	f, err := os.Open(b.self)
	if err != nil {
		return sandbox.Internal.Errorf("open this program: %w", err)
	}
	defer f.Close()
	_, err = b.c.WriteFile(ctx, &v1.WriteFileRequest{SandboxId: b.id, Path: []byte(inside), Mode: 0o755, Parents: true}, f)
	return err
}

// maxPeerOutput bounds what the peer in the sandbox may say.
const maxPeerOutput = 8 << 20

// jobs has the sandbox do them.
func (b *netRun) jobs(ctx context.Context, jobs []netJob) ([]netDone, error) {
	arg, err := json.Marshal(jobs)
	if err != nil {
		return nil, sandbox.Internal.Errorf("encode jobs: %w", err)
	}
	var out, said limited
	out.room, said.room = maxPeerOutput, maxSaid
	e, err := b.c.RunExec(ctx, b.id, "", &v1.ExecSpec{Argv: []string{inside, "bench", PeerVerb, string(arg)}}, &out, &said)
	if err != nil {
		return nil, err
	}
	if e.GetState() != "exited" || e.GetExit().GetCode() != 0 {
		return nil, sandbox.Internal.Errorf("send from the sandbox: %s with status %d: %q", e.GetState(), e.GetExit().GetCode(), strings.TrimSpace(said.b.String()))
	}
	return decodeDone(out.b.Bytes(), jobs)
}

// limited keeps as much as there is room for.
type limited struct {
	b    bytes.Buffer
	room int
}

func (l *limited) Write(p []byte) (int, error) {
	k := min(l.room, len(p))
	l.b.Write(p[:k])
	l.room -= k
	return len(p), nil
}

// decodeDone reads what a peer says, and believes no more than its form.
func decodeDone(b []byte, jobs []netJob) ([]netDone, error) {
	var done []netDone
	if err := json.Unmarshal(b, &done); err != nil {
		return nil, sandbox.Internal.Errorf("read what the sender says: %w", err)
	}
	if len(done) != len(jobs) {
		return nil, sandbox.Internal.Errorf("the sender did %d jobs of %d", len(done), len(jobs))
	}
	for i, j := range jobs {
		ok := j.Move == nil || done[i].Move > 0
		if j.Connect != nil {
			ok = len(done[i].Connect) == len(j.Connect.Targets)
			for _, t := range done[i].Connect {
				ok = ok && len(t) == j.Connect.N && !slices.ContainsFunc(t, func(x int64) bool { return x <= 0 })
			}
		}
		if !ok {
			return nil, sandbox.Internal.Errorf("job %d has no result", i)
		}
	}
	return done, nil
}

// amount is how much one transfer moves.
func (b *netRun) amount() int64 {
	if b.quick {
		return 1 << 20
	}
	return 512 << 20
}

// transfer is one of the transfers under one policy.
type transfer struct {
	kind string
	move netMove
}

// transfersBy are those that are compared: each way directly and by name, one
// after the other.
func (b *netRun) transfersBy(name string) (all []transfer) {
	n := b.amount()
	raw := netTarget{Addr: address(worldAddr, portRaw)}
	all = append(all, transfer{"raw_up", netMove{netTarget: raw, Raw: true, Bytes: n}}, transfer{"raw_down", netMove{netTarget: raw, Raw: true, Down: true, Bytes: n}})
	for _, way := range []struct {
		kind string
		down bool
	}{{"up", false}, {"down", true}} {
		all = append(all,
			transfer{"http_" + way.kind + "_direct", netMove{netTarget: netTarget{Addr: address(worldAddr, portHTTPDirect)}, Down: way.down, Bytes: n}},
			transfer{"http_" + way.kind + "_name", netMove{netTarget: netTarget{Addr: fmt.Sprint(":", portHTTP), Name: name}, Down: way.down, Bytes: n}},
			transfer{"tls_" + way.kind + "_direct", netMove{netTarget: netTarget{Addr: address(worldAddr, portTLSDirect), TLS: true}, Down: way.down, Bytes: n}},
			transfer{"tls_" + way.kind + "_name", netMove{netTarget: netTarget{Addr: fmt.Sprint(":", portTLS), Name: name, TLS: true}, Down: way.down, Bytes: n}},
		)
	}
	return all
}

// bytes moves them, from the sandbox and from everything it is compared with.
func (b *netRun) bytes(ctx context.Context) error {
	policy, name := b.named(netFew)
	if err := b.set(ctx, b.id, policy); err != nil {
		return err
	}
	// one after the other, so that what is compared is close in time
	for _, t := range b.transfersBy(name) {
		done, err := b.jobs(ctx, []netJob{{Move: &t.move}})
		if err != nil {
			return fmt.Errorf("%s: %w", t.kind, err)
		}
		b.rate(t.kind, t.move.Bytes, done[0].Move)
		if !t.move.Raw {
			continue
		}
		for _, p := range b.peers {
			m := t.move
			m.Addr = p.at.addr(portRaw)
			jobs := []netJob{{Move: &m}}
			arg, err := json.Marshal(jobs)
			if err != nil {
				return sandbox.Internal.Errorf("encode jobs: %w", err)
			}
			out, err := p.run(ctx, string(arg))
			if err == nil {
				done, err = decodeDone(out, jobs)
			}
			if err != nil {
				return fmt.Errorf("%s from %s: %w", t.kind, p.name, err)
			}
			b.rate(t.kind+" "+p.name, m.Bytes, done[0].Move)
		}
	}
	return nil
}

func (b *netRun) rate(kind string, n, took int64) {
	b.moved[kind] = append(b.moved[kind], float64(n)/1e6/time.Duration(took).Seconds())
}

func (b *netRun) set(ctx context.Context, id string, p *v1.NetworkPolicy) error {
	_, _, err := b.c.SetNetwork(ctx, id, p, false)
	return err
}

// connections opens them under each policy in turn, in the other order every
// second time.
func (b *netRun) connections(ctx context.Context, turn int) error {
	order := slices.Clone(b.ordered)
	if turn%2 == 1 {
		slices.Reverse(order)
	}
	n := netConnects
	if b.quick {
		n = 2
	}
	for _, p := range order {
		if err := b.set(ctx, b.id, p.policy); err != nil {
			return err
		}
		done, err := b.jobs(ctx, []netJob{{Connect: &netConnect{Targets: p.targets, N: n, Warm: netWarm}}})
		if err != nil {
			return fmt.Errorf("connections under %s: %w", p.name, err)
		}
		for i, kind := range p.kinds {
			for _, x := range done[0].Connect[i] {
				b.took["connect_"+kind] = append(b.took["connect_"+kind], time.Duration(x))
			}
		}
		for _, x := range done[0].Resolve {
			b.took["resolve_"+p.name] = append(b.took["resolve_"+p.name], time.Duration(x))
		}
	}
	return nil
}

// changes replaces policies while many sandboxes are alive.
func (b *netRun) changes(ctx context.Context) error {
	n := b.alive()
	b.say("create %d sandboxes", n)
	ids := make([]string, n)
	if err := parallel(ctx, makers, n, func(ctx context.Context, i int) error {
		s := b.small()
		s.Network = b.ordered[i%len(b.ordered)].policy
		sb, err := b.c.Create(ctx, s, client.CreateOptions{Wait: true})
		if err == nil {
			ids[i] = sb.Id
		}
		return err
	}); err != nil {
		return err
	}
	if err := b.settle(ctx); err != nil {
		return err
	}
	b.say("change policies")
	for i := range max(n, 10*b.N) {
		to := b.ordered[(i+1+i/n)%len(b.ordered)] // another one than it has
		start := time.Now()
		if err := b.set(ctx, ids[i%n], to.policy); err != nil {
			return err
		}
		took := time.Since(start)
		b.took["policy_change"] = append(b.took["policy_change"], took)
		b.took["policy_change_to_"+to.name] = append(b.took["policy_change_to_"+to.name], took)
	}
	b.res.detail("alive_while_policies_change", float64(n), "sandboxes")
	return nil
}

// openPeers finds what one TCP stream is compared with. What it returns removes
// what they need.
func (b *netRun) openPeers(ctx context.Context) (func(), error) {
	b.peers = []netPeer{{"host", func(ctx context.Context, jobs string) ([]byte, error) {
		return b.w.plain.run(ctx, b.self, "bench", PeerVerb, jobs)
	}, worldPlain}}
	if !slices.Contains(b.Peers, "runsc") {
		return func() {}, nil
	}
	bin, why := find("runsc")
	if why == "" {
		why = b.sameVersion(ctx, bin)
	}
	if why != "" {
		b.res.Missing["runsc"] = why
		return func() {}, nil
	}
	dir, err := os.MkdirTemp("", "viv-bench-")
	if err != nil {
		return nil, sandbox.Internal.Errorf("make directory for runsc: %w", err)
	}
	done := func() {
		if err := unmountBelow(dir); err != nil {
			b.say("unmount what runsc used: %v", err)
		}
		if err := os.RemoveAll(dir); err != nil {
			b.say("remove what runsc used: %v", err)
		}
	}
	rootfs := filepath.Join(dir, "rootfs")
	if err := b.runscRoot(dir, rootfs); err != nil {
		done()
		return nil, err
	}
	for _, p := range []struct {
		name, network string
		ns            *namespace
		at            link
	}{
		{"runsc_host_network", "host", b.w.plain, worldPlain},
		{"runsc", "sandbox", b.w.stack, worldStack},
	} {
		rs := &runscPeer{bin: bin, dir: filepath.Join(dir, p.name), rootfs: rootfs, network: p.network, netns: p.ns.path()}
		b.peers = append(b.peers, netPeer{p.name, func(ctx context.Context, jobs string) ([]byte, error) {
			return b.runsc(ctx, rs, p.ns, jobs)
		}, p.at})
	}
	return done, nil
}

// runscRoot makes a root filesystem with nothing but this program in it.
func (b *netRun) runscRoot(dir, rootfs string) error {
	if err := os.Chmod(dir, 0o711); err != nil { // runsc's own processes are nobody's
		return sandbox.Internal.Errorf("make root filesystem: %w", err)
	}
	for _, d := range []string{"proc", "sys", "dev", "tmp", "etc"} {
		if err := os.MkdirAll(filepath.Join(rootfs, d), 0o755); err != nil {
			return sandbox.Internal.Errorf("make root filesystem: %w", err)
		}
	}
	prog, err := os.ReadFile(b.self)
	if err == nil {
		err = os.WriteFile(filepath.Join(rootfs, "viv"), prog, 0o755)
	}
	if err != nil {
		return sandbox.Internal.Errorf("make root filesystem: %w", err)
	}
	return nil
}

// runsc runs the sender in a container of its own.
func (b *netRun) runsc(ctx context.Context, rs *runscPeer, ns *namespace, jobs string) ([]byte, error) {
	rs.n++
	bundle, err := rs.bundle(fmt.Sprint("send", rs.n), []string{"/viv", "bench", PeerVerb, jobs})
	if err != nil {
		return nil, err
	}
	if rs.network == "sandbox" { // which takes the address away from its interface
		if err := ns.address("eth0", worldStack.peer); err != nil {
			return nil, err
		}
	}
	_, _, out, err := timed(ctx, rs.bin, rs.args("run", "--bundle", bundle, rs.id())...)
	return out, err
}

// report makes the result of what was measured.
func (b *netRun) report() {
	res := b.res
	mid := func(k string) float64 { return median(b.moved[k]) }
	for k, v := range b.moved {
		if !strings.Contains(k, " ") {
			res.detail(k, median(v), "MB/s")
		}
	}
	for _, p := range b.peers {
		up := mid("raw_up " + p.name)
		res.Peers[p.name] = Peer{Value: round(up, 1), Unit: "MB/s", Ratio: round(mid("raw_up")/up, 3)}
		res.detail("raw_down_"+p.name, mid("raw_down "+p.name), "MB/s")
		if p.name == "host" {
			res.value(mid("raw_up")/up, "ratio")
		}
	}
	worst := 0.0
	for _, way := range []string{"http_up", "http_down", "tls_up", "tls_down"} {
		// of each pair, so that what else the machine does weighs on both
		var q []float64
		for i, by := range b.moved[way+"_name"] {
			q = append(q, by/b.moved[way+"_direct"][i])
		}
		m := median(q)
		res.detail("proxy_"+way, m, "ratio")
		if worst == 0 || m < worst {
			worst = m
		}
	}
	res.detail("proxy", worst, "ratio")
	p50 := func(k string) float64 { return ms(percentile(b.took[k], 50)) }
	for k, v := range b.took {
		res.Stage[k] = Stage{ms(percentile(v, 50))}
	}
	few, many := fmt.Sprintf("_of_%d", netFew), fmt.Sprintf("_of_%d", netMany)
	res.detail("added_by_address_rule", p50("connect_address")-p50("connect_public"), "ms")
	res.detail("added_by_name_rule", p50("connect_name"+few)-p50("connect_direct"+few), "ms")
	res.detail("added_by_name_rule_tls", p50("connect_name_tls"+few)-p50("connect_direct_tls"+few), "ms")
	res.detail("added_by_many_names", p50("connect_name"+many)-p50("connect_name"+few), "ms")
	res.detail("policy_change_p99", ms(percentile(b.took["policy_change"], 99)), "ms")
	res.note("value is one TCP stream out of a sandbox by that between two network namespaces of the host, %d MiB each, medians of n", b.amount()>>20)
	res.note("proxy is the worst of four: HTTP and TLS, up and down, through the proxy that checks names by the same directly")
	res.note("connect is a client's wait inside: connect, one request, first byte of the answer; %d a round of each kind, by turns", netTurns*netConnects)
	res.note("policy_change is the call, as the client waits for it")
}
