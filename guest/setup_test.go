package guest_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/guest"
	"vivarium/guest/wire"
	"vivarium/sandbox"
)

// What process 1 is told to write is there before the first exec, and its key
// is nowhere to be seen.
func TestSetup(t *testing.T) {
	t.Parallel()
	etc := t.TempDir()
	os.Chmod(etc, 0o755)
	os.Symlink("/no/such/stub", etc+"/resolv.conf")
	env, err := guest.Environ(1, guest.NewKey(), &wire.Setup{Hostname: "tank", Hosts: "127.0.0.1 localhost tank\n", ResolvConf: "nameserver 192.0.2.1\n", MachineID: strings.Repeat("a", 32), Dirs: []string{"/etc/made/below"}}, false)
	if err != nil {
		t.Fatal(err)
	}
	b := start(t, append(env[2:], "VIV_TEST_ETC="+etc)...)
	r := b.sh("hostname; cat /etc/hostname /etc/hosts /etc/resolv.conf /etc/machine-id; echo; stat -c %F /etc/made/below; env")
	if want := "tank\ntank\n127.0.0.1 localhost tank\nnameserver 192.0.2.1\n" + strings.Repeat("a", 32) + "\ndirectory\n"; !strings.HasPrefix(r.out, want) {
		t.Fatalf("%q, want %q", r.out, want)
	}
	if strings.Contains(r.out, "VIV_GUEST") || !strings.Contains(r.out, "HOSTNAME=tank\n") {
		t.Fatalf("environment: %q", r.out)
	}
	for i := 0; ; i++ { // it is removed soon after the start
		seen, err := os.ReadFile("/proc/" + strconv.Itoa(b.pid) + "/environ")
		if err != nil || !bytes.Contains(seen, []byte("VIV_GUEST_KEY=")) {
			t.Fatal(err)
		}
		if !bytes.Contains(seen, []byte(hex.EncodeToString(b.key))) {
			break
		}
		if i == 300 {
			t.Fatal("the key can still be read in /proc/1/environ")
		}
		time.Sleep(10 * time.Millisecond)
	}
	if r := b.run(sandbox.ExecSpec{Argv: []string{"cat", "/proc/1/environ", "/proc/1/maps"}, User: "1234"}); r.out != "" || r.st.Code == 0 {
		t.Fatalf("%+v", r)
	}
	if err := b.SetHostname(b.ctx(), "pond"); err != nil {
		t.Fatal(err)
	}
	if r := b.sh("hostname; cat /etc/hostname"); r.out != "pond\npond\n" {
		t.Fatalf("%+v", r)
	}
	if err := b.Prepare(b.ctx(), wire.Setup{Hosts: strings.Repeat("x", 40<<10)}); !errors.Is(err, sandbox.Invalid) {
		t.Fatal(err)
	}
}

