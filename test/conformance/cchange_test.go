package conformance

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
)

// flow holds one flow open from inside.
func (b *box) flow(args ...string) (exec string) {
	b.t.Helper()
	x := b.start(append([]string{"attack", "hold"}, args...)...)
	b.says(x, "flows")
	return x
}

// C17: a policy that is replaced holds for flows that are open: within a second
// nothing of one that it does not allow arrives any more, and one that it allows
// goes on.
func c17(t *testing.T, w *world, l *lab) {
	closed := policyOf(sandbox.NetworkAllowlist, "allow wild.example")
	for _, c := range []struct {
		name    string
		p, then *v1.NetworkPolicy
		hold    []string
		goesOn  bool
	}{
		{"direct", policyOf(sandbox.NetworkPublic), closed, []string{"tcp", allowedIP + ":9000", "c17-direct"}, false},
		{"none", policyOf(sandbox.NetworkPublic), policyOf(sandbox.NetworkNone), []string{"tcp", allowedIP + ":9000", "c17-none"}, false},
		{"datagrams", policyOf(sandbox.NetworkPublic), closed, []string{"udp", allowedIP + ":9000", "c17-datagrams"}, false},
		{"address", policyOf(sandbox.NetworkAllowlist, "allow "+allowedIP), closed, []string{"tcp", allowedIP + ":9000", "c17-address"}, false},
		{"opaque", policyOf(sandbox.NetworkAllowlist, "allow allowed.example:9000/tcp"), closed, []string{"tcp", "allowed.example:9000", "c17-opaque"}, false},
		{"checked", policyOf(sandbox.NetworkAllowlist, "allow allowed.example:9443"), closed, []string{"tcp", "allowed.example:9443", "c17-checked", "allowed.example"}, false},
		{"port", policyOf(sandbox.NetworkAllowlist, "allow allowed.example:9443"), policyOf(sandbox.NetworkAllowlist, "allow allowed.example"), []string{"tcp", "allowed.example:9443", "c17-port", "allowed.example"}, false},
		{"denied", policyOf(sandbox.NetworkPublic), policyOf(sandbox.NetworkPublic, "deny 1.2.3.0/24"), []string{"tcp", allowedIP + ":9000", "c17-denied"}, false},
		{"stays", policyOf(sandbox.NetworkPublic), policyOf(sandbox.NetworkAllowlist, "allow "+allowedIP+":9000"), []string{"tcp", allowedIP + ":9000", "c17-stays"}, true},
		{"stays checked", policyOf(sandbox.NetworkAllowlist, "allow allowed.example:9443"), policyOf(sandbox.NetworkAllowlist, "allow wild.example", "allow *.example:9443"), []string{"tcp", "allowed.example:9443", "c17-stays-checked", "allowed.example"}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b := l.under(t, c.p)
			token := c.hold[2] + " "
			x := b.flow(c.hold...)
			if _, _, err := l.Client.SetNetwork(within(t), b.id, c.then, false); err != nil {
				t.Fatal(err)
			}
			set := time.Now()
			count := func() int { return len(w.site.got(token)) }
			if c.goesOn {
				n := count()
				eventually(t, "the flow goes on", func() bool { return count() > n+60 }) // more than a second's
				return
			}
			// the flow sends every 20 ms
			eventually(t, "the flow is cut", func() bool { n := count(); time.Sleep(500 * time.Millisecond); return count() == n })
			hits := w.site.got(token)
			if last := hits[len(hits)-1].time.Sub(set); last > time.Second {
				t.Errorf("something arrived %v after the policy was replaced", last)
			}
			if c.hold[0] == "tcp" {
				b.says(x, "ended") // the program inside is told
			}
		})
	}
}

