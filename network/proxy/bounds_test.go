package proxy

import (
	"bufio"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// What comes in drops has as long as anything else, and then ends.
func TestDrips(t *testing.T) {
	t.Parallel()
	l := newLab(t, allow, []string{"allow good.example"}, func(_ *lab, o *Options) {
		o.PeekTimeout, o.RequestIdle = 400*time.Millisecond, 400*time.Millisecond
	})
	l.host(at(addrA, 80), serveHTTP(t, nil, echoHost).addr)
	l.slot.pin(addrA, "good.example")
	hello := string(clientHello(t, &tls.Config{ServerName: "good.example"}))
	for what, text := range map[string]string{
		"hello":        hello,
		"request line": "GET /" + strings.Repeat("a", 1000) + " HTTP/1.1\r\n\r\n",
		"headers":      "GET / HTTP/1.1\r\nHost: good.example\r\nX: " + strings.Repeat("a", 1000) + "\r\n\r\n",
		"empty lines":  strings.Repeat("\r\n", 1000),
		"token":        "GET",
		"h2 preface":   "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + strings.Repeat("\x00", 1000),
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			c := l.dial(at(addrA, 80))
			must(t, c.SetNoDelay(true))
			if what == "headers" || what == "h2 preface" { // past what is looked at first
				_, err := io.WriteString(c, text[:30])
				must(t, err)
				text = text[30:]
			}
			go func() {
				for i := range len(text) {
					if _, err := c.Write([]byte{text[i]}); err != nil {
						return
					}
					time.Sleep(50 * time.Millisecond)
				}
			}()
			if _, err := io.Copy(io.Discard, c); isTimeout(err) {
				t.Error("it goes on")
			}
		})
	}
	t.Run("nothing after an answer", func(t *testing.T) {
		t.Parallel()
		c := l.dial(at(addrA, 80))
		br := bufio.NewReader(c)
		if n, _ := exchange(t, c, br, "GET / HTTP/1.1\r\nHost: good.example\r\n\r\n"); n != 200 {
			t.Errorf("status %d", n)
		}
		if _, err := br.ReadByte(); isTimeout(err) {
			t.Error("it goes on")
		}
	})
}

// Answers of servers are bounded, and a server that ends early is one that fails.
func TestBadServers(t *testing.T) {
	t.Parallel()
	l := newLab(t, allow, []string{"allow good.example"})
	l.slot.pin(addrA, "good.example")
	for what, text := range map[string]string{
		"endless headers": "HTTP/1.1 200 OK\r\n" + strings.Repeat("X: "+strings.Repeat("a", 1000)+"\r\n", 2000),
		"endless line":    "HTTP/1.1 200 " + strings.Repeat("a", 2<<20),
		"not HTTP":        "SSH-2.0-x\r\n\r\n",
		"nothing":         "",
		"another upgrade": "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
	} {
		l.host(at(addrA, 80), serveTCP(t, func(c net.Conn) {
			_, _ = http.ReadRequest(bufio.NewReader(c))
			_, _ = io.WriteString(c, text)
		}))
		c := l.dial(at(addrA, 80))
		n, b := exchange(t, c, bufio.NewReader(c), "POST / HTTP/1.1\r\nHost: good.example\r\nContent-Length: 0\r\n\r\n")
		if n != 502 || !strings.HasPrefix(b, "vivarium: cannot get an answer from good.example: ") {
			t.Errorf("%s: %d %s", what, n, b)
		}
	}
}

// C17: a client that has said nothing yet is cut like any other.
func TestPolicyChangeWaiting(t *testing.T) {
	t.Parallel()
	l := newLab(t, public, nil)
	l.host(at(addrA, 25), serveTCP(t, func(c net.Conn) { _, _ = io.Copy(c, c) }))
	c := l.dial(at(addrA, 25))
	for l.dials() == 0 {
		time.Sleep(10 * time.Millisecond)
	}
	l.policy(allow)
	_, err := c.Read(make([]byte, 1))
	wantReset(t, err)
}

// The injector of the moment is asked, and without one nothing goes on.
func TestInjectorChange(t *testing.T) {
	t.Parallel()
	l, inj, _ := inspected(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Header.Get("Authorization"))
	})
	hc := insideClient(t, l, inj.ca, true)
	get := func() (int, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(context.Background(), "GET", "https://api.example/", nil)
		must(t, err)
		req.Header.Set("Authorization", "PLACEHOLDER")
		r, err := hc.Do(req)
		must(t, err)
		defer r.Body.Close()
		b, _ := io.ReadAll(r.Body)
		return r.StatusCode, string(b)
	}
	if n, b := get(); n != 200 || b != "VALUE" {
		t.Errorf("%d %s", n, b)
	}
	l.slot.mu.Lock()
	l.slot.inj = nil
	l.slot.mu.Unlock()
	if n, b := get(); n != 403 {
		t.Errorf("%d %s", n, b)
	}
}

// Only so many connections of a slot speak HTTP/2 with us; those past that are
// offered HTTP/1.
func TestManyHTTP2(t *testing.T) {
	t.Parallel()
	l, inj, _ := inspected(t, echoHost)
	open := func() *tls.Conn {
		tc := tls.Client(l.dial(at(addrA, 443)), &tls.Config{ServerName: "api.example", RootCAs: inj.ca.pool, NextProtos: []string{"h2", "http/1.1"}})
		must(t, tc.Handshake())
		return tc
	}
	for i := range maxH2 + 1 {
		want := "h2"
		if i == maxH2 {
			want = "http/1.1"
		}
		if got := open().ConnectionState().NegotiatedProtocol; got != want {
			t.Fatalf("connection %d speaks %s", i, got)
		}
	}
	c := l.dial(at(addrA, 80))
	_, err := raw(t, c, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
	wantReset(t, err)
	l.srv.Drop("s1")
	for len(l.srv.list("s1")) > 0 {
		time.Sleep(10 * time.Millisecond)
	}
	if got := open().ConnectionState().NegotiatedProtocol; got != "h2" {
		t.Errorf("speaks %s after the others are gone", got)
	}
}

// Large buffers are few, and whoever has none gets on with a small one.
func TestLargeBuffersAreFew(t *testing.T) {
	var held [][]byte
	large := 0
	for range 2 * cap(largeBuffers) {
		b := bufferPool{}.Get()
		if held = append(held, b); len(b) == largeSize {
			large++
		} else if len(b) != bufferSize {
			t.Fatalf("a buffer of %d bytes", len(b))
		}
	}
	for _, b := range held {
		bufferPool{}.Put(b)
	}
	// other tests may hold some
	if large == 0 || large > cap(largeBuffers) {
		t.Errorf("%d large ones", large)
	}
	if b := (bufferPool{}).Get(); len(b) != largeSize {
		t.Errorf("after all were given back: %d bytes", len(b))
	} else {
		bufferPool{}.Put(b)
	}
}
