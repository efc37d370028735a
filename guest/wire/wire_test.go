package wire

import (
	"bytes"
	"errors"
	"io"
	"net"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"vivarium/sandbox"
)

func everything(Type) int { return MaxMessage }

func TestReader(t *testing.T) {
	t.Parallel()
	var all []byte
	sizes := []int{0, 1, 100, readerSize, readerSize + 1, MaxChunk, 3, MaxMessage, 5, MaxData}
	for i, n := range sizes {
		all = AppendFrame(all, Type(i+1), func(b []byte) []byte { return append(b, bytes.Repeat([]byte{byte(i)}, n)...) })
	}
	for name, src := range map[string]io.Reader{
		"whole": bytes.NewReader(all), "byte by byte": iotest.OneByteReader(bytes.NewReader(all)), "halves": iotest.HalfReader(bytes.NewReader(all)),
		"data with EOF": iotest.DataErrReader(bytes.NewReader(all)),
	} {
		r := NewReader(src, everything)
		for i, n := range sizes {
			ty, p, err := r.Next()
			if err != nil || ty != Type(i+1) || len(p) != n || n > 0 && (p[0] != byte(i) || p[n-1] != byte(i)) {
				t.Fatalf("%s: frame %d: %d %d bytes %v", name, i, ty, len(p), err)
			}
			r.Idle()
		}
		if _, _, err := r.Next(); err != io.EOF {
			t.Fatalf("%s: %v", name, err)
		}
		r.Release()
	}
	for cut := range 12 {
		if cut == 0 || cut == HeaderSize {
			continue
		}
		_, _, err := NewReader(bytes.NewReader(AppendFrame(nil, 1, func(b []byte) []byte { return append(b, "12345678"...) })[:cut]), everything).Next()
		if !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("cut at %d: %v", cut, err)
		}
	}
	// What is too long is refused before it is read or allocated.
	if _, _, err := NewReader(bytes.NewReader([]byte{byte(TAck), 0xff, 0xff, 0xff}), GuestLimit).Next(); err != ErrFrame {
		t.Error(err)
	}
	if _, _, err := NewReader(bytes.NewReader([]byte{99, 0, 0, 0}), HostLimit).Next(); err != ErrFrame {
		t.Error(err)
	}
}

func TestMessages(t *testing.T) {
	t.Parallel()
	s := Start{ID: "x", Argv: []string{"a", ""}, Env: []string{"A=b"}, Workdir: "/", User: "u", Stdin: sandbox.StdinPipe, Output: sandbox.OutputMerged, PTY: &sandbox.WindowSize{Rows: 1, Cols: 65535}, Timeout: time.Hour}
	got, err := DecodeStart(s.Append(nil))
	if err != nil || !reflect.DeepEqual(*got, s) {
		t.Errorf("%+v %v", got, err)
	}
	x := Exit{Status: sandbox.ExitStatus{Code: 127, Error: "no", Kind: sandbox.NotFound}, Stdout: 1, Stderr: 1 << 62, At: time.Unix(1, 2)}
	gx, err := DecodeExit(x.Append(nil))
	if err != nil || !reflect.DeepEqual(gx, x) {
		t.Errorf("%+v %v", gx, err)
	}
	e, err := DecodeError(NewDec(AppendError(nil, sandbox.Exhausted.Errorf("full: %w", io.EOF).WithHint("wait"))))
	if err != nil || e.Kind != sandbox.Exhausted || e.Msg != "full: EOF" || e.Hint != "wait" {
		t.Errorf("%+v %v", e, err)
	}
	// Whatever the other side calls it, there is a kind.
	e, err = DecodeError(NewDec(AppendString(AppendString(AppendString(nil, "strange"), strings.Repeat("m", MaxText)), "")))
	if err != nil || e.Kind != sandbox.Internal {
		t.Errorf("%+v %v", e, err)
	}
	st := Setup{Hostname: "h", Hosts: "1", ResolvConf: "2", MachineID: "3", Dirs: []string{"/a"}}
	if g, err := DecodeSetup(st.Append(nil)); err != nil || !reflect.DeepEqual(g, st) {
		t.Errorf("%+v %v", g, err)
	}
	for m := range uint32(1 << 16) {
		if f := FileMode(m); UnixMode(f) != m&0o7777 {
			t.Fatalf("%o: %o", m, UnixMode(f))
		}
	}
	// A count that the message has no room for allocates nothing.
	d := NewDec(AppendUint(nil, MaxArgs))
	if l := d.Strings(MaxArgs, 10); l != nil || !d.Bad() {
		t.Error(l)
	}
}

