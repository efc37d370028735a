// Command viv-sentry is the sentry itself, which viv-start becomes. It is a
// binary of its own, embedded in viv, because starting it is paid for at every
// boot of a sandbox and a binary with nothing else in it starts in half the
// time. It is kept, per version, for as long as a sandbox of that version
// lives.
//
// With the argument "spawn" it is the helper that starts sentries. With the
// argument "forward" it opens one connection into a running
// sandbox of its own version and hands it back: this is how a daemon of a newer
// version reaches sandboxes that an older one started.
package main

import (
	"fmt"
	"os"

	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"

	"vivarium/runtime/gvisor/forward"
	"vivarium/runtime/gvisor/seccomp"
	"vivarium/runtime/gvisor/spawn"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == forward.Verb {
		if err := forward.Main(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if len(os.Args) == 3 && os.Args[1] == spawn.Verb {
		if err := spawn.Main(os.Args[2]); err != nil {
			os.Exit(1) // the daemon sees the connection close
		}
		return
	}
	os.Args = spawn.SentryArgs(os.Args)
	seccomp.Use()
	quick()
	cli.Run(nil, map[util.SubCommand]string{
		new(sentrycmd.Boot): "",
		new(cmd.Gofer):      "",
	}, nil)
}
