package wire

import "net/netip"

// MaxReach bounds what MReach sends and receives, in bytes.
const MaxReach = 4096

// Reach is one try to reach an address from inside: the canary of a network
// policy. TCP connects and, with Data, sends it and takes the first answer; UDP
// sends Data and waits for one packet.
type Reach struct {
	To      netip.AddrPort // IPv4
	UDP     bool
	Data    []byte
	Timeout int64 // milliseconds
}

// Append appends r as a payload.
func (r *Reach) Append(b []byte) []byte {
	b = AppendString(b, r.To.Addr().AsSlice())
	b = AppendBool(AppendUint(b, uint64(r.To.Port())), r.UDP)
	return AppendInt(AppendString(b, r.Data), r.Timeout)
}

// DecodeReach decodes the payload of MReach.
func DecodeReach(b []byte) (Reach, error) {
	d := NewDec(b)
	a, ok := netip.AddrFromSlice([]byte(d.String(4)))
	port := uint16(d.Uint(65535))
	r := Reach{To: netip.AddrPortFrom(a, port), UDP: d.Bool(), Data: []byte(d.String(MaxReach)), Timeout: d.Int()}
	if err := d.End(); err != nil {
		return r, err
	}
	if !ok || r.Timeout < 1 || r.Timeout > 10_000 {
		return r, ErrFrame
	}
	return r, nil
}

// Reached is what came of it.
type Reached struct {
	Errno int // 0: it was reached; else errno(3); ETIMEDOUT when nothing came back in time
	Data  []byte
}

// Append appends r as a payload.
func (r *Reached) Append(b []byte) []byte {
	return AppendString(AppendUint(b, uint64(r.Errno)), r.Data)
}

// DecodeReached decodes the answer to MReach.
func DecodeReached(b []byte) (Reached, error) {
	d := NewDec(b)
	r := Reached{Errno: int(d.Uint(4095)), Data: []byte(d.String(MaxReach))}
	return r, d.End()
}
