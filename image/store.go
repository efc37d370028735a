package image

import (
	"context"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

const (
	blobDir = "blobs" // finished EROFS files
	tmpDir  = "tmp"   // everything unfinished; emptied by Open
	// touchEvery is how old the recorded time of last use may get before it is
	// written again: a write per start of a sandbox would cost a sync each.
	touchEvery = 10 * time.Minute
	// conversions run at the same time; each keeps a tree in memory.
	conversions = 2
)

// Store keeps images. It is safe for concurrent use; one process at a time may
// have a directory open.
type Store struct {
	opt  Options
	lock *os.File // holds the directory
	db   *db
	work *semaphore.Weighted // conversions
	fly  flights
	free func() (int64, error) // bytes on the disk

	// commit is held while files and rows change together. It is taken before
	// mu.
	commit sync.Mutex

	mu      sync.RWMutex
	tenants map[string]*tenant // guarded by mu
	pulls   map[pull]bool      // guarded by mu
	pins    map[pin]int        // guarded by mu
}

// pin names an image that somebody uses.
type pin struct{ tenant, id string }

// tenant is what one tenant has.
type tenant struct {
	images map[string]*Image // by id; Tags is not kept up to date
	tags   map[string]string // familiar name to id
}

// Open opens the store in opt.Dir, making it if it is missing, and removes
// what a crash left behind: unfinished files, files without a row, rows without
// a file. Errors: Conflict if another process has it open, Internal.
func Open(ctx context.Context, opt Options) (*Store, error) {
	if opt.Keychain == nil {
		opt.Keychain = authn.DefaultKeychain
	}
	if opt.Stall <= 0 {
		opt.Stall = 30 * time.Second
	}
	opt.Limits = opt.Limits.WithDefaults()
	opt.Insecure = append(slices.Clone(opt.Insecure), plainMirrors(opt.Mirrors)...)
	s := &Store{opt: opt, work: semaphore.NewWeighted(conversions), tenants: map[string]*tenant{}, pulls: map[pull]bool{}, pins: map[pin]int{}}
	s.free = s.diskFree
	for _, d := range []string{opt.Dir, s.dir(blobDir), s.dir(tmpDir)} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, kinded(err, "open image store")
		}
	}
	if err := s.checkMirrors(); err != nil {
		return nil, err
	}
	if err := s.takeLock(); err != nil {
		return nil, err
	}
	var err error
	if s.db, err = openDB(ctx, s.dir("images.db")); err == nil {
		err = s.recover(ctx)
	}
	if err != nil {
		s.Close()
		return nil, kinded(err, "open image store")
	}
	return s, nil
}

