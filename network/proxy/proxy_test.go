package proxy

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"vivarium/sandbox"
)

var quiet = log.New(io.Discard, "", 0)

const (
	public = sandbox.NetworkPublic
	allow  = sandbox.NetworkAllowlist
)

// tlsEcho is a TLS server that echoes, with the name it was asked for first.
func tlsEcho(t testing.TB, ca *authority, names ...string) string {
	cert := ca.mustLeaf(t, names...)
	return serveTCP(t, func(c net.Conn) {
		tc := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{*cert}})
		if tc.Handshake() != nil {
			return
		}
		fmt.Fprintf(tc, "hello from %s\n", tc.ConnectionState().ServerName)
		_, _ = io.Copy(tc, tc)
		_ = tc.CloseWrite()
	})
}

// C5, C6, C11: a server name passes if the policy has it and the address is its
// own; whatever else does not.
func TestTLSNames(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t, "the internet")
	l := newLab(t, allow, []string{"allow good.example", "allow *.wild.example:443", "allow xn--bcher-kva.example", "deny no.wild.example"})
	echo := tlsEcho(t, ca, "good.example", "a.wild.example", "evil.example", "xn--bcher-kva.example")
	for _, a := range []netip.Addr{addrA, addrB} {
		for _, p := range []uint16{443, 8443} {
			l.host(at(a, p), echo)
		}
	}
	l.slot.pin(addrA, "good.example", "a.wild.example", "wild.example", "no.wild.example", "xn--bcher-kva.example", "evil.example")
	for _, c := range []struct {
		name, sni string
		to        netip.AddrPort
		ok        bool
		reason    string
	}{
		{"allowed", "good.example", at(addrA, 443), true, ""},
		{"odd case", "GooD.ExamplE", at(addrA, 443), true, ""},
		{"IDN", "xn--bcher-kva.example", at(addrA, 443), true, ""},
		{"below a wildcard", "a.wild.example", at(addrA, 443), true, ""},
		{"the apex", "wild.example", at(addrA, 443), false, "not allowed"},
		{"denied below a wildcard, by a later rule", "no.wild.example", at(addrA, 443), true, ""},
		{"other port", "good.example", at(addrA, 8443), false, "not allowed"},
		{"C5: an address that no answer gave", "good.example", at(addrB, 443), false, "not resolved"},
		{"C6: another name", "evil.example", at(addrA, 443), false, "not allowed"},
		{"a name that ends in an allowed one", "eviligood.example", at(addrA, 443), false, "not allowed"},
		{"C6: no server name", "", at(addrA, 443), false, "claims no name"},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := l.dials()
			nc := l.dial(c.to)
			defer nc.Close()
			tc := tls.Client(nc, &tls.Config{ServerName: c.sni, InsecureSkipVerify: true})
			err := tc.Handshake()
			if !c.ok {
				if err == nil || !strings.Contains(err.Error(), "access denied") {
					t.Fatalf("got %v, want an alert that access is denied", err)
				}
				r := l.record(c.name, func(r Record) bool { return r.Client == addrPort(nc.LocalAddr()) })
				if r.Allowed || !strings.Contains(r.Reason, c.reason) || r.End.IsZero() || r.Addr != c.to.Addr() || r.Port != c.to.Port() {
					t.Errorf("record %+v, want a refusal with %q", r, c.reason)
				}
				if l.dials() != before {
					t.Error("the server was dialled")
				}
				return
			}
			must(t, err)
			line, err := bufio.NewReader(tc).ReadString('\n')
			must(t, err)
			if !strings.EqualFold(line, "hello from "+c.sni+"\n") {
				t.Errorf("got %q", line)
			}
			must(t, tc.Close())
			r := l.record(c.name, func(r Record) bool { return r.Client == addrPort(nc.LocalAddr()) && !r.End.IsZero() })
			if !r.Allowed || r.Name != strings.ToLower(c.sni) || r.Rule == "" || r.Sent < 100 || r.Received < 100 || r.Kind != KindTLS {
				t.Errorf("record %+v", r)
			}
		})
	}
}

