// Command viv is the command line and the daemon of Vivarium.
package main

import (
	"context"
	"os"

	"vivarium/cli"
	"vivarium/daemon"
	"vivarium/version"
)

func main() {
	os.Exit(cli.Run(context.Background(), os.Args[1:], cli.Streams{
		In: os.Stdin, Out: os.Stdout, Err: os.Stderr, Getenv: os.Getenv, Environ: os.Environ(),
	}, cli.Hooks{
		Serve:         daemon.Run,
		ResetSecrets:  daemon.ResetSecrets,
		Version:       version.Version(),
		GVisorVersion: version.GVisor(),
	}))
}
