package config

import (
	"errors"
	"net"
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"vivarium/network/policy"
	"vivarium/sandbox"
)

// validate checks every setting by itself and against the others.
func (c *Config) validate(where places) error {
	var errs []error
	bad := func(path, format string, args ...any) { errs = append(errs, where.errorf(path, format, args...)) }
	between := func(path string, v, low, high int) {
		if v < low || v > high {
			bad(path, "must be between %d and %d", low, high)
		}
	}
	oneOf := func(path, v string, of ...string) {
		for _, o := range of {
			if v == o {
				return
			}
		}
		bad(path, "%q is not one of %s", v, strings.Join(of, ", "))
	}
	size := func(path string, v, low, high Size) {
		if v < low || v > high {
			bad(path, "must be between %v and %v", low, high)
		}
	}
	span := func(path string, v Duration, low, high time.Duration) {
		if v.D() < low || v.D() > high {
			bad(path, "must be between %v and %v", low, high)
		}
	}
	abs := func(path, v string) {
		if !filepath.IsAbs(v) || filepath.Clean(v) != v || strings.ContainsAny(v, "\x00\n") {
			bad(path, "%q is not a clean absolute path", v)
		}
	}

	abs("data_dir", c.DataDir)
	abs("unix_socket", c.UnixSocket)
	if c.Listen != "" {
		host, port, err := net.SplitHostPort(c.Listen)
		switch {
		case err != nil || port == "":
			bad("listen", "%q is not an address such as 127.0.0.1:7878", c.Listen)
		case !loopback(host) && !c.ListenPublic:
			bad("listen", "%q can be reached from other machines, and there is no TLS: set listen_public: true if that is meant", c.Listen)
		}
	}
	if c.CgroupParent == "" || strings.Trim(c.CgroupParent, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_") != "" {
		bad("cgroup_parent", "%q is not a name of letters, digits, - and _", c.CgroupParent)
	}
	oneOf("log.level", c.Log.Level, "debug", "info", "warn", "error")
	oneOf("log.format", c.Log.Format, "text", "json")
	between("pool.size", c.Pool.Size, 0, 256)
	c.validateUIDs(bad, between)
	c.validateResources(bad, between, oneOf, size, span)

	const day = 24 * time.Hour
	span("retention.ended", c.Retention.Ended, time.Second, 365*day)
	span("retention.events", c.Retention.Events, time.Minute, 365*day)
	for _, d := range []struct {
		path string
		v    Duration
	}{
		{"queue", c.Deadlines.Queue}, {"image", c.Deadlines.Image}, {"boot", c.Deadlines.Boot}, {"network", c.Deadlines.Network},
		{"guest", c.Deadlines.Guest}, {"ready", c.Deadlines.Ready}, {"stop", c.Deadlines.Stop},
	} {
		span("deadlines."+d.path, d.v, 100*time.Millisecond, day)
	}
	size("spool.per_exec", c.Spool.PerExec, 64<<10, 1<<40)
	size("spool.per_sandbox", c.Spool.PerSandbox, 64<<10, 1<<40)
	if c.Spool.PerSandbox < c.Spool.PerExec {
		bad("spool.per_sandbox", "%v is less than spool.per_exec, %v", c.Spool.PerSandbox, c.Spool.PerExec)
	}
	c.validateNetwork(bad, between)
	c.validateCache(bad, size)
	c.validateTunnel(bad, between, abs)

	size("images.disk_budget", c.Images.DiskBudget, 100<<20, 1<<50)
	size("images.max_layer_bytes", c.Images.MaxLayerBytes, 1<<20, 1<<50)
	between("images.max_entries", c.Images.MaxEntries, 1000, 100_000_000)
	for reg, hosts := range c.Images.Mirrors {
		if !hostLike(reg) {
			bad("images.mirrors."+reg, "is not the name of a registry")
		}
		for _, h := range hosts {
			if !hostLike(h) {
				bad("images.mirrors."+reg, "%q is not HOST or HOST:PORT", h)
			}
		}
	}
	for _, h := range c.Images.Insecure {
		if !hostLike(h) {
			bad("images.insecure", "%q is not HOST or HOST:PORT", h)
		}
	}
	return errors.Join(errs...)
}

