//go:build !amd64

package seccomp

import "gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"

// No program has been compiled for this architecture: gVisor compiles its rules
// at each start.
const forVersion = ""

func program() precompiledseccomp.Program { return precompiledseccomp.Program{} }
