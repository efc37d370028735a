package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/net/netutil"

	"vivarium/sandbox"
)

// Bounds of the listener. They keep a slow or hostile client from holding more
// than its connection.
const (
	readHeaderTimeout = 10 * time.Second // from accept to the end of the header
	idleTimeout       = 2 * time.Minute  // of a connection without calls
	bodyTimeout       = 30 * time.Second // to send a whole request that is not a stream
	chunkTimeout      = 10 * time.Minute // between two messages of an upload
	pingAfter         = 30 * time.Second // of silence; a peer that does not answer is dropped
	pingTimeout       = 15 * time.Second
	maxHeader         = 32 << 10 // bytes
	maxConns          = 4096     // per listener
	maxStreams        = 1024     // per connection
	stopTimeout       = 5 * time.Second

	// MaxMessage bounds one message of a client, decompressed, in bytes.
	MaxMessage = 4 << 20
	// Chunk is how many bytes a message of a stream of bytes carries at most.
	Chunk = 256 << 10

	// Windows of HTTP/2 flow control: large enough for full speed over
	// loopback, and what one connection can make us hold.
	connWindow   = 4<<20 - 1
	streamWindow = 2 << 20
	frameSize    = Chunk + 4<<10 // one message and its header in one frame
)

// Options of a Server.
type Options struct {
	// Listen is the TCP address; "" for none.
	Listen string
	// Public allows an address that other machines reach.
	Public bool
	// UnixSocket is the path of the socket, made with mode 0600; "" for none.
	UnixSocket string
	Log        *slog.Logger
	// Wrap is put around the TCP listener, for TLS; nil for none.
	Wrap func(net.Listener) net.Listener
}

// Server listens. Register handlers with Handle before Serve.
type Server struct {
	opts  Options
	log   *slog.Logger
	mux   *http.ServeMux
	body  map[string]time.Duration // by procedure: client streams, 0 is no timeout
	lns   []net.Listener
	addrs []net.Addr

	headerTimeout, bodyTimeout time.Duration // shorter in tests
}

// Listen opens the sockets, so that a port that is taken is an error before
// anything else starts: Invalid for an address that may not be used, Conflict
// for one in use.
func Listen(opts Options) (*Server, error) {
	if opts.Log == nil {
		opts.Log = slog.Default()
	}
	s := &Server{opts: opts, log: opts.Log, mux: http.NewServeMux(), body: map[string]time.Duration{}, headerTimeout: readHeaderTimeout, bodyTimeout: bodyTimeout}
	s.mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		_, _ = w.Write([]byte("ok\n"))
	})
	if opts.Listen != "" {
		if err := s.listenTCP(); err != nil {
			return nil, err
		}
	}
	if opts.UnixSocket != "" {
		if err := s.listenUnix(); err != nil {
			s.closeListeners()
			return nil, err
		}
	}
	if len(s.lns) == 0 {
		return nil, sandbox.Invalid.Errorf("neither a TCP address nor a unix socket to listen on")
	}
	return s, nil
}

func (s *Server) listenTCP() error {
	host, _, err := net.SplitHostPort(s.opts.Listen)
	if err != nil {
		return sandbox.Invalid.Errorf("listen address %q: %w", s.opts.Listen, err).WithHint("write it as 127.0.0.1:7878")
	}
	if !isLoopback(host) {
		if !s.opts.Public {
			return sandbox.Invalid.Errorf("listen address %q can be reached from other machines, and there is no TLS yet", s.opts.Listen).
				WithHint("listen on 127.0.0.1, or set `listen_public: true` in the config if the network in front of it is trusted")
		}
		s.log.Warn("listening on an address that other machines can reach, without TLS: tokens and data pass in the clear", "listen", s.opts.Listen)
	}
	l, err := net.Listen("tcp", s.opts.Listen)
	if err != nil {
		return sandbox.Conflict.Errorf("listen: %w", err).WithHint("is another daemon running? choose another address with --listen")
	}
	s.addrs = append(s.addrs, l.Addr())
	l = netutil.LimitListener(l, maxConns)
	if s.opts.Wrap != nil {
		l = s.opts.Wrap(l)
	}
	s.lns = append(s.lns, l)
	return nil
}