func (c *Config) validateResources(
	bad func(string, string, ...any), between func(string, int, int, int), oneOf func(string, string, ...string),
	size func(string, Size, Size, Size), span func(string, Duration, time.Duration, time.Duration),
) {
	d, l := c.Defaults, c.Limits
	oneOf("defaults.runtime", d.Runtime, "gvisor", "vm")
	oneOf("defaults.network", d.Network, "public", "none", "allowlist")
	between("defaults.cpu_request", int(d.CPURequest), 1, 1_000_000)
	between("defaults.cpu_limit", int(d.CPULimit), 10, 1_000_000)
	if d.CPULimit < d.CPURequest {
		bad("defaults.cpu_limit", "%v is less than defaults.cpu_request, %v", d.CPULimit, d.CPURequest)
	}
	size("defaults.memory_request", d.MemoryRequest, 1<<20, 1<<46)
	size("defaults.memory_limit", d.MemoryLimit, 32<<20, 1<<46)
	if d.MemoryLimit < d.MemoryRequest {
		bad("defaults.memory_limit", "%v is less than defaults.memory_request, %v", d.MemoryLimit, d.MemoryRequest)
	}
	size("defaults.disk", d.Disk, 1<<20, 1<<50)
	between("defaults.pids", d.Pids, 16, 1<<22)
	span("limits.max_timeout", l.MaxTimeout, time.Second, 3650*24*time.Hour)
	span("defaults.timeout", d.Timeout, time.Second, l.MaxTimeout.D())
	span("defaults.idle_timeout", d.IdleTimeout, 0, l.MaxTimeout.D())
	between("limits.max_sandboxes", l.MaxSandboxes, 1, 100_000)
	between("limits.max_per_tenant", l.MaxPerTenant, 0, 100_000)
	between("limits.max_cpu", int(l.MaxCPU), 0, 1_000_000)
	if l.MaxCPU > 0 && d.CPULimit > l.MaxCPU {
		bad("defaults.cpu_limit", "%v is more than limits.max_cpu, %v", d.CPULimit, l.MaxCPU)
	}
	size("limits.max_memory", l.MaxMemory, 0, 1<<46)
	if l.MaxMemory > 0 && d.MemoryLimit > l.MaxMemory {
		bad("defaults.memory_limit", "%v is more than limits.max_memory, %v", d.MemoryLimit, l.MaxMemory)
	}
	size("limits.max_disk", l.MaxDisk, 0, 1<<50)
	if l.MaxDisk > 0 && d.Disk > l.MaxDisk {
		bad("defaults.disk", "%v is more than limits.max_disk, %v", d.Disk, l.MaxDisk)
	}
	between("limits.max_pids", l.MaxPids, d.Pids, 1<<22)
	between("limits.max_execs", l.MaxExecs, 1, 100_000)
	between("limits.queue", l.Queue, 0, 100_000)
	between("reserve.cpu", int(c.Reserve.CPU), 0, 1_000_000)
	size("reserve.memory", c.Reserve.Memory, 0, 1<<46)
	size("reserve.disk", c.Reserve.Disk, 0, 1<<50)
}

func (c *Config) validateUIDs(bad func(string, string, ...any), between func(string, int, int, int)) {
	const (
		firstUser = 1000 // below are those of the system
		nobody    = 65534
		most      = 1<<31 - 1 // beyond, programs take users for negative
	)
	u := c.UIDs
	between("uids.first", u.First, firstUser, most)
	between("uids.count", u.Count, 1, 1<<24)
	if u.First < firstUser || u.First > most || u.Count < 1 || u.Count > 1<<24 {
		return
	}
	if last := u.First + u.Count - 1; last > most {
		bad("uids.count", "%d from %d on end beyond %d", u.Count, u.First, most)
	} else if u.First <= nobody+1 && last >= nobody { // 65535 is no user either: 16 bits of -1
		bad("uids.first", "the range %d to %d has nobody in it, %d", u.First, last, nobody)
	}
	if need := c.Limits.MaxSandboxes + c.Pool.Size; u.Count < need {
		bad("uids.count", "%d is less than limits.max_sandboxes and pool.size together, %d", u.Count, need)
	}
}

