package conformance

import (
	"archive/tar"
	"errors"
	"io"
	"testing"

	"connectrpc.com/connect"
)

func request[T any](m *T) *connect.Request[T] { return connect.NewRequest(m) }

func readAll(t testing.TB, r io.ReadCloser) string {
	t.Helper()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Error(err)
	}
	r.Close()
	return string(b)
}

// countTar reads an archive to its end.
func countTar(r io.Reader) (int, error) {
	n := 0
	tr := tar.NewReader(r)
	for {
		_, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
		n++
	}
}
