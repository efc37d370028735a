package image

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"vivarium/sandbox"
)

func TestPull(t *testing.T) {
	t.Parallel()
	reg := newRegistry(t)
	ref := reg.push(t, "a/b:1", testImage(t,
		tarOf(t, ent{name: "bin/sh", data: "shell", mode: 0o755}, ent{name: "etc/old", data: "x"}),
		tarOf(t, ent{name: "etc/.wh.old"}, ent{name: "etc/new", data: "y"})))
	s := open(t, Options{})
	ctx := context.Background()

	_, err := s.Pull(ctx, "t", ref, PullOptions{Policy: Never})
	wantKind(t, err, sandbox.NotFound)
	var last Progress
	img, err := s.Pull(ctx, "t", ref, PullOptions{Progress: func(p Progress) { last = p }})
	if err != nil {
		t.Fatal(err)
	}
	if last.Stage != "download" || last.Done != last.Total || last.Total == 0 {
		t.Errorf("last progress: %+v", last)
	}
	if img.Size%4096 != 0 || img.Platform != "linux/amd64" || img.Config.Env[0] != "A=b" || len(img.Tags) != 1 || img.Tags[0] != ref {
		t.Errorf("image: %+v", img)
	}
	f := files(t, img)
	wantFile(t, f, "bin/sh", "shell")
	wantFile(t, f, "etc/new", "y")
	wantFile(t, f, "etc/resolv.conf", "")
	wantNone(t, f, "etc/old")
	reg.srv.Close() // from here on the registry must not be needed
	again, err := s.Pull(ctx, "t", ref, PullOptions{})
	if err != nil || again.ID != img.ID {
		t.Errorf("second pull: %v, %v", again, err)
	}
	_, err = s.Get(ctx, "other", ref)
	wantKind(t, err, sandbox.NotFound)
	wantClean(t, s)
}

// Pulls of one reference at one time are one pull.
func TestPullMerges(t *testing.T) {
	t.Parallel()
	reg := newRegistry(t)
	ref := reg.push(t, "a/b:1", testImage(t, tarOf(t, ent{name: "f", data: "1"})))
	c := &countRequests{n: map[string]int{}}
	gate := make(chan struct{})
	reg.hook = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if strings.Contains(r.URL.Path, "/blobs/") {
			<-gate
		}
		c.hook(w, r, next)
	}
	s := open(t, Options{})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var started, given atomic.Int32
	for i := range 10 {
		wg.Go(func() {
			// One of them gives up; the others must not notice.
			ctx := ctx
			if i > 0 {
				ctx = context.Background()
			}
			started.Add(1)
			img, err := s.Pull(ctx, "t", ref, PullOptions{Policy: Always})
			if i == 0 {
				wantKind(t, err, sandbox.Unavailable)
				given.Add(1)
				return
			}
			if err != nil || img.Size == 0 {
				t.Errorf("pull: %v", err)
			}
		})
	}
	for {
		s.fly.mu.Lock()
		n := 0
		for _, f := range s.fly.m {
			n = f.waiters
		}
		s.fly.mu.Unlock()
		if n == 10 {
			break
		}
		runtime.Gosched()
	}
	cancel()
	for given.Load() == 0 {
		runtime.Gosched()
	}
	close(gate)
	wg.Wait()
	if c.get("manifests") != 1 || c.get("blobs") != 2 {
		t.Errorf("requests: %v", c.n)
	}
}

// When all who wait have gone, the pull ends and leaves nothing.
func TestPullCancelled(t *testing.T) {
	t.Parallel()
	reg := newRegistry(t)
	ref := reg.push(t, "a/b:1", testImage(t, tarOf(t, ent{name: "f", data: "1"})))
	ctx, cancel := context.WithCancel(context.Background())
	n := 0
	reg.hook = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if strings.Contains(r.URL.Path, "/blobs/") && r.Method == http.MethodGet {
			if n++; n == 2 { // the config was fetched; this is the layer
				cancel()
				<-r.Context().Done()
				return
			}
		}
		next.ServeHTTP(w, r)
	}
	s := open(t, Options{})
	_, err := s.Pull(ctx, "t", ref, PullOptions{})
	wantKind(t, err, sandbox.Unavailable)
	s.fly.stop()
	wantClean(t, s)
}

