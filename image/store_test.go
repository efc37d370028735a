package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// load loads a root file system with one file and returns the image.
func load(t testing.TB, s *Store, tenant, tag, data string) *Image {
	t.Helper()
	imgs, err := s.Load(context.Background(), tenant, bytes.NewReader(tarOf(t, ent{name: "f", data: data})), LoadOptions{Format: RootFS, Tag: tag})
	if err != nil {
		t.Fatal(err)
	}
	return imgs[0]
}

func TestTagsAndRemove(t *testing.T) {
	t.Parallel()
	s := open(t, Options{})
	ctx := context.Background()
	img := load(t, s, "t", "base", "1")
	if !slices.Equal(img.Tags, []string{"base:latest"}) {
		t.Errorf("tags %v", img.Tags)
	}
	for _, ref := range []string{"base", "base:latest", "docker.io/library/base", "library/base:latest", img.ID, img.ID[:12]} {
		if got, err := s.Get(ctx, "t", ref); err != nil || got.ID != img.ID {
			t.Errorf("get %s: %v", ref, err)
		}
	}
	if err := s.Tag(ctx, "t", "base", "ghcr.io/x/y:2"); err != nil {
		t.Fatal(err)
	}
	// Named by one of two tags it loses the tag only.
	if err := s.Remove(ctx, "t", "base"); err != nil {
		t.Fatal(err)
	}
	got, err := s.Get(ctx, "t", "ghcr.io/x/y:2")
	if err != nil || !slices.Equal(got.Tags, []string{"ghcr.io/x/y:2"}) {
		t.Fatalf("after removing one tag: %v, %v", got, err)
	}
	for _, bad := range []string{"UPPER", "a b", "x:y:z", "", strings.Repeat("x", 2000), "x@sha256:12", "im-0123456789"} {
		wantKind(t, s.Tag(ctx, "t", img.ID, bad), sandbox.Invalid)
	}
	wantKind(t, s.Untag(ctx, "t", img.ID), sandbox.Invalid)
	wantKind(t, s.Untag(ctx, "t", "other"), sandbox.NotFound)
	_, err = s.Get(ctx, "t", "im-000000000")
	wantKind(t, err, sandbox.NotFound)
	if sandbox.HintOf(err) == "" {
		t.Error("no hint for an unknown image")
	}
	if err := s.Untag(ctx, "t", "ghcr.io/x/y:2"); err != nil {
		t.Fatal(err)
	}
	if err := s.Remove(ctx, "t", img.ID[:20]); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(img.Path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("file is still there: %v", err)
	}
	wantKind(t, s.Remove(ctx, "t", img.ID), sandbox.NotFound)
	if list, err := s.List(ctx, "t"); err != nil || len(list) != 0 {
		t.Errorf("list: %v, %v", list, err)
	}
}

