package cli

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

var (
	hintLine = regexp.MustCompile(`WithHint\(|Hint:|Fix:|[Ff]ix\(`)
	// a command as it stands in a hint, and in the documents at the begin of a
	// line or of a piece of code
	inHint = regexp.MustCompile(`\bviv ([a-z]+(?:-[a-z]+)*)((?: [a-z-]+| --?[a-z-]+)*)`)
	inDoc  = regexp.MustCompile("(?m)(?:^(?:# |sudo |\\s+)?|`(?:sudo )?|\\| |xargs -r )viv ([a-z]+(?:-[a-z]+)*)((?: [a-z-]+| --?[a-z-]+)*)")
)

// What hints and documents tell a reader to type exists: the verb, that below
// it, and its flags.
func TestCommandsThatAreNamed(t *testing.T) {
	t.Parallel()
	root := New(Streams{In: strings.NewReader(""), Out: io.Discard, Err: io.Discard}, Hooks{})
	seen := 0
	check := func(where string, m []string) {
		seen++
		cmd, _, err := root.Find([]string{m[1]})
		if err != nil || cmd == root {
			t.Errorf("%s: there is no `viv %s`", where, m[1])
			return
		}
		for i, word := range strings.Fields(m[2]) {
			if name, long := strings.CutPrefix(word, "--"); long {
				if name != "" && name != "help" && flag(cmd, name) == nil {
					t.Errorf("%s: `%s` has no --%s", where, cmd.CommandPath(), name)
				}
				if name == "" { // what follows is a command inside
					return
				}
				continue
			}
			if i == 0 && cmd.HasAvailableSubCommands() && !strings.HasPrefix(word, "-") {
				sub, _, err := cmd.Find([]string{word})
				if err != nil || sub == cmd {
					t.Errorf("%s: there is no `%s %s`", where, cmd.CommandPath(), word)
					return
				}
				cmd = sub
			}
		}
	}
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if strings.HasPrefix(d.Name(), ".") && d.Name() != ".." || d.Name() == "bin" {
				return fs.SkipDir
			}
			return nil
		}
		md, src := strings.HasSuffix(path, ".md"), strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go")
		if !md && !src {
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if md {
			for _, m := range inDoc.FindAllStringSubmatch(string(b), -1) {
				check(path, m)
			}
			return nil
		}
		for _, line := range strings.Split(string(b), "\n") {
			if hintLine.MatchString(line) {
				for _, m := range inHint.FindAllStringSubmatch(line, -1) {
					check(path, m)
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen < 60 {
		t.Errorf("only %d commands were found", seen)
	}
}

func flag(cmd *cobra.Command, name string) any {
	if f := cmd.Flags().Lookup(name); f != nil {
		return f
	}
	if f := cmd.InheritedFlags().Lookup(name); f != nil {
		return f
	}
	return nil
}