// E: everything that a registry can do wrong, with the kind of error.
func TestPullErrors(t *testing.T) {
	t.Parallel()
	isBlob := func(r *http.Request) bool {
		return strings.Contains(r.URL.Path, "/blobs/sha256:") && r.Method == http.MethodGet
	}
	var layerPath string
	isLayer := func(r *http.Request) bool { return isBlob(r) && r.URL.Path == layerPath }
	status := func(match func(*http.Request) bool, code int) func(http.ResponseWriter, *http.Request, http.Handler) {
		return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if match(r) {
				w.WriteHeader(code)
				return
			}
			next.ServeHTTP(w, r)
		}
	}
	body := func(match func(*http.Request) bool, change func([]byte) []byte) func(http.ResponseWriter, *http.Request, http.Handler) {
		return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if !match(r) {
				next.ServeHTTP(w, r)
				return
			}
			rec := httptest.NewRecorder()
			r.Header.Del("Range")
			next.ServeHTTP(rec, r)
			w.Header().Set("Content-Type", rec.Header().Get("Content-Type"))
			w.Write(change(rec.Body.Bytes()))
		}
	}
	all := func(*http.Request) bool { return true }
	isManifest := func(r *http.Request) bool { return strings.Contains(r.URL.Path, "/manifests/") }
	tests := []struct {
		name string
		hook func(http.ResponseWriter, *http.Request, http.Handler)
		want sandbox.Kind
	}{
		{"no such image", status(isManifest, 404), sandbox.NotFound},
		{"no access", status(isManifest, 401), sandbox.Denied},
		{"forbidden", status(isManifest, 403), sandbox.Denied},
		{"too many requests", status(isManifest, 429), sandbox.Unavailable},
		{"registry broken", status(all, 500), sandbox.Unavailable},
		{"layer missing", status(isLayer, 404), sandbox.NotFound},
		{"layer with a flipped bit", body(isLayer, func(b []byte) []byte { b[len(b)/2] ^= 1; return b }), sandbox.Invalid},
		{"layer too long", body(isLayer, func(b []byte) []byte { return append(b, b...) }), sandbox.Invalid},
		{"layer cut short", body(isLayer, func(b []byte) []byte { return b[:len(b)/2] }), sandbox.Unavailable},
		{"config of another image", body(func(r *http.Request) bool { return isBlob(r) && !isLayer(r) }, func(b []byte) []byte { b[0] ^= 1; return b }), sandbox.Invalid},
		{"manifest is not JSON", body(isManifest, func([]byte) []byte { return []byte("<html>") }), sandbox.Invalid},
		{"manifest without end", body(isManifest, func([]byte) []byte { return bytes.Repeat([]byte(" "), maxManifest+10) }), sandbox.Invalid},
		{"redirect to the metadata service", func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if isLayer(r) {
				http.Redirect(w, r, "https://169.254.169.254/latest", http.StatusFound)
				return
			}
			next.ServeHTTP(w, r)
		}, sandbox.Denied},
		{"redirect to plain HTTP elsewhere", func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if isLayer(r) {
				http.Redirect(w, r, "http://elsewhere.invalid/x", http.StatusFound)
				return
			}
			next.ServeHTTP(w, r)
		}, sandbox.Denied},
		{"redirect loop", func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if isLayer(r) {
				http.Redirect(w, r, r.URL.Path, http.StatusFound)
				return
			}
			next.ServeHTTP(w, r)
		}, sandbox.Unavailable},
	}
	img := testImage(t, tarOf(t, ent{name: "f", data: strings.Repeat("x", 5000)}))
	m, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	layerPath = "/v2/a/b/blobs/" + m.Layers[0].Digest.String()
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			reg := newRegistry(t)
			ref := reg.push(t, "a/b:1", img)
			reg.hook = tt.hook
			s := open(t, Options{})
			_, err := s.Pull(context.Background(), "t", ref, PullOptions{})
			if wantKind(t, err, tt.want); sandbox.HintOf(err) == "" && tt.want != sandbox.Invalid && tt.name != "redirect to the metadata service" {
				t.Errorf("no hint in %v", err)
			}
			wantClean(t, s)
		})
	}
	s := open(t, Options{})
	for _, bad := range []string{"", "A/b", "a b", "a@sha256:xx", "localhost/a@md5:d41d8cd98f00b204e9800998ecf8427e", "http://x/y"} {
		if _, err := s.Pull(context.Background(), "t", bad, PullOptions{}); !errors.Is(err, sandbox.Invalid) && !errors.Is(err, sandbox.Unsupported) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	reg := newRegistry(t)
	reg.srv.Close()
	_, err = s.Pull(context.Background(), "t", reg.host+"/a/b", PullOptions{})
	if wantKind(t, err, sandbox.Unavailable); sandbox.HintOf(err) == "" {
		t.Error("registry down: no hint")
	}
	_, err = s.Pull(context.Background(), "t", "localhost/a", PullOptions{Platform: "linux"})
	wantKind(t, err, sandbox.Invalid)
}

