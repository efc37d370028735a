package bench

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/client"
	"vivarium/sandbox"
	"vivarium/server/native/fake"
)

// testHost is a network namespace in place of the host's.
func testHost(t *testing.T) *namespace {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	n, err := newNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.close)
	return n
}

// The world's servers give and take what the sender asks for, from each of the
// places that are compared, and only one world is made at a time.
func TestWorld(t *testing.T) {
	t.Parallel()
	host := testHost(t)
	w, err := openWorld(host)
	if err != nil {
		t.Fatal(err)
	}
	defer w.shut()
	if _, err := openWorld(host); !errors.Is(err, sandbox.Conflict) {
		t.Errorf("a second one: %v", err)
	}
	const n = 3<<20 + 17
	for name, from := range map[string]struct {
		ns   *namespace
		addr func(int) string
	}{
		"host":  {host, func(p int) string { return address(worldAddr, p) }},
		"plain": {w.plain, worldPlain.addr},
		"stack": {w.stack, worldStack.addr},
	} {
		web, secure, raw := netTarget{Addr: from.addr(portHTTP)}, netTarget{Addr: from.addr(portTLSDirect), TLS: true}, netTarget{Addr: from.addr(portRaw)}
		jobs := []netJob{{Connect: &netConnect{Targets: []netTarget{web, secure}, N: 4, Warm: 1}}}
		for _, m := range []netMove{{netTarget: raw, Raw: true}, {netTarget: web}, {netTarget: secure}} {
			for _, down := range []bool{false, true} {
				m.Down, m.Bytes = down, n
				jobs = append(jobs, netJob{Move: &m})
			}
		}
		arg, err := json.Marshal(jobs)
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := from.ns.do(func() error { return NetPeer(t.Context(), string(arg), &out) }); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if _, err := decodeDone(out.Bytes(), jobs); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}

	for _, network := range []string{"udp", "tcp"} {
		var c net.Conn
		if err := host.do(func() (err error) {
			c, err = net.Dial(network, address(worldAddr, 53))
			return err
		}); err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conn := &dns.Conn{Conn: c}
		for q, want := range map[string]string{"x." + worldZone + ".": worldAddr.String(), "example.com.": ""} {
			m, _, err := new(dns.Client).ExchangeWithConn(new(dns.Msg).SetQuestion(q, dns.TypeA), conn)
			if err != nil {
				t.Fatal(err)
			}
			got := ""
			for _, a := range m.Answer {
				got += a.(*dns.A).A.String()
			}
			if got != want || (want == "") != (m.Rcode == dns.RcodeNameError) {
				t.Errorf("%s over %s: %q, code %d", q, network, got, m.Rcode)
			}
		}
	}

	w.shut()
	if err := host.do(func() error {
		all, err := net.Interfaces()
		if len(all) != 1 {
			t.Errorf("left: %v", all)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

func TestNetPeerRefuses(t *testing.T) {
	t.Parallel()
	for name, arg := range map[string]string{
		"form":         "[",
		"nothing":      `[{}]`,
		"both":         `[{"move":{"addr":"127.0.0.1:1","bytes":1},"connect":{"n":1}}]`,
		"no bytes":     `[{"move":{"addr":"127.0.0.1:1"}}]`,
		"many bytes":   fmt.Sprintf(`[{"move":{"addr":"127.0.0.1:1","bytes":%d}}]`, int64(maxBulk)+1),
		"many":         fmt.Sprintf(`[{"connect":{"n":%d}}]`, maxConnects+1),
		"less warm":    `[{"connect":{"n":5,"warm":-6}}]`,
		"many jobs":    "[" + strings.Repeat(`{},`, maxJobs) + "{}]",
		"name no port": `[{"move":{"name":"x.example","addr":"x","bytes":1}}]`,
	} {
		if err := NetPeer(t.Context(), arg, io.Discard); !errors.Is(err, sandbox.Invalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := NetPeer(t.Context(), `[{"move":{"addr":"127.0.0.1:1","bytes":1}}]`, io.Discard); !errors.Is(err, sandbox.Unavailable) {
		t.Errorf("nobody listens: %v", err)
	}
}

// What comes out of the sandbox is not believed to have the form of a result.
func TestDecodeDone(t *testing.T) {
	t.Parallel()
	jobs := []netJob{{Move: &netMove{}}, {Connect: &netConnect{Targets: make([]netTarget, 2), N: 2}}}
	if _, err := decodeDone([]byte(`[{"move":5},{"connect":[[1,2],[3,4]],"resolve":[5]}]`), jobs); err != nil {
		t.Error(err)
	}
	for _, s := range []string{
		``, `{}`, `[]`, `[{"move":5}]`, `[{"move":0},{"connect":[[1,2],[3,4]]}]`, `[{"move":-1},{"connect":[[1,2],[3,4]]}]`,
		`[{"move":5},{"connect":[[1,2]]}]`, `[{"move":5},{"connect":[[1,2],[3]]}]`, `[{"move":5},{"connect":[[1,2],[3,0]]}]`, `[{"move":5},{"connect":null}]`,
	} {
		if d, err := decodeDone([]byte(s), jobs); err == nil {
			t.Errorf("%s is read as %+v", s, d)
		}
	}
}

func FuzzDecodeDone(f *testing.F) {
	f.Add([]byte(`[{"move":5},{"connect":[[1,2],[3,4]]}]`))
	jobs := []netJob{{Move: &netMove{}}, {Connect: &netConnect{Targets: make([]netTarget, 2), N: 2}}}
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := decodeDone(b, jobs)
		if err == nil && (d[0].Move <= 0 || len(d[1].Connect[1]) != 2) {
			t.Fatalf("%+v", d)
		}
	})
}

// A daemon that is not set up for it is told what it needs.
func TestNetNotGranted(t *testing.T) {
	t.Parallel()
	host := testHost(t)
	n := fake.Serve(t)
	c, err := client.New(n.HTTP, n.Admin)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	if _, err := c.LoadImage(t.Context(), &v1.LoadImageRequest{Tag: "img"}, strings.NewReader("")); err != nil {
		t.Fatal(err)
	}
	_, err = Measure(t.Context(), Options{Bench: "net", N: 1, Image: "img", Server: n.HTTP, Token: n.Admin, alone: true, quick: true, host: host})
	if !errors.Is(err, sandbox.Conflict) || !strings.Contains(sandbox.HintOf(err), WorldConfig) {
		t.Errorf("%v, hint %q", err, sandbox.HintOf(err))
	}
}

// The arithmetic of the figures that are promised.
func TestNetReport(t *testing.T) {
	t.Parallel()
	msec := func(x ...float64) (d []time.Duration) {
		for _, f := range x {
			d = append(d, time.Duration(f*float64(time.Millisecond)))
		}
		return d
	}
	b := &netRun{run: &run{Options: Options{N: 1}, res: newResult(Options{Bench: "net", N: 1})},
		peers: []netPeer{{name: "host"}, {name: "runsc"}},
		moved: map[string][]float64{
			"raw_up": {300, 100, 200}, "raw_up host": {400}, "raw_up runsc": {100}, "raw_down": {1}, "raw_down host": {1}, "raw_down runsc": {1},
			"http_up_direct": {100, 200}, "http_up_name": {90, 160}, "http_down_direct": {100}, "http_down_name": {100},
			"tls_up_direct": {100}, "tls_up_name": {85}, "tls_down_direct": {100}, "tls_down_name": {120},
		},
		took: map[string][]time.Duration{
			"connect_public": msec(1), "connect_address": msec(1.5), "connect_direct_of_10": msec(2, 2, 9), "connect_name_of_10": msec(4),
			"connect_name_of_1000": msec(4.25), "connect_direct_tls_of_10": msec(3), "connect_name_tls_of_10": msec(5), "policy_change": msec(20), "network": msec(.5),
		}}
	b.report()
	r := b.res
	if *r.Value != .5 || r.Unit != "ratio" || r.Peers["host"].Ratio != .5 || r.Peers["runsc"] != (Peer{Value: 100, Unit: "MB/s", Ratio: 2}) {
		t.Errorf("%v %s %+v", *r.Value, r.Unit, r.Peers)
	}
	for k, want := range map[string]Detail{
		"proxy": {.8, "ratio"}, "proxy_tls_down": {1.2, "ratio"}, "added_by_address_rule": {.5, "ms"}, "added_by_name_rule": {2, "ms"},
		"added_by_name_rule_tls": {2, "ms"}, "added_by_many_names": {.25, "ms"}, "policy_change_p99": {20, "ms"}, "raw_up": {200, "MB/s"},
	} {
		if r.Details[k] != want {
			t.Errorf("%s is %+v, want %+v", k, r.Details[k], want)
		}
	}
	if r.Stage["network"].P50 != .5 || r.Stage["policy_change"].P50 != 20 {
		t.Errorf("%+v", r.Stage)
	}
	var out bytes.Buffer
	if err := r.WriteText(&out); err != nil || !strings.Contains(out.String(), "100 MB/s") {
		t.Errorf("%v: %s", err, out.String())
	}
}

// The daemon that run.sh starts is set up as we say that it must be.
func TestRunScript(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile("run.sh")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(strings.ReplaceAll(string(b), "\n\t", "\n"), WorldConfig) {
		t.Error("run.sh has another configuration than bench net asks for")
	}
}
