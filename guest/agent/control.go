package agent

import "vivarium/guest/wire"

// control serves calls, many at a time.
func (a *Agent) control(c *conn) {
	for {
		t, p, err := c.r.Next()
		if err != nil || t != wire.TCall {
			return
		}
		d := wire.NewDec(p)
		id, method := d.Uint(1<<32), wire.Method(d.Uint(255))
		if d.Bad() {
			return
		}
		if method == wire.MPing {
			if c.frame(wire.TReply, func(b []byte) []byte { return a.ping(wire.AppendUint(b, id)) }) != nil {
				return
			}
		}
	}
}

func (a *Agent) ping(b []byte) []byte { return wire.AppendUint(b, wire.Version) }
