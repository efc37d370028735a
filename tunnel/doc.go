// Package tunnel is the way in to sandboxes: a TLS listener that tells them apart
// by host name and passes HTTP to ports inside, TCP ports of the host, and connect
// tokens.
//
// Nothing listens while there is no tunnel. A tunnel belongs to one port of one
// sandbox of one tenant and is closed with the sandbox. What comes from either
// side is hostile: clients are bounded in connections, header, body and time;
// what our own side adds or takes (tokens, cookies, forwarding headers) never
// comes from a client and never goes inside unless it is meant to (F9).
//
// The tunnels of a node share a domain, which nothing else may be in, the API
// least of all: pages inside are code that nobody has vouched for.
package tunnel
