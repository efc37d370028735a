// Command recovery measures how long sandboxes are out of reach when the daemon
// is killed and started again. It starts, kills and stops a daemon of its own,
// which is why it is not a verb of viv.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"vivarium/bench"
)

func main() {
	o := bench.RecoveryOptions{Err: os.Stderr}
	flag.StringVar(&o.Viv, "viv", "bin/viv", "the program")
	flag.StringVar(&o.DataDir, "data-dir", "", "data directory, with the image in it and no daemon on it")
	flag.StringVar(&o.Listen, "listen", "127.0.0.1:7879", "where the daemon shall listen")
	flag.StringVar(&o.Image, "image", "base", "image to use")
	flag.IntVar(&o.N, "n", 500, "how many sandboxes")
	asJSON := flag.Bool("json", false, "print one JSON object")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	res, err := bench.Recovery(ctx, o)
	if err == nil && *asJSON {
		err = res.WriteJSON(os.Stdout)
	} else if err == nil {
		err = res.WriteText(os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "recovery:", err)
		stop()
		os.Exit(1)
	}
}
