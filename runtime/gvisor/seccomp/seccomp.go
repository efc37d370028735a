// Package seccomp holds the sentry's own seccomp filter as gVisor compiles it.
//
// gVisor's release has such programs built in; its Go module has not, and there
// the sentry compiles its rules at every start, which is some 10 ms of CPU, an
// eighth of a boot. The program here is the output of the same compiler for the
// same rules: a test compiles them again and compares, and the sentry of another
// version of gVisor does not use it. One of the rules has the process id of the
// sentry, which is always 1, so it is not a variable of the program.
package seccomp

import (
	"os"
	_ "unsafe" // for go:linkname

	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	"gvisor.dev/gvisor/runsc/boot/filter"
	"gvisor.dev/gvisor/runsc/version"
)

//go:generate go run ./gen

// programs is where gVisor looks for what was compiled for its options, by name.
// It offers no way to add to it.
//
//go:linkname programs gvisor.dev/gvisor/runsc/boot/filter.precompiledPrograms
var programs map[string]precompiledseccomp.Program

// Use makes the sentry that starts in this process install the program, if it is
// for the gVisor version that is linked here, and gVisor asks for the options that
// it was compiled for. It says whether it may be used.
func Use() bool {
	if forVersion == "" || version.Version() != forVersion || os.Getpid() != 1 {
		return false
	}
	add()
	return true
}

func add() {
	p := program()
	filter.GetPrecompiled(p.Name) // has gVisor fill its map, which it does once
	programs[p.Name] = p
}
