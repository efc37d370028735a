package agent

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// Main runs the guest until its listener fails: it returns only with an error.
// It takes its configuration from the environment and removes it there.
func Main() error {
	unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0) // the key is in memory and in /proc/self/environ
	key, err := hex.DecodeString(os.Getenv(wire.EnvKey))
	if err != nil || len(key) != wire.KeySize {
		return fmt.Errorf("%s must be %d bytes in hexadecimal", wire.EnvKey, wire.KeySize)
	}
	var l *listener
	if v := os.Getenv(wire.EnvFD); v != "" {
		fd, err := strconv.Atoi(v)
		if err != nil || fd < 3 {
			return fmt.Errorf("%s is not a descriptor", wire.EnvFD)
		}
		l, err = newListener(fd)
		if err != nil {
			return err
		}
	} else {
		port, err := strconv.Atoi(os.Getenv(wire.EnvPort))
		if err != nil || port < 1 || port > 65535 {
			return fmt.Errorf("%s is not a port", wire.EnvPort)
		}
		if l, err = listen(port); err != nil {
			return err
		}
	}
	setup, ready := os.Getenv(wire.EnvSetup), os.Getenv(wire.EnvReady)
	secret := os.Getenv(wire.EnvKey)
	time.AfterFunc(spareAfter, func() { scrub(secret) })
	os.Clearenv()
	debug.SetGCPercent(50)
	debug.SetMemoryLimit(96 << 20)
	unix.Umask(0o022)
	unix.Chdir("/") // see execution.fork
	if err := setUp(setup); sandbox.KindOf(err) == sandbox.Internal {
		return err
	} else if err != nil {
		// Not worth a sandbox: some images cannot have these files.
		os.Stderr.WriteString("viv-guest: " + err.Error() + "\n")
	}
	a := &Agent{reaper: newReaper(), key: key, boot: time.Now(), bootID: bootID(), files: newFileRunner(), execs: map[string]*execution{}}
	g, err := unix.Getgroups()
	a.groups = err != nil || len(g) > 0
	if ready == "1" {
		sayReady()
	}
	surviveSignals()
	go a.reaper.loop()
	return a.accept(l)
}

func setUp(v string) error {
	if v == "" {
		return nil
	}
	b, err := hex.DecodeString(v)
	if err != nil {
		return fmt.Errorf("%s: %w", wire.EnvSetup, err)
	}
	s, err := wire.DecodeSetup(b)
	if err != nil {
		return fmt.Errorf("%s: %w", wire.EnvSetup, err)
	}
	return prepare(&s)
}

// sayReady writes one byte to standard output, so that the host need not try
// again and again to connect, and gives the descriptor up: what the host holds
// the other end of would be in the way of a checkpoint.
func sayReady() {
	unix.Write(1, []byte{'R'})
	if null := devNull(); null >= 0 {
		unix.Dup3(null, 1, 0)
	} else {
		unix.Close(1)
	}
}

func bootID() string {
	var b [12]byte
	wire.Random(b[:])
	return hex.EncodeToString(b[:])
}

// scrub overwrites a secret where the kernel put it at the start, which is what
// /proc/1/environ shows: unsetting a variable leaves it there. Nobody else can
// read that file while the process is not dumpable, so there is no hurry.
func scrub(secret string) {
	// The arguments are not copied by the runtime: they lie in the same mapping.
	at := unsafe.Pointer(unsafe.StringData(os.Args[0]))
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil || secret == "" {
		return
	}
	for line := range strings.Lines(string(maps)) {
		span, _, _ := strings.Cut(line, " ")
		from, to, _ := strings.Cut(span, "-")
		lo, err1 := strconv.ParseUint(from, 16, 64)
		hi, err2 := strconv.ParseUint(to, 16, 64)
		here := uint64(uintptr(at))
		if err1 != nil || err2 != nil || here < lo || here >= hi {
			continue
		}
		const most = 256 << 10 // of the mapping's end: further down are the stack's frames
		if hi-lo > most {
			lo = max(hi-most, lo)
		}
		mem := unsafe.Slice((*byte)(unsafe.Add(at, int(lo)-int(here))), int(hi-lo))
		for {
			i := bytes.Index(mem, []byte(secret))
			if i < 0 {
				return
			}
			clear(mem[i : i+len(secret)])
		}
	}
}

var devNull = sync.OnceValue(func() int {
	fd, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		// An image without it: the end of a pipe that nobody writes to.
		var p [2]int
		if unix.Pipe2(p[:], unix.O_CLOEXEC) != nil {
			return -1
		}
		unix.Close(p[1])
		return p[0]
	}
	return fd
})
