package config

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"

	"vivarium/sandbox"
)

// maxFile bounds a config file, in bytes.
const maxFile = 1 << 20

// Source is where settings come from.
type Source struct {
	// File is the path of a YAML file; "" for none.
	File string
	// Environ is the environment, as os.Environ has it. Of it VIV_* count that
	// name a setting; others with that prefix that name none are an error,
	// except those in NotSettings.
	Environ []string
	// Set are settings from flags, in order, by their path such as pool.size.
	Set []Setting
}

// Setting is one value by its path.
type Setting struct {
	Path, Value string
	Flag        string // that it came from, for messages; "" is --set
}

// NotSettings are the environment variables that are not settings of the daemon:
// those of the command line, and what its tests use.
var NotSettings = []string{"VIV_SERVER", "VIV_TOKEN", "VIV_CONFIG", "VIV_FAILPOINT"}

// Load reads the configuration. Its errors are Invalid, name the place
// (`config.yaml:12: pool.size: ...`), and there may be several joined.
func Load(src Source) (*Config, error) {
	c := Default()
	where := places{}
	if src.File != "" {
		if err := c.readFile(src.File, where); err != nil {
			return nil, err
		}
	}
	if err := c.readEnviron(src.Environ, where); err != nil {
		return nil, err
	}
	for _, s := range src.Set {
		flag := s.Flag
		if flag == "" {
			flag = "--set " + s.Path
		}
		if err := c.set(s.Path, s.Value, flag, where); err != nil {
			return nil, err
		}
	}
	if c.UnixSocket == "" {
		c.UnixSocket = filepath.Join(c.DataDir, "viv.sock")
	}
	if err := c.validate(where); err != nil {
		return nil, err
	}
	return c, nil
}

// places remembers where each setting was said, for messages.
type places map[string]string

func (p places) errorf(path, format string, args ...any) error {
	at := p[path]
	for parent := path; at == "" && parent != ""; {
		i := strings.LastIndexAny(parent, ".[")
		if i < 0 {
			break
		}
		parent = parent[:i]
		at = p[parent]
	}
	if at == "" {
		at = "default"
	}
	return sandbox.Invalid.Errorf("%s: %s: %s", at, path, fmt.Sprintf(format, args...))
}