// takeLock keeps a second process out.
func (s *Store) takeLock() error {
	f, err := os.OpenFile(s.dir("lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return kinded(err, "lock image store")
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return sandbox.Conflict.Errorf("image store %s is open in another process: %w", s.opt.Dir, err).
			WithHint("stop the other daemon, or give this one a data directory of its own")
	}
	s.lock = f
	return nil
}

func (s *Store) dir(elem ...string) string {
	return filepath.Join(append([]string{s.opt.Dir}, elem...)...)
}

// blob returns the path of an image's file with the given suffix.
func (s *Store) blob(id, suffix string) string { return s.dir(blobDir, id+suffix) }

// Close closes the store. Pulls and loads that still run fail.
func (s *Store) Close() error {
	s.fly.stop()
	var err error
	if s.db != nil {
		err = s.db.sql.Close()
	}
	if s.lock != nil {
		s.lock.Close()
	}
	return kinded(err, "close image store")
}

// recover fills the memory from the database and makes the two agree with the
// files.
func (s *Store) recover(ctx context.Context) error {
	if err := emptyDir(s.dir(tmpDir)); err != nil {
		return err
	}
	images, tags, pulls, err := s.db.load(ctx)
	if err != nil {
		return err
	}
	known := map[string]bool{}
	var stmts []stmt
	for _, i := range images {
		i.Path = s.blob(i.ID, ".erofs")
		if i.Xattrs != "" {
			i.Xattrs = s.blob(i.ID, ".xattrs")
		}
		if fi, err := os.Stat(i.Path); err != nil || fi.Size() != i.Size {
			slog.Warn("image file is missing or damaged; the image is forgotten", "image", i.ID, "tenant", i.Tenant, "err", err)
			stmts = append(stmts, deleteImage(i.Tenant, i.ID)...)
			continue
		}
		known[i.ID] = true
		s.tenant(i.Tenant).images[i.ID] = i
	}
	for _, t := range tags {
		if tn := s.tenant(t.Tenant); tn.images[t.ID] != nil {
			tn.tags[t.Name] = t.ID
		}
	}
	for _, p := range pulls {
		if s.tenant(p.Tenant).images[p.ID] != nil {
			s.pulls[p] = true
		}
	}
	if len(stmts) > 0 {
		if err := s.db.apply(ctx, stmts...); err != nil {
			return err
		}
	}
	return s.removeOrphans(known)
}

func (s *Store) removeOrphans(known map[string]bool) error {
	files, err := os.ReadDir(s.dir(blobDir))
	if err != nil {
		return err
	}
	for _, f := range files {
		id, _, _ := strings.Cut(f.Name(), ".")
		if known[id] {
			continue
		}
		slog.Info("remove image file that belongs to no image", "file", f.Name())
		if err := os.Remove(s.dir(blobDir, f.Name())); err != nil {
			return err
		}
	}
	return nil
}

func emptyDir(dir string) error {
	files, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, f := range files {
		if err := os.RemoveAll(filepath.Join(dir, f.Name())); err != nil {
			return err
		}
	}
	return nil
}

// tenant returns a tenant's part, making it. The caller holds mu, or is alone.
func (s *Store) tenant(name string) *tenant {
	t := s.tenants[name]
	if t == nil {
		t = &tenant{images: map[string]*Image{}, tags: map[string]string{}}
		s.tenants[name] = t
	}
	return t
}

// find returns a tenant's image by tag, name@digest, id or unambiguous start
// of an id, and the tag if it was found by one. The caller holds mu.
func (s *Store) find(tenantName, refOrID string) (*Image, string, error) {
	t := s.tenants[tenantName]
	missing := func() (*Image, string, error) {
		return nil, "", sandbox.NotFound.Errorf("no image %q", refOrID).
			WithHint("see the images with viv images; get it with viv pull, viv load or viv image base")
	}
	if isID(refOrID) {
		if t == nil {
			return missing()
		}
		var found *Image
		for id, i := range t.images {
			if strings.HasPrefix(id, refOrID) {
				if found != nil {
					return nil, "", sandbox.Invalid.Errorf("image id %q is ambiguous", refOrID).WithHint("give more of it")
				}
				found = i
			}
		}
		if found == nil {
			return missing()
		}
		return found, "", nil
	}
	r, err := parseRef(refOrID)
	if err != nil {
		return nil, "", err
	}
	if t != nil {
		tag := familiar(r)
		if id, ok := t.tags[tag]; ok {
			return t.images[id], tag, nil
		}
		if d, ok := r.(name.Digest); ok {
			for p := range s.pulls {
				if p.Tenant == tenantName && p.Repo == d.Context().Name() && p.Digest == d.DigestStr() {
					return t.images[p.ID], "", nil
				}
			}
		}
	}
	return missing()
}

// export copies an image for a caller, with its tags. The caller holds mu.
func (s *Store) export(i *Image) *Image {
	c := i.clone()
	c.Tags = nil
	for name, id := range s.tenants[i.Tenant].tags {
		if id == i.ID {
			c.Tags = append(c.Tags, name)
		}
	}
	slices.Sort(c.Tags)
	return c
}

// Get returns one image of a tenant, by tag, name@digest, or id or a part of
// it that is at least six digits long. Errors: NotFound, Invalid.
func (s *Store) Get(_ context.Context, tenant, refOrID string) (*Image, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	i, _, err := s.find(tenant, refOrID)
	if err != nil {
		return nil, err
	}
	return s.export(i), nil
}

// List returns a tenant's images, newest use first.
func (s *Store) List(_ context.Context, tenant string) ([]*Image, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var out []*Image
	if t := s.tenants[tenant]; t != nil {
		for _, i := range t.images {
			out = append(out, s.export(i))
		}
	}
	slices.SortFunc(out, func(a, b *Image) int {
		if c := b.LastUsed.Compare(a.LastUsed); c != 0 {
			return c
		}
		return strings.Compare(a.ID, b.ID)
	})
	return out, nil
}

// Use returns an image and pins its file: until release is called, neither
// Remove nor a collection takes it away. After a restart of the daemon, call
// Use by id for every sandbox that lives before the first collection. release
// may be called more than once. Errors: NotFound, Invalid.
func (s *Store) Use(ctx context.Context, tenant, refOrID string) (img *Image, release func(), err error) {
	s.mu.Lock()
	i, _, err := s.find(tenant, refOrID)
	if err != nil {
		s.mu.Unlock()
		return nil, nil, err
	}
	s.pins[pin{tenant, i.ID}]++
	now := time.Now().UTC()
	touch := now.Sub(i.LastUsed) > touchEvery
	if touch {
		i.LastUsed = now
	}
	img = s.export(i)
	s.mu.Unlock()
	if touch {
		// Only the order of evictions depends on it.
		if err := s.db.apply(ctx, touchImage(tenant, img.ID, now)); err != nil {
			slog.Warn("record use of image", "image", img.ID, "err", err)
		}
	}
	return img, sync.OnceFunc(func() { s.unpin(pin{tenant, img.ID}) }), nil
}

func (s *Store) unpin(p pin) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pins[p]--; s.pins[p] <= 0 {
		delete(s.pins, p)
	}
}

