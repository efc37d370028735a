package client

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"

	"connectrpc.com/connect"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/sandbox"
)

// kinds is for errors that the protocol itself made (a message
// too large, a deadline) and that carry no ErrorDetail.
var kinds = map[connect.Code]sandbox.Kind{
	connect.CodeCanceled:           sandbox.Unavailable,
	connect.CodeUnknown:            sandbox.Internal,
	connect.CodeInvalidArgument:    sandbox.Invalid,
	connect.CodeDeadlineExceeded:   sandbox.Timeout,
	connect.CodeNotFound:           sandbox.NotFound,
	connect.CodeAlreadyExists:      sandbox.Exists,
	connect.CodePermissionDenied:   sandbox.Denied,
	connect.CodeResourceExhausted:  sandbox.Exhausted,
	connect.CodeFailedPrecondition: sandbox.Conflict,
	connect.CodeAborted:            sandbox.Conflict,
	connect.CodeOutOfRange:         sandbox.Invalid,
	connect.CodeUnimplemented:      sandbox.Unsupported,
	connect.CodeInternal:           sandbox.Internal,
	connect.CodeUnavailable:        sandbox.Unavailable,
	connect.CodeDataLoss:           sandbox.Internal,
	connect.CodeUnauthenticated:    sandbox.Denied,
}

// kindOfCode returns the error kind for a code of the wire.
func kindOfCode(c connect.Code) sandbox.Kind {
	if k, ok := kinds[c]; ok {
		return k
	}
	return sandbox.Internal
}

// Error turns an error of the wire into a sandbox.Error with kind and hint.
// Others are returned as they are.
func Error(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, io.EOF) {
		return io.EOF // the end of a stream
	}
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return err
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" {
		at := "the server's address"
		if op.Addr != nil {
			at = op.Addr.String()
		}
		return sandbox.Unavailable.Errorf("no daemon answers at %s: %w", at, op.Err).
			WithHint("start one with `sudo viv serve`, or name another with --server or VIV_SERVER")
	}
	if len(ce.Details()) == 0 && broken(err) {
		return sandbox.Unavailable.Errorf("the connection to the daemon was lost: %w", err).
			WithHint("what it did goes on: try again when the daemon is back")
	}
	out := &sandbox.Error{Kind: kindOfCode(ce.Code()), Msg: ce.Message()}
	for _, cause := range []error{context.Canceled, context.DeadlineExceeded} {
		if errors.Is(err, cause) {
			out.Msg, out.Err = "", cause
		}
	}
	for _, d := range ce.Details() {
		m, derr := d.Value()
		if derr != nil {
			continue
		}
		if ed, ok := m.(*v1.ErrorDetail); ok {
			if ed.Kind != "" {
				out.Kind = sandbox.Kind(ed.Kind)
			}
			out.Hint = ed.Hint
		}
	}
	return out
}

// broken says whether the connection broke, as it does when the daemon dies.
func broken(err error) bool {
	for _, cause := range []error{io.ErrUnexpectedEOF, syscall.ECONNRESET, syscall.EPIPE, net.ErrClosed} {
		if errors.Is(err, cause) {
			return true
		}
	}
	// The HTTP/2 of net/http has no exported error for it.
	msg := err.Error()
	return strings.Contains(msg, "client connection lost") || strings.Contains(msg, "server sent GOAWAY") ||
		strings.Contains(msg, "client connection force closed")
}
