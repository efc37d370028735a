package config

import (
	"strings"
	"testing"
)

func TestTunnel(t *testing.T) {
	t.Parallel()
	for file, want := range map[string]string{
		"tunnel: {listen: nowhere}":                                                        "tunnel.listen: \"nowhere\" is not an address",
		"tunnel: {listen: \"127.0.0.1:0\"}":                                                "tunnel.listen",
		"tunnel: {listen: \"127.0.0.1:7878\"}":                                             "is the API's",
		"tunnel: {domain: localhost}":                                                      "tunnel.domain: \"localhost\" is not a domain of two labels",
		"tunnel: {domain: Viv.example.com}":                                                "tunnel.domain",
		"tunnel: {domain: 127.0.0.1}":                                                      "tunnel.domain",
		"tunnel: {url_port: 65536}":                                                        "tunnel.url_port",
		"tunnel: {cert: /etc/c.pem}":                                                       "tunnel.cert: is only of use together with tunnel.key",
		"tunnel: {cert: c.pem, key: /etc/k.pem}":                                           "tunnel.cert: \"c.pem\" is not a clean absolute path",
		"tunnel: {acme: {email: nobody}}":                                                  "tunnel.acme.email: \"nobody\" is not an address",
		"tunnel: {acme: {email: a@example.com}}":                                           "no authority signs for tunnel.domain",
		"tunnel: {acme: {directory: \"http://ca.example.com\"}}":                           "tunnel.acme.directory",
		"tunnel: {tcp_listen: \"127.0.0.1:1\"}":                                            "tunnel.tcp_listen",
		"tunnel: {ports: \"1-10\"}":                                                        "tunnel.ports: \"1-10\" is not a range of ports from 1024 on",
		"tunnel: {ports: \"3000-2000\"}":                                                   "tunnel.ports",
		"tunnel: {ports: \"20000\"}":                                                       "tunnel.ports: \"20000\" is not a range such as 20000-20999",
		"tunnel: {max_connections: 0}":                                                     "tunnel.max_connections",
		"tunnel: {domain: t.example.com, acme: {email: a@example.com}}":                    "",
		"tunnel: {listen: \"\", ports: \"\"}":                                              "",
		"tunnel: {listen: \"0.0.0.0:443\", domain: t.example.com, ports: \"20000-20000\"}": "",
	} {
		c, err := load(t, file+"\n", Source{})
		switch {
		case want == "" && err != nil, want != "" && (err == nil || !strings.Contains(err.Error(), want)):
			t.Errorf("%s: %v, want %s", file, err, want)
		case err == nil && c.Tunnel.Ports == "20000-20000":
			if a, b, err := c.Tunnel.PortRange(); a != 20000 || b != 20000 || err != nil {
				t.Errorf("%d-%d, %v", a, b, err)
			}
		}
	}
}
