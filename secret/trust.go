package secret

import (
	"bytes"
	"encoding/pem"
	"errors"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"vivarium/sandbox"
)

// File is to be written inside a sandbox, whole, with the mode and as root; its
// folders are made where they are missing (0755).
type File struct {
	Path string
	Mode fs.FileMode
	Data []byte
}

// Inside is what TrustFiles looks at in a sandbox. All of it is hostile.
type Inside struct {
	// Read reads a file, at most MaxTrustFile bytes of it and an error if there is
	// more. fs.ErrNotExist or NotFound: there is none.
	Read func(path string) ([]byte, error)
	// Env is the environment of the image and of the sandbox's spec. Where it has
	// a variable for a bundle of its own, that file gets the CA and the variable
	// stays.
	Env map[string]string
	// Roots are certificates in PEM for an image that has none at all; nil:
	// HostRoots.
	Roots []byte
}

// MaxTrustFile bounds each file that is read. The largest bundles in use have
// some 600 KiB.
const MaxTrustFile = 4 << 20

// Trust is what makes a sandbox trust its CA.
type Trust struct {
	Files []File
	// Env is for every process, below the environment of image, spec and exec.
	Env map[string]string
	// Skipped says of files that could not be changed why not: not errors, for the
	// image is the tenant's.
	Skipped []string
}

// Files that are ours alone.
const (
	debianAnchor = "/usr/local/share/ca-certificates/vivarium.crt" // for update-ca-certificates
	fedoraAnchor = "/etc/pki/ca-trust/source/anchors/vivarium.crt" // for update-ca-trust
	ownBundle    = "/usr/local/share/vivarium/ca-bundle.pem"
	certsDir     = "/etc/ssl/certs" // OpenSSL's CApath on Debian, Alpine, Fedora
)

// bundles are where systems keep all CAs in one file. What is a link on one system
// is the file itself on another; with both, each gets the same.
var bundles = []string{
	"/etc/ssl/certs/ca-certificates.crt",                // Debian, Alpine, Arch, Gentoo
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", // Fedora, RHEL
	"/etc/pki/tls/certs/ca-bundle.crt",                  // the same, older
	"/var/lib/ca-certificates/ca-bundle.pem",            // SUSE
	"/etc/ssl/ca-bundle.pem",                            // the same, older
	"/etc/ssl/cert.pem",                                 // Alpine, BSD habits
}

// keystores are where Java runtimes keep theirs. $JAVA_HOME comes before them.
var keystores = []string{
	"/etc/ssl/certs/java/cacerts",              // Debian; its JDKs link to it
	"/etc/pki/ca-trust/extracted/java/cacerts", // Fedora; likewise
	"/var/lib/ca-certificates/java-cacerts",    // SUSE; likewise
	"/usr/lib/jvm/default-jvm/lib/security/cacerts",
	"/usr/lib/jvm/default-java/lib/security/cacerts",
	"/opt/java/openjdk/lib/security/cacerts",
	"/opt/java/lib/security/cacerts",
}

// bundleVars name a file that takes the place of a program's own CAs.
var bundleVars = []string{
	"SSL_CERT_FILE",      // OpenSSL, Go, Ruby, uv, httpx
	"CURL_CA_BUNDLE",     // curl built with bundle of its own
	"GIT_SSL_CAINFO",     // git
	"REQUESTS_CA_BUNDLE", // Python requests, which brings certifi's
	"PIP_CERT",           // pip, likewise
	"AWS_CA_BUNDLE",      // AWS's tools, likewise
	"CARGO_HTTP_CAINFO",  // cargo
	"NIX_SSL_CERT_FILE",  // programs built by Nix
	"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
}

// nodeVar names a file with CAs besides those that Node and Bun bring.
const nodeVar = "NODE_EXTRA_CA_CERTS"

// denoVar makes Deno take the system's besides its own.
const denoVar, denoStores = "DENO_TLS_CA_STORE", "mozilla,system"

// The lines around the CA in a bundle: text outside of PEM blocks is ignored.
const (
	beginMark = "# begin: CA of this sandbox, by vivarium"
	endMark   = "# end: CA of this sandbox, by vivarium\n"
	joined    = " (no newline before)" // the file's last line had none
	wholeMark = "# made by vivarium: the image has no CA certificates, so these are its host's\n"
)

// TrustFiles says what to put inside so that curl, git, Python, Node, Go and Java
// accept the sandbox's CA, at its creation and again after a restore. Nothing if
// there are no hosts.
func (b *Binding) TrustFiles(in Inside) (Trust, error) {
	if b.ca == nil {
		return Trust{}, nil
	}
	return trustFiles(b.CA(), in)
}

