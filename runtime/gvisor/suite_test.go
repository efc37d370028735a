package gvisor_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/assets"
	"vivarium/cgroup"
	"vivarium/image"
	"vivarium/runtime/gvisor"
	"vivarium/runtime/runtimetest"
	"vivarium/sandbox"
	"vivarium/test/fixture"
)

// common is what all tests share: the programs, and an image.
var common struct {
	sync.Once
	dir   string
	paths assets.Paths
	image string
	err   error
}

func TestMain(m *testing.M) {
	if fd := os.Getenv(compileFilter); fd != "" {
		if err := writeFilter(fd); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// as with a daemon that was started by sudo: sentries must not have them (F1)
	if os.Geteuid() == 0 {
		if err := unix.Setgroups([]int{0, 4}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	code := m.Run()
	if common.dir != "" {
		if err := os.RemoveAll(common.dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func prepare(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it makes cgroups and namespaces")
	}
	tree := fixture.Busybox(t)
	common.Do(func() { common.err = prepareCommon(tree) })
	if common.err != nil {
		t.Fatalf("prepare: %v", common.err)
	}
}

func prepareCommon(tree []byte) (err error) {
	if common.dir, err = shortDir(); err != nil {
		return err
	}
	if common.paths, err = assets.Install(common.dir + "/bin"); err != nil {
		return err
	}
	ctx := context.Background()
	store, err := image.Open(ctx, image.Options{Dir: common.dir + "/images"})
	if err != nil {
		return err
	}
	defer store.Close()
	l, err := store.Load(ctx, "t", bytes.NewReader(tree), image.LoadOptions{Tag: "busybox:test", Format: image.RootFS})
	if err != nil {
		return err
	}
	common.image = l[0].Path
	return nil
}

// shortDir is a directory whose sockets have short enough names, through which
// the sentry's user can reach its program.
func shortDir() (string, error) {
	dir, err := os.MkdirTemp("/tmp", "vgv")
	if err != nil {
		return "", err
	}
	return dir, os.Chmod(dir, 0o711)
}

// lab is the host's side of one test.
type lab struct {
	dir     string
	slots   *runtimetest.Slots
	cgroups *cgroup.Parent
	sentry  string // instead of the common one
	uids    gvisor.UIDs
}

var labs atomic.Int64

func newLab(t testing.TB) *lab {
	t.Helper()
	prepare(t)
	dir, err := shortDir()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	l := &lab{dir: dir, sentry: common.paths.Sentry}
	// its own, or others that run at the same time would use them up
	const each = 100
	n := labs.Add(1)
	l.uids = gvisor.UIDs{First: 2_001_000_000 + (os.Getpid()%4000)*100*each + int(n%100)*each, Count: each}
	if l.cgroups, err = cgroup.OpenParent(fmt.Sprintf("/vivtest-%d-%d", os.Getpid(), n), cgroup.Limits{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() { // it may have left its machines
			l.killAll()
		}
		if err := l.cgroups.Remove(); err != nil {
			t.Error(err)
		}
	})
	l.slots = runtimetest.NewSlots(t, dir+"/net")
	return l
}

func (l *lab) open(t testing.TB, o runtimetest.Options) *gvisor.Runtime {
	t.Helper()
	r, err := gvisor.Open(gvisor.Options{
		Dir: l.dir + "/gv", Sentry: l.sentry, Start: common.paths.Start, GuestImage: common.paths.GuestImage, PauseImage: common.paths.PauseImage,
		Slots: l.slots, Cgroups: l.cgroups, PoolSize: o.PoolSize, PoolClass: o.Class, Fail: o.Fail, UIDs: l.uids,
		Logger: slog.New(slog.NewTextHandler(logTo{t}, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	return r
}

// logTo writes to a test's log: what the standard error is while a runtime is
// open goes nowhere.
type logTo struct{ t testing.TB }

func (l logTo) Write(b []byte) (int, error) {
	l.t.Log(strings.TrimSpace(string(b)))
	return len(b), nil
}

// killAll ends what a failed test left.
func (l *lab) killAll() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	names, _ := l.cgroups.List()
	for _, n := range names {
		if g, err := l.cgroups.Load(n); err == nil && g.Kill(ctx) == nil {
			_ = g.Remove() // the parent's removal says what is left
		}
	}
}

// left names what a machine, or with "" any, has on the host.
func (l *lab) left(t testing.TB, id string) []string {
	t.Helper()
	var left []string
	for _, sub := range []string{"m", "s"} {
		entries, err := os.ReadDir(filepath.Join(l.dir, "gv", sub))
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range entries {
			if strings.Contains(e.Name(), id) {
				left = append(left, "file "+sub+"/"+e.Name())
			}
		}
	}
	groups, err := l.cgroups.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range groups {
		if strings.Contains(g, id) {
			left = append(left, "cgroup "+g)
		}
	}
	for _, s := range l.slots.Held(id) {
		left = append(left, "slot "+s)
	}
	for _, p := range l.processes(t, id) {
		left = append(left, "process "+strconv.Itoa(p))
	}
	return left
}

// processes are those in the machine's cgroup, and those that name this lab in
// their arguments, wherever they are.
func (l *lab) processes(t testing.TB, id string) []int {
	t.Helper()
	var pids []int
	groups, err := l.cgroups.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range groups {
		if !strings.Contains(name, id) {
			continue
		}
		if g, err := l.cgroups.Load(name); err == nil {
			if p, err := g.Procs(); err == nil { // it may be gone by now
				pids = append(pids, p...)
			}
		}
	}
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range procs {
		b, err := os.ReadFile(p)
		if err != nil || !bytes.Contains(b, []byte(l.dir+"/")) || !bytes.Contains(b, []byte(id)) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(p)))
		if err == nil && !contains(pids, pid) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func contains(l []int, n int) bool {
	for _, m := range l {
		if m == n {
			return true
		}
	}
	return false
}

func TestSuite(t *testing.T) {
	prepare(t)
	runtimetest.Suite(t, func(t *testing.T) *runtimetest.Harness {
		l := newLab(t)
		return &runtimetest.Harness{
			Open:      func(t testing.TB, o runtimetest.Options) sandbox.Runtime { return l.open(t, o) },
			Image:     common.image,
			Left:      l.left,
			Processes: l.processes,
			Network: func(t testing.TB, live func(string) bool) {
				if err := l.slots.Forget(context.Background(), live); err != nil {
					t.Error(err)
				}
			},
		}
	})
}
