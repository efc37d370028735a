package policy

import (
	"fmt"
	"net/netip"
	"slices"

	"vivarium/sandbox"
)

// maxGrantPorts keeps the packet filter's rules few.
const maxGrantPorts = 64

// Grant opens a special-purpose range, for all sandboxes whose policy does not
// deny it. An address of the host itself is opened only by a grant that names
// exactly that address (a /32).
type Grant struct {
	Prefix netip.Prefix
	Ports  []uint16 // TCP and UDP destination ports; empty means every port, and ICMP echo
}

// Check says what is wrong with a grant. Errors: Invalid.
func (g Grant) Check() error {
	p := g.Prefix
	if !p.IsValid() || !p.Addr().Is4() || p != p.Masked() {
		return sandbox.Invalid.Errorf("grant %s: want an IPv4 network address and length", p)
	}
	for _, u := range ungrantable {
		if u.Overlaps(p) {
			return sandbox.Invalid.Errorf("grant %s overlaps %s, which cannot be granted", p, u)
		}
	}
	if len(g.Ports) > maxGrantPorts {
		return sandbox.Invalid.Errorf("grant %s: %d ports: at most %d", p, len(g.Ports), maxGrantPorts)
	}
	if slices.Contains(g.Ports, 0) {
		return sandbox.Invalid.Errorf("grant %s: port 0", p)
	}
	return nil
}

func (g Grant) String() string {
	if len(g.Ports) == 0 {
		return g.Prefix.String()
	}
	return fmt.Sprintf("%s ports %v", g.Prefix, g.Ports)
}

// opens says whether the grant covers a flow's address, protocol and port.
func (g Grant) opens(f Flow) bool {
	if !g.Prefix.Contains(f.Addr) {
		return false
	}
	if len(g.Ports) == 0 {
		return true
	}
	return (f.Protocol == sandbox.ProtocolTCP || f.Protocol == sandbox.ProtocolUDP) && slices.Contains(g.Ports, f.Port)
}
