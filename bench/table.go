package bench

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
)

// Goal is one line of the table of what is promised.
type Goal struct {
	What string
	From string  // which result: the name that a run gave it
	Max  float64 // at most; 0 with Min
	Min  float64 // at least; 0 with Max
	Unit string
	Get  func(*Result) (float64, bool)
}

func p50(r *Result) (float64, bool) { return deref(r.P50) }
func p99(r *Result) (float64, bool) { return deref(r.P99) }
func val(r *Result) (float64, bool) { return deref(r.Value) }

func deref(p *float64) (float64, bool) {
	if p == nil {
		return 0, false
	}
	return *p, true
}

func ratio(peer string) func(*Result) (float64, bool) {
	return func(r *Result) (float64, bool) { p, ok := r.Peers[peer]; return p.Ratio, ok }
}

func detail(name string) func(*Result) (float64, bool) {
	return func(r *Result) (float64, bool) { d, ok := r.Details[name]; return d.Value, ok }
}

func stage(name string) func(*Result) (float64, bool) {
	return func(r *Result) (float64, bool) { s, ok := r.Stage[name]; return s.P50, ok }
}

func count(r *Result) (float64, bool) { return float64(r.N), r.P50 != nil }

// Goals are for two cores, with a pool of 8 and 5 arrivals per second.
var Goals = []Goal{
	{What: "create to first output, p50", From: "tti", Max: 25, Unit: "ms", Get: p50},
	{What: "create to first output, p99", From: "tti", Max: 80, Unit: "ms", Get: p99},
	{What: "the same with the pool off, p50", From: "tti-pool-off", Max: 90, Unit: "ms", Get: p50},
	{What: "against runsc run", From: "tti", Max: 1. / 3, Unit: "of it", Get: ratio("runsc")},
	{What: "against podman --runtime runsc run", From: "tti", Max: 1. / 8, Unit: "of it", Get: ratio("podman")},
	{What: "exec round trip, p50", From: "exec", Max: 6, Unit: "ms", Get: p50},
	{What: "against runsc exec", From: "exec", Max: 1. / 8, Unit: "of it", Get: ratio("runsc")},
	{What: "memory per idle sandbox", From: "density", Max: 14, Unit: "MB", Get: val},
	{What: "alive at once, all answering exec", From: "density-many", Min: 1000, Get: count},
	{What: "create, exec and remove by 8 clients", From: "churn", Min: 20, Unit: "per second", Get: val},
	{What: "1 GiB of stdout", From: "io", Min: 200, Unit: "MB/s", Get: detail("stdout")},
	{What: "1 GiB file up", From: "io", Min: 200, Unit: "MB/s", Get: detail("file_up")},
	{What: "1 GiB file down", From: "io", Min: 200, Unit: "MB/s", Get: detail("file_down")},
	{What: "daemon memory growth meanwhile", From: "io", Max: 64, Unit: "MB", Get: detail("daemon_growth")},
	{What: "daemon killed: all answer after", From: "recovery", Max: 5, Unit: "s", Get: val},
	{What: "CPU of idle sandboxes and daemon", From: "density-idle", Max: 5, Unit: "% of a core", Get: detail("idle_cpu")},
	{What: "one TCP stream out of a sandbox", From: "net", Min: .3, Unit: "of the host's", Get: val},
	{What: "through the name-checked proxy", From: "net", Min: .8, Unit: "of direct", Get: detail("proxy")},
	{What: "new connection, added by an address rule", From: "net", Max: 1, Unit: "ms", Get: detail("added_by_address_rule")},
	{What: "new connection, added by a name rule", From: "net", Max: 3, Unit: "ms", Get: detail("added_by_name_rule")},
	// no more, as far as medians of a few hundred can tell
	{What: "new connection, 1,000 names against 10", From: "net", Max: .1, Unit: "ms more", Get: detail("added_by_many_names")},
	{What: "policy change with 200 alive, p50", From: "net", Max: 100, Unit: "ms", Get: stage("policy_change")},
	{What: "npm ci, warm package cache against none", From: "npm", Min: 2, Unit: "times faster", Get: val},
}

// Table writes goals and what was measured, by the names of the results. A goal
// without a result is named as not measured.
func Table(w io.Writer, results map[string]*Result) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "WHAT\tGOAL\tMEASURED\tN\t")
	for _, g := range Goals {
		sign, goal := "<=", g.Max
		if g.Min > 0 {
			sign, goal = ">=", g.Min
		}
		fmt.Fprintf(t, "%s\t%s %.4g %s\t", g.What, sign, goal, g.Unit)
		r := results[g.From]
		if r == nil {
			fmt.Fprintln(t, "not measured\t-\t")
			continue
		}
		v, ok := g.Get(r)
		if !ok {
			fmt.Fprintf(t, "not measured\t%d\t\n", r.N)
			continue
		}
		met := ""
		if g.Min > 0 && v < g.Min || g.Min == 0 && v > g.Max {
			met = "missed"
		}
		fmt.Fprintf(t, "%s\t%d\t%s\n", strings.TrimSpace(fmt.Sprintf("%.4g %s", v, g.Unit)), r.N, met)
	}
	return t.Flush()
}
