package network

import (
	"time"

	"vivarium/sandbox"
)

// FlowDelta is what was seen of one destination of a slot since the last time.
type FlowDelta struct {
	Allowed  bool
	Target   sandbox.FlowTarget
	Rule     string // who decided, where known
	Flows    int64  // new connections, queries
	BytesOut int64
	BytesIn  int64
	First    time.Time
	// Uncounted are flows to destinations that found no room; then there is no
	// target.
	Uncounted int64
}

// PollFlows makes the counters of a slot be read soon.
func (n *Network) PollFlows(slotID string) {
	select {
	case n.wakeFlows <- slotID:
	default:
	}
}
