// Package inbound tests the ways in to a sandbox with the real daemon: tunnels,
// connect tokens and forwarded ports, judged by a program inside and from outside.
package inbound

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/durationpb"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
	"vivarium/test/fixture"
)

const patience = 60 * time.Second

func config(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return fmt.Sprintf(`
pool: {size: 1}
reserve: {disk: 16MiB, memory: 64MiB, cpu: 100m}
defaults: {cpu_request: 10m, memory_request: 32MiB, memory_limit: 256MiB, network: none, timeout: 10m}
network: {pool: 2}
tunnel: {listen: "%s", ports: 24000-24999}
`, l.Addr())
}

// web is a busybox httpd whose CGI prints its environment, in which a program
// sees headers.
const web = `mkdir -p /www/cgi-bin && echo hello from inside > /www/index.html
printf '#!/bin/sh\nprintf "Content-Type: text/plain\\r\\nSet-Cookie: wide=1; Domain=viv.localhost\\r\\n\\r\\n"\nenv\n' > /www/cgi-bin/env
chmod 755 /www/cgi-bin/env
nc -ll -p 7 -e cat &
exec httpd -f -p 8080 -h /www`

type env struct {
	*fixture.Daemon
	t *testing.T
}

func (e env) viv(args ...string) string {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(e.t.Context(), patience)
	defer cancel()
	out, err := e.command(ctx, args...).Output()
	if err != nil {
		var ee *exec.ExitError
		if errors.As(err, &ee) {
			err = fmt.Errorf("%w: %s", err, ee.Stderr)
		}
		e.t.Fatalf("viv %s: %v\n%s", strings.Join(args, " "), err, e.Log())
	}
	return strings.TrimSpace(string(out))
}

func (e env) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, fixture.Viv(e.t), args...)
	cmd.Env = append(os.Environ(), "VIV_SERVER=http://"+e.Addr, "VIV_TOKEN="+e.Token)
	return cmd
}

func (e env) ca() string { return filepath.Join(e.Dir, "tunnel", "ca.pem") }

func (e env) curl(args ...string) string {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(e.t.Context(), patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, "curl", append([]string{"-sS", "--noproxy", "*", "--cacert", e.ca()}, args...)...).CombinedOutput()
	if err != nil {
		e.t.Errorf("curl %q: %v\n%s", args, err, out)
	}
	return string(out)
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("%s: not so after %s", what, patience)
}

// listens says whether a TCP port takes connections.
func listens(addr string) bool {
	c, err := net.DialTimeout("tcp", addr, 5*time.Second)
	if err != nil {
		return false
	}
	c.Close()
	return true
}

