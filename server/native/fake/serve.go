package fake

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"

	"vivarium/image"
	"vivarium/sandbox"
	"vivarium/server"
	"vivarium/server/native"
)

// Node is a front door over a fake engine, on real sockets.
type Node struct {
	Engine *Engine
	Images *Images
	Tokens *server.Tokens
	Store  *Tokens
	HTTP   string // http://127.0.0.1:PORT
	Addr   string // 127.0.0.1:PORT
	Unix   string // unix:///PATH
	Socket string
	Admin  string // secret of the default tenant's first token
	Log    *Buffer
	Stop   func() error // ends it and returns what Serve did
}

// Buffer is a log that can be read while it is written.
type Buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// Serve starts a node that ends with the test.
func Serve(t testing.TB) *Node {
	t.Helper()
	n := &Node{Engine: New(t), Images: &Images{}, Store: &Tokens{}, Log: &Buffer{}}
	log := slog.New(slog.NewTextHandler(n.Log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	n.Socket = filepath.Join(t.TempDir(), "viv.sock")
	srv, err := server.Listen(server.Options{Listen: "127.0.0.1:0", UnixSocket: n.Socket, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	n.Addr = srv.Addrs()[0].String()
	n.HTTP, n.Unix = "http://"+n.Addr, "unix://"+n.Socket
	n.Tokens = server.NewTokens(n.Store)
	n.Admin = n.Token(t, "default", true)
	native.Register(srv, native.Backend{Engine: n.Engine, Images: n.Images, Tokens: n.Tokens, Tunnels: newTunnels(t, n.Engine, log), BuildBase: n.Images.BuildBase},
		&server.Interceptor{Tokens: n.Tokens, Log: log})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ctx) }()
	n.Stop = sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() {
		if err := n.Stop(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// Token makes a token for a tenant and returns its secret.
func (n *Node) Token(t testing.TB, tenant string, admin bool) string {
	t.Helper()
	_, secret, err := n.Tokens.Create(context.Background(), sandbox.Token{Tenant: tenant, Admin: admin})
	if err != nil {
		t.Fatal(err)
	}
	return secret
}

// Images is a native.Images in memory.
type Images struct {
	mu     sync.Mutex
	list   []*image.Image
	Loaded int64 // bytes of the last Load
}

var _ native.Images = (*Images)(nil)

func (s *Images) add(tenant, tag string) *image.Image {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := &image.Image{ID: "im-" + tag, Tenant: tenant, Tags: []string{tag}, Size: 4096, Disk: 4096, Platform: "linux/amd64"}
	s.list = append(s.list, i)
	return i
}

// Pull implements native.Images.
func (s *Images) Pull(_ context.Context, tenant, ref string, o image.PullOptions) (*image.Image, error) {
	if ref == "down" {
		return nil, sandbox.Unavailable.Errorf("the registry does not answer")
	}
	for i := range int64(3) {
		o.Progress(image.Progress{Stage: "download", Done: i, Total: 2})
	}
	return s.add(tenant, ref), nil
}

// Load implements native.Images.
func (s *Images) Load(_ context.Context, tenant string, r io.Reader, o image.LoadOptions) ([]*image.Image, error) {
	n, err := io.Copy(io.Discard, r)
	s.mu.Lock()
	s.Loaded = n
	s.mu.Unlock()
	return []*image.Image{s.add(tenant, o.Tag)}, err
}

func (s *Images) find(tenant, ref string) (int, error) {
	for i, img := range s.list {
		if img.Tenant == tenant && (img.ID == ref || img.Tags[0] == ref) {
			return i, nil
		}
	}
	return 0, sandbox.NotFound.Errorf("no image %q", ref)
}

// Get implements native.Images.
func (s *Images) Get(_ context.Context, tenant, ref string) (*image.Image, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, err := s.find(tenant, ref)
	if err != nil {
		return nil, err
	}
	return s.list[i], nil
}

// List implements native.Images.
func (s *Images) List(_ context.Context, tenant string) ([]*image.Image, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*image.Image
	for _, i := range s.list {
		if i.Tenant == tenant {
			out = append(out, i)
		}
	}
	return out, nil
}

// Tag implements native.Images.
func (s *Images) Tag(ctx context.Context, tenant, ref, tag string) error {
	if _, err := s.Get(ctx, tenant, ref); err != nil {
		return err
	}
	s.add(tenant, tag)
	return nil
}

// Remove implements native.Images.
func (s *Images) Remove(_ context.Context, tenant, ref string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	i, err := s.find(tenant, ref)
	if err == nil {
		s.list = append(s.list[:i], s.list[i+1:]...)
	}
	return err
}

// GC implements native.Images.
func (s *Images) GC(context.Context, func(string) bool) (image.GCReport, error) {
	return image.GCReport{Removed: []string{"im-old"}, Freed: 100}, nil
}

// BuildBase is a native.BuildBase.
func (s *Images) BuildBase(_ context.Context, tenant string, r native.BaseRequest, progress func(image.Progress)) (*image.Image, error) {
	progress(image.Progress{Stage: "install"})
	return s.add(tenant, r.Tag), nil
}
