package sandbox

import (
	"net/netip"
	"time"
)

// Kinds of tunnel.
const (
	TunnelHTTPS = "https" // TLS outside, HTTP/1.1 inside: HTTP/1.1, HTTP/2, WebSocket
	TunnelH2    = "h2"    // TLS outside, HTTP/2 without TLS inside (h2c, as gRPC servers speak)
	TunnelTCP   = "tcp"   // bytes, on a port of the host
)

// TunnelSpec asks for a way in to a TCP port inside.
type TunnelSpec struct {
	Port  uint16         `json:"port"`
	Kind  string         `json:"kind"`            // "" is TunnelHTTPS
	Allow []netip.Prefix `json:"allow,omitempty"` // of clients; none: every client that reaches the listener
	Token bool           `json:"token,omitempty"` // only with a connect token; not for TunnelTCP
}

// Tunnel is a way in to a sandbox. It is closed with the sandbox.
type Tunnel struct {
	ID        string     `json:"id"`
	Tenant    string     `json:"tenant"`
	SandboxID string     `json:"sandbox"`
	Spec      TunnelSpec `json:"spec"`
	Name      string     `json:"name,omitempty"`      // first label of its host name; of all but TunnelTCP
	HostPort  uint16     `json:"host_port,omitempty"` // of TunnelTCP
	Created   time.Time  `json:"created"`

	URL     string `json:"-"` // of all but TunnelTCP; the configuration decides its host and port
	Address string `json:"-"` // host:port of TunnelTCP
}
