// Package sandbox is the domain of Vivarium: what a sandbox is, the states it
// goes through, the kinds of error, and the interfaces that runtimes, networks
// and images implement. It imports nothing of ours, so that every other package
// can import it.
package sandbox