// C18: a proof is enforced or failed.
func c18Proof(t *testing.T, _ *world, l *lab) {
	for _, c := range []struct {
		p    *v1.NetworkPolicy
		want string
	}{
		{policyOf(sandbox.NetworkPublic), "enforced"}, {policyOf(sandbox.NetworkNone), "enforced"}, {policyOf(sandbox.NetworkAllowlist), "enforced"},
		{policyOf(sandbox.NetworkAllowlist, "allow allowed.example"), "enforced"}, {policyOf(sandbox.NetworkAllowlist, "allow allowed.example:80"), "enforced"},
		{policyOf(sandbox.NetworkPublic, "deny denied.example"), "enforced"}, {policyOf(sandbox.NetworkAllowlist, "allow allowed.example:8999/tcp"), "failed"}, // nothing listens there
		{policyOf(sandbox.NetworkAllowlist, "allow nowhere.example"), "failed"}, {policyOf(sandbox.NetworkAllowlist, "allow private.example"), "failed"},
	} {
		b := l.under(t, c.p)
		pr, err := l.Client.ProveNetwork(within(t), b.id)
		if err != nil || pr.Result != c.want {
			t.Errorf("%v: %v, %v, want %s", c.p, pr, err, c.want)
		}
		sb, err := l.Client.Get(within(t), b.id)
		if err != nil || pr.GetHash() != sb.NetworkHash {
			t.Errorf("%v: proof of %s, the sandbox has %v, %v", c.p, pr.GetHash(), sb, err)
		}
	}
	sb, err := l.Client.Create(within(t), &v1.SandboxSpec{Image: image, Network: policyOf(sandbox.NetworkAllowlist, "allow nowhere.example")}, client.CreateOptions{Wait: true, Prove: true})
	if err == nil {
		t.Errorf("created, although the proof that was asked for failed: %v", sb)
	}
}

// TestC18 is what happens when the enforcer dies, is tampered with, or cannot do
// its work.
func TestC18(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	l := w.start(t)
	t.Run("C18Killed", func(t *testing.T) { c18Killed(t, w, l) })
	t.Run("C18RulesTaken", func(t *testing.T) { c18Taken(t, w, l) })
	t.Run("C18RulesAltered", func(t *testing.T) { c18Altered(t, w, l) })
	t.Run("C18CannotInstall", func(t *testing.T) { c18Install(t, w, l) })
	t.Run("C18Failpoint", func(t *testing.T) { c18Failpoint(t, w, l) })
	w.judge(t)
}

