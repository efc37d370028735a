package cli

import (
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"vivarium/config"
	"vivarium/sandbox"
)

// systemConfig is read where no other file is named and it exists.
const systemConfig = "/etc/vivarium/config.yaml"

// configFlags are the flags of what reads the daemon's configuration.
type configFlags struct {
	cmd  *cobra.Command
	file string
	set  []string
}

// settingFlags are the settings that have a flag of their own.
var settingFlags = []struct{ flag, path, help string }{
	{"data-dir", "data_dir", "where everything is kept"},
	{"listen", "listen", `TCP address; "" is none`},
	{"unix-socket", "unix_socket", "path of the unix socket; default is viv.sock in the data directory"},
	{"log-level", "log.level", "debug, info, warn or error"},
	{"log-format", "log.format", "text or json"},
	{"pool", "pool.size", "machines kept booted"},
}

func addConfigFlags(cmd *cobra.Command) *configFlags {
	f := &configFlags{cmd: cmd}
	fs := cmd.Flags()
	fs.StringVar(&f.file, "config", "", "config file (VIV_CONFIG; default "+systemConfig+" if it exists)")
	for _, s := range settingFlags {
		fs.String(s.flag, "", s.help)
	}
	fs.StringArrayVar(&f.set, "set", nil, "any setting as PATH=VALUE, such as pool.size=8; may be repeated")
	return f
}

func (f *configFlags) load(a *app) (*config.Config, error) {
	src := config.Source{File: f.file, Environ: a.Environ}
	if src.File == "" {
		src.File = a.Getenv("VIV_CONFIG")
	}
	if src.File == "" {
		if _, err := os.Stat(systemConfig); err == nil {
			src.File = systemConfig
		}
	}
	for _, s := range settingFlags {
		if f.cmd.Flags().Changed(s.flag) {
			v, _ := f.cmd.Flags().GetString(s.flag)
			src.Set = append(src.Set, config.Setting{Path: s.path, Value: v, Flag: "--" + s.flag})
		}
	}
	for _, kv := range f.set {
		path, value, ok := strings.Cut(kv, "=")
		if !ok {
			return nil, usage("--set %q is not PATH=VALUE", kv)
		}
		src.Set = append(src.Set, config.Setting{Path: path, Value: value})
	}
	return config.Load(src)
}

func (a *app) serveCmd() *cobra.Command {
	var printConfig, resetSecrets bool
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the daemon",
		Long:  "Run the daemon in the foreground, until SIGINT or SIGTERM. Sandboxes go on running when it stops, and are found again when it starts.",
		Args:  exactly(),
	}
	src := addConfigFlags(cmd)
	cmd.Flags().BoolVar(&printConfig, "print-config", false, "print a config file with every setting, its meaning and its default")
	cmd.Flags().BoolVar(&resetSecrets, "reset-secrets", false, "first delete all secrets, of all tenants: for a key that is lost")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if printConfig {
			return printed(a.Out, config.Reference)
		}
		cfg, err := src.load(a)
		if err != nil {
			return err
		}
		if a.hooks.Serve == nil {
			return sandbox.Unsupported.Errorf("this build has no daemon")
		}
		ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		if resetSecrets {
			if err := a.hooks.ResetSecrets(ctx, cfg); err != nil {
				return err
			}
		}
		return a.hooks.Serve(ctx, cfg)
	}
	return cmd
}
