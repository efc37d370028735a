package secret

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"html"
	"net/url"
	"strings"
)

// pattern is what to look for in a response, and what to put there.
type pattern struct{ find, put string }

// forms are the ways in which servers write a value: as it is, escaped for URLs,
// JSON and HTML, in hexadecimal and in base64 (either alphabet, at each of the
// three offsets it can have within something longer, such as Basic credentials).
func forms(value, put string) []pattern {
	if len(value) < minScrub {
		return nil
	}
	seen := map[string]bool{}
	var out []pattern
	add := func(s string) {
		if len(s) >= minScrub && !seen[s] {
			seen[s] = true
			out = append(out, pattern{s, put})
		}
	}
	add(value)
	for _, s := range []string{url.QueryEscape(value), url.PathEscape(value)} {
		add(s)
		add(lowerEscapes(s))
	}
	if b, err := json.Marshal(value); err == nil {
		s := string(b[1 : len(b)-1])
		add(s)
		add(strings.ReplaceAll(s, "/", `\/`))
	}
	add(strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(value)) // JSON, not for HTML
	add(html.EscapeString(value))
	h := hex.EncodeToString([]byte(value))
	add(h)
	add(strings.ToUpper(h))
	for _, e := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
		add(e.EncodeToString([]byte(value)))
		for offset := range 3 {
			// The digits that depend on the value alone: those all of whose 6 bits
			// are within it.
			s := e.EncodeToString(append(make([]byte, offset), value...))
			add(s[(8*offset+5)/6 : 8*(offset+len(value))/6])
		}
	}
	return out
}

// lowerEscapes writes percent escapes with lower-case digits.
func lowerEscapes(s string) string {
	b := []byte(s)
	for i := 0; i+2 < len(b); i++ {
		if b[i] == '%' {
			copy(b[i+1:], strings.ToLower(string(b[i+1:i+3])))
			i += 2
		}
	}
	return string(b)
}