// isLoopback is true for an address of this machine only. A name is looked at
// as a name: what it resolves to can change.
func isLoopback(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

func (s *Server) listenUnix() error {
	path := s.opts.UnixSocket
	if len(path) > 107 { // sun_path of unix(7)
		return sandbox.Invalid.Errorf("the path of the unix socket is longer than 107 bytes: %s", path).
			WithHint("set `unix_socket` in the config to a shorter path")
	}
	if fi, err := os.Lstat(path); err == nil {
		if fi.Mode().Type() != os.ModeSocket {
			return sandbox.Conflict.Errorf("%s exists and is not a socket", path)
		}
		if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
			c.Close()
			return sandbox.Conflict.Errorf("another daemon answers on %s", path).WithHint("stop it first, or use another --data-dir")
		}
		if err := os.Remove(path); err != nil {
			return sandbox.Internal.Errorf("remove old socket: %w", err)
		}
	}
	// Made under a name that nobody knows, in a directory of root's, and given
	// its mode before its name: there is no moment in which others can connect.
	tmp, err := os.MkdirTemp(filepath.Dir(path), ".s")
	if err != nil {
		return sandbox.Internal.Errorf("make unix socket: %w", err)
	}
	defer os.RemoveAll(tmp)
	hidden := filepath.Join(tmp, "s")
	if len(hidden) > 107 {
		return sandbox.Invalid.Errorf("the path of the unix socket is too long: %s", path).
			WithHint("set `unix_socket` in the config to a shorter path")
	}
	l, err := net.Listen("unix", hidden)
	if err != nil {
		return sandbox.Internal.Errorf("listen: %w", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	err = os.Chmod(hidden, 0o600)
	if err == nil {
		err = os.Rename(hidden, path)
	}
	if err != nil {
		l.Close()
		return sandbox.Internal.Errorf("make unix socket: %w", err)
	}
	s.addrs = append(s.addrs, &net.UnixAddr{Name: path, Net: "unix"})
	s.lns = append(s.lns, netutil.LimitListener(l, maxConns))
	return nil
}

// Addrs are the addresses that are listened on: TCP first, then unix.
func (s *Server) Addrs() []net.Addr { return s.addrs }

// Handle registers a handler, as http.ServeMux.Handle does.
func (s *Server) Handle(pattern string, h http.Handler) { s.mux.Handle(pattern, h) }

// Streams names procedures whose request is a stream. Upload streams may pause
// for minutes, those of conversations for ever.
func (s *Server) Streams(uploads, conversations []string) {
	for _, p := range uploads {
		s.body[p] = chunkTimeout
	}
	for _, p := range conversations {
		s.body[p] = 0
	}
}

// HandlerOptions are what every Connect handler is made with.
func HandlerOptions(in *Interceptor) []connect.HandlerOption {
	return []connect.HandlerOption{
		connect.WithInterceptors(in),
		connect.WithReadMaxBytes(MaxMessage),
		// Requests may come compressed; answers go out as they are, since the
		// client is on this machine or behind a proxy that compresses better.
		connect.WithCompressMinBytes(math.MaxInt),
		connect.WithRecover(func(ctx context.Context, spec connect.Spec, _ http.Header, p any) error {
			return sandbox.Internal.Errorf("panic in %s: %v", spec.Procedure, p)
		}),
	}
}

// Serve answers until ctx ends, then stops: no new connections, calls and
// streams end with unavailable, and after a few seconds what is left is cut.
// Sandboxes are not touched.
func (s *Server) Serve(ctx context.Context) error {
	base, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	hs := &http.Server{
		Handler:           http.HandlerFunc(s.serveHTTP),
		ReadHeaderTimeout: s.headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		Protocols:         &protocols,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          maxStreams,
			MaxReadFrameSize:              frameSize,
			MaxReceiveBufferPerConnection: connWindow,
			MaxReceiveBufferPerStream:     streamWindow,
			SendPingTimeout:               pingAfter,
			PingTimeout:                   pingTimeout,
		},
		BaseContext: func(net.Listener) context.Context { return base },
		ErrorLog:    slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	var wg sync.WaitGroup
	errs := make(chan error, len(s.lns))
	for _, l := range s.lns {
		wg.Go(func() {
			if err := hs.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				errs <- fmt.Errorf("serve %s: %w", l.Addr(), err)
			}
		})
	}
	var err error
	select {
	case <-ctx.Done():
	case err = <-errs:
	}
	cancel(sandbox.Unavailable.Errorf("the daemon stops").WithHint("sandboxes go on running: try again when the daemon is back"))
	sctx, stop := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer stop()
	if serr := hs.Shutdown(sctx); serr != nil {
		_ = hs.Close()
	}
	s.closeListeners()
	wg.Wait()
	return err
}

// Close closes the sockets of a server that was not served.
func (s *Server) Close() { s.closeListeners() }

func (s *Server) closeListeners() {
	for _, l := range s.lns {
		_ = l.Close()
	}
	if s.opts.UnixSocket == "" || len(s.addrs) == 0 {
		return
	}
	if a := s.addrs[len(s.addrs)-1]; a.Network() == "unix" {
		_ = os.Remove(s.opts.UnixSocket)
	}
}

func (s *Server) serveHTTP(w http.ResponseWriter, r *http.Request) {
	d, stream := s.body[r.URL.Path]
	switch {
	case !stream:
		r.Body = &timedBody{ReadCloser: r.Body, rc: http.NewResponseController(w), total: time.Now().Add(s.bodyTimeout)}
	case d > 0:
		r.Body = &timedBody{ReadCloser: r.Body, rc: http.NewResponseController(w), each: d}
	}
	s.mux.ServeHTTP(w, r)
}

// timedBody bounds the time that a client takes to send a request (E3). The
// deadline is set only while a read is going on: on HTTP/1 one that passes
// later would end the handler.
type timedBody struct {
	io.ReadCloser
	rc    *http.ResponseController
	total time.Time     // for all of it
	each  time.Duration // or for one read
}

func (b *timedBody) Read(p []byte) (int, error) {
	t := b.total
	if b.each > 0 {
		t = time.Now().Add(b.each)
	}
	if b.rc.SetReadDeadline(t) != nil {
		return b.ReadCloser.Read(p)
	}
	n, err := b.ReadCloser.Read(p)
	_ = b.rc.SetReadDeadline(time.Time{})
	return n, err
}
