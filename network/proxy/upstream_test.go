package proxy

import (
	"bufio"
	"context"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

func writePEM(t testing.TB, path string, c *x509.Certificate) {
	t.Helper()
	must(t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}), 0o600))
}

// upstreamProxy is one of others: it tells what it was asked for.
type upstreamProxy struct {
	mu   sync.Mutex
	asks []string
	addr string
}

func (u *upstreamProxy) ask(s string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.asks = append(u.asks, s)
}

func join(a, b net.Conn, br io.Reader) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(a, b)
		_ = a.(*net.TCPConn).CloseWrite()
	}()
	_, _ = io.Copy(b, br)
	_ = b.(*net.TCPConn).CloseWrite()
	<-done
}

// serveConnect is an HTTP proxy that knows just CONNECT.
func serveConnect(t testing.TB, to func(string) string) *upstreamProxy {
	u := &upstreamProxy{}
	u.addr = serveTCP(t, func(c net.Conn) {
		br := bufio.NewReader(c)
		r, err := http.ReadRequest(br)
		if err != nil {
			return
		}
		u.ask(r.Method + " " + r.RequestURI + " " + r.Header.Get("Proxy-Authorization"))
		b, err := net.Dial("tcp4", to(r.RequestURI))
		if err != nil {
			_, _ = io.WriteString(c, "HTTP/1.1 503 no\r\n\r\n")
			return
		}
		defer b.Close()
		// the answer and the server's first words in one piece, where it speaks first
		first := make([]byte, 100)
		_ = b.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		n, _ := b.Read(first)
		_ = b.SetReadDeadline(time.Time{})
		_, _ = c.Write(append([]byte("HTTP/1.1 200 OK\r\n\r\n"), first[:n]...))
		join(c, b, br)
	})
	return u
}

// serveSOCKS is a SOCKS5 proxy with user and password (RFC 1928, RFC 1929).
func serveSOCKS(t testing.TB, to func(string) string) *upstreamProxy {
	u := &upstreamProxy{}
	u.addr = serveTCP(t, func(c net.Conn) {
		b := make([]byte, 512)
		read := func(n int) []byte {
			if _, err := io.ReadFull(c, b[:n]); err != nil {
				panic(http.ErrAbortHandler)
			}
			return b[:n]
		}
		defer func() { _ = recover() }()
		read(int(read(2)[1]))
		_, _ = c.Write([]byte{5, 2})
		user := string(read(int(read(2)[1])))
		pass := string(read(int(read(1)[0])))
		_, _ = c.Write([]byte{1, 0})
		q := read(10) // IPv4 only
		dst := fmt.Sprintf("%d.%d.%d.%d:%d", q[4], q[5], q[6], q[7], int(q[8])<<8|int(q[9]))
		u.ask(fmt.Sprintf("%d %s %s:%s", q[3], dst, user, pass))
		s, err := net.Dial("tcp4", to(dst))
		if err != nil {
			_, _ = c.Write([]byte{5, 5, 0, 1, 0, 0, 0, 0, 0, 0})
			return
		}
		defer s.Close()
		_, _ = c.Write([]byte{5, 0, 0, 1, 0, 0, 0, 0, 0, 0})
		join(c, s, c)
	})
	return u
}

