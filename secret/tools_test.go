package secret

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// insideVar is set in a child that makes its mount namespace look like a sandbox
// (the variable's folder over /etc and /usr/local) and turns into a tool.
const insideVar = "VIV_SECRET_TEST_INSIDE"

// goVar makes the child a client in Go, for a URL.
const goVar = "VIV_SECRET_TEST_GO"

func TestMain(m *testing.M) {
	if url := os.Getenv(goVar); url != "" && os.Getenv(insideVar) == "" {
		goClient(url)
	}
	dir := os.Getenv(insideVar)
	if dir == "" {
		os.Exit(m.Run())
	}
	os.Unsetenv(insideVar)
	for _, p := range []string{"/etc", "/usr/local"} {
		opts := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s", p, dir+"/upper"+p, dir+"/scratch"+p)
		if err := unix.Mount("overlay", p, "overlay", 0, opts); err != nil {
			fmt.Fprintf(os.Stderr, "mount %s: %v\n", p, err)
			os.Exit(125)
		}
	}
	err := syscall.Exec(os.Args[1], os.Args[1:], os.Environ())
	fmt.Fprintf(os.Stderr, "exec %s: %v\n", os.Args[1], err)
	os.Exit(125)
}

// goClient is how a program in Go trusts what its system does.
func goClient(url string) {
	c := http.Client{Timeout: 20 * time.Second}
	r, err := c.Get(url)
	if err == nil {
		_, err = io.Copy(os.Stdout, r.Body)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

const (
	pythonClient   = "import sys,requests; sys.stdout.write(requests.get(sys.argv[1],timeout=20).text)"
	pythonStandard = "import sys,urllib.request as u; sys.stdout.write(u.urlopen(sys.argv[1],timeout=20).read().decode())"
	nodeClient     = "require('https').get(process.argv[1],r=>r.pipe(process.stdout)).on('error',e=>{console.error(e);process.exit(1)})"
	javaClient     = `public class T { public static void main(String[] a) throws Exception {
	System.out.write(java.net.URI.create(a[0]).toURL().openStream().readAllBytes()); System.out.flush(); } }`
)

const reply = "hello from the bound host"

// judge is a server that shows certificates of a sandbox's CA for whatever host.
type judge struct {
	port string
	mu   sync.Mutex
	seen map[string]int // requests by host; guarded by mu
}

func (j *judge) count(host string) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.seen[host]
}

func newJudge(t *testing.T, b *Binding) *judge {
	j := &judge{seen: map[string]int{}}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h, _, _ := net.SplitHostPort(r.Host)
		j.mu.Lock()
		j.seen[h]++
		j.mu.Unlock()
		if strings.HasSuffix(r.URL.Path, "/info/refs") { // gitprotocol-http(5)
			w.Header().Set("Content-Type", "application/x-git-upload-pack-advertisement")
			line := strings.Repeat("a", 40) + " refs/heads/main\x00agent=x\n"
			fmt.Fprintf(w, "001e# service=git-upload-pack\n0000%04x%s0000", len(line)+4, line)
			return
		}
		io.WriteString(w, reply)
	}))
	s.TLS = &tls.Config{GetCertificate: func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
		if c, err := b.Certificate(h.ServerName); err == nil {
			return c, nil
		}
		return b.ca.issue(h.ServerName, time.Now()) // as somebody who stole the key
	}}
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.EnableHTTP2 = true
	s.StartTLS()
	t.Cleanup(s.Close)
	_, j.port, _ = net.SplitHostPort(s.Listener.Addr().String())
	return j
}

