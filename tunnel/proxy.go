package tunnel

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpguts"

	"vivarium/sandbox"
)

// Bounds of one request. What has no bound in time here has the sandbox's own.
const (
	maxResponseHeader = 256 << 10        // bytes
	maxBody           = 16 << 30         // bytes of a request
	answerTimeout     = 15 * time.Minute // from the request to the answer's header
	stallTimeout      = 2 * time.Minute  // of a client that neither sends nor takes
	keepInside        = time.Second      // an idle connection inside: programs close theirs after 2 s and more
)

// proxy passes the requests of one tunnel inside.
type proxy struct {
	l         *live
	transport *http.Transport
	rp        *httputil.ReverseProxy
}

type userKey struct{}

var buffers = bufferPool{sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}}

type bufferPool struct{ p sync.Pool }

func (b *bufferPool) Get() []byte  { return *b.p.Get().(*[]byte) }
func (b *bufferPool) Put(s []byte) { b.p.Put(&s) }

func newProxy(l *live) *proxy {
	var inside http.Protocols
	if l.t.Spec.Kind == sandbox.TunnelH2 {
		inside.SetUnencryptedHTTP2(true)
	} else {
		inside.SetHTTP1(true)
	}
	p := &proxy{l: l, transport: &http.Transport{
		DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return l.dial(ctx) },
		Protocols:              &inside,
		DisableCompression:     true, // the client and the program agree on it
		MaxIdleConnsPerHost:    32,
		IdleConnTimeout:        keepInside,
		ResponseHeaderTimeout:  answerTimeout,
		ExpectContinueTimeout:  time.Second,
		MaxResponseHeaderBytes: maxResponseHeader,
	}}
	p.rp = &httputil.ReverseProxy{
		Rewrite:        rewrite,
		Transport:      p.transport,
		ModifyResponse: modifyResponse,
		ErrorHandler:   p.failed,
		ErrorLog:       slog.NewLogLogger(l.m.log.Handler(), slog.LevelDebug),
		FlushInterval:  -1, // what a program has sent is not held back
		BufferPool:     &buffers,
	}
	return p
}

func rewrite(pr *httputil.ProxyRequest) {
	out := pr.Out
	out.URL.Scheme = "http"
	out.URL.Host = "sandbox" // all connections of this transport lead to the one port
	out.Host = pr.In.Host
	out.URL.RawQuery = pr.In.URL.RawQuery // as it came, strange as it may be
	from, _ := netip.ParseAddrPort(pr.In.RemoteAddr)
	user, _ := pr.In.Context().Value(userKey{}).(string)
	cleanRequest(out, pr.In.Host, from.Addr().Unmap().WithZone(""), user)
	// only what is no other way to send requests: after an upgrade to h2c they
	// would come inside unseen
	if up := out.Header.Get("Upgrade"); up != "" && !strings.EqualFold(up, "websocket") {
		out.Header.Del("Upgrade")
		out.Header.Del("Connection")
	}
}

func modifyResponse(res *http.Response) error {
	if res.StatusCode == http.StatusSwitchingProtocols && (!isWebSocket(res.Request) || !strings.EqualFold(res.Header.Get("Upgrade"), "websocket")) {
		return errors.New("the program inside changes to a protocol that was not asked for")
	}
	cleanResponse(res.Header)
	return nil
}

func isWebSocket(r *http.Request) bool {
	return httpguts.HeaderValuesContainsToken(r.Header["Connection"], "Upgrade") && strings.EqualFold(r.Header.Get("Upgrade"), "websocket")
}

// serve passes a request inside.
func (p *proxy) serve(w http.ResponseWriter, r *http.Request, user string) {
	if !p.l.enter() {
		w.Header().Set("Retry-After", "1")
		fail(w, http.StatusServiceUnavailable, "too many requests at once through this tunnel")
		return
	}
	defer p.l.leave()
	if r.ContentLength > maxBody {
		fail(w, http.StatusRequestEntityTooLarge, "the request is too large")
		return
	}
	ctx, cancel := context.WithCancel(context.WithValue(r.Context(), userKey{}, user))
	defer cancel()
	defer context.AfterFunc(p.l.ctx, cancel)()
	rc := http.NewResponseController(w)
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = http.MaxBytesReader(w, r.Body, maxBody)
		if r.ProtoMajor == 1 { // a stream of HTTP/2 may be silent: its connection is pinged
			r.Body = &timedBody{r.Body, rc}
		}
	}
	p.rp.ServeHTTP(&timedWriter{w, rc}, r.WithContext(ctx))
}

// failed answers for a program that does not.
func (p *proxy) failed(w http.ResponseWriter, r *http.Request, err error) {
	var large *http.MaxBytesError
	code, text := http.StatusBadGateway, "the program in the sandbox does not answer on its port"
	switch {
	case p.l.ctx.Err() != nil:
		code, text = http.StatusNotFound, notFoundText
	case errors.As(err, &large):
		code, text = http.StatusRequestEntityTooLarge, "the request is too large"
	case r.Context().Err() != nil: // the client has gone
	case errors.Is(err, os.ErrDeadlineExceeded):
		code, text = http.StatusRequestTimeout, "the request did not come"
	case sandbox.KindOf(err) == sandbox.Timeout:
		code, text = http.StatusGatewayTimeout, "the program in the sandbox does not answer in time"
	}
	p.l.m.log.Debug("pass request to sandbox", "sandbox", p.l.t.SandboxID, "port", p.l.t.Spec.Port, "err", err)
	fail(w, code, text)
}

func fail(w http.ResponseWriter, code int, text string) {
	h := w.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = io.WriteString(w, text+"\n") // the client's loss
}

// timedBody bounds how long a client may be silent in the middle of a request.
type timedBody struct {
	io.ReadCloser
	rc *http.ResponseController
}

func (b *timedBody) Read(p []byte) (int, error) {
	if b.rc.SetReadDeadline(time.Now().Add(stallTimeout)) != nil {
		return b.ReadCloser.Read(p)
	}
	n, err := b.ReadCloser.Read(p)
	_ = b.rc.SetReadDeadline(time.Time{})
	return n, err
}

// timedWriter bounds how long a client may take nothing of an answer, and keeps
// interim answers (103 Early Hints) as clean as the last.
type timedWriter struct {
	http.ResponseWriter
	rc *http.ResponseController
}

func (w *timedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *timedWriter) WriteHeader(code int) {
	cleanResponse(w.Header())
	w.ResponseWriter.WriteHeader(code)
}

func (w *timedWriter) Write(p []byte) (int, error) {
	defer w.limit()()
	return w.ResponseWriter.Write(p)
}

// FlushError is what http.ResponseController calls.
func (w *timedWriter) FlushError() error {
	defer w.limit()()
	return w.rc.Flush()
}

func (w *timedWriter) limit() func() {
	if w.rc.SetWriteDeadline(time.Now().Add(stallTimeout)) != nil {
		return func() {}
	}
	return func() { _ = w.rc.SetWriteDeadline(time.Time{}) }
}