// clientHello is one as it goes over the wire.
func clientHello(t testing.TB, cfg *tls.Config) []byte {
	t.Helper()
	a, b := net.Pipe()
	defer b.Close()
	go func() { _ = tls.Client(a, cfg).Handshake(); _ = a.Close() }()
	head := make([]byte, 5)
	_, err := io.ReadFull(b, head)
	must(t, err)
	body := make([]byte, int(head[3])<<8|int(head[4]))
	_, err = io.ReadFull(b, body)
	must(t, err)
	return append(head, body...)
}

// withName puts another server name of the same length into a hello.
func withName(b []byte, from, to string) []byte {
	return bytes.Replace(b, []byte(from), []byte(to), 1)
}

// C6: spellings that no honest client sends are refused, not guessed at.
func TestOddHellos(t *testing.T) {
	t.Parallel()
	l := newLab(t, allow, []string{"allow good.example", "allow *"})
	l.host(at(addrA, 443), serveTCP(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }))
	l.slot.pin(addrA, "good.example", "1.2.3.4", "93.184.216.34", "good.exampl", "xn--gd-xka.example")
	hello := clientHello(t, &tls.Config{ServerName: "good.example"})
	for name, b := range map[string][]byte{
		"trailing dot":  withName(hello, "good.example", "good.exampl."),
		"raw bytes":     withName(hello, "good.example", "g\xc3\xb6d.exampl\xc3"),
		"U-label":       withName(hello, "good.example", "g\xc3\xb6d.example"[:12]),
		"IP literal":    withName(clientHello(t, &tls.Config{ServerName: "93.184.216.zz"}), "93.184.216.zz", "93.184.216.34"),
		"hex address":   withName(hello, "good.example", "0x5d.0xb8.22"),
		"NUL":           withName(hello, "good.example", "good\x00example"),
		"asterisk":      withName(hello, "good.example", "*ood.example"),
		"space":         withName(hello, "good.example", "good example"),
		"cut short":     append([]byte{22, 3, 1, 0, 20}, hello[5:25]...),
		"not a hello":   {22, 3, 1, 0, 4, 2, 0, 0, 0},
		"alert first":   append([]byte{21, 3, 1, 0, 2, 1, 0}, hello...),
		"record of 17k": append([]byte{22, 3, 1, 0x44, 0}, make([]byte, 0x4400)...),
	} {
		t.Run(name, func(t *testing.T) {
			c := l.dial(at(addrA, 443))
			if _, err := c.Write(b); err == nil {
				_ = c.CloseWrite() // it may be reset already
			}
			got, err := io.ReadAll(c)
			if err == nil && !bytes.Equal(got, []byte{21, 3, 3, 0, 2, 2, 49}) {
				t.Errorf("got %q, want an alert or a reset", got)
			}
			r := l.record(name, func(r Record) bool { return r.Client == addrPort(c.LocalAddr()) })
			if r.Allowed {
				t.Errorf("record %+v, want a refusal", r)
			}
		})
	}
	if l.dials() != 0 {
		t.Error("a server was dialled")
	}
}