func TestUsePins(t *testing.T) {
	t.Parallel()
	s := open(t, Options{})
	ctx := context.Background()
	img := load(t, s, "t", "a", "1")
	load(t, s, "u", "a", "1") // the same file for another tenant
	_, release, err := s.Use(ctx, "t", "a")
	if err != nil {
		t.Fatal(err)
	}
	_, again, err := s.Use(ctx, "t", img.ID)
	if err != nil {
		t.Fatal(err)
	}
	release()
	release() // a second call changes nothing
	wantKind(t, s.Remove(ctx, "t", "a"), sandbox.Conflict)
	if err := s.Untag(ctx, "t", "a"); err != nil {
		t.Fatal(err)
	}
	if rep, err := s.GC(ctx, nil); err != nil || len(rep.Removed) != 0 {
		t.Errorf("collected a pinned image: %+v, %v", rep, err)
	}
	// What one tenant uses does not bind another, and the file stays.
	if err := s.Remove(ctx, "u", "a"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(img.Path); err != nil {
		t.Error(err)
	}
	again()
	if rep, err := s.GC(ctx, func(id string) bool { return id == img.ID }); err != nil || len(rep.Removed) != 0 {
		t.Errorf("collected an image in use: %+v, %v", rep, err)
	}
	rep, err := s.GC(ctx, nil)
	if err != nil || !slices.Equal(rep.Removed, []string{img.ID}) || rep.Freed == 0 || rep.Used != 0 {
		t.Errorf("collection: %+v, %v", rep, err)
	}
	_, _, err = s.Use(ctx, "t", img.ID)
	wantKind(t, err, sandbox.NotFound)
	wantClean(t, s)
}

// A second tenant never sees, uses, tags or removes what the first has.
func TestTenants(t *testing.T) {
	t.Parallel()
	s := open(t, Options{})
	ctx := context.Background()
	img := load(t, s, "a", "x", "secret")
	for _, ref := range []string{"x", img.ID, img.ID[:12]} {
		_, err := s.Get(ctx, "b", ref)
		wantKind(t, err, sandbox.NotFound)
		_, _, err = s.Use(ctx, "b", ref)
		wantKind(t, err, sandbox.NotFound)
		wantKind(t, s.Tag(ctx, "b", ref, "mine"), sandbox.NotFound)
		wantKind(t, s.Remove(ctx, "b", ref), sandbox.NotFound)
		_, err = s.Pull(ctx, "b", ref, PullOptions{Policy: Never})
		wantKind(t, err, sandbox.NotFound)
	}
	if list, _ := s.List(ctx, "b"); len(list) != 0 {
		t.Errorf("list of b: %v", list)
	}
	mine := load(t, s, "b", "x", "secret")
	if mine.ID != img.ID || mine.Path != img.Path {
		t.Error("equal content is kept twice")
	}
	if err := s.Remove(ctx, "b", "x"); err != nil {
		t.Fatal(err)
	}
	wantFile(t, files(t, img), "f", "secret")
}

// Everything is there after the store was closed, in the same order.
func TestReopen(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := open(t, Options{Dir: dir})
	ctx := context.Background()
	cfg := &Config{Env: []string{"A=1"}, Entrypoint: []string{"/e"}, Cmd: []string{"c"}, User: "u:g", WorkingDir: "w", ExposedPorts: []string{"80/tcp"}, Labels: map[string]string{"l": "m"}, StopSignal: "SIGQUIT", Volumes: []string{"/v"}}
	imgs, err := s.Load(ctx, "t", bytes.NewReader(tarOf(t, ent{name: "f", data: "1", pax: map[string]string{"SCHILY.xattr.user.a": "b"}})), LoadOptions{Tag: "x", Config: cfg})
	if err != nil {
		t.Fatal(err)
	}
	_, err = Open(ctx, Options{Dir: dir})
	wantKind(t, err, sandbox.Conflict)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "blobs", "im-orphan.erofs"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "tmp", "half"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	s = open(t, Options{Dir: dir})
	got, err := s.Get(ctx, "t", "x")
	if err != nil {
		t.Fatal(err)
	}
	want, have := fmt.Sprintf("%+v", imgs[0]), fmt.Sprintf("%+v", got)
	if want != have {
		t.Errorf("got  %s\nwant %s", have, want)
	}
	if got.Config.WorkingDir != "/w" {
		t.Errorf("working directory %q", got.Config.WorkingDir)
	}
	n := 0
	err = ReadXattrs(got, func(path, name string, value []byte) error {
		n++
		if path != "/f" || name != "user.a" || string(value) != "b" {
			t.Errorf("attribute %s %s %s", path, name, value)
		}
		return nil
	})
	if err != nil || n != 1 {
		t.Errorf("%d attributes, %v", n, err)
	}
	wantClean(t, s)
	// A file that is gone or cut short takes its image with it.
	s.Close()
	if err := os.Truncate(got.Path, 4096); err != nil {
		t.Fatal(err)
	}
	s = open(t, Options{Dir: dir})
	_, err = s.Get(ctx, "t", "x")
	wantKind(t, err, sandbox.NotFound)
	wantClean(t, s)
}

// The budget evicts what can be pulled again, least recently used first, and
// nothing else.
func TestBudget(t *testing.T) {
	t.Parallel()
	reg := newRegistry(t)
	ctx := context.Background()
	data := func(i int) string { return strings.Repeat(fmt.Sprint("data", i), 200_000) } // about 1 MiB
	s := open(t, Options{DiskBudget: 7 << 19})
	loaded := load(t, s, "t", "loaded", data(0))
	var refs []string
	for i := 1; i <= 4; i++ {
		refs = append(refs, reg.push(t, fmt.Sprintf("r/%d:1", i), testImage(t, tarOf(t, ent{name: "f", data: data(i)}))))
	}
	var release func()
	for i, ref := range refs[:2] {
		if _, err := s.Pull(ctx, "t", ref, PullOptions{}); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			var err error
			if _, release, err = s.Use(ctx, "t", ref); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := s.Pull(ctx, "t", refs[2], PullOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Get(ctx, "t", refs[0]); err != nil {
		t.Errorf("image in use was evicted: %v", err)
	}
	_, err := s.Get(ctx, "t", refs[1])
	wantKind(t, err, sandbox.NotFound)
	if _, err := s.Get(ctx, "t", loaded.ID); err != nil {
		t.Errorf("loaded image was evicted: %v", err)
	}
	if used := s.used(); used > 7<<19 {
		t.Errorf("%d bytes used", used)
	}
	// Too large for what may be evicted.
	_, err = s.Load(ctx, "t", bytes.NewReader(tarOf(t, ent{name: "f", data: strings.Repeat("unevictable", 300_000)})), LoadOptions{Tag: "big"})
	wantKind(t, err, sandbox.Exhausted)
	release()
	wantClean(t, s)
}

// A full disk is Exhausted, with nothing left behind, and the store works on
// once there is room.
func TestDiskFull(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounting needs root")
	}
	t.Parallel()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=6m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// a conversion that failed does not wait for the read that goes ahead of it,
		// which has its file open until it returns
		var err error
		for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
			if err = unix.Unmount(dir, 0); err != unix.EBUSY {
				break
			}
		}
		if err != nil {
			t.Error(err)
		}
	})
	s := open(t, Options{Dir: dir})
	ctx := context.Background()
	random := func(seed, n int) string {
		var b strings.Builder
		for i := 0; b.Len() < n; i++ {
			sum := sha256.Sum256([]byte{byte(seed), byte(i), byte(i >> 8), byte(i >> 16)})
			b.WriteString(hex.EncodeToString(sum[:]))
		}
		return b.String()
	}
	for name, f := range map[string]Format{"spooled": Auto, "streamed": RootFS} {
		_, err := s.Load(ctx, "t", bytes.NewReader(tarOf(t, ent{name: "f", data: random(1, 8<<20)})), LoadOptions{Format: f, Tag: "x"})
		if wantKind(t, err, sandbox.Exhausted); sandbox.HintOf(err) == "" {
			t.Errorf("%s: no hint", name)
		}
		wantClean(t, s)
	}
	// Room for the download and not for the image.
	reg := newRegistry(t)
	ref := reg.push(t, "a/b:1", testImage(t, tarOf(t, ent{name: "f", data: random(2, 7<<20)})))
	_, err := s.Pull(ctx, "t", ref, PullOptions{})
	wantKind(t, err, sandbox.Exhausted)
	wantClean(t, s)
	if img := load(t, s, "t", "small", "fits"); img.Size == 0 {
		t.Error("no image")
	}
}