func TestInbound(t *testing.T) {
	t.Parallel()
	conf := config(t)
	d := fixture.Start(t, conf)
	e := env{d, t}
	front := strings.Split(strings.Split(conf, `listen: "`)[1], `"`)[0]
	if listens(front) {
		t.Fatal("C16: the tunnels' port is open without a tunnel")
	}
	e.viv("create", "--name", "web", "--tunnel", "8080", fixture.Image, "--", "sh", "-c", web)
	sb, err := d.Client.Get(t.Context(), "web")
	if err != nil || len(sb.Tunnels) != 1 || sb.Spec.Tunnels[0].Port != 8080 {
		t.Fatalf("%v, %v", sb, err)
	}
	url := sb.Tunnels[0].Url

	// C16: by its name alone, over TLS that clients can check
	eventually(t, "httpd answers", func() bool {
		out, err := exec.Command("curl", "-sS", "--noproxy", "*", "--cacert", e.ca(), url).CombinedOutput()
		return err == nil && string(out) == "hello from inside\n"
	})
	if out := e.curl("--http1.1", "-w", "%{http_version} %{http_code}", url); out != "hello from inside\n1.1 200" {
		t.Errorf("HTTP/1.1: %q", out)
	}
	if out := e.curl("-w", "%{http_version} %{http_code}", url); !strings.HasSuffix(out, " 200") {
		t.Errorf("%q", out)
	}
	if out := e.curl("-o", "/dev/null", "-w", "%{http_code}", strings.Replace(url, "https://", "https://a", 1)); out != "404" {
		t.Errorf("a name that is none: %q", out)
	}
	if out := e.curl("-o", "/dev/null", "-w", "%{http_code}", "-H", "Host: other.viv.localhost", url); out != "421" {
		t.Errorf("another host: %q", out)
	}
	// what is not published is not reachable: neither the sandbox's own address
	// nor a port of the host
	if sb.Address == "" || listens(net.JoinHostPort(sb.Address, "8080")) || listens("127.0.0.1:8080") {
		t.Errorf("C16: port 8080 is open besides the tunnel")
	}

	// F9: what the program inside sees
	token, secret := e.connect("web")
	got := e.curl("-H", "Authorization: Bearer "+secret, "-H", "X-Verified-User-Data: root", "-H", "X_Verified_User_Data: root", "-H", "X-Forwarded-For: 192.0.2.66",
		"-H", "X-Vivarium-Tenant: other", "-b", "__Host-vivarium=x; own=1", "-D", "-", token+"/cgi-bin/env?vivarium_token="+secret+"&q=1")
	for _, want := range []string{"HTTP_X_VERIFIED_USER_DATA=ann", "HTTP_X_FORWARDED_FOR=127.0.0.1", "HTTP_X_FORWARDED_PROTO=https", "QUERY_STRING=q=1", "HTTP_COOKIE=own=1"} {
		if !strings.Contains(strings.ReplaceAll(got, "'", ""), want) {
			t.Errorf("F9: %s is not in\n%s", want, got)
		}
	}
	for _, bad := range []string{secret, "vivct_", "192.0.2.66", "VIVARIUM", "root", "Domain="} {
		if strings.Contains(strings.ReplaceAll(got, "/root", ""), bad) {
			t.Errorf("F9: %q is in\n%s", bad, got)
		}
	}
	if out := e.curl("-o", "/dev/null", "-w", "%{http_code}", token); out != "401" {
		t.Errorf("without a token: %q", out)
	}
	jar := filepath.Join(t.TempDir(), "jar")
	if out := e.curl("-L", "-c", jar, "-b", jar, token+"/?vivarium_token="+secret); out != "hello from inside\n" {
		t.Errorf("as a browser: %q", out)
	}
	// another tenant neither sees nor closes it
	other := d.NewTenant("other")
	if l, err := other.ListTunnels(t.Context(), ""); err != nil || len(l) != 0 {
		t.Errorf("E1: another tenant lists %v, %v", l, err)
	}
	if err := other.CloseTunnel(t.Context(), sb.Tunnels[0].Id); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("E1: another tenant closes: %v", err)
	}

	// raw TCP, with half-close
	raw := e.viv("tunnel", "open", "web", "7/tcp")
	echo(t, raw, "to a tcp tunnel")
	// a port of ours
	fw := e.command(t.Context(), "port-forward", "web", "0:8080", "0:7")
	pipe, err := fw.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := fw.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(pipe)
	var local []string
	for range 2 {
		if !lines.Scan() {
			t.Fatal("port-forward says nothing")
		}
		addr, _, _ := strings.Cut(lines.Text(), " -> ")
		local = append(local, addr)
	}
	if out := e.curl("http://" + local[0]); out != "hello from inside\n" {
		t.Errorf("forwarded: %q", out)
	}
	echo(t, local[1], "to a forwarded port")
	if err := fw.Process.Signal(unix.SIGTERM); err != nil {
		t.Error(err)
	}
	if err := fw.Wait(); err != nil {
		t.Errorf("port-forward after SIGTERM: %v", err)
	}

	// a restart in the middle of it: same URL, same port, same token
	before := e.viv("tunnel", "ls", "--json")
	d.Kill()
	if listens(front) || listens(raw) {
		t.Error("a killed daemon listens")
	}
	d.Run()
	if after := e.viv("tunnel", "ls", "--json"); after != before {
		t.Errorf("after the restart\n%s, before\n%s", after, before)
	}
	if out := e.curl(url); out != "hello from inside\n" {
		t.Errorf("after the restart: %q", out)
	}
	if out := e.curl("-H", "Authorization: Bearer "+secret, token); out != "hello from inside\n" {
		t.Errorf("token after the restart: %q", out)
	}
	echo(t, raw, "after the restart")

	// the end of the sandbox closes everything
	open := e.dialTLS(url)
	defer open.Close()
	e.viv("stop", "--grace", "0s", "web")
	_ = open.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.ReadAll(open); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a connection outlives the sandbox")
	}
	if listens(front) || listens(raw) {
		t.Error("C16: a port is open after the end of the sandbox")
	}
	if out := e.viv("tunnel", "ls", "--json"); out != "[]" {
		t.Errorf("left: %s", out)
	}
	if log := d.Log(); strings.Contains(log, "vivct_") {
		t.Error("a token is in the daemon's log")
	}
	for f, mode := range map[string]os.FileMode{"ca.key": 0o600, "token.key": 0o600, "ca.pem": 0o644} {
		if fi, err := os.Stat(filepath.Join(d.Dir, "tunnel", f)); err != nil || fi.Mode() != mode {
			t.Errorf("%s: %v, %v", f, fi, err)
		}
	}

	t.Run("activity", func(t *testing.T) { activity(t, env{d, t}) })
	t.Run("taken", func(t *testing.T) { taken(t, env{d, t}, front) })
	t.Run("half made", func(t *testing.T) { halfMade(t, env{d, t}, front) })
}

