package proxy

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"time"

	"vivarium/network/policy"
)

// Slot is what the proxy asks about the sandbox that a connection comes from. Its
// methods are called by many goroutines at once, for every connection and every
// HTTP request, and must not wait.
type Slot interface {
	// ID names the slot in Records, Reevaluate and Drop.
	ID() string
	// Names are the canonical names that our DNS server gave this address to this
	// slot as an answer for, and that have not timed out.
	Names(netip.Addr) []string
	// Policy is the one in force; another pointer is another policy. nil refuses
	// everything.
	Policy() *policy.Policy
	// Decide is Policy().Decide with the addresses of the host.
	Decide(policy.Flow) policy.Verdict
	// Injector reads and changes what is sent to inspected names; nil: there is
	// none, and connections to inspected names are refused.
	Injector() Injector
	// Upstream is the proxy that everything of this slot goes through: http, https
	// or socks5, with user and password where it wants them; nil: none.
	Upstream() *url.URL
}

// Injector stands between a sandbox and an inspected name. Errors that it returns
// are shown inside the sandbox if they are a *sandbox.Error; so they must not
// contain a secret.
type Injector interface {
	// Certificate is what to show to the sandbox for a name (canonical).
	Certificate(host string) (*tls.Certificate, error)
	// Request may change a request before it leaves; an error refuses it. Its
	// body is a stream. Whatever it does to URL.Scheme, URL.Host and Host is undone.
	Request(host string, r *http.Request) error
	// Response may change a response before the sandbox gets it, and may wrap its
	// body, but not that of a 101; an error refuses it. Interim responses (1xx) are
	// not shown to it and do not reach the sandbox.
	Response(host string, r *http.Response) error
	// Roots verify the real server; nil: the host's.
	Roots() *x509.CertPool
}

// Options of a Server. Listener, Slot and Dial must be set.
type Options struct {
	// Listener gives *net.TCPConn. The Server closes it.
	Listener net.Listener
	// Slot finds who a client address belongs to; nil resets the connection. A slot
	// that goes away must be gone from here before Drop is called for it.
	Slot func(client netip.Addr) Slot
	// Dial connects to where a connection was going.
	Dial func(ctx context.Context, s Slot, dst netip.AddrPort) (net.Conn, error)
	// DialUpstream connects to the slot's upstream proxy, whose host may be a name
	// and whose address private; nil refuses connections of slots that have one.
	DialUpstream func(ctx context.Context, s Slot, proxy *url.URL) (net.Conn, error)
	// OriginalDst tells where an accepted connection was going. nil: the kernel's
	// connection tracking is asked (SO_ORIGINAL_DST, see nf_nat).
	OriginalDst func(net.Conn) (netip.AddrPort, error)
	// Log gets a Record when a flow is refused, when it is allowed and when it has
	// ended. It must not wait.
	Log func(Record)

	// Bounds; 0 is the default.
	MaxConns        int           // of all slots; 4096
	MaxConnsPerSlot int           // 512
	Reserved        int           // connections of a slot that MaxConns does not refuse; 4
	PeekTimeout     time.Duration // until the first bytes say what it is, and for handshakes; 10 s
	ServerFirst     time.Duration // until a silent client may be one that listens first; 200 ms
	DialTimeout     time.Duration // 15 s
	IdleTimeout     time.Duration // without a byte either way; 1 h
	RequestIdle     time.Duration // between HTTP requests; 5 min
	MaxHeaderBytes  int           // of one HTTP request or response; 128 KiB
}

func (o *Options) defaults() {
	set(&o.MaxConns, 4096)
	set(&o.MaxConnsPerSlot, 512)
	set(&o.Reserved, 4)
	set(&o.PeekTimeout, 10*time.Second)
	set(&o.ServerFirst, 200*time.Millisecond)
	set(&o.DialTimeout, 15*time.Second)
	set(&o.IdleTimeout, time.Hour)
	set(&o.RequestIdle, 5*time.Minute)
	set(&o.MaxHeaderBytes, 128<<10)
	if o.OriginalDst == nil {
		o.OriginalDst = originalDst
	}
	if o.Log == nil {
		o.Log = func(Record) {}
	}
}

func set[T int | time.Duration](v *T, to T) {
	if *v <= 0 {
		*v = to
	}
}

// Kinds of a Record.
const (
	KindTLS  = "tls"
	KindHTTP = "http" // HTTP/1 and HTTP/2 in the clear
	KindTCP  = "tcp"  // anything else
)

// Record is one flow: a connection, or the part of an HTTP connection that was for
// one name.
type Record struct {
	ID        uint64 // the same when it began and when it ended
	Slot      string
	Client    netip.AddrPort
	Name      string // canonical, as the sandbox claims; empty: none, or none that could be read
	Addr      netip.Addr
	Port      uint16
	Kind      string // tls, http, tcp
	Inspected bool
	ECH       bool // the client hello has an encrypted one inside, or pretends to
	Upstream  bool // went through the slot's upstream proxy
	Allowed   bool
	Rule      string // who decided, as in policy.Verdict
	Reason    string // why it was refused, or cut; empty for an end in peace
	// Bytes of the sandbox's TCP connection, what is spent on TLS included.
	Sent, Received int64
	Start          time.Time
	End            time.Time // zero: it has just begun
}
