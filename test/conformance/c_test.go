package conformance

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
)

// TestC is the network. Every attack is made for real, in a world of network
// namespaces, and judged by what arrives there; at the end the taps tell whether
// anything arrived that nothing inside may send.
func TestC(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	l := w.start(t)
	t.Run("All", func(t *testing.T) {
		for _, c := range []struct {
			name string
			fn   func(*testing.T, *world, *lab)
		}{
			{"A16Sockets", a16}, {"A17DNSFlood", a17}, {"C08RawPackets", c08Raw}, // the longest first
			{"C01Default", c01}, {"C01Redirect", c01Redirect}, {"C02IPv6", c02}, {"C03Spellings", c03}, {"C04Rebinding", c04}, {"C05NotFromAnAnswer", c05},
			{"C06Names", c06}, {"C06Fronting", c06Fronting}, {"C06ECH", c06ECH}, {"C07Relay", c07}, {"C08Direct", c08}, {"C09Tunnel", c09}, {"C10OtherResolvers", c10},
			{"C11Wildcards", c11}, {"C12Precedence", c12}, {"C13Redirect", c13}, {"C14Neighbours", c14}, {"C15Host", c15}, {"C16Inbound", c16}, {"C16Tunnels", c16Tunnels},
			{"C17OpenFlows", c17}, {"C18Proof", c18Proof}, {"C19Secrets", c19}, {"C19Tools", c19Tools}, {"C20Log", c20}, {"F09Environment", f09}, {"FetchForTenants", fetching},
		} {
			l.attack(t, c.name, func(t *testing.T) { c.fn(t, w, l) })
		}
	})
	w.judge(t)
}

// special are addresses of the world that no sandbox reaches unless granted.
var special = []string{
	"tcp 10.0.0.2:80", "tcp 10.0.0.2:443", "tcp 10.0.0.2:9000", "tcp 10.0.0.1:80", "tcp 10.0.0.53:53", "udp 10.0.0.53:53",
	"tcp 169.254.169.254:80", "tcp 169.254.169.254:443", "tcp 172.16.5.5:80", "tcp 192.168.7.7:9000", "tcp 100.64.0.9:22", "udp 10.0.0.2:9000", "udp 169.254.169.254:443",
	"tcp 127.0.0.1:80", "tcp 127.1.2.3:9000", "tcp 0.0.0.0:80", "tcp 5.5.5.2:80", "tcp 5.5.5.2:9000", "udp 5.5.5.2:9000",
	"udp 224.0.0.251:5353", "udp 239.255.255.250:1900", "udp 255.255.255.255:9000", "tcp 192.0.2.1:80", "tcp 198.18.0.1:80", "tcp 240.0.0.1:80",
}

// C1: by default the public internet is open and nothing private is, by address
// and by name; with mode none and an empty allow-list nothing is.
func c01(t *testing.T, w *world, l *lab) {
	b := l.box(t, nil)
	b.open("c01-public", "tcp "+allowedIP+":80", "tcp "+allowedIP+":9000", "udp "+allowedIP+":9000")
	if got := w.site.got("c01-public"); len(got) < 2 {
		t.Errorf("the servers saw %v", got)
	}
	if got := b.sh("ping -c 1 -W 2 " + allowedIP + " >/dev/null && echo answers"); got != "answers" {
		t.Errorf("ping: %q", got)
	}
	b.closed("c01-private", special...)
	if out := b.sh("for a in 10.0.0.2 169.254.169.254 5.5.5.2 10.0.0.1; do ping -c 1 -W 1 $a >/dev/null && echo $a answers & done; wait"); out != "" {
		t.Errorf("to ping: %s", out)
	}
	for _, name := range []string{"private.example", "metadata.example", "metadata.google.internal", "alias.example", "localhost.example"} {
		if out, got := b.get("http://" + name + "/c01-name"); got {
			t.Errorf("%s: %s", name, out)
		}
	}
	if got := b.dns("udp", b.resolver()+":53", "both.example", "A"); !strings.Contains(got, "1.2.3.9") || strings.Contains(got, "10.0.0.2") {
		t.Errorf("an answer of two addresses, one private: %s", got)
	}
	for _, p := range []*v1.NetworkPolicy{policyOf(sandbox.NetworkNone), policyOf(sandbox.NetworkAllowlist)} {
		b := l.under(t, p)
		b.closed("c01-"+p.Mode, append([]string{"tcp " + deniedIP + ":80", "udp " + deniedIP + ":9000", "tcp " + publicDNS + ":53"}, special...)...)
		if got := b.dns("udp", b.resolver()+":53", "c01-"+p.Mode+".example", "A"); strings.Contains(got, "[") {
			t.Errorf("mode %s resolves: %s", p.Mode, got)
		}
	}
	for _, token := range []string{"c01-private", "c01-name", "c01-none", "c01-allowlist"} {
		if got := w.site.got(token); len(got) > 0 {
			t.Errorf("arrived: %v", got)
		}
		if got := w.zone.questions("", token); len(got) > 0 {
			t.Errorf("asked upstream: %v", got)
		}
	}
}

