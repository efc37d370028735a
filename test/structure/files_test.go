package structure

import (
	"bytes"
	"errors"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestPackageDocs: every package says in its doc comment what it is, from its
// own name on, and none is called by what it is not.
func TestPackageDocs(t *testing.T) {
	for _, p := range list(t) {
		pkg := ours(p.ImportPath)
		if len(p.GoFiles) == 0 || matches("api/...", pkg) { // generated
			continue
		}
		if p.Doc == "" {
			t.Errorf("%s has no package comment", pkg)
		}
		switch p.Name {
		case "util", "utils", "common", "helper", "helpers", "misc", "base", "lib":
			t.Errorf("%s: package %s: a name that says nothing", pkg, p.Name)
		}
	}
}

// TestOneDocPerPackage: a package comment in two files is two halves of which
// godoc shows one after the other.
func TestOneDocPerPackage(t *testing.T) {
	for _, p := range list(t) {
		if matches("api/...", ours(p.ImportPath)) {
			continue
		}
		var in []string
		for _, f := range p.GoFiles {
			a, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, f), nil, parser.PackageClauseOnly|parser.ParseComments)
			if err != nil {
				t.Errorf("parse %s: %v", f, err)
				continue
			}
			if a.Doc != nil {
				in = append(in, f)
			}
		}
		if len(in) > 1 {
			t.Errorf("%s has its package comment in %s", ours(p.ImportPath), strings.Join(in, " and "))
		}
	}
}

// places are paths of the machine that something was written on, which mean
// nothing on another.
var places = regexp.MustCompile(`/root/go\b|/home/[a-z]+/(go|src)\b|/Users/`)

// TestNoMachinePaths looks through every file that is part of the tree.
func TestNoMachinePaths(t *testing.T) {
	looked := 0
	err := filepath.WalkDir(root(), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) { // a temporary file of another test
				return nil
			}
			return err
		}
		rel, _ := filepath.Rel(root(), path)
		if d.IsDir() {
			switch rel {
			case ".git", ".cache", "bin", "assets/bin":
				return filepath.SkipDir
			}
			return nil
		}
		if !d.Type().IsRegular() || rel == "test/structure/files_test.go" || rel == "go.sum" || rel == ".git" {
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if bytes.IndexByte(b, 0) >= 0 { // not text
			return nil
		}
		looked++
		for i, line := range strings.Split(string(b), "\n") {
			if places.MatchString(line) {
				t.Errorf("%s:%d names a place of one machine: %.120s", rel, i+1, strings.TrimSpace(line))
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if looked < 100 {
		t.Errorf("looked at only %d files", looked)
	}
}

// links of Markdown: [text](target).
var link = regexp.MustCompile(`\]\(([^)\s]+)\)`)

// TestDocLinks: what the documents point to in the tree is there.
func TestDocLinks(t *testing.T) {
	docs, err := filepath.Glob(filepath.Join(root(), "docs", "*.md"))
	if err != nil {
		t.Fatal(err)
	}
	docs = append(docs, filepath.Join(root(), "README.md"), filepath.Join(root(), "CHANGELOG.md"))
	for _, doc := range docs {
		b, err := os.ReadFile(doc)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, m := range link.FindAllStringSubmatch(string(b), -1) {
			target, _, _ := strings.Cut(m[1], "#")
			if target == "" || strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(doc), target)); err != nil {
				t.Errorf("%s points to %s, which is not there", filepath.Base(doc), m[1])
			}
		}
	}
}
