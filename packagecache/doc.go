// Package packagecache is a cache of package registries for sandboxes: Debian
// archives, npm, PyPI and Go modules. It is a plain HTTP server at an address
// that sandboxes reach, and speaks to the registries itself, over TLS that it
// verifies. Tools inside are pointed at it by their own configuration (Setup),
// so that nobody's TLS has to be opened.
//
// Its upstreams are those of the operator's configuration; no host name is built
// in. What it keeps belongs to one tenant: the sandboxes of a tenant share it,
// those of another see nothing of it, not even by how long an answer takes.
//
// Both sides are hostile. A request names an object of a known shape or is
// refused. An answer is bounded, is checked against the checksum that its
// registry publishes where the protocol carries one, and is kept only when it is
// whole: it is written beside its place, synced and renamed. Redirects stay
// within the hosts of their upstream. Which addresses may be dialled is the
// business of Config.Dial, which upstream a sandbox may use that of
// Config.Allow.
//
// What is checked against what:
//
//	Debian   by-hash names; the indexes of a suite against its InRelease or
//	         Release. Packages themselves are left to apt, which always checks.
//	npm      tarballs against dist.integrity (or shasum) of the packument, when
//	         the packument is kept; one that comes later is compared then.
//	PyPI     files and their metadata against the index's SHA-256, which is part
//	         of the address that the rewritten index gives them.
//	Go       zips and go.mod files against the h1: hashes of a sumdb record, when
//	         that is kept; one that comes later is compared then. The go command
//	         always checks.
package packagecache
