package proxy

import (
	"crypto/tls"
	"io"
	"net"
	"testing"
)

// What a new TLS connection costs until its first byte came back, directly, and
// through the proxy, which reads the server name and dials.
func BenchmarkNewConnection(b *testing.B) {
	ca := newAuthority(b, "the internet")
	names := []string{"allow good.example"}
	for range 1000 {
		names = append(names, "allow x"+string(rune('a'+len(names)%26))+".n"+itoa(len(names))+".example")
	}
	echo := tlsEcho(b, ca, "good.example")
	var sessions = tls.NewLRUClientSessionCache(8)
	once := func(b *testing.B, c net.Conn) {
		tc := tls.Client(c, &tls.Config{ServerName: "good.example", RootCAs: ca.pool, ClientSessionCache: sessions})
		if _, err := io.ReadFull(tc, make([]byte, 10)); err != nil {
			b.Fatal(err)
		}
		_ = c.(*net.TCPConn).SetLinger(0)
		_ = c.Close()
	}
	b.Run("direct", func(b *testing.B) {
		for b.Loop() {
			c, err := net.Dial("tcp4", echo)
			must(b, err)
			once(b, c)
		}
	})
	for what, rules := range map[string][]string{"checked": names[:1], "checked, 1000 names": names} {
		b.Run(what, func(b *testing.B) {
			l := newLab(b, allow, rules, func(_ *lab, o *Options) { o.Log = nil })
			l.always = at(addrA, 443)
			l.host(l.always, echo)
			l.slot.pin(addrA, "good.example")
			for b.Loop() {
				c, err := net.Dial("tcp4", l.at)
				must(b, err)
				once(b, c)
			}
		})
	}
}

func itoa(n int) string {
	if n < 10 {
		return string(rune('0' + n))
	}
	return itoa(n/10) + string(rune('0'+n%10))
}

// How fast bytes go through, directly, spliced, and through inspected HTTP.
func BenchmarkThroughput(b *testing.B) {
	const size = 64 << 20
	sink := serveTCP(b, func(c net.Conn) {
		_, _ = io.Copy(io.Discard, c)
		_, _ = c.Write([]byte{1})
	})
	chunk := make([]byte, 256<<10)
	send := func(b *testing.B, c *net.TCPConn) {
		for n := 0; n < size; n += len(chunk) {
			_, err := c.Write(chunk)
			must(b, err)
		}
		must(b, c.CloseWrite())
		_, err := io.ReadFull(c, make([]byte, 1))
		must(b, err)
		_ = c.Close()
	}
	b.Run("direct", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			c, err := net.Dial("tcp4", sink)
			must(b, err)
			send(b, c.(*net.TCPConn))
		}
	})
	b.Run("checked", func(b *testing.B) {
		l := newLab(b, public, nil, func(_ *lab, o *Options) { o.Log = nil })
		l.always = at(addrA, 1)
		l.host(l.always, sink)
		b.SetBytes(size)
		for b.Loop() {
			c, err := net.Dial("tcp4", l.at)
			must(b, err)
			send(b, c.(*net.TCPConn))
		}
	})
}
