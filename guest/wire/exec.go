package wire

import (
	"sort"
	"strings"
	"time"

	"vivarium/sandbox"
)

// Caps on what a message may hold.
const (
	MaxID     = 128       // bytes of an exec's id
	MaxArgs   = 1 << 16   // arguments, and environment entries
	MaxString = 128 << 10 // bytes of one argument
	MaxPath   = 16 << 10
	MaxUser   = 256
	MaxText   = 4 << 10 // bytes of an error message
)

// Start is what the host asks to run.
type Start struct {
	ID      string
	Argv    []string
	Env     []string // "NAME=value", sorted, complete: the guest adds only what is missing
	Workdir string
	User    string
	Stdin   sandbox.StdinMode
	Output  sandbox.OutputMode
	PTY     *sandbox.WindowSize
	Timeout time.Duration
}

// NewStart makes a Start of a spec.
func NewStart(id string, s sandbox.ExecSpec) Start {
	env := make([]string, 0, len(s.Env))
	for k, v := range s.Env {
		env = append(env, k+"="+v)
	}
	sort.Strings(env)
	return Start{ID: id, Argv: s.Argv, Env: env, Workdir: s.Workdir, User: s.User, Stdin: s.Stdin, Output: s.Output, PTY: s.PTY, Timeout: s.Timeout}
}

// Check returns an error of kind Invalid for what no guest would take.
func (s *Start) Check() error {
	switch {
	case s.ID == "" || len(s.ID) > MaxID || strings.ContainsAny(s.ID, "\x00\n"):
		return sandbox.Invalid.Errorf("exec id must be 1 to %d bytes on one line", MaxID)
	case len(s.Argv) == 0 || s.Argv[0] == "":
		return sandbox.Invalid.Errorf("no program to run").WithHint("give at least one argument: the program")
	case len(s.Argv) > MaxArgs || len(s.Env) > MaxArgs:
		return sandbox.Invalid.Errorf("more than %d arguments or environment entries", MaxArgs)
	case len(s.Workdir) > MaxPath || len(s.User) > MaxUser:
		return sandbox.Invalid.Errorf("working directory or user too long")
	case s.Timeout < 0:
		return sandbox.Invalid.Errorf("negative timeout")
	}
	size := len(s.Workdir)
	for _, l := range [2][]string{s.Argv, s.Env} {
		for _, a := range l {
			if strings.IndexByte(a, 0) >= 0 {
				return sandbox.Invalid.Errorf("argument or environment entry with a NUL byte")
			}
			if len(a) > MaxString {
				return sandbox.Invalid.Errorf("argument or environment entry of more than %d bytes", MaxString)
			}
			size += len(a) + 4
		}
	}
	if strings.IndexByte(s.Workdir, 0) >= 0 || strings.IndexByte(s.User, 0) >= 0 {
		return sandbox.Invalid.Errorf("working directory or user with a NUL byte")
	}
	if size > MaxMessage-4096 {
		return sandbox.Invalid.Errorf("arguments and environment of more than %d bytes", MaxMessage-4096)
	}
	if stdinCode(s.Stdin) == 255 || outputCode(s.Output) == 255 {
		return sandbox.Invalid.Errorf("unknown stdin mode %q or output mode %q", s.Stdin, s.Output)
	}
	return nil
}

func stdinCode(m sandbox.StdinMode) byte {
	switch m {
	case "", sandbox.StdinNone:
		return 0
	case sandbox.StdinPipe:
		return 1
	}
	return 255
}

func outputCode(m sandbox.OutputMode) byte {
	switch m {
	case "", sandbox.OutputSeparate:
		return 0
	case sandbox.OutputMerged:
		return 1
	case sandbox.OutputDiscard:
		return 2
	}
	return 255
}

// Append appends s as the payload of a TStart frame.
func (s *Start) Append(b []byte) []byte {
	b = AppendString(b, s.ID)
	b = AppendStrings(b, s.Argv)
	b = AppendStrings(b, s.Env)
	b = AppendString(b, s.Workdir)
	b = AppendString(b, s.User)
	b = append(b, stdinCode(s.Stdin), outputCode(s.Output))
	b = AppendBool(b, s.PTY != nil)
	if s.PTY != nil {
		b = AppendUint(b, uint64(s.PTY.Rows))
		b = AppendUint(b, uint64(s.PTY.Cols))
	}
	return AppendInt(b, int64(s.Timeout))
}

