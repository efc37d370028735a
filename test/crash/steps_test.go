package crash

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"vivarium/test/fixture"
)

type phase int

const (
	inCreate phase = iota
	inStop
	inRemove
)

// steps are all failpoints, by what comes to them. TestStepsAreAll holds them
// against the sources.
var steps = map[phase][]string{
	inCreate: {
		"create.record", "create.image", "create.boot",
		"boot.dir", "boot.cgroup", "boot.slot", "boot.sentry", "boot.state",
		"create.network", "create.guest",
		"start.files", "start.container", "start.done",
		"create.main",
	},
	inStop:   {"stop.kill", "stop.remove", "remove.cgroup", "remove.slot", "remove.dir", "stop.record"},
	inRemove: {"remove.record", "remove.spool"},
}

// No failpoint of the sources is missing above, and none is made up.
func TestStepsAreAll(t *testing.T) {
	t.Parallel()
	var want, got []string
	for _, l := range steps {
		want = append(want, l...)
	}
	for _, top := range []string{"engine", "runtime", "daemon", "network", "image", "store", "spool", "cgroup"} {
		err := filepath.WalkDir(filepath.Join(fixture.Root(), top), func(p string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() || !strings.HasSuffix(p, ".go") || strings.HasSuffix(p, "_test.go") {
				return err
			}
			f, err := parser.ParseFile(token.NewFileSet(), p, nil, 0)
			if err != nil {
				return err
			}
			ast.Inspect(f, func(n ast.Node) bool {
				c, ok := n.(*ast.CallExpr)
				if !ok || len(c.Args) == 0 {
					return true
				}
				s, ok := c.Fun.(*ast.SelectorExpr)
				if !ok {
					return true
				}
				switch s.Sel.Name {
				case "Fail": // opts.Fail("step"), not Client.Fail(err)
					if o, ok := s.X.(*ast.SelectorExpr); !ok || o.Sel.Name != "opts" {
						return true
					}
					switch a := c.Args[0].(type) {
					case *ast.BasicLit:
						v, _ := strconv.Unquote(a.Value)
						got = append(got, v)
					case *ast.BinaryExpr: // "create." + the stage: below
						if l, ok := a.X.(*ast.BasicLit); !ok || l.Value != `"create."` {
							t.Errorf("%s: a step whose name this test does not know", p)
						}
					default:
						t.Errorf("%s: a step whose name this test does not know", p)
					}
				case "stage": // b.stage(sandbox.StageBoot, ...)
					if a, ok := c.Args[0].(*ast.SelectorExpr); ok {
						if name, ok := strings.CutPrefix(a.Sel.Name, "Stage"); ok {
							got = append(got, "create."+strings.ToLower(name))
						}
					}
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	got = slices.Compact(got)
	if !slices.Equal(want, got) {
		t.Errorf("the steps of the sources are\n%q\nand those tested\n%q", got, want)
	}
}