// C18: without the daemon there is no DNS and no proxy, and nothing else instead;
// with the next one the policy is what it was.
func c18Killed(t *testing.T, w *world, l *lab) {
	rules := []string{"allow allowed.example", "allow 1.2.3.80", "deny denied.example"}
	names, public := l.under(t, policyOf(sandbox.NetworkAllowlist, rules...)), l.under(t, policyOf(sandbox.NetworkPublic, "deny denied.example"))
	attempt := `attack web -to allowed.example:443 -sni allowed.example -path /c18-$1-name
attack web -to 1.2.3.4:443 -sni allowed.example -path /c18-$1-pin
attack dns udp $2 c18-$1-dns.example A
attack try c18-$1-other 'tcp 1.2.3.81:9000' 'tcp 10.0.0.2:80' 'udp 1.2.3.81:443' 'tcp 1.2.3.81:443' 'udp 10.0.0.53:53'`
	at := names.resolver() + ":53"
	if out := names.sh(attempt, "before", at); len(w.site.got("c18-before-name")) != 1 || len(w.site.got("c18-before-pin")) != 1 || len(w.site.got("c18-before-other")) != 0 {
		t.Errorf("%s", out)
	}
	before, err := l.Client.Network(within(t), names.id)
	ok(t, err)
	// what is tried while there is no daemon, in a command that goes on by itself: it
	// begins when the DNS is silent, and tells of its end by an address that its
	// policy allows, which needs no daemon
	wait := "while attack dns udp $2 allowed.example A | grep -q NOERROR; do sleep 0.1; done; "
	tell := "; echo tried; while :; do attack try c18-tried-$3 'tcp 1.2.3.80:9000'; sleep 0.2; done"
	x := names.start("sh", "-c", wait+attempt+tell, "sh", "during", at, "names")
	y := public.start("sh", "-c", wait+strings.ReplaceAll(attempt, "c18-", "c18p-")+"; attack web -to "+deniedIP+":80 -plain -host denied.example -path /c18p-denied; attack web -to "+deniedIP+":443 -sni denied.example -path /c18p-denied"+tell, "sh", "during", at, "public")
	l.Kill()
	eventually(t, "all was tried without the daemon", func() bool {
		return len(w.site.got("c18-tried-names")) > 0 && len(w.site.got("c18-tried-public")) > 0
	})
	l.Run()
	names.says(x, "tried")
	public.says(y, "tried")
	for _, token := range []string{"c18-during", "c18p-denied"} {
		for _, h := range w.site.got(token) {
			t.Errorf("without the daemon, arrived: %v", h)
		}
	}
	for _, a := range w.zone.questions("", "during-dns") {
		t.Errorf("without the daemon, asked: %v", a)
	}
	after, err := l.Client.Network(within(t), names.id)
	if err != nil || after.Hash != before.Hash {
		t.Errorf("after the restart the policy is %v, %v, want %v", after, err, before)
	}
	if out := names.sh(attempt, "after", at); len(w.site.got("c18-after-name")) != 1 || len(w.site.got("c18-after-pin")) != 1 || len(w.site.got("c18-after-other")) != 0 {
		t.Errorf("%s", out)
	}
	if pr, err := l.Client.ProveNetwork(within(t), names.id); err != nil || pr.Result != "enforced" {
		t.Errorf("after the restart: %v, %v", pr, err)
	}
}

// router is where the daemon's rules for sandboxes are.
func (l *lab) router(t testing.TB) *place { return placeAt(t, "/run/netns/viv-"+l.Instance()) }

// nft is a connection to the rules of a place.
func nft(t testing.TB, p *place) (c *nftables.Conn) {
	t.Helper()
	ok(t, p.in(func() (err error) { c, err = nftables.New(nftables.AsLasting()); return }))
	t.Cleanup(func() { _ = c.CloseLasting() })
	return c
}

// rulesTable has the rules of the router; beside it there is one that keeps slots
// closed when it is gone.
const rulesTable = "vivarium"

// holdTables puts empty tables in the place of these, with an owner: until it is
// closed nobody else can change them (nft(8), flag owner), so that whatever the
// daemon tries, the kernel refuses.
func holdTables(t testing.TB, p *place, tables []*nftables.Table) *netlink.Conn {
	t.Helper()
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: int(p.ns.Fd())})
	ok(t, err)
	t.Cleanup(func() { c.Close() })
	message := func(kind netlink.HeaderType, flags netlink.HeaderFlags, family byte, res uint16, attrs ...netlink.Attribute) netlink.Message {
		data, err := netlink.MarshalAttributes(attrs)
		ok(t, err)
		return netlink.Message{Header: netlink.Header{Type: kind, Flags: netlink.Request | flags}, Data: append([]byte{family, 0, byte(res >> 8), byte(res)}, data...)}
	}
	const owner = 2 // NFT_TABLE_F_OWNER
	batch := []netlink.Message{message(unix.NFNL_MSG_BATCH_BEGIN, 0, 0, unix.NFNL_SUBSYS_NFTABLES)}
	for _, table := range tables {
		name := netlink.Attribute{Type: unix.NFTA_TABLE_NAME, Data: []byte(table.Name + "\x00")}
		batch = append(batch,
			message(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_DELTABLE, netlink.Acknowledge, byte(table.Family), 0, name),
			message(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWTABLE, netlink.Acknowledge|netlink.Create, byte(table.Family), 0, name, netlink.Attribute{Type: unix.NFTA_TABLE_FLAGS, Data: []byte{0, 0, 0, owner}}))
	}
	batch = append(batch, message(unix.NFNL_MSG_BATCH_END, 0, 0, unix.NFNL_SUBSYS_NFTABLES))
	_, err = c.SendMessages(batch)
	ok(t, err)
	for range 2 * len(tables) {
		_, err := c.Receive()
		ok(t, err)
	}
	return c
}

