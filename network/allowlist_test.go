package network

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

const (
	modePublic = sandbox.NetworkPublic
	modeAllow  = sandbox.NetworkAllowlist
)

// TestC12AddressRules: rules by address in order, floor, grants, ports, protocols.
func TestC12AddressRules(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone()
	l.opts.Grants = []policy.Grant{{Prefix: netip.MustParsePrefix("203.0.113.80/32"), Ports: []uint16{80}}}
	l.opts.Floor = rules(t, modePublic, "deny 1.2.3.4:81")
	for _, a := range []string{"8.8.8.8:80", "8.8.8.8:81", "1.2.3.4:80", "1.2.3.4:81", "203.0.113.80:80", "203.0.113.80:81", "8.8.8.8:53", "8.8.8.8:853"} {
		l.internet.serve(t, a)
	}
	n := l.open()
	for _, c := range []struct {
		p       sandbox.NetworkPolicy
		yes, no []string
	}{
		{rules(t, modeAllow), nil, []string{"8.8.8.8:80", "1.2.3.4:80", "203.0.113.80:80", "8.8.8.8:53"}},
		{rules(t, modeAllow, "allow 8.8.8.8"), []string{"8.8.8.8:80", "8.8.8.8:81", "8.8.8.8:53", "8.8.8.8:853"}, []string{"1.2.3.4:80", "203.0.113.80:80"}},
		{rules(t, modeAllow, "allow 8.8.8.0/24:80,90-99"), []string{"8.8.8.8:80"}, []string{"8.8.8.8:81", "1.2.3.4:80"}},
		{rules(t, modeAllow, "allow 8.8.8.8:80-82", "allow 1.2.3.4"), []string{"8.8.8.8:80", "8.8.8.8:81", "1.2.3.4:80"}, []string{"1.2.3.4:81", "8.8.8.8:53"}},
		{rules(t, modeAllow, "deny 8.8.8.8:80", "allow 0.0.0.0/0"), []string{"8.8.8.8:81", "1.2.3.4:80", "203.0.113.80:80"}, []string{"8.8.8.8:80", "1.2.3.4:81", "203.0.113.80:81"}},
		{rules(t, modeAllow, "allow 203.0.113.0/24", "allow 8.8.8.8/udp"), []string{"203.0.113.80:80"}, []string{"203.0.113.80:81", "8.8.8.8:80"}},
		{rules(t, modePublic), []string{"8.8.8.8:80", "203.0.113.80:80"}, []string{"1.2.3.4:81", "8.8.8.8:53", "8.8.8.8:853", "203.0.113.80:81"}},
		{rules(t, modePublic, "deny 8.8.8.8:80"), []string{"8.8.8.8:81", "1.2.3.4:80"}, []string{"8.8.8.8:80", "8.8.8.8:53"}},
		{rules(t, modePublic, "allow 8.8.8.8:53"), []string{"8.8.8.8:53", "8.8.8.8:80"}, []string{"8.8.8.8:853"}},
		{rules(t, modePublic, "deny 8.8.8.8", "allow 8.8.8.8:53"), []string{"1.2.3.4:80"}, []string{"8.8.8.8:53", "8.8.8.8:80"}},
		{rules(t, modePublic, "allow 8.8.8.8"), []string{"8.8.8.8:80"}, []string{"8.8.8.8:53"}},
	} {
		s, in := l.acquireUnder(n, c.p)
		compiled, err := n.Compile(c.p)
		must(t, err)
		check := func(list []string, want bool) {
			for _, a := range list {
				if got := in.reaches(a); got != want {
					t.Errorf("%v: %s reached: %v", texts(c.p), a, got)
				}
				ap := netip.MustParseAddrPort(a)
				if v := compiled.Decide(policy.Flow{Addr: ap.Addr(), Port: ap.Port(), Protocol: "tcp"}); v.Allowed != want {
					t.Errorf("%v: %s: Decide says %+v, the kernel was to %v", texts(c.p), a, v, want)
				}
			}
		}
		check(c.yes, true)
		check(c.no, false)
		if a, err := n.ReadBack(context.Background(), s.ID); err != nil || a.Hash != s.Applied.Hash {
			t.Errorf("%v: read back: %v", texts(c.p), err)
		}
		must(t, n.Release(context.Background(), s.ID))
	}
}

