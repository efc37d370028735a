package server

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"vivarium/sandbox"
)

func TestListen(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	if err := os.WriteFile(dir+"/file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		opts Options
		kind sandbox.Kind
		hint string
	}{
		"every address":  {Options{Listen: "0.0.0.0:0"}, sandbox.Invalid, "listen_public"},
		"every address6": {Options{Listen: "[::]:0"}, sandbox.Invalid, "listen_public"},
		"no host":        {Options{Listen: ":0"}, sandbox.Invalid, "listen_public"},
		"a name":         {Options{Listen: "example.org:0"}, sandbox.Invalid, "listen_public"},
		"not an address": {Options{Listen: "7878"}, sandbox.Invalid, "127.0.0.1"},
		"taken":          {Options{Listen: taken.Addr().String()}, sandbox.Conflict, "--listen"},
		"nothing":        {Options{}, sandbox.Invalid, ""},
		"a file":         {Options{UnixSocket: dir + "/file"}, sandbox.Conflict, ""},
		"a long path":    {Options{UnixSocket: dir + "/" + strings.Repeat("x", 120)}, sandbox.Invalid, "unix_socket"},
	} {
		s, err := Listen(tt.opts)
		if err == nil {
			s.Close()
		}
		if sandbox.KindOf(err) != tt.kind || !strings.Contains(sandbox.HintOf(err), tt.hint) {
			t.Errorf("%s: %v, hint %q", name, err, sandbox.HintOf(err))
		}
	}
	var log strings.Builder
	s, err := Listen(Options{Listen: "0.0.0.0:0", Public: true, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	if !strings.Contains(log.String(), "level=WARN") {
		t.Errorf("no warning: %s", log.String())
	}
}

// The socket of a daemon that died is taken over, that of one that lives is not.
func TestUnixSocketOfAnother(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "viv.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if _, err := Listen(Options{UnixSocket: path}); !errors.Is(err, sandbox.Conflict) {
		t.Errorf("of one that lives: %v", err)
	}
	l.Close()
	s, err := Listen(Options{UnixSocket: path})
	if err != nil {
		t.Fatalf("of one that died: %v", err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi, err)
	}
	s.Close()
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// serve runs a server with short timeouts and a handler that reads the body and
// then takes a while.
func serve(t *testing.T, think time.Duration) string {
	t.Helper()
	s, err := Listen(Options{Listen: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	s.headerTimeout, s.bodyTimeout = 200*time.Millisecond, 200*time.Millisecond
	s.Streams(nil, []string{"/stream"})
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, err := io.ReadAll(r.Body)
		if err != nil {
			w.WriteHeader(http.StatusRequestTimeout)
			return
		}
		select {
		case <-time.After(think):
		case <-r.Context().Done():
			return
		}
		_, _ = w.Write(b)
	})
	s.Handle("/unary", h)
	s.Handle("/stream", h)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return "http://" + s.Addrs()[0].String()
}

func httpClient(t *testing.T, h2 bool) *http.Client {
	var p http.Protocols
	p.SetHTTP1(!h2)
	p.SetUnencryptedHTTP2(h2)
	tr := &http.Transport{Protocols: &p}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

// E3: a request that is sent slowly is given up; a stream may be silent, and an
// answer may take longer than sending the question may.
func TestSlowBody(t *testing.T) {
	t.Parallel()
	for name, h2 := range map[string]bool{"HTTP/1.1": false, "h2c": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			base := serve(t, 500*time.Millisecond)
			c := httpClient(t, h2)
			r, w := io.Pipe()
			go func() { _, _ = w.Write([]byte("half")) }()
			res, err := c.Post(base+"/unary", "text/plain", r)
			if err == nil {
				res.Body.Close()
				if res.StatusCode != http.StatusRequestTimeout {
					t.Errorf("a slow call: %s", res.Status)
				}
			}
			w.Close()

			res, err = c.Post(base+"/unary", "text/plain", strings.NewReader("whole"))
			if err != nil {
				t.Fatalf("a slow answer: %v", err)
			}
			if b, err := io.ReadAll(res.Body); err != nil || string(b) != "whole" {
				t.Errorf("a slow answer: %q, %v", b, err)
			}
			res.Body.Close()

			r, w = io.Pipe()
			go func() {
				_, _ = w.Write([]byte("half"))
				time.Sleep(600 * time.Millisecond)
				_, _ = w.Write([]byte("other"))
				w.Close()
			}()
			res, err = c.Post(base+"/stream", "text/plain", r)
			if err != nil {
				t.Fatalf("a silent stream: %v", err)
			}
			if b, err := io.ReadAll(res.Body); err != nil || string(b) != "halfother" {
				t.Errorf("a silent stream: %q, %v", b, err)
			}
			res.Body.Close()
		})
	}
}

// E3: connections that send half a header, or half of HTTP/2's preface, are
// closed; a header that is too large is refused.
func TestSlowHeader(t *testing.T) {
	t.Parallel()
	addr := strings.TrimPrefix(serve(t, 0), "http://")
	for _, part := range []string{"", "GET / HTTP/1.1\r\nHost:", "PRI * HTTP/2.0\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM"} {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, part); err != nil {
			t.Fatal(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(30 * time.Second))
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%q: the connection is still open", part)
		}
	}
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go func() {
		_, _ = c.Write(append([]byte("GET /healthz HTTP/1.1\r\nHost: x\r\nX: "), bytes.Repeat([]byte("x"), 1<<20)...))
	}()
	_ = c.SetReadDeadline(time.Now().Add(30 * time.Second))
	b, _ := io.ReadAll(io.LimitReader(c, 64))
	if !strings.HasPrefix(string(b), "HTTP/1.1 431") {
		t.Errorf("a large header: %q", b)
	}
}