// A hello in single bytes, in records of one byte, and as large as crypto/tls reads.
func TestHelloSizes(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t, "the internet")
	l := newLab(t, allow, []string{"allow good.example"})
	got := make(chan []byte, 8)
	l.host(at(addrA, 443), serveTCP(t, func(c net.Conn) {
		b, _ := io.ReadAll(c)
		got <- b
	}))
	l.host(at(addrA, 80), tlsEcho(t, ca, "good.example"))
	l.slot.pin(addrA, "good.example")
	hello := clientHello(t, &tls.Config{ServerName: "good.example"})
	var single []byte
	for _, b := range hello[5:] {
		single = append(single, 22, 3, 1, 0, 1, b)
	}
	var protos []string
	for i := range 250 {
		protos = append(protos, fmt.Sprintf("%0250d", i))
	}
	large := largeHelloBytes(t, protos)
	send := func(t *testing.T, b []byte, one bool) {
		t.Helper()
		c := l.dial(at(addrA, 443))
		must(t, c.SetNoDelay(true))
		if one {
			for i := range b {
				_, err := c.Write(b[i : i+1])
				must(t, err)
			}
		} else {
			_, err := c.Write(b)
			must(t, err)
		}
		must(t, c.CloseWrite())
		if g := <-got; !bytes.Equal(g, b) {
			t.Errorf("the server got %d bytes that are not the %d sent", len(g), len(b))
		}
	}
	t.Run("single bytes", func(t *testing.T) { send(t, hello, true) })
	t.Run("records of a byte", func(t *testing.T) { send(t, single, false) })
	t.Run("64 KiB", func(t *testing.T) {
		if len(large) < 62<<10 {
			t.Fatalf("only %d bytes", len(large))
		}
		send(t, large, false)
	})
	t.Run("larger", func(t *testing.T) {
		b := []byte{22, 3, 1, 0x40, 0, 1, 1, 0, 1} // a hello of 64 KiB and a byte
		b = append(b, make([]byte, 0x4000-4)...)
		c := l.dial(at(addrA, 443))
		_, _ = c.Write(b)
		_, err := io.ReadAll(c)
		wantReset(t, err)
	})
	t.Run("many large", func(t *testing.T) {
		// Each holds 20 KiB and says no more: only so many of a slot may.
		var cs []net.Conn
		for range maxLarge + 8 {
			c := l.dial(at(addrA, 443))
			_, err := c.Write(large[:20<<10])
			must(t, err)
			cs = append(cs, c)
		}
		for range 8 {
			l.record("a large one too many", func(r Record) bool { return strings.Contains(r.Reason, "too many bytes") })
		}
		for _, c := range cs {
			_ = c.Close()
		}
	})
}

// largeHelloBytes is a hello with much ALPN in it, in records of 16 KiB.
func largeHelloBytes(t testing.TB, protos []string) []byte {
	a, b := net.Pipe()
	defer b.Close()
	go func() {
		_ = tls.Client(a, &tls.Config{ServerName: "good.example", NextProtos: protos}).Handshake()
		_ = a.Close()
	}()
	var out []byte
	size := -1
	for n := 0; size < 0 || n < size; {
		head := make([]byte, 5)
		_, err := io.ReadFull(b, head)
		must(t, err)
		body := make([]byte, int(head[3])<<8|int(head[4]))
		_, err = io.ReadFull(b, body)
		must(t, err)
		if size < 0 {
			size = 4 + int(body[1])<<16 | int(body[2])<<8 | int(body[3])
		}
		n += len(body)
		out = append(append(out, head...), body...)
	}
	return out
}

// Bytes go both ways until both ends have ended, and the end of one direction is
// not the end of the other.
func TestHalfClose(t *testing.T) {
	t.Parallel()
	l := newLab(t, public, nil)
	sum := make(chan int64, 1)
	l.host(at(addrA, 5000), serveTCP(t, func(c net.Conn) {
		n, _ := io.Copy(io.Discard, c)
		sum <- n
		_, _ = c.Write(bytes.Repeat([]byte("x"), 3<<20))
		_ = c.(*net.TCPConn).CloseWrite()
	}))
	c := l.dial(at(addrA, 5000))
	_, err := c.Write(bytes.Repeat([]byte{0}, 5<<20))
	must(t, err)
	must(t, c.CloseWrite())
	if n := <-sum; n != 5<<20 {
		t.Errorf("%d bytes arrived", n)
	}
	b, err := io.ReadAll(c)
	must(t, err)
	if len(b) != 3<<20 {
		t.Errorf("%d bytes came back", len(b))
	}
	r := l.record("end", func(r Record) bool { return !r.End.IsZero() })
	if r.Sent != 5<<20 || r.Received != 3<<20 || !r.Allowed || r.Reason != "" {
		t.Errorf("record %+v", r)
	}
}