func texts(p sandbox.NetworkPolicy) (out []string) {
	out = append(out, string(p.Mode))
	for _, r := range p.Rules {
		out = append(out, string(r.Action)+" "+policy.FormatRule(r))
	}
	return out
}

// web serves HTTPS for names at addresses, and says which name it was asked for.
func (p *place) web(t testing.TB, addr string, names ...string) (*x509.CertPool, *served) {
	t.Helper()
	cert, pool := selfSigned(t, names...)
	hits := &served{}
	srv := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			hits.hit(netAddr(r.RemoteAddr))
			fmt.Fprintf(w, "this is %s at %s\n", r.Host, addr)
		}),
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{cert}},
		ErrorLog:  discardLog,
	}
	must(t, p.do(func() error {
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			return err
		}
		if strings.HasSuffix(addr, ":443") {
			go srv.ServeTLS(ln, "", "")
		} else {
			go srv.Serve(ln)
		}
		return nil
	}))
	t.Cleanup(func() { srv.Close() })
	return pool, hits
}

// get fetches https://name/ from an address of it.
func (p *place) get(pool *x509.CertPool, name, addr string) (string, error) {
	c, err := p.dial("tcp", addr, 3*time.Second)
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	if strings.HasSuffix(addr, ":443") {
		tc := tls.Client(c, &tls.Config{ServerName: name, RootCAs: pool})
		if err := tc.Handshake(); err != nil {
			return "", err
		}
		c = tc
	}
	fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", name)
	r, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return "", err
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err == nil && r.StatusCode != 200 {
		err = errors.New(r.Status)
	}
	return string(b), err
}

// TestC5Names: a name that a rule allows is reached at the addresses that our
// resolver gave, and nowhere else, and nothing else is.
func TestC5Names(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	z := l.zone("good.test. 60 IN A 8.8.8.8", "bad.test. 60 IN A 1.2.3.4", "also.test. 60 IN CNAME good.test.", "good.test. 60 IN A 10.0.0.2")
	pool, hits := l.internet.web(t, "8.8.8.8:443", "good.test", "bad.test")
	other, otherHits := l.internet.web(t, "1.2.3.4:443", "good.test", "bad.test")
	_, plain := l.internet.web(t, "8.8.8.8:80")
	n := l.open()
	s, in := l.acquireUnder(n, rules(t, modeAllow, "allow good.test"))
	if _, err := in.get(pool, "good.test", "8.8.8.8:443"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("before any answer: %v", err)
	}
	if got := in.resolve(t, s, "GOOD.test."); len(got) != 1 || got[0] != "8.8.8.8" {
		t.Fatalf("good.test is %v", got)
	}
	if b, err := in.get(pool, "good.test", "8.8.8.8:443"); err != nil || !strings.Contains(b, "good.test at 8.8.8.8") {
		t.Errorf("good.test: %q, %v", b, err)
	}
	if b, err := in.get(nil, "good.test", "8.8.8.8:80"); err != nil || !strings.Contains(b, "good.test at") {
		t.Errorf("http: %q, %v", b, err)
	}
	was, plainWas := hits.hits(), plain.hits()
	// C6: another name at that address; C5: that name at another address.
	if b, err := in.get(pool, "bad.test", "8.8.8.8:443"); err == nil {
		t.Errorf("another name at the address: %q", b)
	}
	if b, err := in.get(nil, "bad.test", "8.8.8.8:80"); err == nil {
		t.Errorf("another host at the address: %q", b)
	}
	if in.reaches("8.8.8.8:22") {
		t.Error("another port")
	}
	if b, err := in.get(other, "good.test", "1.2.3.4:443"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("the name at an address that it does not have: %q, %v", b, err)
	}
	if got := in.resolve(t, s, "bad.test."); got != nil {
		t.Errorf("bad.test is %v", got)
	}
	if z.wasAsked("bad.test.") {
		t.Error("a name that is not allowed was asked for upstream")
	}
	if hits.hits() != was || plain.hits() != plainWas || otherHits.hits() != 0 {
		t.Errorf("a server was reached: %d, %d, %d", hits.hits()-was, plain.hits()-plainWas, otherHits.hits())
	}
	// A neighbour with the same policy has no part in these pins.
	_, b := l.acquireUnder(n, rules(t, modeAllow, "allow good.test"))
	if _, err := b.get(pool, "good.test", "8.8.8.8:443"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a neighbour, without an answer: %v", err)
	}
}

