package layer

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"vivarium/image/erofsimg"
	"vivarium/sandbox"
)

// ent is one entry of a test layer.
type ent struct {
	name string
	typ  byte // 0 is a regular file
	data string
	link string
	mode int64
	hdr  func(*tar.Header)
}

func dir(name string) ent                 { return ent{name: name, typ: tar.TypeDir, mode: 0o755} }
func file(name, data string) ent          { return ent{name: name, data: data} }
func sym(name, to string) ent             { return ent{name: name, typ: tar.TypeSymlink, link: to} }
func hard(name, to string) ent            { return ent{name: name, typ: tar.TypeLink, link: to} }
func with(e ent, f func(*tar.Header)) ent { e.hdr = f; return e }

func tarOf(t testing.TB, ents ...ent) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range ents {
		h := &tar.Header{Name: e.name, Typeflag: e.typ, Linkname: e.link, Mode: e.mode, Size: int64(len(e.data)), ModTime: time.Unix(1700000000, 0)}
		if e.typ == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if e.hdr != nil {
			e.hdr(h)
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatalf("%s: %v", e.name, err)
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

// result is a merged tree as text: "path" to "d", "f:data", "l:target", …
type result struct {
	file string
	root *erofsimg.Node
}

func merge(t testing.TB, l Limits, layers ...[]byte) (*result, *Merger, error) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w := erofsimg.NewWriter(f, erofsimg.Options{})
	m := NewMerger(w, l)
	for _, b := range layers {
		if _, err := m.Apply(context.Background(), bytes.NewReader(b)); err != nil {
			return nil, m, err
		}
	}
	if _, err := w.Finish(m.Root()); err != nil {
		t.Errorf("finish: %v", err)
	}
	return &result{f.Name(), m.Root()}, m, nil
}

func (r *result) tree(t testing.TB) map[string]string {
	t.Helper()
	f, err := os.Open(r.file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out := map[string]string{}
	var walk func(p string, n *erofsimg.Node)
	walk = func(p string, n *erofsimg.Node) {
		switch {
		case n.IsDir():
			out[p+"/"] = ""
			for name, c := range n.Children {
				walk(p+"/"+name, c.Node)
			}
		case n.IsRegular():
			b := make([]byte, n.Data.Size)
			if _, err := f.ReadAt(b, int64(n.Data.Block)*erofsimg.BlockSize); err != nil {
				t.Error(err)
			}
			out[p] = string(b)
		case n.IsSymlink():
			out[p] = "-> " + n.Target()
		default:
			out[p] = fmt.Sprintf("%o %x", n.Mode, n.Rdev)
		}
	}
	walk("", r.root)
	delete(out, "/")
	return out
}

type entries = map[string]string

// B9: whiteouts, opaque directories, and one thing in the place of another, as
// the OCI image specification has them; and names that try to get out.
func TestMerge(t *testing.T) {
	t.Parallel()
	lower := []ent{dir("d"), file("d/a", "1"), file("d/b", "2"), dir("d/sub"), file("d/sub/x", "3"), file("top", "4"), sym("lib", "usr/lib"), dir("usr"), dir("usr/lib"), file("usr/lib/old", "5")}
	tests := []struct {
		name   string
		layers [][]ent
		want   entries
	}{
		{"whiteout of a file", [][]ent{lower[:3], {file("d/.wh.a", "")}}, entries{"/d/": "", "/d/b": "2"}},
		{"whiteout of a directory", [][]ent{lower[:6], {file(".wh.d", "")}}, entries{"/top": "4"}},
		{"whiteout of nothing", [][]ent{lower[:2], {file("d/.wh.zz", ""), file("no/such/.wh.dir", "")}}, entries{"/d/": "", "/d/a": "1"}},
		{"opaque before", [][]ent{lower[:5], {file("d/.wh..wh..opq", ""), file("d/new", "n")}}, entries{"/d/": "", "/d/new": "n"}},
		{"opaque after", [][]ent{lower[:5], {file("d/new", "n"), file("d/sub/y", "y"), file("d/.wh..wh..opq", "")}}, entries{"/d/": "", "/d/new": "n", "/d/sub/": "", "/d/sub/y": "y"}},
		{"opaque root", [][]ent{lower[:6], {file(".wh..wh..opq", ""), file("n", "n")}}, entries{"/n": "n"}},
		{"whiteout and again, whiteout last", [][]ent{lower[:5], {file("d/n", "n"), file(".wh.d", "")}}, entries{"/d/": "", "/d/n": "n"}},
		{"whiteout and again, whiteout first", [][]ent{lower[:5], {file(".wh.d", ""), file("d/n", "n")}}, entries{"/d/": "", "/d/n": "n"}},
		{"whiteout in its own layer only hides lower ones", [][]ent{{file("a", "1"), file(".wh.a", "")}}, entries{"/a": "1"}},
		{"AUFS bookkeeping", [][]ent{{file(".wh..wh.plnk", ""), file(".wh..wh.aufs", ""), file("a", "1")}}, entries{"/a": "1"}},
		{"directory becomes file", [][]ent{lower[:5], {file("d", "now a file")}}, entries{"/d": "now a file"}},
		{"file becomes directory", [][]ent{lower[5:6], {dir("top"), file("top/x", "x")}}, entries{"/top/": "", "/top/x": "x"}},
		{"link becomes directory", [][]ent{{dir("real"), file("real/keep", "k"), sym("l", "real")}, {dir("l"), file("l/x", "x")}}, entries{"/real/": "", "/real/keep": "k", "/l/": "", "/l/x": "x"}},
		{"directory becomes link", [][]ent{lower[:2], {sym("d", "/etc")}}, entries{"/d": "-> /etc"}},
		{"directory again keeps its content", [][]ent{lower[:2], {dir("d")}}, entries{"/d/": "", "/d/a": "1"}},
		{"missing parents", [][]ent{{file("a/b/c", "c")}}, entries{"/a/": "", "/a/b/": "", "/a/b/c": "c"}},
		{"duplicate entries, the last wins", [][]ent{{file("a", "1"), file("a", "2"), dir("a"), file("a", "3")}}, entries{"/a": "3"}},
		{"absolute and dotted names", [][]ent{{file("/abs", "1"), file("./rel", "2"), file("x//y/./z", "3")}}, entries{"/abs": "1", "/rel": "2", "/x/": "", "/x/y/": "", "/x/y/z": "3"}},
		{"through a link in a lower layer", [][]ent{lower[6:], {file("lib/new", "n"), file("lib/.wh.old", "")}}, entries{"/lib": "-> usr/lib", "/usr/": "", "/usr/lib/": "", "/usr/lib/new": "n"}},
		{"B2: link to outside, then written through", [][]ent{{sym("out", "/../../../etc"), file("out/passwd", "p"), sym("up", "../../.."), file("up/shadow", "s")}},
			entries{"/out": "-> /../../../etc", "/etc/": "", "/etc/passwd": "p", "/up": "-> ../../..", "/shadow": "s"}},
		{"link that dangles makes its target", [][]ent{{sym("var/run", "/run"), file("var/run/pid", "1")}}, entries{"/var/": "", "/var/run": "-> /run", "/run/": "", "/run/pid": "1"}},
		{"hard link", [][]ent{{file("a", "1"), hard("d/b", "a"), hard("c", "/d/b")}}, entries{"/a": "1", "/d/": "", "/d/b": "1", "/c": "1"}},
		{"hard link to a lower layer", [][]ent{{file("a", "1")}, {hard("b", "a")}}, entries{"/a": "1", "/b": "1"}},
		{"hard link, then the first name replaced", [][]ent{{file("a", "1"), hard("b", "a")}, {file("a", "2")}}, entries{"/a": "2", "/b": "1"}},
		{"hard link through a link", [][]ent{{dir("usr"), file("usr/f", "1"), sym("u", "usr"), hard("g", "u/f")}}, entries{"/usr/": "", "/usr/f": "1", "/u": "-> usr", "/g": "1"}},
		{"hard link to itself", [][]ent{{file("a", "1"), hard("a", "a")}}, entries{"/a": "1"}},
		{"hard link to a symbolic link", [][]ent{{sym("s", "x"), hard("t", "s")}}, entries{"/s": "-> x", "/t": "-> x"}},
		{"devices and pipes", [][]ent{{
			with(ent{name: "n", typ: tar.TypeChar}, func(h *tar.Header) { h.Devmajor, h.Devminor = 1, 3 }),
			with(ent{name: "b", typ: tar.TypeBlock, mode: 0o60}, func(h *tar.Header) { h.Devmajor, h.Devminor = 259, 1048575 }),
			{name: "p", typ: tar.TypeFifo, mode: 0o4600}}}, entries{"/n": "20644 103", "/b": "60060 fff103ff", "/p": "14600 0"}},
		{"not UTF-8", [][]ent{{with(file("x", "1"), func(h *tar.Header) { h.Name, h.Format = "\xff\xfe\n", tar.FormatGNU })}}, entries{"/\xff\xfe\n": "1"}},
		{"long name", [][]ent{{file(strings.Repeat("n", 255), "1")}}, entries{"/" + strings.Repeat("n", 255): "1"}},
		{"empty layer", [][]ent{{}, {}}, entries{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var layers [][]byte
			for _, l := range tt.layers {
				layers = append(layers, tarOf(t, l...))
			}
			r, _, err := merge(t, Limits{}, layers...)
			if err != nil {
				t.Fatal(err)
			}
			if got := r.tree(t); !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got  %q\nwant %q", got, tt.want)
			}
		})
	}
}

// B2, F6: what is refused, and with what kind.
func TestMergeRefuses(t *testing.T) {
	t.Parallel()
	set := func(f func(*tar.Header)) ent { return with(file("x", ""), f) }
	many := make([]ent, 20)
	for i := range many {
		many[i] = file(fmt.Sprint("f", i), "0123456789")
	}
	chain := []ent{}
	for i := range 50 {
		chain = append(chain, sym(fmt.Sprint("l", i), fmt.Sprint("l", i+1)))
	}
	tests := []struct {
		name  string
		limit Limits
		ents  []ent
		want  sandbox.Kind
	}{
		{"dot dot", Limits{}, []ent{file("../x", "")}, sandbox.Invalid},
		{"dot dot inside", Limits{}, []ent{file("a/../../x", "")}, sandbox.Invalid},
		{"whiteout outside", Limits{}, []ent{file("a/.wh...", "")}, sandbox.Invalid},
		{"whiteout of a dot", Limits{}, []ent{file(".wh..", "")}, sandbox.Invalid},
		{"hard link outside", Limits{}, []ent{hard("x", "../../etc/passwd")}, sandbox.Invalid},
		{"hard link to a file of the host", Limits{}, []ent{hard("x", "/etc/passwd")}, sandbox.Invalid},
		{"hard link to a directory", Limits{}, []ent{dir("d"), hard("x", "d")}, sandbox.Invalid},
		{"hard link to the root", Limits{}, []ent{hard("x", "/")}, sandbox.Invalid},
		{"link loop", Limits{}, []ent{sym("a", "b"), sym("b", "a"), file("a/x", "")}, sandbox.Invalid},
		{"link chain", Limits{}, append(chain, file("l0/x", "")), sandbox.Invalid},
		{"parent is a file", Limits{}, []ent{file("a", ""), file("a/b", "")}, sandbox.Invalid},
		{"root is a file", Limits{}, []ent{file(".", "x")}, sandbox.Invalid},
		{"owner", Limits{}, []ent{set(func(h *tar.Header) { h.Uid, h.Format = 1<<33, tar.FormatPAX })}, sandbox.Invalid},
		{"device number", Limits{}, []ent{set(func(h *tar.Header) { h.Typeflag, h.Devmajor = tar.TypeChar, 4096 })}, sandbox.Invalid},
		{"long name", Limits{}, []ent{file(strings.Repeat("x", 256), "")}, sandbox.Invalid},
		{"long path", Limits{PathBytes: 100}, []ent{dir(strings.Repeat("x/", 60))}, sandbox.Invalid},
		{"long target", Limits{}, []ent{sym("l", strings.Repeat("x", 4096))}, sandbox.Invalid},
		{"depth", Limits{Depth: 10}, []ent{dir(strings.Repeat("d/", 11))}, sandbox.Invalid},
		{"depth through links", Limits{Depth: 10}, []ent{sym("a", strings.Repeat("d/", 9)), file("a/e/f/g", "")}, sandbox.Invalid},
		{"type", Limits{}, []ent{set(func(h *tar.Header) { h.Typeflag = 'V' })}, sandbox.Invalid},
		{"attribute too large", Limits{}, []ent{set(func(h *tar.Header) {
			h.PAXRecords = map[string]string{"SCHILY.xattr.user.x": strings.Repeat("v", 65536)}
		})}, sandbox.Invalid},
		{"entries", Limits{Entries: 19}, many, sandbox.Exhausted},
		{"layer size", Limits{LayerBytes: 4096}, many, sandbox.Exhausted},
		{"image size", Limits{ImageBytes: 4096}, many, sandbox.Exhausted},
		{"memory", Limits{MetaBytes: 1000}, many, sandbox.Exhausted},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, _, err := merge(t, tt.limit, tarOf(t, tt.ents...))
			if sandbox.KindOf(err) != tt.want {
				t.Errorf("%v is of kind %q, want %q", err, sandbox.KindOf(err), tt.want)
			}
		})
	}
}

