package network

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
)

// flowSink collects what OnFlows is told.
type flowSink struct {
	mu sync.Mutex
	m  map[string][]FlowDelta
}

func (f *flowSink) take(slot string, ds []FlowDelta) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.m == nil {
		f.m = map[string][]FlowDelta{}
	}
	f.m[slot] = append(f.m[slot], ds...)
}

// sum merges deltas of one destination.
func (f *flowSink) sum(slot string) []FlowDelta {
	f.mu.Lock()
	defer f.mu.Unlock()
	l := newFlowLog()
	for _, d := range f.m[slot] {
		l.merge(slot, d)
	}
	return l.take()[slot]
}

// wait polls until a destination is as it should be.
func (f *flowSink) wait(t testing.TB, n *Network, slot string, ok func(FlowDelta) bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for {
		for _, d := range f.sum(slot) {
			if ok(d) {
				return
			}
		}
		if time.Now().After(deadline) {
			var got []string
			for _, d := range f.sum(slot) {
				got = append(got, fmt.Sprintf("%+v", d))
			}
			t.Fatalf("not in the log:\n%s", strings.Join(got, "\n"))
		}
		n.PollFlows(t.Context())
		time.Sleep(50 * time.Millisecond)
	}
}

// TestFlowLog: what is reached and refused, directly and through the proxy, with
// names, bytes and rules; the last of it comes before a slot is gone.
func TestFlowLog(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone("x.test. 60 IN A 8.8.8.8", "git.test. 60 IN A 1.2.3.4")
	pool, _ := l.internet.web(t, "8.8.8.8:443", "x.test", "y.test")
	l.internet.serve(t, "1.2.3.4:22")
	l.internet.serve(t, "8.8.8.8:7000")
	var log flowSink
	l.opts.OnFlows = log.take
	n := l.open()
	s, in := l.acquireUnder(n, rules(t, modeAllow, "allow x.test", "allow git.test:22/tcp", "allow 8.8.8.8:7000"))
	in.resolve(t, s, "x.test.")
	in.resolve(t, s, "git.test.")
	for range 3 {
		_, err := in.get(pool, "x.test", "8.8.8.8:443")
		must(t, err)
	}
	in.get(pool, "y.test", "8.8.8.8:443")
	for range 2 {
		if !in.reaches("1.2.3.4:22") || !in.reaches("8.8.8.8:7000") {
			t.Fatal("not reached")
		}
	}
	in.reaches("1.2.3.4:80")
	in.ping("8.8.8.8")
	is := func(allowed bool, name, addr string, port uint16, proto string, more func(FlowDelta) bool) func(FlowDelta) bool {
		return func(d FlowDelta) bool {
			a := ""
			if d.Target.Addr.IsValid() {
				a = d.Target.Addr.String()
			}
			return d.Allowed == allowed && d.Target.Name == name && a == addr && d.Target.Port == port && d.Target.Protocol == proto && more(d)
		}
	}
	log.wait(t, n, s.ID, is(true, "x.test", "8.8.8.8", 443, "tcp", func(d FlowDelta) bool {
		return d.Flows == 3 && d.BytesOut > 500 && d.BytesIn > 500 && strings.Contains(d.Rule, "rule 1")
	}))
	log.wait(t, n, s.ID, is(false, "y.test", "8.8.8.8", 443, "tcp", func(d FlowDelta) bool { return d.Flows == 1 && d.Rule != "" }))
	log.wait(t, n, s.ID, is(true, "git.test", "1.2.3.4", 22, "tcp", func(d FlowDelta) bool {
		return d.Flows == 2 && d.BytesOut > 100 && d.BytesIn > 100 && strings.Contains(d.Rule, "rule 2")
	}))
	log.wait(t, n, s.ID, is(true, "x.test", "8.8.8.8", 7000, "tcp", func(d FlowDelta) bool { return d.Flows == 2 && strings.Contains(d.Rule, "rule 3") }))
	log.wait(t, n, s.ID, is(false, "git.test", "1.2.3.4", 80, "tcp", func(d FlowDelta) bool { return d.Flows == 1 && strings.Contains(d.Rule, "mode allowlist") }))
	log.wait(t, n, s.ID, is(false, "x.test", "8.8.8.8", 0, "icmp", func(d FlowDelta) bool { return d.Flows == 1 }))
	// Counted before, told at the latest when the slot is given back.
	if !in.reaches("8.8.8.8:7000") {
		t.Fatal("not reached")
	}
	must(t, n.Release(t.Context(), s.ID))
	for _, d := range log.sum(s.ID) {
		if d.Target.Port == 7000 && d.Flows == 3 {
			return
		}
	}
	t.Error("the last flow was not told")
}

// TestA16FlowFlood: a scan fills neither kernel nor memory, and what found no room
// is counted.
func TestA16FlowFlood(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone()
	var log flowSink
	l.opts.OnFlows = log.take
	n := l.open()
	s, in := l.acquireUnder(n, rules(t, modeAllow))
	const total = 3000
	must(t, in.do(func() error {
		fd, err := unixUDP()
		if err != nil {
			return err
		}
		defer fd.close()
		for i := range total {
			fd.send(addrOf(8<<24|uint32(i)), 9)
		}
		return nil
	}))
	other, oin := l.acquireUnder(n, rules(t, modeAllow))
	oin.sendUDP("8.8.8.8:9")
	log.wait(t, n, other.ID, func(d FlowDelta) bool { return !d.Allowed && d.Target.Addr.String() == "8.8.8.8" })
	var counted, uncounted int64
	for _, d := range log.sum(s.ID) {
		if d.Uncounted > 0 {
			uncounted += d.Uncounted
		} else {
			counted++
		}
	}
	if counted > maxFlowDeltas || counted < 100 || uncounted == 0 || counted+uncounted < total*9/10 {
		t.Errorf("%d destinations, %d uncounted of %d", counted, uncounted, total)
	}
}

func TestFlowLogBounds(t *testing.T) {
	t.Parallel()
	l := newFlowLog()
	for i := range maxFlowDeltas + 100 {
		l.asked("s", fmt.Sprintf("n%d.test", i), "", false)
	}
	ds := l.take()["s"]
	if len(ds) != maxFlowDeltas+1 || ds[len(ds)-1].Uncounted != 100 {
		t.Errorf("%d deltas, %+v", len(ds), ds[len(ds)-1])
	}
	if len(l.take()) != 0 {
		t.Error("told twice")
	}
}