// sandboxed are folders that have what is put inside.
func sandboxed(t *testing.T, b *Binding, change map[string][]byte) (dir string, env map[string]string) {
	t.Helper()
	dir = t.TempDir()
	read := func(p string) ([]byte, error) {
		if d, ok := change[p]; ok {
			return d, nil
		}
		f, err := os.Open(p)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		return io.ReadAll(io.LimitReader(f, MaxTrustFile+1))
	}
	tr, err := b.TrustFiles(Inside{Read: read})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range tr.Skipped {
		t.Logf("skipped %s", s)
	}
	hosts := "127.0.0.1 localhost " + strings.Join(append(boundHosts, unboundHosts...), " ") + "\n"
	for _, f := range append(tr.Files, File{"/etc/hosts", 0o644, []byte(hosts)}) {
		if !strings.HasPrefix(f.Path, "/etc/") && !strings.HasPrefix(f.Path, "/usr/local/") {
			if real, err := filepath.EvalSymlinks(f.Path); err == nil && strings.HasPrefix(real, "/etc/") {
				continue // a link to one that is there
			}
			t.Fatalf("%s is not covered by this test", f.Path)
		}
		p := dir + "/upper" + f.Path
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, f.Data, f.Mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{"/upper/etc", "/upper/usr/local", "/scratch/etc", "/scratch/usr/local"} {
		if err := os.MkdirAll(dir+d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir, tr.Env
}

var (
	boundHosts   = []string{"api.bound.example", "x.y.wild.example"}
	unboundHosts = []string{"api.unbound.example", "bound.example"}
)

// run runs a tool there.
func run(t *testing.T, dir string, env map[string]string, args []string) (string, error) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "LANG=C.UTF-8", insideVar + "=" + dir, "GIT_CONFIG_NOSYSTEM=1"}
	for k, v := range env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	cmd.Stdin = strings.NewReader("")
	cmd.Dir = dir
	timer := time.AfterFunc(time.Minute, func() {
		if cmd.Process != nil {
			cmd.Process.Kill()
		}
	})
	defer timer.Stop()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	return out.String(), err
}

// Part 6 of issue 3: the tools inside accept the CA for bound hosts, and for no
// others even if its key were stolen.
func TestTools(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it mounts over /etc in a namespace of its own")
	}
	b := bound(t, "api.bound.example", "*.wild.example")
	j := newJudge(t, b)
	dir, env := sandboxed(t, b, nil)
	if out, err := run(t, dir, nil, []string{"/bin/true"}); err != nil {
		t.Skipf("this host cannot mount over /etc: %v: %s", err, out)
	}
	path := func(t *testing.T, tool string) string {
		p, err := exec.LookPath(tool)
		if err != nil {
			t.Skipf("no %s here", tool)
		}
		return p
	}
	python := func(t *testing.T, module string) string {
		out, err := exec.Command(path(t, "python3"), "-c", "import sys,"+module+"; print(sys.executable)").Output()
		if err != nil {
			t.Skipf("no python3 with %s here", module)
		}
		return strings.TrimSpace(string(out))
	}
	java := func(home string) func(*testing.T, string) []string {
		return func(t *testing.T, url string) []string {
			bin := filepath.Join(home, "bin/java")
			if _, err := os.Stat(filepath.Join(home, "bin/javac")); err != nil {
				t.Skip("no Java compiler here")
			}
			src := filepath.Join(t.TempDir(), "T.java")
			if err := os.WriteFile(src, []byte(javaClient), 0o600); err != nil {
				t.Fatal(err)
			}
			return []string{bin, "-XX:TieredStopAtLevel=1", src, url}
		}
	}
	type tool struct {
		name  string
		args  func(t *testing.T, url string) []string
		env   map[string]string
		reply string
	}
	tools := []tool{
		{"curl", func(t *testing.T, u string) []string { return []string{path(t, "curl"), "-sS", "-m20", u} }, env, reply},
		{"curl by system", func(t *testing.T, u string) []string { return []string{path(t, "curl"), "-sS", "-m20", u} }, nil, reply},
		{"wget by system", func(t *testing.T, u string) []string {
			return []string{path(t, "wget"), "-q", "-T20", "-t1", "-O-", u}
		}, nil, reply},
		{"git", func(t *testing.T, u string) []string { return []string{path(t, "git"), "ls-remote", u} }, env, "refs/heads/main"},
		{"git by system", func(t *testing.T, u string) []string { return []string{path(t, "git"), "ls-remote", u} }, nil, "refs/heads/main"},
		{"openssl by hash", func(t *testing.T, u string) []string {
			at := strings.TrimSuffix(strings.TrimPrefix(u, "https://"), "/")
			h, _, _ := strings.Cut(at, ":")
			return []string{path(t, "openssl"), "s_client", "-no-CAfile", "-no-CAstore", "-CApath", "/etc/ssl/certs", "-verify_return_error", "-verify_hostname", h, "-servername", h, "-connect", at}
		}, nil, "Verify return code: 0 (ok)"},
		{"python requests", func(t *testing.T, u string) []string { return []string{python(t, "requests"), "-c", pythonClient, u} }, env, reply},
		{"python by system", func(t *testing.T, u string) []string {
			return []string{python(t, "ssl"), "-c", pythonStandard, u}
		}, nil, reply},
		{"node", func(t *testing.T, u string) []string { return []string{path(t, "node"), "-e", nodeClient, u} }, env, reply},
		{"go", func(t *testing.T, u string) []string { self, _ := os.Executable(); return []string{self} }, env, reply},
		{"go by system", func(t *testing.T, u string) []string { self, _ := os.Executable(); return []string{self} }, nil, reply},
	}
	homes, _ := filepath.Glob("/usr/lib/jvm/*/bin/java")
	done := map[string]bool{}
	for _, h := range homes {
		real, err := filepath.EvalSymlinks(filepath.Dir(filepath.Dir(h)))
		if err != nil || done[real] {
			continue
		}
		done[real] = true
		tools = append(tools, tool{filepath.Base(real), java(real), env, reply})
	}
	if len(done) == 0 {
		t.Log("no Java here")
	}
	for _, tl := range tools {
		t.Run(tl.name, func(t *testing.T) {
			t.Parallel()
			hosts := append(append([]string{}, boundHosts...), unboundHosts...)
			if strings.Contains(tl.name, "jdk") { // they take their time
				hosts = hosts[1:3]
			}
			for _, h := range hosts {
				u := "https://" + h + ":" + j.port + "/"
				args := tl.args(t, u)
				e := map[string]string{}
				for k, v := range tl.env {
					e[k] = v
				}
				// each tool into its own folders: an overlay's are used by one at a time
				d := t.TempDir()
				if err := os.CopyFS(d+"/upper", os.DirFS(dir+"/upper")); err != nil {
					t.Fatal(err)
				}
				for _, w := range []string{"/scratch/etc", "/scratch/usr/local", "/upper/usr/local"} {
					if err := os.MkdirAll(d+w, 0o755); err != nil {
						t.Fatal(err)
					}
				}
				if strings.HasPrefix(tl.name, "go") {
					e[goVar] = u
				}
				out, err := run(t, d, e, args)
				if strings.Contains(h, ".bound.") || strings.Contains(h, ".wild.") {
					if err != nil || !strings.Contains(out, tl.reply) {
						t.Errorf("%s is refused: %v: %s", h, err, out)
					}
				} else if err == nil || strings.Contains(out, tl.reply) {
					t.Errorf("%s is accepted: %s", h, out)
				}
			}
		})
	}
	t.Cleanup(func() {
		for _, h := range unboundHosts {
			if n := j.count(h); n > 0 {
				t.Errorf("%d requests to %s, which the CA must not vouch for", n, h)
			}
		}
	})
}

