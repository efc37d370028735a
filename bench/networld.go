package bench

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// Where the outside world of bench net is: in 198.18.0.0/15, which is set aside
// for measurements (RFC 2544) and so belongs to no one who could be reached by
// mistake.
var (
	worldAddr = netip.MustParseAddr("198.18.0.2") // the servers, and the resolver
	worldGate = netip.MustParsePrefix("198.18.0.1/30")
	// between the servers and who is compared, in namespaces that know nothing else
	worldPlain = link{"198.18.0.5/30", "198.18.0.6/30"}
	worldStack = link{"198.18.0.9/30", "198.18.0.10/30"}
)

// link is a veth of which the servers have one end.
type link struct{ servers, peer string }

// addr is the servers' at a port.
func (l link) addr(port int) string { return address(netip.MustParsePrefix(l.servers).Addr(), port) }

func address(a netip.Addr, port int) string { return netip.AddrPortFrom(a, uint16(port)).String() }

// Ports of the servers. Rules by name without a port are for 80 and 443; those
// from 8000 on are for rules by address.
const (
	portHTTP, portTLS             = 80, 443
	portHTTPDirect, portTLSDirect = 8080, 8443
	portRaw                       = 9000
)

// worldZone is where the names are (RFC 6761).
const worldZone = "bench.example"

// WorldConfig is what the daemon's configuration needs for bench net.
const WorldConfig = `network:
  grants:
    - prefix: 198.18.0.2/32
  resolvers: ["198.18.0.2:53"]`

// world stands for everything outside: a network namespace with servers in it,
// reached over a veth, and two more from which the same servers are reached
// without a daemon. None has a way out of this machine. They have no name and no
// mount: whatever happens to this process, the kernel takes them with it.
type world struct {
	host, servers, plain, stack *namespace
	close                       []func()
}

// openWorld makes it, beside host. It needs root.
func openWorld(host *namespace) (_ *world, err error) {
	w := &world{host: host}
	defer func() {
		if err != nil {
			w.shut()
		}
	}()
	taken := false
	if err := host.do(func() error { taken = isLocal(worldGate.Addr()); return nil }); err != nil {
		return nil, sandbox.Internal.Errorf("enter network namespace: %w", err)
	}
	if taken {
		return nil, sandbox.Conflict.Errorf("this host has the address %s already: another bench net is at work", worldGate.Addr())
	}
	for _, n := range []**namespace{&w.servers, &w.plain, &w.stack} {
		if *n, err = newNamespace(); err != nil {
			return nil, sandbox.Internal.Errorf("make network namespace: %w", err)
		}
		w.close = append(w.close, (*n).close)
	}
	id := make([]byte, 4)
	_, _ = rand.Read(id) // does not fail
	hostEnd := "vivbench" + hex.EncodeToString(id)[:6]
	if err := w.servers.join("eth0", worldAddr.String()+"/30", w.host, hostEnd, worldGate.String()); err != nil {
		return nil, err
	}
	// it goes with its other end, but only once the kernel has time for it
	w.close = append(w.close, func() {
		_ = w.host.do(func() error {
			l, err := netlink.LinkByName(hostEnd)
			if err != nil {
				return err
			}
			return netlink.LinkDel(l)
		})
	})
	if err := w.servers.join("plain", worldPlain.servers, w.plain, "eth0", worldPlain.peer); err != nil {
		return nil, err
	}
	if err := w.servers.join("stack", worldStack.servers, w.stack, "eth0", worldStack.peer); err != nil {
		return nil, err
	}
	return w, w.serve()
}

// shut ends everything.
func (w *world) shut() {
	for len(w.close) > 0 {
		last := len(w.close) - 1
		w.close[last]()
		w.close = w.close[:last]
	}
}

