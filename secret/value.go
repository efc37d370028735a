package secret

import (
	"fmt"
	"io"
	"log/slog"
)

// hidden is what a value prints as.
const hidden = "[secret]"

// Value is a secret's value. It prints as [secret] whatever prints it: the bytes
// are behind a pointer, so that fmt does not reach them in an unexported field
// of another struct either.
type Value struct{ box *box }

type box struct{ b []byte }

// NewValue copies b, which the caller may then clear.
func NewValue(b []byte) Value { return Value{&box{append([]byte(nil), b...)}} }

// Len is its length in bytes.
func (v Value) Len() int { return len(v.bytes()) }

// Clear overwrites the bytes. The value is then empty.
func (v Value) Clear() {
	if v.box != nil {
		clear(v.box.b)
		v.box.b = nil
	}
}

func (v Value) bytes() []byte {
	if v.box == nil {
		return nil
	}
	return v.box.b
}

func (v Value) text() string { return string(v.bytes()) }

// Format implements fmt.Formatter, for every verb and flag.
func (v Value) Format(f fmt.State, _ rune) { io.WriteString(f, hidden) }

// String implements fmt.Stringer.
func (v Value) String() string { return hidden }

// GoString implements fmt.GoStringer.
func (v Value) GoString() string { return hidden }

// MarshalText implements encoding.TextMarshaler.
func (v Value) MarshalText() ([]byte, error) { return []byte(hidden), nil }

// MarshalJSON implements json.Marshaler.
func (v Value) MarshalJSON() ([]byte, error) { return []byte(`"` + hidden + `"`), nil }

// LogValue implements slog.LogValuer.
func (v Value) LogValue() slog.Value { return slog.StringValue(hidden) }

// Environment is variables for a sandbox's processes. Some are values of plain
// secrets, so it prints as names only, and goes into no record of a sandbox.
type Environment map[string]string

// Format implements fmt.Formatter.
func (e Environment) Format(f fmt.State, _ rune) {
	fmt.Fprintf(f, "%d variables %s", len(e), hidden)
}

// String implements fmt.Stringer.
func (e Environment) String() string { return fmt.Sprint(e) }

// MarshalJSON implements json.Marshaler.
func (e Environment) MarshalJSON() ([]byte, error) { return []byte(`"` + hidden + `"`), nil }

// LogValue implements slog.LogValuer.
func (e Environment) LogValue() slog.Value { return slog.StringValue(fmt.Sprint(e)) }
