package erofsimg

import (
	"encoding/binary"
	"slices"
)

// direntBlock is one block's worth of a directory.
type direntBlock struct {
	names []string
	size  int // bytes used
}

// direntBlocks splits a directory's entries, "." and ".." among them, into
// blocks. Readers search by bisection, so the names are in byte order.
func direntBlocks(n *Node) []direntBlock {
	names := make([]string, 0, len(n.Children)+2)
	names = append(names, ".", "..")
	for name := range n.Children {
		names = append(names, name)
	}
	slices.Sort(names)
	var blocks []direntBlock
	start, size := 0, 0
	for i, name := range names {
		need := direntSize + len(name)
		if size+need > BlockSize {
			blocks = append(blocks, direntBlock{names[start:i], size})
			start, size = i, 0
		}
		size += need
	}
	return append(blocks, direntBlock{names[start:], size})
}

// fileTypes maps the upper four bits of a mode to the type in a directory
// entry (fs/erofs/erofs_fs.h, as in include/linux/fs_types.h).
var fileTypes = [16]byte{
	TypeRegular >> 12: 1, TypeDir >> 12: 2, TypeChar >> 12: 3, TypeBlock >> 12: 4,
	TypeFIFO >> 12: 5, TypeSocket >> 12: 6, TypeSymlink >> 12: 7,
}

// appendDirents appends the entries of a block to b.
func appendDirents(b []byte, blk direntBlock, n, parent *Node) []byte {
	off := len(blk.names) * direntSize
	for _, name := range blk.names {
		to := n.Children[name].Node
		switch name {
		case ".":
			to = n
		case "..":
			to = parent
		}
		b = binary.LittleEndian.AppendUint64(b, to.nid)
		b = binary.LittleEndian.AppendUint16(b, uint16(off))
		b = append(b, fileTypes[to.Mode>>12], 0)
		off += len(name)
	}
	for _, name := range blk.names {
		b = append(b, name...)
	}
	return b
}
