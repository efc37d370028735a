package preset

import (
	"net/url"
	"path/filepath"
	"strings"
)

// ini reads lines of key=value; section is "" before the first header. Lines
// that begin with white space go on with the value before.
func ini(s string, fn func(section, key, value string)) {
	section, key, value := "", "", ""
	flush := func() {
		if key != "" {
			fn(section, key, strings.TrimSpace(value))
		}
		key, value = "", ""
	}
	for line := range strings.Lines(s) {
		t := strings.TrimSpace(line)
		switch {
		case t == "" || t[0] == '#' || t[0] == ';':
		case (line[0] == ' ' || line[0] == '\t') && key != "":
			value += "\n" + t
		case t[0] == '[':
			flush()
			section = strings.ToLower(strings.Trim(t, "[]"))
		default:
			flush()
			k, v, ok := strings.Cut(t, "=")
			if !ok {
				k, v, _ = strings.Cut(t, ":")
			}
			key, value = strings.TrimSpace(k), v
		}
	}
	flush()
}

// npm reads npmrc(5): the variable, the user's file, the global one, and npm
// itself for what is set nowhere. Registries of scopes are others.
func (r *reader) npm() {
	registry := ""
	user := r.getenv("npm_config_userconfig", true)
	if user == "" && r.home != "" {
		user = filepath.Join(r.home, ".npmrc")
	}
	files := []string{"etc/npmrc", "usr/etc/npmrc", "usr/local/etc/npmrc", r.getenv("npm_config_globalconfig", true), user}
	var scopes []string
	for _, p := range files { // later over earlier
		if p == "" {
			continue
		}
		s, ok := r.file(NPM, p)
		if !ok {
			continue
		}
		ini(s, func(_, k, v string) {
			v = strings.Trim(r.expand(v), `"'`)
			switch {
			case k == "registry":
				registry = v
			case strings.HasPrefix(k, "@") && strings.HasSuffix(k, ":registry"):
				scopes = append(scopes, v)
			case (k == "proxy" || k == "https-proxy") && v != "" && v != "null":
				r.proxy(NPM, "npm", v)
			}
		})
	}
	if v := r.getenv("npm_config_registry", true); v != "" {
		registry = v
	}
	if registry == "" {
		registry, _ = r.ask([]string{"NPM_CONFIG_UPDATE_NOTIFIER=false", "NPM_CONFIG_OFFLINE=true"}, "npm", "config", "get", "registry")
	}
	if registry != "" && registry != "undefined" {
		r.registry(NPM, registry)
	}
	for _, s := range scopes {
		r.registry(NPM, s)
	}
}

// expand puts variables into a value, as npm does with ${NAME}.
func (r *reader) expand(s string) string {
	var b strings.Builder
	for {
		before, rest, ok := strings.Cut(s, "${")
		name, after, ok2 := strings.Cut(rest, "}")
		if !ok || !ok2 {
			return b.String() + s
		}
		b.WriteString(before + r.getenv(name, false))
		s = after
	}
}

