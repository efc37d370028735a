// Package doctor looks at whether a host can carry sandboxes. It names what is
// missing or wrong, what does not work because of it, and exactly what to do;
// what it can try it tries, up to the boot of a machine. It changes nothing:
// what it makes for a try is gone when it returns.
package doctor

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/network"
)

// Severity of a finding that is not OK.
type Severity string

const (
	Error   Severity = "error"   // sandboxes do not run, or not as they should
	Warning Severity = "warning" // something is worse than it could be, or will be
	Note    Severity = "note"    // good to know
)

// Finding is one thing that was looked at.
type Finding struct {
	Name     string   `json:"name"`
	OK       bool     `json:"ok"`
	Severity Severity `json:"severity,omitempty"` // empty when OK
	Detail   string   `json:"detail,omitempty"`   // what was seen
	Effect   string   `json:"effect,omitempty"`   // what does not work because of it; empty when OK
	Fix      string   `json:"fix,omitempty"`      // what exactly to do; empty when OK
}

// Options say what the host is looked at for.
type Options struct {
	DataDir string
	// UnixSocket of the daemon; "" is viv.sock in DataDir.
	UnixSocket string
	// Sandboxes that shall be alive at once. 0 is 100.
	Sandboxes int
	// What each is guaranteed, and what the host keeps, to say how many fit.
	CPURequest    int64 // thousandths of a core
	MemoryRequest int64 // bytes
	ReserveCPU    int64
	ReserveMemory int64
	ReserveDisk   int64
	// Users that sentries run as, and groups of the same numbers. 0 is 65,536
	// from 2,046,820,352 on, as in the daemon's configuration.
	FirstUID, UIDs int
	// Network as the daemon would set it up.
	Network network.Options
	// NoBoot leaves out the boot of a machine, which takes about 100 ms.
	NoBoot bool
}

const (
	// checkTimeout bounds Run.
	checkTimeout = time.Minute
	// bootTimeout bounds the boot of a machine.
	bootTimeout = 30 * time.Second
)

// host is what the checks look at. Tests have another.
type host struct {
	root   string // before every path of a file that is read
	euid   int
	statfs func(path string) (unix.Statfs_t, error)
	look   func(program string) (string, error)
	now    func() time.Time
	// sync says whether the kernel's clock is kept right by something.
	sync func() bool
}

func thisHost() *host {
	return &host{
		euid: os.Geteuid(),
		statfs: func(path string) (st unix.Statfs_t, err error) {
			err = unix.Statfs(path, &st)
			return st, err
		},
		look: exec.LookPath,
		now:  time.Now,
		sync: func() bool {
			var t unix.Timex
			const timeError = 5 // TIME_ERROR of adjtimex(2): the clock is not synchronised
			state, err := unix.Adjtimex(&t)
			return err == nil && state != timeError
		},
	}
}

// read is the text of a file, without the last newline.
func (h *host) read(path string) (string, error) {
	b, err := os.ReadFile(filepath.Join(h.root, path))
	return strings.TrimRight(string(b), "\n"), err
}

// number is that of a file with one.
func (h *host) number(path string) (int64, bool) {
	s, err := h.read(path)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(s), 10, 64)
	return n, err == nil
}

func (h *host) exists(path string) bool {
	_, err := os.Stat(filepath.Join(h.root, path))
	return err == nil
}

// doctor is one examination.
type doctor struct {
	*host
	Options
	found []Finding
}

func (d *doctor) ok(name, detail string) {
	d.found = append(d.found, Finding{Name: name, OK: true, Detail: detail})
}

func (d *doctor) bad(s Severity, name, detail, effect, fix string) {
	d.found = append(d.found, Finding{Name: name, Severity: s, Detail: detail, Effect: effect, Fix: fix})
}

// Run looks at everything. It takes a few seconds.
func Run(ctx context.Context, o Options) []Finding {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	d := newDoctor(o, thisHost())
	d.static()
	if d.euid == 0 { // without root every try would fail for that one reason
		d.tryKernel()
		d.tryCgroups()
		d.tryNetwork(ctx)
		if !o.NoBoot {
			d.tryBoot(ctx)
		}
	}
	return d.found
}

func newDoctor(o Options, h *host) *doctor {
	if o.Sandboxes == 0 {
		o.Sandboxes = 100
	}
	if o.FirstUID == 0 || o.UIDs == 0 {
		o.FirstUID, o.UIDs = 2_046_820_352, 65_536
	}
	if abs, err := filepath.Abs(o.DataDir); err == nil {
		o.DataDir = abs
	}
	return &doctor{host: h, Options: o}
}

// static is all that is only looked at.
func (d *doctor) static() {
	d.rights()
	d.users()
	d.kernel()
	d.namespaces()
	d.cgroups()
	d.dataDir()
	d.disk()
	d.limits()
	d.room()
	d.clock()
	d.tools()
}

// Failed says whether something that is needed is missing.
func Failed(all []Finding) bool {
	for _, f := range all {
		if !f.OK && f.Severity == Error {
			return true
		}
	}
	return false
}
