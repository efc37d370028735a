package life

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
	"vivarium/test/fixture"
)

// byID are the calls that name an object, with a request each that would work
// for its owner; %[1]s is a sandbox, %[2]s an exec, %[3]s an image.
var byID = map[string]string{
	"SandboxService/Get":     `{"id":"%[1]s"}`,
	"SandboxService/Wait":    `{"id":"%[1]s","until":"running"}`,
	"SandboxService/Stop":    `{"id":"%[1]s"}`,
	"SandboxService/Remove":  `{"id":"%[1]s","force":true}`,
	"SandboxService/Extend":  `{"id":"%[1]s","timeout":"60s"}`,
	"SandboxService/SetTags": `{"id":"%[1]s","tags":{"a":"b"}}`,
	"SandboxService/Events":  `{"sandboxId":"%[1]s","after":"-1"}`,

	"ExecService/Start":      `{"sandboxId":"%[1]s","spec":{"argv":["true"]}}`,
	"ExecService/Run":        `{"sandboxId":"%[1]s","spec":{"argv":["true"]}}`,
	"ExecService/Attach":     `{"sandboxId":"%[1]s","id":"%[2]s"}`,
	"ExecService/Get":        `{"sandboxId":"%[1]s","id":"%[2]s"}`,
	"ExecService/List":       `{"sandboxId":"%[1]s"}`,
	"ExecService/Wait":       `{"sandboxId":"%[1]s","id":"%[2]s","timeout":"1s"}`,
	"ExecService/Output":     `{"sandboxId":"%[1]s","id":"%[2]s"}`,
	"ExecService/WriteStdin": `{"sandboxId":"%[1]s","id":"%[2]s","data":"AA=="}`,
	"ExecService/Signal":     `{"sandboxId":"%[1]s","id":"%[2]s","signal":9}`,
	"ExecService/Resize":     `{"sandboxId":"%[1]s","id":"%[2]s","size":{"rows":1,"cols":1}}`,

	"FileService/Read":     `{"sandboxId":"%[1]s","path":"L2V0Yy9wYXNzd2Q="}`,
	"FileService/Write":    `{"sandboxId":"%[1]s","path":"L3RtcC94","data":"AA=="}`,
	"FileService/List":     `{"sandboxId":"%[1]s","path":"Lw=="}`,
	"FileService/Stat":     `{"sandboxId":"%[1]s","path":"Lw=="}`,
	"FileService/MakeDir":  `{"sandboxId":"%[1]s","path":"L3RtcC9k"}`,
	"FileService/Remove":   `{"sandboxId":"%[1]s","path":"L2V0Yw==","recursive":true}`,
	"FileService/Rename":   `{"sandboxId":"%[1]s","from":"L2V0Yw==","to":"L3RtcC9l"}`,
	"FileService/Watch":    `{"sandboxId":"%[1]s","path":"Lw=="}`,
	"FileService/Download": `{"sandboxId":"%[1]s","path":"L2V0Yw=="}`,
	"FileService/Upload":   `{"sandboxId":"%[1]s","path":"L3RtcA=="}`,

	"PortService/Dial": `{"sandboxId":"%[1]s","port":80}`,

	"ImageService/Get":    `{"ref":"%[3]s"}`,
	"ImageService/Tag":    `{"ref":"%[3]s","tag":"mine:1"}`,
	"ImageService/Remove": `{"ref":"%[3]s"}`,
}

// byTenant are those that name none: what they give is the caller's own (List)
// or needs an admin.
var byTenant = map[string]bool{
	"SandboxService/Create": true, "SandboxService/List": true,
	"ImageService/Pull": true, "ImageService/Load": true, "ImageService/List": true, "ImageService/Prune": true, "ImageService/BuildBase": true,
	"DaemonService/Info": true, "DaemonService/CreateToken": true, "DaemonService/ListTokens": true, "DaemonService/RevokeToken": true,
}

