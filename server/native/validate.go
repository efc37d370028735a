package native

import (
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/protobuf/types/known/timestamppb"

	"vivarium/sandbox"
)

// Bounds of what a caller may send (E2). They are generous: they keep names
// safe in paths, logs and metrics, and memory bounded.
const (
	maxName     = 63
	maxTags     = 64
	maxTagKey   = 63
	maxTagValue = 255
	maxArgs     = 8192
	maxArgBytes = 1 << 20
	maxEnv      = 4096
	maxPath     = 4096
	maxUser     = 255
	maxImageRef = 512
	maxKey      = 128
	maxTimeout  = 10 * 365 * 24 * time.Hour
)

// checkID holds names and ids to letters, digits, and - _ . after the first.
func checkID(what, s string) error {
	if s == "" {
		return sandbox.Invalid.Errorf("%s is missing", what)
	}
	if len(s) > maxName {
		return sandbox.Invalid.Errorf("%s is longer than %d bytes", what, maxName)
	}
	for i, c := range []byte(s) {
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9':
		case i > 0 && (c == '-' || c == '_' || c == '.'):
		default:
			return sandbox.Invalid.Errorf("%s %q has a character that names may not have", what, s).
				WithHint("names are made of letters, digits, - _ and ., and begin with a letter or digit")
		}
	}
	return nil
}

func checkRef(s string) error { return checkID("the sandbox's id or name", s) }

func checkTags(tags map[string]string) error {
	if len(tags) > maxTags {
		return sandbox.Invalid.Errorf("more than %d tags", maxTags)
	}
	for k, v := range tags {
		if k == "" || len(k) > maxTagKey || strings.ContainsFunc(k, notTagKey) {
			return sandbox.Invalid.Errorf("tag %q: keys are 1 to %d letters, digits, - _ . and /", clip(k), maxTagKey)
		}
		if len(v) > maxTagValue || !printable(v) {
			return sandbox.Invalid.Errorf("tag %q: values are at most %d bytes of printable UTF-8", k, maxTagValue)
		}
	}
	return nil
}

func notTagKey(r rune) bool {
	return !(r < utf8.RuneSelf && (unicode.IsLetter(r) || unicode.IsDigit(r)) || strings.ContainsRune("-_./", r))
}

// printable is true for valid UTF-8 without control characters.
func printable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, unicode.IsControl)
}

func clip(s string) string {
	if len(s) > 64 {
		return s[:64] + "..."
	}
	return s
}

func checkArgv(what string, argv []string) error {
	if len(argv) > maxArgs {
		return sandbox.Invalid.Errorf("%s has more than %d arguments", what, maxArgs)
	}
	n := 0
	for _, a := range argv {
		if strings.IndexByte(a, 0) >= 0 {
			return sandbox.Invalid.Errorf("%s has a NUL byte in an argument", what)
		}
		n += len(a) + 1
	}
	if n > maxArgBytes {
		return sandbox.Invalid.Errorf("%s is longer than %d bytes", what, maxArgBytes).
			WithHint("write it to a file in the sandbox and run that")
	}
	return nil
}

func checkEnv(env map[string]string) error {
	if len(env) > maxEnv {
		return sandbox.Invalid.Errorf("more than %d environment variables", maxEnv)
	}
	n := 0
	for k, v := range env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.IndexByte(v, 0) >= 0 {
			return sandbox.Invalid.Errorf("environment variable %q: names are not empty and have no =, and neither names nor values a NUL byte", clip(k))
		}
		n += len(k) + len(v) + 2
	}
	if n > maxArgBytes {
		return sandbox.Invalid.Errorf("the environment is longer than %d bytes", maxArgBytes)
	}
	return nil
}

func checkUser(s string) error {
	if len(s) > maxUser || strings.ContainsAny(s, "\x00\n") || !printable(s) {
		return sandbox.Invalid.Errorf("user %q is not a name, a uid, name:group or uid:gid", clip(s))
	}
	return nil
}

// checkPath is for paths inside; they are bytes, and what they name is the
// guest's affair.
func checkPath(what string, p []byte, empty bool) error {
	switch {
	case len(p) == 0 && !empty:
		return sandbox.Invalid.Errorf("%s is missing", what)
	case len(p) > maxPath:
		// PATH_MAX; a deeper file is reached from a directory on the way (A14).
		return sandbox.Invalid.Errorf("%s is longer than %d bytes", what, maxPath).
			WithHint("use an exec that changes its directory on the way")
	case strings.IndexByte(string(p), 0) >= 0:
		return sandbox.Invalid.Errorf("%s has a NUL byte", what)
	}
	return nil
}

func checkMode(m uint32) error {
	if m&^0o7777 != 0 {
		return sandbox.Invalid.Errorf("mode %o has more than permission bits", m)
	}
	return nil
}

func checkTime(what string, t *timestamppb.Timestamp) error {
	if t == nil {
		return nil
	}
	if err := t.CheckValid(); err != nil {
		return sandbox.Invalid.Errorf("%s: %w", what, err)
	}
	return nil
}

func checkSignal(n int32) error {
	if n < 1 || n > 64 {
		return sandbox.Invalid.Errorf("signal %d: signals are 1 to 64", n)
	}
	return nil
}

func checkSize(rows, cols uint32) error {
	if rows > 65535 || cols > 65535 {
		return sandbox.Invalid.Errorf("a terminal of %d rows and %d columns", rows, cols)
	}
	return nil
}
