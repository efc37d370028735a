// Package network gives every sandbox a network of its own and lets it reach
// nothing that its policy does not name. It knows nothing of runtimes: what it
// hands out is a slot, a network namespace with a ready interface eth0, for a
// user-space stack that takes over the interface or a tap beside it.
//
// What it adds to the host's network namespace is three things: one network
// namespace called the router (viv-INSTANCE), one veth to it (vivINSTANCE) with
// an address and a route, and one nftables table (vivarium_INSTANCE). Taking
// those away, and setting the forwarding flags back, is a complete clean-up.
//
//	slot netns            router netns                         host netns
//	eth0 ---------------- vINSTANCE-N  ...  up0 --------------- vivINSTANCE --- outside
//	10.x/31               nft: default drop                     nft: default drop for us
//	default route         routes: special ranges blackholed     masquerade
//	                      DNS server (sockets of the daemon)
//
// Three layers have to fail before a packet reaches what it must not: the
// router's nftables table, the router's routing table that packets from slots
// use (it has blackhole routes for all special-purpose ranges and no route at
// all to other slots), and the host's nftables table. Every layer is complete
// without the others, except that only nftables knows ports and protocols.
// A second table in the router holds nothing but the list of open slots, so that
// closed ones stay closed should the first be gone.
//
// What is denied is refused at once, with a TCP reset or an ICMP port
// unreachable from the router, the same for every address and at a bounded
// rate, so that a sandbox does not wait for nothing. The host's table and the
// blackhole routes are silent.
//
// A policy is a chain of the router's table and an entry for the slot's
// interface in its verdict map: a new kind of policy adds a chain, or a chain
// per slot, and the rest stays. Everything on the way out is judged packet by
// packet, never by "established": a policy that changes cuts open flows too.
//
// The DNS server asks the host's resolvers itself, from the host's namespace,
// which may therefore have private addresses. It takes out of every answer the
// addresses that policy refuses (so that no name can stand for a private one),
// answers reverse queries for special-purpose ranges itself, and bounds what a
// slot can make it do.
//
// IPv6 is wholly off: disabled by sysctl in slots and router, dropped by
// nftables in router and host, and AAAA queries are answered with no data
// (RFC 8305 clients then use IPv4 at once). An IPv4-mapped IPv6 address leaves
// a socket as IPv4 and is judged as such.
//
// A daemon that dies leaves everything standing: running sandboxes keep their
// flows, only DNS stops until the daemon is back. Open finds it all again from
// the kernel and Options.Dir. The bind mounts of namespaces must survive the
// daemon, so it has to run in the host's mount namespace: a service manager
// must not give it a private one.
package network
