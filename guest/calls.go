package guest

import (
	"context"
	"encoding/hex"
	"slices"
	"strconv"
	"time"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// Ping asks the guest whether it is there.
func (c *Client) Ping(ctx context.Context) (wire.Pong, error) {
	p, err := c.call(ctx, wire.MPing, nil)
	if err != nil {
		return wire.Pong{}, err
	}
	pong, err := wire.DecodePong(p)
	if err != nil {
		return wire.Pong{}, broken("ping answered wrongly")
	}
	return pong, nil
}

// maxExecs is how many execs a guest may claim to know.
const maxExecs = 1 << 14

// ListExecs lists the execs that the guest knows: running ones, and ended ones
// whose exit was not acknowledged.
func (c *Client) ListExecs(ctx context.Context) ([]wire.ExecInfo, error) {
	var all []wire.ExecInfo
	after := ""
	for {
		p, err := c.call(ctx, wire.MExecs, func(b []byte) []byte { return wire.AppendString(b, after) })
		if err != nil {
			return nil, err
		}
		l, more, err := wire.DecodeExecs(p)
		if err != nil || more && len(l) == 0 || len(all)+len(l) > maxExecs {
			return nil, broken("list of execs answered wrongly")
		}
		for _, e := range l {
			if e.ID <= after || e.StdoutFirst > e.StdoutLen || e.StderrFirst > e.StderrLen {
				return nil, broken("list of execs answered wrongly")
			}
			after = e.ID
		}
		all = append(all, l...)
		if !more {
			return all, nil
		}
	}
}

// Signal sends a signal to the process group of an exec. One that has ended is
// no error.
func (c *Client) Signal(ctx context.Context, id string, sig int) error {
	if sig < 1 || sig > 64 || len(id) > wire.MaxID {
		return sandbox.Invalid.Errorf("no such signal or exec")
	}
	_, err := c.call(ctx, wire.MSignal, func(b []byte) []byte { return wire.AppendUint(wire.AppendString(b, id), uint64(sig)) })
	return err
}

// SetHostname sets the host name and /etc/hostname.
func (c *Client) SetHostname(ctx context.Context, name string) error {
	return c.Prepare(ctx, wire.Setup{Hostname: name})
}

// Prepare writes files that a sandbox needs. What is to be there before the
// first exec is better given to process 1 in its environment: see SetupEnv.
func (c *Client) Prepare(ctx context.Context, s wire.Setup) error {
	p, err := encodeSetup(s)
	if err != nil {
		return err
	}
	_, err = c.call(ctx, wire.MPrepare, func(b []byte) []byte { return append(b, p...) })
	return err
}

// Environ is what process 1 of a sandbox needs in its environment: where to
// listen, the key, and what to write before anything else (nil: nothing). With
// ready it says on its standard output, by one byte, that it listens, and lets
// go of it: see Options.Ready. Its program is viv-guest.
func Environ(port uint16, key []byte, setup *wire.Setup, ready bool) ([]string, error) {
	if len(key) != wire.KeySize || port == 0 {
		return nil, sandbox.Internal.Errorf("guest key of %d bytes, port %d", len(key), port)
	}
	env := []string{
		wire.EnvPort + "=" + strconv.Itoa(int(port)),
		wire.EnvKey + "=" + hex.EncodeToString(key),
	}
	if setup != nil {
		p, err := encodeSetup(*setup)
		if err != nil {
			return nil, err
		}
		env = append(env, wire.EnvSetup+"="+hex.EncodeToString(p))
	}
	if ready {
		env = append(env, wire.EnvReady+"=1")
	}
	return env, nil
}

// NewKey makes a key for a sandbox.
func NewKey() []byte {
	k := make([]byte, wire.KeySize)
	wire.Random(k)
	return k
}

// SetXattrs sets extended attributes of files, as root and not following
// links: those of an image whose filesystem cannot hold them. All are tried;
// the first error is returned.
func (c *Client) SetXattrs(ctx context.Context, l []wire.Xattr) (first error) {
	const batch = 32 << 10
	var b []byte
	for i := 0; i <= len(l); i++ {
		var one []byte
		if i < len(l) {
			x := l[i]
			if one = x.Append(nil); len(x.Path) > wire.MaxPath || len(x.Name) > 255 || len(one) > batch {
				first = sandbox.Invalid.Errorf("attribute %.64q is too long", x.Name)
				continue
			}
		}
		if len(b) > 0 && (i == len(l) || len(b)+len(one) > batch) {
			_, err := c.call(ctx, wire.MXattrs, func(h []byte) []byte { return append(h, b...) })
			if err != nil && first == nil {
				first = err
			}
			b = b[:0]
		}
		b = append(b, one...)
	}
	return first
}

func encodeSetup(s wire.Setup) ([]byte, error) {
	p := s.Append(nil)
	if _, err := wire.DecodeSetup(p); err != nil || len(p) > 48<<10 {
		return nil, sandbox.Invalid.Errorf("host name, hosts or resolver configuration too long")
	}
	return p, nil
}

// SetTime sets the clock, where the sandbox has one of its own: Unsupported
// elsewhere.
func (c *Client) SetTime(ctx context.Context, t time.Time) error {
	_, err := c.call(ctx, wire.MTime, func(b []byte) []byte { return wire.AppendInt(b, t.UnixNano()) })
	return err
}

// Stats says what the guest sees of its sandbox.
func (c *Client) Stats(ctx context.Context) (wire.Stats, error) {
	p, err := c.call(ctx, wire.MStats, nil)
	if err != nil {
		return wire.Stats{}, err
	}
	s, err := wire.DecodeStats(p)
	if err != nil {
		return s, broken("stats answered wrongly")
	}
	return s, nil
}

// Rekey replaces the key, which a clone shares with its origin. Connections
// that there are stay; new ones need the new key. After an error either key may
// be the right one.
func (c *Client) Rekey(ctx context.Context, key []byte) error {
	if len(key) != wire.KeySize {
		return sandbox.Internal.Errorf("guest key of %d bytes", len(key))
	}
	nonce := make([]byte, wire.KeySize)
	wire.Random(nonce)
	c.mu.Lock()
	masked := wire.Mask(c.key, nonce, key)
	c.mu.Unlock()
	_, err := c.call(ctx, wire.MRekey, func(b []byte) []byte { return wire.AppendString(wire.AppendString(b, nonce), masked) })
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.key = slices.Clone(key)
	c.mu.Unlock()
	return nil
}

// ProbePort says whether something in the sandbox listens on a TCP port of the
// loopback interface.
func (c *Client) ProbePort(ctx context.Context, port uint16) (bool, error) {
	p, err := c.call(ctx, wire.MProbe, func(b []byte) []byte { return wire.AppendUint(b, uint64(port)) })
	if err != nil {
		return false, err
	}
	d := wire.NewDec(p)
	open := d.Bool()
	if d.End() != nil {
		return false, broken("probe answered wrongly")
	}
	return open, nil
}
