package bench

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
	"vivarium/server/native/fake"
)

func TestPercentileIsASample(t *testing.T) {
	t.Parallel()
	upTo := func(n int) (s []time.Duration) {
		for i := range n {
			s = append(s, time.Duration(n-i)) // unsorted
		}
		return s
	}
	for _, c := range []struct {
		n    int
		p    float64
		want time.Duration
	}{
		{0, 50, 0}, {1, 50, 1}, {1, 99, 1}, {2, 50, 1}, {3, 50, 2}, {4, 50, 2}, {100, 50, 50}, {100, 95, 95}, {100, 99, 99},
		{50, 99, 50}, {500, 99, 495}, {101, 99, 100}, {10, 0, 1}, {10, 100, 10},
	} {
		s := upTo(c.n)
		if got := percentile(s, c.p); got != c.want {
			t.Errorf("percentile %g of %d is %d, want %d", c.p, c.n, got, c.want)
		}
		if c.n > 1 && s[0] != time.Duration(c.n) {
			t.Error("the samples were reordered")
		}
	}
}

func FuzzPercentile(f *testing.F) {
	f.Add([]byte{1, 2, 3}, 50.0)
	f.Fuzz(func(t *testing.T, b []byte, p float64) {
		if math.IsNaN(p) || p < 0 || p > 100 || len(b) == 0 {
			return
		}
		s := make([]time.Duration, len(b))
		for i, x := range b {
			s[i] = time.Duration(x)
		}
		got, below := percentile(s, p), 0
		if !slices.Contains(s, got) {
			t.Fatalf("%v is no sample", got)
		}
		for _, x := range s {
			if x <= got {
				below++
			}
		}
		if float64(below) < p/100*float64(len(s))-1e-9 {
			t.Fatalf("%v: only %d of %d are not above", got, below, len(s))
		}
	})
}

// The form that the documentation promises: these names and no others, in a
// bench of latencies.
func TestJSONForm(t *testing.T) {
	t.Parallel()
	r := newResult(Options{Bench: "tti", Runtime: "gvisor", N: 2})
	r.latency([]time.Duration{10 * time.Millisecond, 20 * time.Millisecond})
	r.compare("runsc", []time.Duration{40 * time.Millisecond})
	r.Stage["boot"] = Stage{1.5}
	var b bytes.Buffer
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	want := `{"bench":"tti","runtime":"gvisor","n":2,"p50_ms":10,"p95_ms":20,"p99_ms":20,` +
		`"peers":{"runsc":{"p50_ms":40,"ratio":0.25}},"stages":{"boot":{"p50_ms":1.5}}}` + "\n"
	if b.String() != want {
		t.Errorf("got  %swant %s", b.String(), want)
	}

	b.Reset()
	r = newResult(Options{Bench: "io", Runtime: "gvisor", N: 3})
	r.value(212.34567, "MB/s")
	r.detail("stdout", 1, "MB/s")
	r.Missing["podman"] = "not installed"
	if err := r.WriteJSON(&b); err != nil {
		t.Fatal(err)
	}
	want = `{"bench":"io","runtime":"gvisor","n":3,"value":212.346,"unit":"MB/s","peers":{},"stages":{},` +
		`"details":{"stdout":{"value":1,"unit":"MB/s"}},"missing":{"podman":"not installed"}}` + "\n"
	if b.String() != want {
		t.Errorf("got  %swant %s", b.String(), want)
	}
	b.Reset()
	if err := r.WriteText(&b); err != nil || !strings.Contains(b.String(), "missing: not installed") || !strings.Contains(b.String(), "212.346 MB/s") {
		t.Errorf("%v: %s", err, b.String())
	}
}

func TestOptions(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]Options{
		"bench":     {Bench: "boot"},
		"n":         {Bench: "tti", N: -1},
		"big n":     {Bench: "tti", N: MaxN + 1},
		"rate":      {Bench: "tti", Rate: -1},
		"nan":       {Bench: "tti", Rate: math.NaN()},
		"peer":      {Bench: "tti", Peers: []string{"docker"}},
		"no exec":   {Bench: "exec", Peers: []string{"bwrap"}},
		"no peers":  {Bench: "density", Peers: []string{"runsc"}},
		"pool off?": {Bench: "exec", PoolOff: true},
	} {
		if err := o.check(); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	o := Options{Bench: "tti", Peers: []string{"runsc", "bwrap", "runsc"}}
	if err := o.check(); err != nil || o.N != 50 || o.Runtime != "gvisor" || !slices.Equal(o.Peers, []string{"bwrap", "runsc"}) {
		t.Errorf("%v %+v", err, o)
	}
	o = Options{Bench: "exec"}
	if err := o.check(); err != nil || !slices.Equal(o.Peers, []string{"podman", "runsc"}) {
		t.Errorf("%v %+v", err, o)
	}
	if !slices.Equal(peersOf["exec"], []string{"runsc", "podman"}) {
		t.Error("check changed the table")
	}
	if !slices.Equal(slices.Sorted(maps.Keys(defaultN)), slices.Sorted(slices.Values(Benches))) {
		t.Error("a bench without a default")
	}
}

