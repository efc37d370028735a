package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"vivarium/server/native/fake"
)

func TestTunnelVerbs(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	viv(t, n, nil, "create", "--name", "box", "debian:base")
	r := viv(t, n, nil, "tunnel", "open", "--allow", "192.0.2.0/24", "--allow", "198.51.100.7", "box", "8080")
	if r.code != 0 || !strings.HasPrefix(r.out, "https://") || !strings.Contains(r.out, ".viv.localhost:") {
		t.Fatalf("%+v", r)
	}
	url := strings.TrimSpace(r.out)
	if r := viv(t, n, nil, "tunnel", "open", "box", "5432/tcp"); r.code != 0 || !strings.HasPrefix(r.out, "127.0.0.1:23") {
		t.Errorf("%+v", r)
	}
	r = viv(t, n, nil, "tunnel", "token", "--port", "3000", "--metadata", "me", "--for", "1m", "box")
	lines := strings.Split(r.out, "\n")
	if r.code != 0 || len(lines) != 3 || !strings.HasPrefix(lines[0], "https://") || !strings.HasPrefix(lines[1], "vivct_") {
		t.Errorf("%+v", r)
	}
	if r := viv(t, n, nil, "tunnel", "token", "--link", "--port", "3000", "box"); r.code != 0 || !strings.HasPrefix(r.out, lines[0]+"/?vivarium_token=vivct_") {
		t.Errorf("%+v", r)
	}
	r = viv(t, n, nil, "tunnel", "ls", "--json", "box")
	var list []struct {
		ID, URL, Address string
		Spec             struct{ Kind string }
	}
	if err := json.Unmarshal([]byte(r.out), &list); err != nil || len(list) != 3 || list[0].URL != url || list[1].Spec.Kind != "tcp" {
		t.Errorf("%v: %+v", err, r)
	}
	r = viv(t, n, nil, "tunnel", "ls")
	for _, want := range []string{url, "8080/https", "192.0.2.0/24 198.51.100.7", "5432/tcp", "token"} {
		if !strings.Contains(r.out, want) {
			t.Errorf("%q is not in %s", want, r.out)
		}
	}
	if r := viv(t, n, nil, "__complete", "tunnel", "close", "tn-"); !strings.Contains(r.out, list[0].ID) {
		t.Errorf("completion: %+v", r)
	}
	viv(t, n, nil, "tunnel", "close", list[0].ID, list[1].ID).is(t, 0, list[0].ID+"\n"+list[1].ID+"\n")
	viv(t, n, nil, "tunnel", "close", list[0].ID).fails(t, 1, "does not exist")
	for _, args := range [][]string{
		{"tunnel", "open", "box"}, {"tunnel", "open", "box", "0"}, {"tunnel", "open", "box", "80/udp"}, {"tunnel", "open", "box", "80/"}, {"tunnel", "ls", "a", "b"},
		{"tunnel", "close"}, {"tunnel", "token", "--for", "-1s", "box"}, {"create", "--tunnel", "x", "debian:base"},
		{"port-forward", "box"}, {"port-forward", "box", "x"}, {"port-forward", "box", "1:0"}, {"port-forward", "box", "70000:1"}, {"port-forward", "--address", "here", "box", "1"},
	} {
		viv(t, n, nil, args...).fails(t, exitUsage)
	}
	viv(t, n, nil, "create", "--name", "web", "--tunnel", "80", "--tunnel", "50051/h2", "debian:base")
	r = viv(t, n, nil, "inspect", "web")
	if !strings.Contains(r.out, `"port": 50051`) || !strings.Contains(r.out, `"kind": "h2"`) {
		t.Errorf("%s", r.out)
	}
}

func TestPortForward(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	viv(t, n, nil, "create", "--name", "box", "debian:base")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	pr, pw := io.Pipe()
	env := map[string]string{"VIV_DATA_DIR": t.TempDir(), "VIV_SERVER": n.HTTP, "VIV_TOKEN": n.Admin}
	var errOut fake.Buffer
	done := make(chan int, 1)
	go func() {
		done <- Run(ctx, []string{"port-forward", "box", "0:7", "0:9"}, Streams{Out: pw, Err: &errOut, Getenv: func(k string) string { return env[k] }}, Hooks{})
		pw.Close()
	}()
	var addrs [2]string
	out := bufio.NewReader(pr)
	for i, port := range []string{"7", "9"} {
		line, err := out.ReadString('\n')
		if err != nil {
			t.Fatal(err, errOut.String())
		}
		addr, remote, _ := strings.Cut(strings.TrimSpace(line), " -> ")
		if !strings.HasPrefix(addr, "127.0.0.1:") || remote != port {
			t.Errorf("%q", line)
		}
		addrs[i] = addr
	}
	dial := func(addr string) *net.TCPConn {
		t.Helper()
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c.(*net.TCPConn)
	}
	// both ways, and the end of one is passed on
	c := dial(addrs[0])
	fmt.Fprint(c, "hello")
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(c); err != nil || string(b) != "hello" {
		t.Errorf("%q, %v", b, err)
	}
	// a port that takes no connections is told, and the others go on
	if b, _ := io.ReadAll(dial(addrs[1])); len(b) != 0 {
		t.Errorf("%q", b)
	}
	for i := 0; !strings.Contains(errOut.String(), "connection refused"); i++ {
		if i > 1000 {
			t.Fatalf("not told: %q", errOut.String())
		}
		time.Sleep(5 * time.Millisecond)
	}
	c = dial(addrs[0])
	fmt.Fprint(c, "x")
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	cancel()
	if code := <-done; code != 0 {
		t.Errorf("exit code %d: %s", code, errOut.String())
	}
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("a connection goes on")
	}
	if c, err := net.Dial("tcp", addrs[0]); err == nil {
		c.Close()
		t.Error("listens after its end")
	}
	// the end of the sandbox is the end of it
	go func() {
		r := viv(t, n, nil, "port-forward", "box", "0:7")
		if !strings.Contains(r.err, "has ended") {
			t.Errorf("%+v", r)
		}
		done <- r.code
	}()
	time.Sleep(50 * time.Millisecond)
	viv(t, n, nil, "stop", "box")
	if code := <-done; code == 0 {
		t.Error("exit code 0")
	}
	viv(t, n, nil, "port-forward", "nobody", "7").fails(t, 1, "nobody")
}
