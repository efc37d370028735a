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
//	                      DNS server, proxy, local services (sockets of the daemon,
//	                      at the subnet's addresses 5, 6 and 7)
//
// Three layers have to fail before a packet reaches what it must not: the
// router's nftables table, the router's routing table that packets from slots
// use (it has blackhole routes for all special-purpose ranges and no route at
// all to other slots), and the host's nftables table. Every layer is complete
// without the others, except that only nftables knows ports and protocols.
// A second table in the router, the gate, knows which slots are open, so that
// closed ones stay closed should the first be gone.
//
// What is denied is refused at once, with a TCP reset or an ICMP port
// unreachable from the router, the same for every address and at a bounded
// rate, so that a sandbox does not wait for nothing. The host's table and the
// blackhole routes are silent.
//
// A policy that is its mode alone is a chain that all such slots share; any other
// is a chain of its own, named by its content (program.go), that says what
// policy.Decide says of a flow whose name is not known: denied and special-purpose
// ranges, pins, the operator's floor, the policy's rules by address, its mode. The
// slot's interface leads to it by a verdict map. Everything on the way out is judged
// packet by packet, never by "established"; a change is one transaction, and what
// it does not allow is forgotten by connection tracking as well, so that nothing
// comes in either (cut.go). What is in force is read back from the kernel rule by
// rule (verify.go).
//
// Names are pins (pins.go). The DNS server answers a slot's query as its policy
// wants (dnspolicy.go), and puts "interface . address . port" into a set of the
// kernel before the answer leaves: "proxied", when the name has to be seen in the
// connection, else "pinned". The first redirects TCP to the proxy (package proxy,
// wired by proxied.go), which checks the name and connects itself, from the slot's
// gateway address and with a mark, so that rules, routes and host judge once more.
// Without the daemon nobody listens there: what is allowed for its name stops.
//
// A second table, the gate, comes after the first. It lets packets of slots with
// rules pass only with the mark that the first one gives, so that without that
// table they reach nothing.
//
//	slot ─ raw: source ─ mangle: refuse early ─ nat: to the proxy? ─┬─ input ─ proxy ─ output: dialled ─┐
//	                                                                └─ forward: policy ─ limits ─ log ─ gate ┴─ up0 ─ host
//
// Limits and log (flowrules.go, counters.go): new flows, bytes each way and tracked
// connections are bounded per slot; every distinct destination that is reached or
// refused is counted in sets of the kernel, bounded as well, and read by the daemon,
// which adds what proxy and DNS server saw and tells Options.OnFlows.
//
// The DNS server asks the host's resolvers itself, from the host's namespace,
// which may therefore have private addresses. It takes out of every answer the
// addresses that policy refuses (so that no name can stand for a private one) and
// the keys of encrypted client hellos, answers reverse queries for special-purpose
// ranges itself, and bounds what a slot can make it do.
//
// IPv6 is wholly off: disabled by sysctl in slots and router, dropped by
// nftables in router and host, and AAAA queries are answered with no data
// (RFC 8305 clients then use IPv4 at once). An IPv4-mapped IPv6 address leaves
// a socket as IPv4 and is judged as such.
//
// A daemon that dies leaves everything standing: running sandboxes keep the flows
// that pass by address, and those to pinned names until their pins end; DNS and
// the proxy stop until the daemon is back. Open finds it all again from
// the kernel and Options.Dir. The bind mounts of namespaces must survive the
// daemon, so it has to run in the host's mount namespace: a service manager
// must not give it a private one.
package network
