package cli

import (
	"context"
	"io"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/term"
)

// terminal returns the file descriptor of a stream that is a terminal.
func terminal(stream any) (*os.File, bool) {
	f, ok := stream.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return nil, false
	}
	return f, true
}

// rawTerminal is the terminal of -t while a command has it.
type rawTerminal struct {
	in    *os.File // nil: standard input is no terminal
	size  *os.File // whose size counts; nil for none
	state *term.State
}

// newTerminal finds the terminal of the streams.
func (a *app) newTerminal() *rawTerminal {
	t := &rawTerminal{}
	if f, ok := terminal(a.In); ok {
		t.in, t.size = f, f
	}
	if f, ok := terminal(a.Out); ok {
		t.size = f
	}
	return t
}

// dimensions are those of the terminal, or the classic ones.
func (t *rawTerminal) dimensions() (rows, cols uint32) {
	if t.size != nil {
		if c, r, err := term.GetSize(int(t.size.Fd())); err == nil && r > 0 && c > 0 {
			return uint32(r), uint32(c)
		}
	}
	return 24, 80
}

// raw passes every key on as it is: Ctrl-C and Ctrl-D are for the terminal
// inside. Restore must be deferred, so that a panic leaves a usable terminal.
func (t *rawTerminal) raw() error {
	if t.in == nil {
		return nil
	}
	var err error
	t.state, err = term.MakeRaw(int(t.in.Fd()))
	return err
}

func (t *rawTerminal) restore() {
	if t.state != nil {
		_ = term.Restore(int(t.in.Fd()), t.state)
		t.state = nil
	}
}

// watchSize calls resize with the terminal's size now and after every change,
// until ctx ends.
func (t *rawTerminal) watchSize(ctx context.Context, resize func(rows, cols uint32)) {
	if t.size == nil {
		return
	}
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, syscall.SIGWINCH)
	go func() {
		defer signal.Stop(ch)
		for {
			resize(t.dimensions())
			select {
			case <-ch:
			case <-ctx.Done():
				return
			}
		}
	}()
}

// forwarded are the signals that run and exec pass on to the command.
var forwarded = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2}

// watchSignals calls fn with every signal that is to be passed on, until ctx
// ends; from then on they do what they do by default again.
func watchSignals(ctx context.Context, fn func(syscall.Signal)) {
	ch := make(chan os.Signal, 16)
	signal.Notify(ch, forwarded...)
	go func() {
		defer signal.Stop(ch)
		for {
			select {
			case s := <-ch:
				fn(s.(syscall.Signal))
			case <-ctx.Done():
				return
			}
		}
	}()
}

// readerIf is r if on, else no reader at all.
func readerIf(on bool, r io.Reader) io.Reader {
	if !on {
		return nil
	}
	return r
}