// Tag gives an image of a tenant a further name; the name moves if another
// image had it. Errors: NotFound, Invalid.
func (s *Store) Tag(ctx context.Context, tenant, refOrID, newRef string) error {
	r, err := parseTag(newRef)
	if err != nil {
		return err
	}
	s.commit.Lock()
	defer s.commit.Unlock()
	s.mu.RLock()
	i, _, err := s.find(tenant, refOrID)
	s.mu.RUnlock()
	if err != nil {
		return err
	}
	if err := s.db.apply(ctx, putTag(tenant, r, i.ID)); err != nil {
		return kinded(err, "tag image")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tenant(tenant).tags[r] = i.ID
	return nil
}

// parseTag reads a name that may be given to an image and returns its familiar
// form.
func parseTag(ref string) (string, error) {
	if isID(ref) {
		return "", sandbox.Invalid.Errorf("%q looks like an image id and cannot be a tag", ref)
	}
	r, err := parseRef(ref)
	if err != nil {
		return "", err
	}
	if strings.Contains(ref, "@") {
		return "", sandbox.Invalid.Errorf("%q is a digest and cannot be a tag", ref)
	}
	return familiar(r), nil
}

// Untag takes a name away from its image, which stays. Errors: NotFound,
// Invalid.
func (s *Store) Untag(ctx context.Context, tenant, ref string) error {
	s.commit.Lock()
	defer s.commit.Unlock()
	s.mu.RLock()
	_, tag, err := s.find(tenant, ref)
	s.mu.RUnlock()
	if err != nil {
		return err
	}
	if tag == "" {
		return sandbox.Invalid.Errorf("%q is an id, not a tag", ref)
	}
	if err := s.db.apply(ctx, deleteTag(tenant, tag)); err != nil {
		return kinded(err, "untag image")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.tenant(tenant).tags, tag)
	return nil
}

// Remove removes an image. Named by one of several tags it only loses that
// tag, as with Docker. Errors: NotFound, Invalid, Conflict while it is in use.
func (s *Store) Remove(ctx context.Context, tenant, refOrID string) error {
	s.commit.Lock()
	defer s.commit.Unlock()
	s.mu.RLock()
	i, tag, err := s.find(tenant, refOrID)
	others := 0
	if err == nil && tag != "" {
		for name, id := range s.tenants[tenant].tags {
			if id == i.ID && name != tag && !strings.Contains(name, "@") {
				others++
			}
		}
	}
	s.mu.RUnlock()
	if err != nil {
		return err
	}
	if others > 0 {
		if err := s.db.apply(ctx, deleteTag(tenant, tag)); err != nil {
			return kinded(err, "remove image")
		}
		s.mu.Lock()
		delete(s.tenant(tenant).tags, tag)
		s.mu.Unlock()
		return nil
	}
	_, err = s.drop(ctx, tenant, i.ID, nil)
	return err
}

// drop removes a tenant's image, and its file if no other tenant has it. It
// returns the bytes freed. The caller holds commit.
func (s *Store) drop(ctx context.Context, tenant, id string, inUse func(string) bool) (int64, error) {
	if inUse != nil && inUse(id) {
		return 0, inUseError(id)
	}
	if err := s.fail("remove"); err != nil {
		return 0, err
	}
	s.mu.Lock()
	if s.pins[pin{tenant, id}] > 0 {
		s.mu.Unlock()
		return 0, inUseError(id)
	}
	// Out of memory first, so that nobody can pin it from here on.
	t := s.tenant(tenant)
	i := t.images[id]
	tags := map[string]string{}
	for name, to := range t.tags {
		if to == id {
			tags[name] = to
			delete(t.tags, name)
		}
	}
	delete(t.images, id)
	shared := false
	for _, o := range s.tenants {
		shared = shared || o.images[id] != nil
	}
	s.mu.Unlock()
	if err := s.db.apply(ctx, deleteImage(tenant, id)...); err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		t.images[id] = i
		for name := range tags {
			t.tags[name] = id
		}
		return 0, kinded(err, "remove image")
	}
	s.mu.Lock()
	for p := range s.pulls {
		if p.Tenant == tenant && p.ID == id {
			delete(s.pulls, p)
		}
	}
	s.mu.Unlock()
	if shared {
		return 0, nil
	}
	if err := s.fail("removed-row"); err != nil {
		return 0, err
	}
	for _, suffix := range []string{".erofs", ".xattrs"} {
		if err := os.Remove(s.blob(id, suffix)); err != nil && !os.IsNotExist(err) {
			return 0, kinded(err, "remove image file")
		}
	}
	return i.Disk, nil
}

func inUseError(id string) error {
	return sandbox.Conflict.Errorf("image %s is in use", id).WithHint("stop the sandboxes that use it first")
}

// fail calls the failpoint.
func (s *Store) fail(step string) error {
	if s.opt.Failpoint == nil {
		return nil
	}
	return s.opt.Failpoint(step)
}

// diskUsage returns the bytes that a file takes on disk.
func diskUsage(fi fs.FileInfo) int64 {
	if st, ok := fi.Sys().(*syscall.Stat_t); ok {
		return st.Blocks * 512
	}
	return fi.Size()
}
