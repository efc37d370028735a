package erofsimg_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"gvisor.dev/gvisor/pkg/erofs"

	"vivarium/image/erofsimg"
)

// gVisor's own reader accepts every inode, finds every name, and can map every
// regular file, also one that has attributes in its source.
func TestGVisorReader(t *testing.T) {
	t.Parallel()
	file1, n := "", 0
	img := build(t, erofsimg.Options{}, func(w *erofsimg.Writer) *erofsimg.Node {
		root := erofsimg.NewDir(0o755)
		for i := range 700 {
			d := add(root, fmt.Sprint("d", i), erofsimg.NewDir(0o755))
			for j := range i % 200 {
				add(d, fmt.Sprint("f", j), file(t, w, strings.Repeat("x", i*j%5000)))
				n++
			}
			add(d, "link", link(strings.Repeat("l", 1+i*5)))
		}
		x := add(root, "x", file(t, w, "content"))
		x.Ext = &erofsimg.Extra{Xattrs: []erofsimg.Xattr{{Name: "user.x", Value: "y"}}}
		return root
	})
	f, err := os.Open(img)
	if err != nil {
		t.Fatal(err)
	}
	i, err := erofs.OpenImage(f)
	if err != nil {
		t.Fatal(err)
	}
	defer i.Close()
	seen := 0
	var walk func(nid uint64)
	walk = func(nid uint64) {
		d, err := i.Inode(nid)
		if err != nil {
			t.Fatal(err)
		}
		err = d.IterDirents(func(name string, _ uint8, nid uint64) error {
			if got, err := d.Lookup(name); err != nil || got != nid {
				t.Fatalf("look up %q: %d, %v; want %d", name, got, err, nid)
			}
			c, err := i.Inode(nid)
			switch {
			case err != nil:
				t.Fatalf("%q: %v", name, err)
			case name == "." || name == "..":
			case c.IsDir():
				walk(nid)
			case c.IsSymlink():
				if s, err := c.Readlink(); err != nil || uint64(len(s)) != c.Size() {
					t.Errorf("read link: %d, %v", len(s), err)
				}
			case c.IsRegular():
				seen++
				if off, err := c.DataOffset(); err != nil || off%4096 != 0 {
					t.Errorf("%q cannot be mapped: %d, %v", name, off, err)
				}
				r, err := c.DataRanges()
				if err != nil || r[0].Size != c.Size() {
					t.Errorf("%q: ranges %v, %v", name, r, err)
				}
				if name == "x" {
					file1 = string(r[0].Bytes)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	walk(i.RootNid())
	if seen != n+1 || file1 != "content" {
		t.Errorf("%d files of %d, x is %q", seen, n+1, file1)
	}
}
