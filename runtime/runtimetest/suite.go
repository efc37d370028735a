// Package runtimetest is the contract of sandbox.Runtime and sandbox.Machine as
// tests: whatever makes machines passes Suite. It judges from outside: what is
// left on the host is for the Harness to say.
package runtimetest

import (
	"testing"
	"time"

	"vivarium/sandbox"
)

// Options are how a test wants its runtime.
type Options struct {
	PoolSize int               // machines kept ready
	Class    sandbox.Resources // size of pooled machines
	// Fail is called before every step that could be interrupted; its error
	// makes the step fail.
	Fail func(step string) error
}

// Harness is what the suite needs to know about one runtime.
type Harness struct {
	// Open opens the runtime on the harness's state. After a Close the suite
	// opens it again, as another daemon would.
	Open func(t testing.TB, o Options) sandbox.Runtime
	// Image is the path of an EROFS image with a busybox in /bin.
	Image string
	// Left names everything of the runtime that is on the host: processes,
	// cgroups, files, sockets, network slots. Of every machine with id "".
	Left func(t testing.TB, id string) []string
	// Processes are the host pids of a machine.
	Processes func(t testing.TB, id string) []int
	// Network drops the network slots of machines for which live is false, as
	// the network does when a daemon starts.
	Network func(t testing.TB, live func(id string) bool)
}

// Factory makes a harness with state of its own, removed when t ends.
type Factory func(t *testing.T) *Harness

// Suite checks every promise of the interface. Each subtest has a harness of its
// own, so that what one leaves is not another's fault.
func Suite(t *testing.T, f Factory) {
	for _, c := range []struct {
		name string
		test func(*testing.T, *Harness)
	}{
		{"Features", testFeatures},
		{"Boot", testBoot},
		{"BootTooSmall", testBootTooSmall},
		{"Start", testStart},
		{"StartTwice", testStartTwice},
		{"StartBadImage", testStartBadImage},
		{"WrongKey", testWrongKey},
		{"ExitStatus", testExitStatus},
		{"Usage", testUsage},
		{"KillBusy", testKillBusy},
		{"DiesByItself", testDies},
		{"Remove", testRemove},
		{"Adopt", testAdopt},
		{"AdoptUnknown", testAdoptUnknown},
		{"AdoptDead", testAdoptDead},
		{"Reconcile", testReconcile},
		{"LimitsInside", testLimitsInside},
		{"OOM", testOOM},
		{"Pool", testPool},
		{"PoolMemberDies", testPoolMemberDies},
		{"Many", testMany},
		{"BootCancelled", testBootCancelled},
		{"StartCancelled", testStartCancelled},
		{"BootFails", testBootFails},
		{"StartFails", testStartFails},
		{"RemoveFails", testRemoveFails},
		{"BootAndUndoFail", testBootAndUndoFail},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			h := f(t)
			t.Cleanup(func() { h.nothing(t, "at the end") }) // after the test's own clean-ups
			c.test(t, h)
		})
	}
}

// Resources of the machines of the suite.
var Resources = sandbox.Resources{
	CPURequest: 10, CPULimit: 2000, MemoryRequest: 16 << 20, MemoryLimit: 256 << 20, Disk: 256 << 20, Pids: 256,
}

// limit is for everything that should not take long; the machines that run these
// tests are busy.
const limit = 90 * time.Second
