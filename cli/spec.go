package cli

import (
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/config"
)

// specFlags are the flags of what makes a sandbox.
type specFlags struct {
	cmd *cobra.Command

	policy *policyFlags
	prove  bool

	name, hostname, runtime, pull       string
	entrypoint, workdir, user           string
	tags, env, capAdd, capDrop, secrets []string
	tunnels                             []string
	cpus, cpuRequest                    string
	memory, memoryRequest, disk         string
	pids                                int64
	timeout, idleTimeout                time.Duration
	probeTCP                            uint16
	probeCmd                            string
	probeInterval, probeTimeout         time.Duration
}

func addSpecFlags(cmd *cobra.Command) *specFlags {
	f := &specFlags{cmd: cmd}
	fs := cmd.Flags()
	fs.StringVar(&f.name, "name", "", "name, unique among the living")
	fs.StringVar(&f.hostname, "hostname", "", "hostname inside; default is the name, else the id")
	fs.StringArrayVar(&f.tags, "tag", nil, "KEY=VALUE to find it by; may be repeated")
	fs.StringVar(&f.runtime, "runtime", "", "gvisor or vm")
	fs.StringVar(&f.pull, "pull", "", "missing, always or never")
	fs.StringVar(&f.cpus, "cpus", "", "hard limit of CPUs, such as 2 or 0.5")
	fs.StringVar(&f.cpuRequest, "cpu-request", "", "CPUs that are guaranteed")
	fs.StringVarP(&f.memory, "memory", "m", "", "hard limit of memory, such as 512MiB")
	fs.StringVar(&f.memoryRequest, "memory-request", "", "memory that is guaranteed")
	fs.StringVar(&f.disk, "disk", "", "bytes that can be written to the root filesystem, such as 10GiB")
	fs.Int64Var(&f.pids, "pids", 0, "processes and threads at most")
	fs.StringArrayVarP(&f.env, "env", "e", nil, "KEY=VALUE, or KEY to take it from here; may be repeated")
	fs.StringVarP(&f.workdir, "workdir", "w", "", "working directory")
	fs.StringVarP(&f.user, "user", "u", "", "name, uid, name:group or uid:gid")
	fs.StringVar(&f.entrypoint, "entrypoint", "", `instead of the image's; "" clears it`)
	fs.DurationVar(&f.timeout, "timeout", 0, "of its whole life, such as 30m")
	fs.DurationVar(&f.idleTimeout, "idle-timeout", 0, "without command, input or connection; 0 is none")
	fs.StringSliceVar(&f.capAdd, "cap-add", nil, "capabilities to add, such as NET_ADMIN")
	fs.StringSliceVar(&f.capDrop, "cap-drop", nil, "capabilities to drop; ALL is all")
	fs.Uint16Var(&f.probeTCP, "probe-tcp", 0, "ready when this TCP port takes connections")
	fs.StringVar(&f.probeCmd, "probe-cmd", "", "ready when this shell command succeeds inside")
	fs.DurationVar(&f.probeInterval, "probe-interval", 0, "between two tries (default 100ms)")
	fs.DurationVar(&f.probeTimeout, "probe-timeout", 0, "of one try (default 5s)")
	fs.StringArrayVar(&f.secrets, "secret", nil, "name of a secret (viv secret set) for its hosts; may be repeated")
	fs.StringArrayVar(&f.tunnels, "tunnel", nil, "PORT[/https|/h2|/tcp] to open a way in to, for everybody who reaches it; may be repeated")
	f.policy = addPolicyFlags(fs)
	fs.BoolVar(&f.prove, "prove", false, "have the network policy tried from inside first; where it is not enforced the sandbox fails")
	return f
}

