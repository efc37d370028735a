package engine

import (
	"maps"
	"net/netip"
	"path"
	"regexp"
	"strings"
	"time"

	"vivarium/sandbox"
)

var (
	nameForm = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}$`)
	execForm = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.:-]{0,127}$`)
	envForm  = regexp.MustCompile(`^[^=\x00]+$`)
)

const (
	maxTags     = 64
	maxTagBytes = 4096
	minMemory   = 32 << 20 // below it not even the guest runs
	minDisk     = 1 << 20
	minPids     = 16
	defProbe    = 100 * time.Millisecond
	minProbe    = 10 * time.Millisecond // a probe is not to keep the daemon busy
	defProbeMax = 5 * time.Second
)

// complete fills in what a spec leaves out and checks it against the node.
func (e *Engine) complete(s sandbox.Spec) (sandbox.Spec, error) {
	d := e.opts.Defaults
	set := func(v *int64, def int64) {
		if *v == 0 {
			*v = def
		}
	}
	if s.Runtime == "" {
		s.Runtime = d.Runtime
	}
	if _, ok := e.runtimes[s.Runtime]; !ok {
		if s.Runtime == sandbox.RuntimeVM || s.Runtime == sandbox.RuntimeGVisor {
			return s, sandbox.Unsupported.Errorf("runtime %q does not work on this node", s.Runtime).WithHint("`viv doctor` says why")
		}
		return s, sandbox.Invalid.Errorf("runtime %q: want gvisor or vm", s.Runtime)
	}
	if s.Name != "" && !nameForm.MatchString(s.Name) {
		return s, sandbox.Invalid.Errorf("name %q: want up to 63 of a-z, A-Z, 0-9, _, . and -, the first a letter or digit", s.Name)
	}
	if strings.HasPrefix(s.Name, "sb-") {
		return s, sandbox.Invalid.Errorf("name %q: sb- begins an id", s.Name)
	}
	if s.Image == "" {
		return s, sandbox.Invalid.Errorf("no image given").WithHint("`viv images` lists those that are here")
	}
	if err := checkTags(s.Tags); err != nil {
		return s, err
	}
	if s.Workdir != "" && !path.IsAbs(s.Workdir) {
		return s, sandbox.Invalid.Errorf("workdir %q: want an absolute path", s.Workdir)
	}
	for k, v := range s.Env {
		if !envForm.MatchString(k) || strings.ContainsRune(v, 0) {
			return s, sandbox.Invalid.Errorf("environment variable %q: neither name nor value may hold a NUL, nor the name a =", k)
		}
	}
	r := &s.Resources
	for _, v := range []struct {
		name string
		n    int64
	}{{"cpu request", r.CPURequest}, {"cpu limit", r.CPULimit}, {"memory request", r.MemoryRequest}, {"memory limit", r.MemoryLimit}, {"disk", r.Disk}, {"pids", r.Pids}} {
		if v.n < 0 {
			return s, sandbox.Invalid.Errorf("%s of %d: must not be negative", v.name, v.n)
		}
	}
	if r.CPULimit == 0 {
		r.CPULimit = max(d.Resources.CPULimit, r.CPURequest)
	}
	if r.MemoryLimit == 0 {
		r.MemoryLimit = max(d.Resources.MemoryLimit, r.MemoryRequest)
	}
	if r.CPURequest == 0 {
		r.CPURequest = min(d.Resources.CPURequest, r.CPULimit)
	}
	if r.MemoryRequest == 0 {
		r.MemoryRequest = min(d.Resources.MemoryRequest, r.MemoryLimit)
	}
	set(&r.Disk, d.Resources.Disk)
	set(&r.Pids, d.Resources.Pids)
	l := e.opts.Limits
	switch {
	case r.CPURequest > r.CPULimit:
		return s, sandbox.Invalid.Errorf("cpu request of %d milli-cores is above its limit of %d", r.CPURequest, r.CPULimit)
	case r.MemoryRequest > r.MemoryLimit:
		return s, sandbox.Invalid.Errorf("memory request of %d bytes is above its limit of %d", r.MemoryRequest, r.MemoryLimit)
	case r.CPURequest > l.CPU:
		return s, sandbox.Invalid.Errorf("cpu request of %d milli-cores: this node has %d to give", r.CPURequest, l.CPU)
	case l.HostCPU > 0 && r.CPULimit > max(l.HostCPU, d.Resources.CPULimit):
		return s, sandbox.Invalid.Errorf("cpu limit of %d milli-cores: this node has %d", r.CPULimit, l.HostCPU)
	case r.MemoryRequest > l.Memory || r.MemoryLimit > l.Memory:
		return s, sandbox.Invalid.Errorf("memory of %d MiB: this node has %d MiB to give", max(r.MemoryRequest, r.MemoryLimit)>>20, l.Memory>>20)
	case r.MemoryLimit < minMemory:
		return s, sandbox.Invalid.Errorf("memory limit of %d bytes: at least %d MiB are needed", r.MemoryLimit, minMemory>>20)
	case r.Disk < minDisk:
		return s, sandbox.Invalid.Errorf("disk of %d bytes: at least %d MiB are needed", r.Disk, minDisk>>20)
	case l.MaxDisk > 0 && r.Disk > l.MaxDisk:
		return s, sandbox.Invalid.Errorf("disk of %d MiB: at most %d MiB are allowed here", r.Disk>>20, l.MaxDisk>>20)
	case r.Pids < minPids:
		return s, sandbox.Invalid.Errorf("%d pids: at least %d are needed", r.Pids, minPids)
	case l.MaxPids > 0 && r.Pids > l.MaxPids:
		return s, sandbox.Invalid.Errorf("%d pids: at most %d are allowed here", r.Pids, l.MaxPids)
	}
	if s.Timeout == 0 {
		s.Timeout = d.Timeout
	}
	if err := e.checkTimeout(s.Timeout); err != nil {
		return s, err
	}
	if s.IdleTimeout == 0 {
		s.IdleTimeout = d.IdleTimeout
	}
	if s.IdleTimeout < 0 {
		return s, sandbox.Invalid.Errorf("idle timeout of %s: must not be negative", s.IdleTimeout)
	}
	if s.Network.Mode == "" {
		s.Network.Mode = d.Network.Mode
	}
	if err := e.checkSecrets(s); err != nil {
		return s, err
	}
	if err := e.checkTunnels(&s); err != nil {
		return s, err
	}
	s.Network.Inspect = nil // it is for us to say
	np, err := e.opts.Network.Compile(s.Network)
	if err != nil {
		return s, err
	}
	s.Network = np.NetworkPolicy
	switch s.Pull {
	case "":
		s.Pull = sandbox.PullMissing
	case sandbox.PullMissing, sandbox.PullAlways, sandbox.PullNever:
	default:
		return s, sandbox.Invalid.Errorf("pull %q: want missing, always or never", s.Pull)
	}
	if p := s.Probe; p != nil {
		if (p.TCPPort == 0) == (len(p.Command) == 0) {
			return s, sandbox.Invalid.Errorf("probe: want either a TCP port or a command")
		}
		if p.Interval < 0 || p.Timeout < 0 {
			return s, sandbox.Invalid.Errorf("probe: its times must not be negative")
		}
		q := *p
		if q.Interval == 0 {
			q.Interval = defProbe
		}
		q.Interval = max(q.Interval, minProbe)
		if q.Timeout == 0 {
			q.Timeout = defProbeMax
		}
		s.Probe = &q
	}
	if len(s.Hostname) > 63 || strings.ContainsAny(s.Hostname, " \t\r\n/\x00") {
		return s, sandbox.Invalid.Errorf("host name %q: want up to 63 characters without blanks", s.Hostname)
	}
	return s, nil
}

