package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// Result is what a bench found. Its JSON form is part of the interface.
type Result struct {
	Bench   string `json:"bench"`
	Runtime string `json:"runtime"`
	N       int    `json:"n"`
	// Percentiles of the samples in milliseconds; nil where none were taken.
	P50 *float64 `json:"p50_ms,omitempty"`
	P95 *float64 `json:"p95_ms,omitempty"`
	P99 *float64 `json:"p99_ms,omitempty"`
	// The figure itself where it is not a latency.
	Value *float64         `json:"value,omitempty"`
	Unit  string           `json:"unit,omitempty"`
	Peers map[string]Peer  `json:"peers"`
	Stage map[string]Stage `json:"stages"`
	// Further figures of a bench that has several.
	Details map[string]Detail `json:"details,omitempty"`
	// Peers that were not measured, and why.
	Missing map[string]string `json:"missing,omitempty"`
	// How it was measured, where the reader should know.
	Notes []string `json:"notes,omitempty"`
}

// Peer is another way to do the same.
type Peer struct {
	P50 float64 `json:"p50_ms,omitempty"`
	// Where the figure is not a latency.
	Value float64 `json:"value,omitempty"`
	Unit  string  `json:"unit,omitempty"`
	Ratio float64 `json:"ratio"` // ours by the peer's, medians
}

// Stage is a stage of a sandbox's life.
type Stage struct {
	P50 float64 `json:"p50_ms"`
}

// Detail is one more figure.
type Detail struct {
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
}

func newResult(o Options) *Result {
	return &Result{
		Bench: o.Bench, Runtime: o.Runtime, N: o.N,
		Peers: map[string]Peer{}, Stage: map[string]Stage{}, Details: map[string]Detail{}, Missing: map[string]string{},
	}
}

// latency sets the percentiles.
func (r *Result) latency(samples []time.Duration) {
	if len(samples) == 0 {
		return
	}
	p := func(x float64) *float64 { v := ms(percentile(samples, x)); return &v }
	r.P50, r.P95, r.P99 = p(50), p(95), p(99)
}

// value sets the figure.
func (r *Result) value(v float64, unit string) {
	v = round(v, 3)
	r.Value, r.Unit = &v, unit
}

func (r *Result) detail(name string, v float64, unit string) {
	r.Details[name] = Detail{round(v, 3), unit}
}

// compare adds a peer, once the percentiles are set.
func (r *Result) compare(name string, samples []time.Duration) {
	if len(samples) == 0 {
		return
	}
	p := Peer{P50: ms(percentile(samples, 50))}
	if r.P50 != nil && p.P50 > 0 {
		p.Ratio = round(*r.P50/p.P50, 4)
	}
	r.Peers[name] = p
}

func (r *Result) note(format string, args ...any) {
	r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
}

// WriteJSON writes one object on one line.
func (r *Result) WriteJSON(w io.Writer) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	_, err = w.Write(append(b, '\n'))
	return err
}

// WriteText writes the same for people.
func (r *Result) WriteText(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s  runtime %s  n=%d\n", r.Bench, r.Runtime, r.N)
	for _, n := range r.Notes {
		fmt.Fprintf(&b, "  %s\n", n)
	}
	t := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	num := func(x float64) string { return strconv.FormatFloat(x, 'f', -1, 64) }
	if r.Value != nil {
		fmt.Fprintf(t, "  value\t%s %s\n", num(*r.Value), r.Unit)
	}
	if r.P50 != nil {
		fmt.Fprintf(t, "  p50\t%s ms\n  p95\t%s ms\n  p99\t%s ms\n", num(*r.P50), num(*r.P95), num(*r.P99))
	}
	for _, k := range slices.Sorted(maps.Keys(r.Details)) {
		fmt.Fprintf(t, "  %s\t%s %s\n", k, num(r.Details[k].Value), r.Details[k].Unit)
	}
	for _, k := range slices.Sorted(maps.Keys(r.Stage)) {
		fmt.Fprintf(t, "  stage %s\t%s ms p50\n", k, num(r.Stage[k].P50))
	}
	for _, k := range slices.Sorted(maps.Keys(r.Peers)) {
		p := r.Peers[k]
		figure := num(p.P50) + " ms p50"
		if p.Unit != "" {
			figure = num(p.Value) + " " + p.Unit
		}
		fmt.Fprintf(t, "  peer %s\t%s\tours/%s %s\n", k, figure, k, num(p.Ratio))
	}
	for _, k := range slices.Sorted(maps.Keys(r.Missing)) {
		fmt.Fprintf(t, "  peer %s\tmissing: %s\n", k, strings.ReplaceAll(r.Missing[k], "\n", " "))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := io.WriteString(w, b.String())
	return err
}