// Every bench against a node whose engine is a fake: what is asked for, that it
// ends with figures, and that nothing is left.
func TestBenches(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c, err := client.New(n.HTTP, n.Admin)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	if _, err := c.LoadImage(t.Context(), &v1.LoadImageRequest{Tag: "img"}, strings.NewReader("")); err != nil {
		t.Fatal(err)
	}
	for _, name := range Benches {
		if name == "net" { // net_test.go
			continue
		}
		for i, addr := range []string{n.HTTP, n.Unix} {
			var out bytes.Buffer
			o := Options{Bench: name, N: 5, Image: "img", Rate: float64(i * 1000), Server: addr, Token: n.Admin, JSON: true, Out: &out, Err: io.Discard, alone: true, quick: true}
			if err := Run(t.Context(), o); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			var res Result
			if err := json.Unmarshal(out.Bytes(), &res); err != nil {
				t.Fatal(err)
			}
			if res.Bench != name || res.N != 5 {
				t.Errorf("%s", out.String())
			}
			if latency := name != "io"; latency != (res.P50 != nil && *res.P50 > 0 && *res.P99 >= *res.P50) {
				t.Errorf("%s: latencies: %s", name, out.String())
			}
			if figure := name != "tti" && name != "exec"; figure != (res.Value != nil && res.Unit != "") {
				t.Errorf("%s: value: %s", name, out.String())
			}
		}
	}
	for _, b := range n.Engine.Boxes() {
		if b.Stage.Alive() {
			t.Errorf("%s is left in stage %s", b.ID, b.Stage)
		}
	}
}

func TestRunFails(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	o := Options{Bench: "exec", Image: "none", Server: n.HTTP, Token: n.Admin, alone: true}
	if _, err := Measure(t.Context(), o); !errors.Is(err, sandbox.NotFound) || sandbox.HintOf(err) == "" {
		t.Errorf("no image: %v", err)
	}
	o.Server = "http://127.0.0.1:1"
	if _, err := Measure(t.Context(), o); !errors.Is(err, sandbox.Unavailable) {
		t.Errorf("no daemon: %v", err)
	}
	o.Server, o.Token = n.HTTP, "wrong"
	if _, err := Measure(t.Context(), o); !errors.Is(err, sandbox.Denied) {
		t.Errorf("wrong token: %v", err)
	}
}

