// Package preset reads where the host's own package tools get their packages:
// apt, npm, pip (and uv) and Go. From that it makes lists of rules, one for each
// tool, for the configuration's network.presets, and the upstreams of the package
// cache. So no host name has to be built in.
//
// It reads files and variables, and asks an installed tool for its setting where
// that is a default of the tool itself (npm config get, go env, and pip's own
// constants). None of this uses the network. Passwords are never part of what it
// returns.
package preset