// Everything of a slot that has one goes through its upstream proxy, which is told
// the address that was judged.
func TestUpstream(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t, "the internet")
	for _, kind := range []string{"http", "socks5"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			var u *upstreamProxy
			l := newLab(t, allow, []string{"allow good.example", "allow api.example", "allow 151.101.1.69/32", "inspect api.example"}, func(l *lab, o *Options) {
				to := func(s string) string {
					l.mu.Lock()
					defer l.mu.Unlock()
					if a := l.hosts[netip.MustParseAddrPort(s)]; a != "" {
						return a
					}
					return "127.0.0.1:1"
				}
				u = map[string]func(testing.TB, func(string) string) *upstreamProxy{"http": serveConnect, "socks5": serveSOCKS}[kind](t, to)
				o.DialUpstream = func(ctx context.Context, _ Slot, p *url.URL) (net.Conn, error) {
					var d net.Dialer
					return d.DialContext(ctx, "tcp4", u.addr)
				}
				l.slot.upstream = &url.URL{Scheme: kind, User: url.UserPassword("me", "p:w"), Host: "proxy.local:3128"}
			})
			inj := &fakeInjector{ca: newAuthority(t, "the sandbox"), roots: ca.pool}
			l.slot.inj = inj
			l.slot.pin(addrA, "good.example", "api.example")
			l.host(at(addrA, 443), serveHTTP(t, ca.mustLeaf(t, "good.example", "api.example"), echoHost).addr)
			l.host(at(addrA, 80), serveHTTP(t, nil, echoHost).addr)
			l.host(at(addrB, 25), serveTCP(t, func(c net.Conn) {
				_, _ = io.WriteString(c, "220 hello\r\n")
				_, _ = io.Copy(c, c)
			}))
			for what, c := range map[string]*http.Client{"TLS": insideClient(t, l, ca, true), "inspected": insideClient(t, l, inj.ca, true)} {
				r, err := c.Get(map[string]string{"TLS": "https://good.example/", "inspected": "https://api.example/"}[what])
				must(t, err)
				b, _ := io.ReadAll(r.Body)
				_ = r.Body.Close()
				if !strings.HasPrefix(string(b), "GET / host=") {
					t.Errorf("%s: %s", what, b)
				}
			}
			c := l.dial(at(addrA, 80))
			if n, b := exchange(t, c, bufio.NewReader(c), "GET / HTTP/1.1\r\nHost: good.example\r\n\r\n"); n != 200 {
				t.Errorf("%d %s", n, b)
			}
			c = l.dial(at(addrA, 80))
			if n, b := exchange(t, c, bufio.NewReader(c), "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"); n != 403 {
				t.Errorf("%d %s", n, b)
			}
			c = l.dial(at(addrB, 25))
			br := bufio.NewReader(c)
			if s, err := br.ReadString('\n'); err != nil || s != "220 hello\r\n" {
				t.Errorf("%q %v", s, err)
			}
			_, err := io.WriteString(c, "QUIT\r\n")
			must(t, err)
			if s, err := br.ReadString('\n'); err != nil || s != "QUIT\r\n" {
				t.Errorf("%q %v", s, err)
			}
			d := l.dial(at(addrB, 26)) // the proxy says no
			_, err = raw(t, d, "\x00")
			wantReset(t, err)
			if l.dials() != 0 {
				t.Error("something was dialled past the proxy")
			}
			want := "CONNECT 93.184.216.34:443 Basic " + base64.StdEncoding.EncodeToString([]byte("me:p:w"))
			if kind == "socks5" {
				want = "1 93.184.216.34:443 me:p:w"
			}
			u.mu.Lock()
			for i, a := range u.asks {
				if i == 0 && a != want {
					t.Errorf("asked %q, want %q", a, want)
				}
				if strings.Contains(a, "example") {
					t.Errorf("asked for a name: %q", a)
				}
			}
			if len(u.asks) != 5 {
				t.Errorf("asked %q", u.asks)
			}
			u.mu.Unlock()

			// another proxy: what went through this one is cut
			l.slot.mu.Lock()
			l.slot.upstream = nil
			l.slot.mu.Unlock()
			l.srv.Reevaluate("s1")
			_, err = br.ReadByte()
			wantReset(t, err)
		})
	}
}

// A proxy that is hostile, silent, or of an unknown kind fails the connection and
// nothing else.
func TestUpstreamFails(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ scheme, says string }{
		"no":         {"http", "HTTP/1.1 407 Proxy Authentication Required\r\n\r\n"},
		"not HTTP":   {"http", "SSH-2.0-x\r\n"},
		"endless":    {"http", "HTTP/1.1 200 OK\r\nX: " + strings.Repeat("a", 1<<20)},
		"silent":     {"http", ""},
		"not SOCKS":  {"socks5", "HTTP/1.1 400 Bad Request\r\n\r\n"},
		"mute SOCKS": {"socks5", ""},
		"not TLS":    {"https", "HTTP/1.1 400 Bad Request\r\n\r\n"},
		"unknown":    {"gopher", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, public, nil, func(l *lab, o *Options) {
				addr := serveTCP(t, func(nc net.Conn) {
					_, _ = io.WriteString(nc, c.says)
					_, _ = io.Copy(io.Discard, nc)
				})
				o.DialTimeout = 300 * time.Millisecond
				o.DialUpstream = func(context.Context, Slot, *url.URL) (net.Conn, error) { return net.Dial("tcp4", addr) }
				l.slot.upstream = &url.URL{Scheme: c.scheme, Host: "proxy.local:1"}
			})
			nc := l.dial(at(addrA, 443))
			_, err := raw(t, nc, "\x00hello")
			wantReset(t, err)
			r := l.record("end", func(r Record) bool { return !r.End.IsZero() })
			if !strings.HasPrefix(r.Reason, "connect: ") {
				t.Errorf("record %+v", r)
			}
		})
	}
	l := newLab(t, public, nil)
	l.host(at(addrA, 443), serveTCP(t, func(net.Conn) {}))
	l.slot.upstream = &url.URL{Scheme: "http", Host: "proxy.local:1"} // and no way there
	_, err := raw(t, l.dial(at(addrA, 443)), "\x00hello")
	wantReset(t, err)
	if l.dials() != 0 {
		t.Error("dialled past the proxy")
	}
}
