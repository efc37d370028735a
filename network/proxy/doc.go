// Package proxy checks the names in what sandboxes send over TCP. The router
// hands it connections that are allowed for a name only, or whose policy denies
// some names, without their maker's help or knowledge: it sees where a connection
// was going, reads what its first bytes claim, and either dials that very address
// itself or refuses. It knows slots as an interface and the network as a function
// that dials, so it can be tried on loopback.
//
// A connection to address A that claims name N passes if the policy in force
// allows N at A, and A is known to be N's: our DNS server gave it to this slot as
// an answer for N, or the policy allows A whatever its name. What claims no name
// (no TLS server name, neither TLS nor HTTP, a server that speaks first) is
// decided by address alone. Whatever cannot be read or decided is refused.
//
//	TLS         the server name of the client hello; then the bytes go through
//	            untouched, moved by the kernel
//	TLS to an   TLS ends here, with a certificate of the sandbox's own authority,
//	inspected   and begins anew, verified; every request must be for that name and
//	name        passes the slot's Injector
//	HTTP/1, h2c every request is read, judged by its Host and written anew
//	other       bytes, if the address is allowed
//
// Requests in the clear never pass the Injector, not even to an inspected name:
// a secret is not sent where everybody on the way can read it.
//
// What a policy change no longer allows is cut with a TCP reset, at the latest
// half a second after Slot.Policy returns another policy.
//
// A client that ends its direction of an HTTP connection in the clear, or of an
// inspected one, has left: its request is given up, as by net/http.
//
// It cannot see, where TLS is not inspected: the Host inside (domain fronting at
// one and the same address), the name inside an encrypted client hello (its outer
// name is what counts; our DNS server takes the keys out of answers), a second
// client hello that differs from the first in ways an honest server forbids. Nor
// what is inside a protocol that begins in the clear and turns to TLS later
// (STARTTLS): such a server speaks first and is decided by address.
package proxy
