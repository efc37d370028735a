// Package layer merges the layers of an OCI image into one tree whose file
// data already lies in an EROFS image (OCI image-spec, layer.md).
//
// Layers are hostile. Nothing of them ever becomes a path on the host: names
// are resolved in a tree in memory, symbolic links included, and file contents
// go into the one output file. Every count and size has a limit.
package layer