func TestHandshake(t *testing.T) {
	t.Parallel()
	key, other := bytes.Repeat([]byte{1}, KeySize), bytes.Repeat([]byte{2}, KeySize)
	run := func(host, guest func(net.Conn) error) (error, error) {
		a, b := net.Pipe()
		a.SetDeadline(time.Now().Add(5 * time.Second))
		b.SetDeadline(time.Now().Add(5 * time.Second))
		ch := make(chan error, 1)
		go func() { ch <- guest(b); b.Close() }()
		err := host(a)
		a.Close()
		return err, <-ch
	}
	host := func(k []byte) func(net.Conn) error { return func(c net.Conn) error { return HostHandshake(c, k) } }
	guest := func(k []byte) func(net.Conn) error { return func(c net.Conn) error { return GuestHandshake(c, k) } }
	if h, g := run(host(key), guest(key)); h != nil || g != nil {
		t.Error(h, g)
	}
	if h, g := run(host(key), guest(other)); !errors.Is(h, ErrAuth) || g == nil {
		t.Error(h, g)
	}
	// One who sends back what he hears proves nothing.
	if h, _ := run(host(key), func(c net.Conn) error {
		b := make([]byte, helloSize)
		io.ReadFull(c, b)
		c.Write(append(b, make([]byte, macSize)...))
		return nil
	}); !errors.Is(h, ErrAuth) {
		t.Error(h)
	}
	if _, g := run(func(c net.Conn) error {
		c.Write(hello(make([]byte, nonceSize)))
		b := make([]byte, replySize)
		io.ReadFull(c, b)
		c.Write(b[helloSize:]) // the guest's own proof
		return nil
	}, guest(key)); !errors.Is(g, ErrAuth) {
		t.Error(g)
	}
	if h, _ := run(host(key), func(c net.Conn) error {
		io.CopyN(io.Discard, c, helloSize)
		b := make([]byte, replySize)
		copy(b, "VIVG\x09")
		c.Write(b)
		return nil
	}); !errors.Is(h, ErrVersion) {
		t.Error(h)
	}
	if h, _ := run(host(key), func(c net.Conn) error {
		io.CopyN(io.Discard, c, helloSize)
		io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n"+strings.Repeat("x", 200))
		return nil
	}); !errors.Is(h, ErrVersion) {
		t.Error(h)
	}
	masked := Mask(key, other, other)
	if bytes.Equal(masked, other) || !bytes.Equal(Mask(key, other, masked), other) {
		t.Error("mask")
	}
}

func TestQueueFlow(t *testing.T) {
	t.Parallel()
	q := NewQueue()
	if err := q.Put(make([]byte, Window)); err != nil {
		t.Fatal(err)
	}
	if err := q.Put([]byte{1}); err == nil {
		t.Fatal("more than the window")
	}
	f := NewFlow()
	got := 0
	for got < Window {
		n, err := f.Wait(Window)
		if err != nil {
			t.Fatal(err)
		}
		got += n
	}
	if f.Credit(AppendInt(nil, Window+1)) == nil {
		t.Fatal("credit for what was not sent")
	}
	f.Credit(AppendInt(nil, 10))
	if n, err := f.Wait(100); n != 10 || err != nil {
		t.Fatal(n, err)
	}
	if f.Credit(AppendInt(nil, 9)) == nil {
		t.Fatal("credit taken back")
	}
}

