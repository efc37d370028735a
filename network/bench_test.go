package network

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/miekg/dns"

	"vivarium/sandbox"
)

// scale is how many slots live while the benchmarks run.
func scale(b *testing.B) int {
	if v := os.Getenv("NETWORK_BENCH_SLOTS"); v != "" {
		k, err := strconv.Atoi(v)
		must(b, err)
		return k
	}
	return 50
}

func percentiles(b *testing.B, ds []time.Duration) {
	slices.Sort(ds)
	b.ReportMetric(float64(ds[len(ds)/2].Microseconds()), "p50-µs")
	b.ReportMetric(float64(ds[len(ds)*99/100].Microseconds()), "p99-µs")
}

// BenchmarkAcquire takes slots with policy public from a full pool.
func BenchmarkAcquire(b *testing.B) {
	l := newLab(b)
	n := l.open()
	for range scale(b) {
		_, err := n.Acquire(context.Background(), AcquireOptions{Owner: "bystander", Policy: sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic}})
		must(b, err)
	}
	var ds []time.Duration
	for b.Loop() {
		b.StopTimer()
		if _, err := n.grow(false); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
		start := time.Now()
		_, err := n.Acquire(context.Background(), AcquireOptions{Owner: "x", Policy: sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic}})
		ds = append(ds, time.Since(start))
		must(b, err)
	}
	percentiles(b, ds)
}

// BenchmarkChurn acquires and releases 20 slots a second, refill and destruction
// going on behind: what one caller sees of Acquire.
func BenchmarkChurn(b *testing.B) {
	l := newLab(b)
	l.opts.Pool = 8
	n := l.open()
	var ds []time.Duration
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for b.Loop() {
		<-tick.C
		start := time.Now()
		s, err := n.Acquire(context.Background(), AcquireOptions{Owner: "x", Policy: sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic}})
		ds = append(ds, time.Since(start))
		must(b, err)
		must(b, n.Release(context.Background(), s.ID))
	}
	percentiles(b, ds)
}

// BenchmarkMakeSlot makes slots from nothing.
func BenchmarkMakeSlot(b *testing.B) {
	l := newLab(b)
	n := l.open()
	for range scale(b) {
		_, err := n.Acquire(context.Background(), AcquireOptions{Owner: "bystander"})
		must(b, err)
	}
	var ds []time.Duration
	for b.Loop() {
		start := time.Now()
		_, err := n.grow(true)
		ds = append(ds, time.Since(start))
		must(b, err)
	}
	percentiles(b, ds)
}

// BenchmarkAdopt opens a network with slots in use.
func BenchmarkAdopt(b *testing.B) {
	l := newLab(b)
	n := l.open()
	for i := range scale(b) {
		_, err := n.Acquire(context.Background(), AcquireOptions{Owner: fmt.Sprint(i), Policy: sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic}})
		must(b, err)
	}
	n.Close()
	for b.Loop() {
		m, err := Open(context.Background(), l.opts)
		must(b, err)
		if len(m.slots) < scale(b) {
			b.Fatalf("%d slots", len(m.slots))
		}
		m.Close()
	}
}

// BenchmarkRelease measures until the slot is closed; destruction goes on behind.
func BenchmarkRelease(b *testing.B) {
	l := newLab(b)
	n := l.open()
	var ds []time.Duration
	for b.Loop() {
		b.StopTimer()
		s, err := n.Acquire(context.Background(), AcquireOptions{Owner: "x", Policy: sandbox.NetworkPolicy{Mode: sandbox.NetworkPublic}})
		must(b, err)
		b.StartTimer()
		start := time.Now()
		must(b, n.Release(context.Background(), s.ID))
		ds = append(ds, time.Since(start))
	}
	percentiles(b, ds)
}

// manyNames is a list of k names and a few addresses, as agents have them.
func manyNames(b *testing.B, k int) sandbox.NetworkPolicy {
	p := rules(b, sandbox.NetworkAllowlist, "allow 8.8.8.0/24:443", "allow 1.1.1.1:443", "deny *.ads.test")
	for i := range k {
		p.Rules = append(p.Rules, rules(b, sandbox.NetworkAllowlist, fmt.Sprintf("allow h%d.test", i)).Rules...)
	}
	return p
}

