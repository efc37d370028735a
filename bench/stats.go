package bench

import (
	"math"
	"slices"
	"time"
)

// percentile is the smallest sample that at least p percent of all samples do
// not exceed (nearest rank): a time that was in fact measured, never one
// between two. It is 0 without samples.
func percentile(samples []time.Duration, p float64) time.Duration {
	if len(samples) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(samples))
	i := int(math.Ceil(p/100*float64(len(s)))) - 1
	return s[min(max(i, 0), len(s)-1)]
}

// ms is a duration in milliseconds, to the microsecond.
func ms(d time.Duration) float64 { return round(float64(d)/float64(time.Millisecond), 3) }

// round keeps n digits after the point.
func round(x float64, n int) float64 {
	f := math.Pow10(n)
	return math.Round(x*f) / f
}
