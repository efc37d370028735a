// Package policy decides what a sandbox may reach. It is data and arithmetic
// alone: it knows neither kernel nor network, so that the rules in the kernel,
// the DNS server, the proxy, `viv network explain` and the fetches of the daemon
// itself all give the same answer. docs/network.md has its truth table.
//
// A flow must be allowed by the operator's floor and by the sandbox's policy. In
// each, the first rule that matches decides, then the mode. Above both stand
// the operator's denied ranges and the special-purpose ranges, which only the
// operator's grants open.
package policy