// connect makes a token for port 8080.
func (e env) connect(ref string) (url, token string) {
	e.t.Helper()
	var v struct{ URL, Token string }
	if err := json.Unmarshal([]byte(e.viv("tunnel", "token", "--metadata", "ann", "--json", ref)), &v); err != nil {
		e.t.Fatal(err)
	}
	return v.URL, v.Token
}

func (e env) dialTLS(url string) net.Conn {
	e.t.Helper()
	pem, err := os.ReadFile(e.ca())
	if err != nil {
		e.t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	host, port, _ := net.SplitHostPort(strings.TrimPrefix(url, "https://"))
	c, err := tls.Dial("tcp", "127.0.0.1:"+port, &tls.Config{ServerName: host, RootCAs: pool})
	if err != nil {
		e.t.Fatal(err)
	}
	return c
}

// echo sends bytes to a program that sends them back, and ends what it sends.
func echo(t *testing.T, addr, what string) {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Errorf("%s: %v", what, err)
		return
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, "hello\n"); err != nil {
		t.Errorf("%s: %v", what, err)
	}
	if err := c.(*net.TCPConn).CloseWrite(); err != nil {
		t.Errorf("%s: %v", what, err)
	}
	if b, err := io.ReadAll(c); err != nil || string(b) != "hello\n" {
		t.Errorf("%s: %q, %v", what, b, err)
	}
}

// activity: an open connection through a tunnel keeps a sandbox from being idle.
func activity(t *testing.T, e env) {
	sb, err := e.Client.Create(t.Context(), &v1.SandboxSpec{
		Image: fixture.Image, Name: "quiet", IdleTimeout: durationpb.New(2 * time.Second), Tunnels: []*v1.TunnelSpec{{Port: 7, Kind: "tcp"}},
	}, createAndWait)
	if err != nil {
		t.Fatal(err)
	}
	// no command of ours runs: that would be activity, too
	e.viv("exec", "quiet", "--", "sh", "-c", "nc -ll -p 7 -e cat >/dev/null 2>&1 &")
	var c net.Conn
	eventually(t, "a connection echoes", func() bool {
		if c, err = net.Dial("tcp", sb.Tunnels[0].Address); err != nil {
			return false
		}
		_ = c.SetDeadline(time.Now().Add(patience))
		fmt.Fprintln(c, "x")
		_, err = c.Read(make([]byte, 1))
		if err != nil {
			c.Close()
		}
		return err == nil
	})
	time.Sleep(5 * time.Second) // longer than it may be idle
	if now, err := e.Client.Get(t.Context(), sb.Id); err != nil || now.Stage != "running" {
		t.Errorf("with an open connection it is %v, %v", now, err)
	}
	c.Close()
	if now, err := e.Client.Wait(t.Context(), sb.Id, "ended", patience); err != nil || now.Death.GetReason() != "idle" {
		t.Errorf("without one: %v, %v", now, err)
	}
}

// taken: a port that somebody else has is told to whoever opens a tunnel, and a
// sandbox that asked for one does not start without it.
func taken(t *testing.T, e env, front string) {
	l, err := net.Listen("tcp", front)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	_, err = e.Client.Create(t.Context(), &v1.SandboxSpec{Image: fixture.Image, Command: []string{"sleep", "60"}, Tunnels: []*v1.TunnelSpec{{Port: 80}}}, createAndWait)
	if !errors.Is(err, sandbox.Conflict) || !strings.Contains(err.Error(), "in use") {
		t.Errorf("%v", err)
	}
}

// halfMade: the daemon dies when the tunnel is open and the main command was not
// yet started. The sandbox ends at the next start, and the tunnel with it.
func halfMade(t *testing.T, e env, front string) {
	e.Stop()
	e.Run("VIV_FAILPOINT=create.main")
	sb, err := e.Client.Create(t.Context(), &v1.SandboxSpec{Image: fixture.Image, Command: []string{"sleep", "60"}, Tunnels: []*v1.TunnelSpec{{Port: 80}}}, client.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if !e.WaitKilled(patience) {
		t.Fatal("the daemon lives on")
	}
	e.Run()
	if now, err := e.Client.Wait(t.Context(), sb.Id, "ended", patience); err != nil || now.Death.GetReason() != "failed" || len(now.Tunnels) != 0 {
		t.Errorf("%v, %v", now, err)
	}
	if l, err := e.Client.ListTunnels(t.Context(), ""); err != nil || len(l) != 0 {
		t.Errorf("left: %v, %v", l, err)
	}
	eventually(t, "nothing listens", func() bool { return !listens(front) })
}

var createAndWait = client.CreateOptions{Wait: true}