// pip reads pip's files and variables, and uv's variables, and asks pip for its
// own index if neither says another.
func (r *reader) pip() {
	index, proxy := "", ""
	var extra []string
	files := []string{"etc/pip.conf"}
	for d := range strings.SplitSeq(r.getenv("XDG_CONFIG_DIRS", false), ":") {
		if d == "" {
			d = "/etc/xdg"
		}
		files = append(files, filepath.Join(d, "pip/pip.conf"))
	}
	if r.home != "" {
		files = append(files, filepath.Join(r.home, ".pip/pip.conf"))
		conf := r.getenv("XDG_CONFIG_HOME", false)
		if conf == "" {
			conf = filepath.Join(r.home, ".config")
		}
		files = append(files, filepath.Join(conf, "pip/pip.conf"))
	}
	if v := r.getenv("VIRTUAL_ENV", false); v != "" {
		files = append(files, filepath.Join(v, "pip.conf"))
	}
	if v := r.getenv("PIP_CONFIG_FILE", false); v != "" {
		files = append(files, v)
	}
	for _, p := range files {
		s, ok := r.file(PyPI, p)
		if !ok || p == "/dev/null" {
			continue
		}
		ini(s, func(section, k, v string) {
			if section != "global" && section != "install" && section != "download" {
				return
			}
			switch strings.ReplaceAll(k, "_", "-") {
			case "index-url":
				index = v
			case "extra-index-url":
				extra = append(extra, strings.Fields(v)...)
			case "proxy":
				proxy = v
			}
		})
	}
	for name, v := range map[string]*string{"PIP_INDEX_URL": &index, "PIP_PROXY": &proxy} {
		if s := r.getenv(name, false); s != "" {
			*v = s
		}
	}
	for _, name := range []string{"PIP_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL", "UV_INDEX", "UV_EXTRA_INDEX_URL"} {
		for f := range strings.FieldsSeq(r.getenv(name, false)) {
			if n, u, ok := strings.Cut(f, "="); ok && !strings.Contains(n, ":") {
				f = u // uv's name=url
			}
			extra = append(extra, f)
		}
	}
	if proxy != "" {
		r.proxy(PyPI, "pip", proxy)
	}
	// What pip has built in, in an isolated interpreter so that no module of a
	// folder is taken for it.
	own, ok := r.ask(nil, "python3", "-I", "-c", "from pip._internal.models.index import PyPI as p; print(p.simple_url, p.file_storage_domain)")
	ownIndex, ownFiles, _ := strings.Cut(own, " ")
	if !ok || strings.ContainsAny(own, "\n\t") {
		ownIndex, ownFiles = "", ""
	}
	if index == "" {
		index = ownIndex
	}
	for _, raw := range append([]string{index}, extra...) {
		if raw == "" {
			continue
		}
		up := r.registry(PyPI, raw)
		if up == nil {
			continue
		}
		if up.URL == strings.TrimRight(ownIndex, "/") && ownFiles != "" {
			if r.rule(PyPI, ownFiles, "443") && len(up.Also) == 0 {
				up.Also = []string{ownFiles}
			}
		} else if u, err := url.Parse(raw); err == nil {
			r.warn(PyPI, "if the index at %s keeps its files at another host, that has to be added, to the rules and to the upstream's also", u.Hostname())
		}
	}
}

// golang reads the go command's variables: from the environment, the user's
// file, the toolchain's file, or the go command.
func (r *reader) golang() {
	vars := map[string]string{}
	if out, ok := r.ask([]string{"GOTOOLCHAIN=local", "GOFLAGS=", "GOWORK=off"}, "go", "env", "GOPROXY", "GOSUMDB"); ok {
		proxy, sumdb, _ := strings.Cut(out, "\n")
		vars["GOPROXY"], vars["GOSUMDB"] = strings.TrimSpace(proxy), strings.TrimSpace(sumdb)
	} else {
		files := []string{"usr/local/go/go.env", "usr/lib/go/go.env"}
		if root := r.getenv("GOROOT", false); root != "" {
			files = append(files, filepath.Join(root, "go.env"))
		}
		if f := r.getenv("GOENV", false); f != "" {
			files = append(files, f)
		} else if r.home != "" {
			files = append(files, filepath.Join(r.home, ".config/go/env"))
		}
		for _, p := range files {
			if p == "off" {
				continue
			}
			if s, ok := r.file(Go, p); ok {
				ini(s, func(_, k, v string) { vars[k] = v })
			}
		}
		for _, k := range []string{"GOPROXY", "GOSUMDB"} {
			if v := r.getenv(k, false); v != "" {
				vars[k] = v
			}
		}
	}
	for p := range strings.FieldsFuncSeq(vars["GOPROXY"], func(c rune) bool { return c == ',' || c == '|' }) {
		switch p = strings.TrimSpace(p); p {
		case "", "off":
		case "direct":
			r.out.GoDirect = true
			r.warn(Go, "modules that no proxy has are fetched from where they come from (direct), whose hosts no preset can know")
		default:
			r.registry(Go, p)
		}
	}
	if f := strings.Fields(vars["GOSUMDB"]); len(f) > 0 && f[0] != "off" && len(r.out.Presets[Go]) > 0 {
		name, _, _ := strings.Cut(f[0], "+") // name+hash+key
		if len(f) > 1 {                      // where it is, if not at its name
			if u, err := url.Parse(f[1]); err == nil && u.Host != "" {
				r.rule(Go, u.Hostname(), port(u))
				return
			}
		}
		host, _, _ := strings.Cut(name, "/")
		r.rule(Go, host, "443")
	}
}
