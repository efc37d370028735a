package daemon

import (
	"log/slog"
	"net"
	"path/filepath"

	"vivarium/config"
	"vivarium/store"
	"vivarium/tunnel"
)

// newTunnels makes the ways in, which are opened once the engine is there.
func newTunnels(cfg *config.Config, st *store.Store, log *slog.Logger) (*tunnel.Manager, error) {
	t := cfg.Tunnel
	first, last, err := t.PortRange()
	if err != nil {
		return nil, err
	}
	var api []string
	if cfg.Listen != "" {
		host, _, err := net.SplitHostPort(cfg.Listen)
		if err != nil {
			return nil, err
		}
		api = append(api, host)
	}
	return tunnel.New(tunnel.Options{
		Dir: filepath.Join(cfg.DataDir, "tunnel"), Store: st, Listen: t.Listen, Domain: t.Domain, Port: uint16(t.URLPort), API: api,
		Cert: t.Cert, Key: t.Key, ACME: tunnel.ACME{Email: t.ACME.Email, Directory: t.ACME.Directory, Root: t.ACME.Root},
		TCPAddress: t.TCPListen, Ports: tunnel.Ports{First: first, Last: last}, MaxConnections: t.MaxConnections, Logger: log,
	})
}
