package guest

import (
	"context"
	"net/netip"
	"syscall"
	"time"

	"vivarium/guest/wire"
)

// Reach tries to reach an IPv4 address from inside and returns the answer to
// data, if there was any. TCP without data only connects. An error of type
// syscall.Errno is what a program inside would have met; all of it is the
// guest's word. within is 1 ms to 10 s.
func (c *Client) Reach(ctx context.Context, udp bool, to netip.AddrPort, data []byte, within time.Duration) ([]byte, error) {
	r := wire.Reach{To: to, UDP: udp, Data: data, Timeout: within.Milliseconds()}
	p, err := c.call(ctx, wire.MReach, r.Append)
	if err != nil {
		return nil, err
	}
	got, err := wire.DecodeReached(p)
	if err != nil {
		return nil, broken("reach answered wrongly")
	}
	if got.Errno != 0 {
		return nil, syscall.Errno(got.Errno)
	}
	return got.Data, nil
}
