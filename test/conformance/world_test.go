package conformance

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/sandbox"
	"vivarium/test/fixture"
)

// world is a host with its surroundings, in network namespaces of the test's own:
//
//	sandboxes - router - node - eth0 5.5.5.2 ---- internet: 5.5.5.1, 1.2.3.x, 8.8.8.8
//	                       \--- eth1 10.0.0.1 --- private: 10.0.0.2, 169.254.169.254, resolver 10.0.0.53
//
// No packet can leave it: none of them has a way to the real one.
type world struct {
	node, internet, private *place
	out, in                 *tap // what arrives at internet and private
	site                    *site
	zone                    *zone
	ca                      *authority
}

// Addresses on the internet. Those of tests that look at arrivals are their own.
const (
	allowedIP = "1.2.3.4"
	deniedIP  = "1.2.3.5"
	sharedIP  = "1.2.3.6" // serves front.example and hidden.example
	publicDNS = "8.8.8.8"
	resolver  = "10.0.0.53" // the node's
)

// fixed is what the zone says, besides what a test adds.
var fixed = []string{
	"allowed.example. 60 IN A 1.2.3.4", "denied.example. 60 IN A 1.2.3.5",
	"front.example. 60 IN A 1.2.3.6", "hidden.example. 60 IN A 1.2.3.6",
	"wild.example. 60 IN A 1.2.3.4", "*.wild.example. 60 IN A 1.2.3.4", "xn--bcher-kva.example. 60 IN A 1.2.3.4",
	"dns.example. 60 IN A 8.8.8.8",
	"private.example. 60 IN A 10.0.0.2", "metadata.example. 60 IN A 169.254.169.254", "metadata.google.internal. 60 IN A 169.254.169.254",
	"both.example. 60 IN A 1.2.3.9", "both.example. 60 IN A 10.0.0.2", "alias.example. 60 IN CNAME private.example.",
	"v6.example. 60 IN AAAA fd00:ec2::254", "v6.example. 60 IN AAAA 2a00:1::1", "mapped.example. 60 IN AAAA ::ffff:10.0.0.2",
	"ech.example. 60 IN A 1.2.3.4", `ech.example. 60 IN HTTPS 1 . alpn="h2" ech="AEX+DQBBAAAgACB0ZXN0dGVzdHRlc3R0ZXN0dGVzdHRlc3R0ZXN0AAQAAQABABJjbG91ZGZsYXJlLWVjaC5jb20AAA==" ipv4hint=10.0.0.2`,
	"secret.example. 60 IN A 1.2.3.10", "stolen.example. 60 IN A 1.2.3.11",
	"git.example. 60 IN A 1.2.3.12",
	"registry.example. 60 IN A 1.2.3.7", "moved.example. 60 IN A 1.2.3.14",
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{node: newPlace(t, "node"), internet: newPlace(t, "internet"), private: newPlace(t, "private")}
	join(t, w.node, "eth0", []string{"5.5.5.2/24", "2a00:1::2/64"}, w.internet, "eth0", []string{"5.5.5.1/24", "2a00:1::1/64"})
	join(t, w.node, "eth1", []string{"10.0.0.1/24", "fd00:ec2::1/64"}, w.private, "eth0", []string{"10.0.0.2/24", "fd00:ec2::254/64"})
	for i := 1; i < 256; i++ {
		w.internet.addr(t, "lo", fmt.Sprintf("1.2.3.%d/32", i))
	}
	w.internet.addr(t, "lo", publicDNS+"/32")
	w.internet.addr(t, "lo", "9.9.9.9/32")
	w.node.route(t, "0.0.0.0/0", "5.5.5.1")
	w.node.route(t, "::/0", "2a00:1::1")
	// The host can reach its private network and metadata service: only our rules
	// stand between them and a sandbox.
	for _, a := range []string{"169.254.169.254", resolver, "172.16.5.5", "192.168.7.7", "100.64.0.9", systemResolver(t)} {
		if netip.MustParseAddr(a).IsLoopback() {
			continue
		}
		w.private.addr(t, "lo", a+"/32")
		w.node.route(t, a+"/32", "10.0.0.2")
	}
	w.internet.route(t, "0.0.0.0/0", "5.5.5.2") // what has no business there comes back all the same
	w.private.route(t, "0.0.0.0/0", "10.0.0.1")
	for _, p := range []*place{w.internet, w.private} {
		p.sysctl(t, "ipv4/icmp_ratelimit", "0")
		if got := links(t, p); !slices.Equal(got, []string{"eth0", "lo"}) {
			t.Fatalf("%s has links %v: there may be a way out", p.name, got)
		}
	}
	if got := links(t, w.node); !slices.Equal(got, []string{"eth0", "eth1", "lo"}) {
		t.Fatalf("node has links %v: there may be a way out", got)
	}
	w.ca = newAuthority(t)
	w.zone = &zone{records: parse(t, fixed)}
	w.site = &site{}
	for _, p := range []*place{w.node, w.internet, w.private} {
		w.site.serve(t, w, p)
	}
	// without the daemon, all that is forbidden can be reached from the host
	for _, a := range []string{"10.0.0.2:80", "169.254.169.254:80", "172.16.5.5:80", "1.2.3.5:80", "[fd00:ec2::254]:80"} {
		c, err := w.node.dial("tcp", a)
		if err != nil {
			t.Fatalf("the lab is of no use: %v", err)
		}
		c.Close()
	}
	w.out, w.in = w.internet.tap(t, "eth0"), w.private.tap(t, "eth0")
	return w
}