// A server that fails is one that fails for the client, who still gets what it said.
func TestServerResets(t *testing.T) {
	t.Parallel()
	l := newLab(t, public, nil)
	l.host(at(addrA, 5000), serveTCP(t, func(c net.Conn) {
		b := make([]byte, 1)
		_, _ = c.Read(b)
		_, _ = c.Write([]byte("bye"))
		_, _ = c.Read(b)
		_ = c.(*net.TCPConn).SetLinger(0)
	}))
	c := l.dial(at(addrA, 5000))
	_, err := c.Write([]byte{1})
	must(t, err)
	b := make([]byte, 3)
	_, err = io.ReadFull(c, b)
	must(t, err)
	_, err = c.Write([]byte{2})
	must(t, err)
	if _, err = c.Read(b); err == nil {
		t.Error("the connection goes on")
	}
	wantReset(t, err)
	d := l.dial(at(addrB, 5000)) // nobody is there
	_, err = raw(t, d, "\x00hello")
	wantReset(t, err)
}

// What speaks first is decided by address: passed where the address is allowed,
// refused under an allow-list of names.
func TestServerFirst(t *testing.T) {
	t.Parallel()
	greet := serveTCP(t, func(c net.Conn) {
		_, _ = io.WriteString(c, "220 hello\r\n")
		_, _ = io.Copy(c, c)
	})
	t.Run("allowed", func(t *testing.T) {
		l := newLab(t, public, []string{"deny evil.example"})
		l.host(at(addrA, 25), greet)
		c := l.dial(at(addrA, 25))
		br := bufio.NewReader(c)
		line, err := br.ReadString('\n')
		must(t, err)
		_, err = io.WriteString(c, "EHLO me\r\n")
		must(t, err)
		back, err := br.ReadString('\n')
		must(t, err)
		if line != "220 hello\r\n" || back != "EHLO me\r\n" {
			t.Errorf("got %q and %q", line, back)
		}
	})
	t.Run("a slow client of a checked name is still checked", func(t *testing.T) {
		l := newLab(t, public, []string{"deny evil.example"})
		l.host(at(addrA, 443), serveTCP(t, func(c net.Conn) { _, _ = io.Copy(c, c) }))
		c := l.dial(at(addrA, 443))
		// longer than the proxy waits for it: it has dialled
		for l.dials() == 0 {
			time.Sleep(10 * time.Millisecond)
		}
		err := tls.Client(c, &tls.Config{ServerName: "evil.example", InsecureSkipVerify: true}).Handshake()
		if err == nil || !strings.Contains(err.Error(), "access denied") {
			t.Errorf("got %v", err)
		}
		c = l.dial(at(addrA, 443))
		for l.dials() == 1 {
			time.Sleep(10 * time.Millisecond)
		}
		got, _ := raw(t, c, "\r\nget / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
		if !strings.HasPrefix(got, "HTTP/1.1 4") {
			t.Errorf("got %q", got)
		}
	})
	t.Run("refused", func(t *testing.T) {
		l := newLab(t, allow, []string{"allow good.example:25"}, func(_ *lab, o *Options) { o.PeekTimeout = 50 * time.Millisecond })
		l.host(at(addrA, 25), greet)
		l.slot.pin(addrA, "good.example")
		c := l.dial(at(addrA, 25))
		_, err := io.ReadAll(c)
		wantReset(t, err)
		c = l.dial(at(addrA, 25))
		_, err = raw(t, c, "SSH-2.0-me\r\n")
		wantReset(t, err)
		if l.dials() != 0 {
			t.Error("the server was dialled")
		}
	})
	t.Run("a rule for the name with /tcp", func(t *testing.T) {
		l := newLab(t, allow, []string{"allow db.example:25/tcp"})
		l.host(at(addrA, 25), greet)
		l.slot.pin(addrA, "db.example")
		c := l.dial(at(addrA, 25))
		line, err := bufio.NewReader(c).ReadString('\n')
		must(t, err)
		if line != "220 hello\r\n" {
			t.Errorf("got %q", line)
		}
	})
}

// Where addresses are allowed and some names denied, what claims a denied one is
// refused, in TLS and HTTP, and everything else passes.
func TestDeniedNames(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t, "the internet")
	l := newLab(t, public, []string{"deny evil.example", "deny *.evil.example"})
	l.host(at(addrA, 443), tlsEcho(t, ca, "x"))
	web := serveHTTP(t, nil, echoHost)
	l.host(at(addrA, 80), web.addr)
	for sni, ok := range map[string]bool{"evil.example": false, "EVIL.example": false, "a.evil.example": false, "fine.example": true, "": true} {
		err := tls.Client(l.dial(at(addrA, 443)), &tls.Config{ServerName: sni, InsecureSkipVerify: true}).Handshake()
		if (err == nil) != ok {
			t.Errorf("server name %q: %v", sni, err)
		}
	}
	for host, want := range map[string]int{
		"evil.example": 403, "EviL.exAmple": 403, "evil.example.": 403, "evil.example:80": 403, "a.b.evil.example": 403,
		"fine.example": 200, "93.184.216.34": 200, "evil.example\t": 403, "evil%2eexample": 400, "evil.example,a": 400, "a@evil.example": 400,
		"evil\xe3\x80\x82example": 400, "evil.example:80:80": 400, "*": 400, "evil.example:": 400,
	} {
		c := l.dial(at(addrA, 80))
		got, body := exchange(t, c, bufio.NewReader(c), "GET / HTTP/1.1\r\nHost: "+host+"\r\n\r\n")
		if got != want {
			t.Errorf("host %q: %d %s, want %d", host, got, body, want)
		}
	}
	for _, first := range []string{"\r\n\r\nGET / HTTP/1.1", "get / HTTP/1.1", "GET\t/ HTTP/1.1", "FOO / HTTP/1.1", "GET http://evil.example/", "GET / http/1.1"} {
		c := l.dial(at(addrA, 80))
		got, _ := raw(t, c, first+"\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
		if !strings.HasPrefix(got, "HTTP/1.1 4") {
			t.Errorf("%q: got %q", first, got)
		}
	}
	if n := web.requests.Load(); n != 2 {
		t.Errorf("%d requests arrived, want 2", n)
	}
}

// Connections are bounded by slot and in all, and a slot that has none gets some.
func TestLimits(t *testing.T) {
	t.Parallel()
	other := &fakeSlot{id: "s2", names: map[netip.Addr][]string{}}
	l := newLab(t, public, nil, func(l *lab, o *Options) {
		o.MaxConns, o.MaxConnsPerSlot, o.Reserved = 5, 4, 2
		other.node, other.pol = l.slot.node, l.slot.pol
		o.Slot = func(a netip.Addr) Slot {
			switch a.As4()[3] {
			case 1:
				return l.slot
			case 2:
				return other
			}
			return nil
		}
	})
	l.host(at(addrA, 1), serveTCP(t, func(c net.Conn) { _, _ = io.Copy(c, c) }))
	try := func(from string) bool {
		t.Helper()
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		nc, err := d.Dial("tcp4", l.at)
		if err != nil { // the reset came before the end of connecting
			wantReset(t, err)
			return false
		}
		t.Cleanup(func() { _ = nc.Close() })
		l.mu.Lock()
		l.dsts[addrPort(nc.LocalAddr())] = at(addrA, 1)
		l.moved.Broadcast()
		l.mu.Unlock()
		_ = nc.SetDeadline(time.Now().Add(20 * time.Second))
		if _, err = nc.Write([]byte{0}); err != nil {
			return false
		}
		_, err = nc.Read(make([]byte, 1))
		return err == nil
	}
	for i, c := range []struct {
		from string
		ok   bool
	}{
		{"127.0.0.1", true}, {"127.0.0.1", true}, {"127.0.0.1", true}, {"127.0.0.1", true}, {"127.0.0.1", false}, // its own bound
		{"127.0.0.2", true}, {"127.0.0.2", true}, {"127.0.0.2", false}, // all's bound, past what is reserved
		{"127.0.0.3", false}, // nobody's
	} {
		if got := try(c.from); got != c.ok {
			t.Errorf("connection %d from %s: %v, want %v", i, c.from, got, c.ok)
		}
	}
	if n := len(l.srv.Active("s1")); n != 4 {
		t.Errorf("%d flows of s1, want 4", n)
	}
	if n := l.srv.Drop("s1"); n != 4 {
		t.Errorf("dropped %d", n)
	}
	for len(l.srv.Active("s1")) > 0 {
		time.Sleep(10 * time.Millisecond)
	}
	if !try("127.0.0.1") {
		t.Error("no connection after the others are gone")
	}
	if n := len(l.srv.Active("")); n != 3 {
		t.Errorf("%d flows in all, want 3", n)
	}
}

// A connection to the proxy itself goes nowhere.
func TestToItself(t *testing.T) {
	t.Parallel()
	l := newLab(t, public, nil)
	// The reset may come before the end of connecting.
	if c, err := l.tryDial(netip.MustParseAddrPort(l.at)); err == nil {
		_, err = io.ReadAll(c)
		wantReset(t, err)
		_ = c.Close()
	}
	plain, err := net.Listen("tcp4", "127.0.0.1:0")
	must(t, err)
	// the kernel knows no other destination of a connection that was not redirected
	m := newLab(t, public, nil, func(_ *lab, o *Options) { o.Listener, o.OriginalDst = plain, nil })
	if d, err := net.Dial("tcp4", plain.Addr().String()); err == nil {
		_, err = io.ReadAll(d)
		wantReset(t, err)
		_ = d.Close()
	}
	if l.dials()+m.dials() != 0 {
		t.Error("something was dialled")
	}
}

// An idle connection ends.
func TestIdle(t *testing.T) {
	t.Parallel()
	l := newLab(t, public, nil, func(_ *lab, o *Options) { o.IdleTimeout = time.Second })
	l.host(at(addrA, 1), serveTCP(t, func(c net.Conn) { _, _ = io.Copy(c, c) }))
	c := l.dial(at(addrA, 1))
	_, err := c.Write([]byte{0})
	must(t, err)
	_, err = io.ReadAll(c)
	wantReset(t, err)
	l.record("idle", func(r Record) bool { return strings.Contains(r.Reason, "idle") })
}

// C17: what a new policy does not allow is cut, told of or not; the rest stays.
func TestPolicyChange(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t, "the internet")
	l := newLab(t, allow, []string{"allow good.example", "allow other.example", "allow 93.184.216.34/32:1"})
	echo := tlsEcho(t, ca, "good.example", "other.example")
	l.host(at(addrA, 443), echo)
	l.host(at(addrA, 1), serveTCP(t, func(c net.Conn) { _, _ = io.Copy(c, c) }))
	stream := make(chan struct{})
	l.host(at(addrA, 80), serveHTTP(t, nil, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, "first\n")
		_ = http.NewResponseController(w).Flush()
		select {
		case <-r.Context().Done():
		case <-stream:
		}
	}).addr)
	defer close(stream)
	l.slot.pin(addrA, "good.example", "other.example")
	open := func(name string) (*tls.Conn, *bufio.Reader) {
		tc := tls.Client(l.dial(at(addrA, 443)), &tls.Config{ServerName: name, InsecureSkipVerify: true})
		br := bufio.NewReader(tc)
		_, err := br.ReadString('\n')
		must(t, err)
		return tc, br
	}
	alive := func(what string, c net.Conn, br *bufio.Reader) {
		t.Helper()
		_, err := io.WriteString(c, "ping\n")
		must(t, err)
		if s, err := br.ReadString('\n'); err != nil || s != "ping\n" {
			t.Fatalf("%s: %q %v", what, s, err)
		}
	}
	cut := func(what string, br *bufio.Reader) {
		t.Helper()
		if s, err := br.ReadString('\n'); err == nil {
			t.Fatalf("%s goes on: %q", what, s)
		} else {
			wantReset(t, err)
		}
	}
	good, goodR := open("good.example")
	other, otherR := open("other.example")
	tcp := l.dial(at(addrA, 1))
	tcpR := bufio.NewReader(tcp)
	alive("tcp", tcp, tcpR)
	web := l.dial(at(addrA, 80))
	webR := bufio.NewReader(web)
	_, err := io.WriteString(web, "GET / HTTP/1.1\r\nHost: good.example\r\n\r\n")
	must(t, err)
	for s := ""; s != "first\n"; {
		s, err = webR.ReadString('\n')
		must(t, err)
	}
	_, err = webR.ReadString('\n') // the end of the chunk
	must(t, err)

	// pins that are gone change nothing
	l.slot.pin(addrA)
	l.policy(allow, "allow good.example", "allow other.example", "allow 93.184.216.34/32:1", "allow more.example")
	if n := l.srv.Reevaluate("s1"); n != 0 {
		t.Errorf("cut %d", n)
	}
	alive("good", good, goodR)
	alive("other", other, otherR)
	alive("tcp", tcp, tcpR)

	l.policy(allow, "allow other.example", "allow 93.184.216.34/32:1")
	if n := l.srv.Reevaluate("s1"); n != 2 {
		t.Errorf("cut %d, want 2", n)
	}
	cut("good", goodR)
	cut("web", webR)
	alive("other", other, otherR)
	r := l.record("cut", func(r Record) bool { return r.Name == "good.example" && r.Kind == KindTLS && !r.End.IsZero() })
	if !strings.Contains(r.Reason, "policy changed") {
		t.Errorf("record %+v", r)
	}

	// nobody tells
	l.policy(allow, "allow other.example", "inspect other.example")
	cut("tcp", tcpR)
	cut("other, which is inspected now", otherR)
	for len(l.srv.Active("s1")) > 0 {
		time.Sleep(10 * time.Millisecond)
	}
}

