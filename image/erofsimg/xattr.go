package erofsimg

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
)

// xattrPrefixes are the name spaces that EROFS knows, by their index.
var xattrPrefixes = []struct {
	index  byte
	prefix string
}{
	{2, "system.posix_acl_access"},
	{3, "system.posix_acl_default"},
	{1, "user."},
	{4, "trusted."},
	{6, "security."},
}

// KnownXattr reports whether an attribute's name is one that EROFS can store:
// in the user, trusted or security name space, or a POSIX ACL.
func KnownXattr(name string) bool {
	_, suffix, ok := splitXattr(name)
	return ok && len(suffix) <= 255
}

func splitXattr(name string) (index byte, suffix string, ok bool) {
	for _, p := range xattrPrefixes {
		s, found := strings.CutPrefix(name, p.prefix)
		exact := !strings.HasSuffix(p.prefix, ".")
		if found && (s == "") == exact {
			return p.index, s, true
		}
	}
	return 0, "", false
}

const xattrHeader = 12

// xattrSize returns the bytes that attributes take after an inode.
func xattrSize(xs []Xattr) (int, error) {
	if len(xs) == 0 {
		return 0, nil
	}
	size := xattrHeader
	for _, x := range xs {
		_, suffix, ok := splitXattr(x.Name)
		if !ok || len(suffix) > 255 || len(x.Value) > 0xffff {
			return 0, fmt.Errorf("extended attribute %.64q cannot be stored", x.Name)
		}
		size += int(roundUp(int64(4+len(suffix)+len(x.Value)), 4))
	}
	if (size-xattrHeader)/4+1 > 0xffff {
		return 0, fmt.Errorf("extended attributes of a file: %w", ErrTooLarge)
	}
	return size, nil
}

// appendXattrs appends the attribute area of an inode.
func appendXattrs(b []byte, xs []Xattr) []byte {
	if len(xs) == 0 {
		return b
	}
	b = append(b, zeros[:xattrHeader]...)
	xs = slices.SortedFunc(slices.Values(xs), func(a, c Xattr) int { return strings.Compare(a.Name, c.Name) })
	for _, x := range xs {
		index, suffix, _ := splitXattr(x.Name)
		b = append(b, byte(len(suffix)), index)
		b = binary.LittleEndian.AppendUint16(b, uint16(len(x.Value)))
		b = append(b, suffix...)
		b = append(b, x.Value...)
		for n := 4 + len(suffix) + len(x.Value); n%4 != 0; n++ {
			b = append(b, 0)
		}
	}
	return b
}