func links(t testing.TB, p *place) (out []string) {
	l, err := p.h.LinkList()
	ok(t, err)
	for _, l := range l {
		out = append(out, l.Attrs().Name)
	}
	slices.Sort(out)
	return out
}

// systemResolver is whom a program on this machine asks, so also the daemon for
// itself. In the world that is the test's resolver as well.
func systemResolver(t testing.TB) string {
	b, err := os.ReadFile("/etc/resolv.conf")
	ok(t, err)
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 2 && f[0] == "nameserver" {
			if a, err := netip.ParseAddr(f[1]); err == nil && a.Is4() {
				return f[1]
			}
		}
	}
	return "127.0.0.1" // as for want of one
}

// settle waits until the taps have seen all that was sent by now.
func (w *world) settle(t testing.TB) {
	t.Helper()
	for _, x := range []struct {
		tp *tap
		to string
	}{{w.out, "5.5.5.1"}, {w.in, "10.0.0.2"}} {
		pc, err := w.node.dial("udp", x.to+":4")
		ok(t, err)
		n := 0
		eventually(t, "the tap is up to date", func() bool {
			if n++; n%5 == 1 {
				_, _ = pc.Write([]byte("marker")) // an error tells of the one before
			}
			return len(x.tp.seen(func(p packet) bool { return p.port == 4 && p.proto == unix.IPPROTO_UDP })) > 0
		})
		pc.Close()
		x.tp.mu.Lock()
		for p := range x.tp.packets {
			if p.port == 4 && p.proto == unix.IPPROTO_UDP && p.dst == netip.MustParseAddr(x.to) {
				delete(x.tp.packets, p)
			}
		}
		x.tp.mu.Unlock()
	}
}

// judge says what arrived that nothing inside, whatever its policy, may send.
func (w *world) judge(t testing.TB) {
	t.Helper()
	w.settle(t)
	say := func(where string, ps []packet) {
		for i, p := range ps {
			if i == 20 {
				t.Errorf("... and %d more", len(ps)-i)
				break
			}
			t.Errorf("arrived at the %s: %v", where, p)
		}
	}
	say("private network", w.in.seen(func(p packet) bool {
		switch {
		case p.ether == unix.ETH_P_ARP, housekeeping6(p):
			return false
		case p.src == netip.MustParseAddr("10.0.0.1") && p.port == 53 && (p.dst == netip.MustParseAddr(resolver) || p.dst == netip.MustParseAddr(systemResolver(t))):
			return false // the node's resolver asks
		}
		return true
	}))
	say("internet", w.out.seen(func(p packet) bool {
		switch {
		case p.ether == unix.ETH_P_ARP, housekeeping6(p):
			return false
		case p.ether != unix.ETH_P_IP || p.src != netip.MustParseAddr("5.5.5.2"):
			return true
		case p.proto != unix.IPPROTO_TCP && p.proto != unix.IPPROTO_UDP && p.proto != unix.IPPROTO_ICMP:
			return true
		}
		return p.dst.IsPrivate() || p.dst.IsLinkLocalUnicast() || p.dst.IsMulticast() || p.dst.IsLoopback()
	}))
	if got := w.site.hits(func(h hit) bool { return h.place == "node" }); len(got) > 0 {
		t.Errorf("reached the host: %v", got)
	}
	if got := w.site.hits(func(h hit) bool { return h.place == "private" }); len(got) > 0 {
		t.Errorf("reached the private network: %v", got)
	}
}