// TestMain is also the process that TestCrash kills.
func TestMain(m *testing.M) {
	if job := os.Getenv("VIV_IMAGE_CRASH"); job != "" {
		crash(job)
	}
	os.Exit(m.Run())
}

type crashJob struct{ Dir, Ref, Step, Do string }

// crash does a job and kills itself at a step of it.
func crash(job string) {
	var j crashJob
	if err := json.Unmarshal([]byte(job), &j); err != nil {
		panic(err)
	}
	s, err := Open(context.Background(), Options{Dir: j.Dir, Failpoint: func(step string) error {
		if step == j.Step {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		return nil
	}})
	if err == nil && j.Do == "pull" {
		_, err = s.Pull(context.Background(), "t", j.Ref, PullOptions{})
	} else if err == nil {
		err = s.Remove(context.Background(), "t", j.Ref)
	}
	fmt.Fprintln(os.Stderr, "not killed:", err)
	os.Exit(3)
}

// Killed at any step, the store comes back with nothing half-made, and with
// the image if and only if its row was written.
func TestCrash(t *testing.T) {
	t.Parallel()
	reg := newRegistry(t)
	ref := reg.push(t, "a/b:1", testImage(t, tarOf(t, ent{name: "f", data: "1", pax: map[string]string{"SCHILY.xattr.user.a": "b"}}), tarOf(t, ent{name: "g", data: "2"})))
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		do, step string
		there    bool
	}{
		{"pull", "downloaded", false}, {"pull", "layer", false}, {"pull", "converted", false}, {"pull", "place", false},
		{"pull", "placed", false}, {"pull", "recorded", true}, {"remove", "remove", true}, {"remove", "removed-row", false},
	} {
		t.Run(tt.do+"/"+tt.step, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			if tt.do == "remove" {
				s := open(t, Options{Dir: dir})
				if _, err := s.Pull(context.Background(), "t", ref, PullOptions{}); err != nil {
					t.Fatal(err)
				}
				s.Close()
			}
			job, _ := json.Marshal(crashJob{dir, ref, tt.step, tt.do})
			cmd := exec.Command(exe)
			cmd.Env = append(os.Environ(), "VIV_IMAGE_CRASH="+string(job))
			out, err := cmd.CombinedOutput()
			var ee *exec.ExitError
			if !errors.As(err, &ee) || ee.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("%v: %s", err, out)
			}
			s := open(t, Options{Dir: dir})
			wantClean(t, s)
			if _, err := s.Get(context.Background(), "t", ref); (err == nil) != tt.there {
				t.Errorf("image is there: %v, want %v", err == nil, tt.there)
			}
			img, err := s.Pull(context.Background(), "t", ref, PullOptions{})
			if err != nil {
				t.Fatal(err)
			}
			f := files(t, img)
			wantFile(t, f, "f", "1")
			wantFile(t, f, "g", "2")
		})
	}
}

