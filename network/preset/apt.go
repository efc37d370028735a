package preset

import (
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// apt reads sources.list(5), in both of its forms, and the proxies of
// apt.conf(5).
func (r *reader) apt() {
	if s, ok := r.file(Debian, "etc/apt/sources.list"); ok {
		r.aptLines(s)
	}
	for _, p := range r.dir("etc/apt/sources.list.d") {
		s, ok := r.file(Debian, p)
		switch {
		case !ok:
		case strings.HasSuffix(p, ".list"):
			r.aptLines(s)
		case strings.HasSuffix(p, ".sources"):
			r.aptStanzas(s)
		}
	}
	var conf []string
	for _, p := range append(r.dir("etc/apt/apt.conf.d"), "etc/apt/apt.conf") {
		if name := filepath.Base(p); strings.Contains(name, ".") && !strings.HasSuffix(name, ".conf") {
			continue // as apt does
		}
		if s, ok := r.file(Debian, p); ok {
			conf = append(conf, s)
		}
	}
	for _, s := range conf {
		for _, kv := range aptConf(s) {
			r.aptProxy(kv[0], kv[1])
		}
	}
	for _, v := range []string{"http_proxy", "https_proxy"} {
		if p := r.getenv(v, false); p != "" {
			r.proxy(Debian, "apt", p)
		}
	}
}

// dir lists a folder's files as paths from the root.
func (r *reader) dir(p string) []string {
	es, err := os.ReadDir(filepath.Join(r.root, p))
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range es[:min(len(es), 1000)] {
		out = append(out, filepath.Join(p, e.Name()))
	}
	return out
}

// aptLines reads the form of a line: type [options] uri suite components.
func (r *reader) aptLines(s string) {
	for line := range strings.Lines(s) {
		line, _, _ = strings.Cut(line, "#")
		typ, rest, _ := strings.Cut(strings.Join(strings.Fields(line), " "), " ")
		if typ != "deb" && typ != "deb-src" {
			continue
		}
		if strings.HasPrefix(rest, "[") {
			_, after, ok := strings.Cut(rest, "]")
			if !ok {
				continue
			}
			rest = strings.TrimSpace(after)
		}
		uri, _, _ := strings.Cut(rest, " ")
		r.aptURI(uri)
	}
}

// aptStanzas reads the deb822 form.
func (r *reader) aptStanzas(s string) {
	fields, last := map[string]string{}, ""
	flush := func() {
		if e := strings.ToLower(strings.TrimSpace(fields["enabled"])); e != "no" && e != "false" && e != "off" && e != "0" {
			for uri := range strings.FieldsSeq(fields["uris"]) {
				r.aptURI(uri)
			}
		}
		fields, last = map[string]string{}, ""
	}
	for line := range strings.Lines(s) {
		line = strings.TrimRight(line, "\r\n")
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.TrimSpace(line) == "":
			flush()
		case line[0] == ' ' || line[0] == '\t':
			fields[last] += "\n" + line
		default:
			k, v, _ := strings.Cut(line, ":")
			last = strings.ToLower(k)
			fields[last] = v
		}
	}
	flush()
}

func (r *reader) aptURI(uri string) {
	scheme, _, _ := strings.Cut(uri, ":")
	switch {
	case uri == "", scheme == "cdrom", scheme == "file", scheme == "copy":
		return // nothing of a network
	case strings.Contains(uri, "$("):
		r.warn(Debian, "a source has a variable in its address and is left out: put it in by hand")
		return
	case scheme != "http" && scheme != "https":
		r.warn(Debian, "a source has the transport %s and is left out", scheme)
		return
	}
	r.registry(Debian, uri)
}

func (r *reader) aptProxy(key, value string) {
	parts := strings.Split(strings.ToLower(key), "::")
	if len(parts) < 3 || parts[0] != "acquire" || parts[1] != "http" && parts[1] != "https" {
		return
	}
	switch {
	case slices.Contains([]string{"proxy-auto-detect", "proxyautodetect"}, parts[2]):
		r.warn(Debian, "apt looks for a proxy with a program (%s): sandboxes do not", key)
	case parts[2] == "proxy" && !strings.EqualFold(value, "DIRECT"):
		r.proxy(Debian, "apt", value)
	}
}

// proxy warns of a proxy that the host uses.
func (r *reader) proxy(preset, tool, value string) {
	if !strings.Contains(value, "://") {
		value = "http://" + value
	}
	u, err := url.Parse(value)
	if err != nil || u.Host == "" {
		if value != "http://" {
			r.warn(preset, "%s has a proxy that is not a URL", tool)
		}
		return
	}
	r.warn(preset, "%s goes through the proxy at %s here: sandboxes and the cache do so only if network.upstreams has it", tool, u.Host)
}

// aptConf reads apt.conf(5) into full names and values.
func aptConf(s string) [][2]string {
	var out [][2]string
	var scope []string
	var words []string
	set := func() {
		if len(words) >= 2 {
			out = append(out, [2]string{strings.Join(append(slices.Clone(scope), words[0]), "::"), words[1]})
		}
		words = nil
	}
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case strings.HasPrefix(s[i:], "//"), c == '#':
			for i < len(s) && s[i] != '\n' {
				i++
			}
		case strings.HasPrefix(s[i:], "/*"):
			n := strings.Index(s[i+2:], "*/")
			if n < 0 {
				return out
			}
			i += n + 3
		case c == '"':
			n := strings.IndexByte(s[i+1:], '"')
			if n < 0 {
				return out
			}
			words = append(words, s[i+1:i+1+n])
			i += n + 1
		case c == '{':
			name := ""
			if len(words) > 0 {
				name = words[0]
			}
			scope, words = append(scope, name), nil
		case c == '}':
			set()
			if len(scope) > 0 {
				scope = scope[:len(scope)-1]
			}
		case c == ';':
			set()
		case c <= ' ':
		default:
			j := i
			for j < len(s) && s[j] > ' ' && !strings.ContainsRune(`{};"`, rune(s[j])) {
				j++
			}
			words = append(words, s[i:j])
			i = j - 1
		}
	}
	return out
}
