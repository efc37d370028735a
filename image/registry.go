package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"vivarium/sandbox"
)

// accepted are the manifests we read.
var accepted = strings.Join([]string{
	string(types.OCIManifestSchema1), string(types.DockerManifestSchema2),
	string(types.OCIImageIndex), string(types.DockerManifestList),
}, ", ")

// attempts is how often a request is made before it counts as failed, waiting
// 0.2 and 0.6 seconds in between.
const attempts = 3

var backoff = transport.Backoff{Duration: 200 * time.Millisecond, Factor: 3, Jitter: 0.1, Steps: attempts}

// repo is one repository at one registry or mirror, with credentials at hand.
type repo struct {
	name   name.Repository
	scheme string
	client *http.Client
	stall  time.Duration
}

// openRepo asks the registry how to authenticate, and does, within four times
// the stall limit. auth nil takes it from keys.
func (s *Store) openRepo(ctx context.Context, n name.Repository, rt http.RoundTripper, keys authn.Keychain, auth authn.Authenticator) (*repo, error) {
	if auth == nil {
		var err error
		if auth, err = authn.Resolve(ctx, keys, n); err != nil {
			return nil, sandbox.Denied.Errorf("find credentials for %s: %w", n.RegistryStr(), err).
				WithHint("check Docker's configuration and its credential helpers")
		}
	}
	retry := transport.NewRetry(rt, transport.WithRetryBackoff(backoff),
		transport.WithRetryPredicate(temporary),
		transport.WithRetryStatusCodes(http.StatusRequestTimeout, http.StatusTooManyRequests, http.StatusInternalServerError,
			http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout))
	ctx, cancel := context.WithTimeout(ctx, 4*s.opt.Stall)
	defer cancel()
	t, err := transport.NewWithContext(ctx, n.Registry, auth, retry, []string{n.Scope(transport.PullScope)})
	if err != nil {
		return nil, err
	}
	r := &repo{name: n, scheme: "https", stall: s.opt.Stall, client: &http.Client{Transport: t, CheckRedirect: checkRedirect}}
	if plainAllowed(n.RegistryStr(), s.opt.Insecure) {
		r.scheme = "http"
	}
	return r, nil
}

// temporary reports errors that another try may cure.
func temporary(err error) bool {
	var k *sandbox.Error
	if errors.As(err, &k) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	var t interface{ Temporary() bool }
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || isSourceError(err) ||
		errors.As(err, &t) && t.Temporary()
}

func (r *repo) url(kind, id string) string {
	u := url.URL{Scheme: r.scheme, Host: r.name.RegistryStr(), Path: "/v2/" + r.name.RepositoryStr() + "/" + kind + "/" + id}
	return u.String()
}

// manifest fetches a manifest or index by tag or digest and checks its digest.
func (r *repo) manifest(ctx context.Context, id string) ([]byte, types.MediaType, v1.Hash, error) {
	ctx, cancel := context.WithTimeout(ctx, 4*r.stall)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.url("manifests", id), nil)
	if err != nil {
		return nil, "", v1.Hash{}, err
	}
	req.Header.Set("Accept", accepted)
	resp, err := r.client.Do(req)
	if err != nil {
		return nil, "", v1.Hash{}, err
	}
	defer resp.Body.Close()
	if err := transport.CheckError(resp, http.StatusOK); err != nil {
		return nil, "", v1.Hash{}, err
	}
	b, err := readAll(resp.Body, maxManifest, "manifest")
	if err != nil {
		return nil, "", v1.Hash{}, err
	}
	sum := sha256.Sum256(b)
	got := v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum[:])}
	if strings.Contains(id, ":") {
		want, err := sha256Hash(id)
		if err != nil {
			return nil, "", got, err
		}
		if want != got {
			return nil, "", got, sandbox.Invalid.Errorf("manifest is corrupt: its digest is %s, not %s", got, want)
		}
	}
	mt, _, _ := strings.Cut(resp.Header.Get("Content-Type"), ";")
	return b, types.MediaType(strings.TrimSpace(mt)), got, nil
}

func readAll(r io.Reader, limit int64, what string) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, limit+1))
	if err == nil && int64(len(b)) > limit {
		err = sandbox.Invalid.Errorf("%s is larger than %d bytes", what, limit)
	}
	return b, err
}

