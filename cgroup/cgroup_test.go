package cgroup

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

func parent(t *testing.T) *Parent {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("needs root")
	}
	p, err := OpenParent("/vivtest-"+strconv.Itoa(os.Getpid())+"-"+t.Name(), Limits{MemoryLimit: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Remove(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// start runs sleep, born in g.
func start(t *testing.T, g *Group, argv ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(argv[0], argv[1:]...)
	err := g.Spawn(func(e Entry) (int, error) {
		cmd.SysProcAttr = &unix.SysProcAttr{}
		if e.Dir != nil {
			cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(e.Dir.Fd())
		}
		if err := cmd.Start(); err != nil {
			return 0, err
		}
		return cmd.Process.Pid, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return cmd
}

func TestSpawn(t *testing.T) {
	t.Parallel()
	p := parent(t)
	g, err := p.New("a", Limits{CPUWeight: 100, CPULimit: 500, MemoryLimit: 64 << 20, MemoryRequest: 1 << 20, Pids: 50})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.New("a", Limits{}); !errors.Is(err, sandbox.Exists) {
		t.Errorf("second New: %v, want exists", err)
	}
	cmd := start(t, g, "sleep", "60")
	pids, err := g.Procs()
	if err != nil || len(pids) != 1 || pids[0] != cmd.Process.Pid {
		t.Errorf("procs %v, %v; want [%d]", pids, err, cmd.Process.Pid)
	}
	if own, _ := os.ReadFile("/proc/self/cgroup"); string(own) == "" || containsPath(string(own), g.Path()) {
		t.Errorf("the daemon itself was dragged into the group:\n%s", own)
	}
	names, err := p.List()
	if err != nil || len(names) != 1 || names[0] != "a" {
		t.Errorf("list %v, %v", names, err)
	}
	s, err := g.Stats()
	if err != nil || s.Pids != 1 {
		t.Errorf("stats %+v, %v", s, err)
	}
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := g.Kill(ctx); err != nil {
		t.Error(err)
	}
	<-done
	if err := g.Remove(); err != nil {
		t.Error(err)
	}
	if err := g.Remove(); err != nil {
		t.Errorf("second remove: %v", err)
	}
	if _, err := p.Load("a"); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("load after remove: %v", err)
	}
}

// A process that writes to the tasks files is in the group before it executes
// anything, and stays there.
func TestSpawnByTasks(t *testing.T) {
	t.Parallel()
	p := parent(t)
	g, err := p.New("a", Limits{MemoryLimit: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Spawn(func(e Entry) (int, error) {
		if e.Dir != nil {
			t.Skip("cgroup v2 has no need of it")
		}
		cmd := exec.Command("sh", "-c", `for n in "$@"; do eval "echo 0 >&$n"; done; sleep 60 & echo; exec sleep 60`, "sh")
		for i := range e.Tasks {
			cmd.Args = append(cmd.Args, strconv.Itoa(3+i))
		}
		cmd.ExtraFiles = e.Tasks
		out, err := cmd.StdoutPipe()
		if err != nil {
			return 0, err
		}
		if err := cmd.Start(); err != nil {
			return 0, err
		}
		t.Cleanup(func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 10*time.Second)
			defer cancel()
			if err := g.Kill(ctx); err != nil {
				t.Error(err)
			}
			_ = cmd.Wait()
			if err := g.Remove(); err != nil {
				t.Error(err)
			}
		})
		if _, err := out.Read(make([]byte, 1)); err != nil {
			return 0, err
		}
		pids, err := g.Procs()
		if err != nil || len(pids) != 2 {
			t.Errorf("procs before Spawn has moved anything: %v, %v", pids, err)
		}
		return cmd.Process.Pid, nil
	}); err != nil {
		t.Fatal(err)
	}
}

func containsPath(procCgroup, path string) bool {
	for i := 0; i+len(path) <= len(procCgroup); i++ {
		if procCgroup[i:i+len(path)] == path {
			return true
		}
	}
	return false
}

func TestOOMIsCounted(t *testing.T) {
	t.Parallel()
	p := parent(t)
	g, err := p.New("oom", Limits{MemoryLimit: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	told := make(chan struct{})
	w, err := g.WatchOOM(func() { close(told) })
	if err != nil {
		t.Fatal(err)
	}
	if w != nil {
		defer w.Close()
	}
	cmd := start(t, g, "sh", "-c", "sleep 0.2; exec dd if=/dev/zero of=/dev/null bs=64M count=1")
	if err := cmd.Wait(); err == nil {
		t.Error("64 MiB fitted into 16 MiB")
	}
	if w != nil { // with the group goes the watch
		select {
		case <-told:
		case <-time.After(10 * time.Second):
			t.Error("nobody was told")
		}
	}
	s, err := g.Stats()
	if err != nil || s.OOMKills == 0 || s.PeakMemory < 8<<20 {
		t.Errorf("stats %+v, %v", s, err)
	}
	if err := g.Remove(); err != nil {
		t.Error(err)
	}
}

func TestBadNames(t *testing.T) {
	t.Parallel()
	p := parent(t)
	for _, name := range []string{"", "..", ".", "a/b", "a\x00b"} {
		if _, err := p.New(name, Limits{}); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("New(%q): %v, want invalid", name, err)
		}
	}
	if _, err := OpenParent("/", Limits{}); !errors.Is(err, sandbox.Invalid) {
		t.Errorf("OpenParent(/): %v", err)
	}
}
