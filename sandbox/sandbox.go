package sandbox

import (
	"time"
)

// Names of the runtimes.
const (
	RuntimeGVisor = "gvisor"
	RuntimeVM     = "vm"
)

// Resources of a sandbox. Requests are guarantees: those of all sandboxes
// never add up to more than the node has to give. Limits are hard.
type Resources struct {
	CPURequest    int64 // thousandths of a core
	CPULimit      int64 // thousandths of a core
	MemoryRequest int64 // bytes
	MemoryLimit   int64 // bytes
	Disk          int64 // bytes that can be written to its root filesystem
	Pids          int64 // processes and threads inside
}

// Probe says when a sandbox is ready: when a TCP port inside takes
// connections, or when a command exits with 0.
type Probe struct {
	TCPPort  uint16
	Command  []string
	Interval time.Duration // between tries; default 100 ms
	Timeout  time.Duration // of one try; default 5 s
}

// Capabilities to add to, or drop from, Docker's default set. Names as in
// capabilities(7), such as CAP_NET_ADMIN.
type Capabilities struct{ Add, Drop []string }

// Pull policies.
const (
	PullMissing = "missing"
	PullAlways  = "always"
	PullNever   = "never"
)

// Spec is what a sandbox is asked to be.
type Spec struct {
	Name            string // unique among the tenant's living sandboxes
	Image           string
	Runtime         string
	Tags            map[string]string
	Command         []string // main command; with none the sandbox lives until it is stopped
	RunImageCommand bool     // with no Command: run the image's
	Entrypoint      []string // instead of the image's; one empty string clears it
	Env             map[string]string
	Workdir         string
	User            string
	PTY             *WindowSize // of the main command
	Stdin           bool        // the main command has a standard input
	Resources       Resources
	Network         NetworkPolicy
	Prove           bool         // try the policy from inside before the main command starts; not enforced: fail
	Secrets         []string     // by name
	Tunnels         []TunnelSpec // opened with it
	Capabilities    Capabilities
	Timeout         time.Duration // of its whole life
	IdleTimeout     time.Duration // without exec, stdin or connection; 0 is none
	Probe           *Probe
	Pull            string
	Remove          bool // remove it once it has ended
	Hostname        string
}

// Stage is where a sandbox is in its life.
type Stage string

// The stages, in order. All but running and ended have a deadline.
const (
	StageQueued   Stage = "queued"   // waits for room on the node
	StageImage    Stage = "image"    // its image is fetched or made
	StageBoot     Stage = "boot"     // its machine boots, or comes from the pool
	StageNetwork  Stage = "network"  // its policy is put in force
	StageGuest    Stage = "guest"    // its guest starts and answers
	StageReady    Stage = "ready"    // its main command runs, its probe has not passed yet
	StageRunning  Stage = "running"  //
	StageStopping Stage = "stopping" // signals were sent
	StageEnded    Stage = "ended"    // a death certificate is all that is left
)

// Alive says whether a sandbox in this stage holds anything on the node.
func (s Stage) Alive() bool { return s != StageEnded }

// Usable says whether execs and files work in this stage.
func (s Stage) Usable() bool { return s == StageReady || s == StageRunning }

// StageTime tells when a stage was entered and how long it took (0: not over).
type StageTime struct {
	Stage   Stage
	Entered time.Time
	Took    time.Duration
}

// Sandbox is the record of one sandbox.
type Sandbox struct {
	ID            string // sb-ULID
	Tenant        string
	Spec          Spec
	Stage         Stage
	StageSince    time.Time
	StageDeadline time.Time // zero: none
	Stages        []StageTime
	ImageID       string
	ImageDigest   string
	Base          Base
	MachineID     string // of its runtime
	Slot          string // of its network
	Address       string
	GuestKey      []byte `json:"-"` // never leaves the node's store
	Created       time.Time
	Started       time.Time
	Deadline      time.Time // when Timeout ends it; zero: never
	IsReady       bool
	NetworkHash   string // of the policy in force
	Proof         *Proof // the last that was asked for
	Ending        *Death // while stopping: what the certificate will say as far as it is known
	Death         *Death
	Removed       bool // on request: only the death certificate is kept
}

// Base is what a sandbox's image gives to the commands in it.
type Base struct {
	Env     []string          // KEY=value
	Under   map[string]string `json:",omitempty"` // below Env, from the node: where programs find the sandbox's CA, and packages
	Workdir string
	User    string
}

// Reason says why a sandbox ended.
type Reason string

const (
	ReasonExited  Reason = "exited"  // its main command did
	ReasonStopped Reason = "stopped" // on request
	ReasonTimeout Reason = "timeout"
	ReasonIdle    Reason = "idle"
	ReasonOOM     Reason = "oom"
	ReasonDisk    Reason = "disk"   // the node ran out of disk space, and it had written most
	ReasonKilled  Reason = "killed" // its machine died of something else
	ReasonFailed  Reason = "failed" // it never came to run
	ReasonLost    Reason = "lost"   // the node restarted under it
)

// Death is the certificate of a sandbox that ended.
type Death struct {
	Reason     Reason
	Stage      Stage // it was in
	Message    string
	Kind       Kind // with ReasonFailed
	Hint       string
	Exit       *ExitStatus // of the main command
	PeakMemory int64       // bytes, from the host's cgroup
	OOM        bool
	LastOutput []byte // tail of the main command's output
	Created    time.Time
	Started    time.Time
	Ended      time.Time
}

// MainExec is the id of the exec that is the main command.
const MainExec = "main"

// Event is one thing that happened on the node.
type Event struct {
	Seq       int64 // without gaps
	Time      time.Time
	Tenant    string
	SandboxID string
	Kind      string
	Message   string
	Attrs     map[string]string
}

// Usage of a sandbox as the host measures it.
type Usage struct {
	Memory     int64 // bytes now
	PeakMemory int64 // bytes
	CPU        time.Duration
	Pids       int64 // host threads and processes
	Disk       int64 // bytes held by what it wrote
	OOM        bool  // its cgroup ran out of memory
}