// blob copies a blob to w and checks size and digest. A connection that breaks
// or stalls is taken up again where it stopped, a few times. tick is told the
// bytes.
func (r *repo) blob(ctx context.Context, d v1.Descriptor, w io.Writer, tick func(int)) error {
	b := &download{h: sha256.New(), w: w, size: d.Size, tick: tick}
	var err error
	for try := 0; try < attempts; {
		before := b.n
		if err = r.fetch(ctx, d, b); err == nil || !temporary(err) || ctx.Err() != nil {
			break
		}
		if try++; b.n > before {
			try = 1 // it moves
		}
		if b.resumes++; b.resumes > 100 {
			break
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Duration(try) * 200 * time.Millisecond):
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return err
	}
	if got := hex.EncodeToString(b.h.Sum(nil)); got != d.Digest.Hex {
		return sandbox.Invalid.Errorf("layer or config is corrupt: its digest is sha256:%s, not %s", got, d.Digest)
	}
	return nil
}

// download is the state of a blob that survives a broken connection.
type download struct {
	h       hash.Hash
	w       io.Writer
	n, size int64
	tick    func(int)
	resumes int
	whole   bool  // ask for all of it and skip what is there
	wErr    error // of w, which no retry cures
}

func (d *download) Write(p []byte) (int, error) {
	if d.n+int64(len(p)) > d.size {
		d.wErr = sandbox.Invalid.Errorf("layer or config is corrupt: it is longer than the %d bytes that the manifest says", d.size)
		return 0, d.wErr
	}
	n, err := d.w.Write(p)
	d.h.Write(p[:n])
	d.n += int64(n)
	if d.tick != nil {
		d.tick(n)
	}
	d.wErr = err
	return n, err
}

// fetch makes one request for the rest of a blob.
func (r *repo) fetch(ctx context.Context, desc v1.Descriptor, d *download) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.url("blobs", desc.Digest.String()), nil)
	if err != nil {
		return err
	}
	if d.n > 0 && !d.whole {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-%d", d.n, d.size-1))
	}
	timer := time.AfterFunc(r.stall, func() { cancel(errStalled) })
	defer timer.Stop()
	resp, err := r.client.Do(req)
	if err != nil {
		return stallCause(ctx, err)
	}
	body := &stallReader{r: resp.Body, timer: timer, stall: r.stall}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusRequestedRangeNotSatisfiable && !d.whole {
		d.whole = true // it does not do ranges; read it again from the start
		return errStalled
	}
	resp.Body = readCloser{body, resp.Body}
	if err := transport.CheckError(resp, http.StatusOK, http.StatusPartialContent); err != nil {
		return stallCause(ctx, err)
	}
	skip := d.n
	if resp.StatusCode == http.StatusPartialContent {
		var from int64
		if _, err := fmt.Sscanf(resp.Header.Get("Content-Range"), "bytes %d-", &from); err != nil || from != d.n {
			return sandbox.Unavailable.Errorf("registry answers with the wrong range")
		}
		skip = 0
	}
	if _, err := io.CopyN(io.Discard, body, skip); err != nil {
		return stallCause(ctx, unexpected(err))
	}
	if _, err := io.CopyBuffer(d, body, make([]byte, 128<<10)); err != nil {
		if d.wErr != nil {
			return permanent{d.wErr}
		}
		return stallCause(ctx, err)
	}
	if d.n < d.size {
		// A body that ends cleanly but early.
		return io.ErrUnexpectedEOF
	}
	return nil
}

type readCloser struct {
	io.Reader
	io.Closer
}

// permanent marks an error of our own side as not worth another try, since an
// errno in it would look like one of the connection.
type permanent struct{ err error }

func (p permanent) Error() string { return p.err.Error() }
func (p permanent) Unwrap() error { return kinded(p.err, "write layer") }

func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

// stalled is a connection that says nothing.
type stalled struct{}

func (stalled) Error() string   { return "the registry stopped sending" }
func (stalled) Temporary() bool { return true }

var errStalled error = stalled{}

func stallCause(ctx context.Context, err error) error {
	if context.Cause(ctx) == errStalled {
		return errStalled
	}
	return err
}

// stallReader puts off a timer whenever bytes come.
type stallReader struct {
	r     io.Reader
	timer *time.Timer
	stall time.Duration
}

func (s *stallReader) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if n > 0 {
		s.timer.Reset(s.stall)
	}
	return n, err
}