// trustFiles is TrustFiles for a CA in PEM.
func trustFiles(ca []byte, in Inside) (Trust, error) {
	block, _ := pem.Decode(ca)
	if block == nil {
		return Trust{}, sandbox.Internal.Errorf("trust CA inside: no certificate")
	}
	t := Trust{Env: map[string]string{}}
	seen := map[string]bool{}
	// each reads a file once and changes it.
	each := func(p string, change func([]byte) ([]byte, error)) (bool, error) {
		if seen[p] {
			return true, nil
		}
		old, err := in.Read(p)
		switch {
		case missing(err):
			return false, nil
		case err != nil && fatal(err):
			return false, sandbox.KindOf(err).Errorf("trust CA inside: read %s: %w", p, err)
		case err == nil && len(old) > MaxTrustFile:
			err = errors.New("it is too large")
		case err == nil && len(old) == 0: // made by touch: as good as none
			return false, nil
		}
		seen[p] = true
		var data []byte
		if err == nil {
			data, err = change(old)
		}
		if err != nil {
			t.Skipped = append(t.Skipped, p+": "+clip(err.Error()))
			return false, nil
		}
		t.Files = append(t.Files, File{p, 0o644, data})
		return true, nil
	}
	inBundle := func(old []byte) ([]byte, error) { return appendCA(old, ca), nil }

	main := ""
	for _, p := range bundles {
		ok, err := each(p, inBundle)
		if err != nil {
			return Trust{}, err
		}
		if ok && main == "" {
			main = p
		}
	}
	if main == "" {
		// Our CA alone would make programs refuse every other host.
		if main = bundles[0]; seen[main] { // it is there, and is not to be touched
			main = ownBundle
		}
		roots := in.Roots
		if roots == nil {
			roots = HostRoots()
		}
		t.Files = append(t.Files, File{main, 0o644, appendCA(append([]byte(wholeMark), roots...), ca)})
		seen[main] = true
	}
	for _, v := range append(slices.Clone(bundleVars), nodeVar) {
		p := in.Env[v]
		if p == "" {
			t.Env[v] = main
			if v == nodeVar {
				t.Env[v] = debianAnchor
			}
			continue
		}
		if !path.IsAbs(p) || len(p) > 4096 || path.Clean(p) != p || p == debianAnchor {
			continue
		}
		if _, err := each(p, inBundle); err != nil {
			return Trust{}, err
		}
	}
	if in.Env[denoVar] == "" {
		t.Env[denoVar] = denoStores
	}
	t.Files = append(t.Files, File{debianAnchor, 0o644, ca})
	if slices.ContainsFunc(t.Files, func(f File) bool { return strings.HasPrefix(f.Path, "/etc/pki/") }) {
		t.Files = append(t.Files, File{fedoraAnchor, 0o644, ca})
	}
	if name, err := hashName(block.Bytes); err == nil {
		t.Files = append(t.Files, File{certsDir + "/" + name, 0o644, ca})
	}
	for _, p := range stores(in.Env) {
		if _, err := each(p, func(old []byte) ([]byte, error) { return addToKeystore(old, block.Bytes) }); err != nil {
			return Trust{}, err
		}
	}
	return t, nil
}

// stores are the keystores to look for.
func stores(env map[string]string) []string {
	all := slices.Clone(keystores)
	if home := env["JAVA_HOME"]; path.IsAbs(home) && len(home) < 4096 {
		all = append(all, path.Join(home, "lib/security/cacerts"), path.Join(home, "jre/lib/security/cacerts"))
	}
	return all
}

func missing(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, sandbox.NotFound)
}

// fatal says that reading failed for a reason that is not the file's.
func fatal(err error) bool {
	k := sandbox.KindOf(err)
	return k == sandbox.Unavailable || k == sandbox.Timeout || k == sandbox.Gone
}

// HostRoots are the CAs of this host, in PEM; nil if it has none that can be found.
func HostRoots() []byte {
	for _, p := range bundles {
		if b, err := os.ReadFile(p); err == nil && len(b) > 0 && len(b) <= MaxTrustFile {
			return stripCA(b)
		}
	}
	return nil
}

// appendCA puts ca at the end of a bundle, in place of one that is there.
func appendCA(bundle, ca []byte) []byte {
	out := stripCA(bundle)
	mark := beginMark
	if n := len(out); n > 0 && out[n-1] != '\n' {
		mark = "\n" + mark + joined
	}
	return slices.Concat(out, []byte(mark+"\n"), ca, []byte(endMark))
}

// stripCA undoes appendCA. It returns a new slice.
func stripCA(bundle []byte) []byte {
	var out []byte
	for {
		i := bytes.Index(bundle, []byte(beginMark))
		if i < 0 {
			break
		}
		j := bytes.Index(bundle[i:], []byte(endMark))
		if j < 0 {
			break
		}
		head := bundle[:i]
		if bytes.HasPrefix(bundle[i+len(beginMark):], []byte(joined)) {
			head = bytes.TrimSuffix(head, []byte("\n"))
		}
		out = append(out, head...)
		bundle = bundle[i+j+len(endMark):]
	}
	return append(out, bundle...)
}

// Strip says how to take the CA out again, before a snapshot: files to write and
// files to remove. What is inside by then counts, whoever wrote it; in.Roots does
// not matter.
func (b *Binding) Strip(in Inside) (write []File, remove []string, err error) {
	if b.ca == nil {
		return nil, nil, nil
	}
	remove = []string{debianAnchor, fedoraAnchor}
	if name, err := hashName(b.ca.root.Raw); err == nil {
		remove = append(remove, certsDir+"/"+name)
	}
	remove = append(remove, ownBundle)
	paths := slices.Concat(bundles, stores(in.Env))
	for _, v := range append(slices.Clone(bundleVars), nodeVar) {
		if p := in.Env[v]; path.IsAbs(p) && path.Clean(p) == p && len(p) <= 4096 {
			paths = append(paths, p)
		}
	}
	slices.Sort(paths)
	for _, p := range slices.Compact(paths) {
		if slices.Contains(remove, p) {
			continue
		}
		old, err := in.Read(p)
		if missing(err) || err == nil && (len(old) == 0 || len(old) > MaxTrustFile) {
			continue
		}
		if err != nil {
			if fatal(err) {
				return nil, nil, sandbox.KindOf(err).Errorf("strip CA inside: read %s: %w", p, err)
			}
			continue
		}
		if bytes.HasPrefix(old, []byte(wholeMark)) {
			remove = append(remove, p)
			continue
		}
		data := stripCA(old)
		if isKeystore(old) {
			if data, err = stripKeystore(old); err != nil {
				continue // then it was not changed either
			}
		}
		if !bytes.Equal(data, old) {
			write = append(write, File{p, 0o644, data})
		}
	}
	return write, remove, nil
}
