// Package agent is what runs inside a sandbox: init, execs, files and ports.
//
// It is process 1 of the main container. It must start fast and stay small, so
// it does without package net, and it must survive everything that happens in
// the sandbox: it is never in the way of a fork, never keeps a descriptor it
// does not need, and waits in the poller, not in threads.
//
// # Exit and output
//
// A command has ended when its own process is reaped; its status is the one
// that wait4 gave, once. All that the process wrote is delivered before its
// exit. Where other processes (started in the background) still hold its
// output, what they write is taken for another 200 ms; after that the exit is
// reported all the same, as a user of a shell expects of `server &`, and what
// comes later is read and dropped, so that they neither block nor die of
// SIGPIPE. A terminal is hung up at that moment.
package agent