// C1: a public server that sends its clients to private addresses.
func c01Redirect(t *testing.T, w *world, l *lab) {
	b := l.box(t, nil)
	for _, to := range []string{"http://169.254.169.254/latest/c01-redirect", "http://10.0.0.2/c01-redirect", "http://metadata.google.internal/c01-redirect", "http://[::ffff:10.0.0.2]/c01-redirect", "http://2852039166/c01-redirect", "http://127.0.0.1:" + strings.Split(l.Addr, ":")[1] + "/c01-redirect"} {
		if out, got := b.get("http://allowed.example/redirect?to=" + to); got {
			t.Errorf("%s: %s", to, out)
		}
	}
	followed := w.site.hits(func(h hit) bool { return h.path == "/c01-redirect" || h.path == "/latest/c01-redirect" })
	if asked := w.site.hits(func(h hit) bool {
		return strings.HasPrefix(h.path, "/redirect?") && strings.Contains(h.path, "c01-redirect")
	}); len(asked) < 5 || len(followed) > 0 {
		t.Errorf("asked for %v, followed to %v", asked, followed)
	}
}

// C2: there is no IPv6, and an IPv4-mapped address is the IPv4 address.
func c02(t *testing.T, w *world, l *lab) {
	b := l.box(t, nil)
	b.closed("c02", "tcp [fd00:ec2::254]:80", "tcp [2a00:1::1]:80", "udp [2a00:1::1]:9000", "udp [fd00:ec2::254]:9000", "tcp [64:ff9b::a00:2]:80", "tcp [2002:a00:2::]:80", "tcp [::1]:80",
		"mapped [::ffff:10.0.0.2]:80", "mapped [::ffff:169.254.169.254]:80", "mapped [::ffff:5.5.5.2]:80", "mapped [::10.0.0.2]:80", "tcp [::ffff:10.0.0.2]:9000")
	b.open("c02-yes", "mapped [::ffff:"+allowedIP+"]:9000")
	if got := b.dns("udp", b.resolver()+":53", "v6.example", "AAAA", "mapped.example", "AAAA"); strings.Contains(got, "[") {
		t.Errorf("AAAA has data: %s", got)
	}
	b = l.under(t, policyOf(sandbox.NetworkAllowlist, "allow allowed.example", "allow v6.example"))
	b.closed("c02", "tcp [2a00:1::1]:80", "mapped [::ffff:"+deniedIP+"]:80", "mapped [::ffff:10.0.0.2]:80")
	for _, bad := range []string{"2a00:1::1", "::ffff:1.2.3.4", "fd00::/8"} {
		if _, _, err := l.Client.SetNetwork(within(t), b.id, policyOf(sandbox.NetworkAllowlist, "allow "+bad), false); !errors.Is(err, sandbox.Invalid) || !strings.Contains(err.Error(), bad) {
			t.Errorf("rule for %s: %v, want it refused by name", bad, err)
		}
	}
	if got := w.site.hits(func(h hit) bool { return strings.TrimSpace(h.data) == "c02" }); len(got) > 0 {
		t.Errorf("arrived: %v", got)
	}
}

