package layer

import (
	"strings"

	"vivarium/image/erofsimg"
	"vivarium/sandbox"
)

// maxHops is how many symbolic links a path may pass, as in Linux
// (MAXSYMLINKS).
const maxHops = 40

// What a node and the entries of a directory cost in memory, about, in bytes.
const (
	nodeCost = 150
	dirCost  = 400
)

// tree is a file system in memory. Paths in it are slices of names from the
// root; symbolic links lead nowhere but into the tree.
type tree struct {
	root  *erofsimg.Node
	cur   int32                    // number of the layer being applied, from 1
	swept map[*erofsimg.Node]int32 // directory: layer whose whiteouts have emptied it
	limit Limits
	meta  int64 // bytes of names, targets and attributes taken
}

func newTree(l Limits) *tree {
	return &tree{root: erofsimg.NewDir(0o755), limit: l, swept: map[*erofsimg.Node]int32{}}
}

// take accounts for n bytes of memory kept.
func (t *tree) take(n int) error {
	if t.meta += int64(n); t.meta > t.limit.MetaBytes {
		return sandbox.Exhausted.Errorf("the image's tree takes more than %d MiB", t.limit.MetaBytes>>20).
			WithHint("raise the image limits in the daemon's configuration if you trust this image")
	}
	return nil
}

// split cleans a name from a tar and returns its parts. Leading slashes and
// "." mean nothing; ".." is refused, since no honest tool writes it.
func (t *tree) split(name string) ([]string, error) {
	if len(name) > t.limit.PathBytes {
		return nil, sandbox.Invalid.Errorf("name of %d bytes is too long: %.64q", len(name), name)
	}
	if strings.IndexByte(name, 0) >= 0 {
		return nil, sandbox.Invalid.Errorf("name with a zero byte: %.64q", name)
	}
	parts := strings.Split(name, "/")
	out := parts[:0]
	for _, p := range parts {
		switch {
		case p == "" || p == ".":
		case p == "..":
			return nil, sandbox.Invalid.Errorf("name leads outside the image: %.64q", name)
		case len(p) > erofsimg.MaxName:
			return nil, sandbox.Invalid.Errorf("file name longer than %d bytes: %.64q", erofsimg.MaxName, p)
		default:
			out = append(out, p)
		}
	}
	if len(out) > t.limit.Depth {
		return nil, sandbox.Invalid.Errorf("more than %d directories deep: %.64q", t.limit.Depth, name)
	}
	return out, nil
}

// cursor is a directory in the tree and the way to it, for "..".
type cursor struct {
	dir  *erofsimg.Node
	path []step
}

type step struct {
	parent *erofsimg.Node
	name   string
}

func (c *cursor) down(name string, to *erofsimg.Node) {
	c.path = append(c.path, step{c.dir, name})
	c.dir = to
}

func (c *cursor) up() {
	if n := len(c.path); n > 0 {
		c.dir = c.path[n-1].parent
		c.path = c.path[:n-1]
	}
}

