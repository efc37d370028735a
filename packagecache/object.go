package packagecache

import (
	"crypto/md5"  //nolint:gosec // the names of by-hash files, besides apt's own check
	"crypto/sha1" //nolint:gosec // dist.shasum of old npm packages
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"fmt"
	"hash"
	"net/url"
	"os"
	"time"
)

// object is one thing that a sandbox may ask for.
type object struct {
	key    string // in the tenant's shelf
	up     *upstream
	url    *url.URL
	accept string // for upstream
	// ttl is how long it is served without asking upstream; forever for what never
	// changes under its name.
	ttl time.Duration
	// fresh, if set, may say that a kept object is as good as upstream's.
	fresh func(*meta) bool
	max   int64 // bytes
	want  digest
	// digests are further hashes to keep.
	digests []string
	// rewrite, if set, turns the whole of what upstream sends into what is kept.
	// from is where it came from in the end. Its error is upstream's fault.
	rewrite func(raw []byte, from *url.URL, contentType string) (out []byte, outType string, err error)
	// check, if set, looks at a whole file before it is kept.
	check func(f *os.File, size int64) (verified string, err error)
	// kept, if set, is told of a file that was kept anew.
	kept func(*meta)
	// lied, if set, is told that want did not hold.
	lied func()
	// next is where to ask when upstream answers 404 or 410.
	next *object
}

const forever = time.Duration(-1)

// digest is what a hash must be; zero: nothing is known.
type digest struct {
	algo string
	hex  string
}

// newHash makes one of the hashes that registries use; nil: it is none.
func newHash(algo string) hash.Hash {
	switch algo {
	case "md5":
		return md5.New() //nolint:gosec // see the import
	case "sha1":
		return sha1.New() //nolint:gosec // see the import
	case "sha256":
		return sha256.New()
	case "sha384":
		return sha512.New384()
	case "sha512":
		return sha512.New()
	}
	return nil
}

// valid says whether d is a hash in lower-case hex of the right length.
func (d digest) valid() bool {
	h := newHash(d.algo)
	if h == nil || len(d.hex) != 2*h.Size() {
		return false
	}
	for _, c := range []byte(d.hex) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

// hashes computes several hashes at once.
type hashes map[string]hash.Hash

func newHashes(o *object) hashes {
	hs := hashes{"sha256": sha256.New()}
	for _, a := range append([]string{o.want.algo}, o.digests...) {
		if hs[a] == nil {
			if h := newHash(a); h != nil {
				hs[a] = h
			}
		}
	}
	return hs
}

func (hs hashes) Write(p []byte) (int, error) {
	for _, h := range hs {
		_, _ = h.Write(p) // never fails
	}
	return len(p), nil
}

func (hs hashes) sum(algo string) string { return hex.EncodeToString(hs[algo].Sum(nil)) }

// failure is an answer that is not the object.
type failure struct {
	status int
	msg    string
}

func (f *failure) Error() string { return fmt.Sprintf("%d: %s", f.status, f.msg) }

func fail(status int, format string, args ...any) *failure {
	return &failure{status, fmt.Sprintf(format, args...)}
}