// C18: somebody takes the rules away behind the daemon's back. A proof says that
// they are gone, the daemon puts them back, and meanwhile nothing opens: neither
// what the policy denies nor, should every table be gone, what is private.
func c18Taken(t *testing.T, w *world, l *lab) {
	b := l.under(t, policyOf(sandbox.NetworkAllowlist, "allow allowed.example", "allow 1.2.3.80"))
	c := nft(t, l.router(t))
	for _, all := range []bool{false, true} {
		token := fmt.Sprintf("c18-taken-%v", all)
		x := b.start("sh", "-c", "while :; do attack try $1 'tcp 10.0.0.2:80' 'tcp 169.254.169.254:80' 'udp 10.0.0.53:53' 'tcp 5.5.5.2:9000' 'tcp 1.2.3.82:9000' 'udp 1.2.3.82:443' >/dev/null; echo round; done", "sh", token)
		b.says(x, "round")
		failed := 0
		for range 2 {
			tables, err := c.ListTables()
			ok(t, err)
			for _, table := range tables {
				if all || table.Name == rulesTable {
					c.DelTable(table)
				}
			}
			if err := c.Flush(); err != nil {
				t.Logf("take the rules away: %v", err) // the daemon was quicker
			}
			if pr, err := l.Client.ProveNetwork(within(t), b.id); err != nil {
				t.Errorf("prove: %v", err)
			} else if pr.Result == "failed" {
				failed++
			}
			eventually(t, "the rules are back", func() bool {
				pr, err := l.Client.ProveNetwork(within(t), b.id)
				return err == nil && pr.Result == "enforced"
			})
		}
		if failed == 0 {
			t.Error("no proof failed while the rules were gone")
		}
		if err := l.Client.Signal(within(t), b.id, x, 9); err != nil {
			t.Fatal(err)
		}
		for _, h := range w.site.got(token) {
			if !all || h.place != "internet" {
				t.Errorf("arrived while the rules were gone (all tables: %v): %v", all, h)
			}
		}
	}
}

// C18: somebody adds a rule that lets everything pass, to chains in turn. A
// proof that reads only what was meant would not see it.
func c18Altered(t *testing.T, w *world, l *lab) {
	b := l.under(t, policyOf(sandbox.NetworkAllowlist, "allow allowed.example"))
	c := nft(t, l.router(t))
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	ok(t, err)
	altered := 0
	for _, chain := range chains {
		if chain.Table.Name != rulesTable || chain.Name != "forward" && (chain.Hooknum != nil || chain.Name[0] != 'p') {
			continue
		}
		c.InsertRule(&nftables.Rule{Table: chain.Table, Chain: chain, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}})
		if err := c.Flush(); err != nil {
			continue // it was of a policy that is no more
		}
		altered++
		if pr, err := l.Client.ProveNetwork(within(t), b.id); err != nil || pr.Result != "failed" {
			t.Errorf("with a rule that accepts in %s: %v, %v", chain.Name, pr, err)
		}
		b.closed("c18-altered", "tcp 10.0.0.2:80", "tcp 169.254.169.254:80", "tcp 5.5.5.2:9000")
		eventually(t, "the rules are as they were", func() bool {
			pr, err := l.Client.ProveNetwork(within(t), b.id)
			return err == nil && pr.Result == "enforced"
		})
	}
	if altered < 3 { // the forward hook's, that of public, and that of this policy
		t.Errorf("only %d chains were altered, of %d", altered, len(chains))
	}
}

