// Package version tells what was built. Its values come from the linker; a
// build without them says so.
package version

import "runtime/debug"

// version is set with -ldflags "-X vivarium/version.version=...".
var version string

const gvisorModule = "gvisor.dev/gvisor"

// Version is that of this program: a tag or commit, or "dev".
func Version() string {
	if version != "" {
		return version
	}
	if bi, ok := debug.ReadBuildInfo(); ok {
		for _, s := range bi.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				return "dev-" + s.Value[:12]
			}
		}
	}
	return "dev"
}

// GVisor is the version of the gVisor library inside, as in go.mod, or "unknown".
func GVisor() string {
	bi, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, d := range bi.Deps {
		if d.Path == gvisorModule {
			return d.Version
		}
	}
	return "unknown"
}
