package bench

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"time"

	"vivarium/sandbox"
)

// PeerVerb is the verb below `viv bench` that NetPeer is behind. The bench copies
// the running program into the sandbox and calls it by this name, so that the
// same code sends from everywhere that is compared.
const PeerVerb = "net-peer"

// Bounds of a job, which comes from a command line.
const (
	maxJobs      = 256
	maxConnects  = 100_000
	maxBulk      = 1 << 40
	peerTimeout  = 60 * time.Second // of a connection, or of a transfer's stand-still
	connectPause = 2 * time.Millisecond
)

// netJob is something that the peer does. Exactly one of its parts is set.
type netJob struct {
	Move    *netMove    `json:"move,omitempty"`
	Connect *netConnect `json:"connect,omitempty"`
}

// netMove moves bytes over one connection.
type netMove struct {
	netTarget
	Raw   bool  `json:"raw,omitempty"` // no HTTP
	Down  bool  `json:"down,omitempty"`
	Bytes int64 `json:"bytes"`
}

// netConnect opens connections one after the other, to each target in turn.
type netConnect struct {
	Targets []netTarget `json:"targets"`
	N       int         `json:"n"`              // of each
	Warm    int         `json:"warm,omitempty"` // more of each, not counted
}

// netTarget is a server. An empty Name is one that is reached by its address.
type netTarget struct {
	Addr string `json:"addr"`           // address:port, or :port with Name
	Name string `json:"name,omitempty"` // looked up, and said to the server
	TLS  bool   `json:"tls,omitempty"`
}

// netDone is what came of a job, in nanoseconds.
type netDone struct {
	Move    int64     `json:"move,omitempty"`
	Connect [][]int64 `json:"connect,omitempty"` // by target
	Resolve []int64   `json:"resolve,omitempty"` // all look-ups of the job
}

// NetPeer does the jobs that arg describes and writes what came of them to w. It
// runs inside of a sandbox, for bench net alone.
func NetPeer(ctx context.Context, arg string, w io.Writer) error {
	var jobs []netJob
	if err := json.Unmarshal([]byte(arg), &jobs); err != nil {
		return sandbox.Invalid.Errorf("read jobs: %w", err)
	}
	if len(jobs) > maxJobs {
		return sandbox.Invalid.Errorf("%d jobs are more than %d", len(jobs), maxJobs)
	}
	done := make([]netDone, len(jobs))
	for i, j := range jobs {
		var err error
		switch {
		case j.Move != nil && j.Connect == nil && j.Move.Bytes > 0 && j.Move.Bytes <= maxBulk:
			done[i], err = j.Move.do(ctx)
		case j.Connect != nil && j.Move == nil && j.Connect.N > 0 && j.Connect.N+j.Connect.Warm <= maxConnects && j.Connect.Warm >= 0:
			done[i], err = j.Connect.do(ctx)
		default:
			err = sandbox.Invalid.Errorf("neither bytes to move nor connections to open")
		}
		if err != nil {
			return fmt.Errorf("job %d: %w", i, err)
		}
	}
	return json.NewEncoder(w).Encode(done)
}

