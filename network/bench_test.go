package network

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

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
