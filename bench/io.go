package bench

import (
	"context"
	"hash/crc32"
	"io"
	"slices"
	"strconv"
	"time"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
)

// bulk is how much is moved each time.
func (r *run) bulk() int64 {
	if r.quick {
		return 1 << 20
	}
	return 1 << 30
}

// bulkFile is where it is written inside.
const bulkFile = "/root/bulk"

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sum counts what it is given and sums it up, at several GB/s.
type sum struct {
	n   int64
	crc uint32
}

func (s *sum) Write(p []byte) (int, error) {
	s.n += int64(len(p))
	s.crc = crc32.Update(s.crc, castagnoli, p)
	return len(p), nil
}

// pattern gives bytes that neither compress nor repeat within a block.
type pattern struct {
	block []byte
	at    int
	left  int64
}

func newPattern(n int64) *pattern {
	b := make([]byte, 1<<20)
	x := uint64(0x9e3779b97f4a7c15)
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(x)
	}
	return &pattern{block: b, left: n}
}

func (p *pattern) Read(b []byte) (int, error) {
	if p.left == 0 {
		return 0, io.EOF
	}
	n := copy(b[:min(int64(len(b)), p.left)], p.block[p.at:])
	p.at = (p.at + n) % len(p.block)
	p.left -= int64(n)
	return n, nil
}

// transfers are the three ways to move bytes.
var transfers = []string{"stdout", "file_up", "file_down"}

// io measures how fast bytes go through the daemon, and what that does to its
// memory.
func (r *run) io(ctx context.Context) error {
	r.res.note("1 GiB of standard output, of a file written and of one read; value is the slowest of the three, each the median of n; what arrived is checked")
	d := findDaemon(ctx, r.Server)
	if d == 0 {
		r.res.note("the daemon is not a process of this machine that can be looked at: its memory is left out")
	}
	sb, err := r.c.Create(ctx, r.spec(), client.CreateOptions{Wait: true})
	if err != nil {
		return err
	}
	rates := map[string][]float64{}
	growth := map[string][]float64{}
	for range r.N {
		var up uint32
		for _, name := range transfers {
			r.say("%s", name)
			watch := watchMemory(d)
			start := time.Now()
			err := r.transfer(ctx, sb.Id, name, &up)
			took := time.Since(start)
			grew := watch()
			if err != nil {
				return r.why(ctx, sb.Id, err)
			}
			rates[name] = append(rates[name], float64(r.bulk())/1e6/took.Seconds())
			growth[name] = append(growth[name], float64(grew)/1e6)
		}
	}
	worst := 0.0
	for _, name := range transfers {
		rate := median(rates[name])
		r.res.detail(name, rate, "MB/s")
		if worst == 0 || rate < worst {
			worst = rate
		}
		if d != 0 {
			r.res.detail(name+"_daemon_growth", slices.Max(growth[name]), "MB")
		}
	}
	if d != 0 {
		m := 0.0
		for _, g := range growth {
			m = max(m, slices.Max(g))
		}
		r.res.detail("daemon_growth", m, "MB")
	}
	r.res.value(worst, "MB/s")
	return r.remove(ctx, sb.Id)
}

func (r *run) transfer(ctx context.Context, id, name string, up *uint32) error {
	var got sum
	switch name {
	case "stdout":
		if err := r.runExec(ctx, id, []string{"head", "-c", strconv.FormatInt(r.bulk(), 10), "/dev/zero"}, &got); err != nil {
			return err
		}
	case "file_up":
		_, err := r.c.WriteFile(ctx, &v1.WriteFileRequest{SandboxId: id, Path: []byte(bulkFile), Parents: true}, io.TeeReader(newPattern(r.bulk()), &got))
		if err != nil {
			return err
		}
		*up = got.crc
	case "file_down":
		f, _, err := r.c.ReadFile(ctx, &v1.ReadFileRequest{SandboxId: id, Path: []byte(bulkFile)})
		if err != nil {
			return err
		}
		defer f.Close()
		if _, err := io.Copy(&got, f); err != nil {
			return err
		}
		if got.n == r.bulk() && got.crc != *up {
			return sandbox.Internal.Errorf("%s: what came down is not what went up", bulkFile)
		}
	}
	if got.n != r.bulk() {
		return sandbox.Internal.Errorf("%s: %d bytes of %d came through", name, got.n, r.bulk())
	}
	return nil
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return s[(len(s)-1)/2]
}