// spec makes the message for the arguments: an image and a command.
func (f *specFlags) spec(a *app, args []string) (*v1.SandboxSpec, error) {
	image, argv, err := splitCommand(args)
	if err != nil {
		return nil, err
	}
	changed := f.cmd.Flags().Changed
	s := &v1.SandboxSpec{
		Name: f.name, Image: image, Runtime: f.runtime, Command: argv, RunImageCommand: len(argv) == 0,
		Workdir: f.workdir, User: f.user, Pull: f.pull, Hostname: f.hostname,
	}
	if s.Tags, err = keyValues("tag", f.tags, nil); err != nil {
		return nil, err
	}
	if s.Env, err = keyValues("env", f.env, a.Getenv); err != nil {
		return nil, err
	}
	if changed("entrypoint") {
		s.Entrypoint = []string{f.entrypoint}
	}
	if s.Network, err = f.policy.policy(); err != nil {
		return nil, err
	}
	s.Secrets = f.secrets
	for _, t := range f.tunnels {
		spec, err := tunnelSpec(t)
		if err != nil {
			return nil, err
		}
		s.Tunnels = append(s.Tunnels, spec)
	}
	if len(f.capAdd)+len(f.capDrop) > 0 {
		s.Capabilities = &v1.Capabilities{Add: capabilities(f.capAdd), Drop: capabilities(f.capDrop)}
	}
	if s.Resources, err = f.resources(); err != nil {
		return nil, err
	}
	for flag, d := range map[string]time.Duration{"timeout": f.timeout, "idle-timeout": f.idleTimeout} {
		if changed(flag) && (d < 0 || d == 0 && flag == "timeout") {
			return nil, usage("--%s must be more than 0", flag)
		}
	}
	if f.timeout > 0 {
		s.Timeout = durationpb.New(f.timeout)
	}
	if f.idleTimeout > 0 {
		s.IdleTimeout = durationpb.New(f.idleTimeout)
	}
	if changed("probe-tcp") && changed("probe-cmd") {
		return nil, usage("--probe-tcp and --probe-cmd exclude each other")
	}
	if changed("probe-tcp") || changed("probe-cmd") {
		s.Probe = &v1.Probe{TcpPort: uint32(f.probeTCP)}
		if f.probeCmd != "" {
			s.Probe.Command = []string{"/bin/sh", "-c", f.probeCmd} // inside the sandbox
		}
		if f.probeInterval > 0 {
			s.Probe.Interval = durationpb.New(f.probeInterval)
		}
		if f.probeTimeout > 0 {
			s.Probe.Timeout = durationpb.New(f.probeTimeout)
		}
	}
	return s, nil
}

func (f *specFlags) resources() (*v1.Resources, error) {
	r := &v1.Resources{}
	changed := f.cmd.Flags().Changed
	for _, c := range []struct {
		flag, text string
		to         *int64
	}{{"cpus", f.cpus, &r.CpuLimitMilli}, {"cpu-request", f.cpuRequest, &r.CpuRequestMilli}} {
		if !changed(c.flag) {
			continue
		}
		v, err := config.ParseCPU(c.text)
		if err != nil || v == 0 {
			return nil, usage("--%s: %q is not a number of CPUs such as 2, 0.5 or 500m", c.flag, c.text)
		}
		*c.to = int64(v)
	}
	for _, c := range []struct {
		flag, text string
		to         *int64
	}{{"memory", f.memory, &r.MemoryLimit}, {"memory-request", f.memoryRequest, &r.MemoryRequest}, {"disk", f.disk, &r.Disk}} {
		if !changed(c.flag) {
			continue
		}
		v, err := config.ParseSize(c.text)
		if err != nil || v == 0 {
			return nil, usage("--%s: %q is not a size such as 512MiB or 10GiB", c.flag, c.text)
		}
		*c.to = int64(v)
	}
	if changed("pids") {
		if f.pids <= 0 {
			return nil, usage("--pids must be more than 0")
		}
		r.Pids = f.pids
	}
	return r, nil
}

// keyValues parses KEY=VALUE. With getenv a bare KEY takes its value from
// there, and is left out where it is not set.
func keyValues(flag string, list []string, getenv func(string) string) (map[string]string, error) {
	if len(list) == 0 {
		return nil, nil
	}
	out := make(map[string]string, len(list))
	for _, kv := range list {
		k, v, ok := strings.Cut(kv, "=")
		switch {
		case k == "":
			return nil, usage("--%s %q is not KEY=VALUE", flag, kv)
		case ok:
		case getenv == nil:
			v = ""
		default:
			if v = getenv(k); v == "" {
				continue
			}
		}
		out[k] = v
	}
	return out, nil
}

// capabilities completes names as docker does: NET_ADMIN is CAP_NET_ADMIN.
func capabilities(list []string) []string {
	var out []string
	for _, c := range list {
		c = strings.ToUpper(strings.TrimSpace(c))
		if c != "ALL" && !strings.HasPrefix(c, "CAP_") {
			c = "CAP_" + c
		}
		out = append(out, c)
	}
	return out
}

// splitCommand takes IMAGE [--] COMMAND apart. Flags end at the image, so that
// those of the command need no quoting; one between the two is a mistake that
// would else be run as a command.
func splitCommand(args []string) (first string, argv []string, err error) {
	first, argv = args[0], args[1:]
	if len(argv) > 0 {
		switch {
		case argv[0] == "--":
			argv = argv[1:]
		case strings.HasPrefix(argv[0], "-"):
			return "", nil, usage("%s comes after %s: flags of viv come before it, those of the command after --", argv[0], first)
		}
	}
	return first, argv, nil
}
