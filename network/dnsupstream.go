package network

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
)

const (
	// askTimeout is for one try of one resolver.
	askTimeout = 1200 * time.Millisecond
	// maxUpstreams is as many as are ever asked.
	maxUpstreams = 4
)

// upstream asks the host's resolvers. They are reached from the host's network
// namespace by the daemon itself, so they may have private addresses.
type upstream struct {
	fixed []netip.AddrPort
	conf  string
	dial  func(ctx context.Context, network, addr string) (net.Conn, error)

	mu      sync.Mutex
	servers []netip.AddrPort
	stamp   time.Time // modification time of conf when it was read
	good    int       // index of the server that answered last
}

func (n *Network) newUpstream() *upstream {
	u := &upstream{fixed: n.opts.Upstream, conf: n.opts.ResolvConf, dial: n.dialHost}
	u.reload()
	return u
}

// upstreams are the resolvers as of now.
func (n *Network) upstreams() []netip.AddrPort {
	if len(n.opts.Upstream) > 0 {
		return n.opts.Upstream
	}
	as, _ := readResolvConf(n.opts.ResolvConf)
	return as
}

// dialHost connects from the host's network namespace.
func (n *Network) dialHost(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	if n.opts.HostNetns == "" {
		return d.DialContext(ctx, network, addr)
	}
	type result struct {
		c   net.Conn
		err error
	}
	ch := make(chan result, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends here
		if err := unix.Setns(int(n.hostNS.Fd()), unix.CLONE_NEWNET); err != nil {
			ch <- result{nil, err}
			return
		}
		c, err := d.DialContext(ctx, network, addr)
		ch <- result{c, err}
	}()
	r := <-ch
	return r.c, r.err
}

// reload reads the host's resolver configuration again if it changed. A file
// that cannot be read leaves the resolvers as they were.
func (u *upstream) reload() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.fixed) > 0 {
		u.servers = u.fixed
		return
	}
	st, err := os.Stat(u.conf)
	if err != nil || st.ModTime().Equal(u.stamp) {
		return
	}
	if as, err := readResolvConf(u.conf); err == nil {
		u.servers, u.stamp, u.good = as, st.ModTime(), 0
	}
}

// readResolvConf returns the name servers of a resolv.conf(5).
func readResolvConf(path string) ([]netip.AddrPort, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 1<<20))
	if err != nil {
		return nil, err
	}
	return parseResolvConf(b), nil
}

func parseResolvConf(b []byte) []netip.AddrPort {
	var out []netip.AddrPort
	sc := bufio.NewScanner(bytes.NewReader(b))
	for sc.Scan() && len(out) < maxUpstreams {
		f := strings.Fields(sc.Text())
		if len(f) < 2 || f[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(f[1]); err == nil {
			out = append(out, netip.AddrPortFrom(a, 53))
		}
	}
	return out
}

// list returns the servers, the one that answered last in front.
func (u *upstream) list() ([]netip.AddrPort, int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	k := min(len(u.servers), maxUpstreams)
	out := make([]netip.AddrPort, 0, k)
	for i := range k {
		out = append(out, u.servers[(u.good+i)%k])
	}
	return out, u.good
}

// ask returns the first usable answer. An error means that no resolver gave
// one before ctx ended or after two rounds.
func (u *upstream) ask(ctx context.Context, q dns.Question) (*dns.Msg, error) {
	servers, first := u.list()
	if len(servers) == 0 {
		return nil, errors.New("no resolver configured")
	}
	var last error
	for range 2 {
		for i, s := range servers {
			m, err := u.askOne(ctx, s, q)
			if err == nil && (m.Rcode == dns.RcodeSuccess || m.Rcode == dns.RcodeNameError) {
				u.mu.Lock()
				if k := min(len(u.servers), maxUpstreams); k > 0 {
					u.good = (first + i) % k
				}
				u.mu.Unlock()
				return m, nil
			}
			if err == nil {
				err = fmt.Errorf("resolver %s answered %s", s, dns.RcodeToString[m.Rcode])
			}
			last = err
			if ctx.Err() != nil {
				return nil, last
			}
		}
	}
	return nil, last
}

// askOne asks one server over UDP, and over TCP when the answer did not fit.
func (u *upstream) askOne(ctx context.Context, server netip.AddrPort, q dns.Question) (*dns.Msg, error) {
	m, err := u.exchange(ctx, "udp", server, q, true)
	if err == nil && m.Rcode == dns.RcodeFormatError {
		m, err = u.exchange(ctx, "udp", server, q, false) // an old server: no EDNS
	}
	if err == nil && m.Truncated {
		m, err = u.exchange(ctx, "tcp", server, q, true)
	}
	return m, err
}

// exchange uses a socket, and so a source port, of its own for each query, and
// takes only an answer to exactly that query: what an off-path forger would
// have to guess.
func (u *upstream) exchange(ctx context.Context, network string, server netip.AddrPort, q dns.Question, edns bool) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	conn, err := u.dial(ctx, network, server.String())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	req := new(dns.Msg)
	req.Id = dns.Id()
	req.RecursionDesired = true
	req.Question = []dns.Question{q}
	if edns {
		req.SetEdns0(dnsMaxUDP, false)
	}
	c := &dns.Conn{Conn: conn, UDPSize: dnsMaxQuery}
	if err := c.WriteMsg(req); err != nil {
		return nil, err
	}
	for range 16 {
		b, err := c.ReadMsgHeader(nil)
		if err != nil {
			return nil, err
		}
		m := new(dns.Msg)
		if err := m.Unpack(b); err != nil {
			if m.Id == req.Id && m.Truncated && network == "udp" {
				return m, nil // cut in the middle of a record
			}
			continue
		}
		if m.Id == req.Id && m.Response && len(m.Question) == 1 && m.Question[0].Qtype == q.Qtype &&
			m.Question[0].Qclass == q.Qclass && strings.EqualFold(m.Question[0].Name, q.Name) {
			return m, nil
		}
	}
	return nil, fmt.Errorf("resolver %s: no answer to the question", server)
}
