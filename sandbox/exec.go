package sandbox

import "time"

// StdinMode says what a command reads from.
type StdinMode string

// OutputMode says what happens to what a command writes.
type OutputMode string

const (
	StdinNone StdinMode = "none" // /dev/null
	StdinPipe StdinMode = "pipe" // bytes that the caller sends, until it closes

	OutputSeparate OutputMode = "separate" // stdout and stderr kept apart
	OutputMerged   OutputMode = "merged"   // both on stdout, in the order written
	OutputDiscard  OutputMode = "discard"  // both to /dev/null
)

// ExecSpec is a command to run in a sandbox.
type ExecSpec struct {
	Argv    []string          // program and arguments; the program is looked up in the command's PATH
	Env     map[string]string // over the image's and the sandbox's environment
	Workdir string            // "" is the sandbox's, then the image's, then /
	User    string            // name, uid, name:group or uid:gid; "" is the sandbox's, then the image's, then root
	Stdin   StdinMode         // "" is StdinNone
	Output  OutputMode        // "" is OutputSeparate; a PTY is always merged
	PTY     *WindowSize       // a terminal of this size, nil for none
	Timeout time.Duration     // 0 is none; when it passes the whole process tree is killed
}

// WindowSize is the size of a terminal in character cells.
type WindowSize struct{ Rows, Cols uint16 }

// ExecState is where an exec is in its life.
type ExecState string

const (
	ExecStarting ExecState = "starting"
	ExecRunning  ExecState = "running"
	ExecExited   ExecState = "exited"
	// ExecLost means that the sandbox ended before the guest reported a status:
	// what the command's own status was is unknown, and is not made up.
	ExecLost ExecState = "lost"
)

// ExitStatus is how a process ended, as wait(2) told it.
type ExitStatus struct {
	Code     int    // 0..255; 128+Signal when a signal ended it
	Signal   int    // signal number, 0 for none
	TimedOut bool   // its own timeout ended it
	Error    string // set when it could not be started: the reason; Code is then 126 or 127
	Kind     Kind   // with Error: what kind of failure
}

// Stream names one of the outputs of an exec.
type Stream uint8

const (
	Stdout Stream = 1
	Stderr Stream = 2
)

// Exec is a command started in a sandbox. It has an id of its own, is
// independent of the connection that started it, and has exactly one status.
type Exec struct {
	ID        string
	SandboxID string
	Tenant    string
	Spec      ExecSpec
	State     ExecState
	PID       int // inside the sandbox
	Exit      ExitStatus
	Started   time.Time
	Ended     time.Time
	// Bytes written so far per stream, and the first offset that can still be
	// read: what is before it was dropped from the bounded spool.
	StdoutLen, StdoutFirst int64
	StderrLen, StderrFirst int64
	// StdinLen is how many bytes of standard input were taken so far.
	StdinLen int64
}
