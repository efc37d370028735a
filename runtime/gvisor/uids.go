package gvisor

import (
	"encoding/json"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// UIDs is a range of users of the host, and of groups of the same numbers, that
// sentries run as: each machine has one to itself.
type UIDs struct {
	First, Count int
}

// Contains says whether a user is of the range.
func (u UIDs) Contains(id int) bool { return id >= u.First && id-u.First < u.Count }

// uids gives them out. What a machine has stays its own until nothing of it is
// left: a user that is given again too early could signal what its last owner
// has left behind.
type uids struct {
	UIDs

	mu   sync.Mutex
	next int            // offset where the search starts; guarded by mu
	of   map[string]int // by machine; guarded by mu
	used map[int]bool   // guarded by mu
}

func newUIDs(r UIDs) (*uids, error) {
	if r.First <= 0 || r.Count <= 0 || r.First > math.MaxInt32-r.Count {
		return nil, sandbox.Invalid.Errorf("users of sentries: %d from %d on is not a range of users", r.Count, r.First)
	}
	// somewhere, so that two daemons with the same range do not look at the same
	// users at once, and in turn from there, so that one is given again as late as
	// can be
	return &uids{UIDs: r, next: rand.N(r.Count), of: map[string]int{}, used: map[int]bool{}}, nil
}

// running says whether a process that can be seen from here has a user as its
// real one: of another daemon's sandbox, or the host's own. For a user without any
// the kernel knows so without a look at the processes (getpriority(2)).
func running(id int) bool {
	_, err := unix.Getpriority(unix.PRIO_USER, id)
	return !errors.Is(err, unix.ESRCH)
}

// take gives a machine a user that no other has.
func (u *uids) take(machine string) (int, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for range u.Count {
		id := u.First + u.next
		u.next = (u.next + 1) % u.Count
		if !u.used[id] && !running(id) {
			u.of[machine], u.used[id] = id, true
			return id, nil
		}
	}
	return 0, sandbox.Exhausted.Errorf("boot: all %d users that sentries can run as are taken", u.Count).WithHint("raise uids.count, or remove sandboxes")
}

// hold keeps the user that a machine of an earlier daemon has.
func (u *uids) hold(machine string, id int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.of[machine], u.used[id] = id, true
}

// drop gives up that of a machine of which nothing is left.
func (u *uids) drop(machine string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if id, ok := u.of[machine]; ok {
		delete(u.of, machine)
		delete(u.used, id)
	}
}

// uidAnnotation has a machine's user in its spec, which is written before its
// sentry is started and goes after that has ended: also what was cut off in the
// middle of a boot is known by it.
const uidAnnotation = "vivarium.uid"

// holdAll keeps the users of machines of an earlier daemon.
func (r *Runtime) holdAll() error {
	entries, err := os.ReadDir(filepath.Join(r.opts.Dir, "m"))
	if err != nil {
		return sandbox.Internal.Errorf("list machines: %w", err)
	}
	for _, e := range entries {
		raw, err := os.ReadFile(filepath.Join(r.dir(e.Name()), specFile))
		if err != nil {
			continue // no sentry was started from it
		}
		var s specs.Spec
		if json.Unmarshal(raw, &s) != nil {
			continue // half written, so the same
		}
		// none: of a version whose sentries all ran as nobody
		if id, err := strconv.Atoi(s.Annotations[uidAnnotation]); err == nil {
			r.uids.hold(e.Name(), id)
		}
	}
	return nil
}
