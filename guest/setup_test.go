package guest_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"os"
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
