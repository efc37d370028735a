package native_test

import (
	"bytes"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/server/native/fake"
)

const benchBytes = 1 << 30

func benchClient(b *testing.B, addr func(*fake.Node) string) (*client.Client, *fake.Node) {
	b.Helper()
	n := fake.Serve(b)
	c, err := client.New(addr(n), n.Admin)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(c.Close)
	if _, err := c.Create(b.Context(), &v1.SandboxSpec{Name: "box", Image: "x"}, client.CreateOptions{Wait: true}); err != nil {
		b.Fatal(err)
	}
	return c, n
}

var addrs = map[string]func(*fake.Node) string{
	"tcp":  func(n *fake.Node) string { return n.HTTP },
	"unix": func(n *fake.Node) string { return n.Unix },
}

// peak is the largest resident size of this process, in bytes; see proc(5).
func peak() int64 {
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmHWM:" {
			n, _ := strconv.ParseInt(f[1], 10, 64)
			return n << 10
		}
	}
	return 0
}

// perGiB runs one transfer of a GiB per iteration, client and server in this
// one process.
func perGiB(b *testing.B, transfer func() (int64, error)) {
	runtime.GC()
	before := peak()
	b.SetBytes(benchBytes)
	b.ResetTimer()
	for range b.N {
		if n, err := transfer(); err != nil || n != benchBytes {
			b.Fatalf("%d bytes, %v", n, err)
		}
	}
	b.ReportMetric(float64(peak()-before)/(1<<20), "MiB-growth")
}

type counter int64

func (c *counter) Write(p []byte) (int, error) { *c += counter(len(p)); return len(p), nil }

func BenchmarkOutput(b *testing.B) {
	for name, addr := range addrs {
		b.Run(name, func(b *testing.B) {
			c, _ := benchClient(b, addr)
			perGiB(b, func() (int64, error) {
				var n counter
				_, err := c.RunExec(b.Context(), "box", "", &v1.ExecSpec{Argv: []string{"flood", strconv.Itoa(benchBytes)}}, &n, nil)
				return int64(n), err
			})
		})
	}
}

func BenchmarkRead(b *testing.B) {
	for name, addr := range addrs {
		b.Run(name, func(b *testing.B) {
			c, _ := benchClient(b, addr)
			perGiB(b, func() (int64, error) {
				r, _, err := c.ReadFile(b.Context(), &v1.ReadFileRequest{SandboxId: "box", Path: []byte(fake.Zeros)})
				if err != nil {
					return 0, err
				}
				defer r.Close()
				var n counter
				return io.Copy(&n, r)
			})
		})
	}
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

func BenchmarkWrite(b *testing.B) {
	for name, addr := range addrs {
		b.Run(name, func(b *testing.B) {
			c, _ := benchClient(b, addr)
			perGiB(b, func() (int64, error) {
				fi, err := c.WriteFile(b.Context(), &v1.WriteFileRequest{SandboxId: "box", Path: []byte(fake.Zeros)}, io.LimitReader(endless{}, benchBytes))
				return fi.GetSize(), err
			})
		})
	}
}

// What a call costs that does nothing.
func BenchmarkCall(b *testing.B) {
	for name, addr := range addrs {
		b.Run(name, func(b *testing.B) {
			c, _ := benchClient(b, addr)
			for b.Loop() {
				if _, err := c.Get(b.Context(), "box"); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// What a stream costs that carries one line.
func BenchmarkShortRun(b *testing.B) {
	c, _ := benchClient(b, addrs["tcp"])
	for b.Loop() {
		var out bytes.Buffer
		if _, err := c.RunExec(b.Context(), "box", "short", &v1.ExecSpec{Argv: []string{"flood", "10"}}, &out, nil); err != nil {
			b.Fatal(err)
		}
	}
}
