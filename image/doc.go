// Package image keeps images: it pulls them from registries, loads them from
// archives, and turns each into one immutable EROFS file that both runtimes
// boot from.
//
// An image's identity follows from the digest of its OCI config, which names
// the digest of every uncompressed layer; those are checked during conversion,
// so an id stands for content. Everything is kept per tenant. The EROFS file
// may be shared between tenants, but only once the second has proved that it
// may have it: by bringing the layers itself, or by fetching the manifest with
// its own credentials from the very repository where the first got it.
//
// Files are written beside their final place, synced, renamed, and the
// directory synced, before the row that names them is committed; Open removes
// what a crash left in between.
//
// gVisor's EROFS reader refuses inodes with extended attributes, so those of
// an image lie in a list beside it (ReadXattrs), to be set inside the sandbox.
package image