// The same with a PKCS #12 without a password, as Java brings since 18.
func TestJavaPKCS12(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it mounts over /etc in a namespace of its own")
	}
	const cacerts = "/etc/ssl/certs/java/cacerts"
	bin, err := exec.LookPath("java")
	if err != nil {
		t.Skip("no java here")
	}
	real, _ := filepath.EvalSymlinks(bin)
	if at, err := filepath.EvalSymlinks(filepath.Join(filepath.Dir(real), "../lib/security/cacerts")); err != nil || at != cacerts {
		t.Skip("java here has its CAs elsewhere")
	}
	if _, err := exec.LookPath("javac"); err != nil {
		t.Skip("no Java compiler here")
	}
	b := bound(t, "api.bound.example")
	j := newJudge(t, b)
	store := keytool(t, "-storetype", "PKCS12", "-J-Dkeystore.pkcs12.certProtectionAlgorithm=NONE", "-J-Dkeystore.pkcs12.macAlgorithm=NONE")
	src := filepath.Join(t.TempDir(), "T.java")
	if err := os.WriteFile(src, []byte(javaClient), 0o600); err != nil {
		t.Fatal(err)
	}
	for h, ok := range map[string]bool{"api.bound.example": true, "api.unbound.example": false} {
		dir, env := sandboxed(t, b, map[string][]byte{cacerts: store})
		out, err := run(t, dir, env, []string{real, "-XX:TieredStopAtLevel=1", src, "https://" + h + ":" + j.port + "/"})
		if got := err == nil && strings.Contains(out, reply); got != ok {
			t.Errorf("%s: %v: %s", h, err, out)
		}
	}
}
