package image

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"vivarium/sandbox"
)

// newTransport returns the connections of one tenant to registries. Plain HTTP
// goes only to loopback and to the registries named as insecure, wherever a
// redirect or a token server points; the dial policy sees every address.
func (s *Store) newTransport(tenant string) (rt http.RoundTripper, closeIdle func()) {
	d := &net.Dialer{Timeout: 15 * time.Second, KeepAlive: 30 * time.Second}
	t := &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		ForceAttemptHTTP2:     true,
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: s.opt.Stall,
		ExpectContinueTimeout: time.Second,
		MaxIdleConnsPerHost:   8,
		IdleConnTimeout:       30 * time.Second,
		// Layers are compressed already, and a digest is of what was sent.
		DisableCompression:     true,
		MaxResponseHeaderBytes: 64 << 10,
	}
	var policy DialPolicy
	if s.opt.Fetch != nil {
		policy = s.opt.Fetch(tenant)
	}
	if policy != nil {
		// A proxy would connect in our stead, where no policy sees it.
		t.Proxy = nil
	}
	t.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		if policy == nil {
			return d.DialContext(ctx, network, address)
		}
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err
		}
		judged := *d
		judged.ControlContext = func(ctx context.Context, network, addr string, _ syscall.RawConn) error {
			if err := policy(ctx, network, host, addr); err != nil {
				return &refused{addr, err}
			}
			return nil
		}
		return judged.DialContext(ctx, network, address)
	}
	return httpsOnly{t, s.opt.Insecure}, t.CloseIdleConnections
}

// refused is a connection that the dial policy did not allow.
type refused struct {
	addr string
	err  error
}

func (r *refused) Error() string { return fmt.Sprintf("connection to %s refused: %v", r.addr, r.err) }
func (r *refused) Unwrap() error {
	return sandbox.Denied.Errorf("connection to %s refused by policy: %w", r.addr, r.err).
		WithHint("the operator can name a private registry in `images.mirrors` or grant its address in `network.grants`")
}

// httpsOnly refuses plain HTTP to hosts that are not named for it, so that
// neither credentials nor manifests can be asked for in the clear.
type httpsOnly struct {
	next     http.RoundTripper
	insecure []string
}

func (h httpsOnly) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != "https" && !plainAllowed(r.URL.Host, h.insecure) {
		return nil, sandbox.Denied.Errorf("%s is not spoken to by plain HTTP", r.URL.Host).
			WithHint("use a registry with TLS, or name it as insecure in the daemon's configuration")
	}
	return h.next.RoundTrip(r)
}

// plainAllowed reports whether a host ("name[:port]") may be spoken to by
// plain HTTP.
func plainAllowed(host string, insecure []string) bool {
	if slices.Contains(insecure, host) {
		return true
	}
	h := host
	if n, _, err := net.SplitHostPort(host); err == nil {
		h = n
	}
	if slices.Contains(insecure, h) || h == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(strings.Trim(h, "[]"))
	return err == nil && ip.IsLoopback()
}

// checkRedirect stops redirect loops, and redirects that lead from one host to
// a literal address inside: the metadata service of a cloud, or a neighbour.
func checkRedirect(r *http.Request, via []*http.Request) error {
	if len(via) >= 5 {
		return fmt.Errorf("more than 5 redirects")
	}
	if r.URL.Hostname() == via[0].URL.Hostname() {
		return nil
	}
	ip, err := netip.ParseAddr(r.URL.Hostname())
	if err != nil {
		return nil
	}
	from, err := netip.ParseAddr(via[0].URL.Hostname())
	if err == nil && from.IsLoopback() && ip.IsLoopback() {
		return nil
	}
	if ip = ip.Unmap(); ip.IsPrivate() || ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsUnspecified() || ip.IsMulticast() {
		return sandbox.Denied.Errorf("registry redirects to the internal address %s", ip)
	}
	return nil
}
