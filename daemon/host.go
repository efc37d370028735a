package daemon

import (
	"bufio"
	"log/slog"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// memTotal reads how much memory the host has, in bytes (proc_meminfo(5)).
func memTotal(file string) (int64, error) {
	f, err := os.Open(file)
	if err != nil {
		return 0, sandbox.Unsupported.Errorf("read the host's memory: %w", err)
	}
	defer f.Close()
	s := bufio.NewScanner(f)
	for s.Scan() {
		if v, ok := strings.CutPrefix(s.Text(), "MemTotal:"); ok {
			kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(v), " kB"), 10, 64)
			if err != nil {
				break
			}
			return kb << 10, nil
		}
	}
	return 0, sandbox.Unsupported.Errorf("%s does not tell the host's memory", file)
}

// failpointEnv names a step before which the daemon kills itself, as a crash
// would: "create.boot". For the tests of recovery; it takes SIGKILL, which
// nothing can clean up after.
const failpointEnv = "VIV_FAILPOINT"

func failpoint(log *slog.Logger) func(step string) error {
	at := os.Getenv(failpointEnv)
	if at == "" {
		return nil
	}
	log.Warn("failpoint set", "step", at)
	return func(step string) error {
		if step == at {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
			select {} // it is on its way
		}
		return nil
	}
}