func (c *Config) validateNetwork(bad func(string, string, ...any), between func(string, int, int, int)) {
	if c.Network.Subnet != "" {
		p, err := netip.ParsePrefix(c.Network.Subnet)
		switch {
		case err != nil || !p.Addr().Is4() || p != p.Masked():
			bad("network.subnet", "%q is not an IPv4 network such as 10.213.0.0/16", c.Network.Subnet)
		case !p.Addr().IsPrivate() || p.Bits() < 8 || p.Bits() > 27:
			bad("network.subnet", "%q is not a private network between /8 and /27", c.Network.Subnet)
		}
	}
	between("network.pool", c.Network.Pool, 0, 1024)
	between("network.conn_rate", c.Network.ConnRate, 1, 1_000_000)
	between("network.max_conns", c.Network.MaxConns, 0, 1_000_000)
	between("network.dns_rate", c.Network.DNSRate, 1, 1_000_000)
	if b := c.Network.Bandwidth; b < 64<<10 || b > 1<<33 {
		bad("network.bandwidth", "must be between 64KiB and 8GiB")
	}
	for i, r := range c.Network.Resolvers {
		if _, err := netip.ParseAddr(r); err != nil {
			if _, err := netip.ParseAddrPort(r); err != nil {
				bad(index("network.resolvers", i), "%q is not an address", r)
			}
		}
	}
	if m := c.Network.Floor.Mode; m != "public" && m != "allowlist" {
		bad("network.floor.mode", "%q is not public or allowlist", m)
	}
	for i, r := range c.Network.Floor.Rules {
		if _, err := c.Network.Floor.rule(r); err != nil {
			bad(index("network.floor.rules", i), "%v", err)
		}
	}
	for name, rules := range c.Network.Presets {
		for i, r := range rules {
			if _, err := policy.ParseRule(sandbox.RuleAllow, r); err != nil {
				bad(index("network.presets."+name, i), "%v", err)
			}
		}
	}
	for name, u := range c.Network.Upstreams {
		p, err := url.Parse(u)
		if err != nil || p.Hostname() == "" || p.Port() == "" || !slices.Contains([]string{"http", "https", "socks5"}, p.Scheme) {
			bad("network.upstreams."+name, "want http, https or socks5 as in socks5://192.0.2.9:1080") // not the URL: it may have a password
		}
	}
	for i, s := range c.Network.Sources {
		if a, err := netip.ParseAddr(s); err != nil || !a.Is4() {
			bad(index("network.sources", i), "%q is not an IPv4 address", s)
		}
	}
	for i, d := range c.Network.Deny {
		if _, err := network(d); err != nil {
			bad(index("network.deny", i), "%q is not a network such as 192.0.2.0/24", d)
		}
	}
	for i, g := range c.Network.Grants {
		p, err := network(g.Prefix)
		switch {
		case err != nil:
			bad(index("network.grants", i), "prefix %q is not a network such as 192.0.2.10/32", g.Prefix)
		case p != p.Masked():
			bad(index("network.grants", i), "prefix %q has bits beyond its length; did you mean %v?", g.Prefix, p.Masked())
		case p.Bits() == 0:
			bad(index("network.grants", i), "prefix %q would grant everything", g.Prefix)
		}
		for _, port := range g.Ports {
			if port < 1 || port > 65535 {
				bad(index("network.grants", i), "port %d is not between 1 and 65535", port)
			}
		}
	}
}

// network takes an address for the network of it alone.
func network(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	return netip.ParsePrefix(s)
}

func loopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.IsLoopback()
}

func hostLike(s string) bool {
	return s != "" && len(s) < 256 && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:[]/") == ""
}

func (c *Config) validateCache(bad func(string, string, ...any), size func(string, Size, Size, Size)) {
	size("cache.disk_budget", c.Cache.DiskBudget, 64<<20, 1<<50)
	for kind, list := range c.Cache.Upstreams {
		if !slices.Contains([]string{"debian", "npm", "pypi", "go"}, kind) {
			bad("cache.upstreams", "%q is not debian, npm, pypi or go", kind)
		}
		for i, u := range list {
			if p, err := url.Parse(u.URL); err != nil || p.Hostname() == "" || p.Scheme != "http" && p.Scheme != "https" {
				bad(index("cache.upstreams."+kind, i), "want a URL such as https://registry.example.org/") // not the URL: it may have a password
			}
		}
	}
}