// A registry that breaks off or falls silent in the middle of a layer is asked
// for the rest.
func TestPullResumes(t *testing.T) {
	t.Parallel()
	reg := newRegistry(t)
	data := make([]byte, 1<<20)
	for i := range data {
		data[i] = byte(i * i >> 8 * 7)
	}
	img := testImage(t, tarOf(t, ent{name: "f", data: string(data)}))
	ref := reg.push(t, "a/b:1", img)
	m, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	var tries, ranges atomic.Int32
	reg.hook = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if !strings.HasSuffix(r.URL.Path, m.Layers[0].Digest.String()) || r.Method != http.MethodGet {
			next.ServeHTTP(w, r)
			return
		}
		n := tries.Add(1)
		if r.Header.Get("Range") != "" {
			ranges.Add(1)
		}
		if n == 3 { // one that does not know ranges
			r.Header.Del("Range")
		}
		rec := httptest.NewRecorder()
		next.ServeHTTP(rec, r)
		for k, v := range rec.Header() {
			w.Header()[k] = v
		}
		w.WriteHeader(rec.Code)
		b := rec.Body.Bytes()
		if n > 4 {
			w.Write(b)
			return
		}
		w.Write(b[:len(b)/3])
		w.(http.Flusher).Flush()
		if n == 2 {
			<-r.Context().Done() // silence
			return
		}
		panic(http.ErrAbortHandler)
	}
	s := open(t, Options{Stall: 300 * time.Millisecond})
	got, err := s.Pull(context.Background(), "t", ref, PullOptions{})
	if err != nil {
		t.Fatal(err)
	}
	wantFile(t, files(t, got), "f", string(data))
	if ranges.Load() == 0 {
		t.Error("never asked for the rest only")
	}
}

// A mirror is asked first; without it, the registry itself; the credentials
// given for the registry never reach the mirror.
func TestPullMirror(t *testing.T) {
	t.Parallel()
	mirror, origin := newRegistry(t), newRegistry(t)
	img := testImage(t, tarOf(t, ent{name: "f", data: "1"}))
	mirror.push(t, "cache/a/b:1", img)
	ref := origin.push(t, "a/b:1", img)
	only := origin.push(t, "a/c:1", testImage(t, tarOf(t, ent{name: "f", data: "2"})))
	var seen atomic.Int32
	var leaked atomic.Bool
	origin.hook = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		seen.Add(1)
		next.ServeHTTP(w, r)
	}
	mirror.hook = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.Header.Get("Authorization") != "" {
			leaked.Store(true)
		}
		next.ServeHTTP(w, r)
	}
	s := open(t, Options{Mirrors: map[string][]string{origin.host: {"http://" + mirror.host + "/cache"}}})
	auth := &authn.Basic{Username: "u", Password: "p"}
	got, err := s.Pull(context.Background(), "t", ref, PullOptions{Auth: auth})
	if err != nil {
		t.Fatal(err)
	}
	if seen.Load() != 0 || leaked.Load() || got.Tags[0] != ref {
		t.Errorf("origin asked %d times, credentials leaked: %v, tags %v", seen.Load(), leaked.Load(), got.Tags)
	}
	if _, err := s.Pull(context.Background(), "t", only, PullOptions{}); err != nil {
		t.Errorf("what the mirror lacks: %v", err)
	}
	mirror.srv.Close()
	if _, err := s.Pull(context.Background(), "t", ref, PullOptions{Policy: Always}); err != nil {
		t.Errorf("with the mirror down: %v", err)
	}
}

