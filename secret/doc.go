// Package secret keeps the tenants' secrets and hands them to sandboxes without
// letting them in.
//
// A bound secret has hosts. Inside a sandbox its variable holds a placeholder;
// the proxy, which ends TLS for those hosts with a certificate authority of the
// sandbox's own, asks the sandbox's Binding to put the value into a request's
// headers (the credentials of Basic authentication and, where the secret allows
// it, the query included) and to take it out of the response again. A plain
// secret has no hosts: its value is an environment variable inside, where
// everything in the sandbox can read it.
//
// What this protects. The value itself is never inside: not in a file, in memory,
// in the environment or in a snapshot of it. What this does not protect: whoever
// controls the sandbox can have the bound host do with the secret whatever that
// host allows, and can have the host tell it the value in a form that no scrubber
// knows (reversed, in pieces, compressed, in a binary body, over a WebSocket, or
// cut in two by range requests). Scrubbing is there for mistakes and honest
// echoes, and so that logs inside do not fill up with values.
//
// What computes with its secret rather than sending it (AWS request signing, a
// JWT's private key, SSH) cannot use a placeholder.
//
// # At rest
//
// Rows are sealed with NaCl's secretbox (XSalsa20-Poly1305), each under a key of
// its own, derived by HKDF-SHA256 from the 32 bytes in DIR/secret.key and the
// row's tenant, name, version and readable part (its hosts among it): a row put in
// another's place, or one with other hosts, does not open. It is not age, because
// age encrypts to a public key: whoever can write to the database could make rows
// that open, and there is no associated data to tie a row to its place. An older
// row of the same secret, put back whole, is not noticed.
package secret