// BenchmarkAcquireAllowlist takes slots with a list of names from a full pool: one
// that others have already, and one of its own.
func BenchmarkAcquireAllowlist(b *testing.B) {
	for _, own := range []bool{false, true} {
		b.Run(fmt.Sprintf("own=%v", own), func(b *testing.B) {
			l := newLab(b)
			n := l.open()
			p := manyNames(b, 50)
			for range scale(b) {
				_, err := n.Acquire(context.Background(), AcquireOptions{Owner: "bystander", Policy: p})
				must(b, err)
			}
			var ds []time.Duration
			for i := 0; b.Loop(); i++ {
				b.StopTimer()
				if _, err := n.grow(false); err != nil {
					b.Fatal(err)
				}
				q := p
				if own {
					q.Rules = append(rules(b, sandbox.NetworkAllowlist, fmt.Sprintf("allow 9.%d.%d.0/24:443", i/256, i%256)).Rules, p.Rules...)
				}
				b.StartTimer()
				start := time.Now()
				_, err := n.Acquire(context.Background(), AcquireOptions{Owner: "x", Policy: q})
				ds = append(ds, time.Since(start))
				must(b, err)
			}
			percentiles(b, ds)
		})
	}
}

// BenchmarkSetPolicy changes the policy of one slot among many with policies, pins
// and open flows.
func BenchmarkSetPolicy(b *testing.B) {
	for _, k := range []int{10, 1000} {
		b.Run(fmt.Sprintf("names=%d", k), func(b *testing.B) {
			l := newLab(b)
			n := l.open()
			var s *Slot
			for i := range scale(b) {
				p := manyNames(b, 10)
				p.Rules = append(p.Rules, rules(b, sandbox.NetworkAllowlist, fmt.Sprintf("allow 9.9.%d.0/24:443", i)).Rules...)
				var err error
				s, err = n.Acquire(context.Background(), AcquireOptions{Owner: "bystander", Policy: p})
				must(b, err)
				sl := n.slots[s.ID]
				for j := range 20 {
					must(b, n.pin(sl, sl.pol.Load(), fmt.Sprintf("h%d.test", j%10), map[netip.Addr]time.Duration{addrOf(11<<24 | uint32(j)): minPin}))
				}
			}
			ps := []sandbox.NetworkPolicy{manyNames(b, k), manyNames(b, k+1)}
			var ds []time.Duration
			for i := 0; b.Loop(); i++ {
				start := time.Now()
				_, err := n.SetPolicy(context.Background(), s.ID, ps[i%2])
				ds = append(ds, time.Since(start))
				must(b, err)
			}
			percentiles(b, ds)
		})
	}
}

// BenchmarkReadBack compares what the kernel has for one slot among many.
func BenchmarkReadBack(b *testing.B) {
	l := newLab(b)
	n := l.open()
	var s *Slot
	for range scale(b) {
		var err error
		s, err = n.Acquire(context.Background(), AcquireOptions{Owner: "x", Policy: manyNames(b, 50)})
		must(b, err)
	}
	for b.Loop() {
		_, err := n.ReadBack(context.Background(), s.ID)
		must(b, err)
	}
}

// BenchmarkDNSPin answers a query from the cache, with the pin in the kernel
// before the answer; renewed is an answer whose pin is there already.
func BenchmarkDNSPin(b *testing.B) {
	for _, k := range []int{10, 1000} {
		for _, renewed := range []bool{false, true} {
			b.Run(fmt.Sprintf("names=%d/renewed=%v", k, renewed), func(b *testing.B) {
				l := newLab(b)
				n := l.open()
				s, err := n.Acquire(context.Background(), AcquireOptions{Owner: "x", Policy: manyNames(b, k)})
				must(b, err)
				sl := n.slots[s.ID]
				var ds []time.Duration
				for i := 0; b.Loop(); i++ {
					name, addr := "h1.test.", "7.7.7.7"
					if !renewed {
						addr = addrOf(7<<24 | uint32(i)).String()
					}
					r := &reply{}
					r.Answer = []dns.RR{rr(name + " 60 IN A " + addr)}
					n.dns.cache.put(cacheKey{name, dns.TypeA}, r, time.Now())
					start := time.Now()
					got, err := n.dns.resolveUnder(sl, sl.pol.Load(), dns.Question{Name: name, Qtype: dns.TypeA, Qclass: dns.ClassINET})
					ds = append(ds, time.Since(start))
					if err != nil || len(got.Answer) != 1 {
						b.Fatal(got, err)
					}
				}
				percentiles(b, ds)
			})
		}
	}
}
