package sandbox

import (
	"context"
	"net"
	"net/netip"
)

// Runtime makes machines. Its implementations are runtime/gvisor and, later,
// runtime/vm; both pass the suite in runtime/runtimetest.
//
// A Runtime decides nothing about the life of a sandbox: the engine does. It
// must be safe for concurrent use, and every method must end when ctx does.
type Runtime interface {
	// Name is the value of Spec.Runtime that selects it.
	Name() string

	// Features says what it can do; the names are those of the Feature
	// constants.
	Features() map[string]bool

	// Boot gives a machine that has booted but has no image yet: from a pool
	// where one of that size is ready, else by booting one. Its network slot is
	// closed. On error nothing is left behind.
	Boot(ctx context.Context, spec BootSpec) (Machine, error)

	// Adopt finds a machine that an earlier daemon started. NotFound if there
	// is nothing of it; Gone if it has died, with the machine returned besides,
	// so that its usage can still be read and it can be removed.
	Adopt(ctx context.Context, id string) (Machine, error)

	// Reconcile removes every machine, process, cgroup and file of this runtime
	// for which live is false. The engine calls it once, after adopting.
	Reconcile(ctx context.Context, live func(machineID string) bool) error

	// Ready is how many machines the pool holds.
	Ready() int

	// Close stops pools and helpers. Running machines go on running.
	Close() error
}

// Features that a runtime may have.
const (
	FeatureCheckpoint = "checkpoint"
	FeatureDocker     = "docker" // Docker, FUSE, kernel modules inside
	FeatureHotResize  = "hot_resize"
)

// BootSpec is what a machine needs to boot. What it will be started with is a
// hint: a runtime may have a machine ready in which the guest already runs on
// that image; see Warm.
type BootSpec struct {
	Resources    Resources
	Hostname     string
	ImagePath    string
	Capabilities Capabilities
}

// Warm is a machine in which the guest was started on an image before the
// sandbox was known. Nothing but the guest has run in it.
type Warm interface {
	Machine
	// WarmKey is the key of the guest that runs; nil if none does. It is then to
	// be the GuestKey of Start, which starts nothing more.
	WarmKey() []byte
	// WarmSetup is what the guest has to be told once it is connected to: what a
	// guest that Start starts is told from the beginning.
	WarmSetup(spec StartSpec) (GuestSetup, error)
}

// GuestSetup is what a guest does before the first command.
type GuestSetup struct {
	Hostname   string
	Hosts      string   // contents of /etc/hosts
	ResolvConf string   // contents of /etc/resolv.conf
	Unmount    []string // mount points that the image shall not have
	DropCaps   []int    // capabilities(7), by number, that no command has
}

// StartSpec is what a booted machine needs to run the guest on an image.
type StartSpec struct {
	SandboxID    string
	Hostname     string
	ImagePath    string // EROFS file
	Resources    Resources
	Capabilities Capabilities
	GuestKey     []byte // proves host and guest to each other
	Nameserver   netip.Addr
}

// Machine is one isolated machine. What it reports comes from the host (pidfd,
// cgroup), never from inside.
type Machine interface {
	ID() string
	// Slot is its network slot, "" for none.
	Slot() string
	// Address inside, invalid for none.
	Address() netip.Addr
	// Start mounts the image and starts the guest. At most once.
	Start(ctx context.Context, spec StartSpec) error
	// Dial opens a stream to the guest's port, or to another TCP port inside.
	Dial(ctx context.Context) (net.Conn, error)
	// Usage is read from the host; also after it has died, until Remove.
	Usage() (Usage, error)
	// Done is closed when the machine has died, whatever the cause.
	Done() <-chan struct{}
	// Kill ends it at once, with everything in it; nil if it is dead already.
	Kill(ctx context.Context) error
	// Remove kills it and removes everything of it. Idempotent.
	Remove(ctx context.Context) error
}

// Slot is one place in the node's network: a namespace with one interface.
type Slot struct {
	ID      string
	Netns   string // path of its network namespace
	Address netip.Prefix
	Gateway netip.Addr
	DNS     netip.Addr
}
