package erofsimg

import (
	"fmt"
	"slices"
	"strings"
)

const (
	inodeSize  = 64 // an extended inode
	direntSize = 12
	slotSize   = 32 // inode numbers count these
	// firstSlot keeps inode number 0 free: readdir(3) takes it for a deleted
	// entry.
	firstSlot = 2
	// maxInline is the largest directory kept next to its inode. Larger ones
	// would leave too much of a block unused.
	maxInline = 2048
	// MaxName is the longest file name in bytes.
	MaxName = 255
	// MaxTarget is the longest target of a symbolic link in bytes.
	MaxTarget = 4095
)

// visit is one inode in the order in which inodes are written.
type visit struct {
	n      *Node
	parent *Node // of a directory
}

// walk calls fn once for every inode under root: a directory before what is in
// it, names in byte order. It counts links and does not recurse: trees may be
// thousands of levels deep.
func walk(root *Node, fn func(v visit, first bool) error) error {
	stack := []visit{{root, root}}
	for len(stack) > 0 {
		v := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		first := v.n.nid == 0
		if !first && v.n.IsDir() {
			return fmt.Errorf("directory linked twice")
		}
		if err := fn(v, first); err != nil {
			return err
		}
		if !v.n.IsDir() {
			continue
		}
		names := sortedNames(v.n)
		for i := len(names) - 1; i >= 0; i-- {
			stack = append(stack, visit{v.n.Children[names[i]].Node, v.n})
		}
	}
	return nil
}

func sortedNames(n *Node) []string {
	names := make([]string, 0, len(n.Children))
	for name := range n.Children {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// plan gives every inode its number and every directory or link that does not
// fit beside its inode its blocks. It returns the inodes in the order of their
// numbers and the size of the metadata area in bytes.
func (w *Writer) plan(root *Node) (order []visit, metaSize int64, err error) {
	off := int64(firstSlot * slotSize)
	err = walk(root, func(v visit, first bool) error {
		n := v.n
		if !first {
			n.nlink++
			return nil
		}
		tail, err := w.tailSize(n)
		if err != nil {
			return err
		}
		head := int64(inodeSize)
		if w.opt.Xattrs {
			x, err := xattrSize(n.Xattrs())
			if err != nil {
				return err
			}
			head += int64(x)
		}
		off = place(off, head, tail)
		n.blk = 0
		if tail > 0 && !fits(off, head, tail) {
			blocks := (tail-1)/BlockSize + 1
			if int64(w.next)+blocks > maxBlocks {
				return ErrTooLarge
			}
			n.blk = w.next
			w.next += uint32(blocks)
			tail = 0
		}
		n.nid = uint64(off / slotSize)
		n.nlink = 1
		if n.IsDir() {
			n.nlink = 2
			if v.parent != n {
				v.parent.nlink++
			}
		}
		order = append(order, v)
		off = roundUp(off+head+tail, slotSize)
		return nil
	})
	return order, off, err
}

// fits reports whether tail bytes after a head of head bytes at off stay in
// one block, and are few enough to be kept inline.
func fits(off, head, tail int64) bool {
	return tail <= maxInline && (off+head)%BlockSize+tail <= BlockSize
}

// place returns where an inode goes: at off, or further on if its core would
// cross a block or the next block would hold its inline tail and this does not.
func place(off, head, tail int64) int64 {
	next := roundUp(off, BlockSize)
	if off%BlockSize+inodeSize > BlockSize {
		return next
	}
	if tail > 0 && !fits(off, head, tail) && fits(next, head, tail) {
		return next
	}
	return off
}

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }

// tailSize validates n and returns the size of what may be stored beside its
// inode: a directory's entries or the target of a link.
func (w *Writer) tailSize(n *Node) (int64, error) {
	switch n.Mode & TypeMask {
	case TypeDir:
		size := int64(0)
		for name := range n.Children {
			if !validName(name) {
				return 0, fmt.Errorf("bad file name %.64q", name)
			}
		}
		for _, b := range direntBlocks(n) {
			if size%BlockSize != 0 {
				size = roundUp(size, BlockSize)
			}
			size += int64(b.size)
		}
		if size > 1<<31 {
			return 0, ErrTooLarge
		}
		n.dsize = uint32(size)
		return size, nil
	case TypeSymlink:
		t := n.Target()
		if t == "" || len(t) > MaxTarget || strings.IndexByte(t, 0) >= 0 {
			return 0, fmt.Errorf("bad target of a symbolic link %.64q", t)
		}
		return int64(len(t)), nil
	case TypeRegular, TypeChar, TypeBlock, TypeFIFO, TypeSocket:
		return 0, nil
	}
	return 0, fmt.Errorf("unknown file type %#o", n.Mode)
}

func validName(s string) bool {
	return s != "" && s != "." && s != ".." && len(s) <= MaxName && !strings.ContainsAny(s, "/\x00")
}