// DecodeStart decodes and checks the payload of a TStart frame.
func DecodeStart(p []byte) (*Start, error) {
	d := NewDec(p)
	s := &Start{
		ID:      d.String(MaxID),
		Argv:    d.Strings(MaxArgs, MaxString),
		Env:     d.Strings(MaxArgs, MaxString),
		Workdir: d.String(MaxPath),
		User:    d.String(MaxUser),
	}
	s.Stdin = [...]sandbox.StdinMode{sandbox.StdinNone, sandbox.StdinPipe}[d.Uint(1)]
	s.Output = [...]sandbox.OutputMode{sandbox.OutputSeparate, sandbox.OutputMerged, sandbox.OutputDiscard}[d.Uint(2)]
	if d.Bool() {
		s.PTY = &sandbox.WindowSize{Rows: uint16(d.Uint(1<<16 - 1)), Cols: uint16(d.Uint(1<<16 - 1))}
	}
	s.Timeout = time.Duration(d.Int())
	if err := d.End(); err != nil {
		return nil, err
	}
	return s, s.Check()
}

// Attach asks for an exec's output from offsets on. What is before them is
// acknowledged by that.
type Attach struct {
	ID             string
	Stdout, Stderr int64
}

// Append appends a as the payload of a TAttach frame.
func (a *Attach) Append(b []byte) []byte {
	return AppendInt(AppendInt(AppendString(b, a.ID), a.Stdout), a.Stderr)
}

// DecodeAttach decodes the payload of a TAttach frame.
func DecodeAttach(p []byte) (*Attach, error) {
	d := NewDec(p)
	a := &Attach{ID: d.String(MaxID), Stdout: d.Int(), Stderr: d.Int()}
	return a, d.End()
}

// Started answers TStart and TAttach.
type Started struct {
	PID            int
	Stdout, Stderr int64     // offsets from which output follows
	Stdin          int64     // bytes of stdin taken so far
	StdinClosed    bool      // no more stdin is taken
	Created        bool      // this TStart started it; false: it was known already
	At             time.Time // when it was started, by the guest's clock
}

// Append appends s as the payload of a TStarted frame.
func (s *Started) Append(b []byte) []byte {
	b = AppendInt(b, int64(s.PID))
	b = AppendInt(AppendInt(AppendInt(b, s.Stdout), s.Stderr), s.Stdin)
	b = AppendBool(AppendBool(b, s.StdinClosed), s.Created)
	return AppendSigned(b, s.At.UnixNano())
}

// DecodeStarted decodes the payload of a TStarted frame.
func DecodeStarted(p []byte) (Started, error) {
	d := NewDec(p)
	s := Started{PID: int(d.Uint(1<<31 - 1)), Stdout: d.Int(), Stderr: d.Int(), Stdin: d.Int(), StdinClosed: d.Bool(), Created: d.Bool()}
	s.At = time.Unix(0, d.Signed())
	return s, d.End()
}

// Exit is the end of an exec.
type Exit struct {
	Status         sandbox.ExitStatus
	Stdout, Stderr int64 // final lengths
	At             time.Time
}

// Append appends e as the payload of a TExit frame.
func (e *Exit) Append(b []byte) []byte {
	b = AppendInt(b, int64(e.Status.Code))
	b = AppendInt(b, int64(e.Status.Signal))
	b = AppendBool(b, e.Status.TimedOut)
	b = AppendString(b, clip(e.Status.Error))
	b = AppendString(b, string(e.Status.Kind))
	b = AppendInt(AppendInt(b, e.Stdout), e.Stderr)
	return AppendSigned(b, e.At.UnixNano())
}

// DecodeExit decodes the payload of a TExit frame.
func DecodeExit(p []byte) (Exit, error) {
	d := NewDec(p)
	var e Exit
	e.Status.Code = int(d.Uint(255))
	e.Status.Signal = int(d.Uint(127))
	e.Status.TimedOut = d.Bool()
	e.Status.Error = d.String(MaxText)
	e.Status.Kind = kind(d.String(32))
	e.Stdout, e.Stderr = d.Int(), d.Int()
	e.At = time.Unix(0, d.Signed())
	if e.Status.Error == "" && e.Status.Kind != "" {
		d.fail()
	}
	return e, d.End()
}

// kind maps what the other side said to a kind that there is.
func kind(s string) sandbox.Kind {
	if s == "" {
		return ""
	}
	for _, k := range sandbox.Kinds {
		if string(k) == s {
			return k
		}
	}
	return sandbox.Internal
}

func clip(s string) string {
	if len(s) > MaxText {
		return s[:MaxText]
	}
	return s
}

// AppendError appends an error as a kind, a message and a hint.
func AppendError(b []byte, err error) []byte {
	b = AppendString(b, string(sandbox.KindOf(err)))
	b = AppendString(b, clip(err.Error()))
	return AppendString(b, clip(sandbox.HintOf(err)))
}

// DecodeError decodes what AppendError appended. The error has always a kind.
func DecodeError(d *Dec) (*sandbox.Error, error) {
	e := &sandbox.Error{Kind: kind(d.String(32)), Msg: d.String(MaxText), Hint: d.String(MaxText)}
	if e.Kind == "" {
		e.Kind = sandbox.Internal
	}
	return e, d.End()
}
