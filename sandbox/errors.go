package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Kind is a class of failure that a caller can act on. Every error that leaves
// a package of ours carries exactly one; a front door maps it to its own codes
// in one table. Kinds are themselves errors, so errors.Is(err, NotFound) works.
type Kind string

// The error kinds. They are part of the API: never renamed, only added.
const (
	NotFound    Kind = "not_found"   // no such object, for this tenant
	Exists      Kind = "exists"      // the name or id is taken
	Paused      Kind = "paused"      // the sandbox is paused or asleep
	Gone        Kind = "gone"        // the sandbox has ended
	Exhausted   Kind = "exhausted"   // a limit, quota, disk or host capacity is used up
	Denied      Kind = "denied"      // not authenticated, or refused by policy
	Invalid     Kind = "invalid"     // the request itself is wrong
	Unsupported Kind = "unsupported" // this runtime or host cannot do it
	Unavailable Kind = "unavailable" // a dependency does not answer; trying again may help
	Timeout     Kind = "timeout"     // a deadline passed
	Conflict    Kind = "conflict"    // not possible in the present state
	Internal    Kind = "internal"    // a defect of ours
)

// Kinds lists every kind, for tables that must cover them all.
var Kinds = []Kind{NotFound, Exists, Paused, Gone, Exhausted, Denied, Invalid, Unsupported, Unavailable, Timeout, Conflict, Internal}

func (k Kind) Error() string { return string(k) }

// Error is an error with a kind and, where the user can do something about it,
// a hint that says what.
type Error struct {
	Kind Kind
	Msg  string // what happened, without the kind
	Hint string // what to do next; may be empty
	Err  error  // cause; may be nil
}

func (e *Error) Error() string {
	s := e.Msg
	if e.Err != nil {
		if s != "" {
			s += ": "
		}
		s += e.Err.Error()
	}
	if s == "" {
		s = string(e.Kind)
	}
	return s
}

func (e *Error) Unwrap() error { return e.Err }

// Is makes errors.Is(err, NotFound) true for an Error of that kind.
func (e *Error) Is(target error) bool {
	k, ok := target.(Kind)
	return ok && k == e.Kind
}

// WithHint sets what the user should do next and returns e.
func (e *Error) WithHint(format string, args ...any) *Error {
	e.Hint = fmt.Sprintf(format, args...)
	return e
}

// Errorf makes an error of kind k. As in fmt.Errorf, each %w wraps a cause.
func (k Kind) Errorf(format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	switch err.(type) {
	case interface{ Unwrap() error }, interface{ Unwrap() []error }:
		return &Error{Kind: k, Err: err}
	}
	return &Error{Kind: k, Msg: err.Error()}
}

// KindOf returns the kind of err: that of the outermost Error or Kind in its
// chain, Timeout for a passed deadline, else Internal. KindOf(nil) is "".
func KindOf(err error) Kind {
	if err == nil {
		return ""
	}
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	var k Kind
	if errors.As(err, &k) {
		return k
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) {
		return Timeout
	}
	if errors.Is(err, context.Canceled) {
		return Unavailable
	}
	return Internal
}

// HintOf returns the first hint in err's chain, or "".
func HintOf(err error) string {
	for err != nil {
		var e *Error
		if !errors.As(err, &e) {
			return ""
		}
		if e.Hint != "" {
			return e.Hint
		}
		err = e.Err
	}
	return ""
}
