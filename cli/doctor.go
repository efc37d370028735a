package cli

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/spf13/cobra"

	"vivarium/config"
	"vivarium/doctor"
	"vivarium/network/policy"
)

func (a *app) doctorCmd() *cobra.Command {
	var asJSON bool
	o := doctor.Options{}
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what this host lacks or has wrong, the effect, and the exact fix",
		Long: `Look at whether this host can carry sandboxes, with the daemon's own
configuration. It changes nothing; what it makes to try something, up to the
boot of a machine, is gone when it ends. The exit code is 1 if something that is
needed is missing.`,
		Args: exactly(),
	}
	src := addConfigFlags(cmd)
	cmd.Flags().IntVar(&o.Sandboxes, "sandboxes", 100, "how many shall be alive at once, for what is said about the host's limits")
	cmd.Flags().BoolVar(&o.NoBoot, "no-boot", false, "do not try to boot a machine")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the findings as JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if o.Sandboxes < 1 || o.Sandboxes > 100_000 {
			return usage("--sandboxes is not between 1 and 100000")
		}
		cfg, err := src.load(a)
		if err != nil {
			return err
		}
		doctorOptions(&o, cfg)
		ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		findings := doctor.Run(ctx, o)
		if asJSON {
			err = a.writeJSON(findings)
		} else {
			err = a.printFindings(findings)
		}
		if err == nil && doctor.Failed(findings) {
			return &exitCode{code: exitError}
		}
		return err
	}
	return cmd
}

// doctorOptions takes what matters from the configuration, which was checked.
func doctorOptions(o *doctor.Options, cfg *config.Config) {
	o.DataDir, o.UnixSocket = cfg.DataDir, cfg.UnixSocket
	o.CPURequest, o.MemoryRequest = int64(cfg.Defaults.CPURequest), int64(cfg.Defaults.MemoryRequest)
	o.ReserveCPU, o.ReserveMemory, o.ReserveDisk = int64(cfg.Reserve.CPU), int64(cfg.Reserve.Memory), int64(cfg.Reserve.Disk)
	o.FirstUID, o.UIDs = cfg.UIDs.First, cfg.UIDs.Count
	n := &o.Network
	n.Dir, n.Instance = cfg.DataDir, instanceOf(cfg.DataDir)
	if p, err := netip.ParsePrefix(cfg.Network.Subnet); err == nil {
		n.Subnet = p
	}
	for _, r := range cfg.Network.Resolvers {
		if ap, err := netip.ParseAddrPort(r); err == nil {
			n.Upstream = append(n.Upstream, ap)
		} else if ip, err := netip.ParseAddr(r); err == nil {
			n.Upstream = append(n.Upstream, netip.AddrPortFrom(ip, 53))
		}
	}
	for _, g := range cfg.Network.Grants {
		if p, err := prefixOf(g.Prefix); err == nil {
			ports := make([]uint16, len(g.Ports))
			for i, port := range g.Ports {
				ports[i] = uint16(port)
			}
			n.Grants = append(n.Grants, policy.Grant{Prefix: p, Ports: ports})
		}
	}
	for _, s := range cfg.Network.Deny {
		if p, err := prefixOf(s); err == nil {
			n.Deny = append(n.Deny, p)
		}
	}
}

// prefixOf takes an address for the network of it alone, as the configuration
// does.
func prefixOf(s string) (netip.Prefix, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	return netip.ParsePrefix(s)
}

// instanceOf is how the daemon of a data directory names what it makes on the
// host: what is there already must not be taken for another's.
func instanceOf(dataDir string) string {
	if abs, err := filepath.Abs(dataDir); err == nil {
		dataDir = abs
	}
	sum := sha256.Sum256([]byte(dataDir))
	return hex.EncodeToString(sum[:])[:6]
}

func (a *app) printFindings(findings []doctor.Finding) error {
	count := map[doctor.Severity]int{}
	for _, f := range findings {
		mark := "ok"
		if !f.OK {
			mark = string(f.Severity)
			count[f.Severity]++
		}
		s := fmt.Sprintf("%-8s %s", clean(mark), clean(f.Name))
		if f.Detail != "" {
			s += ": " + clean(f.Detail)
		}
		s += "\n"
		if !f.OK {
			if f.Effect != "" {
				s += "         effect: " + clean(f.Effect) + "\n"
			}
			if f.Fix != "" {
				s += "         fix:    " + clean(f.Fix) + "\n"
			}
		}
		if err := printed(a.Out, s); err != nil {
			return err
		}
	}
	sum := "\nsandboxes can run here"
	if n := count[doctor.Error]; n > 0 {
		sum = fmt.Sprintf("\nsandboxes cannot run here as they should: %d to mend", n)
	}
	return printed(a.Out, fmt.Sprintf("%s; %d warnings, %d notes\n", sum, count[doctor.Warning], count[doctor.Note]))
}
