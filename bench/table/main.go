// Command table prints what was promised beside what was measured, from files
// of `viv bench --json`: each named as in bench.Goals, with .json.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"vivarium/bench"
)

func main() {
	results := map[string]*bench.Result{}
	for _, file := range os.Args[1:] {
		r, err := read(file)
		if err != nil {
			// what else was measured is shown all the same
			fmt.Fprintf(os.Stderr, "table: %s: %v\n", file, err)
			continue
		}
		results[strings.TrimSuffix(filepath.Base(file), ".json")] = r
	}
	if err := bench.Table(os.Stdout, results); err != nil {
		fmt.Fprintln(os.Stderr, "table:", err)
		os.Exit(1)
	}
}

func read(file string) (*bench.Result, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	r := &bench.Result{}
	return r, json.Unmarshal(b, r)
}
