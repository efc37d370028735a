// Command viv-start becomes a sentry; package launch says how, and why it is a
// program of its own. It is embedded in viv.
package main

import "vivarium/runtime/gvisor/launch"

func main() { launch.Main() }
