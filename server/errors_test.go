package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"connectrpc.com/connect"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/sandbox"
)

// Every kind has a code of its own choice, and travels as a detail.
func TestErrorTable(t *testing.T) {
	t.Parallel()
	log := slog.New(slog.DiscardHandler)
	for _, k := range sandbox.Kinds {
		if _, ok := codes[k]; !ok {
			t.Errorf("kind %s is not in the table", k)
		}
		if k == sandbox.Internal {
			continue
		}
		err := Wire(t.Context(), log, fmt.Errorf("outer: %w", k.Errorf("what happened").WithHint("do this")))
		var ce *connect.Error
		if !errors.As(err, &ce) || ce.Code() != codes[k] {
			t.Errorf("%s became %v", k, err)
			continue
		}
		if kind, hint := detail(t, ce); kind != string(k) || hint != "do this" {
			t.Errorf("%s: detail is %q, %q", k, kind, hint)
		}
		if !strings.Contains(ce.Message(), "what happened") {
			t.Errorf("%s: message is %q", k, ce.Message())
		}
	}
	if len(codes) != len(sandbox.Kinds) {
		t.Errorf("the table has %d kinds, there are %d", len(codes), len(sandbox.Kinds))
	}
}

func detail(t *testing.T, ce *connect.Error) (kind, hint string) {
	t.Helper()
	if len(ce.Details()) != 1 {
		t.Fatalf("%v has %d details", ce, len(ce.Details()))
	}
	m, err := ce.Details()[0].Value()
	if err != nil {
		t.Fatal(err)
	}
	d := m.(*v1.ErrorDetail)
	return d.Kind, d.Hint
}

// An internal error leaves without its text and is logged with it.
func TestInternalErrorsDoNotLeak(t *testing.T) {
	t.Parallel()
	for _, err := range []error{
		errors.New("open /var/lib/vivarium/secret: permission denied"),
		sandbox.Internal.Errorf("open /var/lib/vivarium/secret"),
	} {
		var log strings.Builder
		ctx := WithCall(t.Context(), Call{ID: "01CALL"})
		out := Wire(ctx, slog.New(slog.NewTextHandler(&log, nil)), err)
		if connect.CodeOf(out) != connect.CodeInternal || strings.Contains(out.Error(), "secret") || !strings.Contains(out.Error(), "01CALL") {
			t.Errorf("left as %v", out)
		}
		if !strings.Contains(log.String(), "secret") || !strings.Contains(log.String(), "call=01CALL") {
			t.Errorf("log is %s", log.String())
		}
	}
}

func TestStopIsUnavailable(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(sandbox.Unavailable.Errorf("the daemon stops"))
	err := Wire(ctx, slog.New(slog.DiscardHandler), fmt.Errorf("read: %w", ctx.Err()))
	if connect.CodeOf(err) != connect.CodeUnavailable || !strings.Contains(err.Error(), "the daemon stops") {
		t.Errorf("got %v", err)
	}
}