// serve starts the servers.
func (w *world) serve() error {
	cert, err := selfSigned()
	if err != nil {
		return err
	}
	web := &http.Server{
		Handler: http.HandlerFunc(serveHTTP), ReadHeaderTimeout: peerTimeout,
		ErrorLog: log.New(io.Discard, "", 0), // of clients that went away
		// no HTTP/2: one stream is one connection
		TLSNextProto: map[string]func(*http.Server, *tls.Conn, http.Handler){},
	}
	w.close = append(w.close, func() { _ = web.Close() })
	for _, port := range []int{portHTTP, portHTTPDirect, portTLS, portTLSDirect, portRaw} {
		l, err := w.servers.listen(port)
		if err != nil {
			return sandbox.Internal.Errorf("listen: %w", err)
		}
		w.close = append(w.close, func() { _ = l.Close() })
		switch port {
		case portRaw:
			go serveRaw(l)
		case portTLS, portTLSDirect:
			go web.Serve(tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{cert}}))
		default:
			go web.Serve(l)
		}
	}
	return w.serveDNS()
}

func (w *world) serveDNS() error {
	var pc net.PacketConn
	if err := w.servers.do(func() (err error) {
		pc, err = net.ListenPacket("udp4", address(worldAddr, 53))
		return err
	}); err != nil {
		return sandbox.Internal.Errorf("listen: %w", err)
	}
	l, err := w.servers.listen(53)
	if err != nil {
		pc.Close()
		return sandbox.Internal.Errorf("listen: %w", err)
	}
	for _, s := range []*dns.Server{{PacketConn: pc, Handler: dns.HandlerFunc(serveName)}, {Listener: l, Handler: dns.HandlerFunc(serveName)}} {
		go s.ActivateAndServe() // until its socket is closed
		w.close = append(w.close, func() { _ = s.Shutdown() })
	}
	w.close = append(w.close, func() { _ = pc.Close(); _ = l.Close() })
	return nil
}

// serveName knows one address for every name of the zone.
func serveName(w dns.ResponseWriter, q *dns.Msg) {
	m := new(dns.Msg).SetReply(q)
	for _, x := range q.Question {
		name := strings.ToLower(x.Name)
		switch {
		case !strings.HasSuffix(name, "."+worldZone+"."):
			m.Rcode = dns.RcodeNameError
		case x.Qtype == dns.TypeA:
			m.Answer = append(m.Answer, &dns.A{
				Hdr: dns.RR_Header{Name: x.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 300}, A: net.IP(worldAddr.AsSlice()),
			})
		}
	}
	_ = w.WriteMsg(m) // who asked is gone
}

// serveHTTP answers /hello, takes a body at /bytes and gives one at /bytes/N.
func serveHTTP(w http.ResponseWriter, q *http.Request) {
	n := int64(0)
	if s, ok := strings.CutPrefix(q.URL.Path, "/bytes/"); ok {
		n, _ = strconv.ParseInt(s, 10, 64)
	}
	switch {
	case q.URL.Path == "/bytes" && q.Method == http.MethodPost && q.ContentLength >= 0:
		if drain(q.Body, q.ContentLength) != nil {
			panic(http.ErrAbortHandler)
		}
	case n > 0 && n <= maxBulk:
		w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
		_ = fill(w, n) // who asked is gone
		return
	case q.URL.Path != "/hello":
		http.NotFound(w, q)
		return
	}
	w.Header().Set("Content-Length", strconv.Itoa(len(okay)))
	_, _ = io.WriteString(w, okay)
}

// serveRaw takes or gives bytes: "put N" or "get N" and a line feed, then these.
func serveRaw(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(10 * peerTimeout))
			br := bufio.NewReaderSize(c, 1<<16)
			line, err := br.ReadSlice('\n')
			if err != nil {
				return
			}
			verb, num, _ := strings.Cut(strings.TrimSuffix(string(line), "\n"), " ")
			n, err := strconv.ParseInt(num, 10, 64)
			if err != nil || n < 1 || n > maxBulk {
				return
			}
			switch verb {
			case "put":
				if drain(br, n) == nil {
					_, _ = io.WriteString(c, okay)
				}
			case "get":
				_ = fill(c, n)
			}
		}()
	}
}

