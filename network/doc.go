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
// A slot without an open policy is besides not forwarded for by the kernel
// (net.ipv4.conf.IF.forwarding is 0 in the router).
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
