package secret

import (
	"strings"

	"vivarium/sandbox"
)

// template is a header's value with secrets in it: ${NAME} is a secret, $$ is a
// dollar sign, and a dollar sign before anything else is itself.
type template []part

type part struct {
	text string // if name is empty
	name string
}

func parseTemplate(s string) (template, error) {
	var t template
	var text strings.Builder
	flush := func() {
		if text.Len() > 0 {
			t = append(t, part{text: text.String()})
			text.Reset()
		}
	}
	for s != "" {
		i := strings.IndexByte(s, '$')
		if i < 0 {
			i = len(s)
		}
		text.WriteString(s[:i])
		s = s[i:]
		switch {
		case strings.HasPrefix(s, "$$"):
			text.WriteByte('$')
			s = s[2:]
		case strings.HasPrefix(s, "${"):
			name, rest, ok := strings.Cut(s[2:], "}")
			if !ok || !variable(name) {
				return nil, sandbox.Invalid.Errorf("want ${NAME} with a secret's name, or $$ for a dollar sign")
			}
			flush()
			t = append(t, part{name: name})
			s = rest
		case s != "":
			text.WriteByte('$')
			s = s[1:]
		}
	}
	flush()
	return t, nil
}

// names are the secrets in it.
func (t template) names() []string {
	var all []string
	for _, p := range t {
		if p.name != "" {
			all = append(all, p.name)
		}
	}
	return all
}

// expand puts values in. False: there is none for a name.
func (t template) expand(value func(name string) (string, bool)) (string, bool) {
	var b strings.Builder
	for _, p := range t {
		s := p.text
		if p.name != "" {
			var ok bool
			if s, ok = value(p.name); !ok {
				return "", false
			}
		}
		b.WriteString(s)
	}
	return b.String(), true
}
