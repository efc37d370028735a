package spawn

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// The sentry starts like that of any other caller: told to be rootless, it would
// keep capabilities (F1).
func TestSentryArgs(t *testing.T) {
	t.Parallel()
	got := SentryArgs([]string{"runsc-sandbox", "--network=sandbox", "--rootless=true", "--rootless", "boot", "--bundle=/x", "id"})
	if want := []string{"runsc-sandbox", "--network=sandbox", "boot", "--bundle=/x", "id"}; !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	conf, err := newConfig(Request{Sockets: "/s", PanicLog: "/p"})
	if err != nil {
		t.Fatal(err)
	}
	flags := conf.ToFlags()
	cleaned := SentryArgs(flags)
	if !conf.Rootless || len(cleaned) != len(flags)-1 || strings.Contains(strings.Join(cleaned, " "), "rootless") {
		t.Errorf("of %q it sees %q", flags, cleaned)
	}
}

// ids are those of the calling thread, and its effective capabilities.
func ids(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/status", unix.Gettid()))
	if err != nil {
		t.Fatal(err)
	}
	var s []string
	for line := range strings.Lines(string(b)) {
		for _, k := range []string{"Uid:", "Gid:", "CapEff:"} {
			if strings.HasPrefix(line, k) {
				s = append(s, strings.Join(strings.Fields(line)[1:], " "))
			}
		}
	}
	return strings.Join(s, "|")
}

func TestAs(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it becomes other users")
	}
	before := ids(t)
	root := strings.Split(before, "|")
	cut := errors.New("cut")
	for _, want := range []error{nil, cut} {
		err := as(2_000_300_007, func() error {
			if got := ids(t); got != "2000300007 0 0 0|2000300007 0 0 0|"+root[2] {
				t.Errorf("as another user: %s", got)
			}
			other := make(chan string)
			go func() { other <- ids(t) }()
			if got := <-other; got != before {
				t.Errorf("another thread meanwhile: %s", got)
			}
			return want
		})
		if !errors.Is(err, want) {
			t.Errorf("got %v, want %v", err, want)
		}
		if got := ids(t); got != before {
			t.Errorf("afterwards: %s", got)
		}
	}
	for _, id := range []int{0, -1} {
		if err := as(id, func() error { t.Errorf("ran as %d", id); return nil }); err == nil {
			t.Errorf("became user %d", id)
		}
	}
}