// D1: what is dropped nothing in the sandbox has, nor gets by a setuid program,
// and the guest can still start commands and do file operations as any user.
// It may be told twice, as after the daemon was restarted.
func TestDropCaps(t *testing.T) {
	t.Parallel()
	b := start(t)
	var all []int
	for c := 0; c <= unix.CAP_LAST_CAP; c++ {
		if set, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, uintptr(c), 0, 0, 0); err == nil && set == 1 {
			all = append(all, c)
		}
	}
	if len(all) < 20 {
		t.Skip("this process has few capabilities itself")
	}
	for range 2 {
		if err := b.Prepare(b.ctx(), wire.Setup{DropCaps: all}); err != nil {
			t.Fatal(err)
		}
	}
	os.WriteFile(b.tmp+"/mine", []byte("x"), 0o600)
	os.Chown(b.tmp+"/mine", 1234, 1234)
	grep, err := exec.LookPath("grep")
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(grep)
	if err != nil {
		t.Fatal(err)
	}
	os.WriteFile(b.tmp+"/setuid", raw, 0o755)
	os.Chmod(b.tmp+"/setuid", 0o755|os.ModeSetuid)
	const zero, none = "0000000000000000", "CapInh:\t0\nCapPrm:\t0\nCapEff:\t0\nCapBnd:\t0\nCapAmb:\t0\n"
	for _, c := range []struct{ prog, user, ids string }{
		{grep, "", "Uid:\t0\t0\t0\t0\n"}, {grep, "1234:5", "Uid:\t1234\t1234\t1234\t1234\n"}, {b.tmp + "/setuid", "1234:5", "Uid:\t1234\t0\t0\t0\n"},
	} {
		r := b.run(sandbox.ExecSpec{Argv: []string{c.prog, "-E", "^(Uid|Cap)", "/proc/self/status"}, User: c.user})
		if got := strings.ReplaceAll(r.out, zero, "0"); got != c.ids+none {
			t.Errorf("%s as %q: %q, %v", c.prog, c.user, got, r.st)
		}
	}
	// root without CAP_DAC_OVERRIDE
	if r := b.sh("cat " + b.tmp + "/mine"); r.st.Code == 0 {
		t.Errorf("root reads another user's file: %+v", r)
	}
	if _, err := b.WriteFile(b.ctx(), "1234", b.tmp+"/made", strings.NewReader("x"), guest.WriteOptions{}); err != nil {
		t.Error(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(b.tmp+"/made", &st); err != nil || st.Uid != 1234 {
		t.Error(st.Uid, err)
	}
	s, err := b.StartExec(b.ctx(), newID(), sandbox.ExecSpec{Argv: []string{"sleep", "1000"}, User: "1234"})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Signal(int(unix.SIGTERM)); err != nil {
		t.Fatal(err)
	}
	if r := collect(t, s); r.st.Signal != int(unix.SIGTERM) {
		t.Errorf("%+v", r)
	}
	var keeps uint64
	for _, c := range wire.KeptCaps {
		keeps |= 1 << c
	}
	status, err := os.ReadFile("/proc/" + strconv.Itoa(b.pid) + "/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if f := strings.Fields(line); f[0] == "CapEff:" || f[0] == "CapPrm:" {
			if n, err := strconv.ParseUint(f[1], 16, 64); err != nil || n&^keeps != 0 || n&(1<<unix.CAP_SETUID) == 0 {
				t.Errorf("the guest has %s %s", f[0], f[1])
			}
		}
	}
}

func TestXattrs(t *testing.T) {
	t.Parallel()
	b := start(t)
	os.WriteFile(b.tmp+"/f", nil, 0o600)
	if unix.Setxattr(b.tmp+"/f", "user.a", []byte("x"), 0) != nil {
		t.Skip("no extended attributes here")
	}
	var l []wire.Xattr
	for range 100 {
		l = append(l, wire.Xattr{Path: b.tmp + "/f", Name: "user.b", Value: strings.Repeat("v", 1000)})
	}
	l = append(l, wire.Xattr{Path: b.tmp + "/none", Name: "user.b", Value: "x"}, wire.Xattr{Path: b.tmp + "/f", Name: "user.c", Value: "\x00last"})
	if err := b.SetXattrs(b.ctx(), l); !errors.Is(err, sandbox.NotFound) {
		t.Fatal(err)
	}
	v := make([]byte, 10)
	if n, err := unix.Getxattr(b.tmp+"/f", "user.c", v); err != nil || string(v[:n]) != "\x00last" {
		t.Fatal(n, err)
	}
}

// Execs that nobody has collected are listed, kept, and can be ended.
func TestListExecs(t *testing.T) {
	t.Parallel()
	b := start(t)
	for _, id := range []string{"b", "a"} {
		s, err := b.StartExec(b.ctx(), id, sandbox.ExecSpec{Argv: []string{"sh", "-c", "echo $0; [ $0 = a ] || exec sleep 1000", id}})
		if err != nil {
			t.Fatal(err)
		}
		for f, err := s.Recv(); f.Stream == 0; f, err = s.Recv() {
			if err != nil {
				t.Fatal(err)
			}
		}
		if id == "a" {
			if f, err := s.Recv(); err != nil || f.Exit == nil {
				t.Fatalf("%v %+v", err, f)
			}
		}
		s.Close()
	}
	l, err := b.ListExecs(b.ctx())
	if err != nil || len(l) != 2 || l[0].ID != "a" || !l[0].Exited || l[0].StdoutLen != 2 || l[1].Exited || l[1].PID <= 1 {
		t.Fatalf("%+v %v", l, err)
	}
	if err := b.Signal(b.ctx(), "b", 15); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"a", "b"} {
		s, err := b.AttachExec(b.ctx(), id, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		if r := collect(t, s); r.out != id+"\n" || id == "b" && r.st.Signal != 15 {
			t.Fatalf("%+v", r)
		}
	}
	for i := 0; ; i++ { // it is forgotten a little later
		if err := b.Signal(b.ctx(), "b", 15); errors.Is(err, sandbox.NotFound) {
			break
		} else if err != nil || i == 300 {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}
