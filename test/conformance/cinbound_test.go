package conformance

import (
	"bytes"
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/test/fixture"
)

// C16, F9: a tunnel is open to the networks and tokens that it was opened for, by
// the addresses that clients really have, and to no sandbox; credentials of ours, of
// this tenant or another, do not arrive inside. (More of it is in test/inbound.)
func c16Tunnels(t *testing.T, w *world, l *lab) {
	other := l.NewTenant("c16-tunnels")
	open := func(c *client.Client, id string, spec *v1.TunnelSpec) *v1.Tunnel {
		t.Helper()
		tn, err := c.OpenTunnel(within(t), id, spec)
		ok(t, err)
		return tn
	}
	b, victim := l.box(t, nil), l.box(t, nil)
	x := b.start("attack", "headers", "8080")
	b.says(x, "serving")
	y := victim.start("attack", "serve", "8080", "8081")
	victim.says(y, "serving")
	narrow := open(l.Client, b.id, &v1.TunnelSpec{Port: 8080, Allow: []string{"5.5.5.1/32"}})
	tokened := open(l.Client, b.id, &v1.TunnelSpec{Port: 8080, Token: true})
	raw := open(l.Client, victim.id, &v1.TunnelSpec{Port: 8080, Kind: "tcp", Allow: []string{"5.5.5.1/32"}})
	front := "5.5.5.2:7879"
	// clients come from 5.5.5.1, or from another address of the internet
	const here, elsewhere = "5.5.5.1", "1.2.3.200"
	from := func(local, addr string) (c net.Conn, err error) {
		err = w.internet.in(func() (err error) {
			d := net.Dialer{Timeout: 2 * time.Second, LocalAddr: &net.TCPAddr{IP: net.ParseIP(local)}}
			c, err = d.Dial("tcp", addr)
			return err
		})
		return c, err
	}
	ask := func(local, url, path string, headers ...string) (int, string) {
		tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DialContext: func(context.Context, string, string) (net.Conn, error) { return from(local, front) }}
		defer tr.CloseIdleConnections()
		req, err := http.NewRequestWithContext(within(t), "GET", url+path, nil)
		ok(t, err)
		for _, h := range headers {
			k, v, _ := strings.Cut(h, ": ")
			req.Header.Add(k, v)
		}
		res, err := tr.RoundTrip(req)
		if err != nil {
			return 0, err.Error()
		}
		defer res.Body.Close()
		body, err := io.ReadAll(io.LimitReader(res.Body, 1<<16))
		ok(t, err)
		return res.StatusCode, string(body)
	}
	if code, body := ask(here, narrow.Url, "/c16-allowed"); code != http.StatusOK || body != "inside\n" {
		t.Errorf("an allowed client: %d %s", code, body)
	}
	if code, _ := ask(elsewhere, narrow.Url, "/c16-elsewhere"); code == http.StatusOK {
		t.Error("a client of another network is let in")
	}
	if code, _ := ask(elsewhere, narrow.Url, "/c16-forged", "X-Forwarded-For: 5.5.5.1", "Forwarded: for=5.5.5.1", "X-Real-Ip: 5.5.5.1"); code == http.StatusOK {
		t.Error("a client that says that it comes from elsewhere is let in")
	}
	port := strings.Split(raw.Address, ":")[1]
	if c, err := from(here, "5.5.5.2:"+port); err != nil {
		t.Errorf("an allowed client of %s: %v", raw.Address, err)
	} else {
		if n, err := c.Read(make([]byte, 10)); n == 0 {
			t.Errorf("an allowed client: %v", err)
		}
		c.Close()
	}
	if c, err := from(elsewhere, "5.5.5.2:"+port); err == nil {
		if n, _ := c.Read(make([]byte, 10)); n > 0 {
			t.Error("a client of another network is let in")
		}
		c.Close()
	}
	// sandboxes are no clients: the host's addresses are closed to them
	b.closed("c16-sandbox", "tcp "+front, "tcp 5.5.5.2:"+port, "tcp 10.0.0.1:"+port)
	// tokens: none, another's, and the right one, of which nothing arrives
	connect := func(c *client.Client, id string) string {
		t.Helper()
		r, err := c.CreateConnectToken(within(t), &v1.CreateConnectTokenRequest{SandboxId: id, Port: 8080, Metadata: "c16-metadata"})
		ok(t, err)
		return r.Token
	}
	_, err := other.LoadImage(within(t), &v1.LoadImageRequest{Tag: fixture.Image, Format: "rootfs", Config: &v1.ImageConfig{Cmd: []string{"sh"}, Env: []string{"PATH=/bin:/sbin"}}}, bytes.NewReader(fixture.Busybox(t)))
	ok(t, err)
	sb, err := other.Create(within(t), &v1.SandboxSpec{Image: fixture.Image}, waitRunning)
	ok(t, err)
	right, wrong, foreign := connect(l.Client, b.id), connect(l.Client, victim.id), connect(other, sb.Id)
	for _, h := range []string{"X-None: 1", "Authorization: Bearer " + wrong, "Authorization: Bearer " + foreign, "Authorization: Bearer " + l.Token, "Authorization: Bearer x"} {
		if code, _ := ask(here, tokened.Url, "/c16-no-token", h); code == http.StatusOK {
			t.Errorf("let in with %.30s", h)
		}
	}
	for _, h := range []string{"Authorization: Bearer " + right, "Cookie: __Host-vivarium=" + foreign, "Authorization: Bearer " + wrong, "Authorization: Bearer " + foreign, "Authorization: Bearer " + l.Token} {
		for _, url := range []string{narrow.Url, tokened.Url} {
			ask(here, url, "/c16-credentials", h, "X-Verified-User-Data: c16-forged")
			ask(here, url, "/c16-credentials?vivarium_token="+foreign, h)
		}
	}
	ask(here, tokened.Url, "/c16-last", "Authorization: Bearer "+right)
	b.says(x, "/c16-last")
	out := b.output(x)
	for what, bad := range map[string]string{"a token of its own": right, "a token of another sandbox": wrong, "a token of another tenant": foreign, "the API's token": l.Token, "forged metadata": "c16-forged", "a request without a token": "c16-no-token", "a client of another network": "c16-elsewhere", "a client that forges its address": "c16-forged", "a sandbox": "c16-sandbox"} {
		if strings.Contains(out, bad) {
			t.Errorf("%s arrived inside: %s", what, out)
		}
	}
	if !strings.Contains(out, "c16-metadata") {
		t.Errorf("the token's metadata did not arrive: %s", out)
	}
	if n := strings.Count(victim.output(y), "CAME"); n > 1 {
		t.Errorf("%d arrivals at the raw tunnel, want one: %s", n, victim.output(y))
	}
}
