package native_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
	"vivarium/server/native/fake"
)

func dial(t *testing.T, addr, token string) *client.Client {
	t.Helper()
	c, err := client.New(addr, token)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func create(t *testing.T, c *client.Client, spec *v1.SandboxSpec) *v1.Sandbox {
	t.Helper()
	if spec.Image == "" {
		spec.Image = "debian:base"
	}
	sb, err := c.Create(t.Context(), spec, client.CreateOptions{Wait: true})
	if err != nil {
		t.Fatal(err)
	}
	return sb
}

// The whole life of a sandbox over h2c on TCP and on the unix socket.
func TestLife(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	for _, addr := range []string{n.HTTP, n.Unix, n.Addr} {
		t.Run(strings.SplitN(addr, ":", 2)[0], func(t *testing.T) {
			c := dial(t, addr, n.Admin)
			sb := create(t, c, &v1.SandboxSpec{Name: "box", Tags: map[string]string{"a": "b"}})
			if sb.Stage != "running" || sb.Tenant != "default" {
				t.Errorf("created %v", sb)
			}
			if _, err := c.Create(t.Context(), &v1.SandboxSpec{Name: "box", Image: "x"}, client.CreateOptions{}); !errors.Is(err, sandbox.Exists) {
				t.Errorf("the name is taken: %v", err)
			}
			got, err := c.Get(t.Context(), "box")
			if err != nil || got.Id != sb.Id || got.Usage.GetMemory() == 0 {
				t.Errorf("get: %v, %v", got, err)
			}
			list, err := c.List(t.Context(), &v1.ListSandboxesRequest{Tags: map[string]string{"a": "b"}})
			if err != nil || len(list) != 1 {
				t.Errorf("list: %v, %v", list, err)
			}
			var out, errOut bytes.Buffer
			e, err := c.RunExec(t.Context(), "box", "", &v1.ExecSpec{Argv: []string{"sh", "-c", "echo out; echo err >&2; exit 7"}}, &out, &errOut)
			if err != nil || e.Exit.GetCode() != 7 || out.String() != "out\n" || errOut.String() != "err\n" {
				t.Errorf("exec: %v, %v, %q, %q", e, err, out.String(), errOut.String())
			}
			if x, err := c.Extend(t.Context(), "box", time.Hour); err != nil || time.Until(x.Deadline.AsTime()) < 50*time.Minute {
				t.Errorf("extend: %v, %v", x, err)
			}
			if x, err := c.SetTags(t.Context(), "box", map[string]string{"c": "d"}); err != nil || x.Spec.Tags["c"] != "d" {
				t.Errorf("set tags: %v, %v", x, err)
			}
			if err := c.Remove(t.Context(), "box", false); !errors.Is(err, sandbox.Conflict) || sandbox.HintOf(err) == "" {
				t.Errorf("remove a living one: %v", err)
			}
			if _, err := c.Stop(t.Context(), "box", -1); err != nil {
				t.Error(err)
			}
			ended, err := c.Wait(t.Context(), sb.Id, "", 0)
			if err != nil || ended.Death.GetReason() != "stopped" {
				t.Errorf("wait: %v, %v", ended, err)
			}
			if err := c.Remove(t.Context(), sb.Id, false); err != nil {
				t.Error(err)
			}
			if _, err := c.Get(t.Context(), sb.Id); !errors.Is(err, sandbox.NotFound) {
				t.Errorf("after remove: %v", err)
			}
		})
	}
}

// Of a caller without a token not even the body is read, whatever it speaks.
func TestUnauthenticated(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	for _, ct := range []string{"application/json", "application/proto", "application/connect+proto", "application/grpc", "application/grpc-web", "text/plain"} {
		body := &counted{}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, n.HTTP+"/vivarium.v1.SandboxService/List", body)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", ct)
		var p http.Protocols
		p.SetUnencryptedHTTP2(true)
		tr := &http.Transport{Protocols: &p}
		res, err := tr.RoundTrip(req)
		if err != nil {
			t.Fatalf("%s: %v", ct, err)
		}
		b, _ := io.ReadAll(res.Body)
		res.Body.Close()
		tr.CloseIdleConnections()
		said := res.StatusCode == 401 || res.Header.Get("Grpc-Status") == "16" || res.Trailer.Get("Grpc-Status") == "16" || strings.Contains(string(b), "unauthenticated")
		if !said && !strings.Contains(strings.ToLower(string(b)), "grpc-status: 16") {
			t.Errorf("%s: %s %v %q", ct, res.Status, res.Header, b)
		}
		if got := body.n.Load(); got > 32<<20 {
			t.Errorf("%s: %d bytes were taken", ct, got)
		}
	}
}