// A truncated archive is Invalid, a failing source keeps its own error.
func TestMergeBroken(t *testing.T) {
	t.Parallel()
	b := tarOf(t, file("a", strings.Repeat("x", 5000)))
	for _, n := range []int{1, 100, 511, 513, 3000} {
		if _, _, err := merge(t, Limits{}, b[:n]); sandbox.KindOf(err) != sandbox.Invalid {
			t.Errorf("cut at %d: %v", n, err)
		}
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "out"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	m := NewMerger(erofsimg.NewWriter(f, erofsimg.Options{}), Limits{})
	if _, err := m.Apply(context.Background(), io.MultiReader(bytes.NewReader(b[:1000]), broken{})); err != errBroken {
		t.Errorf("source failed, got %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := m.Apply(ctx, bytes.NewReader(b)); err != context.Canceled {
		t.Errorf("cancelled, got %v", err)
	}
}

var errBroken = fmt.Errorf("broken source")

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errBroken }

// sparseTar is a tar of one GNU sparse file that claims size bytes and holds
// none (format 1.0; tar(5)).
func sparseTar(t testing.TB, size int64) []byte {
	t.Helper()
	const blank = "0\n"
	data := blank + strings.Repeat("\x00", 512-len(blank))
	b := tarOf(t, with(file("GNUSparseFile.0/s", data), func(h *tar.Header) {
		h.Format = tar.FormatPAX
		h.PAXRecords = map[string]string{"VIV.sparse.x": "1"}
	}))
	// archive/tar refuses to write these records, so they are put in after.
	rec := func(k, v string) string {
		for n := 0; ; n++ {
			if s := fmt.Sprintf("%d %s=%s\n", n, k, v); len(s) == n {
				return s
			}
		}
	}
	recs := rec("GNU.sparse.major", "1") + rec("GNU.sparse.minor", "0") + rec("GNU.sparse.name", "s") + rec("GNU.sparse.realsize", fmt.Sprint(size))
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "p", Size: int64(len(recs)), Mode: 0o644, Format: tar.FormatUSTAR}); err != nil {
		t.Fatal(err)
	}
	io.WriteString(w, recs)
	w.Flush()
	h := out.Bytes()
	h[156] = 'x' // a PAX header
	sum := 0
	copy(h[148:156], "        ")
	for _, c := range h[:512] {
		sum += int(c)
	}
	copy(h[148:156], fmt.Sprintf("%06o\x00 ", sum))
	i := bytes.Index(b, []byte("GNUSparseFile.0/s"))
	start := i / 512 * 512
	return append(h[:len(h):len(h)], b[start:]...)
}

