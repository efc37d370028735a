package config

import (
	_ "embed"
	"strconv"
)

// Reference is a config file with every setting, its meaning and its default.
//
//go:embed reference.yaml
var Reference string

func index(path string, i int) string { return path + "[" + strconv.Itoa(i) + "]" }
