package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"vivarium/client"
	"vivarium/config"
	"vivarium/sandbox"
	"vivarium/server"
	"vivarium/server/native/fake"
)

type node struct {
	cfg   *config.Config
	store *fake.Tokens
	eng   *fake.Engine
	shut  int
}

func newNode(t *testing.T) *node {
	cfg := config.Default()
	cfg.DataDir = filepath.Join(t.TempDir(), "data")
	cfg.Listen = "127.0.0.1:0"
	cfg.UnixSocket = filepath.Join(cfg.DataDir, "viv.sock")
	return &node{cfg: cfg, store: &fake.Tokens{}, eng: fake.New(t)}
}

func (n *node) build(context.Context, *config.Config, *slog.Logger) (*parts, error) {
	return &parts{engine: n.eng, images: &fake.Images{}, tokens: n.store, close: func(context.Context) error { n.shut++; return nil }}, nil
}

// start runs the daemon; stop ends it and returns its error.
func (n *node) start(t *testing.T) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	up, done := make(chan []net.Addr, 1), make(chan error, 1)
	go func() {
		done <- run(ctx, n.cfg, slog.New(slog.DiscardHandler), n.build, func(a []net.Addr) { up <- a })
	}()
	select {
	case <-up:
	case err := <-done:
		cancel()
		t.Fatal(err)
	}
	return func() error { cancel(); return <-done }
}

func (n *node) info(t *testing.T) error {
	t.Helper()
	b, err := os.ReadFile(n.cfg.DataDir + "/token")
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New("unix://"+n.cfg.UnixSocket, strings.TrimSpace(string(b)))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = c.Info(t.Context())
	return err
}

func TestDaemon(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	stop := n.start(t)
	if err := n.info(t); err != nil {
		t.Error(err)
	}
	for name, mode := range map[string]os.FileMode{"token": 0o600, "": os.ModeDir | 0o711, "viv.sock": os.ModeSocket | 0o600} {
		if fi, err := os.Stat(filepath.Join(n.cfg.DataDir, name)); err != nil || fi.Mode() != mode {
			t.Errorf("%q is %v, %v", name, fi.Mode(), err)
		}
	}
	// A second one does not get the directory, and harms the first in nothing.
	other := *n.cfg
	if err := run(t.Context(), &other, slog.New(slog.DiscardHandler), n.build, nil); !errors.Is(err, sandbox.Conflict) || sandbox.HintOf(err) == "" {
		t.Errorf("a second daemon: %v", err)
	}
	if err := n.info(t); err != nil {
		t.Error(err)
	}
	if err := stop(); err != nil || n.shut != 1 {
		t.Errorf("stop: %v, closed %d times", err, n.shut)
	}
	// Started again, the token is the same, and there is no second one.
	stop = n.start(t)
	if err := n.info(t); err != nil {
		t.Error(err)
	}
	if list, _ := n.store.ListTokens(t.Context()); len(list) != 1 {
		t.Errorf("tokens are %v", list)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// A crash between the file and the store, and an operator who lost every token.
func TestFirstToken(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "token")
	store := &fake.Tokens{}
	secret, _ := server.NewSecret()
	if err := os.WriteFile(file, []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	tokens := server.NewTokens(store)
	if err := firstToken(t.Context(), file, tokens); err != nil {
		t.Fatal(err)
	}
	if tok, err := tokens.Authenticate(t.Context(), "Bearer "+secret); err != nil || !tok.Admin || tok.Tenant != DefaultTenant {
		t.Errorf("%+v, %v", tok, err)
	}
	// What is no secret is replaced, and a file beside an admin token is left.
	file2 := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file2, []byte("password"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := firstToken(t.Context(), file2, tokens); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(file2); string(b) != "password" {
		t.Errorf("the file is %q", b)
	}
	if err := firstToken(t.Context(), file2, server.NewTokens(&fake.Tokens{})); err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(file2); !server.ValidSecret(strings.TrimSpace(string(b))) {
		t.Errorf("the file is %q", b)
	}
}

// A start that fails leaves no socket and no lock behind.
func TestFailedStart(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	bad := sandbox.Unsupported.Errorf("no cgroups")
	err := run(t.Context(), n.cfg, slog.New(slog.DiscardHandler), func(context.Context, *config.Config, *slog.Logger) (*parts, error) { return nil, bad }, nil)
	if !errors.Is(err, sandbox.Unsupported) {
		t.Errorf("got %v", err)
	}
	if _, err := os.Stat(n.cfg.UnixSocket); !os.IsNotExist(err) {
		t.Errorf("the socket is left: %v", err)
	}
	stop := n.start(t)
	if err := stop(); err != nil {
		t.Error(err)
	}
}

func TestLog(t *testing.T) {
	t.Parallel()
	for format, want := range map[string]string{"text": `msg="a b"`, "json": `"msg":"a b"`} {
		var b strings.Builder
		log := newLogger(config.Log{Level: "warn", Format: format}, &b)
		log.Info("hidden")
		log.Warn("a b", "name", "x\nlevel=ERROR") // E2
		if s := b.String(); !strings.Contains(s, want) || strings.Contains(s, "hidden") || strings.Count(s, "\n") != 1 {
			t.Errorf("%s: %q", format, s)
		}
	}
}