// B3: a sparse file may claim more than its layer holds, but not without end.
func TestMergeSparse(t *testing.T) {
	t.Parallel()
	r, _, err := merge(t, Limits{}, sparseTar(t, 1<<30))
	if err != nil {
		t.Fatal(err)
	}
	if n := r.root.Children["s"].Node; n == nil || n.Data.Size != 1<<30 {
		t.Fatalf("sparse file: %+v in %v", n, r.root.Children)
	}
	_, _, err = merge(t, Limits{}, sparseTar(t, 1<<60))
	if sandbox.KindOf(err) != sandbox.Exhausted {
		t.Errorf("2^60 bytes: %v", err)
	}
}

func TestAttributes(t *testing.T) {
	t.Parallel()
	pax := map[string]string{
		"SCHILY.xattr.security.capability": "\x01\x00\xff", "SCHILY.xattr.user.a": "b",
		"SCHILY.xattr.trusted.overlay.opaque": "y", "SCHILY.xattr.user.overlay.redirect": "/", "SCHILY.xattr.strange": "z",
	}
	r, _, err := merge(t, Limits{}, tarOf(t,
		with(ent{name: "x", mode: 0o6755}, func(h *tar.Header) {
			h.Uid, h.Gid, h.ModTime, h.Format = 100000, 5, time.Unix(-7, 5), tar.FormatPAX
			h.PAXRecords = pax
		}),
		with(dir("./"), func(h *tar.Header) { h.Mode, h.Uid = 0o711, 9 }),
		hard("y", "x")))
	if err != nil {
		t.Fatal(err)
	}
	x := r.root.Children["x"].Node
	if x.Mode != 0o106755 || x.UID != 100000 || x.GID != 5 || x.Mtime != -7 || x.Nsec != 5 || r.root.Mode != 0o40711 || r.root.UID != 9 {
		t.Errorf("%+v, root %+v", x, r.root)
	}
	var got []string
	err = Xattrs(r.root, func(p string, a erofsimg.Xattr) error {
		got = append(got, p+" "+a.Name+"="+a.Value)
		return nil
	})
	if want := []string{"/x security.capability=\x01\x00\xff", "/x user.a=b"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("attributes %q, %v", got, err)
	}
}

