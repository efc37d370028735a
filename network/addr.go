package network

import "net/netip"

// DNS is the address of the only resolver that answers sandboxes.
func (n *Network) DNS() netip.Addr { return n.dnsAddr() }
