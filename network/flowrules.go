package network

import (
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// The kernel counts, per slot, every distinct "far address . protocol . port" that
// passes or is refused. An element is forgotten a minute after its last packet; new
// ones are limited per slot, and what found no room is counted too.
const (
	flowTimeout = time.Minute
	flowRate    = 100 // new elements a second of one slot, burst five times that
	maxFlowSet  = 1 << 17
)

func setCounters(name string) *nftables.Set {
	return &nftables.Set{Table: tableRef, Name: name, KeyType: flowType, Concatenation: true, Dynamic: true, Size: maxFlowSet, HasTimeout: true, Timeout: flowTimeout}
}

func setOut() *nftables.Set     { return setCounters("out") }     // packets and bytes sent
func setIn() *nftables.Set      { return setCounters("in") }      // and received
func setOpened() *nftables.Set  { return setCounters("opened") }  // packets that began a flow
func setRefused() *nftables.Set { return setCounters("refused") } // packets refused

// setUnlogged counts, per interface, what found no room in those.
func setUnlogged() *nftables.Set {
	return &nftables.Set{Table: tableRef, Name: "unlogged", KeyType: nftables.TypeIFName, Dynamic: true, Size: 65535, HasTimeout: true, Timeout: time.Hour}
}

func update(s *nftables.Set, e expr.Any) expr.Any {
	return &expr.Dynset{SrcRegKey: 1, SetName: s.Name, SetID: s.ID, Operation: unix.NFT_DYNSET_OP_UPDATE, Exprs: []expr.Any{e}}
}

func count(s *nftables.Set) expr.Any { return update(s, &expr.Counter{}) }

// pass lets a packet of a slot through, past the gate as well.
func pass() exprs { return rule(setMark(passMark), accept()) }

// logRefused counts a refusal, and goes on.
func logRefused(tcpudp *nftables.Set) []exprs {
	proto := &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}
	return []exprs{
		rule(exprs{proto, in(tcpudp, false)}, jump("log_refused")),
		rule(exprs{proto, in(tcpudp, true)}, jump("log_refused0")),
	}
}

// flowLogRules write the sets and chains of the log. Those whose name ends in 0 are
// for protocols without ports.
func flowLogRules(t *table) {
	out, incoming, opened, refused := t.set(setOut(), nil), t.set(setIn(), nil), t.set(setOpened(), nil), t.set(setRefused(), nil)
	unlogged := t.set(setUnlogged(), nil)
	limiter := func(name string) *nftables.Set {
		return t.set(&nftables.Set{Name: name, KeyType: nftables.TypeIFName, Dynamic: true, Size: 65535, HasTimeout: true, Timeout: time.Minute}, nil)
	}
	rates := map[string]*nftables.Set{"log_refused": limiter("rate_refused"), "count_out": limiter("rate_out")}
	over := func(name string) exprs {
		return perIface(rates[name], &expr.Limit{Type: expr.LimitTypePkts, Rate: flowRate, Unit: expr.LimitTimeSecond, Burst: 5 * flowRate, Over: true})
	}
	lost := t.chains("unlogged")["unlogged"]
	t.rules(lost, []exprs{rule(exprs{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, count(unlogged)})})
	for _, suffix := range []string{"", "0"} {
		ports := suffix == ""
		key, back := flowKey(outward, ports), flowKey(inward, ports)
		ch := t.chains("log_out"+suffix, "count_out"+suffix, "known_out"+suffix, "first_out"+suffix, "log_in"+suffix, "log_refused"+suffix)
		t.rules(ch["log_out"+suffix], []exprs{jump("count_out" + suffix), pass()})
		t.rules(ch["count_out"+suffix], []exprs{
			rule(key, exprs{in(out, false)}, gotoChain("known_out"+suffix)),
			rule(over("count_out"), gotoChain("unlogged")),
			rule(key, exprs{count(out)}, gotoChain("first_out"+suffix)), // no match when the set is full
			gotoChain("unlogged"),
		})
		t.rules(ch["known_out"+suffix], []exprs{
			rule(key, exprs{count(out)}),
			rule(firstPacket(), key, exprs{count(opened)}),
		})
		t.rules(ch["first_out"+suffix], []exprs{
			rule(firstPacket(), key, exprs{count(opened)}),
		})
		t.rules(ch["log_in"+suffix], []exprs{
			rule(back, exprs{in(out, false), count(incoming)}, accept()),
			rule(back, exprs{in(incoming, false), count(incoming)}, accept()),
			accept(),
		})
		t.rules(ch["log_refused"+suffix], []exprs{
			rule(key, exprs{in(refused, false), count(refused)}, verdict(expr.VerdictReturn)),
			rule(over("log_refused"), gotoChain("unlogged")),
			rule(key, exprs{count(refused)}, verdict(expr.VerdictReturn)),
			gotoChain("unlogged"),
		})
	}
}
