// Package native serves the API vivarium.v1: it turns messages into calls of
// the engine and its answers into messages. It validates what comes in, binds
// every call to the tenant of its token, and holds no state.
package native

import (
	"context"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"

	"vivarium/api/vivarium/v1/vivariumv1connect"
	"vivarium/engine"
	"vivarium/sandbox"
	"vivarium/server"
)

// Engine is what this package needs of engine.Engine; see there for what the
// methods promise.
type Engine interface {
	Create(ctx context.Context, tenant string, spec sandbox.Spec, opts engine.CreateOptions) (sandbox.Sandbox, error)
	Get(ctx context.Context, tenant, ref string) (sandbox.Sandbox, error)
	List(ctx context.Context, tenant string, f engine.Filter) ([]sandbox.Sandbox, error)
	Wait(ctx context.Context, tenant, ref string, until engine.Until) (sandbox.Sandbox, error)
	Stop(ctx context.Context, tenant, ref string, grace time.Duration) (sandbox.Sandbox, error)
	Remove(ctx context.Context, tenant, ref string, force bool) error
	Extend(ctx context.Context, tenant, ref string, timeout time.Duration) (sandbox.Sandbox, error)
	SetTags(ctx context.Context, tenant, ref string, tags map[string]string) (sandbox.Sandbox, error)
	Usage(ctx context.Context, tenant, ref string) (sandbox.Usage, error)
	Events(ctx context.Context, tenant, ref string, after int64, follow bool, fn func(sandbox.Event) error) error

	StartExec(ctx context.Context, tenant, ref, id string, spec sandbox.ExecSpec) (sandbox.Exec, error)
	GetExec(ctx context.Context, tenant, ref, id string) (sandbox.Exec, error)
	ListExecs(ctx context.Context, tenant, ref string) ([]sandbox.Exec, error)
	WaitExec(ctx context.Context, tenant, ref, id string) (sandbox.Exec, error)
	Output(ctx context.Context, tenant, ref, id string, from engine.Offsets, follow bool, fn func(engine.Output) error) (sandbox.Exec, error)
	WriteStdin(ctx context.Context, tenant, ref, id string, offset int64, p []byte, eof bool) (int64, error)
	SignalExec(ctx context.Context, tenant, ref, id string, signal int) error
	ResizeExec(ctx context.Context, tenant, ref, id string, size sandbox.WindowSize) error

	SetNetwork(ctx context.Context, tenant, ref string, p sandbox.NetworkPolicy) (sandbox.AppliedPolicy, error)
	Network(ctx context.Context, tenant, ref string) (sandbox.AppliedPolicy, error)
	ProveNetwork(ctx context.Context, tenant, ref string) (sandbox.Proof, error)
	ExplainNetwork(ctx context.Context, tenant, ref string, q engine.NetworkQuestion) (sandbox.Explanation, error)
	Flows(ctx context.Context, tenant, ref string, after int64, follow bool, fn func(sandbox.FlowRecord) error) error
	Presets() []engine.Preset

	Files(ctx context.Context, tenant, ref string) (sandbox.Files, error)
	Dial(ctx context.Context, tenant, ref string, port uint16) (net.Conn, error)
	Info() engine.Info
}

var _ Engine = (*engine.Engine)(nil)

// Backend is what the API is served from.
type Backend struct {
	Engine Engine
	Images Images
	Tokens *server.Tokens
	// ImageInUse says whether a sandbox needs an image; nil is none does.
	ImageInUse func(id string) bool
	// Secrets keeps values; nil where this node cannot.
	Secrets Secrets
	// Tunnels are the ways in; nil where this node has none.
	Tunnels Tunnels
	// BuildBase makes base images; nil where this node cannot.
	BuildBase BuildBase
}

// Register puts the API on a server.
func Register(s *server.Server, b Backend, in *server.Interceptor) {
	opts := server.HandlerOptions(in)
	handle := func(path string, h http.Handler) { s.Handle(path, in.Authenticate(h)) }
	handle(vivariumv1connect.NewSandboxServiceHandler(&sandboxes{eng: b.Engine, tunnels: b.Tunnels}, opts...))
	handle(vivariumv1connect.NewExecServiceHandler(&execs{eng: b.Engine}, opts...))
	handle(vivariumv1connect.NewFileServiceHandler(&files{eng: b.Engine}, opts...))
	handle(vivariumv1connect.NewPortServiceHandler(&ports{eng: b.Engine}, opts...))
	handle(vivariumv1connect.NewNetworkServiceHandler(&networks{eng: b.Engine}, opts...))
	handle(vivariumv1connect.NewSecretServiceHandler(&secrets{vault: b.Secrets}, opts...))
	handle(vivariumv1connect.NewTunnelServiceHandler(&tunnels{eng: b.Engine, m: b.Tunnels}, opts...))
	handle(vivariumv1connect.NewImageServiceHandler(&images{store: b.Images, inUse: b.ImageInUse, base: b.BuildBase}, opts...))
	handle(vivariumv1connect.NewDaemonServiceHandler(&daemon{eng: b.Engine, tokens: b.Tokens}, opts...))
	reflector := grpcreflect.NewStaticReflector(
		vivariumv1connect.SandboxServiceName, vivariumv1connect.ExecServiceName,
		vivariumv1connect.FileServiceName, vivariumv1connect.PortServiceName,
		vivariumv1connect.ImageServiceName, vivariumv1connect.DaemonServiceName,
		vivariumv1connect.NetworkServiceName, vivariumv1connect.SecretServiceName,
		vivariumv1connect.TunnelServiceName,
	)
	handle(grpcreflect.NewHandlerV1(reflector, opts...))
	s.Streams(
		[]string{
			vivariumv1connect.FileServiceWriteProcedure,
			vivariumv1connect.FileServiceUploadProcedure,
			vivariumv1connect.ImageServiceLoadProcedure,
		},
		[]string{
			vivariumv1connect.ExecServiceAttachProcedure,
			vivariumv1connect.PortServiceDialProcedure,
			"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
		},
	)
}

func answer[T any](m *T) *connect.Response[T] { return connect.NewResponse(m) }