// housekeeping6 is what the namespaces' own stacks send: neighbour and router
// solicitations, multicast listener reports.
func housekeeping6(p packet) bool {
	return p.ether == unix.ETH_P_IPV6 && (p.proto == unix.IPPROTO_ICMPV6 || p.proto == unix.IPPROTO_HOPOPTS) && (p.src.IsLinkLocalUnicast() || p.src.IsUnspecified() || p.src == netip.MustParseAddr("2a00:1::2") || p.src == netip.MustParseAddr("fd00:ec2::1"))
}

// ---------------------------------------------------------------- servers

// hit is something that reached a server.
type hit struct {
	place  string
	local  string // address and port
	remote string
	proto  string // tcp, udp, http, https, dot
	sni    string
	host   string
	path   string
	header http.Header
	data   string // raw
	time   time.Time
}

func (h hit) String() string {
	return fmt.Sprintf("{%s %s from %s: %s sni=%q host=%q path=%q data=%q}", h.place, h.local, h.remote, h.proto, h.sni, h.host, h.path, h.data)
}

// site is every server of a world, on every address.
type site struct {
	mu  sync.Mutex
	all []hit
}

func (s *site) note(h hit) {
	h.time = time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.all) < 100_000 {
		s.all = append(s.all, h)
	}
}

func (s *site) hits(like func(hit) bool) (out []hit) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.all {
		if like(h) {
			out = append(out, h)
		}
	}
	return out
}

// got are the hits that have a token in their path, host or data.
func (s *site) got(token string) []hit {
	return s.hits(func(h hit) bool {
		return strings.Contains(h.path, token) || strings.Contains(h.data, token) || strings.Contains(h.host, token)
	})
}

// Ports of a site: 80 and 8080 HTTP, 443 and 8443 TLS (HTTP/1.1, HTTP/2, DNS over
// HTTPS), 853 DNS over TLS, 53 DNS, 22 and 9000 raw TCP, 9443 the same in TLS, 443 and 9000 raw UDP.
func (s *site) serve(t testing.TB, w *world, p *place) {
	conf := &tls.Config{GetCertificate: w.ca.forHello, NextProtos: []string{"h2", "http/1.1"}}
	for _, port := range []string{"80", "8080", "443", "8443"} {
		ln := p.listen(t, "0.0.0.0:"+port)
		h := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { s.page(p.name, w, rw, r) })
		srv := &http.Server{Handler: h, TLSConfig: conf.Clone(), ErrorLog: log.New(io.Discard, "", 0)} // attackers break handshakes off
		if strings.HasSuffix(port, "443") {
			go srv.ServeTLS(ln, "", "")
		} else {
			go srv.Serve(ln)
		}
		t.Cleanup(func() { srv.Close() })
	}
	dot := p.listen(t, "0.0.0.0:853")
	dot = tls.NewListener(dot, &tls.Config{GetCertificate: w.ca.forHello})
	pc, ln := p.listenUDP(t, "0.0.0.0:53"), p.listen(t, "0.0.0.0:53")
	for _, srv := range []*dns.Server{{PacketConn: pc}, {Listener: ln}, {Listener: dot}} {
		kind := "dns"
		if srv.Listener == dot {
			kind = "dot"
		}
		srv.Handler = dns.HandlerFunc(func(rw dns.ResponseWriter, r *dns.Msg) {
			rw.WriteMsg(w.zone.answer(p.name, kind, rw.RemoteAddr(), r))
		})
		go srv.ActivateAndServe()
	}
	for _, port := range []string{"22", "9000", "9443"} {
		ln := p.listen(t, "0.0.0.0:"+port)
		if port == "9443" {
			ln = tls.NewListener(ln, &tls.Config{GetCertificate: w.ca.forHello})
		}
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					s.note(hit{place: p.name, local: c.LocalAddr().String(), remote: c.RemoteAddr().String(), proto: "tcp"})
					r := bufio.NewReader(c)
					for {
						line, err := r.ReadString('\n')
						if err != nil {
							return
						}
						s.note(hit{place: p.name, local: c.LocalAddr().String(), remote: c.RemoteAddr().String(), proto: "tcp", data: line})
						if _, err := io.WriteString(c, line); err != nil {
							return
						}
					}
				}()
			}
		}()
	}
	for _, port := range []string{"443", "9000"} {
		pc := ipv4.NewPacketConn(p.listenUDP(t, "0.0.0.0:"+port))
		ok(t, pc.SetControlMessage(ipv4.FlagDst, true))
		go func() {
			b := make([]byte, 2048)
			for {
				n, cm, from, err := pc.ReadFrom(b)
				if err != nil {
					return
				}
				s.note(hit{place: p.name, local: fmt.Sprint(cm.Dst, ":", port), remote: from.String(), proto: "udp", data: string(b[:n])})
				_, _ = pc.WriteTo(b[:n], &ipv4.ControlMessage{Src: cm.Dst}, from)
			}
		}()
	}
}