// counted is a body without an end.
type counted struct{ n atomic.Int64 }

func (c *counted) Read(p []byte) (int, error) { c.n.Add(int64(len(p))); return len(p), nil }

// What curl does: plain HTTP/1.1 and JSON.
func TestJSONOverHTTP1(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	post := func(token, procedure, body string) (int, map[string]any) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, n.HTTP+"/vivarium.v1."+procedure, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		if token != "" {
			req.Header.Set("Authorization", "Bearer "+token)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if res.ProtoMajor != 1 {
			t.Errorf("protocol is %s", res.Proto)
		}
		var m map[string]any
		if err := json.NewDecoder(res.Body).Decode(&m); err != nil {
			t.Fatal(err)
		}
		return res.StatusCode, m
	}
	status, m := post(n.Admin, "SandboxService/Create", `{"spec":{"image":"debian:base","timeout":"60s","resources":{"memoryLimit":"1048576"}},"wait":true}`)
	if status != 200 {
		t.Fatalf("create: %d %v", status, m)
	}
	sb := m["sandbox"].(map[string]any)
	if sb["stage"] != "running" || sb["spec"].(map[string]any)["timeout"] != "60s" {
		t.Errorf("created %v", sb)
	}
	status, m = post(n.Admin, "SandboxService/Get", `{"id":"nosuch"}`)
	if status != 404 || m["code"] != "not_found" {
		t.Errorf("get: %d %v", status, m)
	}
	d := m["details"].([]any)[0].(map[string]any)
	if d["type"] != "vivarium.v1.ErrorDetail" || d["debug"].(map[string]any)["kind"] != "not_found" {
		t.Errorf("detail is %v", d)
	}
	for _, token := range []string{"", "viv_wrong"} {
		if status, m = post(token, "SandboxService/List", `{}`); status != 401 || m["code"] != "unauthenticated" {
			t.Errorf("without a token: %d %v", status, m)
		}
	}
	res, err := http.Get(n.HTTP + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if b, _ := io.ReadAll(res.Body); res.StatusCode != 200 || string(b) != "ok\n" {
		t.Errorf("healthz: %d %q", res.StatusCode, b)
	}
}

// gRPC on the same port.
func TestGRPC(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c := dial(t, n.HTTP, n.Admin)
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	hc := &http.Client{Transport: &http.Transport{Protocols: &protocols}}
	defer hc.CloseIdleConnections()
	g := grpcSandboxes(hc, n.HTTP)
	req := connect.NewRequest(&v1.ListSandboxesRequest{})
	if _, err := g.List(t.Context(), req); connect.CodeOf(err) != connect.CodeUnauthenticated {
		t.Errorf("without a token: %v", err)
	}
	create(t, c, &v1.SandboxSpec{})
	req.Header().Set("Authorization", "Bearer "+n.Admin)
	if res, err := g.List(t.Context(), req); err != nil || len(res.Msg.Sandboxes) != 1 {
		t.Errorf("list: %v, %v", res, err)
	}
}

// E1: the objects of another tenant do not exist.
func TestTenants(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	mine, theirs := dial(t, n.HTTP, n.Token(t, "a", false)), dial(t, n.HTTP, n.Token(t, "b", false))
	sb := create(t, mine, &v1.SandboxSpec{Name: "box", Command: []string{"sleep", "1000"}})
	ctx := t.Context()
	calls := map[string]func() error{
		"get":    func() error { _, err := theirs.Get(ctx, sb.Id); return err },
		"name":   func() error { _, err := theirs.Get(ctx, "box"); return err },
		"wait":   func() error { _, err := theirs.Wait(ctx, sb.Id, "", 0); return err },
		"stop":   func() error { _, err := theirs.Stop(ctx, sb.Id, -1); return err },
		"remove": func() error { return theirs.Remove(ctx, sb.Id, true) },
		"extend": func() error { _, err := theirs.Extend(ctx, sb.Id, time.Hour); return err },
		"tags":   func() error { _, err := theirs.SetTags(ctx, sb.Id, nil); return err },
		"events": func() error {
			return theirs.Events(ctx, &v1.WatchEventsRequest{SandboxId: sb.Id, After: -1}, func(*v1.Event) error { return nil })
		},
		"start": func() error {
			_, err := theirs.StartExec(ctx, sb.Id, "", &v1.ExecSpec{Argv: []string{"true"}})
			return err
		},
		"run": func() error {
			_, err := theirs.RunExec(ctx, sb.Id, "", &v1.ExecSpec{Argv: []string{"true"}}, nil, nil)
			return err
		},
		"exec":  func() error { _, err := theirs.GetExec(ctx, sb.Id, "main"); return err },
		"execs": func() error { _, err := theirs.ListExecs(ctx, sb.Id); return err },
		"output": func() error {
			_, err := theirs.Output(ctx, &v1.ReadOutputRequest{SandboxId: sb.Id, Id: "main"}, nil, nil)
			return err
		},
		"stdin":  func() error { _, err := theirs.WriteStdin(ctx, sb.Id, "main", 0, []byte("x"), false); return err },
		"signal": func() error { return theirs.Signal(ctx, sb.Id, "main", 9) },
		"resize": func() error { return theirs.Resize(ctx, sb.Id, "main", 1, 1) },
		"attach": func() error {
			a, err := theirs.Attach(ctx, &v1.AttachRequest{SandboxId: sb.Id, Id: "main"})
			if err == nil {
				_, err = a.Receive()
			}
			return err
		},
		"read": func() error {
			_, _, err := theirs.ReadFile(ctx, &v1.ReadFileRequest{SandboxId: sb.Id, Path: []byte("x")})
			return err
		},
		"write": func() error {
			_, err := theirs.WriteFile(ctx, &v1.WriteFileRequest{SandboxId: sb.Id, Path: []byte("x")}, strings.NewReader(""))
			return err
		},
		"stat":     func() error { _, err := theirs.Stat(ctx, sb.Id, "x", "", false); return err },
		"download": func() error { _, err := theirs.Download(ctx, sb.Id, "x", ""); return err },
		"upload":   func() error { _, _, err := theirs.Upload(ctx, sb.Id, "x", "", strings.NewReader("")); return err },
		"dial":     func() error { _, err := theirs.Dial(ctx, sb.Id, 7); return err },
	}
	for name, call := range calls {
		if err := call(); !errors.Is(err, sandbox.NotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if list, err := theirs.List(ctx, &v1.ListSandboxesRequest{Ended: true}); err != nil || len(list) != 0 {
		t.Errorf("list: %v, %v", list, err)
	}
	if e, err := mine.GetExec(ctx, sb.Id, "main"); err != nil || e.State != "running" {
		t.Errorf("it was touched: %v, %v", e, err)
	}
}

func TestTokensAreAnAdministrators(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	admin, plain := dial(t, n.HTTP, n.Admin), dial(t, n.HTTP, n.Token(t, "a", false))
	if _, _, err := plain.CreateToken(t.Context(), "a", "", true); !errors.Is(err, sandbox.Denied) {
		t.Errorf("create: %v", err)
	}
	if _, err := plain.ListTokens(t.Context()); !errors.Is(err, sandbox.Denied) {
		t.Errorf("list: %v", err)
	}
	if err := plain.RevokeToken(t.Context(), "tk-x"); !errors.Is(err, sandbox.Denied) {
		t.Errorf("revoke: %v", err)
	}
	if _, _, err := plain.PruneImages(t.Context(), true); !errors.Is(err, sandbox.Denied) {
		t.Errorf("prune: %v", err)
	}
	tok, secret, err := admin.CreateToken(t.Context(), "b", "ci", false)
	if err != nil {
		t.Fatal(err)
	}
	b := dial(t, n.HTTP, secret)
	if i, err := b.Info(t.Context()); err != nil || i.Tenant != "b" || i.Admin {
		t.Errorf("info: %v, %v", i, err)
	}
	if list, err := admin.ListTokens(t.Context()); err != nil || len(list) != 3 {
		t.Errorf("list: %v, %v", list, err)
	}
	if err := admin.RevokeToken(t.Context(), tok.Id); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Info(t.Context()); !errors.Is(err, sandbox.Denied) {
		t.Errorf("after revoke: %v", err)
	}
}

// Revoking a token ends what was begun with it: a thief does not keep a terminal.
func TestRevokeEndsStreams(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	admin := dial(t, n.HTTP, n.Admin)
	sb := create(t, admin, &v1.SandboxSpec{Name: "box"})
	tok, secret, err := admin.CreateToken(t.Context(), "", "stolen", false)
	if err != nil {
		t.Fatal(err)
	}
	c := dial(t, n.HTTP, secret)
	a, err := c.Attach(t.Context(), &v1.AttachRequest{SandboxId: sb.Id, Id: "cat", Spec: &v1.ExecSpec{Argv: []string{"cat"}, Stdin: "pipe"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Receive(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 3)
	go func() {
		for {
			if _, err := a.Receive(); err != nil {
				ended <- err
				return
			}
		}
	}()
	following := make(chan struct{})
	go func() {
		var once sync.Once
		ended <- c.Events(t.Context(), &v1.WatchEventsRequest{After: -1, Follow: true}, func(*v1.Event) error { once.Do(func() { close(following) }); return nil })
	}()
	go func() { _, err := c.Wait(t.Context(), sb.Id, "ended", 0); ended <- err }()
	<-following
	if err := admin.RevokeToken(t.Context(), tok.Id); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := <-ended; !errors.Is(err, sandbox.Denied) {
			t.Errorf("ended with %v", err)
		}
	}
	if e, err := admin.GetExec(t.Context(), sb.Id, "cat"); err != nil || e.State != "running" {
		t.Errorf("the command: %v, %v", e, err)
	}
}

// E5: a second create with the key of the first gives the same sandbox.
func TestIdempotencyKey(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c := dial(t, n.HTTP, n.Admin)
	var ids []string
	for range 2 {
		sb, err := c.Create(t.Context(), &v1.SandboxSpec{Image: "x"}, client.CreateOptions{IdempotencyKey: "k"})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, sb.Id)
	}
	if ids[0] != ids[1] {
		t.Errorf("two sandboxes: %v", ids)
	}
}

// E2 and the rest of what a request may not say.
func TestInvalid(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c := dial(t, n.HTTP, n.Admin)
	create(t, c, &v1.SandboxSpec{Name: "box"})
	long := strings.Repeat("x", 5000)
	for name, spec := range map[string]*v1.SandboxSpec{
		"no image":      {},
		"image space":   {Image: "a b"},
		"image control": {Image: "a\x1b[2J"},
		"name path":     {Image: "x", Name: "../x"},
		"name newline":  {Image: "x", Name: "a\nlevel=ERROR"},
		"name shell":    {Image: "x", Name: "a;reboot"},
		"name id":       {Image: "x", Name: "sb-0001"},
		"name long":     {Image: "x", Name: long},
		"runtime":       {Image: "x", Runtime: "docker"},
		"network":       {Image: "x", Network: &v1.NetworkPolicy{Mode: "host"}},
		"pull":          {Image: "x", Pull: "sometimes"},
		"tag key":       {Image: "x", Tags: map[string]string{"a b": "c"}},
		"tag value":     {Image: "x", Tags: map[string]string{"a": "c\n"}},
		"env":           {Image: "x", Env: map[string]string{"A=B": "c"}},
		"env NUL":       {Image: "x", Env: map[string]string{"A": "c\x00"}},
		"argv NUL":      {Image: "x", Command: []string{"a\x00b"}},
		"user":          {Image: "x", User: "a\nb"},
		"workdir":       {Image: "x", Workdir: long},
		"memory":        {Image: "x", Resources: &v1.Resources{MemoryLimit: -1}},
		"timeout":       {Image: "x", Timeout: durationpb.New(-time.Second)},
		"probe both":    {Image: "x", Probe: &v1.Probe{TcpPort: 1, Command: []string{"x"}}},
		"probe none":    {Image: "x", Probe: &v1.Probe{}},
		"probe port":    {Image: "x", Probe: &v1.Probe{TcpPort: 70000}},
		"capability":    {Image: "x", Capabilities: &v1.Capabilities{Add: []string{"CAP NET"}}},
		"pty":           {Image: "x", Pty: true, PtyRows: 70000},
	} {
		if _, err := c.Create(t.Context(), spec, client.CreateOptions{}); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	ctx := t.Context()
	for name, call := range map[string]func() error{
		"ref":     func() error { _, err := c.Get(ctx, "../etc"); return err },
		"no ref":  func() error { _, err := c.Get(ctx, ""); return err },
		"exec id": func() error { _, err := c.GetExec(ctx, "box", "a/b"); return err },
		"no argv": func() error { _, err := c.StartExec(ctx, "box", "", &v1.ExecSpec{}); return err },
		"stdin": func() error {
			_, err := c.StartExec(ctx, "box", "", &v1.ExecSpec{Argv: []string{"x"}, Stdin: "tty"})
			return err
		},
		"output": func() error {
			_, err := c.StartExec(ctx, "box", "", &v1.ExecSpec{Argv: []string{"x"}, Output: "tty"})
			return err
		},
		"signal":    func() error { return c.Signal(ctx, "box", "x", 99) },
		"path NUL":  func() error { _, err := c.Stat(ctx, "box", "a\x00", "", false); return err },
		"path long": func() error { _, err := c.Stat(ctx, "box", long, "", false); return err }, // A14
		"no path":   func() error { _, err := c.Stat(ctx, "box", "", "", false); return err },
		"mode":      func() error { return c.MakeDir(ctx, "box", "d", "", 0o170000, false) },
		"mtime": func() error {
			_, err := c.WriteFile(ctx, &v1.WriteFileRequest{SandboxId: "box", Path: []byte("f"), Mtime: &timestamppb.Timestamp{Nanos: -1}}, strings.NewReader(""))
			return err
		},
		"port":      func() error { _, err := c.Dial(ctx, "box", 0); return err },
		"until":     func() error { _, err := c.Wait(ctx, "box", "later", 0); return err },
		"stage":     func() error { _, err := c.List(ctx, &v1.ListSandboxesRequest{Stages: []string{"x"}}); return err },
		"limit":     func() error { _, err := c.List(ctx, &v1.ListSandboxesRequest{Limit: -1}); return err },
		"image ref": func() error { _, err := c.GetImage(ctx, ""); return err },
		"package": func() error {
			_, err := c.BuildBase(ctx, &v1.BuildBaseRequest{Packages: []string{"--include=x"}}, nil)
			return err
		},
		"big offset": func() error { _, err := c.WriteStdin(ctx, "box", "x", -1, nil, false); return err },
	} {
		if err := call(); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// What was refused is in the log as one quoted value, not as lines of its own.
	for line := range strings.Lines(n.Log.String()) {
		if strings.HasPrefix(line, "level=ERROR") {
			t.Errorf("log: %s", line)
		}
	}
}

func TestAttach(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c := dial(t, n.HTTP, n.Admin)
	create(t, c, &v1.SandboxSpec{Name: "box"})
	// Every byte comes back as it is.
	in := make([]byte, 256*1024)
	for i := range in {
		in[i] = byte(i * 7 >> 3)
	}
	a, err := c.Attach(t.Context(), &v1.AttachRequest{SandboxId: "box", Id: "cat", Spec: &v1.ExecSpec{Argv: []string{"cat"}, Stdin: "pipe"}})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	e, err := a.Copy(bytes.NewReader(in), &out, nil)
	if err != nil || e.Exit.GetCode() != 0 || !bytes.Equal(out.Bytes(), in) {
		t.Errorf("%v, %v, %d bytes of %d", e, err, out.Len(), len(in))
	}
	// It can be read again from anywhere, and input that was taken is skipped.
	out.Reset()
	if _, err := c.Output(t.Context(), &v1.ReadOutputRequest{SandboxId: "box", Id: "cat", StdoutOffset: 100, StderrOffset: -1, Follow: true}, &out, nil); err != nil || !bytes.Equal(out.Bytes(), in[100:]) {
		t.Errorf("again: %v, %d bytes", err, out.Len())
	}
}

// A client that goes away does not end the exec, and another goes on with it.
func TestClientGoesAway(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c := dial(t, n.HTTP, n.Admin)
	create(t, c, &v1.SandboxSpec{Name: "box"})
	a, err := c.Attach(t.Context(), &v1.AttachRequest{SandboxId: "box", Id: "cat", Spec: &v1.ExecSpec{Argv: []string{"cat"}, Stdin: "pipe"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Send(&v1.AttachRequest{Stdin: []byte("one")}); err != nil {
		t.Fatal(err)
	}
	for got := ""; got != "one"; {
		m, err := a.Receive()
		if err != nil {
			t.Fatal(err)
		}
		got += string(m.Stdout)
	}
	a.Close()
	if e, err := c.GetExec(t.Context(), "box", "cat"); err != nil || e.State != "running" || e.StdinLen != 3 {
		t.Fatalf("after the client left: %v, %v", e, err)
	}
	// The retry of a client that does not know what was taken.
	var zero int64
	b, err := c.Attach(t.Context(), &v1.AttachRequest{SandboxId: "box", Id: "cat", StdinOffset: &zero, Stdin: []byte("one two"), StdinEof: true})
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if e, err := b.Copy(nil, &out, nil); err != nil || e.Exit.GetCode() != 0 || out.String() != "one two" {
		t.Errorf("%v, %v, %q", e, err, out.String())
	}
}

// E3: the end of the client's side of the stream is not that of the input.
func TestHalfClosed(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c := dial(t, n.HTTP, n.Admin)
	create(t, c, &v1.SandboxSpec{Name: "box"})
	s := c.Execs.Attach(t.Context())
	if err := s.Send(&v1.AttachRequest{SandboxId: "box", Id: "cat", Spec: &v1.ExecSpec{Argv: []string{"cat"}, Stdin: "pipe"}, Stdin: []byte("one ")}); err != nil {
		t.Fatal(err)
	}
	if err := s.CloseRequest(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Receive(); err != nil {
		t.Fatal(err)
	}
	if m, err := s.Receive(); err != nil || string(m.Stdout) != "one " {
		t.Fatalf("%v, %v", m, err)
	}
	if taken, err := c.WriteStdin(t.Context(), "box", "cat", 4, []byte("two"), true); err != nil || taken != 7 {
		t.Errorf("%d bytes taken, %v", taken, err)
	}
	if m, err := s.Receive(); err != nil || string(m.Stdout) != "two" {
		t.Errorf("%v, %v", m, err)
	}
	if m, err := s.Receive(); err != nil || m.Exec.GetState() != "exited" {
		t.Errorf("%v, %v", m, err)
	}
}

func TestAttachSignalAndResize(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c := dial(t, n.HTTP, n.Admin)
	create(t, c, &v1.SandboxSpec{Name: "box"})
	a, err := c.Attach(t.Context(), &v1.AttachRequest{SandboxId: "box", Spec: &v1.ExecSpec{
		Argv: []string{"sh", "-c", `trap 'stty size; exit 3' USR1; echo up; while :; do sleep 0.02; done`},
		Pty:  &v1.WindowSize{Rows: 10, Cols: 20},
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	var got strings.Builder
	var last *v1.Exec
	for {
		m, err := a.Receive()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if m.Exec != nil {
			last = m.Exec
		}
		got.Write(m.Stdout)
		if string(m.Stdout) == "up\r\n" {
			if err := a.Send(&v1.AttachRequest{Resize: &v1.WindowSize{Rows: 33, Cols: 44}, Signal: 10}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if !strings.Contains(got.String(), "33 44") || last.Exit.GetCode() != 3 {
		t.Errorf("got %q, %v", got.String(), last)
	}
}

func TestFiles(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c := dial(t, n.HTTP, n.Admin)
	sb := create(t, c, &v1.SandboxSpec{Name: "box"})
	ctx := t.Context()
	name := "d/\xff\xfe name" // A14: names are bytes
	data := bytes.Repeat([]byte{0, 1, 2, 0xff}, 300_000)
	fi, err := c.WriteFile(ctx, &v1.WriteFileRequest{SandboxId: "box", Path: []byte(name), Mode: 0o4711, Parents: true, Data: data[:5]}, bytes.NewReader(data[5:]))
	if err != nil || fi.Size != int64(len(data)) || fi.Mode != 0o104711 || string(fi.Path) != name {
		t.Errorf("write: %v, %v", fi, err)
	}
	r, fi, err := c.ReadFile(ctx, &v1.ReadFileRequest{SandboxId: "box", Path: []byte(name), Offset: 3, Length: 500_000})
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(r)
	if err != nil || !bytes.Equal(got, data[3:500_003]) || fi.Size != int64(len(data)) {
		t.Errorf("read: %d bytes, %v, %v", len(got), fi, err)
	}
	r.Close()
	if _, _, err := c.ReadFile(ctx, &v1.ReadFileRequest{SandboxId: "box", Path: []byte("d")}); !errors.Is(err, sandbox.Invalid) { // B4
		t.Errorf("read a directory: %v", err)
	}
	if err := c.MakeDir(ctx, "box", "a/b/c", "", 0, true); err != nil {
		t.Error(err)
	}
	if err := c.RenameFile(ctx, "box", "a/b", "a/z", ""); err != nil {
		t.Error(err)
	}
	var names []string
	err = c.ListFiles(ctx, "box", "a", "", func(l []*v1.FileInfo) error {
		for _, f := range l {
			names = append(names, string(f.Path))
		}
		return nil
	})
	if err != nil || fmt.Sprint(names) != "[z]" {
		t.Errorf("list: %v, %v", names, err)
	}
	if err := c.RemoveFile(ctx, "box", "a", "", true); err != nil {
		t.Error(err)
	}
	if _, err := c.Stat(ctx, "box", "a", "", false); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("stat: %v", err)
	}
	var ops []string
	stop := errors.New("stop")
	err = c.WatchFiles(ctx, &v1.WatchFilesRequest{SandboxId: "box", Path: []byte("d")}, func(e *v1.FileEvent) error {
		if ops = append(ops, e.Op); len(ops) == 2 {
			return stop
		}
		return nil
	})
	if !errors.Is(err, stop) || fmt.Sprint(ops) != "[ready created]" {
		t.Errorf("watch: %v, %v", ops, err)
	}
	tarball, err := c.Download(ctx, "box", "d", "")
	if err != nil {
		t.Fatal(err)
	}
	defer tarball.Close()
	if _, bytes, err := c.Upload(ctx, "box", "copy", "", tarball); err != nil || bytes != int64(len(data)) {
		t.Errorf("upload: %d, %v", bytes, err)
	}
	if b, err := os.ReadFile(n.Engine.Dir(sb.Id) + "/copy/" + name); err != nil || !bytes.Equal(b, data) {
		t.Errorf("copied %d bytes, %v", len(b), err)
	}
}

// A file whose sender breaks off must not be taken for whole.
func TestBrokenUpload(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c := dial(t, n.HTTP, n.Admin)
	create(t, c, &v1.SandboxSpec{Name: "box"})
	broken := errors.New("the disk is broken")
	_, err := c.WriteFile(t.Context(), &v1.WriteFileRequest{SandboxId: "box", Path: []byte("f")},
		io.MultiReader(bytes.NewReader(make([]byte, 1<<20)), iotestErr{broken}))
	if !errors.Is(err, broken) {
		t.Errorf("write: %v", err)
	}
	if _, err := c.Stat(t.Context(), "box", "f", "", false); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("the half of it is there: %v", err)
	}
}

type iotestErr struct{ err error }

func (e iotestErr) Read([]byte) (int, error) { return 0, e.err }

func TestDial(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c := dial(t, n.HTTP, n.Admin)
	create(t, c, &v1.SandboxSpec{Name: "box"})
	conn, err := c.Dial(t.Context(), "box", 7)
	if err != nil {
		t.Fatal(err)
	}
	data := bytes.Repeat([]byte("0123456789"), 100_000)
	go func() {
		_, _ = conn.Write(data)
		_ = conn.(interface{ CloseWrite() error }).CloseWrite()
	}()
	got, err := io.ReadAll(conn)
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("got %d bytes of %d, %v", len(got), len(data), err)
	}
	conn.Close()
	if _, err := c.Dial(t.Context(), "box", 8); !errors.Is(err, sandbox.Unavailable) {
		t.Errorf("a closed port: %v", err)
	}
}

func TestEvents(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c := dial(t, n.HTTP, n.Admin)
	sb := create(t, c, &v1.SandboxSpec{})
	stop := errors.New("stop")
	var kinds []string
	err := c.Events(t.Context(), &v1.WatchEventsRequest{SandboxId: sb.Id, After: -1, Follow: true}, func(e *v1.Event) error {
		kinds = append(kinds, e.Kind)
		switch len(kinds) {
		case 2:
			go func() { _, _ = c.Stop(t.Context(), sb.Id, 0) }()
		case 3:
			return stop
		}
		return nil
	})
	if !errors.Is(err, stop) || fmt.Sprint(kinds) != "[sandbox.created sandbox.stage sandbox.ended]" {
		t.Errorf("%v, %v", kinds, err)
	}
}

func TestImages(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c := dial(t, n.HTTP, n.Admin)
	ctx := t.Context()
	steps := 0
	img, err := c.PullImage(ctx, &v1.PullImageRequest{Ref: "a"}, func(*v1.Progress) { steps++ })
	if err != nil || img.Tags[0] != "a" || steps == 0 {
		t.Errorf("pull: %v, %v, %d steps", img, err, steps)
	}
	if _, err := c.PullImage(ctx, &v1.PullImageRequest{Ref: "down"}, nil); !errors.Is(err, sandbox.Unavailable) {
		t.Errorf("pull: %v", err)
	}
	list, err := c.LoadImage(ctx, &v1.LoadImageRequest{Tag: "b", Format: "rootfs"}, bytes.NewReader(make([]byte, 1<<20)))
	if err != nil || len(list) != 1 || n.Images.Loaded != 1<<20 {
		t.Errorf("load: %v, %v, %d bytes", list, err, n.Images.Loaded)
	}
	if img, err := c.TagImage(ctx, "b", "c"); err != nil || img.Tags[0] != "c" {
		t.Errorf("tag: %v, %v", img, err)
	}
	if err := c.RemoveImage(ctx, "b", false); err != nil {
		t.Error(err)
	}
	if err := c.RemoveImage(ctx, "b", true); err != nil {
		t.Error(err)
	}
	if _, err := c.GetImage(ctx, "b"); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("get: %v", err)
	}
	if img, err := c.BuildBase(ctx, &v1.BuildBaseRequest{Tag: "base", Packages: []string{"libstdc++6", "git"}}, nil); err != nil || img.Tags[0] != "base" {
		t.Errorf("base: %v, %v", img, err)
	}
	if _, removed, err := c.PruneImages(ctx, true); err != nil || removed != 4 {
		t.Errorf("prune: %d, %v", removed, err)
	}
	if list, err := c.ListImages(ctx); err != nil || len(list) != 0 {
		t.Errorf("list: %v, %v", list, err)
	}
}

// A stop ends streams with unavailable and leaves execs running.
func TestGracefulStop(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c := dial(t, n.HTTP, n.Admin)
	sb := create(t, c, &v1.SandboxSpec{Command: []string{"sh", "-c", "echo up; sleep 1000"}})
	a, err := c.Attach(t.Context(), &v1.AttachRequest{SandboxId: sb.Id, Id: "main"})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	for {
		m, err := a.Receive()
		if err != nil {
			if !errors.Is(err, sandbox.Unavailable) || !strings.Contains(err.Error(), "the daemon stops") {
				t.Errorf("the stream ended with %v", err)
			}
			break
		}
		if len(m.Stdout) > 0 {
			go func() { _ = n.Stop() }()
		}
	}
	if err := n.Stop(); err != nil {
		t.Error(err)
	}
	if n.Engine.Boxes()[0].Stage != sandbox.StageRunning {
		t.Error("the sandbox was touched")
	}
	if _, err := os.Stat(n.Socket); !os.IsNotExist(err) {
		t.Errorf("the socket is left: %v", err)
	}
	if _, err := c.Info(t.Context()); !errors.Is(err, sandbox.Unavailable) || sandbox.HintOf(err) == "" {
		t.Errorf("after the stop: %v", err)
	}
}

// A message that is too large, and one that unpacks to too much, are refused.
func TestMessageSize(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c := dial(t, n.HTTP, n.Admin)
	create(t, c, &v1.SandboxSpec{Name: "box"})
	if _, err := c.WriteStdin(t.Context(), "box", "x", 0, make([]byte, 5<<20), false); !errors.Is(err, sandbox.Exhausted) {
		t.Errorf("got %v", err)
	}
}

func TestUnixSocketIsRootsAlone(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	fi, err := os.Stat(n.Socket)
	if err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
	// A token is needed here too.
	if _, err := dial(t, n.Unix, "").Info(t.Context()); !errors.Is(err, sandbox.Denied) {
		t.Errorf("without a token: %v", err)
	}
}

// E3: whoever sends slowly is dropped, and others are served meanwhile.
func TestSlowLoris(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for the server's own deadline")
	}
	t.Parallel()
	n := fake.Serve(t)
	var conns []net.Conn
	for i := range 50 {
		conn, err := net.Dial("tcp", n.Addr)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		part := "POST /vivarium.v1.SandboxService/List HTTP/1.1\r\nHost: x\r\n"
		if i%2 == 1 { // and the same with HTTP/2's preface
			part = "PRI * HTTP/2.0\r\n\r\nSM"
		}
		if _, err := io.WriteString(conn, part); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	if _, err := dial(t, n.HTTP, n.Admin).Info(t.Context()); err != nil {
		t.Errorf("another client: %v", err)
	}
	for i, conn := range conns {
		_ = conn.SetReadDeadline(time.Now().Add(60 * time.Second))
		if _, err := io.Copy(io.Discard, conn); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("connection %d is still open", i)
		}
	}
}

// E3: a client that stops reading holds up its own stream only.
func TestSlowReader(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c := dial(t, n.HTTP, n.Admin)
	create(t, c, &v1.SandboxSpec{Name: "box"})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s, err := c.Execs.Run(ctx, connect.NewRequest(&v1.RunExecRequest{SandboxId: "box", Spec: &v1.ExecSpec{Argv: []string{"flood", "1073741824"}}}))
	if err != nil || !s.Receive() {
		t.Fatalf("run: %v, %v", err, s.Err())
	}
	for range 20 { // on the same connection
		if _, err := c.Get(t.Context(), "box"); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	if !errors.Is(drain(s), context.Canceled) {
		t.Errorf("ended with %v", s.Err())
	}
}

func drain(s *connect.ServerStreamForClient[v1.ExecOutput]) error {
	for s.Receive() {
	}
	return s.Err()
}
