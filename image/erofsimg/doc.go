// Package erofsimg writes EROFS images (Linux fs/erofs/erofs_fs.h, and
// Documentation/filesystems/erofs.rst) that both the Linux kernel and gVisor
// mount.
//
// gVisor's reader is the narrower of the two: it knows no incompatible feature
// bit, so no chunked files, refuses every inode that carries extended
// attributes, and cannot map a regular file whose data sits inline next to its
// inode. The writer therefore stores regular files as whole blocks, and leaves
// attributes out unless Options.Xattrs asks for them. github.com/erofs/go-erofs
// v0.3.1 does neither, has no hard links, holds all metadata in memory and keys
// it by full path, so that a deep tree costs the square of its depth; hence
// this package. Its reader checks ours in the tests.
//
// File data is written once, straight to its final place, before the tree is
// known to be complete: a caller may read a tar stream, call Writer.Data for
// each file, and change its mind about the tree until Writer.Finish.
package erofsimg
