package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	erofs "github.com/erofs/go-erofs"
	"io/fs"

	"vivarium/sandbox"
)

// open opens a store in a fresh directory, or in opt.Dir.
func open(t testing.TB, opt Options) *Store {
	t.Helper()
	if opt.Dir == "" {
		opt.Dir = t.TempDir()
	}
	if opt.Keychain == nil {
		opt.Keychain = authn.NewMultiKeychain() // nobody's credentials
	}
	s, err := Open(context.Background(), opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// ent is one tar entry of a test layer.
type ent struct {
	name string
	typ  byte // 0 is a regular file
	data string
	link string
	mode int64
	pax  map[string]string
}

func tarOf(t testing.TB, ents ...ent) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range ents {
		h := &tar.Header{Name: e.name, Typeflag: e.typ, Linkname: e.link, Mode: e.mode, Size: int64(len(e.data)), ModTime: time.Unix(1700000000, 0), PAXRecords: e.pax}
		if e.typ == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if e.pax != nil {
			h.Format = tar.FormatPAX
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, e.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func gz(t testing.TB, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// testImage makes an image of uncompressed layers.
func testImage(t testing.TB, layers ...[]byte) v1.Image {
	t.Helper()
	img := empty.Image
	var err error
	for _, b := range layers {
		l, lerr := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil })
		if lerr != nil {
			t.Fatal(lerr)
		}
		if img, err = mutate.AppendLayers(img, l); err != nil {
			t.Fatal(err)
		}
	}
	cf, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	cf = cf.DeepCopy()
	cf.OS, cf.Architecture = "linux", "amd64"
	cf.Config.Env = []string{"A=b"}
	cf.Config.Cmd = []string{"sh"}
	if img, err = mutate.ConfigFile(img, cf); err != nil {
		t.Fatal(err)
	}
	return img
}

// fakeRegistry is a registry on loopback whose requests a test can change.
type fakeRegistry struct {
	host string
	hook func(http.ResponseWriter, *http.Request, http.Handler) // nil: none
	srv  *httptest.Server
}

func newRegistry(t testing.TB) *fakeRegistry {
	t.Helper()
	inner := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	f := &fakeRegistry{}
	f.srv = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if h := f.hook; h != nil {
			h(w, r, inner)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(f.srv.Close)
	f.host = strings.TrimPrefix(f.srv.URL, "http://")
	return f
}

// push puts an image into the registry and returns its reference.
func (f *fakeRegistry) push(t testing.TB, ref string, img v1.Image) string {
	t.Helper()
	r, err := name.ParseReference(f.host + "/" + ref)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(r, img); err != nil {
		t.Fatal(err)
	}
	return r.Name()
}

// files opens an image with a reader that is not ours.
func files(t testing.TB, img *Image) fs.FS {
	t.Helper()
	f, err := os.Open(img.Path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	e, err := erofs.Open(f)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func wantFile(t testing.TB, f fs.FS, name, want string) {
	t.Helper()
	b, err := fs.ReadFile(f, name)
	if err != nil || string(b) != want {
		t.Errorf("%s = %.80q, %v; want %.80q", name, b, err, want)
	}
}

func wantNone(t testing.TB, f fs.FS, name string) {
	t.Helper()
	if _, err := fs.Stat(f, name); err == nil {
		t.Errorf("%s exists", name)
	}
}

func wantKind(t testing.TB, err error, k sandbox.Kind) {
	t.Helper()
	if sandbox.KindOf(err) != k {
		t.Errorf("error %v is of kind %q, want %q", err, sandbox.KindOf(err), k)
	}
}

// wantClean checks that nothing unfinished is left and every file has a row.
func wantClean(t testing.TB, s *Store) {
	t.Helper()
	tmp, err := os.ReadDir(s.dir(tmpDir))
	if err != nil || len(tmp) > 0 {
		t.Errorf("left in tmp: %v, %v", tmp, err)
	}
	got, err := os.ReadDir(s.dir(blobDir))
	if err != nil {
		t.Error(err)
	}
	for _, f := range got {
		id, _, _ := strings.Cut(f.Name(), ".")
		if s.any(id) == nil {
			t.Errorf("file %s belongs to no image", filepath.Base(f.Name()))
		}
	}
}