func (e *Engine) checkTimeout(d time.Duration) error {
	if d < 0 {
		return sandbox.Invalid.Errorf("timeout of %s: must not be negative", d)
	}
	if l := e.opts.Limits.MaxTimeout; l > 0 && d > l {
		return sandbox.Invalid.Errorf("timeout of %s: at most %s is allowed here", d, l)
	}
	return nil
}

func checkTags(tags map[string]string) error {
	if len(tags) > maxTags {
		return sandbox.Invalid.Errorf("%d tags: at most %d are allowed", len(tags), maxTags)
	}
	n := 0
	for k, v := range tags {
		if k == "" {
			return sandbox.Invalid.Errorf("tag without a name")
		}
		n += len(k) + len(v)
	}
	if n > maxTagBytes {
		return sandbox.Invalid.Errorf("tags of %d bytes: at most %d are allowed", n, maxTagBytes)
	}
	return nil
}

// mainCommand is what the sandbox runs by itself, after Docker's rules: the
// entrypoint goes before the command, and a new entrypoint clears the image's
// command. Nil is nothing.
func mainCommand(s sandbox.Spec, entrypoint, cmd []string) []string {
	if !wantsMain(s) {
		return nil
	}
	if len(s.Entrypoint) > 0 {
		entrypoint, cmd = s.Entrypoint, nil
		if entrypoint[0] == "" {
			entrypoint = nil
		}
	}
	if len(s.Command) > 0 {
		cmd = s.Command
	}
	return append(append([]string(nil), entrypoint...), cmd...)
}

// mergedEnv is the environment of image and spec.
func mergedEnv(sb *sandbox.Sandbox) map[string]string {
	bare := *sb
	bare.Base.Under = nil
	return execSpec(&bare, nil, sandbox.ExecSpec{}).Env
}

// execSpec is an exec with what the sandbox and its image give to it.
func execSpec(sb *sandbox.Sandbox, secrets map[string]string, x sandbox.ExecSpec) sandbox.ExecSpec {
	env := maps.Clone(sb.Base.Under)
	if env == nil {
		env = map[string]string{}
	}
	for _, kv := range sb.Base.Env {
		if k, v, ok := strings.Cut(kv, "="); ok {
			env[k] = v
		}
	}
	maps.Copy(env, secrets)
	maps.Copy(env, sb.Spec.Env)
	env["HOSTNAME"] = hostname(sb)
	for k, v := range x.Env {
		env[k] = v
	}
	x.Env = env
	if x.Workdir == "" {
		x.Workdir = workdir(sb)
	}
	if x.User == "" {
		x.User = userOf(sb)
	}
	return x
}

func workdir(sb *sandbox.Sandbox) string {
	if sb.Spec.Workdir != "" {
		return sb.Spec.Workdir
	}
	if sb.Base.Workdir != "" {
		return sb.Base.Workdir
	}
	return "/"
}

func userOf(sb *sandbox.Sandbox) string {
	if sb.Spec.User != "" {
		return sb.Spec.User
	}
	return sb.Base.User
}

func hostname(sb *sandbox.Sandbox) string {
	if sb.Spec.Hostname != "" {
		return sb.Spec.Hostname
	}
	if sb.Spec.Name != "" {
		return sb.Spec.Name
	}
	return strings.ToLower(sb.ID)
}

func addrString(a netip.Addr) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}