func TestEnsureMountPoints(t *testing.T) {
	t.Parallel()
	all := []string{"/proc/", "/sys/", "/dev/", "/dev/pts/", "/dev/shm/", "/tmp/", "/run/", "/etc/", "/root/", "/.viv/", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}
	tests := []struct {
		name   string
		ents   []ent
		differ entries // path to content, other than the usual
	}{
		{"empty", nil, nil},
		{"hostile links", []ent{sym("proc", "/etc"), sym(".viv", "usr"), file("dev", "x"), sym("etc/hosts", "/proc/x"), sym("etc/resolv.conf", "../run/nothing")}, nil},
		{"link that ends at a file", []ent{file("etc/static/hosts", "h"), sym("etc/hosts", "static/hosts"), file("etc/hostname", "n")},
			entries{"/etc/hosts": "-> static/hosts", "/etc/static/": "", "/etc/static/hosts": "h", "/etc/hostname": "n"}},
		{"link loop", []ent{sym("etc/hosts", "hosts")}, nil},
		{"tmp elsewhere", []ent{sym("tmp", "var/tmp")}, entries{"/tmp": "-> var/tmp"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f, err := os.Create(filepath.Join(t.TempDir(), "x"))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			m := NewMerger(erofsimg.NewWriter(f, erofsimg.Options{}), Limits{})
			if _, err := m.Apply(context.Background(), bytes.NewReader(tarOf(t, tt.ents...))); err != nil {
				t.Fatal(err)
			}
			if err := m.EnsureMountPoints(); err != nil {
				t.Fatal(err)
			}
			want := entries{}
			for _, p := range all {
				if _, ok := tt.differ[strings.TrimSuffix(p, "/")]; !ok {
					want[p] = ""
				}
			}
			for p, s := range tt.differ {
				want[p] = s
			}
			if got := (&result{f.Name(), m.Root()}).tree(t); !reflect.DeepEqual(got, want) {
				t.Errorf("got  %q\nwant %q", got, want)
			}
			if tt.differ == nil && m.Root().Children["tmp"].Mode != 0o41777 {
				t.Error("/tmp is not sticky")
			}
		})
	}
	// /etc may be anything.
	if _, m, err := merge(t, Limits{}, tarOf(t, file("etc", "x"))); err != nil || m.EnsureMountPoints() != nil {
		t.Errorf("/etc is a file: %v", err)
	}
}

