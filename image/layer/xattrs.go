package layer

import (
	"slices"

	"vivarium/image/erofsimg"
)

// maxPath is the longest path a system call takes (PATH_MAX), without the
// terminating zero.
const maxPath = 4095

// Xattrs calls fn for every extended attribute under root with the absolute
// path of its file; a file with several names is visited by one of them. Files
// whose path no system call could take are left out.
func Xattrs(root *erofsimg.Node, fn func(path string, x erofsimg.Xattr) error) error {
	seen := map[*erofsimg.Node]bool{}
	return xattrs(root, nil, seen, fn)
}

// xattrs recurses; Limits.Depth and maxPath bound how far.
func xattrs(n *erofsimg.Node, path []byte, seen map[*erofsimg.Node]bool, fn func(string, erofsimg.Xattr) error) error {
	if xs := n.Xattrs(); len(xs) > 0 && !seen[n] {
		seen[n] = true
		p := string(path)
		if p == "" {
			p = "/"
		}
		for _, x := range xs {
			if err := fn(p, x); err != nil {
				return err
			}
		}
	}
	if len(n.Children) == 0 {
		return nil
	}
	names := make([]string, 0, len(n.Children))
	for name, l := range n.Children {
		if (l.IsDir() || l.Ext != nil) && len(path)+1+len(name) <= maxPath {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		if err := xattrs(n.Children[name].Node, append(append(path, '/'), name...), seen, fn); err != nil {
			return err
		}
	}
	return nil
}
