package tunnel

import (
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strconv"
	"time"

	"vivarium/sandbox"
)

// Ports is a range of ports of the host, both ends included; 0, 0 is none.
type Ports struct{ First, Last uint16 }

// listenTCP opens a port of the range, the given one if it is not 0.
func (m *Manager) listenTCP(port uint16) (net.Listener, error) {
	listen := func(p uint16) (net.Listener, error) {
		return net.Listen("tcp", net.JoinHostPort(m.opts.TCPAddress, strconv.Itoa(int(p))))
	}
	if port != 0 {
		l, err := listen(port)
		if err != nil {
			return nil, sandbox.Conflict.Errorf("listen for tunnel: %w", err)
		}
		return l, nil
	}
	r := m.opts.Ports
	if r.First == 0 {
		return nil, sandbox.Unsupported.Errorf("this node has no ports for tcp tunnels").WithHint("set tunnel.ports in its configuration")
	}
	n := int(r.Last) - int(r.First) + 1
	var last error
	for i, start := 0, rand.IntN(n); i < n; i++ { // anywhere, so that a port that was closed is not at once another's
		l, err := listen(r.First + uint16((start+i)%n))
		if err == nil {
			return l, nil
		}
		last = err
	}
	return nil, sandbox.Exhausted.Errorf("no port from %d to %d is free: %w", r.First, r.Last, last).WithHint("close tunnels, or widen tunnel.ports")
}

// serveTCP takes connections until the listener is closed.
func (l *live) serveTCP(ln net.Listener) {
	for {
		c, err := ln.Accept()
		if err != nil {
			if errors.Is(err, net.ErrClosed) || l.ctx.Err() != nil {
				return
			}
			select { // out of descriptors, say
			case <-time.After(100 * time.Millisecond):
			case <-l.ctx.Done():
			}
			continue
		}
		if !allows(l.t.Spec, peer(c.RemoteAddr())) || !l.enter() {
			refuse(c)
			continue
		}
		go func() {
			defer l.leave()
			l.carry(c)
		}()
	}
}

// carry passes bytes between a client and the port inside. When one side ends
// what it sends, so does what the other gets; when one breaks, both are cut.
func (l *live) carry(client net.Conn) {
	defer client.Close()
	if !l.hold(client) {
		return
	}
	defer l.drop(client)
	inside, err := l.dial(l.ctx)
	if err != nil {
		l.m.log.Debug("connect to port of sandbox", "sandbox", l.t.SandboxID, "port", l.t.Spec.Port, "err", err)
		refuse(client)
		return
	}
	defer inside.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		oneWay(inside, client)
	}()
	oneWay(client, inside)
	<-done
}

func oneWay(to, from net.Conn) {
	_, err := io.Copy(to, from)
	w, ok := to.(interface{ CloseWrite() error })
	if err != nil || !ok || w.CloseWrite() != nil {
		_ = to.Close()
		_ = from.Close()
	}
}
