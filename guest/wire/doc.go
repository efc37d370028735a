// Package wire is the protocol between the host and the guest, and nothing
// else: framing, the handshake, and the messages as bytes.
//
// # Why not ttrpc
//
// ttrpc with protobuf was measured against this framing before it was chosen
// (amd64, 2 cores, static, stripped; a program that listens and exits, 200
// runs each):
//
//	                       binary   start p50   CPU      RSS
//	raw sockets            1.5 MB   1.2 ms      1.25 ms  2.0 MB
//	net + crypto + json    2.9 MB   1.6 ms      1.6 ms   3.3 MB
//	the same plus ttrpc    6.1 MB   2.1 ms      2.2 ms   5.6 MB
//
// It costs 2.3 MB per sandbox and half a millisecond of every start (more
// under gVisor, where a page fault costs more), for a protocol of a dozen
// messages; so the messages are coded by hand here, and both decoders are
// fuzzed.
//
// # Frames
//
// A frame is a four-byte big-endian header, the type in the top byte and the
// length of the payload in the other three, and the payload. Integers in
// payloads are unsigned varints, strings are a length and bytes.
//
// # Connections
//
// Every connection starts with the handshake (see HostHandshake). The first
// frame from the host after it says what the connection is for: control calls,
// an exec, files, a port. Each exec, file transfer and port has a connection of
// its own, so that a slow reader stalls nobody else: the transport's own flow
// control is per connection.
//
// # Trust
//
// Neither side trusts the other's bytes. Sizes are checked before anything is
// allocated, counts and strings have caps, and what is left over in a payload
// is an error.
package wire
