// Package forward opens connections into the network stack of a running
// sentry: in this process where the sentry is of this version, else through the
// sentry's own binary.
package forward

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"
	"gvisor.dev/gvisor/runsc/sandbox"

	domain "vivarium/sandbox"
)

// Verb is the argument that makes viv-sentry run Main.
const Verb = "forward"

// socketFD is where Main finds its end of the connection.
const socketFD = 3

// Dial connects to a TCP port on the loopback address inside the sandbox, in
// this process. The sentry holds a lock of its own while it connects, so a
// listener that is slow to accept would hold up other calls to it: ctx bounds
// how long the caller waits, not how long the sentry does.
func Dial(ctx context.Context, sb *sandbox.Sandbox, container string, port uint16) (net.Conn, error) {
	mine, theirs, err := pair()
	if err != nil {
		return nil, err
	}
	done := make(chan error, 1)
	go func() {
		defer theirs.Close()
		done <- request(sb, container, port, theirs)
	}()
	select {
	case err = <-done:
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		mine.Close()
		return nil, domain.Unavailable.Errorf("connect to port %d inside: %w", port, err)
	}
	return conn(mine)
}

func request(sb *sandbox.Sandbox, container string, port uint16, f *os.File) error {
	return sb.PortForward(&boot.PortForwardOpts{ContainerID: container, Port: port, FilePayload: urpc.FilePayload{Files: []*os.File{f}}})
}

// DialWith does the same through the sentry binary at path.
func DialWith(ctx context.Context, path string, sb *sandbox.Sandbox, container string, port uint16) (net.Conn, error) {
	state, err := json.Marshal(sb)
	if err != nil {
		return nil, domain.Internal.Errorf("encode sandbox state: %w", err)
	}
	mine, theirs, err := pair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	cmd := exec.CommandContext(ctx, path, Verb, string(state), container, strconv.Itoa(int(port)))
	cmd.ExtraFiles = []*os.File{theirs}
	if out, err := cmd.CombinedOutput(); err != nil {
		mine.Close()
		return nil, domain.Unavailable.Errorf("connect to port %d inside through %s: %w: %s", port, path, err, out)
	}
	return conn(mine)
}

// Main is DialWith's other half, run by the sentry binary: it hands the socket
// at descriptor 3 to the sentry.
func Main(args []string) error {
	if len(args) != 3 {
		return fmt.Errorf("usage: %s STATE CONTAINER PORT", Verb)
	}
	var sb sandbox.Sandbox
	if err := json.Unmarshal([]byte(args[0]), &sb); err != nil {
		return fmt.Errorf("decode sandbox state: %w", err)
	}
	port, err := strconv.ParseUint(args[2], 10, 16)
	if err != nil {
		return fmt.Errorf("port %q: %w", args[2], err)
	}
	f := os.NewFile(socketFD, "socket")
	defer f.Close()
	return request(&sb, args[1], uint16(port), f)
}

func pair() (mine, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, domain.Exhausted.Errorf("make a socket pair: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "forward"), os.NewFile(uintptr(fds[1]), "forward"), nil
}

func conn(f *os.File) (net.Conn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, domain.Internal.Errorf("use forwarded socket: %w", err)
	}
	return c, nil
}