func (c *Config) readFile(name string, where places) error {
	f, err := os.Open(name)
	if err != nil {
		return sandbox.Invalid.Errorf("read config: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return sandbox.Invalid.Errorf("read config: %w", err)
	}
	if len(b) > maxFile {
		return sandbox.Invalid.Errorf("%s is longer than %d bytes", name, maxFile)
	}
	return c.parse(name, b, where)
}

// parse reads YAML by walking its tree, so that every message has the line and
// the path of the setting, and nothing is taken silently.
func (c *Config) parse(name string, b []byte, where places) error {
	file, err := parser.ParseBytes(b, 0)
	if err != nil {
		return sandbox.Invalid.Errorf("%s:%s", name, yamlMessage(err))
	}
	d := &decoder{name: name, where: where}
	docs := 0
	for _, doc := range file.Docs {
		if doc.Body == nil {
			continue
		}
		if _, null := doc.Body.(*ast.NullNode); null {
			continue
		}
		if docs++; docs > 1 {
			return sandbox.Invalid.Errorf("%s: has more than one document", name)
		}
		d.decode(doc.Body, reflect.ValueOf(c).Elem(), "", 0)
	}
	return errors.Join(d.errs...)
}

// yamlMessage makes one line of the parser's message, `12: reason`.
func yamlMessage(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	if pos, rest, ok := strings.Cut(line, "] "); ok && strings.HasPrefix(pos, "[") {
		n, _, _ := strings.Cut(pos[1:], ":")
		return n + ": " + rest
	}
	return " " + line
}

type decoder struct {
	name  string
	where places
	errs  []error
}

// maxDepth bounds nesting; the settings themselves have 4 levels.
const maxDepth = 16

func (d *decoder) fail(n ast.Node, path, format string, args ...any) {
	d.where[path] = d.at(n)
	d.errs = append(d.errs, d.where.errorf(path, format, args...))
}

func (d *decoder) at(n ast.Node) string {
	if t := n.GetToken(); t != nil && t.Position != nil {
		return fmt.Sprintf("%s:%d", d.name, t.Position.Line)
	}
	return d.name
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

func pairs(n ast.Node) ([]*ast.MappingValueNode, bool) {
	switch m := n.(type) {
	case *ast.MappingNode:
		return m.Values, true
	case *ast.MappingValueNode:
		return []*ast.MappingValueNode{m}, true
	}
	return nil, false
}

func (d *decoder) decode(n ast.Node, v reflect.Value, path string, depth int) {
	if depth > maxDepth {
		d.fail(n, path, "is nested too deeply")
		return
	}
	if n == nil {
		return
	}
	d.where[path] = d.at(n)
	if _, null := n.(*ast.NullNode); null {
		d.fail(n, path, "has no value")
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		d.decodeStruct(n, v, path, depth)
	case reflect.Map:
		vals, ok := pairs(n)
		if !ok {
			d.fail(n, path, "is not a mapping")
			return
		}
		out := reflect.MakeMap(v.Type())
		for _, kv := range vals {
			key, ok := keyOf(kv)
			if !ok {
				d.fail(kv.Key, path, "has a key that is not plain text")
				continue
			}
			el := reflect.New(v.Type().Elem()).Elem()
			d.decode(kv.Value, el, join(path, key), depth+1)
			out.SetMapIndex(reflect.ValueOf(key), el)
		}
		v.Set(out)
	case reflect.Slice:
		seq, ok := n.(*ast.SequenceNode)
		if !ok {
			d.fail(n, path, "is not a list")
			return
		}
		out := reflect.MakeSlice(v.Type(), 0, len(seq.Values))
		for i, item := range seq.Values {
			el := reflect.New(v.Type().Elem()).Elem()
			d.decode(item, el, fmt.Sprintf("%s[%d]", path, i), depth+1)
			out = reflect.Append(out, el)
		}
		if out.Len() == 0 {
			out = reflect.Zero(v.Type())
		}
		v.Set(out)
	default:
		text, ok := scalarText(n)
		if !ok {
			d.fail(n, path, "is not a single value")
			return
		}
		if err := setScalar(v, text); err != nil {
			d.fail(n, path, "%v", err)
		}
	}
}

func (d *decoder) decodeStruct(n ast.Node, v reflect.Value, path string, depth int) {
	vals, ok := pairs(n)
	if !ok {
		d.fail(n, path, "is not a group of settings")
		return
	}
	seen := map[string]bool{}
	for _, kv := range vals {
		key, ok := keyOf(kv)
		if !ok {
			d.fail(kv.Key, path, "has a key that is not plain text")
			continue
		}
		p := join(path, key)
		i := fieldByName(v.Type(), key)
		switch {
		case i < 0:
			d.fail(kv.Key, p, "is not a setting%s", nearest(v.Type(), key))
		case seen[key]:
			d.fail(kv.Key, p, "is set twice")
		default:
			seen[key] = true
			d.decode(kv.Value, v.Field(i), p, depth+1)
		}
	}
}

func keyOf(kv *ast.MappingValueNode) (string, bool) {
	if kv.Key == nil || kv.Key.IsMergeKey() {
		return "", false
	}
	return scalarText(kv.Key)
}

// scalarText returns a scalar as it is written. Anchors, aliases and tags are
// no scalars here: a config needs none, and bombs are made of them.
func scalarText(n ast.Node) (string, bool) {
	switch s := n.(type) {
	case *ast.StringNode:
		return s.Value, true
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode:
		return n.GetToken().Value, true
	}
	return "", false
}

func fieldByName(t reflect.Type, name string) int {
	for i := range t.NumField() {
		if t.Field(i).Tag.Get("yaml") == name {
			return i
		}
	}
	return -1
}

// nearest suggests a setting that is written nearly so.
func nearest(t reflect.Type, name string) string {
	best, dist := "", 3
	for i := range t.NumField() {
		f := t.Field(i).Tag.Get("yaml")
		if d := distance(f, name); d < dist {
			best, dist = f, d
		}
	}
	if best == "" {
		return ""
	}
	return "; did you mean " + best + "?"
}

// distance is Levenshtein's.
func distance(a, b string) int {
	if len(b) > 64 {
		return len(b)
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		prev := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			prev, row[j+1] = row[j+1], min(prev+cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}

// set gives the setting at path a value written as text.
func (c *Config) set(path, value, from string, where places) error {
	where[path] = from
	v := reflect.ValueOf(c).Elem()
	for _, key := range strings.Split(path, ".") {
		if v.Kind() != reflect.Struct {
			return where.errorf(path, "is not a setting")
		}
		i := fieldByName(v.Type(), key)
		if i < 0 {
			return where.errorf(path, "is not a setting%s", nearest(v.Type(), key))
		}
		v = v.Field(i)
	}
	switch v.Kind() {
	case reflect.Struct:
		return where.errorf(path, "is a group of settings")
	case reflect.Slice, reflect.Map:
		return c.setYAML(v, path, value, from, where)
	}
	if err := setScalar(v, value); err != nil {
		return where.errorf(path, "%v", err)
	}
	return nil
}

// setYAML is for lists and mappings, which are written as in the file.
func (c *Config) setYAML(v reflect.Value, path, value, from string, where places) error {
	file, err := parser.ParseBytes([]byte(value), 0)
	if err != nil || len(file.Docs) != 1 || file.Docs[0].Body == nil {
		return where.errorf(path, "%q is not YAML such as [a, b]", value)
	}
	d := &decoder{name: from, where: where}
	d.decode(file.Docs[0].Body, v, path, 0)
	return errors.Join(d.errs...)
}

// readEnviron takes VIV_POOL_SIZE for pool.size and so on.
func (c *Config) readEnviron(environ []string, where places) error {
	names := map[string]string{}
	for _, p := range Paths() {
		names["VIV_"+strings.ToUpper(strings.ReplaceAll(p, ".", "_"))] = p
	}
	var errs []error
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		if !strings.HasPrefix(name, "VIV_") {
			continue
		}
		path, ok := names[name]
		if !ok {
			if !slices.Contains(NotSettings, name) {
				errs = append(errs, sandbox.Invalid.Errorf("environment: %s: is not a setting", name))
			}
			continue
		}
		if err := c.set(path, value, "environment "+name, where); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Paths returns the path of every setting, in the order of the reference.
func Paths() []string {
	var out []string
	var walk func(t reflect.Type, path string)
	walk = func(t reflect.Type, path string) {
		for i := range t.NumField() {
			f := t.Field(i)
			p := join(path, f.Tag.Get("yaml"))
			if f.Type.Kind() == reflect.Struct {
				walk(f.Type, p)
			} else {
				out = append(out, p)
			}
		}
	}
	walk(reflect.TypeFor[Config](), "")
	return out
}
