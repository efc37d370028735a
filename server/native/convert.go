package native

import (
	"io/fs"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/sandbox"
)

func stamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func span(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

func duration(what string, d *durationpb.Duration) (time.Duration, error) {
	if d == nil {
		return 0, nil
	}
	if err := d.CheckValid(); err != nil {
		return 0, sandbox.Invalid.Errorf("%s: %w", what, err)
	}
	v := d.AsDuration()
	if v < 0 || v > maxTimeout {
		return 0, sandbox.Invalid.Errorf("%s of %v is not between 0 and %v", what, v, maxTimeout)
	}
	return v, nil
}

func specFrom(m *v1.SandboxSpec) (sandbox.Spec, error) {
	if m == nil {
		return sandbox.Spec{}, sandbox.Invalid.Errorf("spec is missing")
	}
	s := sandbox.Spec{
		Name: m.Name, Image: m.Image, Runtime: m.Runtime, Tags: m.Tags,
		Command: m.Command, RunImageCommand: m.RunImageCommand, Entrypoint: m.Entrypoint,
		Env: m.Env, Workdir: m.Workdir, User: m.User, Stdin: m.Stdin,
		Pull: m.Pull, Remove: m.Remove, Hostname: m.Hostname,
		Secrets: m.Secrets,
	}
	if m.Name != "" {
		if err := checkID("the name", m.Name); err != nil {
			return s, err
		}
		if looksLikeID(m.Name) {
			return s, sandbox.Invalid.Errorf("the name %q looks like an id", m.Name).WithHint("choose one that does not begin with sb-")
		}
	}
	if m.Hostname != "" {
		if err := checkID("the hostname", m.Hostname); err != nil {
			return s, err
		}
	}
	if m.Image == "" {
		return s, sandbox.Invalid.Errorf("the image is missing").WithHint("`viv images` lists those that are here")
	}
	if len(m.Image) > maxImageRef || !printable(m.Image) || strings.ContainsAny(m.Image, " \t") {
		return s, sandbox.Invalid.Errorf("image %q is not a reference, digest or id", clip(m.Image))
	}
	switch m.Runtime {
	case "", sandbox.RuntimeGVisor, sandbox.RuntimeVM:
	default:
		return s, sandbox.Invalid.Errorf("runtime %q", clip(m.Runtime)).WithHint("the runtimes are gvisor and vm")
	}
	var err error
	if s.Network, err = policyFrom(m.Network); err != nil {
		return s, err
	}
	if s.Tunnels, err = tunnelSpecsFrom(m.Tunnels); err != nil {
		return s, err
	}
	switch m.Pull {
	case "", sandbox.PullMissing, sandbox.PullAlways, sandbox.PullNever:
	default:
		return s, sandbox.Invalid.Errorf("pull policy %q", clip(m.Pull)).WithHint("the policies are missing, always and never")
	}
	if err := firstOf(
		checkTags(m.Tags), checkArgv("the command", m.Command), checkArgv("the entrypoint", m.Entrypoint),
		checkEnv(m.Env), checkUser(m.User), checkPath("the workdir", []byte(m.Workdir), true),
		checkSize(m.PtyRows, m.PtyCols),
	); err != nil {
		return s, err
	}
	if m.Pty {
		s.PTY = &sandbox.WindowSize{Rows: uint16(m.PtyRows), Cols: uint16(m.PtyCols)}
	}
	if s.Resources, err = resourcesFrom(m.Resources); err != nil {
		return s, err
	}
	if c := m.Capabilities; c != nil {
		for _, l := range [][]string{c.Add, c.Drop} {
			for _, n := range l {
				if err := checkID("a capability", n); err != nil {
					return s, err
				}
			}
		}
		s.Capabilities = sandbox.Capabilities{Add: c.Add, Drop: c.Drop}
	}
	if s.Timeout, err = duration("timeout", m.Timeout); err != nil {
		return s, err
	}
	if s.IdleTimeout, err = duration("idle timeout", m.IdleTimeout); err != nil {
		return s, err
	}
	if p := m.Probe; p != nil {
		s.Probe, err = probeFrom(p)
	}
	return s, err
}

func looksLikeID(s string) bool { return strings.HasPrefix(s, "sb-") }

func firstOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func resourcesFrom(r *v1.Resources) (sandbox.Resources, error) {
	if r == nil {
		return sandbox.Resources{}, nil
	}
	for what, v := range map[string]int64{
		"cpu request": r.CpuRequestMilli, "cpu limit": r.CpuLimitMilli, "memory request": r.MemoryRequest,
		"memory limit": r.MemoryLimit, "disk": r.Disk, "pids": r.Pids,
	} {
		if v < 0 {
			return sandbox.Resources{}, sandbox.Invalid.Errorf("%s of %d is below zero", what, v)
		}
	}
	return sandbox.Resources{
		CPURequest: r.CpuRequestMilli, CPULimit: r.CpuLimitMilli,
		MemoryRequest: r.MemoryRequest, MemoryLimit: r.MemoryLimit, Disk: r.Disk, Pids: r.Pids,
	}, nil
}

func probeFrom(p *v1.Probe) (*sandbox.Probe, error) {
	if (p.TcpPort == 0) == (len(p.Command) == 0) {
		return nil, sandbox.Invalid.Errorf("a probe has a TCP port or a command, and not both")
	}
	if p.TcpPort > 65535 {
		return nil, sandbox.Invalid.Errorf("probe port %d is not between 1 and 65535", p.TcpPort)
	}
	if err := checkArgv("the probe's command", p.Command); err != nil {
		return nil, err
	}
	interval, err := duration("probe interval", p.Interval)
	if err != nil {
		return nil, err
	}
	timeout, err := duration("probe timeout", p.Timeout)
	if err != nil {
		return nil, err
	}
	return &sandbox.Probe{TCPPort: uint16(p.TcpPort), Command: p.Command, Interval: interval, Timeout: timeout}, nil
}

func specTo(s sandbox.Spec) *v1.SandboxSpec {
	m := &v1.SandboxSpec{
		Name: s.Name, Image: s.Image, Runtime: s.Runtime, Tags: s.Tags,
		Command: s.Command, RunImageCommand: s.RunImageCommand, Entrypoint: s.Entrypoint,
		Env: s.Env, Workdir: s.Workdir, User: s.User, Stdin: s.Stdin,
		Resources: &v1.Resources{
			CpuRequestMilli: s.Resources.CPURequest, CpuLimitMilli: s.Resources.CPULimit,
			MemoryRequest: s.Resources.MemoryRequest, MemoryLimit: s.Resources.MemoryLimit,
			Disk: s.Resources.Disk, Pids: s.Resources.Pids,
		},
		Network: policyTo(s.Network),
		Timeout: span(s.Timeout), IdleTimeout: span(s.IdleTimeout),
		Pull: s.Pull, Remove: s.Remove, Hostname: s.Hostname,
		Secrets: s.Secrets, // their names
	}
	if len(s.Capabilities.Add)+len(s.Capabilities.Drop) > 0 {
		m.Capabilities = &v1.Capabilities{Add: s.Capabilities.Add, Drop: s.Capabilities.Drop}
	}
	for _, t := range s.Tunnels {
		m.Tunnels = append(m.Tunnels, tunnelSpecTo(t))
	}
	if s.PTY != nil {
		m.Pty, m.PtyRows, m.PtyCols = true, uint32(s.PTY.Rows), uint32(s.PTY.Cols)
	}
	if p := s.Probe; p != nil {
		m.Probe = &v1.Probe{TcpPort: uint32(p.TCPPort), Command: p.Command, Interval: span(p.Interval), Timeout: span(p.Timeout)}
	}
	return m
}

func sandboxTo(s sandbox.Sandbox) *v1.Sandbox {
	m := &v1.Sandbox{
		Id: s.ID, Tenant: s.Tenant, Spec: specTo(s.Spec),
		Stage: string(s.Stage), StageSince: stamp(s.StageSince), StageDeadline: stamp(s.StageDeadline),
		ImageId: s.ImageID, ImageDigest: s.ImageDigest, Address: s.Address,
		Created: stamp(s.Created), Started: stamp(s.Started), Deadline: stamp(s.Deadline),
		IsReady: s.IsReady, NetworkHash: s.NetworkHash, Death: deathTo(s.Death), Removed: s.Removed, Proof: proofTo(s.Proof),
	}
	if s.NetworkHash != "" {
		m.AppliedNetwork = policyTo(s.Spec.Network)
	}
	for _, st := range s.Stages {
		m.Stages = append(m.Stages, &v1.StageTime{Stage: string(st.Stage), Entered: stamp(st.Entered), Took: span(st.Took)})
	}
	return m
}

func deathTo(d *sandbox.Death) *v1.Death {
	if d == nil {
		return nil
	}
	m := &v1.Death{
		Reason: string(d.Reason), Stage: string(d.Stage), Message: d.Message, ErrorKind: string(d.Kind), Hint: d.Hint,
		PeakMemory: d.PeakMemory, Oom: d.OOM, LastOutput: d.LastOutput,
		Created: stamp(d.Created), Started: stamp(d.Started), Ended: stamp(d.Ended),
	}
	if d.Exit != nil {
		m.Exit, m.HasExit = exitTo(*d.Exit), true
	}
	return m
}

func usageTo(u sandbox.Usage) *v1.Usage {
	return &v1.Usage{Memory: u.Memory, PeakMemory: u.PeakMemory, Cpu: span(u.CPU), Pids: u.Pids, Disk: u.Disk}
}

func eventTo(e sandbox.Event) *v1.Event {
	return &v1.Event{Seq: e.Seq, Time: stamp(e.Time), SandboxId: e.SandboxID, Kind: e.Kind, Message: e.Message, Attrs: e.Attrs}
}

func execSpecFrom(m *v1.ExecSpec) (sandbox.ExecSpec, error) {
	if m == nil || len(m.Argv) == 0 || m.Argv[0] == "" {
		return sandbox.ExecSpec{}, sandbox.Invalid.Errorf("the command is missing")
	}
	s := sandbox.ExecSpec{
		Argv: m.Argv, Env: m.Env, Workdir: m.Workdir, User: m.User,
		Stdin: sandbox.StdinMode(m.Stdin), Output: sandbox.OutputMode(m.Output),
	}
	switch s.Stdin {
	case "", sandbox.StdinNone, sandbox.StdinPipe:
	default:
		return s, sandbox.Invalid.Errorf("stdin %q", clip(m.Stdin)).WithHint("it is none or pipe")
	}
	switch s.Output {
	case "", sandbox.OutputSeparate, sandbox.OutputMerged, sandbox.OutputDiscard:
	default:
		return s, sandbox.Invalid.Errorf("output %q", clip(m.Output)).WithHint("it is separate, merged or discard")
	}
	if err := firstOf(checkArgv("the command", m.Argv), checkEnv(m.Env), checkUser(m.User), checkPath("the workdir", []byte(m.Workdir), true)); err != nil {
		return s, err
	}
	if m.Pty != nil {
		if err := checkSize(m.Pty.Rows, m.Pty.Cols); err != nil {
			return s, err
		}
		s.PTY = &sandbox.WindowSize{Rows: uint16(m.Pty.Rows), Cols: uint16(m.Pty.Cols)}
	}
	var err error
	s.Timeout, err = duration("timeout", m.Timeout)
	return s, err
}

func exitTo(x sandbox.ExitStatus) *v1.ExitStatus {
	return &v1.ExitStatus{Code: int32(x.Code), Signal: int32(x.Signal), TimedOut: x.TimedOut, Error: x.Error, ErrorKind: string(x.Kind)}
}

func execTo(e sandbox.Exec) *v1.Exec {
	m := &v1.Exec{
		Id: e.ID, SandboxId: e.SandboxID, State: string(e.State), Pid: int32(e.PID),
		Started: stamp(e.Started), Ended: stamp(e.Ended),
		StdoutLen: e.StdoutLen, StdoutFirst: e.StdoutFirst,
		StderrLen: e.StderrLen, StderrFirst: e.StderrFirst, StdinLen: e.StdinLen,
		Spec: &v1.ExecSpec{
			Argv: e.Spec.Argv, Env: e.Spec.Env, Workdir: e.Spec.Workdir, User: e.Spec.User,
			Stdin: string(e.Spec.Stdin), Output: string(e.Spec.Output), Timeout: span(e.Spec.Timeout),
		},
	}
	if p := e.Spec.PTY; p != nil {
		m.Spec.Pty = &v1.WindowSize{Rows: uint32(p.Rows), Cols: uint32(p.Cols)}
	}
	if e.State == sandbox.ExecExited {
		m.Exit = exitTo(e.Exit)
	}
	return m
}

// Bits of st_mode; see inode(7).
const (
	modeSocket  = 0o140000
	modeLink    = 0o120000
	modeRegular = 0o100000
	modeBlock   = 0o060000
	modeDir     = 0o040000
	modeChar    = 0o020000
	modeFIFO    = 0o010000
	modeSetuid  = 0o4000
	modeSetgid  = 0o2000
	modeSticky  = 0o1000
)

// statMode turns the mode of io/fs into that of stat(2).
func statMode(m fs.FileMode) uint32 {
	out := uint32(m.Perm())
	switch {
	case m&fs.ModeDir != 0:
		out |= modeDir
	case m&fs.ModeSymlink != 0:
		out |= modeLink
	case m&fs.ModeSocket != 0:
		out |= modeSocket
	case m&fs.ModeNamedPipe != 0:
		out |= modeFIFO
	case m&fs.ModeCharDevice != 0:
		out |= modeChar
	case m&fs.ModeDevice != 0:
		out |= modeBlock
	default:
		out |= modeRegular
	}
	if m&fs.ModeSetuid != 0 {
		out |= modeSetuid
	}
	if m&fs.ModeSetgid != 0 {
		out |= modeSetgid
	}
	if m&fs.ModeSticky != 0 {
		out |= modeSticky
	}
	return out
}

// permMode turns permission bits of stat(2) into those of io/fs.
func permMode(m uint32) fs.FileMode {
	out := fs.FileMode(m & 0o777)
	if m&modeSetuid != 0 {
		out |= fs.ModeSetuid
	}
	if m&modeSetgid != 0 {
		out |= fs.ModeSetgid
	}
	if m&modeSticky != 0 {
		out |= fs.ModeSticky
	}
	return out
}

func fileTo(f sandbox.FileInfo) *v1.FileInfo {
	m := &v1.FileInfo{
		Path: []byte(f.Path), Size: f.Size, Mode: statMode(f.Mode), Uid: f.UID, Gid: f.GID, Mtime: stamp(f.ModTime),
	}
	if f.Target != "" {
		m.Target = []byte(f.Target)
	}
	return m
}