// An index is resolved for the platform asked for.
func TestPullPlatform(t *testing.T) {
	t.Parallel()
	reg := newRegistry(t)
	var idx v1.ImageIndex = empty.Index
	for _, arch := range []string{"amd64", "arm64"} {
		img := testImage(t, tarOf(t, ent{name: "arch", data: arch}))
		cf, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		cf = cf.DeepCopy()
		cf.Architecture = arch
		if img, err = mutate.ConfigFile(img, cf); err != nil {
			t.Fatal(err)
		}
		idx = mutate.AppendManifests(idx, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}}})
	}
	r, err := name.ParseReference(reg.host + "/m:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.WriteIndex(r, idx); err != nil {
		t.Fatal(err)
	}
	s := open(t, Options{})
	ctx := context.Background()
	for _, arch := range []string{"arm64", "amd64"} {
		img, err := s.Pull(ctx, "t", r.Name(), PullOptions{Platform: "linux/" + arch})
		if err != nil {
			t.Fatal(err)
		}
		if img.Platform != "linux/"+arch {
			t.Errorf("platform %s", img.Platform)
		}
		wantFile(t, files(t, img), "arch", arch)
	}
	_, err = s.Pull(ctx, "t", r.Name(), PullOptions{Platform: "linux/s390x"})
	if wantKind(t, err, sandbox.NotFound); !strings.Contains(sandbox.HintOf(err), "linux/arm64") {
		t.Errorf("hint %q", sandbox.HintOf(err))
	}
	d, err := idx.Digest()
	if err != nil {
		t.Fatal(err)
	}
	byDigest := reg.host + "/m@" + d.String()
	img, err := s.Pull(ctx, "t", byDigest, PullOptions{Policy: Always, Platform: "linux/amd64"})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := s.Get(ctx, "t", byDigest); err != nil || got.ID != img.ID {
		t.Errorf("get by digest: %v", err)
	}
}

// A second tenant gets the file of the first only by what it can fetch itself:
// a manifest that names the same config in a repository of its own is not
// enough, the same repository is.
func TestPullProof(t *testing.T) {
	t.Parallel()
	private, own := newRegistry(t), newRegistry(t)
	img := testImage(t, tarOf(t, ent{name: "f", data: "private"}))
	ref := private.push(t, "a/b:1", img)
	copied := own.push(t, "a/b:1", img)
	s := open(t, Options{})
	ctx := context.Background()
	if _, err := s.Pull(ctx, "owner", ref, PullOptions{}); err != nil {
		t.Fatal(err)
	}
	isBlob := func(r *http.Request) bool {
		return strings.Contains(r.URL.Path, "/blobs/") && r.Method == http.MethodGet
	}
	m, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	noLayers := func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if isBlob(r) && !strings.HasSuffix(r.URL.Path, m.Config.Digest.String()) {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		next.ServeHTTP(w, r)
	}
	own.hook, private.hook = noLayers, noLayers
	_, err = s.Pull(ctx, "thief", copied, PullOptions{})
	wantKind(t, err, sandbox.NotFound)
	_, err = s.Get(ctx, "thief", copied)
	wantKind(t, err, sandbox.NotFound)
	if _, err := s.Pull(ctx, "friend", ref, PullOptions{}); err != nil {
		t.Errorf("with access to the same repository: %v", err)
	}
	private.hook = func(w http.ResponseWriter, r *http.Request, _ http.Handler) { w.WriteHeader(http.StatusUnauthorized) }
	_, err = s.Pull(ctx, "stranger", ref, PullOptions{})
	wantKind(t, err, sandbox.Denied)
}