// resolve returns the address to dial, and how long the look-up took where there
// was one.
func (t netTarget) resolve(ctx context.Context) (string, time.Duration, error) {
	if t.Name == "" {
		return t.Addr, 0, nil
	}
	_, port, err := net.SplitHostPort(t.Addr)
	if err != nil {
		return "", 0, sandbox.Invalid.Errorf("target: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, peerTimeout)
	defer cancel()
	start := time.Now()
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip4", t.Name+".")
	took := time.Since(start)
	if err != nil {
		return "", 0, sandbox.Unavailable.Errorf("look up %s: %w", t.Name, err)
	}
	if len(ips) == 0 {
		return "", 0, sandbox.Unavailable.Errorf("%s has no address", t.Name)
	}
	return net.JoinHostPort(ips[0].Unmap().String(), port), took, nil
}

// host is what an HTTP request names.
func (t netTarget) host() string {
	if t.Name != "" {
		return t.Name
	}
	return t.Addr
}

// dial connects, and speaks TLS where the target does. The certificate is not
// looked at: it is made for the run, and how it is checked costs the same
// everywhere.
func (t netTarget) dial(ctx context.Context, addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: peerTimeout, KeepAliveConfig: net.KeepAliveConfig{Enable: false}}
	c, err := d.DialContext(ctx, "tcp4", addr)
	if err != nil {
		return nil, sandbox.Unavailable.Errorf("connect: %w", err)
	}
	if !t.TLS {
		return c, nil
	}
	// no tickets: every connection is a whole one
	tc := tls.Client(c, &tls.Config{ServerName: t.Name, InsecureSkipVerify: true, SessionTicketsDisabled: true})
	if err := tc.HandshakeContext(ctx); err != nil {
		c.Close()
		return nil, sandbox.Unavailable.Errorf("connect with TLS: %w", err)
	}
	return tc, nil
}

// do opens the connections. What is timed is a client's wait: connect, one
// request, first byte of the answer.
func (j *netConnect) do(ctx context.Context) (netDone, error) {
	done := netDone{Connect: make([][]int64, len(j.Targets))}
	addrs := make([]string, len(j.Targets))
	for i, t := range j.Targets {
		for range 3 { // one is too few for a median, and every one is a program's wait
			a, took, err := t.resolve(ctx)
			if err != nil {
				return done, err
			}
			addrs[i] = a
			if took > 0 {
				done.Resolve = append(done.Resolve, int64(took))
			}
		}
	}
	for n := range j.N + j.Warm {
		for i, t := range j.Targets {
			took, err := t.once(ctx, addrs[i])
			if err != nil {
				return done, err
			}
			if n >= j.Warm {
				done.Connect[i] = append(done.Connect[i], int64(took))
			}
			// below the rate of new connections that a sandbox has by default
			if err := sleep(ctx, connectPause); err != nil {
				return done, err
			}
		}
	}
	return done, nil
}

func (t netTarget) once(ctx context.Context, addr string) (time.Duration, error) {
	start := time.Now()
	c, err := t.dial(ctx, addr)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	_ = c.SetDeadline(start.Add(peerTimeout)) // fails only on what is closed
	if _, err := io.WriteString(c, "GET /hello HTTP/1.1\r\nHost: "+t.host()+"\r\nConnection: close\r\n\r\n"); err != nil {
		return 0, sandbox.Unavailable.Errorf("send request: %w", err)
	}
	var first [16]byte
	n, err := io.ReadAtLeast(c, first[:], 1)
	took := time.Since(start)
	if err != nil {
		return 0, sandbox.Unavailable.Errorf("read answer: %w", err)
	}
	if !strings.HasPrefix("HTTP/1.1 200 OK\r\n", string(first[:n])) {
		return 0, sandbox.Unavailable.Errorf("the answer begins with %q", first[:n])
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(c, 1<<16)) // it ends first, so that no port of ours waits
	return took, nil
}

// do moves the bytes; timed from the request until the last byte has arrived.
func (m *netMove) do(ctx context.Context) (done netDone, err error) {
	addr, _, err := m.resolve(ctx)
	if err != nil {
		return done, err
	}
	c, err := m.dial(ctx, addr)
	if err != nil {
		return done, err
	}
	defer c.Close()
	start := time.Now()
	_ = c.SetDeadline(start.Add(10 * peerTimeout))
	if _, err := io.WriteString(c, m.head()); err != nil {
		return done, sandbox.Unavailable.Errorf("send request: %w", err)
	}
	if !m.Down {
		if err := fill(c, m.Bytes); err != nil {
			return done, sandbox.Unavailable.Errorf("send: %w", err)
		}
	}
	br := bufio.NewReaderSize(c, 1<<16)
	got := int64(len(okay)) // of a raw answer that is no more than this
	if !m.Raw {
		res, err := http.ReadResponse(br, nil)
		if err != nil {
			return done, sandbox.Unavailable.Errorf("read answer: %w", err)
		}
		if res.StatusCode != http.StatusOK {
			return done, sandbox.Unavailable.Errorf("the answer is %s", res.Status)
		}
		got = res.ContentLength
	} else if m.Down {
		got = m.Bytes
	}
	want := m.Bytes
	if !m.Down {
		want = int64(len(okay))
	}
	if got != want {
		return done, sandbox.Unavailable.Errorf("%d bytes are announced, not %d", got, want)
	}
	if err := drain(br, want); err != nil {
		return done, sandbox.Unavailable.Errorf("receive: %w", err)
	}
	done.Move = int64(time.Since(start))
	return done, nil
}

// okay is what a server says when it has everything.
const okay = "ok"

// head begins a transfer.
func (m *netMove) head() string {
	n := strconv.FormatInt(m.Bytes, 10)
	switch {
	case m.Raw && m.Down:
		return "get " + n + "\n"
	case m.Raw:
		return "put " + n + "\n"
	case m.Down:
		return "GET /bytes/" + n + " HTTP/1.1\r\nHost: " + m.host() + "\r\nConnection: close\r\n\r\n"
	default:
		return "POST /bytes HTTP/1.1\r\nHost: " + m.host() + "\r\nConnection: close\r\nContent-Length: " + n + "\r\n\r\n"
	}
}

// moveBlock is how much is written and read at once.
const moveBlock = 256 << 10

// fill writes n bytes.
func fill(w io.Writer, n int64) error {
	p := newPattern(0).block[:moveBlock]
	for n > 0 {
		k, err := w.Write(p[:min(n, moveBlock)])
		if err != nil {
			return err
		}
		n -= int64(k)
	}
	return nil
}

// drain reads n bytes.
func drain(r io.Reader, n int64) error {
	p := make([]byte, moveBlock)
	for n > 0 {
		k, err := r.Read(p[:min(n, moveBlock)])
		n -= int64(k)
		if err != nil && n > 0 {
			return err
		}
	}
	return nil
}
