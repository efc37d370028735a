package server

import (
	"context"
	"errors"
	"log/slog"

	"connectrpc.com/connect"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/sandbox"
)

// codes is the one table that says which code of the Connect and gRPC protocols
// an error kind becomes. The kind itself travels as an ErrorDetail, since
// several share a code.
var codes = map[sandbox.Kind]connect.Code{
	sandbox.NotFound:    connect.CodeNotFound,
	sandbox.Exists:      connect.CodeAlreadyExists,
	sandbox.Paused:      connect.CodeFailedPrecondition,
	sandbox.Gone:        connect.CodeFailedPrecondition,
	sandbox.Exhausted:   connect.CodeResourceExhausted,
	sandbox.Denied:      connect.CodePermissionDenied,
	sandbox.Invalid:     connect.CodeInvalidArgument,
	sandbox.Unsupported: connect.CodeUnimplemented,
	sandbox.Unavailable: connect.CodeUnavailable,
	sandbox.Timeout:     connect.CodeDeadlineExceeded,
	sandbox.Conflict:    connect.CodeFailedPrecondition,
	sandbox.Internal:    connect.CodeInternal,
}

// Code returns the code of the wire for an error kind.
func Code(k sandbox.Kind) connect.Code {
	if c, ok := codes[k]; ok {
		return c
	}
	return connect.CodeInternal
}

// ErrUnauthenticated is what a call without a valid token gets. It is the one
// error whose code is not in the table: its kind is Denied.
func ErrUnauthenticated() error {
	return wire(connect.CodeUnauthenticated, sandbox.Denied, "a valid token is needed",
		"send `Authorization: Bearer TOKEN`; `viv token create` makes one, the first is in the file `token` of the data directory")
}

// Wire turns an error of the engine into one for the wire. An internal error
// is logged with its cause and the call's id, and leaves with no more than
// that id: its text may hold paths of the host.
func Wire(ctx context.Context, log *slog.Logger, err error) error {
	if err == nil {
		return nil
	}
	if cause := context.Cause(ctx); cause != nil && errors.Is(err, context.Canceled) && hasDomain(cause) {
		err = cause // the daemon stops
	}
	var ce *connect.Error
	if errors.As(err, &ce) && !hasDomain(err) {
		return err // the protocol's own, such as a message that is too large
	}
	k := sandbox.KindOf(err)
	if k == sandbox.Internal {
		id := CallFrom(ctx).ID
		log.ErrorContext(ctx, "internal error", "call", id, "err", err)
		return wire(connect.CodeInternal, k, "internal error (call "+id+")", "look for this call in the daemon's log, and report it")
	}
	return wire(Code(k), k, err.Error(), sandbox.HintOf(err))
}

func hasDomain(err error) bool {
	var e *sandbox.Error
	var k sandbox.Kind
	return errors.As(err, &e) || errors.As(err, &k)
}

func wire(code connect.Code, k sandbox.Kind, msg, hint string) *connect.Error {
	ce := connect.NewError(code, errors.New(msg))
	if d, err := connect.NewErrorDetail(&v1.ErrorDetail{Kind: string(k), Hint: hint}); err == nil {
		ce.AddDetail(d)
	}
	return ce
}
