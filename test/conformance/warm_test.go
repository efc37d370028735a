package conformance

import (
	"fmt"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	v1 "vivarium/api/vivarium/v1"
)

// TestWarm asks for the same image again and again, so that sandboxes come from
// machines whose guest was started before anyone knew whose it would be: D1, D9
// and the sandbox's own names hold for them as for all.
func TestWarm(t *testing.T) {
	l := newLabWith(t, strings.Replace(labConfig, "pool: {size: 0}", "pool: {size: 4}", 1))
	for i := range 10 {
		drop, want := []string(nil), uint64(docker)
		disk := int64(512 * mib)
		switch i {
		case 7:
			drop, want = []string{"ALL"}, 0
		case 8:
			drop, want = []string{"SETPCAP"}, docker&^(1<<unix.CAP_SETPCAP)
		case 9:
			disk = 128 * mib
		}
		t.Run(fmt.Sprint("D01D09Sandbox", i), func(t *testing.T) {
			eventually(t, "the pool is full", func() bool {
				info, err := l.Client.Info(within(t))
				return err == nil && info.PoolReady == 4
			})
			name := fmt.Sprint("warm-", i)
			b := l.box(t, func(s *v1.SandboxSpec) {
				s.Name, s.Resources.Disk, s.Capabilities = name, disk, &v1.Capabilities{Drop: drop}
			})
			got := b.caps("")
			for _, set := range []string{"CapEff", "CapPrm", "CapBnd"} {
				if got[set] != want {
					t.Errorf("%s %x, want %x", set, got[set], want)
				}
			}
			if s := b.sh("hostname; cat /etc/hostname; uname -n"); s != name+"\n"+name+"\n"+name {
				t.Errorf("names %q", s)
			}
			if s := b.sh("cat /etc/hosts"); !strings.Contains(s, name) || !strings.Contains(s, "127.0.0.1\tlocalhost") {
				t.Errorf("hosts %q", s)
			}
			if s := b.sh("df -k / | awk 'END{print $(NF-4)*1024}'; df -k /tmp | awk 'END{print $(NF-4)*1024}'; awk '/^MemTotal/{print $2*1024}' /proc/meminfo; ulimit -u"); s != fmt.Sprintf("%d\n%d\n%d\n128", disk, disk, 256*mib) {
				t.Errorf("limits %q", s)
			}
			if s := b.sh("grep -c SYS_ADMIN /proc/1/status; cat /proc/1/environ 2>/dev/null | tr '\\0' '\\n' | grep -c KEY; ls -A /tmp /root | grep -vc :; true"); !strings.HasPrefix(s, "0\n0") {
				t.Errorf("traces of another: %q", s)
			}
			if i%2 == 0 {
				b.sh("echo data >/mine; echo data >/tmp/mine")
			} else if s := b.sh("ls /mine /tmp/mine 2>/dev/null; true"); s != "" {
				t.Errorf("what another sandbox wrote: %q", s)
			}
		})
	}
}
