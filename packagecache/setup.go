package packagecache

import (
	"io/fs"
	"net/netip"
	"strings"
)

// File is to be put into a sandbox.
type File struct {
	// Path is absolute. Write it only where its folder is there already: the image
	// has no such tool otherwise.
	Path string
	Mode fs.FileMode
	Data []byte
}

// Setup is what makes the tools of a sandbox use the cache at base: variables
// for every command, and files. What the image or the user sets goes before it.
// A kind without an upstream is left alone.
func (c *Cache) Setup(base netip.AddrPort) (env map[string]string, files []File) {
	env = map[string]string{}
	root := "http://" + base.String()
	if len(c.up[Go]) > 0 {
		env["GOPROXY"] = root + "/go"
		if c.cfg.GoDirect {
			env["GOPROXY"] += ",direct"
		}
		// GOSUMDB stays: the go command asks for the database through the proxy.
	}
	if len(c.up[NPM]) > 0 {
		env["NPM_CONFIG_REGISTRY"] = root + "/npm/"
		// Without it npm writes our address into the project's lock file.
		env["NPM_CONFIG_OMIT_LOCKFILE_REGISTRY_RESOLVED"] = "true"
	}
	if len(c.up[PyPI]) > 0 {
		env["PIP_INDEX_URL"] = root + "/pypi/simple/"
		env["PIP_TRUSTED_HOST"] = base.String()
		// Not UV_DEFAULT_INDEX: uv takes the index's address for a part of the
		// project. It would write ours into uv.lock, and refuse (--locked) one that
		// has another.
	}
	if hosts := c.debianHosts(); len(hosts) > 0 {
		var b strings.Builder
		b.WriteString("// Written by Vivarium: packages of these mirrors come through its cache.\n")
		for _, h := range hosts {
			b.WriteString("Acquire::http::Proxy::" + h + " \"" + root + "/\";\n")
		}
		files = append(files, File{Path: "/etc/apt/apt.conf.d/95vivarium", Mode: 0o644, Data: []byte(b.String())})
	}
	return env, files
}