// TestReadBackRules: whatever is changed behind our back is noticed.
func TestReadBackRules(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.zone("x.test. 60 IN A 8.8.8.8")
	l.opts.Floor = rules(t, modePublic, "deny 1.2.3.4:81", "deny 9.9.9.0/24:81")
	n := l.open()
	stopWorkers(n) // nobody repairs it meanwhile
	p := rules(t, modePublic, "deny 8.8.4.4", "deny 8.8.4.8", "allow 8.8.8.0/24:80,443-500", "allow x.test:22/tcp", "deny y.test")
	p.BytesPerSecond, p.ConnsPerSecond = 1<<20, 50
	s, in := l.acquireUnder(n, p)
	in.resolve(t, s, "x.test.")
	ctx := context.Background()
	sl := n.slots[s.ID]
	prog := sl.kernel.program.name
	chain := func(name string) *nftables.Chain { return &nftables.Chain{Table: tableRef, Name: name} }
	for what, change := range map[string]func(c *nftables.Conn) error{
		"nothing": func(c *nftables.Conn) error { return nil },
		"a rule first": func(c *nftables.Conn) error {
			c.InsertRule(&nftables.Rule{Table: tableRef, Chain: chain(prog), Exprs: accept()})
			return nil
		},
		"no rules":   func(c *nftables.Conn) error { c.FlushChain(chain(prog)); return nil },
		"no refusal": func(c *nftables.Conn) error { c.FlushChain(chain("refuse")); return nil },
		"a hook that lets pass": func(c *nftables.Conn) error {
			c.InsertRule(&nftables.Rule{Table: tableRef, Chain: chain("prerouting"), Exprs: accept()})
			return nil
		},
		"the gate": func(c *nftables.Conn) error {
			c.InsertRule(&nftables.Rule{Table: gateRef, Chain: &nftables.Chain{Table: gateRef, Name: "forward"}, Exprs: accept()})
			return nil
		},
		"a network less": func(c *nftables.Conn) error {
			return c.SetDeleteElements(sl.kernel.program.sets[0].set, sl.kernel.program.sets[0].elems)
		},
		"a host address less": func(c *nftables.Conn) error { c.FlushSet(setHost()); return nil },
		"a pin": func(c *nftables.Conn) error {
			return addElements(c, setPinned(), []nftables.SetElement{pinKey{netip.MustParseAddr("1.2.3.4"), 1, 6, false}.element(s.HostVeth, time.Minute)})
		},
		"a limit less":   func(c *nftables.Conn) error { c.FlushSet(mapSlowOut()); return nil },
		"unchecked":      func(c *nftables.Conn) error { c.FlushSet(setCheckAll()); return nil },
		"no redirection": func(c *nftables.Conn) error { c.FlushChain(chain("redirecting")); return nil },
		"the floor":      func(c *nftables.Conn) error { c.FlushChain(chain("floor")); return nil },
	} {
		must(t, n.router.nft(change))
		a, err := n.ReadBack(ctx, s.ID)
		if what == "nothing" && (err != nil || a.Hash != s.Applied.Hash) || what != "nothing" && !errors.Is(err, sandbox.Internal) {
			t.Errorf("%s: %v", what, err)
		}
		n.rules.Lock()
		n.mu.Lock()
		must(t, n.installRouter())
		n.mu.Unlock()
		n.rules.Unlock()
		if _, err := n.ReadBack(ctx, s.ID); err != nil {
			t.Errorf("after the repair of %s: %v", what, err)
		}
	}
}