// A run that is ended early leaves nothing either.
func TestInterrupted(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	c, err := client.New(n.HTTP, n.Admin)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	if _, err := c.LoadImage(t.Context(), &v1.LoadImageRequest{Tag: "img"}, strings.NewReader("")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var lines atomic.Int32
	o := Options{Bench: "density", N: 3, Image: "img", Server: n.HTTP, Token: n.Admin, alone: true, quick: true,
		Err: writerFunc(func(p []byte) (int, error) {
			if lines.Add(1) == 2 { // all are alive
				cancel()
			}
			return len(p), nil
		})}
	if _, err := Measure(ctx, o); err == nil {
		t.Error("no error")
	}
	for _, b := range n.Engine.Boxes() {
		if b.Stage.Alive() {
			t.Errorf("%s is left", b.ID)
		}
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestPattern(t *testing.T) {
	t.Parallel()
	var a, b sum
	if _, err := io.Copy(&a, newPattern(3<<20+17)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyBuffer(struct{ io.Writer }{&b}, struct{ io.Reader }{newPattern(3<<20 + 17)}, make([]byte, 1001)); err != nil {
		t.Fatal(err)
	}
	if a != b || a.n != 3<<20+17 {
		t.Errorf("%+v %+v", a, b)
	}
}

// An archive that a sandbox made must not write outside, whatever it says (B2).
func TestUntarStaysInside(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	in := filepath.Join(dir, "in")
	out := filepath.Join(dir, "out")
	for _, d := range []string{in, out} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	pack := func(hs ...tar.Header) io.Reader {
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, h := range hs {
			h.Mode, h.Uid, h.Gid = 0o644, os.Geteuid(), os.Getegid()
			if h.Typeflag == tar.TypeReg {
				h.Size = 1
			}
			if err := w.WriteHeader(&h); err != nil {
				t.Fatal(err)
			}
			if h.Typeflag == tar.TypeReg {
				if _, err := w.Write([]byte("x")); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return &b
	}
	for i, hs := range [][]tar.Header{
		{{Typeflag: tar.TypeReg, Name: "../out/a"}},
		{{Typeflag: tar.TypeReg, Name: "/" + out + "/b"}},
		{{Typeflag: tar.TypeSymlink, Name: "l1", Linkname: "../out"}, {Typeflag: tar.TypeReg, Name: "l1/c"}},
		{{Typeflag: tar.TypeSymlink, Name: "l2", Linkname: out}, {Typeflag: tar.TypeReg, Name: "l2/d"}},
		{{Typeflag: tar.TypeSymlink, Name: "l3", Linkname: out}, {Typeflag: tar.TypeDir, Name: "l3/e/f"}},
		{{Typeflag: tar.TypeLink, Name: "g", Linkname: "../out/../../etc/passwd"}},
		{{Typeflag: tar.TypeChar, Name: "dev"}},
	} {
		root, err := os.OpenRoot(in)
		if err != nil {
			t.Fatal(err)
		}
		_ = untar(root, pack(hs...)) // some are refused, some land inside
		root.Close()
		if left, err := os.ReadDir(out); err != nil || len(left) > 0 {
			t.Fatalf("%d: outside: %v %v", i, left, err)
		}
	}
	if _, err := os.Lstat(filepath.Join(in, "dev")); err == nil {
		t.Error("a device was made")
	}
	root, err := os.OpenRoot(in)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	if err := untar(root, pack(tar.Header{Typeflag: tar.TypeDir, Name: "d"}, tar.Header{Typeflag: tar.TypeReg, Name: "d/x"}, tar.Header{Typeflag: tar.TypeLink, Name: "d/y", Linkname: "d/x"})); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(in, "d/y")); err != nil || string(b) != "x" {
		t.Errorf("%q %v", b, err)
	}
	if err := untar(root, strings.NewReader("no tar at all, but long enough to be read as one"+strings.Repeat(".", 600))); err == nil {
		t.Error("not an archive, and no error")
	}
}

func TestProcFiles(t *testing.T) {
	t.Parallel()
	d, err := parseCPUTime("12 (a) b (c)) S 1 1 1 0 -1 4194304 1 0 0 0 250 50 0 0 20 0 1 0 1 1 1")
	if err != nil || d != 3*time.Second {
		t.Errorf("%v %v", d, err)
	}
	for _, s := range []string{"", "12 (a) S 1", "12 (a) S 1 1 1 0 -1 4194304 1 0 0 0 x y 0"} {
		if _, err := parseCPUTime(s); err == nil {
			t.Errorf("%q is no error", s)
		}
	}
	table := `  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1EC6 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0
   1: 0100007F:1EC7 0100007F:1EC6 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 20 4 30 10 -1`
	if got := listener(table, 7878); got != "4711" {
		t.Errorf("inode %q", got)
	}
	if got := listener(table, 7879); got != "" {
		t.Errorf("a connection is no listener: %q", got)
	}
	if n, err := (&run{Options: Options{quick: true}}).memAvailable(t.Context()); err != nil || n < 1<<20 {
		t.Errorf("%d %v", n, err)
	}
	if _, err := field("/proc/meminfo", "MemNothing"); !errors.Is(err, sandbox.Unsupported) {
		t.Error(err)
	}
}

// The daemon's process is found by its socket, of either kind.
func TestFindDaemon(t *testing.T) {
	t.Parallel()
	n := fake.Serve(t)
	for _, addr := range []string{n.HTTP, n.Addr, n.Unix} {
		if got := findDaemon(t.Context(), addr); got != os.Getpid() {
			t.Errorf("%s: pid %d, want %d", addr, got, os.Getpid())
		}
	}
	if got := findDaemon(t.Context(), "http://127.0.0.1:1"); got != 0 {
		t.Errorf("nobody listens there, and pid %d was found", got)
	}
	grow := watchMemory(os.Getpid())
	if got := grow(); got < 0 {
		t.Errorf("grew by %d", got)
	}
}

// Peers that are not there are named, with the reason.
func TestPeerOutput(t *testing.T) {
	t.Parallel()
	first, whole, out, err := timed(t.Context(), "/bin/echo", hello[1])
	if err != nil || first <= 0 || whole < first || string(out) != "hi\n" {
		t.Errorf("%v %v %q %v", first, whole, out, err)
	}
	if _, err := greeting(first, whole, out, err); err != nil {
		t.Error(err)
	}
	if _, err := greeting(first, whole, []byte("ho\n"), nil); err == nil {
		t.Error("other output, and no error")
	}
	_, _, _, err = timed(t.Context(), "/bin/ls", "/does/not/exist")
	if err == nil || !strings.Contains(err.Error(), "/does/not/exist") {
		t.Errorf("what it said is not in the error: %v", err)
	}
	if _, why := find("no-such-peer"); why == "" {
		t.Error("a missing program has no reason")
	}
	r := &run{Options: Options{Server: "http://192.0.2.1:7878", Peers: []string{"runsc", "bwrap"}}, res: newResult(Options{})}
	p, err := r.openPeers(t.Context())
	if err != nil || len(p.names) != 0 || r.res.Missing["runsc"] == "" || r.res.Missing["bwrap"] == "" {
		t.Errorf("%v %+v %v", p, r.res.Missing, err)
	}
}

func TestTable(t *testing.T) {
	t.Parallel()
	f := func(x float64) *float64 { return &x }
	results := map[string]*Result{
		"tti":          {N: 500, P50: f(20), P99: f(81), Peers: map[string]Peer{"runsc": {P50: 100, Ratio: .2}}},
		"churn":        {N: 400, Value: f(19.9)},
		"density-many": {N: 1000, P50: f(1)},
		"io":           {N: 3, Details: map[string]Detail{"stdout": {Value: 200}, "daemon_growth": {Value: 65}}},
	}
	var b bytes.Buffer
	if err := Table(&b, results); err != nil {
		t.Fatal(err)
	}
	for what, want := range map[string]string{
		"create to first output, p50": "20 ms", "create to first output, p99": "missed", "against runsc run": "0.2",
		"against podman --runtime runsc run": "not measured", "create, exec and remove by 8 clients": "missed",
		"alive at once, all answering exec": "1000", "1 GiB of stdout": "200 MB/s", "1 GiB file up": "not measured",
		"daemon memory growth meanwhile": "missed", "exec round trip, p50": "not measured",
	} {
		line := ""
		for l := range strings.Lines(b.String()) {
			if strings.HasPrefix(l, what+" ") {
				line = l
			}
		}
		if !strings.Contains(line, want) {
			t.Errorf("%q has no %q:\n%s", what, want, line)
		}
		if want != "missed" && strings.Contains(line, "missed") {
			t.Errorf("%q is not missed:\n%s", what, line)
		}
	}
	if n := strings.Count(b.String(), "\n"); n != len(Goals)+1 {
		t.Errorf("%d lines for %d goals", n, len(Goals))
	}
}

func TestOverloaded(t *testing.T) {
	t.Parallel()
	for s, want := range map[string]bool{"3.50 1 1 1/1 1": true, "1.90 9 9 1/1 1": false, "": false, "x": false} {
		if _, got := overloaded(s, 2); got != want {
			t.Errorf("%q: %v", s, got)
		}
	}
}

// A daemon that does not start is told with what it said, and nothing waits for
// it.
func TestRecoveryWithoutDaemon(t *testing.T) {
	t.Parallel()
	if _, err := Recovery(t.Context(), RecoveryOptions{N: 0}); !errors.Is(err, sandbox.Invalid) {
		t.Error(err)
	}
	dir := t.TempDir()
	viv := filepath.Join(dir, "viv")
	// A process that another test forks meanwhile would have the file open for
	// writing until it executes its program, and the file could not be executed.
	syscall.ForkLock.RLock()
	err := os.WriteFile(viv, []byte("#!/bin/sh\necho it is broken >&2\nexit 3\n"), 0o755)
	syscall.ForkLock.RUnlock()
	if err != nil {
		t.Fatal(err)
	}
	_, err = Recovery(t.Context(), RecoveryOptions{Viv: viv, DataDir: dir, Listen: "127.0.0.1:1", N: 1})
	if !errors.Is(err, sandbox.Unavailable) || !strings.Contains(err.Error(), "it is broken") {
		t.Error(err)
	}
	if _, err := Recovery(t.Context(), RecoveryOptions{Viv: filepath.Join(dir, "none"), DataDir: dir, Listen: "127.0.0.1:1", N: 1}); err == nil {
		t.Error("no program, and no error")
	}
}

// What a peer leaves mounted is unmounted, nested as it may be.
func TestUnmountBelow(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	dir := t.TempDir()
	outer := filepath.Join(dir, "a")
	inner := filepath.Join(outer, "b")
	for _, d := range []string{outer, inner} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("none", d, "tmpfs", 0, "size=64k"); err != nil {
			t.Fatal(err)
		}
	}
	if err := unmountBelow(dir); err != nil {
		t.Error(err)
	}
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil || strings.Contains(string(b), dir) {
		t.Errorf("still mounted below %s: %v", dir, err)
	}
}
