package secret

import (
	"fmt"
	"io"
	"log/slog"
	"maps"
)

// hidden is what a value prints as.
const hidden = "[secret]"

// Value is a secret's value. It prints as [secret] whatever prints it. The bytes
// are behind a function, for fmt calls no methods of what is in an unexported
// field, and follows pointers there if the verb is wrong.
type Value struct{ b func() *[]byte }

// NewValue copies b, which the caller may then clear.
func NewValue(b []byte) Value { return own(append([]byte(nil), b...)) }

// own is a value of b itself.
func own(b []byte) Value { return Value{func() *[]byte { return &b }} }

// Len is its length in bytes.
func (v Value) Len() int { return len(v.bytes()) }

// Clear overwrites the bytes. The value is then empty, and so are its copies.
func (v Value) Clear() {
	if v.b != nil {
		clear(*v.b())
		*v.b() = nil
	}
}

func (v Value) bytes() []byte {
	if v.b == nil {
		return nil
	}
	return *v.b()
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
// secrets, so it prints as their number only, and what Vars returns goes into no
// record of a sandbox.
type Environment struct{ vars func() map[string]string }

// Vars are the variables. The map is the caller's.
func (e Environment) Vars() map[string]string {
	if e.vars == nil {
		return map[string]string{}
	}
	return maps.Clone(e.vars())
}

// Format implements fmt.Formatter.
func (e Environment) Format(f fmt.State, _ rune) { io.WriteString(f, e.String()) }

// String implements fmt.Stringer.
func (e Environment) String() string { return fmt.Sprintf("%d variables %s", len(e.Vars()), hidden) }

// MarshalJSON implements json.Marshaler.
func (e Environment) MarshalJSON() ([]byte, error) { return []byte(`"` + hidden + `"`), nil }

// LogValue implements slog.LogValuer.
func (e Environment) LogValue() slog.Value { return slog.StringValue(e.String()) }
