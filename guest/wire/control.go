package wire

import (
	"fmt"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Method is what a control call asks for.
type Method uint8

// The control calls.
const (
	MPing     Method = 1  // → version, boot id, time, uptime
	MExecs    Method = 2  // → list of ExecInfo
	MSignal   Method = 3  // exec id, signal
	MHostname Method = 4  // name
	MTime     Method = 5  // nanoseconds since 1970
	MStats    Method = 6  // → Stats
	MPrepare  Method = 7  // Setup
	MRekey    Method = 8  // nonce, the new key masked
	MProbe    Method = 9  // port → open or not
	MXattrs   Method = 10 // list of Xattr
	MReach    Method = 11 // Reach → Reached
	MStat     Method = 20 // user, path, follow → FileInfo
	MMkdir    Method = 21 // user, path, mode, parents
	MRemove   Method = 22 // user, path, recursive
	MRename   Method = 23 // user, from, to
	MSetAttr  Method = 24 // SetAttr
	MSymlink  Method = 25 // user, target, path
)

// Pong answers MPing.
type Pong struct {
	Version int
	Boot    string // differs whenever a guest process starts
	Now     time.Time
	Uptime  time.Duration
}

// Append appends p as a payload.
func (p *Pong) Append(b []byte) []byte {
	b = AppendString(AppendUint(b, uint64(p.Version)), p.Boot)
	return AppendInt(AppendSigned(b, p.Now.UnixNano()), int64(p.Uptime))
}

// DecodePong decodes the answer to MPing.
func DecodePong(b []byte) (Pong, error) {
	d := NewDec(b)
	p := Pong{Version: int(d.Uint(1 << 16)), Boot: d.String(64), Now: time.Unix(0, d.Signed()), Uptime: time.Duration(d.Int())}
	return p, d.End()
}

// ExecInfo is one exec that a guest knows.
type ExecInfo struct {
	ID                             string
	PID                            int
	Exited                         bool
	StdoutFirst, StdoutLen         int64 // held from the first to the length
	StderrFirst, StderrLen, StdinN int64
}

// Append appends e to a payload.
func (e *ExecInfo) Append(b []byte) []byte {
	b = AppendBool(AppendInt(AppendString(b, e.ID), int64(e.PID)), e.Exited)
	for _, v := range [...]int64{e.StdoutFirst, e.StdoutLen, e.StderrFirst, e.StderrLen, e.StdinN} {
		b = AppendInt(b, v)
	}
	return b
}

// DecodeExecs decodes the answer to MExecs. The list ends early when the
// guest's page is full: more says so, and the next call goes on after the last
// id.
func DecodeExecs(b []byte) (l []ExecInfo, more bool, err error) {
	d := NewDec(b)
	more = d.Bool()
	for range d.Count(1<<16, 8) {
		l = append(l, ExecInfo{d.String(MaxID), int(d.Uint(1<<31 - 1)), d.Bool(), d.Int(), d.Int(), d.Int(), d.Int(), d.Int()})
		if d.Bad() {
			break
		}
	}
	return l, more, d.End()
}

// Stats is what the guest sees of its sandbox.
type Stats struct {
	Processes  int
	Execs      int // known, ended ones included
	Orphans    int64
	MemTotal   int64 // bytes
	MemFree    int64 // bytes available
	Goroutines int   // of the guest
	Threads    int   // of the guest
	FDs        int   // of the guest
	RSS        int64 // of the guest, in bytes
}

// Append appends s as a payload.
func (s *Stats) Append(b []byte) []byte {
	for _, v := range [...]int64{int64(s.Processes), int64(s.Execs), s.Orphans, s.MemTotal, s.MemFree, int64(s.Goroutines), int64(s.Threads), int64(s.FDs), s.RSS} {
		b = AppendInt(b, v)
	}
	return b
}

// DecodeStats decodes the answer to MStats.
func DecodeStats(b []byte) (Stats, error) {
	d := NewDec(b)
	n := func() int { return int(d.Uint(1 << 31)) }
	s := Stats{Processes: n(), Execs: n(), Orphans: d.Int(), MemTotal: d.Int(), MemFree: d.Int(), Goroutines: n(), Threads: n(), FDs: n(), RSS: d.Int()}
	return s, d.End()
}

// Setup is what the guest writes before the first exec. Empty strings leave
// things as they are. It is given to process 1 in the environment, as
// hexadecimal of its payload, or later by MPrepare.
type Setup struct {
	Hostname   string // also written to /etc/hostname
	Hosts      string // contents of /etc/hosts
	ResolvConf string // contents of /etc/resolv.conf
	MachineID  string // contents of /etc/machine-id
	Dirs       []string
	Unmount    []string // mount points that the image shall not have
	DropCaps   []int    // capabilities(7), by number, that nothing in the sandbox has after all this
}

// KeptCaps are the capabilities that the guest keeps for itself where the
// sandbox has not got them: to start commands and to make files as any user, to
// signal them, to take capabilities from them; and CAP_SYS_RESOURCE, because the
// limit on processes is for what it starts, and a Go program that cannot have
// one more thread dies. In gVisor they mean nothing outside the sandbox.
var KeptCaps = []int{
	unix.CAP_CHOWN, unix.CAP_DAC_OVERRIDE, unix.CAP_FOWNER, unix.CAP_FSETID, unix.CAP_KILL,
	unix.CAP_SETGID, unix.CAP_SETUID, unix.CAP_SETPCAP, unix.CAP_SYS_RESOURCE,
}

// Append appends s as a payload.
func (s *Setup) Append(b []byte) []byte {
	b = AppendString(AppendString(AppendString(AppendString(b, s.Hostname), s.Hosts), s.ResolvConf), s.MachineID)
	b = AppendStrings(AppendStrings(b, s.Dirs), s.Unmount)
	caps := make([]string, len(s.DropCaps))
	for i, c := range s.DropCaps {
		caps[i] = strconv.Itoa(c)
	}
	return AppendStrings(b, caps)
}

// DecodeSetup decodes a Setup.
func DecodeSetup(b []byte) (Setup, error) {
	d := NewDec(b)
	s := Setup{Hostname: d.String(255), Hosts: d.String(32 << 10), ResolvConf: d.String(8 << 10), MachineID: d.String(64), Dirs: d.Strings(64, MaxPath), Unmount: d.Strings(64, MaxPath)}
	for _, c := range d.Strings(64, 3) {
		n, err := strconv.Atoi(c)
		if err != nil || n < 0 || n > 63 {
			return Setup{}, fmt.Errorf("capability %q", c)
		}
		s.DropCaps = append(s.DropCaps, n)
	}
	return s, d.End()
}

// The environment of process 1, which it removes when it has read it.
const (
	EnvPort  = "VIV_GUEST_PORT"  // TCP port on 127.0.0.1 to listen on
	EnvFD    = "VIV_GUEST_FD"    // instead: an inherited listening socket
	EnvKey   = "VIV_GUEST_KEY"   // the sandbox's key in hexadecimal
	EnvReady = "VIV_GUEST_READY" // "1": say on standard output that it listens
	EnvSetup = "VIV_GUEST_SETUP" // a Setup in hexadecimal, done before anything is served
)

// Xattr is an extended attribute of a file.
type Xattr struct{ Path, Name, Value string }

// Append appends x to a payload.
func (x *Xattr) Append(b []byte) []byte {
	return AppendString(AppendString(AppendString(b, x.Path), x.Name), x.Value)
}

// DecodeXattrs decodes a list of attributes.
func DecodeXattrs(b []byte) (l []Xattr, err error) {
	d := NewDec(b)
	for d.More() {
		l = append(l, Xattr{d.String(MaxPath), d.String(256), d.String(64 << 10)})
	}
	return l, d.End()
}

// AppendExecsHead appends the start of the answer to MExecs.
func AppendExecsHead(b []byte, more bool, n int) []byte {
	return AppendUint(AppendBool(b, more), uint64(n))
}

// AppendFail appends the payload of a TFail frame.
func AppendFail(b []byte, id uint64, err error) []byte { return AppendError(AppendUint(b, id), err) }