// An error at any step leaves nothing behind either.
func TestFailpoints(t *testing.T) {
	t.Parallel()
	reg := newRegistry(t)
	ref := reg.push(t, "a/b:1", testImage(t, tarOf(t, ent{name: "f", data: "1", pax: map[string]string{"SCHILY.xattr.user.a": "b"}})))
	boom := errors.New("boom")
	for _, step := range []string{"downloaded", "layer", "converted", "place", "placed"} {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			s := open(t, Options{Failpoint: func(at string) error {
				if at == step {
					return boom
				}
				return nil
			}})
			_, err := s.Pull(context.Background(), "t", ref, PullOptions{})
			if !errors.Is(err, boom) {
				t.Errorf("%v", err)
			}
			wantClean(t, s)
		})
	}
}

// Removal, use, collection and pulls of few images at one time: whoever gets
// an image by Use can read its file until it is released.
func TestConcurrent(t *testing.T) {
	t.Parallel()
	reg := newRegistry(t)
	var refs []string
	for i := range 3 {
		refs = append(refs, reg.push(t, fmt.Sprintf("r/%d:1", i), testImage(t, tarOf(t, ent{name: "f", data: fmt.Sprint(i)}))))
	}
	s := open(t, Options{})
	ctx := context.Background()
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 25 {
				ref := refs[(w+i)%3]
				tenant := fmt.Sprint("t", w%2)
				switch (w + i) % 4 {
				case 0:
					if err := s.Remove(ctx, tenant, ref); err != nil && !errors.Is(err, sandbox.NotFound) && !errors.Is(err, sandbox.Conflict) {
						t.Error(err)
					}
				case 1:
					if _, err := s.GC(ctx, nil); err != nil {
						t.Error(err)
					}
				default:
					if _, err := s.Pull(ctx, tenant, ref, PullOptions{}); err != nil {
						t.Error(err)
					}
					img, release, err := s.Use(ctx, tenant, ref)
					if errors.Is(err, sandbox.NotFound) {
						continue
					}
					if err != nil {
						t.Error(err)
						continue
					}
					if b, err := os.ReadFile(img.Path); err != nil || int64(len(b)) != img.Size {
						t.Errorf("file of an image in use: %d bytes, %v", len(b), err)
					}
					release()
				}
			}
		})
	}
	wg.Wait()
	wantClean(t, s)
}

// countRequests counts requests by what they ask for.
type countRequests struct {
	mu sync.Mutex
	n  map[string]int // guarded by mu
}

func (c *countRequests) hook(w http.ResponseWriter, r *http.Request, next http.Handler) {
	c.mu.Lock()
	for _, k := range []string{"manifests", "blobs"} {
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/"+k+"/") {
			c.n[k]++
		}
	}
	c.mu.Unlock()
	next.ServeHTTP(w, r)
}

func (c *countRequests) get(k string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n[k]
}
