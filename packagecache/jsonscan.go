package packagecache

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"
	"unicode/utf8"
)

// scanDepth is how deep the strings are that anybody asks for.
const scanDepth = 4

// eachString calls fn with every string value of a valid JSON text that is at
// most scanDepth deep: the keys (of arrays, the index) that lead to it, and where
// its token begins and ends. The rest is passed over, so that an index of many
// megabytes is neither decoded nor written anew. fn must not keep keys.
func eachString(data []byte, fn func(keys []string, start, end int)) {
	type frame struct {
		array bool
		n     int
	}
	var stack []frame
	var keys []string
	isKey := false
	for i := 0; i < len(data); i++ {
		switch data[i] {
		case '{':
			stack, keys, isKey = append(stack, frame{}), append(keys, ""), true
		case '[':
			stack, keys, isKey = append(stack, frame{array: true}), append(keys, "0"), false
		case '}', ']':
			stack, keys, isKey = stack[:len(stack)-1], keys[:len(keys)-1], false
		case ',':
			top := &stack[len(stack)-1]
			if isKey = !top.array; top.array {
				if top.n++; len(keys) <= scanDepth {
					keys[len(keys)-1] = strconv.Itoa(top.n)
				}
			}
		case ':':
			isKey = false
		case '"':
			end := stringEnd(data, i)
			if len(keys) <= scanDepth {
				if isKey {
					keys[len(keys)-1] = unquote(data[i:end])
				} else if len(keys) > 0 {
					fn(keys, i, end)
				}
			}
			i = end - 1
		}
	}
}

// stringEnd is the place after the string token at i.
func stringEnd(data []byte, i int) int {
	for j := i + 1; ; {
		k := bytes.IndexByte(data[j:], '"')
		if k < 0 {
			return len(data) // not valid JSON
		}
		j += k + 1
		n := 0
		for p := j - 2; p > i && data[p] == '\\'; p-- {
			n++
		}
		if n%2 == 0 {
			return j
		}
	}
}

// unquote is the value of a string token.
func unquote(tok []byte) string {
	if bytes.IndexByte(tok, '\\') < 0 && len(tok) >= 2 && utf8.Valid(tok) {
		return string(tok[1 : len(tok)-1])
	}
	var s string
	_ = json.Unmarshal(tok, &s) // a token of valid JSON
	return s
}

// patch is a part of a text to be replaced.
type patch struct {
	start, end int
	with       []byte
}

// apply makes the patches, which do not overlap.
func apply(data []byte, ps []patch) []byte {
	slices.SortFunc(ps, func(a, b patch) int { return a.start - b.start })
	n := len(data)
	for _, p := range ps {
		n += len(p.with) - (p.end - p.start)
	}
	out := make([]byte, 0, n)
	at := 0
	for _, p := range ps {
		out = append(append(out, data[at:p.start]...), p.with...)
		at = p.end
	}
	return append(out, data[at:]...)
}

// quote is a JSON string token. URLs keep their &.
func quote(s string) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(s) // strings always encode
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}