// The tools of the host, as somebody inside would use them.
func TestTools(t *testing.T) {
	t.Parallel()
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Skip("no curl")
	}
	ca := newAuthority(t, "the internet")
	l := newLab(t, allow, []string{"allow good.example"})
	l.host(at(addrA, 443), serveHTTP(t, ca.mustLeaf(t, "good.example", "evil.example"), echoHost).addr)
	l.host(at(addrA, 80), serveHTTP(t, nil, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/away" {
			http.Redirect(w, r, "http://evil.example/", http.StatusFound)
			return
		}
		echoHost(w, r)
	}).addr)
	l.slot.pin(addrA, "good.example")
	run := func(port uint16, args ...string) string {
		t.Helper()
		l.mu.Lock()
		l.always = at(addrA, port)
		l.mu.Unlock()
		if !slices.Contains(args, "-x") {
			args = append(args, "--connect-to", "::"+l.at)
		}
		cmd := exec.Command(curl, append([]string{"-qsSk", "--max-time", "20"}, args...)...)
		cmd.Env = []string{"PATH=/usr/bin:/bin"} // no proxy of the host's
		out, _ := cmd.CombinedOutput()
		return string(out)
	}
	for _, c := range []struct {
		what string
		port uint16
		args []string
		want string
	}{
		{"https", 443, []string{"https://good.example/x"}, "GET /x host=good.example"},
		{"http", 80, []string{"http://good.example/x"}, "GET /x host=good.example"},
		{"post", 80, []string{"-d", "abc", "http://good.example/x"}, "body=abc"},
		{"100-continue", 80, []string{"-H", "Expect: 100-continue", "-d", "abc", "http://good.example/x"}, "body=abc"},
		{"h2c", 80, []string{"--http2-prior-knowledge", "http://good.example/x"}, "GET /x host=good.example"},
		{"upgrade to h2c", 80, []string{"--http2", "http://good.example/x"}, "GET /x host=good.example"},
		{"denied https", 443, []string{"https://evil.example/"}, "access denied"},
		{"denied http", 80, []string{"http://evil.example/"}, "vivarium: network policy refuses evil.example:80: not allowed (policy: mode allowlist)"},
		{"no server name", 443, []string{"https://93.184.216.34/"}, "access denied"},
		{"Host alone", 80, []string{"-H", "Host: evil.example", "http://good.example/"}, "network policy refuses evil.example:80"},
		{"C13: redirect to a denied host", 80, []string{"-L", "http://good.example/away"}, "network policy refuses evil.example:80"},
		{"C7: CONNECT relay", 80, []string{"-p", "-x", "http://" + l.at, "http://evil.example/"}, "response 403"},
		{"C7: a proxy's GET", 80, []string{"-x", "http://" + l.at, "http://evil.example/"}, "network policy refuses evil.example:80"},
	} {
		if got := run(c.port, c.args...); !strings.Contains(got, c.want) {
			t.Errorf("%s: got %q, want %q in it", c.what, got, c.want)
		}
	}
	if openssl, err := exec.LookPath("openssl"); err == nil {
		l.mu.Lock()
		l.always = at(addrA, 443)
		l.mu.Unlock()
		for _, v := range []string{"-tls1_2", "-tls1_3"} {
			for name, want := range map[string]string{"good.example": "BEGIN CERTIFICATE", "evil.example": "alert access denied"} {
				cmd := exec.Command(openssl, "s_client", v, "-connect", l.at, "-servername", name)
				cmd.Stdin = strings.NewReader("")
				out, _ := cmd.CombinedOutput()
				if !strings.Contains(string(out), want) {
					t.Errorf("openssl %s %s: %s", v, name, out)
				}
			}
		}
	}
}

