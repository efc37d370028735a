package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"syscall"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"vivarium/sandbox"
)

// kinded gives err a kind, unless it has one, and says what was being done.
func kinded(err error, doing string) error {
	if err == nil {
		return nil
	}
	var e *sandbox.Error
	if errors.As(err, &e) {
		return fmt.Errorf("%s: %w", doing, err)
	}
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return sandbox.Exhausted.Errorf("%s: %w", doing, err).
			WithHint("the disk that holds the images is full: remove images (viv image rm, viv image prune) or make room")
	case errors.Is(err, io.ErrUnexpectedEOF):
		return sandbox.Invalid.Errorf("%s: cut short: %w", doing, err)
	case errors.Is(err, context.DeadlineExceeded):
		return sandbox.Timeout.Errorf("%s: %w", doing, err)
	case errors.Is(err, context.Canceled):
		return sandbox.Unavailable.Errorf("%s: %w", doing, err)
	}
	return sandbox.Internal.Errorf("%s: %w", doing, err)
}

// registryError gives an error of talking to a registry its kind.
func registryError(err error, ref string) error {
	var e *sandbox.Error
	if err == nil || errors.As(err, &e) {
		return err
	}
	var te *transport.Error
	if errors.As(err, &te) {
		switch te.StatusCode {
		case http.StatusNotFound:
			return sandbox.NotFound.Errorf("pull %s: %w", ref, err).
				WithHint("check the name and the tag; the registry knows no such image")
		case http.StatusUnauthorized, http.StatusForbidden:
			return sandbox.Denied.Errorf("pull %s: %w", ref, err).
				WithHint("check the name, or log in to the registry (docker login); many registries answer so for images that do not exist")
		case http.StatusTooManyRequests:
			return sandbox.Unavailable.Errorf("pull %s: %w", ref, err).
				WithHint("the registry limits how often it is asked: wait, log in, or configure a mirror")
		}
		return sandbox.Unavailable.Errorf("pull %s: %w", ref, err).
			WithHint("the registry has a problem; try again later or configure a mirror")
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return sandbox.Timeout.Errorf("pull %s: %w", ref, err)
	}
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return kinded(err, "pull "+ref)
	}
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() {
		return sandbox.Unavailable.Errorf("pull %s: %w", ref, err).
			WithHint("the registry does not answer; check the network and the name of the registry")
	}
	return sandbox.Unavailable.Errorf("pull %s: %w", ref, err).
		WithHint("check that the registry is up and can be reached from this machine, or configure a mirror")
}

// isSourceError reports whether err comes from reading a file or a connection
// rather than from what was read.
func isSourceError(err error) bool {
	var errno syscall.Errno
	var ne net.Error
	return errors.As(err, &errno) || errors.As(err, &ne) || errors.Is(err, context.Canceled)
}