// walkDirs goes from the root along parts and returns the directory there.
// Links on the way are followed inside the tree, as in a chroot. With create,
// missing directories are made and every entry on the way is marked as touched
// by the current layer. Without it a missing directory gives a nil cursor.
func (t *tree) walkDirs(parts []string, create bool) (*cursor, error) {
	c := &cursor{dir: t.root}
	hops, steps := 0, 0
	todo := parts
	for len(todo) > 0 {
		name := todo[0]
		todo = todo[1:]
		if steps++; steps > 8*t.limit.Depth {
			return nil, sandbox.Invalid.Errorf("too many steps through symbolic links at %.64q", name)
		}
		if name == "" || name == "." {
			continue
		}
		if name == ".." {
			c.up()
			continue
		}
		l, ok := c.dir.Children[name]
		if !ok {
			if !create {
				return nil, nil
			}
			if len(c.path) >= t.limit.Depth {
				return nil, sandbox.Invalid.Errorf("more than %d directories deep at %.64q", t.limit.Depth, name)
			}
			if len(name) > erofsimg.MaxName {
				return nil, sandbox.Invalid.Errorf("file name longer than %d bytes: %.64q", erofsimg.MaxName, name)
			}
			if err := t.put(c.dir, name, erofsimg.NewDir(0o755)); err != nil {
				return nil, err
			}
			l = c.dir.Children[name]
		}
		switch {
		case l.IsDir():
			if create && l.Layer != t.cur {
				l.Layer = t.cur
				c.dir.Children[name] = l
			}
			c.down(name, l.Node)
		case l.IsSymlink():
			if hops++; hops > maxHops {
				return nil, sandbox.Invalid.Errorf("too many symbolic links at %.64q", name)
			}
			target := l.Target()
			if strings.HasPrefix(target, "/") {
				c = &cursor{dir: t.root}
			}
			todo = append(strings.Split(target, "/"), todo...)
		default:
			if !create {
				return nil, nil
			}
			return nil, sandbox.Invalid.Errorf("parent %.64q is not a directory", name)
		}
	}
	return c, nil
}

// put links n into dir under name for the current layer, replacing what was
// there. The name is copied, so that a long path it was cut from can go.
func (t *tree) put(dir *erofsimg.Node, name string, n *erofsimg.Node) error {
	if _, ok := dir.Children[name]; !ok {
		cost := nodeCost + len(name)
		if n.IsDir() {
			cost += dirCost
		}
		if err := t.take(cost); err != nil {
			return err
		}
		name = strings.Clone(name)
	}
	dir.Children[name] = erofsimg.Link{Node: n, Layer: t.cur}
	return nil
}

// remove takes away what layers below the current one have at name in dir, and
// keeps what the current one put there: whiteouts apply to lower layers only,
// wherever in the tar they stand.
func (t *tree) remove(dir *erofsimg.Node, name string) {
	l, ok := dir.Children[name]
	switch {
	case !ok:
	case l.Layer != t.cur:
		delete(dir.Children, name)
	case l.IsDir():
		t.sweep(l.Node)
	}
}

// sweep removes from dir, at every depth, what lower layers put there. After
// that all of it is of the current layer, so a second sweep has nothing to do;
// remembering that keeps a layer full of whiteouts from costing the square of
// its size.
func (t *tree) sweep(dir *erofsimg.Node) {
	stack := []*erofsimg.Node{dir}
	for len(stack) > 0 {
		d := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		if t.swept[d] == t.cur {
			continue
		}
		t.swept[d] = t.cur
		for name, l := range d.Children {
			if l.Layer != t.cur {
				delete(d.Children, name)
			} else if l.IsDir() {
				stack = append(stack, l.Node)
			}
		}
	}
}

// lookup returns the node at the end of parts; links are followed on the way
// but not at the end. It returns nil if there is none.
func (t *tree) lookup(parts []string) (*erofsimg.Node, error) {
	if len(parts) == 0 {
		return t.root, nil
	}
	c, err := t.walkDirs(parts[:len(parts)-1], false)
	if c == nil || err != nil {
		return nil, err
	}
	return c.dir.Children[parts[len(parts)-1]].Node, nil
}

// follow resolves all but the last name of a link's target, seen from the
// directory at c. It returns a nil cursor if that leads nowhere.
func (t *tree) follow(c *cursor, target string) (*cursor, string, error) {
	var parts []string
	if !strings.HasPrefix(target, "/") {
		for _, s := range c.path {
			parts = append(parts, s.name)
		}
	}
	parts = append(parts, strings.Split(target, "/")...)
	for len(parts) > 0 && (parts[len(parts)-1] == "" || parts[len(parts)-1] == ".") {
		parts = parts[:len(parts)-1]
	}
	if len(parts) == 0 {
		return nil, "", nil
	}
	d, err := t.walkDirs(parts[:len(parts)-1], false)
	return d, parts[len(parts)-1], err
}
