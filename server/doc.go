// Package server is the listener of the daemon: one TCP port and one unix
// socket that speak HTTP/1.1 and h2c (and with it gRPC), authentication by
// bearer token, the tenant of a call, and the table that maps error kinds to
// the codes of the wire. The APIs themselves are in the packages below it; they
// are adapters and hold no state.
package server