// The dial policy sees every connection and can refuse it.
func TestPullDialPolicy(t *testing.T) {
	t.Parallel()
	reg := newRegistry(t)
	ref := reg.push(t, "a/b:1", testImage(t, tarOf(t, ent{name: "f", data: "1"})))
	var asked sync.Map
	policy := func(tenant string) DialPolicy {
		return func(_ context.Context, _, host, addr string) error {
			asked.Store(tenant+" "+host+" "+addr, true)
			if tenant == "bad" {
				return errors.New("not for you")
			}
			return nil
		}
	}
	s := open(t, Options{Fetch: func(tenant string) DialPolicy {
		if tenant == "free" {
			return nil
		}
		return policy(tenant)
	}})
	if _, err := s.Pull(context.Background(), "free", ref, PullOptions{}); err != nil {
		t.Error(err)
	}
	asked.Range(func(k, _ any) bool { t.Errorf("asked for %v", k); return true })
	if _, err := s.Pull(context.Background(), "good", ref, PullOptions{}); err != nil {
		t.Error(err)
	}
	_, err := s.Pull(context.Background(), "bad", ref, PullOptions{})
	wantKind(t, err, sandbox.Denied)
	for _, k := range []string{"good 127.0.0.1 " + reg.host, "bad 127.0.0.1 " + reg.host} {
		if _, ok := asked.Load(k); !ok {
			t.Errorf("policy was not asked for %s", k)
		}
	}
}

func TestPlainAllowed(t *testing.T) {
	t.Parallel()
	insecure := []string{"plain.example", "ported.example:5000"}
	for host, want := range map[string]bool{
		"localhost": true, "localhost:5000": true, "127.0.0.1:80": true, "127.9.9.9": true, "[::1]:5000": true,
		"plain.example": true, "plain.example:81": true, "ported.example:5000": true,
		"ported.example": false, "10.0.0.1": false, "192.168.1.1:5000": false, "example.com": false, "localhost.example.com": false, "": false,
	} {
		if got := plainAllowed(host, insecure); got != want {
			t.Errorf("%q: %v", host, got)
		}
	}
}

// Each tenant fetches with its own credentials, or with none.
func TestPullCredentials(t *testing.T) {
	t.Parallel()
	reg := newRegistry(t)
	ref := reg.push(t, "a/b:1", testImage(t, tarOf(t, ent{name: "f", data: "1"})))
	reg.hook = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if _, p, _ := r.BasicAuth(); p != "secret" {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	}
	s := open(t, Options{Credentials: func(tenant string) authn.Keychain {
		if tenant == "rich" {
			return keys{"u", "secret"}
		}
		return nil
	}})
	ctx := context.Background()
	_, err := s.Pull(ctx, "poor", ref, PullOptions{})
	wantKind(t, err, sandbox.Denied)
	if _, err := s.Pull(ctx, "rich", ref, PullOptions{}); err != nil {
		t.Error(err)
	}
	_, err = s.Pull(ctx, "poor", ref, PullOptions{})
	wantKind(t, err, sandbox.Denied)
	if _, err := s.Pull(ctx, "poor", ref, PullOptions{Auth: &authn.Basic{Username: "u", Password: "secret"}}); err != nil {
		t.Error(err)
	}
}

type keys struct{ user, password string }

func (k keys) Resolve(authn.Resource) (authn.Authenticator, error) {
	return &authn.Basic{Username: k.user, Password: k.password}, nil
}

func TestBadMirror(t *testing.T) {
	t.Parallel()
	for _, m := range []string{"", "UPPER/x", "no-dot/x", "https://", "a b"} {
		_, err := Open(context.Background(), Options{Dir: t.TempDir(), Mirrors: map[string][]string{"docker.io": {m}}})
		if !errors.Is(err, sandbox.Invalid) {
			t.Errorf("%q: %v", m, err)
		}
	}
}