// C3: an address is the same however it is spelt.
func c03(t *testing.T, w *world, l *lab) {
	odd := []string{"0xa000002", "167772162", "012.0.0.2", "10.2", "10.0.2", "0x0a.0x0.0x0.0x2", "0000012.0.0.02", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.16689662", "0251.254.0xa9fe", "10.0.0.2.", "⑩.⓪.⓪.②", "84215042"}
	for _, p := range []*v1.NetworkPolicy{policyOf(sandbox.NetworkPublic), policyOf(sandbox.NetworkAllowlist, "allow allowed.example", "allow *.example", "allow 1.2.3.4")} {
		b := l.under(t, p)
		for _, a := range odd {
			if out, got := b.get("http://" + a + "/c03"); got {
				t.Errorf("%s: http://%s/: %s", p.Mode, a, out)
			}
		}
		// as the Host of an address that is open
		for _, a := range odd {
			b.web("-to", allowedIP+":80", "-plain", "-raw", `GET /c03-host HTTP/1.1\r\nHost: `+a+`\r\nConnection: close\r\n\r\n`)
		}
		for _, a := range []string{"0x01020304", "16909060", "01.2.3.4", "1.0x20304"} { // spelling is no obstacle to 1.2.3.4
			if out, got := b.get("http://" + a + "/c03-yes"); !got {
				t.Errorf("%s: %s: %s", p.Mode, a, out)
			}
		}
	}
	if got := w.site.hits(func(h hit) bool { return h.path == "/c03" }); len(got) > 0 {
		t.Errorf("arrived: %v", got)
	}
	for _, a := range []string{"0x7f.1", "010.0.0.1", "2130706433", "1.2.3", "1.2.3.4/33", "1.2.3.4.5", "1.2.3.004"} {
		if _, err := l.Client.ExplainNetwork(within(t), &v1.ExplainNetworkRequest{Policy: policyOf(sandbox.NetworkAllowlist, "allow "+a), Host: "a.example"}); !errors.Is(err, sandbox.Invalid) || !strings.Contains(err.Error(), a) {
			t.Errorf("rule for %s: %v, want it refused by name", a, err)
		}
	}
}

// C8: without the proxy's variables and without asking our DNS: what is not
// allowed is not reached, by any protocol that a program can speak.
func c08(t *testing.T, w *world, l *lab) {
	b := l.under(t, policyOf(sandbox.NetworkAllowlist, "allow allowed.example"))
	// that this one works is what gives the others their meaning
	if out, got := b.get("http://allowed.example/c08-yes"); !got {
		t.Errorf("%s", out)
	}
	if out := b.sh("unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY; export no_proxy='*' NO_PROXY='*'; attack get http://" + deniedIP + "/c08"); !strings.HasPrefix(out, "error") {
		t.Errorf("%s", out)
	}
	if out, got := b.get("http://"+deniedIP+"/c08", "Host: allowed.example"); got {
		t.Errorf("%s", out)
	}
	b.closed("c08", "tcp 1.2.3.50:80", "tcp 1.2.3.50:443", "tcp 1.2.3.50:9000", "tcp 1.2.3.50:22", "udp 1.2.3.50:443", "udp 1.2.3.50:9000", "udp 1.2.3.50:53",
		// the pinned address: not with the name's other ports, not by UDP (QUIC)
		"tcp "+allowedIP+":9000", "tcp "+allowedIP+":22", "udp "+allowedIP+":443", "udp "+allowedIP+":9000", "tcp "+allowedIP+":80")
	for _, a := range []string{allowedIP, "1.2.3.50"} {
		if r := b.must("ping", "-c", "1", "-W", "1", a); r.exit.Code == 0 {
			t.Errorf("%s answers to ping", a)
		}
	}
	if r := b.must("traceroute", "-n", "-q", "1", "-w", "1", "-m", "3", "1.2.3.50"); strings.Contains(r.out, "5.5.5.1") {
		t.Errorf("traceroute: %s", r.out)
	}
	w.settle(t)
	if w.out.saw("1.2.3.50") {
		t.Error("a packet for an address that no rule allows arrived")
	}
	// the proxy takes the connection to a pinned port; the server gets none of it
	if got := w.site.hits(func(h hit) bool { return strings.TrimSpace(h.data) == "c08" || h.path == "/c08" }); len(got) > 0 {
		t.Errorf("arrived: %v", got)
	}
}

// C8, C14: packets that no honest stack would send, from root inside and from one
// who has taken over the sentry: other protocols, spoofed sources, frames in
// VLANs, fragments, source routes, ARP, IPv6.
func c08Raw(t *testing.T, w *world, l *lab) {
	victim := l.box(t, nil)
	victim.start("attack", "serve", "9000")
	at := victim.address()
	tap := victim.slot().tap(t, "eth0")
	srcs := strings.Join([]string{"8.8.8.8", "10.0.0.1", "5.5.5.2", at.String(), "127.0.0.1", "0.0.0.0", "255.255.255.255", "169.254.169.254"}, ",")
	dsts := strings.Join([]string{"1.2.3.60", "10.0.0.2", "169.254.169.254", "5.5.5.2", at.String(), "224.0.0.1"}, ",")
	open := l.box(t, nil)
	narrow := l.under(t, policyOf(sandbox.NetworkAllowlist, "allow 1.2.3.61"))
	for _, b := range []*box{open, narrow} {
		r := b.must("attack", "raw", srcs, dsts)
		if !strings.Contains(r.out, "raw socket: <nil>") || !strings.Contains(r.out, "sent ") {
			t.Errorf("root inside could not try: %s", r.out)
		}
		dir := t.TempDir()
		program := dir + "/attack"
		writeProgram(t, program)
		slot := b.slot()
		ctx, cancel := context.WithTimeout(within(t), time.Minute)
		defer cancel()
		var out []byte
		ok(t, slot.in(func() (err error) {
			out, err = exec.CommandContext(ctx, program, "raw", srcs, dsts).CombinedOutput()
			return err
		}))
		if !strings.Contains(string(out), "packet socket: <nil>") {
			t.Errorf("the sentry's place could not try: %s", out)
		}
		b.alive()
	}
	w.settle(t)
	// honest packets of public boxes to public addresses may have come; nothing
	// else of these
	for _, p := range w.out.seen(func(p packet) bool { return p.dst == netip.MustParseAddr("1.2.3.60") }) {
		if p.src != netip.MustParseAddr("5.5.5.2") || p.proto != unix.IPPROTO_UDP && p.proto != unix.IPPROTO_ICMP && p.proto != unix.IPPROTO_TCP {
			t.Errorf("arrived: %v", p)
		}
	}
	from := map[netip.Addr]bool{open.address(): true, narrow.address(): true}
	for _, p := range tap.seen(func(p packet) bool { return from[p.src] || p.ether == unix.ETH_P_ARP || p.port == 9000 }) {
		t.Errorf("arrived at the neighbour: %v", p)
	}
	if !w.out.saw("1.2.3.60") {
		t.Error("not even the honest packets of a public sandbox arrived: the judge sees nothing")
	}
}

// C14: sandboxes do not see each other.
func c14(t *testing.T, w *world, l *lab) {
	victim, b := l.box(t, nil), l.box(t, nil)
	x := victim.start("attack", "serve", "80", "443", "8000", "9000")
	victim.says(x, "serving")
	at := victim.address()
	tap := victim.slot().tap(t, "eth0")
	gw := at.Prev()
	var to []string
	for _, a := range []netip.Addr{at, gw} {
		for _, p := range []string{"80", "443", "8000", "9000", "22", "53"} {
			to = append(to, fmt.Sprintf("tcp %v:%s", a, p), fmt.Sprintf("udp %v:%s", a, p))
		}
	}
	b.closed("c14", to...)
	b.closed("c14", fmt.Sprintf("mapped [::ffff:%v]:8000", at), fmt.Sprintf("tcp [fe80::%x]:8000", 2))
	if r := b.must("ping", "-c", "1", "-W", "1", at.String()); r.exit.Code == 0 {
		t.Error("the neighbour answers to ping")
	}
	b.must("arping", "-c", "2", "-w", "2", "-I", "eth0", at.String())
	own := b.address()
	// a policy cannot open the neighbour either
	if _, _, err := l.Client.SetNetwork(within(t), b.id, policyOf(sandbox.NetworkAllowlist, "allow "+at.String(), "allow 10.0.0.0/8"), false); err != nil {
		t.Fatal(err)
	}
	b.closed("c14", to...)
	if got := tap.seen(func(p packet) bool { return p.src == own || p.ether == unix.ETH_P_ARP }); len(got) > 0 {
		t.Errorf("arrived at the neighbour: %v", got)
	}
	if out := victim.output(x); strings.Contains(out, "CAME") {
		t.Errorf("the neighbour was reached: %s", out)
	}
	// and the victim's port works, through the API
	c, err := l.Client.Dial(within(t), victim.id, 8000)
	ok(t, err)
	defer c.Close()
	if n, err := c.Read(make([]byte, 10)); n == 0 {
		t.Errorf("through the API: %v", err)
	}
}

// output is what a command has written so far.
func (b *box) output(id string) string {
	b.t.Helper()
	var out strings.Builder
	if _, err := b.l.Client.Output(within(b.t), &v1.ReadOutputRequest{SandboxId: b.id, Id: id, StderrOffset: -1}, &out, nil); err != nil {
		b.t.Fatal(err)
	}
	return out.String()
}

// C15: nothing of the host and the daemon is a place that a sandbox reaches.
func c15(t *testing.T, w *world, l *lab) {
	b := l.box(t, nil)
	own := b.address()
	port := strings.Split(l.Addr, ":")[1]
	var to []string
	first := netip.PrefixFrom(own, 18).Masked().Addr()
	for i, a := 0, first; i < 9; i, a = i+1, a.Next() { // host, router, resolver, proxy, cache
		for _, p := range []string{port, "1", "22", "80", "443", "2049", "7878", "7879", "9000"} {
			to = append(to, fmt.Sprintf("tcp %v:%s", a, p))
		}
		to = append(to, fmt.Sprintf("udp %v:9000", a))
	}
	for _, a := range []string{"5.5.5.2", "10.0.0.1", "127.0.0.1", own.Prev().String()} {
		to = append(to, "tcp "+a+":"+port, "tcp "+a+":9000", "tcp "+a+":1")
	}
	b.closed("c15", to...)
	if out := b.dns("tcp", b.resolver()+":53", "allowed.example", "A"); !strings.Contains(out, allowedIP) {
		t.Errorf("the resolver: %s", out)
	}
	ln := listenAbstract(t, w.node, "vivarium-test-node")
	defer ln.Close()
	mine := listenAbstract(t, nil, "vivarium-test-host")
	defer mine.Close()
	out := b.must("attack", "abstract", "vivarium-test-node", "vivarium-test-host", "/containerd-shim/x", "viv", "vivarium").out
	for what, r := range outcomes(out) {
		if strings.HasPrefix(r, "reached") {
			t.Errorf("abstract socket %s: %s", what, r)
		}
	}
	if strings.Contains(out, "SEEN @vivarium-test") {
		t.Errorf("sockets of the host are seen inside: %s", out)
	}
	// the slot's namespace, which the sentry has, sees none of them either
	slot := b.slot()
	if c, err := slot.dial("unix", "@vivarium-test-node"); err == nil {
		c.Close()
		t.Error("the sentry's namespace reaches an abstract socket of the host")
	}
	if got := w.site.got("c15"); len(got) > 0 {
		t.Errorf("arrived: %v", got)
	}
}

// listenAbstract listens on an abstract socket, which a network namespace has.
func listenAbstract(t testing.TB, p *place, name string) (ln net.Listener) {
	t.Helper()
	listen := func() (err error) { ln, err = net.Listen("unix", "@"+name); return }
	if p == nil {
		ok(t, listen())
	} else {
		ok(t, p.in(listen))
	}
	return ln
}

// writeProgram writes the program attack for use outside.
func writeProgram(t testing.TB, path string) {
	t.Helper()
	ok(t, os.WriteFile(path, attackProgram.data, 0o755))
}

// C16: nobody outside reaches a port inside but through the API, with a token of
// the sandbox's tenant.
func c16(t *testing.T, w *world, l *lab) {
	b := l.box(t, nil)
	x := b.start("attack", "serve", "8000", "80")
	b.says(x, "serving")
	at := b.address().String()
	// as neighbours of the host who know the way
	w.internet.route(t, at+"/32", "5.5.5.2")
	w.private.route(t, at+"/32", "10.0.0.1")
	var wg sync.WaitGroup
	for _, p := range []*place{w.internet, w.private, w.node} {
		for _, port := range []string{"8000", "80"} {
			wg.Go(func() {
				if c, err := p.dial("tcp", at+":"+port); err == nil {
					c.Close()
					t.Errorf("reached port %s from %s", port, p.name)
				}
				if c, err := p.dial("udp", at+":"+port); err == nil {
					_, _ = c.Write([]byte("c16"))
					c.Close()
				}
			})
		}
	}
	wg.Wait()
	c, err := l.Client.Dial(within(t), b.id, 8000)
	ok(t, err)
	if n, _ := c.Read(make([]byte, 10)); n == 0 {
		t.Error("the API does not reach the port")
	}
	c.Close()
	b.says(x, "CAME")
	if out := b.output(x); strings.Count(out, "CAME") != 1 || !strings.Contains(out, "127.0.0.1:") {
		t.Errorf("want the arrival of the API alone: %s", out)
	}
	if c, err := l.NewTenant("c16").Dial(within(t), b.id, 8000); !errors.Is(err, sandbox.NotFound) {
		if c != nil {
			c.Close()
		}
		t.Errorf("another tenant: %v, want not found", err)
	}
	stranger, err := client.New("unix://"+l.Dir+"/viv.sock", "no token")
	ok(t, err)
	defer stranger.Close()
	if c, err := stranger.Dial(within(t), b.id, 8000); err == nil {
		c.Close()
		t.Error("without a token")
	}
	// the API itself is not for the network around
	if c, err := w.internet.dial("tcp", "5.5.5.2:"+strings.Split(l.Addr, ":")[1]); err == nil {
		c.Close()
		t.Error("the API listens to the network")
	}
}