// page answers /echo with what was asked, /redirect with a redirection, /stream
// for ever, and is a resolver and a registry.
func (s *site) page(where string, w *world, rw http.ResponseWriter, r *http.Request) {
	h := hit{place: where, local: fmt.Sprint(r.Context().Value(http.LocalAddrContextKey)), remote: r.RemoteAddr, proto: "http", host: r.Host, path: r.URL.RequestURI(), header: r.Header.Clone()}
	if r.TLS != nil {
		h.proto, h.sni = "https", r.TLS.ServerName
	}
	s.note(h)
	if strings.Contains(r.Host, "flip") {
		rw.Header().Set("Connection", "close") // so that the client resolves again
	}
	switch {
	case r.URL.Path == "/redirect":
		http.Redirect(rw, r, r.URL.Query().Get("to"), http.StatusFound)
	case r.URL.Path == "/echo":
		fmt.Fprintln(rw, r.Host, r.URL.RequestURI())
		r.Header.Write(rw)
	case r.URL.Path == "/dns-query":
		b, err := io.ReadAll(io.LimitReader(r.Body, 65535))
		m := new(dns.Msg)
		if err != nil || m.Unpack(b) != nil {
			http.Error(rw, "no query", http.StatusBadRequest)
			return
		}
		if b, err = w.zone.answer(where, "doh", nil, m).Pack(); err == nil {
			rw.Header().Set("Content-Type", "application/dns-message")
			_, _ = rw.Write(b)
		}
	case strings.HasPrefix(r.URL.Path, "/v2/to-"):
		// a registry that sends its clients on
		to := map[string]string{
			"private": "http://10.0.0.2:80", "metadata": "http://169.254.169.254", "name": "https://private.example", "secure": "https://10.0.0.2",
			"moved": "https://moved.example", "rebind": "https://registry-flip.example", "host": "http://5.5.5.2:8080", "loopback": "http://127.0.0.1:80",
		}[strings.Split(strings.TrimPrefix(r.URL.Path, "/v2/to-"), "/")[0]]
		http.Redirect(rw, r, to+"/leak"+r.URL.Path, http.StatusTemporaryRedirect)
	case strings.HasPrefix(r.URL.Path, "/c19-git") && r.Header.Get("Authorization") == "":
		rw.Header().Set("WWW-Authenticate", `Basic realm="git"`)
		http.Error(rw, "who are you?", http.StatusUnauthorized)
	case r.URL.Path == "/c19-git/info/refs":
		// a repository without commits (gitprotocol-http(5))
		rw.Header().Set("Content-Type", "application/x-git-upload-pack-advertisement")
		fmt.Fprint(rw, "001e# service=git-upload-pack\n0000")
		caps := strings.Repeat("0", 40) + " capabilities^{}\x00 agent=test\n"
		fmt.Fprintf(rw, "%04x%s0000", len(caps)+4, caps)
	case r.URL.Path == "/v2/":
	case strings.HasPrefix(r.URL.Path, "/leak"):
		http.NotFound(rw, r)
	default:
		fmt.Fprintf(rw, "hello from %s to %s\n", where, r.Host)
	}
}

// --------------------------------------------------------------------- DNS

// asked is a question that a resolver got.
type asked struct {
	place, kind, name string
	qtype             uint16
}

// zone is what every resolver of a world knows.
type zone struct {
	mu      sync.Mutex
	records []dns.RR
	flips   map[string][]string // names that have another address each time
	asked   []asked
	total   int
}

func parse(t testing.TB, records []string) (out []dns.RR) {
	for _, s := range records {
		r, err := dns.NewRR(s)
		if err != nil {
			t.Fatalf("%s: %v", s, err)
		}
		out = append(out, r)
	}
	return out
}

// set replaces the records of a name.
func (z *zone) set(t testing.TB, name string, records ...string) {
	rs := parse(t, records)
	z.mu.Lock()
	defer z.mu.Unlock()
	z.records = slices.DeleteFunc(z.records, func(r dns.RR) bool { return r.Header().Name == dns.Fqdn(name) })
	z.records = append(z.records, rs...)
}

