package erofsimg

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"slices"

	"golang.org/x/sys/unix"
)

const (
	superOffset = 1024
	superSize   = 128
	magic       = 0xe0f5e1e2

	compatChecksum = 1 // the superblock carries a CRC-32C
	compatMtime    = 2 // times in inodes are modification times

	layoutPlain  = 0
	layoutInline = 2
)

// Finish writes the tree under root and the superblock, and returns the size
// of the image in bytes, a multiple of BlockSize. Blocks that were written by
// Data but are in no file any more are given back to the file system where it
// can take them. The Writer cannot be used afterwards, nor root be written by
// another.
func (w *Writer) Finish(root *Node) (int64, error) {
	if !root.IsDir() {
		return 0, fmt.Errorf("root is not a directory")
	}
	dataEnd := w.next
	order, metaSize, err := w.plan(root)
	if err != nil {
		return 0, err
	}
	if err := w.punchDead(order, dataEnd); err != nil {
		return 0, err
	}
	metaBlock := w.next
	blocks := int64(metaBlock) + roundUp(metaSize, BlockSize)/BlockSize
	if blocks > maxBlocks {
		return 0, ErrTooLarge
	}
	out := &position{w: bufio.NewWriterSize(io.NewOffsetWriter(w.f, int64(dataEnd)*BlockSize), 256<<10), off: int64(dataEnd) * BlockSize}
	for _, v := range order {
		if v.n.blk != 0 {
			w.writeOutside(out, v)
		}
	}
	out.padTo(int64(metaBlock) * BlockSize)
	base := out.off
	for _, v := range order {
		out.padTo(base + int64(v.n.nid)*slotSize)
		w.writeInode(out, v)
	}
	out.padTo(blocks * BlockSize)
	if err := out.flush(); err != nil {
		return 0, err
	}
	if err := w.f.Truncate(blocks * BlockSize); err != nil {
		return 0, err
	}
	_, err = w.f.WriteAt(w.superblock(root, metaBlock, uint32(blocks), len(order)), 0)
	return blocks * BlockSize, err
}

// writeOutside writes a directory or link target that has blocks of its own.
func (w *Writer) writeOutside(out *position, v visit) {
	out.padTo(int64(v.n.blk) * BlockSize)
	if v.n.IsSymlink() {
		out.write([]byte(v.n.Target()))
		return
	}
	b := make([]byte, 0, BlockSize)
	for _, blk := range direntBlocks(v.n) {
		out.padTo(roundUp(out.off, BlockSize))
		out.write(appendDirents(b, blk, v.n, v.parent))
	}
}

// writeInode writes an inode and what follows it: attributes and inline data.
func (w *Writer) writeInode(out *position, v visit) {
	n := v.n
	var xs []Xattr
	if w.opt.Xattrs {
		xs = n.Xattrs()
	}
	xsize, _ := xattrSize(xs) // checked by plan
	size, union, layout := uint64(0), uint32(0), uint16(layoutPlain)
	var inline []byte
	switch n.Mode & TypeMask {
	case TypeRegular:
		size, union = uint64(n.Data.Size), n.Data.Block
	case TypeDir:
		size, union = uint64(n.dsize), n.blk
		if n.blk == 0 {
			layout = layoutInline
			inline = appendDirents(nil, direntBlocks(n)[0], n, v.parent)
		}
	case TypeSymlink:
		size, union = uint64(len(n.Target())), n.blk
		if n.blk == 0 {
			layout = layoutInline
			inline = []byte(n.Target())
		}
	case TypeChar, TypeBlock:
		union = n.Rdev
	}
	le := binary.LittleEndian
	b := w.buf[:0]
	b = le.AppendUint16(b, 1|layout<<1) // extended inode
	icount := uint16(0)
	if xsize > 0 {
		icount = uint16((xsize-xattrHeader)/4 + 1)
	}
	b = le.AppendUint16(b, icount)
	b = le.AppendUint16(b, n.Mode)
	b = le.AppendUint16(b, 0)
	b = le.AppendUint64(b, size)
	b = le.AppendUint32(b, union)
	b = le.AppendUint32(b, uint32(n.nid)) // for 32-bit stat
	b = le.AppendUint32(b, n.UID)
	b = le.AppendUint32(b, n.GID)
	b = le.AppendUint64(b, uint64(n.Mtime))
	b = le.AppendUint32(b, n.Nsec)
	b = le.AppendUint32(b, n.nlink)
	b = append(b, zeros[:16]...)
	b = appendXattrs(b, xs)
	out.write(append(b, inline...))
}

// superblock returns block 0.
func (w *Writer) superblock(root *Node, metaBlock, blocks uint32, inodes int) []byte {
	le := binary.LittleEndian
	b := make([]byte, BlockSize)
	s := b[superOffset:]
	le.PutUint32(s[0:], magic)
	le.PutUint32(s[8:], compatChecksum|compatMtime)
	s[12] = 12 // log2 of the block size
	le.PutUint16(s[14:], uint16(root.nid))
	le.PutUint64(s[16:], uint64(inodes))
	le.PutUint64(s[24:], uint64(w.opt.BuildTime))
	le.PutUint32(s[36:], blocks)
	le.PutUint32(s[40:], metaBlock)
	copy(s[48:64], w.opt.UUID[:])
	// The kernel's crc32c has no final inversion, Go's has.
	le.PutUint32(s[4:], ^crc32.Checksum(s, crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// punchDead gives the blocks below end that no file uses back to the file
// system: data of files that a later layer replaced or removed.
func (w *Writer) punchDead(order []visit, end uint32) error {
	var live []Extent
	for _, v := range order {
		if v.n.IsRegular() && v.n.Data.Size > 0 {
			live = append(live, v.n.Data)
		}
	}
	slices.SortFunc(live, func(a, b Extent) int { return int(int64(a.Block) - int64(b.Block)) })
	at := int64(1)
	punch := func(to int64) error {
		if to <= at {
			return nil
		}
		err := unix.Fallocate(int(w.f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at*BlockSize, (to-at)*BlockSize)
		if err == unix.EOPNOTSUPP || err == unix.ENOSYS {
			return nil
		}
		return err
	}
	for _, e := range live {
		last := int64(e.Block) + (e.Size-1)/BlockSize + 1
		if last > int64(end) {
			return fmt.Errorf("file data outside the image")
		}
		if err := punch(int64(e.Block)); err != nil {
			return err
		}
		at = max(at, last)
	}
	return punch(int64(end))
}

// position is a buffered writer that knows where it is and keeps its first
// error.
type position struct {
	w   *bufio.Writer
	off int64
	err error
}

func (p *position) write(b []byte) {
	if p.err != nil {
		return
	}
	var n int
	n, p.err = p.w.Write(b)
	p.off += int64(n)
}

func (p *position) padTo(off int64) {
	if off < p.off && p.err == nil {
		p.err = fmt.Errorf("internal: layout goes back from %d to %d", p.off, off)
	}
	for p.err == nil && p.off < off {
		p.write(zeros[:min(BlockSize, off-p.off)])
	}
}

func (p *position) flush() error {
	if p.err != nil {
		return p.err
	}
	return p.w.Flush()
}
