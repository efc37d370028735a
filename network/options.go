package network

import (
	"log/slog"
	"maps"
	"net/netip"
	"net/url"
	"regexp"
	"slices"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

// Bounds on what an operator may configure; they keep every nftables batch and
// routing table small.
const (
	maxGrants = 256
	maxDeny   = 256

	minBytes    = 1 << 10 // a second
	maxBytes    = 1 << 33
	maxConnRate = 1 << 20
)

// Options says how a Network is set up.
type Options struct {
	// Dir holds the network's state; slots live in Dir/net/slots. It must be on
	// a filesystem in which bind mounts may be made. Required.
	Dir string
	// Instance tells several daemons on one host apart: 1 to 6 of a-z, 0-9.
	// Required.
	Instance string
	// HostNetns is the path of the network namespace that is the host. Empty
	// means the caller's own.
	HostNetns string
	// Subnet holds the slots' addresses, /27 or larger. Zero means a free /18
	// of 10.192.0.0/10. It is kept for the life of Dir.
	Subnet netip.Prefix
	// Pool is how many slots are kept ready.
	Pool int
	// Node is the operator's part of every policy.
	policy.Node
	// Upstream are the resolvers that the DNS server asks, from the host's
	// network namespace. Empty means those of ResolvConf, read again on change.
	Upstream []netip.AddrPort
	// ResolvConf is read when Upstream is empty. Empty means /etc/resolv.conf.
	ResolvConf string
	// MaxConns bounds the tracked flows of one slot, so that a sandbox cannot
	// fill the host's connection table. Zero means a 64th of what that table
	// holds (net.netfilter.nf_conntrack_max), at least 512 and at most 4096.
	MaxConns uint32
	// DNSRate is how many DNS queries a slot may make per second, with a burst
	// of twice that. Zero means 200.
	DNSRate int
	// BytesPerSecond bounds what a slot sends, and what it gets, with a burst of
	// a second's worth; a policy may ask for less. Zero means 1 GiB.
	BytesPerSecond int64
	// ConnsPerSecond bounds the new flows of a slot, with a burst of two seconds'
	// worth; a policy may ask for less. Zero means 500.
	ConnsPerSecond int64
	// Proxies are the upstream proxies that a policy may choose, by name: http,
	// https or socks5, with user and password where they want them. They are
	// reached from the host's network namespace.
	Proxies map[string]*url.URL
	// Local are services of the daemon that open slots reach inside the router.
	Local []LocalService
	// OnFlows gets what was seen of a slot's destinations, a batch at a time,
	// from one goroutine. Nil: nobody counts.
	OnFlows func(slotID string, ds []FlowDelta) `json:"-"`
	// Logger receives what happens in the background. Nil discards it.
	Logger *slog.Logger

	failpoint func(step string) error // tests make steps fail with it
}

// reach is called at each step that a failure or a kill may interrupt.
func (o *Options) reach(step string) error {
	if o.failpoint == nil {
		return nil
	}
	return o.failpoint(step)
}

var instanceRE = regexp.MustCompile(`^[a-z0-9]{1,6}$`)

// check validates o and fills defaults in.
func (o *Options) check() error {
	if o.Dir == "" {
		return sandbox.Invalid.Errorf("network: no directory given")
	}
	if !instanceRE.MatchString(o.Instance) {
		return sandbox.Invalid.Errorf("network: instance %q: want 1 to 6 characters of a-z and 0-9", o.Instance)
	}
	if o.Subnet.IsValid() {
		if !o.Subnet.Addr().Is4() || o.Subnet.Bits() > 27 || o.Subnet.Bits() < 10 || o.Subnet != o.Subnet.Masked() {
			return sandbox.Invalid.Errorf("network: subnet %s: want an IPv4 network between /10 and /27", o.Subnet)
		}
		if !containedIn(special, o.Subnet) {
			return sandbox.Invalid.Errorf("network: subnet %s is not in a private range", o.Subnet)
		}
	}
	if o.Pool < 0 || o.Pool > 4096 {
		return sandbox.Invalid.Errorf("network: pool of %d slots: want 0 to 4096", o.Pool)
	}
	if len(o.Grants) > maxGrants {
		return sandbox.Invalid.Errorf("network: %d grants: at most %d", len(o.Grants), maxGrants)
	}
	for _, g := range o.Grants {
		if err := g.Check(); err != nil {
			return err
		}
	}
	if len(o.Deny) > maxDeny {
		return sandbox.Invalid.Errorf("network: %d denied ranges: at most %d", len(o.Deny), maxDeny)
	}
	for _, p := range o.Deny {
		if !p.IsValid() || !p.Addr().Is4() || p != p.Masked() {
			return sandbox.Invalid.Errorf("network: denied range %s: want an IPv4 network address and length", p)
		}
	}
	if o.BytesPerSecond == 0 {
		o.BytesPerSecond = 1 << 30
	}
	if o.ConnsPerSecond == 0 {
		o.ConnsPerSecond = 500
	}
	if o.BytesPerSecond < minBytes || o.BytesPerSecond > maxBytes || o.ConnsPerSecond < 1 || o.ConnsPerSecond > maxConnRate {
		return sandbox.Invalid.Errorf("network: limits of %d bytes and %d flows a second: want %d to %d and 1 to %d", o.BytesPerSecond, o.ConnsPerSecond, minBytes, maxBytes, maxConnRate)
	}
	for name, u := range o.Proxies {
		if u == nil || u.Host == "" || !slices.Contains([]string{"http", "https", "socks5", "socks5h"}, u.Scheme) {
			return sandbox.Invalid.Errorf("network: upstream proxy %q: want an http, https or socks5 URL", name)
		}
	}
	if len(o.Proxies) > 0 {
		o.Node.Upstreams = slices.Sorted(maps.Keys(o.Proxies))
	}
	if err := checkLocal(o.Local); err != nil {
		return err
	}
	if err := o.Node.Check(); err != nil {
		return err
	}
	if o.ResolvConf == "" {
		o.ResolvConf = "/etc/resolv.conf"
	}
	if o.DNSRate == 0 {
		o.DNSRate = 200
	}
	if o.DNSRate < 0 {
		return sandbox.Invalid.Errorf("network: DNS rate %d is negative", o.DNSRate)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

func containedIn(ps []netip.Prefix, p netip.Prefix) bool {
	for _, q := range ps {
		if q.Bits() <= p.Bits() && q.Contains(p.Addr()) {
			return true
		}
	}
	return false
}

// allows says whether policy public may reach a: a public address, or one that
// is granted on some port.
func (o *Options) allows(a netip.Addr) bool {
	a = a.Unmap()
	if !a.Is4() || inAny(o.Deny, a) {
		return false
	}
	if !inAny(special, a) {
		return true
	}
	for _, g := range o.Grants {
		if g.Prefix.Contains(a) {
			return true
		}
	}
	return false
}
