package server

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"time"

	"connectrpc.com/connect"
	"github.com/oklog/ulid/v2"

	"vivarium/sandbox"
)

func newID(prefix string) string { return prefix + ulid.Make().String() }

// checkTenant holds the names of tenants to what is safe in a path, a log line
// and a metric.
func checkTenant(s string) error {
	if len(s) == 0 || len(s) > 63 {
		return sandbox.Invalid.Errorf("the name of a tenant is 1 to 63 bytes long")
	}
	for i, c := range []byte(s) {
		switch {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9':
		case i > 0 && (c == '-' || c == '_' || c == '.'):
		default:
			return sandbox.Invalid.Errorf("the name of a tenant has only a-z, 0-9, - _ and . and does not begin with these")
		}
	}
	return nil
}

// Call is what is known of the call that is being served.
type Call struct {
	ID    string // for the log
	Token sandbox.Token
}

type callKey struct{}

// CallFrom returns the call of ctx; the zero Call outside of one.
func CallFrom(ctx context.Context) Call {
	c, _ := ctx.Value(callKey{}).(Call)
	return c
}

// WithCall returns ctx with a call. Front doors that authenticate by their own
// means use it.
func WithCall(ctx context.Context, c Call) context.Context {
	return context.WithValue(ctx, callKey{}, c)
}

// Tenant returns the tenant that the call of ctx is made for.
func Tenant(ctx context.Context) string { return CallFrom(ctx).Token.Tenant }

// RequireAdmin returns Denied unless the call's token is an administrator's.
func RequireAdmin(ctx context.Context) error {
	if !CallFrom(ctx).Token.Admin {
		return sandbox.Denied.Errorf("only a token with admin rights may do this").
			WithHint("use the token in the data directory, or make one with `viv token create --admin`")
	}
	return nil
}

// Interceptor gives every call its id and its tenant, refuses those without a
// valid token, and turns errors into those of the wire. It is a
// connect.Interceptor.
type Interceptor struct {
	Tokens *Tokens
	Log    *slog.Logger
}

var _ connect.Interceptor = (*Interceptor)(nil)

// Authenticate puts the check for a token before a handler, so that of a caller
// without one not even the body is read. What the interceptor is on then finds
// the call in its context.
func (i *Interceptor) Authenticate(next http.Handler) http.Handler {
	writer := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, done, err := i.begin(r.Context(), r.Header)
		switch {
		case err == nil:
			defer done()
			next.ServeHTTP(w, r.WithContext(ctx))
		case writer.IsSupported(r):
			_ = writer.Write(w, r, err) // fails where the client has left
		default:
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "a valid token is needed", http.StatusUnauthorized)
		}
	})
}

// begin gives the context of a call, which ends when its token is revoked; done
// is to be called when the call is over.
func (i *Interceptor) begin(ctx context.Context, h http.Header) (_ context.Context, done func(), err error) {
	if CallFrom(ctx).ID != "" {
		return ctx, func() {}, nil
	}
	c := Call{ID: newID("")}
	ctx = WithCall(ctx, c)
	bound, tok, done, err := i.Tokens.Begin(ctx, h.Get("Authorization"))
	if sandbox.KindOf(err) == sandbox.Denied {
		return ctx, nil, ErrUnauthenticated()
	}
	if err != nil {
		return ctx, nil, Wire(ctx, i.Log, err)
	}
	c.Token = tok
	return WithCall(bound, c), done, nil
}

func (i *Interceptor) end(ctx context.Context, procedure string, start time.Time, err error) error {
	out := Wire(ctx, i.Log, err)
	if i.Log.Enabled(ctx, slog.LevelDebug) {
		c := CallFrom(ctx)
		attrs := []any{"call", c.ID, "procedure", procedure, "tenant", c.Token.Tenant, "took", time.Since(start)}
		var ce *connect.Error
		if errors.As(out, &ce) {
			attrs = append(attrs, "code", ce.Code().String(), "err", ce.Message())
		}
		i.Log.DebugContext(ctx, "call", attrs...)
	}
	return out
}

// WrapUnary implements connect.Interceptor.
func (i *Interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		start := time.Now()
		ctx, done, err := i.begin(ctx, req.Header())
		if err != nil {
			return nil, err
		}
		defer done()
		res, err := next(ctx, req)
		if err = i.end(ctx, req.Spec().Procedure, start, err); err != nil {
			return nil, err
		}
		return res, nil
	}
}

// WrapStreamingHandler implements connect.Interceptor.
func (i *Interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		start := time.Now()
		ctx, done, err := i.begin(ctx, conn.RequestHeader())
		if err != nil {
			return err
		}
		defer done()
		return i.end(ctx, conn.Spec().Procedure, start, next(ctx, conn))
	}
}

// WrapStreamingClient implements connect.Interceptor; it does nothing.
func (i *Interceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}
