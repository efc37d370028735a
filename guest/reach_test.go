package guest_test

import (
	"errors"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"vivarium/sandbox"
)

func TestReach(t *testing.T) {
	t.Parallel()
	b := start(t)
	ctx := b.ctx()
	at := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port) }
	for _, udp := range []bool{false, true} {
		if _, err := b.Reach(ctx, udp, at(9), []byte("x"), time.Second); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("nobody listens, udp %v: %v", udp, err)
		}
	}
	s, err := b.StartExec(ctx, newID(), sandbox.ExecSpec{Argv: []string{"python3", "-c", `
import socket
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("127.0.0.1", 7001))
t = socket.socket(); t.bind(("127.0.0.1", 7001)); t.listen(5)
print("ready", flush=True)
d, a = u.recvfrom(100); u.sendto(b"u" + d, a)
u.recvfrom(100)  # without an answer
while True:
    c = t.accept()[0]; d = c.recv(100)
    if d: c.sendall(b"t" + d)
`}})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if f, err := s.Recv(); err != nil || f.Exit != nil {
		t.Fatal(err, f)
	}
	if p, err := b.Reach(ctx, true, at(7001), []byte("ab"), time.Second); err != nil || string(p) != "uab" {
		t.Errorf("%q %v", p, err)
	}
	if p, err := b.Reach(ctx, true, at(7001), []byte("ab"), 50*time.Millisecond); !errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("no answer: %q %v", p, err)
	}
	if p, err := b.Reach(ctx, false, at(7001), nil, time.Second); err != nil || len(p) > 0 {
		t.Errorf("%q %v", p, err)
	}
	if p, err := b.Reach(ctx, false, at(7001), []byte("ab"), time.Second); err != nil || string(p) != "tab" {
		t.Errorf("%q %v", p, err)
	}
	for _, bad := range []time.Duration{0, time.Minute} {
		if _, err := b.Reach(ctx, false, at(7001), nil, bad); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("a wait of %v: %v", bad, err)
		}
	}
}