// B2: a million entries, and a layer that is all whiteouts of a large
// directory, whose cost must not be the square of its size.
func TestMillionEntries(t *testing.T) {
	if testing.Short() {
		t.Skip("takes seconds")
	}
	const n = 1_000_000
	// The headers are patched by hand: writing them all takes longer than
	// reading them.
	head := tarOf(t, file("d00/f0000000", ""))[:512]
	name, sum := head[:12], 0
	for _, c := range head[:148] {
		sum += int(c)
	}
	for _, c := range head[156:] {
		sum += int(c)
	}
	for _, c := range name {
		sum -= int(c)
	}
	pr, pw := io.Pipe()
	go func() {
		w := bufio.NewWriterSize(pw, 1<<20)
		for i := range n {
			copy(name, fmt.Appendf(nil, "d%02d/f%07d", i%100, i))
			s := sum + 8*' '
			for _, c := range name {
				s += int(c)
			}
			copy(head[148:], fmt.Appendf(nil, "%06o", s))
			w.Write(head)
		}
		w.Write(make([]byte, 1024))
		pw.CloseWithError(w.Flush())
	}()
	f, err := os.Create(filepath.Join(t.TempDir(), "x"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	w := erofsimg.NewWriter(f, erofsimg.Options{})
	m := NewMerger(w, Limits{})
	if _, err := m.Apply(context.Background(), pr); err != nil {
		t.Fatal(err)
	}
	var white []ent
	for range 20000 {
		white = append(white, file("d01/.wh..wh..opq", ""), file("d01/x", ""))
	}
	if _, err := m.Apply(context.Background(), bytes.NewReader(tarOf(t, white...))); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Finish(m.Root()); err != nil {
		t.Fatal(err)
	}
	if got := len(m.Root().Children["d01"].Children); got != 1 {
		t.Errorf("%d entries left of d01", got)
	}
	if got := len(m.Root().Children["d02"].Children); got != n/100 {
		t.Errorf("%d entries in d02", got)
	}
}

// A name of 4,000 directories.
func TestDeep(t *testing.T) {
	t.Parallel()
	name := strings.Repeat("d/", 4000)
	r, _, err := merge(t, Limits{}, tarOf(t, file(name+"f", "x"), hard(name+"g", name+"f")), tarOf(t, file(name+".wh.f", "")))
	if err != nil {
		t.Fatal(err)
	}
	n := r.root
	for range 4000 {
		n = n.Children["d"].Node
	}
	if len(n.Children) != 1 || n.Children["g"].Node == nil {
		t.Errorf("at the bottom: %v", n.Children)
	}
	if err := Xattrs(r.root, func(string, erofsimg.Xattr) error { return nil }); err != nil {
		t.Error(err)
	}
}

// FuzzLayerTar merges hostile layers: no panic, an error of a kind that blames
// the layer, or an image that can be written.
func FuzzLayerTar(f *testing.F) {
	f.Add(tarOf(f, file("a", "1"), dir("d"), hard("b", "a"), sym("s", "../../d"), file("s/x", "y")), tarOf(f, file(".wh.a", ""), file("d/.wh..wh..opq", "")))
	f.Add(tarOf(f, sym("a", "b"), sym("b", "a/c"), file("a/x", "")), []byte{})
	f.Add(sparseTar(f, 1<<20), []byte("not a tar"))
	limit := Limits{LayerBytes: 1 << 22, ImageBytes: 1 << 23, Entries: 1000, Depth: 50, PathBytes: 4096, MetaBytes: 1 << 22}
	f.Fuzz(func(t *testing.T, a, b []byte) {
		out, err := os.Create(filepath.Join(t.TempDir(), "x"))
		if err != nil {
			t.Fatal(err)
		}
		defer out.Close()
		w := erofsimg.NewWriter(out, erofsimg.Options{Xattrs: true})
		m := NewMerger(w, limit)
		for _, l := range [][]byte{a, b} {
			_, err := m.Apply(context.Background(), bytes.NewReader(l))
			if k := sandbox.KindOf(err); err != nil && k != sandbox.Invalid && k != sandbox.Exhausted {
				t.Fatalf("%v is of kind %q", err, k)
			}
		}
		if err := m.EnsureMountPoints(); err != nil {
			return
		}
		if _, err := w.Finish(m.Root()); err != nil {
			t.Fatalf("merged tree cannot be written: %v", err)
		}
	})
}
