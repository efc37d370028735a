// Package client is a Go client of the native API. It keeps one HTTP/2
// connection and reuses it; errors are sandbox.Error with kind and hint, so
// that errors.Is(err, sandbox.NotFound) works as it does inside the daemon.
package client

import (
	"context"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"connectrpc.com/connect"

	"vivarium/api/vivarium/v1/vivariumv1connect"
	"vivarium/sandbox"
)

// Chunk is how many bytes a message of a stream of bytes carries at most.
const Chunk = 256 << 10

// Flow control windows of HTTP/2; see the server's.
const (
	connWindow   = 4<<20 - 1
	streamWindow = 2 << 20
	frameSize    = Chunk + 4<<10
	maxMessage   = 16 << 20 // of an answer, such as a long list
)

// Client calls one daemon. It is safe for concurrent use.
type Client struct {
	// The services, for calls without a helper. Their errors are sandbox.Error
	// as well.
	Sandboxes vivariumv1connect.SandboxServiceClient
	Execs     vivariumv1connect.ExecServiceClient
	Files     vivariumv1connect.FileServiceClient
	Ports     vivariumv1connect.PortServiceClient
	Images    vivariumv1connect.ImageServiceClient
	Networks  vivariumv1connect.NetworkServiceClient
	Secrets   vivariumv1connect.SecretServiceClient
	Tunnels   vivariumv1connect.TunnelServiceClient
	Daemon    vivariumv1connect.DaemonServiceClient

	transport *http.Transport
}

// New returns a client for the daemon at addr: http://HOST:PORT, HOST:PORT, or
// unix:///PATH. It does not connect yet. An address that is none of these is
// Invalid.
func New(addr, token string) (*Client, error) {
	base, dial, err := parse(addr)
	if err != nil {
		return nil, err
	}
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	t := &http.Transport{
		DialContext: dial,
		Protocols:   &protocols,
		HTTP2: &http.HTTP2Config{
			MaxReadFrameSize:              frameSize,
			MaxReceiveBufferPerConnection: connWindow,
			MaxReceiveBufferPerStream:     streamWindow,
			SendPingTimeout:               30 * time.Second,
			PingTimeout:                   15 * time.Second,
		},
		DisableCompression: true,
		IdleConnTimeout:    90 * time.Second,
	}
	hc := &http.Client{Transport: t}
	opts := []connect.ClientOption{
		connect.WithInterceptors(&interceptor{auth: "Bearer " + token}),
		connect.WithAcceptCompression("gzip", nil, nil), // loopback is faster than gzip
		connect.WithReadMaxBytes(maxMessage),
	}
	return &Client{
		Sandboxes: vivariumv1connect.NewSandboxServiceClient(hc, base, opts...),
		Execs:     vivariumv1connect.NewExecServiceClient(hc, base, opts...),
		Files:     vivariumv1connect.NewFileServiceClient(hc, base, opts...),
		Ports:     vivariumv1connect.NewPortServiceClient(hc, base, opts...),
		Images:    vivariumv1connect.NewImageServiceClient(hc, base, opts...),
		Networks:  vivariumv1connect.NewNetworkServiceClient(hc, base, opts...),
		Secrets:   vivariumv1connect.NewSecretServiceClient(hc, base, opts...),
		Tunnels:   vivariumv1connect.NewTunnelServiceClient(hc, base, opts...),
		Daemon:    vivariumv1connect.NewDaemonServiceClient(hc, base, opts...),
		transport: t,
	}, nil
}

// Close closes the connection once it is idle.
func (c *Client) Close() { c.transport.CloseIdleConnections() }

type dialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

func parse(addr string) (string, dialFunc, error) {
	var d net.Dialer
	if path, ok := strings.CutPrefix(addr, "unix://"); ok {
		if !strings.HasPrefix(path, "/") {
			return "", nil, sandbox.Invalid.Errorf("server address %q: the path of a unix socket begins with /", addr)
		}
		return "http://unix", func(ctx context.Context, _, _ string) (net.Conn, error) {
			return d.DialContext(ctx, "unix", path)
		}, nil
	}
	if !strings.Contains(addr, "://") {
		addr = "http://" + addr
	}
	u, err := url.Parse(addr)
	if err != nil || u.Scheme != "http" || u.Host == "" || (u.Path != "" && u.Path != "/") {
		return "", nil, sandbox.Invalid.Errorf("server address %q", addr).
			WithHint("write it as http://127.0.0.1:7878 or unix:///var/lib/vivarium/viv.sock")
	}
	return "http://" + u.Host, d.DialContext, nil
}

// interceptor adds the token and turns errors into ours.
type interceptor struct{ auth string }

func (i *interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		req.Header().Set("Authorization", i.auth)
		res, err := next(ctx, req)
		return res, Error(err)
	}
}

func (i *interceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		conn.RequestHeader().Set("Authorization", i.auth)
		return clientConn{conn}
	}
}

func (i *interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

type clientConn struct{ connect.StreamingClientConn }

func (c clientConn) Send(m any) error    { return Error(c.StreamingClientConn.Send(m)) }
func (c clientConn) Receive(m any) error { return Error(c.StreamingClientConn.Receive(m)) }
