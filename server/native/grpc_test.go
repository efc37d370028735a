package native_test

import (
	"net/http"

	"connectrpc.com/connect"

	"vivarium/api/vivarium/v1/vivariumv1connect"
)

func grpcSandboxes(hc *http.Client, base string) vivariumv1connect.SandboxServiceClient {
	return vivariumv1connect.NewSandboxServiceClient(hc, base, connect.WithGRPC())
}