// selfSigned is a certificate that nobody is asked to trust.
func selfSigned() (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, sandbox.Internal.Errorf("make key: %w", err)
	}
	t := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: worldZone}, DNSNames: []string{"*." + worldZone},
		IPAddresses: []net.IP{worldAddr.AsSlice()}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, &key.PublicKey, key)
	if err != nil {
		return tls.Certificate{}, sandbox.Internal.Errorf("make certificate: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// namespace is a network namespace, held by a descriptor.
type namespace struct{ f *os.File }

func thisNamespace() (*namespace, error) {
	f, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, sandbox.Internal.Errorf("open network namespace: %w", err)
	}
	return &namespace{f}, nil
}

// newNamespace makes an empty one, with its loopback up.
func newNamespace() (n *namespace, err error) {
	onThread(func() {
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			n, err = thisNamespace()
		}
	})
	if err != nil {
		return nil, err
	}
	return n, n.up("lo", "")
}

// onThread calls fn on a thread that ends with it, whatever fn has made of it.
func onThread(fn func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked, so that the thread ends
		if unix.Gettid() != unix.Getpid() {
			fn()
			return
		}
		// the first thread does not end, and is what /proc/self shows: while it
		// waits here another takes its place
		onThread(fn)
		runtime.UnlockOSThread()
	}()
	<-done
}

func (n *namespace) close() { _ = n.f.Close() }

// path is where another process of root finds it.
func (n *namespace) path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), n.f.Fd()) }

// do calls fn on a thread that is in the namespace: what fn opens is of it.
func (n *namespace) do(fn func() error) (err error) {
	onThread(func() {
		if err = unix.Setns(int(n.f.Fd()), unix.CLONE_NEWNET); err == nil {
			err = fn()
		}
	})
	return err
}

func (n *namespace) listen(port int) (l net.Listener, err error) {
	err = n.do(func() error {
		l, err = net.Listen("tcp4", ":"+strconv.Itoa(port))
		return err
	})
	return l, err
}

// address gives an interface an address, if it does not have it.
func (n *namespace) address(name, cidr string) error {
	return n.do(func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return sandbox.Internal.Errorf("find interface %s: %w", name, err)
		}
		a, err := netlink.ParseAddr(cidr)
		if err != nil {
			return sandbox.Internal.Errorf("address of %s: %w", name, err)
		}
		if err := netlink.AddrReplace(l, a); err != nil {
			return sandbox.Internal.Errorf("give %s an address: %w", name, err)
		}
		return nil
	})
}

// up gives an interface an address and switches it on.
func (n *namespace) up(name, cidr string) error {
	if cidr != "" {
		if err := n.address(name, cidr); err != nil {
			return err
		}
	}
	return n.do(func() error {
		l, err := netlink.LinkByName(name)
		if err != nil {
			return sandbox.Internal.Errorf("find interface %s: %w", name, err)
		}
		if err := netlink.LinkSetUp(l); err != nil {
			return sandbox.Internal.Errorf("switch %s on: %w", name, err)
		}
		return nil
	})
}

// join connects two namespaces by a veth.
func (n *namespace) join(name, cidr string, o *namespace, other, otherCIDR string) error {
	if err := n.do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: other, PeerNamespace: netlink.NsFd(o.f.Fd())})
	}); err != nil {
		return sandbox.Internal.Errorf("make veth: %w", err)
	}
	if err := o.up(other, otherCIDR); err != nil {
		return err
	}
	return n.up(name, cidr)
}

// run runs a program in the namespace and returns its output. The program ends
// with ctx, and with this process.
func (n *namespace) run(ctx context.Context, bin string, args ...string) ([]byte, error) {
	out, said := &bytes.Buffer{}, &head{}
	err := n.do(func() error {
		cmd := exec.CommandContext(ctx, bin, args...)
		cmd.Stdout, cmd.Stderr = out, said
		cmd.WaitDelay = 5 * time.Second
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
		return cmd.Run()
	})
	if err != nil {
		return nil, sandbox.Internal.Errorf("run %s: %w", bin, errors.Join(err, errors.New(said.String())))
	}
	return out.Bytes(), nil
}
