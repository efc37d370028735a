// Command viv-guest is the init of every sandbox: process 1 of its main
// container. It takes its configuration from the environment; see package
// agent.
package main

import (
	"os"

	"vivarium/guest/agent"
)

func main() {
	err := agent.Main() // for ever, unless something is wrong
	os.Stderr.WriteString("viv-guest: " + err.Error() + "\n")
	os.Exit(1)
}
