package erofsimg

// File types, as in the upper bits of st_mode (inode(7)).
const (
	TypeMask    = 0o170000
	TypeSocket  = 0o140000
	TypeSymlink = 0o120000
	TypeRegular = 0o100000
	TypeBlock   = 0o060000
	TypeDir     = 0o040000
	TypeChar    = 0o020000
	TypeFIFO    = 0o010000
)

// Extent is where a file's bytes are: a run of whole blocks. The zero Extent
// is an empty file.
type Extent struct {
	Block uint32 // first block
	Size  int64  // bytes
}

// Xattr is one extended attribute with its full name, such as
// "security.capability".
type Xattr struct {
	Name  string
	Value string
}

// Node is one inode. A Node may be linked from several directories under
// several names, except that a directory has one parent; its link count is
// computed when the image is finished.
type Node struct {
	Mode     uint16 // type and permission bits
	UID, GID uint32
	Mtime    int64 // seconds since 1970
	Nsec     uint32
	Rdev     uint32 // see Rdev; devices only
	Data     Extent // regular files only
	Ext      *Extra // what few nodes have; may be nil

	// Children holds a directory's entries by name. "." and ".." are not in it.
	Children map[string]Link

	nlink uint32
	nid   uint64
	blk   uint32 // first block of a directory or symlink that is not inline
	dsize uint32 // bytes of a directory's entries
}

// Extra holds what few nodes have.
type Extra struct {
	Target string // of a symbolic link
	Xattrs []Xattr
}

// Link is a directory entry: a node, and a number that the caller may use to
// remember where the entry came from.
type Link struct {
	*Node
	Layer int32
}

// IsDir reports whether n is a directory.
func (n *Node) IsDir() bool { return n.Mode&TypeMask == TypeDir }

// IsRegular reports whether n is a regular file.
func (n *Node) IsRegular() bool { return n.Mode&TypeMask == TypeRegular }

// IsSymlink reports whether n is a symbolic link.
func (n *Node) IsSymlink() bool { return n.Mode&TypeMask == TypeSymlink }

// Target returns the target of a symbolic link, else "".
func (n *Node) Target() string {
	if n.Ext == nil {
		return ""
	}
	return n.Ext.Target
}

// Xattrs returns the node's extended attributes.
func (n *Node) Xattrs() []Xattr {
	if n.Ext == nil {
		return nil
	}
	return n.Ext.Xattrs
}

// NewDir returns an empty directory with permission bits perm, owned by root.
func NewDir(perm uint16) *Node {
	return &Node{Mode: TypeDir | perm&0o7777, Children: map[string]Link{}}
}

// Rdev encodes a device number as Linux does on disk (new_encode_dev in
// include/linux/kdev_t.h): 12 bits of major, 20 of minor.
func Rdev(major, minor uint32) uint32 {
	return minor&0xff | major<<8 | minor&^0xff<<12
}
