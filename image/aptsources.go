package image

import (
	"bufio"
	"bytes"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// aptSource is one repository in apt's terms (sources.list(5)).
type aptSource struct {
	URI        string
	Suites     []string
	Components []string
	SignedBy   string // path of a keyring, or an armored key of several lines
}

// distro is a distribution that a base image can be made of.
type distro struct {
	ID         string   // as in os-release(5)
	Origins    []string // as in its Release files
	Keyring    string   // package with the keys of its archive
	Components []string // of which packages may be taken, when the host has them
}

var distros = []distro{
	{"debian", []string{"Debian", "Debian Backports"}, "debian-archive-keyring", []string{"main"}},
	{"ubuntu", []string{"Ubuntu"}, "ubuntu-keyring", []string{"main", "universe"}},
}

// maxSources bounds a file of sources in bytes.
const maxSources = 1 << 20

// readSources reads the repositories that a host's apt uses, from etc
// (/etc/apt): sources.list and sources.list.d in both formats.
func readSources(etc string) ([]aptSource, error) {
	names, err := filepath.Glob(filepath.Join(etc, "sources.list.d", "*"))
	if err != nil {
		return nil, err
	}
	var out []aptSource
	for _, n := range append([]string{filepath.Join(etc, "sources.list")}, names...) {
		fi, err := os.Stat(n)
		if err != nil || !fi.Mode().IsRegular() || fi.Size() > maxSources {
			continue
		}
		b, err := os.ReadFile(n)
		if err != nil {
			return nil, err
		}
		switch filepath.Ext(n) {
		case ".list":
			out = append(out, parseOneLine(b)...)
		case ".sources":
			out = append(out, parseDeb822(b)...)
		}
	}
	return out, nil
}

// parseOneLine reads the one-line format: deb [options] uri suite component…
func parseOneLine(b []byte) []aptSource {
	var out []aptSource
	for line := range strings.Lines(string(b)) {
		line, _, _ = strings.Cut(line, "#")
		rest, ok := strings.CutPrefix(strings.TrimSpace(line), "deb")
		if !ok || rest == strings.TrimLeft(rest, " \t[") {
			continue // deb-src, or nothing
		}
		var s aptSource
		rest = strings.TrimSpace(rest)
		if strings.HasPrefix(rest, "[") {
			opts, after, ok := strings.Cut(rest[1:], "]")
			if !ok {
				continue
			}
			for _, o := range strings.Fields(opts) {
				if v, ok := strings.CutPrefix(o, "signed-by="); ok {
					s.SignedBy = v
				}
			}
			rest = after
		}
		f := strings.Fields(rest)
		if len(f) < 3 {
			continue
		}
		s.URI, s.Suites, s.Components = f[0], f[1:2], f[2:]
		out = append(out, s)
	}
	return out
}

// parseDeb822 reads the stanza format.
func parseDeb822(b []byte) []aptSource {
	var out []aptSource
	stanza := map[string]string{}
	flush := func() {
		if slices.Contains(strings.Fields(stanza["types"]), "deb") && !strings.EqualFold(stanza["enabled"], "no") {
			for _, uri := range strings.Fields(stanza["uris"]) {
				out = append(out, aptSource{uri, strings.Fields(stanza["suites"]), strings.Fields(stanza["components"]), strings.TrimSpace(stanza["signed-by"])})
			}
		}
		stanza = map[string]string{}
	}
	key := ""
	sc := bufio.NewScanner(bytes.NewReader(b))
	sc.Buffer(nil, maxSources)
	for sc.Scan() {
		line := sc.Text()
		switch {
		case strings.HasPrefix(line, "#"):
		case strings.TrimSpace(line) == "":
			flush()
		case line[0] == ' ' || line[0] == '\t':
			stanza[key] += "\n" + line
		default:
			k, v, _ := strings.Cut(line, ":")
			key = strings.ToLower(strings.TrimSpace(k))
			stanza[key] = strings.TrimSpace(v)
		}
	}
	flush()
	return out
}

// distroSources keeps what belongs to the distribution itself, restricted to
// one release and to components that hold free packages, and names the release
// asked for in place of the host's. Repositories of others are left out: the
// base image is to be the distribution's, whatever else the host uses.
func distroSources(all []aptSource, d distro, hostSuite, suite, lists string) []aptSource {
	var out []aptSource
	for _, s := range all {
		u, err := url.Parse(s.URI)
		if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.User != nil {
			continue // not reachable from inside, or with a password in it
		}
		k := aptSource{URI: strings.TrimSuffix(s.URI, "/"), SignedBy: s.SignedBy}
		for _, x := range s.Suites {
			base, pocket, _ := strings.Cut(x, "-")
			// Backports hold other versions; they are for who asks for them.
			if base == hostSuite && slices.Contains([]string{"", "updates", "security"}, pocket) && ours(s, x, d, u, lists) {
				k.Suites = append(k.Suites, strings.Replace(x, hostSuite, suite, 1))
			}
		}
		for _, c := range s.Components {
			if slices.Contains(d.Components, c) {
				k.Components = append(k.Components, c)
			}
		}
		if len(k.Suites) > 0 && len(k.Components) > 0 {
			out = append(out, k)
		}
	}
	return out
}

// ours reports whether a suite is the distribution's own: by the origin in the
// release file that apt fetched, else by the keyring that signs it, else by
// the path that mirrors use.
func ours(s aptSource, suite string, d distro, u *url.URL, lists string) bool {
	if origin := releaseOrigin(u, suite, lists); origin != "" {
		return slices.Contains(d.Origins, origin)
	}
	if s.SignedBy != "" && !strings.Contains(s.SignedBy, "\n") {
		return strings.Contains(filepath.Base(s.SignedBy), d.ID+"-archive-keyring")
	}
	last := filepath.Base(strings.TrimSuffix(u.Path, "/"))
	return last == d.ID || strings.HasPrefix(last, d.ID+"-")
}

// releaseOrigin returns the Origin field of a suite's release file as apt keeps
// it, or "".
func releaseOrigin(u *url.URL, suite, lists string) string {
	name := strings.ReplaceAll(strings.TrimSuffix(u.Host+u.Path, "/")+"/dists/"+suite+"/", "/", "_")
	for _, suffix := range []string{"InRelease", "Release"} {
		f, err := os.Open(filepath.Join(lists, name+suffix))
		if err != nil {
			continue
		}
		defer f.Close()
		sc := bufio.NewScanner(f)
		for n := 0; n < 64 && sc.Scan(); n++ {
			if v, ok := strings.CutPrefix(sc.Text(), "Origin:"); ok {
				return strings.TrimSpace(v)
			}
		}
	}
	return ""
}

// formatDeb822 writes sources as a .sources file.
func formatDeb822(list []aptSource) []byte {
	var b bytes.Buffer
	for i, s := range list {
		if i > 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "Types: deb\nURIs: %s\nSuites: %s\nComponents: %s\n", s.URI, strings.Join(s.Suites, " "), strings.Join(s.Components, " "))
		switch {
		case strings.Contains(s.SignedBy, "\n"):
			fmt.Fprintf(&b, "Signed-By:\n %s\n", strings.TrimSpace(s.SignedBy))
		case s.SignedBy != "":
			fmt.Fprintf(&b, "Signed-By: %s\n", s.SignedBy)
		}
	}
	return b.Bytes()
}
