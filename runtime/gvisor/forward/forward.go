// Package forward opens connections into the network stack of a running
// sentry: in this process where the sentry is of this version, else through the
// sentry's own binary.
package forward

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/boot"

	"vivarium/runtime/gvisor/control"
	"vivarium/sandbox"
)

// Verb is the argument that makes viv-sentry run Main.
const Verb = "forward"

// socketFD is where Main finds its end of the connection.
const socketFD = 3

// mainTimeout bounds Main.
const mainTimeout = 10 * time.Second

// Dial connects to a TCP port on the loopback address inside the sandbox whose
// control socket is at path. The sentry holds a lock of its own while it
// connects, so a listener that is slow to accept holds up other calls to it.
func Dial(ctx context.Context, path, container string, port uint16) (net.Conn, error) {
	mine, theirs, err := pair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	if err := request(ctx, path, container, port, theirs); err != nil {
		mine.Close()
		return nil, err
	}
	return conn(mine)
}

func request(ctx context.Context, path, container string, port uint16, f *os.File) error {
	err := control.Call(ctx, path, boot.ContMgrPortForward, &boot.PortForwardOpts{ContainerID: container, Port: port}, []*os.File{f})
	if err != nil {
		return sandbox.Unavailable.Errorf("connect to port %d inside: %w", port, err)
	}
	return nil
}

// DialWith does the same through the sentry binary at bin.
func DialWith(ctx context.Context, bin, path, container string, port uint16) (net.Conn, error) {
	mine, theirs, err := pair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	cmd := exec.CommandContext(ctx, bin, Verb, path, container, strconv.Itoa(int(port)))
	cmd.ExtraFiles = []*os.File{theirs}
	if out, err := cmd.CombinedOutput(); err != nil {
		mine.Close()
		return nil, sandbox.Unavailable.Errorf("connect to port %d inside through %s: %w: %s", port, bin, err, out)
	}
	return conn(mine)
}

// Main is DialWith's other half, run by the sentry binary: it hands the socket
// at descriptor 3 to the sentry.
func Main(args []string) error {
	if len(args) != 3 {
		return fmt.Errorf("usage: %s SOCKET CONTAINER PORT", Verb)
	}
	port, err := strconv.ParseUint(args[2], 10, 16)
	if err != nil {
		return fmt.Errorf("port %q: %w", args[2], err)
	}
	f := os.NewFile(socketFD, "socket")
	defer f.Close()
	ctx, cancel := context.WithTimeout(context.Background(), mainTimeout)
	defer cancel()
	return request(ctx, args[0], args[1], uint16(port), f)
}

func pair() (mine, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, sandbox.Exhausted.Errorf("make a socket pair: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "forward"), os.NewFile(uintptr(fds[1]), "forward"), nil
}

func conn(f *os.File) (net.Conn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, sandbox.Internal.Errorf("use forwarded socket: %w", err)
	}
	return c, nil
}
