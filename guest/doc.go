// Package guest is the host's side of the guest: a client of the program that
// runs as process 1 in every sandbox (package agent), over the protocol of
// package wire.
//
// Everything that comes from a sandbox is hostile. Sizes, counts, offsets and
// times are bounded and checked; a guest that breaks the rules loses the
// connection and gives an error, never a hang, a crash or memory.
package guest