// C18: where rules cannot be installed no sandbox starts, no policy is said to be
// in force, and nothing that was closed opens.
func c18Install(t *testing.T, w *world, l *lab) {
	b := l.under(t, policyOf(sandbox.NetworkAllowlist, "allow allowed.example"))
	router := l.router(t)
	held := holdTables(t, router, []*nftables.Table{{Name: rulesTable, Family: nftables.TableFamilyINet}})
	x := b.start("sh", "-c", "while :; do attack try c18-held 'tcp 10.0.0.2:80' 'tcp 169.254.169.254:80' 'tcp 5.5.5.2:9000' 'tcp 1.2.3.83:9000'; echo round; done")
	b.says(x, "round")
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() {
			p := []*v1.NetworkPolicy{policyOf(sandbox.NetworkPublic), policyOf(sandbox.NetworkAllowlist, "allow allowed.example"), policyOf(sandbox.NetworkAllowlist, "allow 1.2.3.84")}[i]
			sb, err := l.Client.Create(within(t), &v1.SandboxSpec{Image: image, Network: p, Command: []string{"attack", "try", "c18-held-new", "tcp 1.2.3.84:9000"}}, client.CreateOptions{Wait: true})
			if err == nil {
				t.Errorf("a sandbox started without rules: %v", sb)
			}
		})
	}
	wg.Wait()
	if a, _, err := l.Client.SetNetwork(within(t), b.id, policyOf(sandbox.NetworkPublic), false); err == nil {
		t.Errorf("a policy that cannot be installed is said to be in force: %v", a)
	}
	if pr, err := l.Client.ProveNetwork(within(t), b.id); err == nil && pr.Result != "failed" {
		t.Errorf("proof: %v", pr)
	}
	ok(t, held.Close()) // the tables go with their owner
	eventually(t, "the daemon works again", func() bool {
		sb, err := l.Client.Create(within(t), &v1.SandboxSpec{Image: image, Network: policyOf(sandbox.NetworkAllowlist, "allow allowed.example")}, client.CreateOptions{Wait: true, Prove: true})
		if err != nil {
			return false
		}
		return l.Client.Remove(within(t), sb.Id, true) == nil
	})
	if got := w.site.got("c18-held"); len(got) > 0 {
		t.Errorf("%d arrivals while nothing could be installed, such as %v", len(got), got[0])
	}
}

// C18: a daemon that dies before the policy is in force leaves no sandbox that runs
// without it.
func c18Failpoint(t *testing.T, w *world, l *lab) {
	l.Stop()
	l.Run("VIV_FAILPOINT=create.network")
	if sb, err := l.Client.Create(within(t), &v1.SandboxSpec{Image: image, Network: policyOf(sandbox.NetworkAllowlist, "allow allowed.example"), Command: []string{"attack", "try", "c18-fail", "tcp 1.2.3.85:9000", "tcp " + allowedIP + ":80"}}, client.CreateOptions{Wait: true}); err == nil {
		t.Errorf("created: %v", sb)
	}
	if !l.WaitKilled(limit) {
		t.Fatal("the failpoint was not reached")
	}
	l.Run()
	list, err := l.Client.List(within(t), &v1.ListSandboxesRequest{})
	ok(t, err)
	for _, sb := range list {
		if sb.Stage == string(sandbox.StageRunning) && sb.Spec.GetNetwork().GetMode() == "" {
			t.Errorf("runs without a policy: %v", sb)
		}
	}
	if got := w.site.got("c18-fail"); len(got) > 0 {
		t.Errorf("arrived: %v", got)
	}
}

