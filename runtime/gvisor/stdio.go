package gvisor

import (
	"flag"
	"os"

	"golang.org/x/sys/unix"
	gflag "gvisor.dev/gvisor/runsc/flag"

	"vivarium/sandbox"
)

func newFlagSet() *gflag.FlagSet { return gflag.NewFlagSet("viv", flag.ContinueOnError) }

// detachStdio puts the sink in the place of this process's standard files.
// Whoever wants to print or log while a Runtime is open keeps its own handle of
// them from before.
func detachStdio() error {
	stdio.Lock()
	defer stdio.Unlock()
	if stdio.users == 0 {
		fd, err := unix.MemfdCreate("viv-stdio", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			return sandbox.Unsupported.Errorf("make a memory file: %w", err)
		}
		stdio.sink = os.NewFile(uintptr(fd), "viv-stdio")
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK|unix.F_SEAL_SEAL); err != nil {
			stdio.sink.Close()
			return sandbox.Unsupported.Errorf("seal a memory file: %w", err)
		}
		stdio.saved = [3]*os.File{os.Stdin, os.Stdout, os.Stderr}
		os.Stdin, os.Stdout, os.Stderr = stdio.sink, stdio.sink, stdio.sink
	}
	stdio.users++
	return nil
}

func attachStdio() {
	stdio.Lock()
	defer stdio.Unlock()
	if stdio.users--; stdio.users == 0 {
		os.Stdin, os.Stdout, os.Stderr = stdio.saved[0], stdio.saved[1], stdio.saved[2]
		stdio.sink.Close()
	}
}

// sink is the empty file, for the standard files of a sub-container.
func sink() *os.File {
	stdio.Lock()
	defer stdio.Unlock()
	return stdio.sink
}