// flip lets a name have these addresses in turn, the last for ever.
func (z *zone) flip(name string, addrs ...string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.flips == nil {
		z.flips = map[string][]string{}
	}
	z.flips[dns.Fqdn(name)] = addrs
}

// questions are those whose name has a token in it, from one place ("": all).
func (z *zone) questions(where, token string) (out []asked) {
	z.mu.Lock()
	defer z.mu.Unlock()
	for _, a := range z.asked {
		if (where == "" || a.place == where) && strings.Contains(a.name, strings.ToLower(token)) {
			out = append(out, a)
		}
	}
	return out
}

func (z *zone) answer(where, kind string, _ net.Addr, r *dns.Msg) *dns.Msg {
	m := new(dns.Msg)
	m.SetReply(r)
	if len(r.Question) != 1 {
		m.Rcode = dns.RcodeFormatError
		return m
	}
	q := r.Question[0]
	name := strings.ToLower(q.Name)
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.total++; len(z.asked) < 100_000 {
		z.asked = append(z.asked, asked{where, kind, name, q.Qtype})
	}
	if f := z.flips[name]; len(f) > 0 {
		if q.Qtype == dns.TypeA {
			a, _ := dns.NewRR(name + " 0 IN A " + f[0])
			m.Answer = append(m.Answer, a)
			if len(f) > 1 {
				z.flips[name] = f[1:]
			}
		}
		return m
	}
	if !strings.Contains(strings.TrimSuffix(name, "."), ".") || strings.Trim(name, "0123456789abcdefx.") == "" {
		a, _ := dns.NewRR(name + " 60 IN A 10.0.0.2") // what looks like an address becomes one
		m.Answer = append(m.Answer, a)
		return m
	}
	if strings.HasSuffix(name, ".tunnel.example.") || strings.HasSuffix(name, ".wild.example.") {
		switch q.Qtype {
		case dns.TypeA:
			a, _ := dns.NewRR(name + " 0 IN A 1.2.3.4")
			m.Answer = append(m.Answer, a)
		case dns.TypeTXT:
			a, _ := dns.NewRR(name + ` 0 IN TXT "a command for inside"`)
			m.Answer = append(m.Answer, a)
		case dns.TypeNULL:
			m.Answer = append(m.Answer, &dns.NULL{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeNULL, Class: 1}, Data: "a command for inside"})
		}
		return m
	}
	m.Rcode = dns.RcodeNameError
	for range 4 { // follows aliases
		next := ""
		for _, rr := range z.records {
			if rr.Header().Name != name {
				continue
			}
			m.Rcode = dns.RcodeSuccess
			if c, is := rr.(*dns.CNAME); is && q.Qtype != dns.TypeCNAME {
				next = c.Target
				m.Answer = append(m.Answer, rr)
			} else if rr.Header().Rrtype == q.Qtype {
				m.Answer = append(m.Answer, rr)
			}
		}
		if name = next; name == "" {
			break
		}
	}
	return m
}

// --------------------------------------------------------------------- TLS

// authority is the CA that the world's servers have certificates of.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	file string // PEM
	mu   sync.Mutex
	made map[string]*tls.Certificate
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	ok(t, err)
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test world"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	ok(t, err)
	cert, err := x509.ParseCertificate(der)
	ok(t, err)
	a := &authority{cert: cert, key: key, file: filepath.Join(t.TempDir(), "ca.pem"), made: map[string]*tls.Certificate{}}
	ok(t, os.WriteFile(a.file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644))
	return a
}

func (a *authority) forHello(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
	names := []string{h.ServerName}
	switch h.ServerName {
	case "front.example", "hidden.example": // one certificate for both
		names = []string{"front.example", "hidden.example"}
	case "":
		names = []string{"none.example"}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.made[names[0]]; c != nil {
		return c, nil
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), DNSNames: names, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, &a.key.PublicKey, a.key)
	if err != nil {
		return nil, err
	}
	c := &tls.Certificate{Certificate: [][]byte{der, a.cert.Raw}, PrivateKey: a.key}
	a.made[names[0]] = c
	return c, nil
}

// --------------------------------------------------------------- the daemon

const worldConfig = `
pool: {size: 0}
defaults: {network: public, cpu_request: 10m, cpu_limit: 2, memory_request: 16MiB, memory_limit: 256MiB, disk: 512MiB, pids: 512}
spool: {per_exec: 1MiB, per_sandbox: 64MiB}
network: {resolvers: [10.0.0.53], pool: 4}
tunnel: {listen: "5.5.5.2:7879", domain: tunnels.example, tcp_listen: 0.0.0.0, ports: 20000-20099}
`