// seeds are real frames for the fuzz targets.
func seeds(f *testing.F) {
	s := Start{ID: "x", Argv: []string{"a"}, Env: []string{"A=b"}, PTY: &sandbox.WindowSize{}}
	st := Started{PID: 1}
	x := Exit{Status: sandbox.ExitStatus{Code: 1}}
	fi := File{Name: "n", Mode: 0o100644, Target: "t"}
	w := WriteFile{Path: "/x"}
	d := Done{Bytes: 1}
	for ty, fill := range map[Type]func([]byte) []byte{
		TStart: s.Append, TStarted: st.Append, TExit: x.Append, TInfo: fi.Append, TPage: fi.Append, TWrite: w.AppendTo, TDone: d.Append,
		TError: func(b []byte) []byte { return AppendError(b, sandbox.NotFound.Errorf("x")) },
		TEvents: func(b []byte) []byte {
			return AppendEvent(b, sandbox.FileEvent{Op: sandbox.FileRenamed, Path: "a", From: "b"})
		},
		TStdout: func(b []byte) []byte { return append(AppendInt(b, 5), "data"...) },
	} {
		f.Add(AppendFrame(nil, ty, fill))
	}
}

// FuzzHostDecode decodes whatever a guest may send.
func FuzzHostDecode(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		r := NewReader(bytes.NewReader(b), HostLimit)
		flow := NewFlow()
		for {
			ty, p, err := r.Next()
			if err != nil {
				return
			}
			if len(p) > HostLimit(ty) {
				t.Fatal("beyond the limit")
			}
			switch ty {
			case TStarted:
				if s, err := DecodeStarted(p); err == nil && (s.PID < 0 || s.Stdout < 0 || s.Stderr < 0 || s.Stdin < 0) {
					t.Fatalf("%+v", s)
				}
			case TExit:
				if x, err := DecodeExit(p); err == nil && (x.Status.Code < 0 || x.Status.Code > 255 || x.Stdout < 0 || x.Stderr < 0) {
					t.Fatalf("%+v", x)
				}
			case TInfo, TPage:
				for d := NewDec(p); d.More(); {
					if f := d.File(); f.Size < 0 {
						t.Fatalf("%+v", f)
					}
				}
			case TEvents:
				DecodeEvents(p)
			case TDone:
				DecodeDone(p)
			case TError:
				if e, err := DecodeError(NewDec(p)); err == nil && e.Kind == "" {
					t.Fatal("no kind")
				}
			case TCredit:
				flow.Credit(p)
			case TReply:
				DecodePong(p)
				DecodeStats(p)
				DecodeReached(p)
				if l, _, err := DecodeExecs(p); err == nil && len(l)*8 > len(p) {
					t.Fatal("list longer than its message")
				}
			}
		}
	})
}

// FuzzGuestDecode decodes whatever a process inside may send to the guest.
func FuzzGuestDecode(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		r := NewReader(bytes.NewReader(b), GuestLimit)
		for {
			ty, p, err := r.Next()
			if err != nil {
				return
			}
			switch ty {
			case TStart:
				if s, err := DecodeStart(p); err == nil {
					if err := s.Check(); err != nil {
						t.Fatal(err)
					}
					if _, err := DecodeStart(s.Append(nil)); err != nil {
						t.Fatalf("not the same again: %v", err)
					}
				}
			case TAttach:
				DecodeAttach(p)
			case TRead:
				DecodeReadFile(p)
			case TWrite:
				DecodeWriteFile(p)
			case TTarIn:
				DecodeTarIn(p)
			case TList, TWatch, TTarOut, TDial:
				DecodePathOp(p)
			case TCall:
				DecodeSetAttr(p)
				if r, err := DecodeReach(p); err == nil {
					if again, err := DecodeReach(r.Append(nil)); err != nil || again.To != r.To {
						t.Fatalf("not the same again: %+v %v", again, err)
					}
				}
				DecodeSetup(p)
			}
		}
	})
}