// C20: what was reached and what was refused is told, with name and rule, and a
// flood of destinations is counted without growing anything.
func c20(t *testing.T, w *world, l *lab) {
	b := l.under(t, policyOf(sandbox.NetworkAllowlist, "allow allowed.example", "allow 1.2.3.90"))
	b.web("-to", "allowed.example:443", "-sni", "allowed.example", "-path", "/c20")
	b.web("-to", allowedIP+":443", "-sni", "c20-other.example")
	b.dns("udp", b.resolver()+":53", "c20-denied.example", "A")
	b.try("c20", "tcp 1.2.3.90:9000", "udp 1.2.3.90:9000", "tcp 1.2.3.91:9000", "udp 10.0.0.2:53", "tcp 169.254.169.254:80")
	flows := func(b *box) (out []*v1.FlowRecord) {
		if err := l.Client.Flows(within(t), &v1.WatchFlowsRequest{SandboxId: b.id}, func(r *v1.FlowRecord) error { out = append(out, r); return nil }); err != nil {
			t.Fatal(err)
		}
		return out
	}
	for _, want := range []struct {
		allowed     bool
		name, addr  string
		port        uint32
		protocol    string
		rule, bytes bool
	}{
		{true, "allowed.example", allowedIP, 443, "tcp", true, true}, {true, "", "1.2.3.90", 9000, "tcp", false, true}, {true, "", "1.2.3.90", 9000, "udp", false, true},
		{false, "c20-other.example", allowedIP, 443, "tcp", false, false}, {false, "c20-denied.example", "", 0, "dns", true, false}, {true, "allowed.example", "", 0, "dns", true, false},
		{false, "", "1.2.3.91", 9000, "tcp", false, false}, {false, "", "10.0.0.2", 53, "udp", false, false}, {false, "", "169.254.169.254", 80, "tcp", false, false},
	} {
		eventually(t, fmt.Sprintf("the log has %+v; it has %v", want, flows(b)), func() bool {
			for _, r := range flows(b) {
				if r.Allowed == want.allowed && (r.Name == want.name || want.name == "") && (r.Address == want.addr || want.addr == "") && (want.port == 0 || r.Port == want.port) && r.Protocol == want.protocol &&
					(!want.rule || r.Rule != "") && (!want.bytes || r.BytesOut > 0 && r.BytesIn > 0) && r.Flows > 0 && r.SandboxId == b.id {
					return true
				}
			}
			return false
		})
	}
	flooder := l.under(t, &v1.NetworkPolicy{Mode: "public", ConnsPerSecond: 100_000})
	flooder.must("attack", "flood", "places", "1.3.0.1", "6000")
	flooder.must("attack", "flood", "places", "10.99.0.1", "6000")
	var told int64
	eventually(t, "the flood is counted", func() bool {
		told = 0
		for _, r := range flows(flooder) {
			told += max(r.Uncounted, 0)
		}
		return told > 1000
	})
	if n := len(flows(flooder)); n > 1024+1 {
		t.Errorf("%d records are kept", n)
	}
}

// A16: sockets, ports and tracked connections of one sandbox run out in that
// sandbox alone: the host's table stays far from full, and a neighbour connects.
func a16(t *testing.T, w *world, l *lab) {
	neighbour := l.box(t, nil)
	b := l.under(t, &v1.NetworkPolicy{Mode: "public", ConnsPerSecond: 1 << 20})
	bound := min(max(w.node.count(t, "netfilter/nf_conntrack_max")/64, 512), 4096)
	for _, args := range [][]string{{"places", "1.4.0.1", "10000"}, {"tcp", allowedIP + ":9000", "2000"}} {
		x, err := l.Client.StartExec(within(t), b.id, "", &v1.ExecSpec{Argv: append([]string{"attack", "flood"}, args...), Output: "merged"})
		ok(t, err)
		b.says(x.Id, "flooding")
		for i := range 3 {
			token := fmt.Sprintf("a16-%s-%d", args[1], i)
			if out := neighbour.web("-to", "allowed.example:443", "-sni", "allowed.example", "-path", "/"+token); len(w.site.got(token)) != 1 {
				t.Errorf("%v: the neighbour: %s", args, out)
			}
			// of the sandbox and of all tests beside it
			if n := w.node.count(t, "netfilter/nf_conntrack_count"); n > 2*bound {
				t.Errorf("%v: the host tracks %d connections, of at most %d for one sandbox", args, n, bound)
			}
		}
		if _, err := l.Client.WaitExec(within(t), b.id, x.Id, limit); err != nil {
			t.Fatal(err)
		}
		if n := w.node.count(t, "netfilter/nf_conntrack_count"); n > 2*bound || args[0] == "places" && n < bound/4 {
			t.Errorf("%v: the host tracks %d connections, with at most %d for one sandbox", args, n, bound)
		}
	}
	b.alive()
}