// call makes a call in JSON as curl would, unary or with the envelopes of a
// stream (connectrpc.com/docs/protocol), and returns the code and text of its
// error.
func call(t *testing.T, hc *http.Client, addr, token string, m protoreflect.MethodDescriptor, body string) (code, message string) {
	t.Helper()
	stream := m.IsStreamingClient() || m.IsStreamingServer()
	kind, payload := "application/json", []byte(body)
	if stream {
		kind = "application/connect+json"
		payload = append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(body))), body...)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, fmt.Sprintf("http://%s/%s/%s", addr, m.Parent().FullName(), m.Name()), bytes.NewReader(payload))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", kind)
	req.Header.Set("Connect-Protocol-Version", "1")
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	res, err := hc.Do(req)
	if err != nil {
		t.Fatalf("%s: %v", m.FullName(), err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	if err != nil {
		t.Fatalf("%s: %v", m.FullName(), err)
	}
	type failure struct{ Code, Message string }
	if !stream || res.Header.Get("Content-Type") == "application/json" {
		var f failure
		if res.StatusCode != http.StatusOK {
			if err := json.Unmarshal(b, &f); err != nil {
				t.Fatalf("%s: %q: %v", m.FullName(), b, err)
			}
		}
		return f.Code, f.Message
	}
	for len(b) >= 5 {
		flag, n := b[0], int(binary.BigEndian.Uint32(b[1:]))
		if n > len(b)-5 {
			break
		}
		if flag&2 != 0 { // the end of the stream
			var end struct{ Error failure }
			if err := json.Unmarshal(b[5:5+n], &end); err != nil {
				t.Fatalf("%s: %q: %v", m.FullName(), b, err)
			}
			return end.Error.Code, end.Error.Message
		}
		b = b[5+n:]
	}
	t.Fatalf("%s: a stream without an end: %q", m.FullName(), b)
	return "", ""
}

func h2c() *http.Client {
	var p http.Protocols
	p.SetUnencryptedHTTP2(true)
	return &http.Client{Transport: &http.Transport{Protocols: &p, DialContext: (&net.Dialer{}).DialContext}}
}

// methods are all calls of the API.
func methods() map[string]protoreflect.MethodDescriptor {
	all := map[string]protoreflect.MethodDescriptor{}
	services := (&v1.Sandbox{}).ProtoReflect().Descriptor().ParentFile().Services()
	for i := range services.Len() {
		for j := range services.Get(i).Methods().Len() {
			m := services.Get(i).Methods().Get(j)
			all[string(services.Get(i).Name())+"/"+string(m.Name())] = m
		}
	}
	return all
}

// E1: what is another tenant's does not exist, in every call of the API; the
// answer is that to an id that never was.
func otherTenants(t *testing.T, e *env) {
	mine := e.tenant(t, "mine")
	s := spec("sleep", "1000")
	s.Name = "mine"
	sb := mine.create(t, s)
	if _, err := mine.c.StartExec(t.Context(), sb.Id, "work", &v1.ExecSpec{Argv: []string{"cat"}, Stdin: "pipe"}); err != nil {
		t.Fatal(err)
	}
	if _, err := mine.c.LoadImage(t.Context(), &v1.LoadImageRequest{Tag: "secret:1", Format: "rootfs"}, bytes.NewReader(fixture.Busybox(t))); err != nil {
		t.Fatal(err)
	}
	_, thief, err := e.c.CreateToken(t.Context(), "thief", "test", false)
	if err != nil {
		t.Fatal(err)
	}
	hc := h2c()
	defer hc.CloseIdleConnections()
	all := methods()
	if len(all) < 30 {
		t.Fatalf("only %d calls", len(all))
	}
	for name, m := range all {
		body, ok := byID[name]
		if !ok {
			if !byTenant[name] {
				t.Errorf("%s: is tested by nothing; add it here", name)
			}
			continue
		}
		// without a token, nothing
		if code, _ := call(t, hc, e.Addr, "", m, fmt.Sprintf(body, sb.Id, "work", "secret:1")); code != "unauthenticated" {
			t.Errorf("%s without a token: %s", name, code)
		}
		for _, ref := range []string{sb.Id, "mine"} {
			code, msg := call(t, hc, e.Addr, thief, m, fmt.Sprintf(body, ref, "work", "secret:1"))
			never, missing := "sb-01ARZ3NDEKTSV4RRFFQ69G5FAV", "missing:1"
			ncode, nmsg := call(t, hc, e.Addr, thief, m, fmt.Sprintf(body, never, "work", missing))
			if code != "not_found" {
				t.Errorf("%s of another tenant's %s: %q %q", name, ref, code, msg)
			}
			same := strings.NewReplacer(ref, "X", never, "X", "secret:1", "X", missing, "X")
			if code != ncode || same.Replace(msg) != same.Replace(nmsg) {
				t.Errorf("%s: another tenant's is told from what never was: %q, %q", name, msg, nmsg)
			}
		}
	}
	for name := range byID {
		if all[name] == nil {
			t.Errorf("%s is not in the API", name)
		}
	}
	c, err := client.New(e.Addr, thief)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if l, err := c.List(t.Context(), &v1.ListSandboxesRequest{Ended: true}); err != nil || len(l) != 0 {
		t.Errorf("the thief's list: %v, %v", l, err)
	}
	if l, err := c.ListImages(t.Context()); err != nil || len(l) != 0 {
		t.Errorf("the thief's images: %v, %v", l, err)
	}
	if _, _, err := c.PruneImages(t.Context(), true); err != nil && sandbox.KindOf(err) != sandbox.Denied {
		t.Error(err)
	}
	_, err = c.Create(t.Context(), &v1.SandboxSpec{Image: "secret:1", Pull: "never"}, client.CreateOptions{Wait: true})
	is(t, "run another tenant's image", err, sandbox.NotFound, "secret:1", true)
	if i, err := c.Info(t.Context()); err != nil || i.Sandboxes != 0 || i.PoolReady != 0 || i.Admin || i.Tenant != "thief" {
		t.Errorf("%v, %v", i, err)
	}
	_, _, err = c.CreateToken(t.Context(), "mine", "x", true)
	is(t, "make a token for another tenant", err, sandbox.Denied, "", false)
	_, err = c.ListTokens(t.Context())
	is(t, "list tokens", err, sandbox.Denied, "", false)
	is(t, "revoke a token", c.RevokeToken(t.Context(), "tk-x"), sandbox.Denied, "", false)
	_, err = c.BuildBase(t.Context(), &v1.BuildBaseRequest{}, nil)
	is(t, "make a base image as root", err, sandbox.Denied, "", false)

	// after all that the owner's are as they were
	if got, err := mine.c.Get(t.Context(), "mine"); err != nil || got.Id != sb.Id || got.Stage != "running" || len(got.Spec.Tags) != 0 {
		t.Errorf("%v, %v", got, err)
	}
	if x, err := mine.c.GetExec(t.Context(), sb.Id, "work"); err != nil || x.State != "running" || x.StdinLen != 0 {
		t.Errorf("%v, %v", x, err)
	}
	if _, err := mine.c.GetImage(t.Context(), "secret:1"); err != nil {
		t.Error(err)
	}
}

// A tenant does not reach the host's loopback by a pull, and reads nothing of what
// answers there in an error; the operator may have his registry there.
func privatePulls(t *testing.T, e *env) {
	var asked atomic.Int64
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		if r.URL.Path != "/v2/" {
			http.Error(w, "internal secret", http.StatusNotFound)
		}
	}))
	defer srv.Close()
	ref := strings.TrimPrefix(srv.URL, "http://") + "/any/path:1"
	c := e.NewTenant("puller")
	_, err := c.PullImage(t.Context(), &v1.PullImageRequest{Ref: ref}, nil)
	is(t, "pull from loopback", err, sandbox.Denied, "refused", true)
	_, err = c.Create(t.Context(), &v1.SandboxSpec{Image: ref}, client.CreateOptions{Wait: true})
	is(t, "create from loopback", err, sandbox.Denied, "refused", true)
	if n := asked.Load(); n != 0 || strings.Contains(err.Error(), "secret") {
		t.Errorf("%d requests were made: %v", n, err)
	}
	_, err = e.c.PullImage(t.Context(), &v1.PullImageRequest{Ref: ref}, nil)
	is(t, "the operator's pull", err, sandbox.NotFound, "", false)
	if asked.Load() == 0 {
		t.Error("the operator does not reach his registry")
	}
}

func tokens(t *testing.T, e *env) {
	tok, secret, err := e.c.CreateToken(t.Context(), "revoked", "test", false)
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New(e.Addr, secret)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range 2 { // so that it is in every cache
		if i, err := c.Info(t.Context()); err != nil || i.Tenant != "revoked" {
			t.Fatalf("%v, %v", i, err)
		}
	}
	if err := e.c.RevokeToken(t.Context(), tok.Id); err != nil {
		t.Fatal(err)
	}
	_, err = c.Info(t.Context())
	is(t, "a revoked token", err, sandbox.Denied, "", false)
	is(t, "revoke it again", e.c.RevokeToken(t.Context(), tok.Id), sandbox.NotFound, tok.Id, false)
	l, err := e.c.ListTokens(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range l {
		if x.Id == tok.Id || strings.Contains(x.String(), secret) {
			t.Errorf("listed: %v", x)
		}
	}
	for _, bad := range []string{"", "x", "vt_" + strings.Repeat("a", 40), secret + "x", "Bearer " + secret} {
		b, err := client.New(e.Addr, bad)
		if err != nil {
			continue
		}
		_, err = b.Info(t.Context())
		is(t, "token "+bad, err, sandbox.Denied, "", false)
		b.Close()
	}
}
