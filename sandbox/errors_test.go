package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
)

func TestErrorf(t *testing.T) {
	t.Parallel()
	one := NotFound.Errorf("open %s: %w", "x", io.EOF)
	two := Timeout.Errorf("start: %w: %w", io.ErrClosedPipe, context.DeadlineExceeded)
	for _, c := range []struct {
		err  error
		is   []error
		text string
	}{
		{one, []error{NotFound, io.EOF}, "open x: EOF"},
		{two, []error{Timeout, io.ErrClosedPipe, context.DeadlineExceeded}, "start: io: read/write on closed pipe: context deadline exceeded"},
		{Invalid.Errorf("plain"), []error{Invalid}, "plain"},
		{fmt.Errorf("further out: %w", one), []error{NotFound, io.EOF}, "further out: open x: EOF"},
	} {
		if c.err.Error() != c.text {
			t.Errorf("text %q, want %q", c.err.Error(), c.text)
		}
		for _, target := range c.is {
			if !errors.Is(c.err, target) {
				t.Errorf("%v is not %v", c.err, target)
			}
		}
		if KindOf(c.err) != c.is[0] {
			t.Errorf("kind of %v: %v", c.err, KindOf(c.err))
		}
	}
}

func TestKindOf(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]Kind{
		nil:                      "",
		context.DeadlineExceeded: Timeout,
		context.Canceled:         Unavailable,
		io.EOF:                   Internal,
		Denied:                   Denied,
		// the outermost decides
		Conflict.Errorf("x: %w", Gone.Errorf("y")): Conflict,
	} {
		if got := KindOf(err); got != want {
			t.Errorf("KindOf(%v) = %q, want %q", err, got, want)
		}
	}
	if h := HintOf(fmt.Errorf("x: %w", Conflict.Errorf("y: %w", Gone.Errorf("z").WithHint("do %s", "this")))); h != "do this" {
		t.Errorf("hint %q", h)
	}
}