// A17: a flood of queries is held back per sandbox: upstream is asked no more than
// the rate allows, a neighbour's queries are answered, and the flooder's own are
// once it is over.
func a17(t *testing.T, w *world, l *lab) {
	neighbour, b := l.box(t, nil), l.box(t, nil)
	at := b.resolver() + ":53"
	begin := time.Now()
	x := b.start("attack", "flood", "dns", at, "2000")
	b.says(x, "flooding")
	for i := range 5 {
		name := fmt.Sprintf("a17-%d.wild.example", i)
		if out := neighbour.dns("udp", at, name, "A"); !strings.Contains(out, allowedIP) {
			t.Errorf("the neighbour: %s", out)
		}
	}
	if _, err := l.Client.WaitExec(within(t), b.id, x, limit); err != nil {
		t.Fatal(err)
	}
	const rate = 200 // a second, and a burst of twice that
	asked := len(w.zone.questions("", "flood-"))
	if most := 2*rate + int(time.Since(begin)/time.Second+2)*rate; asked > most || asked == 0 {
		t.Errorf("upstream was asked %d times, of 32000; at most %d", asked, most)
	}
	eventually(t, "the flooder is answered again", func() bool {
		return strings.Contains(b.dns("udp", at, "a17-after.wild.example", "A"), allowedIP)
	})
}

// fetching: what the daemon fetches for another tenant obeys the same policy, where a
// registry sends it elsewhere and where its name turns to a private address.
func fetching(t *testing.T, w *world, l *lab) {
	c := l.NewTenant("fetching")
	pull := func(ref string) error {
		_, err := c.PullImage(within(t), &v1.PullImageRequest{Ref: ref}, nil)
		return err
	}
	for _, kind := range []string{"private", "metadata", "name", "secure", "moved", "rebind", "host", "loopback"} {
		if kind == "rebind" {
			w.zone.flip("registry-flip.example", "10.0.0.2")
		}
		if err := pull("registry.example/to-" + kind + "/image:latest"); err == nil {
			t.Errorf("%s: pulled", kind)
		} else if kind == "private" {
			t.Logf("%v", err)
		}
		if got := w.site.hits(func(h hit) bool { return strings.HasPrefix(h.path, "/v2/to-"+kind+"/") }); len(got) == 0 {
			t.Errorf("%s: the registry was not asked", kind)
		}
	}
	for _, ref := range []string{"private.example/x:latest", "10.0.0.2/x:latest", "10.0.0.2:80/x:latest", "169.254.169.254/x:latest", "5.5.5.2:8443/x:latest", "metadata.google.internal/x:latest"} {
		if err := pull(ref); err == nil {
			t.Errorf("%s: pulled", ref)
		}
	}
	w.zone.flip("registry-flip2.example", "1.2.3.7", "10.0.0.2")
	if err := pull("registry-flip2.example/x:latest"); err == nil {
		t.Error("rebinding: pulled")
	}
	if got := w.site.hits(func(h hit) bool { return h.host == "registry-flip2.example" && h.place == "internet" }); len(got) == 0 {
		t.Error("the registry that rebinds was not asked")
	}
	leaks := w.site.hits(func(h hit) bool { return strings.HasPrefix(h.path, "/leak") })
	for _, h := range leaks {
		if h.place != "internet" {
			t.Errorf("arrived: %v", h)
		}
	}
	if len(leaks) != 1 {
		t.Errorf("followed to %v, want to moved.example alone", leaks)
	}
}
