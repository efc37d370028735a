package image

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/klauspost/compress/zstd"

	"vivarium/sandbox"
)

func zst(t testing.TB, b []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(b, nil)
}

// tarDirOf makes a tar of a directory with plain names.
func tarTree(t testing.TB, dir string) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := tarDir(context.Background(), &b, dir); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func ociDir(t testing.TB, img v1.Image, annotations map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	p, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.AppendImage(img, layout.WithAnnotations(annotations)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// Every format, found by its content, plain and compressed, gives the same
// image.
func TestLoadFormats(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	img := testImage(t, tarOf(t, ent{name: "f", data: "1"}, ent{name: "gone", data: "x"}), tarOf(t, ent{name: ".wh.gone"}, ent{name: "g", data: "2"}))
	dir := ociDir(t, img, map[string]string{"org.opencontainers.image.ref.name": "localhost/oci:3"})
	oci := tarTree(t, dir)
	var docker bytes.Buffer
	tag, err := name.NewTag("saved:2")
	if err != nil {
		t.Fatal(err)
	}
	if err := tarball.Write(tag, img, &docker); err != nil {
		t.Fatal(err)
	}
	root := tarOf(t, ent{name: "f", data: "1"}, ent{name: "g", data: "2"})
	file := filepath.Join(t.TempDir(), "saved.tar")
	if err := os.WriteFile(file, docker.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	gzfile := file + ".gz"
	if err := os.WriteFile(gzfile, gz(t, docker.Bytes()), 0o644); err != nil {
		t.Fatal(err)
	}
	s := open(t, Options{})
	ids := map[string]bool{}
	for _, tt := range []struct {
		name   string
		r      io.Reader
		path   string
		format Format
		tag    string
	}{
		{"OCI directory", nil, dir, Auto, "localhost/oci:3"},
		{"OCI tar", bytes.NewReader(oci), "", Auto, "localhost/oci:3"},
		{"OCI tar, gzip", bytes.NewReader(gz(t, oci)), "", OCILayout, "localhost/oci:3"},
		{"OCI tar, zstd", bytes.NewReader(zst(t, oci)), "", Auto, "localhost/oci:3"},
		{"docker save", bytes.NewReader(docker.Bytes()), "", Docker, "saved:2"},
		{"docker save file", nil, file, Auto, "saved:2"},
		{"docker save file, gzip", nil, gzfile, Auto, "saved:2"},
		{"root file system", bytes.NewReader(root), "", Auto, ""},
		{"root file system, gzip", bytes.NewReader(gz(t, root)), "", RootFS, ""},
		{"root file system, zstd", bytes.NewReader(zst(t, root)), "", RootFS, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var imgs []*Image
			var err error
			o := LoadOptions{Format: tt.format, Platform: "linux/amd64"}
			if tt.path != "" {
				imgs, err = s.LoadPath(ctx, "t", tt.path, o)
			} else {
				imgs, err = s.Load(ctx, "t", tt.r, o)
			}
			if err != nil || len(imgs) != 1 {
				t.Fatalf("%v, %v", imgs, err)
			}
			if got := strings.Join(imgs[0].Tags, " "); tt.tag != "" && !strings.Contains(got, tt.tag) || tt.tag == "" && got != "" {
				t.Errorf("tags %q", got)
			}
			ids[imgs[0].ID] = true
			f := files(t, imgs[0])
			wantFile(t, f, "f", "1")
			wantFile(t, f, "g", "2")
			wantNone(t, f, "gone")
			wantClean(t, s)
		})
	}
	if len(ids) != 2 { // the image, and the root file system without a config
		t.Errorf("ids: %v", ids)
	}
	imgs, err := s.LoadPath(ctx, "u", dir, LoadOptions{Tag: "mine"})
	if err != nil || !slices.Equal(imgs[0].Tags, []string{"mine:latest"}) {
		t.Errorf("own tag: %v, %v", imgs, err)
	}
}

// An index in a layout is resolved for a platform.
func TestLoadPlatform(t *testing.T) {
	t.Parallel()
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
	dir := t.TempDir()
	p, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.AppendIndex(idx); err != nil {
		t.Fatal(err)
	}
	s := open(t, Options{})
	imgs, err := s.LoadPath(context.Background(), "t", dir, LoadOptions{Platform: "linux/arm64"})
	if err != nil {
		t.Fatal(err)
	}
	wantFile(t, files(t, imgs[0]), "arch", "arm64")
	_, err = s.LoadPath(context.Background(), "t", dir, LoadOptions{Platform: "linux/s390x"})
	wantKind(t, err, sandbox.NotFound)
}

// B2, B3, B9, F6: archives that lie, break off or blow up.
func TestLoadErrors(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	s := open(t, Options{Limits: Limits{RatioFloor: 1 << 20, LayerBytes: 64 << 20, ImageBytes: 96 << 20, Layers: 5}})
	good := testImage(t, tarOf(t, ent{name: "f", data: strings.Repeat("x", 1000)}))
	m, err := good.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	change := func(fn func(dir string)) []byte {
		dir := ociDir(t, good, nil)
		fn(dir)
		return tarTree(t, dir)
	}
	blob := func(dir string, h v1.Hash) string { return filepath.Join(dir, "blobs", "sha256", h.Hex) }
	rewrite := func(file string, fn func([]byte) []byte) {
		b, err := os.ReadFile(file)
		if err == nil {
			err = os.Chmod(file, 0o644)
		}
		if err == nil {
			err = os.WriteFile(file, fn(b), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	bomb := bytes.Repeat([]byte{0}, 60<<20)
	twice := gz(t, gz(t, bytes.Repeat([]byte{0}, 8<<20)))
	many := make([][]byte, 6)
	for i := range many {
		many[i] = tarOf(t)
	}
	rootfs := tarOf(t, ent{name: "a/b", data: "1"})
	for _, tt := range []struct {
		name   string
		data   []byte
		format Format
		want   sandbox.Kind
	}{
		{"nothing", nil, Auto, sandbox.Invalid},
		{"cut between entries", rootfs[:1024], RootFS, sandbox.Invalid},
		{"text", []byte(strings.Repeat("not a tar ", 200)), Auto, sandbox.Invalid},
		{"cut short", rootfs[:512], RootFS, sandbox.Invalid},
		{"gzip cut short", gz(t, rootfs)[:60], RootFS, sandbox.Invalid},
		{"gzip with a wrong sum", func() []byte { b := gz(t, rootfs); b[len(b)-6] ^= 1; return b }(), RootFS, sandbox.Invalid},
		{"zstd cut short", zst(t, rootfs)[:40], RootFS, sandbox.Invalid},
		{"gzip bomb", gz(t, bomb), RootFS, sandbox.Invalid},
		{"zstd bomb", zst(t, bomb), RootFS, sandbox.Invalid},
		{"gzip in gzip", twice, RootFS, sandbox.Invalid},
		{"xz", []byte("\xfd7zXZ\x00................"), Auto, sandbox.Unsupported},
		{"dot dot", tarOf(t, ent{name: "../x", data: "1"}), RootFS, sandbox.Invalid},
		{"dot dot, found by content", tarOf(t, ent{name: "../x", data: "1"}), Auto, sandbox.Invalid},
		{"format is another", rootfs, Docker, sandbox.Invalid},
		{"layer with a flipped bit", change(func(d string) {
			rewrite(blob(d, m.Layers[0].Digest), func(b []byte) []byte { b[len(b)-5] ^= 1; return b })
		}), Auto, sandbox.Invalid},
		{"layer missing", change(func(d string) { os.Remove(blob(d, m.Layers[0].Digest)) }), Auto, sandbox.Invalid},
		{"layer is another", change(func(d string) { rewrite(blob(d, m.Layers[0].Digest), func([]byte) []byte { return gz(t, rootfs) }) }), Auto, sandbox.Invalid},
		{"config changed", change(func(d string) { rewrite(blob(d, m.Config.Digest), func(b []byte) []byte { return append(b, ' ') }) }), Auto, sandbox.Invalid},
		{"config missing", change(func(d string) { os.Remove(blob(d, m.Config.Digest)) }), Auto, sandbox.Invalid},
		{"index is not JSON", change(func(d string) { rewrite(d+"/index.json", func([]byte) []byte { return []byte("{") }) }), Auto, sandbox.Invalid},
		{"index names another algorithm", change(func(d string) {
			rewrite(d+"/index.json", func(b []byte) []byte { return bytes.ReplaceAll(b, []byte("sha256:"), []byte("sha512:")) })
		}), Auto, sandbox.Invalid},
		{"docker: config outside", tarOf(t, ent{name: "manifest.json", data: `[{"Config":"../../../etc/passwd","Layers":[]}]`}), Auto, sandbox.Invalid},
		{"docker: link to outside", tarOf(t, ent{name: "manifest.json", data: `[{"Config":"` + strings.Repeat("a", 64) + `.json","Layers":[]}]`},
			ent{name: strings.Repeat("a", 64) + ".json", typ: '2', link: "/etc/passwd"}), Auto, sandbox.Invalid},
		{"docker: no image", tarOf(t, ent{name: "manifest.json", data: `[]`}), Auto, sandbox.Invalid},
		{"docker: not JSON", tarOf(t, ent{name: "manifest.json", data: `nonsense`}), Auto, sandbox.Invalid},
		{"too many layers", tarTree(t, ociDir(t, testImage(t, many...), nil)), Auto, sandbox.Exhausted},
		{"too large", tarOf(t, ent{name: "f", data: strings.Repeat("abcdefgh", 9<<20)}), RootFS, sandbox.Exhausted},
		{"too large to spool", tarOf(t, ent{name: "f", data: strings.Repeat("abcdefgh", 13<<20)}), Auto, sandbox.Exhausted},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := s.Load(ctx, "t", bytes.NewReader(tt.data), LoadOptions{Format: tt.format, Platform: "linux/amd64"})
			wantKind(t, err, tt.want)
			wantClean(t, s)
		})
	}
	for _, o := range []LoadOptions{{Tag: "UPPER"}, {Tag: "x@sha256:12"}, {Format: "zip"}, {Platform: "x"}, {Format: RootFS, Config: &Config{Env: []string{"A=\x00"}}}} {
		_, err := s.Load(ctx, "t", bytes.NewReader(rootfs), o)
		wantKind(t, err, sandbox.Invalid)
	}
	_, err = s.LoadPath(ctx, "t", "/no/such/file", LoadOptions{})
	wantKind(t, err, sandbox.NotFound)
	_, err = s.LoadPath(ctx, "t", "/dev/null", LoadOptions{})
	wantKind(t, err, sandbox.Invalid)
	// A layout directory whose blob is a link out of it.
	dir := ociDir(t, good, nil)
	if err := os.Remove(blob(dir, m.Config.Digest)); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/hostname", blob(dir, m.Config.Digest)); err != nil {
		t.Fatal(err)
	}
	if _, err = s.LoadPath(ctx, "t", dir, LoadOptions{}); err == nil {
		t.Error("followed a link out of the layout")
	}
	wantClean(t, s)
}

// The registry dies for good in the middle of a layer.
func TestPullRegistryDies(t *testing.T) {
	t.Parallel()
	reg := newRegistry(t)
	img := testImage(t, tarOf(t, ent{name: "f", data: strings.Repeat("x", 1<<20)}))
	ref := reg.push(t, "a/b:1", img)
	m, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	reg.hook = func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if !strings.HasSuffix(r.URL.Path, m.Layers[0].Digest.String()) {
			next.ServeHTTP(w, r)
			return
		}
		reg.srv.Listener.Close()
		panic(http.ErrAbortHandler)
	}
	s := open(t, Options{})
	_, err = s.Pull(context.Background(), "t", ref, PullOptions{})
	if wantKind(t, err, sandbox.Unavailable); sandbox.HintOf(err) == "" {
		t.Error("no hint")
	}
	wantClean(t, s)
}

func TestBuildErofs(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	out := filepath.Join(dir, "x.erofs")
	list := []File{
		{Path: "/", Mode: 0o700}, {Path: "/bin/guest", Mode: 0o755, Data: []byte("ELF")}, {Path: "bin", Mode: 0o711, Dir: true},
		{Path: "/etc/link", Symlink: "../bin/guest"}, {Path: "/empty", Mode: 0o4755},
	}
	var first []byte
	for range 2 {
		if err := BuildErofs(out, list); err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		if first != nil && !bytes.Equal(b, first) {
			t.Error("not reproducible")
		}
		first = b
	}
	f := files(t, &Image{Path: out})
	wantFile(t, f, "bin/guest", "ELF")
	if fi, err := fs.Stat(f, "bin"); err != nil || fi.Mode().Perm() != 0o711 {
		t.Errorf("bin: %v, %v", fi, err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("left: %v, %v", left, err)
	}
	wantKind(t, BuildErofs(out, []File{{Path: "a"}, {Path: "a/b"}}), sandbox.Invalid)
	if b, err := os.ReadFile(out); err != nil || !bytes.Equal(b, first) {
		t.Error("a failed build changed the file")
	}
	if BuildErofs(filepath.Join(dir, "no", "x"), nil) == nil {
		t.Error("no error for a missing directory")
	}
}

func TestParseConfig(t *testing.T) {
	t.Parallel()
	p, err := parseConfig([]byte(`{"os":"linux","architecture":"arm64","variant":"v8","created":"2024-01-02T03:04:05Z",
		"config":{"Env":["A=b","=x",""],"Cmd":"one","Entrypoint":["e","f"],"WorkingDir":"a/../b","User":"1:2",
		"ExposedPorts":{"80/tcp":{},"53/udp":{}},"Volumes":{"/v":{}},"Labels":{"k":"v"},"StopSignal":"SIGINT"},
		"rootfs":{"type":"layers","diff_ids":["sha256:` + strings.Repeat("a", 64) + `"]}}`))
	if err != nil {
		t.Fatal(err)
	}
	want := Config{Env: []string{"A=b"}, Cmd: []string{"one"}, Entrypoint: []string{"e", "f"}, WorkingDir: "/b", User: "1:2",
		ExposedPorts: []string{"53/udp", "80/tcp"}, Volumes: []string{"/v"}, Labels: map[string]string{"k": "v"}, StopSignal: "SIGINT"}
	got, _ := json.Marshal(p.Config)
	if w, _ := json.Marshal(want); !bytes.Equal(got, w) || platformString(p.Platform) != "linux/arm64/v8" || p.Created.Year() != 2024 {
		t.Errorf("got %s %v", got, p)
	}
	for _, bad := range []string{"", "[]", "nonsense", `{"config":{"Cmd":{"a":1}}}`, `{"rootfs":{"type":"zip"}}`, `{"rootfs":{"diff_ids":["x"]}}`,
		`{"config":{"Env":["A=\u0000"]}}`, `{"config":{"User":"a\u0000"}}`, `{"config":{"Env":["` + strings.Repeat("x", 2<<20) + `"]}}`, strings.Repeat(" ", maxConfig+1)} {
		_, err := parseConfig([]byte(bad))
		wantKind(t, err, sandbox.Invalid)
	}
}

// FuzzImageConfig reads hostile configs: an error that blames the config, or
// one that a process can be started with and that reads back the same.
func FuzzImageConfig(f *testing.F) {
	f.Add([]byte(`{"os":"linux","architecture":"amd64","config":{"Env":["A=b"],"Cmd":["x"],"WorkingDir":"/w","ExposedPorts":{"80/tcp":{}}},"rootfs":{"type":"layers","diff_ids":["sha256:` + strings.Repeat("a", 64) + `"]}}`))
	f.Add([]byte(`{"config":{"Cmd":"x","Entrypoint":null,"Labels":{"a":"\u0000"}}}`))
	f.Add([]byte(`{"created":"x"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := parseConfig(b)
		if err != nil {
			if k := sandbox.KindOf(err); k != sandbox.Invalid && k != sandbox.Unsupported {
				t.Fatalf("%v is of kind %q", err, k)
			}
			return
		}
		for _, s := range slices.Concat(p.Config.Env, p.Config.Cmd, p.Config.Entrypoint, []string{p.Config.WorkingDir, p.Config.User}) {
			if strings.IndexByte(s, 0) >= 0 {
				t.Fatalf("zero byte in %q", s)
			}
		}
		if d := p.Config.WorkingDir; d != "" && d != filepath.Clean(d) || d != "" && d[0] != '/' {
			t.Fatalf("working directory %q", d)
		}
		var c ociConfig
		c.setConfig(p.Config)
		raw, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		again, err := parseConfig(raw)
		if err != nil {
			t.Fatal(err)
		}
		one, _ := json.Marshal(p.Config)
		two, _ := json.Marshal(again.Config)
		if !bytes.Equal(one, two) {
			t.Fatalf("%s became %s", one, two)
		}
	})
}
