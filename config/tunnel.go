package config

import (
	"net"
	"net/netip"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"vivarium/sandbox"
)

// Tunnel is the way in to sandboxes.
type Tunnel struct {
	Listen         string `yaml:"listen"`
	Domain         string `yaml:"domain"`
	URLPort        int    `yaml:"url_port"` // 0: that of listen
	Cert           string `yaml:"cert"`
	Key            string `yaml:"key"`
	ACME           ACME   `yaml:"acme"`
	TCPListen      string `yaml:"tcp_listen"` // an address, without port
	Ports          string `yaml:"ports"`      // FIRST-LAST
	MaxConnections int    `yaml:"max_connections"`
}

// ACME is an authority that certificates are got from.
type ACME struct {
	Email     string `yaml:"email"`
	Directory string `yaml:"directory"`
	Root      string `yaml:"root"`
}

var tunnelDomain = regexp.MustCompile(`^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

func (c *Config) validateTunnel(bad func(string, string, ...any), between func(string, int, int, int), abs func(string, string)) {
	t := c.Tunnel
	if t.Listen != "" {
		if _, port, err := net.SplitHostPort(t.Listen); err != nil || !portNumber(port) {
			bad("tunnel.listen", "%q is not an address such as 127.0.0.1:7879", t.Listen)
		}
		if t.Listen == c.Listen {
			bad("tunnel.listen", "%q is the API's: pages of sandboxes get a listener of their own", t.Listen)
		}
	}
	if _, err := netip.ParseAddr(t.Domain); !tunnelDomain.MatchString(t.Domain) || len(t.Domain) > 200 || err == nil {
		bad("tunnel.domain", "%q is not a domain of two labels or more, in lower case", t.Domain)
	}
	between("tunnel.url_port", t.URLPort, 0, 65535)
	if (t.Cert == "") != (t.Key == "") {
		bad("tunnel.cert", "is only of use together with tunnel.key")
	}
	for path, v := range map[string]string{"tunnel.cert": t.Cert, "tunnel.key": t.Key, "tunnel.acme.root": t.ACME.Root} {
		if v != "" {
			abs(path, v)
		}
	}
	if t.ACME.Email != "" {
		switch {
		case strings.Count(t.ACME.Email, "@") != 1 || strings.ContainsAny(t.ACME.Email, " \t\n"):
			bad("tunnel.acme.email", "%q is not an address", t.ACME.Email)
		case t.Cert != "":
			bad("tunnel.acme.email", "there is a certificate already, tunnel.cert")
		case strings.HasSuffix(t.Domain, ".localhost"):
			bad("tunnel.acme.email", "no authority signs for tunnel.domain, %q", t.Domain)
		}
	}
	if d := t.ACME.Directory; d != "" && (!strings.HasPrefix(d, "https://") || filepath.Base(d) == "https:") {
		bad("tunnel.acme.directory", "%q is not a URL that begins with https://", d)
	}
	if _, err := netip.ParseAddr(t.TCPListen); err != nil {
		bad("tunnel.tcp_listen", "%q is not an address such as 127.0.0.1", t.TCPListen)
	}
	if _, _, err := t.PortRange(); err != nil {
		bad("tunnel.ports", "%v", err)
	}
	between("tunnel.max_connections", t.MaxConnections, 1, 100_000)
}

func portNumber(s string) bool {
	n, err := strconv.ParseUint(s, 10, 16)
	return err == nil && n > 0
}

// PortRange is Ports in numbers, both ends included; 0, 0 is none.
func (t *Tunnel) PortRange() (first, last uint16, err error) {
	if t.Ports == "" {
		return 0, 0, nil
	}
	a, b, ok := strings.Cut(t.Ports, "-")
	if !ok || !portNumber(a) || !portNumber(b) {
		return 0, 0, sandbox.Invalid.Errorf("%q is not a range such as 20000-20999", t.Ports)
	}
	lo, _ := strconv.Atoi(a) // looked at above
	hi, _ := strconv.Atoi(b)
	if lo > hi || lo < 1024 {
		return 0, 0, sandbox.Invalid.Errorf("%q is not a range of ports from 1024 on", t.Ports)
	}
	return uint16(lo), uint16(hi), nil
}
