package life

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/test/fixture"
)

// TestA05Node: the disks of all sandboxes together are more than the node has.
// The one that writes most ends, the reserve stays free, a neighbour goes on.
func TestA05Node(t *testing.T) {
	t.Parallel()
	const mib = 1 << 20
	disk := fixture.Dir(t)
	if err := unix.Mount("viv-disk", disk, "tmpfs", 0, "size=768m,mode=0711"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // after the daemon's own
		if err := errors.Join(unix.Unmount(disk, 0), os.Remove(disk)); err != nil {
			t.Error(err)
		}
	})
	dir := filepath.Join(disk, "d")
	if err := os.Mkdir(dir, 0o711); err != nil {
		t.Fatal(err)
	}
	d := fixture.StartIn(t, dir, `
pool: {size: 0}
reserve: {disk: 192MiB, memory: 64MiB, cpu: 100m}
defaults: {cpu_request: 10m, memory_request: 32MiB, memory_limit: 2GiB, network: none}
network: {pool: 2}
`)
	e := &env{Daemon: d, c: d.Client}
	spec := spec()
	spec.Resources = &v1.Resources{Disk: 4 << 30}
	neighbour := e.create(t, spec)
	if out, _ := e.run(t, neighbour.Id, sh("dd if=/dev/zero of=/some bs=1M count=16 2>/dev/null; echo done")...); out != "done\n" {
		t.Fatalf("%q", out)
	}
	greedy := e.create(t, spec)
	write := sh("i=0; while :; do dd if=/dev/zero of=/full$i bs=1M count=8 2>/dev/null; i=$((i+1)); sleep 0.05; done")
	if _, err := e.c.StartExec(t.Context(), greedy.Id, "", &v1.ExecSpec{Argv: write}); err != nil {
		t.Fatal(err)
	}
	if c := e.death(t, greedy.Id); c.Reason != "disk" {
		t.Errorf("certificate %v", c)
	}
	if out, _ := e.run(t, neighbour.Id, sh("wc -c </some")...); out != "16777216\n" {
		t.Errorf("the neighbour: %q", out)
	}
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			t.Fatal(err)
		}
		if int64(st.Bavail)*st.Bsize >= 192*mib {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("only %d MiB are free", int64(st.Bavail)*st.Bsize/mib)
		}
	}
	e.create(t, spec) // there is room again
}