// Nothing that a client says first breaks the proxy, nor gets to a server that an
// allow-list does not have.
func FuzzFirstBytes(f *testing.F) {
	hello := clientHello(f, &tls.Config{ServerName: "good.example"})
	for _, s := range []string{
		string(hello), string(withName(hello, "good.example", "evil.example")), string(hello[:40]),
		"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", "GET http://evil.example/ HTTP/1.1\r\nHost: good.example\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: good.example\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", "SSH-2.0-x\r\n", "\r\n\r\n", "\x16", "\x16\x03", "\x80\x2e\x01\x03\x01", "",
		"GET / HTTP/1.1\r\nHost: good.example\r\nHost: evil.example\r\n\r\n", "CONNECT evil.example:80 HTTP/1.1\r\nHost: good.example\r\n\r\n",
	} {
		f.Add([]byte(s))
	}
	var mu sync.Mutex
	var bad string
	web := serveHTTP(f, nil, func(w http.ResponseWriter, r *http.Request) {
		if h, _, _ := strings.Cut(r.Host, ":"); h != "good.example" {
			mu.Lock()
			bad = r.Host
			mu.Unlock()
		}
	})
	l := newLab(f, allow, []string{"allow good.example"}, func(_ *lab, o *Options) { o.PeekTimeout = time.Second })
	l.host(at(addrA, 80), web.addr)
	l.slot.pin(addrA, "good.example")
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := l.tryDial(at(addrA, 80))
		must(t, err)
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		if _, err := c.Write(b); err == nil {
			_ = c.CloseWrite()
		}
		_, err = io.Copy(io.Discard, c)
		if isTimeout(err) {
			t.Errorf("%q: no end", b)
		}
		mu.Lock()
		defer mu.Unlock()
		if bad != "" {
			t.Errorf("%q: a request for %q arrived", b, bad)
			bad = ""
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.dsts, addrPort(c.LocalAddr()))
		l.records, l.dialled = nil, nil
	})
}