// start starts a daemon on the world's node.
func (w *world) start(t *testing.T) *lab {
	t.Helper()
	return newLabOn(t, worldConfig, fixture.Host{Netns: w.node.ns, Env: []string{"SSL_CERT_FILE=" + w.ca.file}})
}

// policyOf reads "allow x" and "deny y".
func policyOf(mode sandbox.NetworkMode, rules ...string) *v1.NetworkPolicy {
	p := &v1.NetworkPolicy{Mode: string(mode)}
	for _, r := range rules {
		action, match, _ := strings.Cut(r, " ")
		p.Rules = append(p.Rules, &v1.PolicyRule{Action: action, Match: match})
	}
	return p
}

// under makes a sandbox with a policy.
func (l *lab) under(t testing.TB, p *v1.NetworkPolicy) *box {
	t.Helper()
	return l.box(t, func(s *v1.SandboxSpec) { s.Network = p })
}

// outcomes reads lines of "what = how", as attack try prints.
func outcomes(out string) map[string]string {
	m := map[string]string{}
	for line := range strings.Lines(out) {
		if k, v, is := strings.Cut(strings.TrimSpace(line), " = "); is {
			m[k] = v
		}
	}
	return m
}

// try sends a token to places and says what became of each.
func (b *box) try(token string, to ...string) map[string]string {
	b.t.Helper()
	return outcomes(b.must(append([]string{"attack", "try", token}, to...)...).out)
}

// closed fails the test for each place that was reached.
func (b *box) closed(token string, to ...string) {
	b.t.Helper()
	got := b.try(token, to...)
	for _, a := range to {
		if r := got[a]; r == "" || strings.HasPrefix(r, "reached") {
			b.t.Errorf("%s: %q", a, r)
		}
	}
}

// open fails the test for each place that was not reached.
func (b *box) open(token string, to ...string) {
	b.t.Helper()
	got := b.try(token, to...)
	for _, a := range to {
		if r := got[a]; r != "reached" {
			b.t.Errorf("%s: %q, want it reached", a, r)
		}
	}
}

func (b *box) web(args ...string) string {
	b.t.Helper()
	return b.must(append([]string{"attack", "web"}, args...)...).out
}

// get fetches a page as a program does that follows redirections; it says whether
// it got one.
func (b *box) get(url string, headers ...string) (string, bool) {
	b.t.Helper()
	out := b.must(append([]string{"attack", "get", url}, headers...)...).out
	return out, strings.HasPrefix(out, "200 ")
}

func (b *box) dns(args ...string) string {
	b.t.Helper()
	return b.must(append([]string{"attack", "dns"}, args...)...).out
}

// address is the sandbox's own.
func (b *box) address() netip.Addr {
	b.t.Helper()
	out := b.sh("ip -4 -o addr show eth0 2>/dev/null || ifconfig eth0")
	for _, f := range strings.FieldsFunc(out, func(r rune) bool { return r == ' ' || r == '/' || r == ':' || r == '\n' }) {
		if a, err := netip.ParseAddr(f); err == nil {
			return a
		}
	}
	b.t.Fatalf("no address: %q", out)
	return netip.Addr{}
}

// resolver is the resolver that the sandbox has.
func (b *box) resolver() string {
	b.t.Helper()
	return b.sh("awk '/^nameserver/{print $2}' /etc/resolv.conf")
}

// slot is the sandbox's network namespace, which the sentry holds, as one who has
// taken over the sentry sees it.
func (b *box) slot() *place {
	b.t.Helper()
	a := b.address().As4()
	mac := net.HardwareAddr{0x02, 0x76, a[0], a[1], a[2], a[3]}.String() // the sentry takes the address from the interface
	dirs, err := filepath.Glob(filepath.Join(b.l.Dir, "net", "slots", "*", "netns"))
	ok(b.t, err)
	for _, d := range dirs {
		p := placeAt(b.t, d)
		l, err := p.h.LinkByName("eth0")
		if err == nil && l.Attrs().HardwareAddr.String() == mac {
			return p
		}
	}
	b.t.Fatalf("no slot with address %s", mac)
	return nil
}

// logOf is the daemon's whole log.
func (l *lab) logOf(t testing.TB) []byte {
	b, err := os.ReadFile(l.Dir + ".log")
	ok(t, err)
	return bytes.Clone(b)
}
