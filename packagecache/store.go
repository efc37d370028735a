package packagecache

import (
	"container/list"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"vivarium/sandbox"
)

// meta is what is kept of an object besides its bytes.
type meta struct {
	Key      string            `json:"key"`
	URL      string            `json:"url"`
	Type     string            `json:"type,omitempty"`
	Encoding string            `json:"encoding,omitempty"` // as upstream has it; the bytes are never decoded
	Modified string            `json:"modified,omitempty"` // upstream's Last-Modified
	ETag     string            `json:"etag,omitempty"`     // upstream's
	Fetched  time.Time         `json:"fetched"`            // or last confirmed
	Sum      string            `json:"sum"`                // SHA-256 in hex: the name of its bytes
	Size     int64             `json:"size"`
	Digests  map[string]string `json:"digests,omitempty"` // further hashes, in hex, by name
	Verified string            `json:"verified,omitempty"`
}

const (
	maxRefFile  = 64 << 10
	maxObjects  = 1 << 20 // of all tenants; what remembers them takes about 1 KB each
	touchPeriod = time.Minute
)

// ref is an object that a tenant has. Guarded by disk.mu; meta is replaced, never
// changed.
type ref struct {
	t       *shelf
	meta    *meta
	touched time.Time
	elem    *list.Element
}

// blob is the bytes of one or more objects.
type blob struct {
	size int64
	refs int
}

// shelf is what one tenant has.
type shelf struct {
	d     *disk
	dir   string
	refs  map[string]*ref
	blobs map[string]*blob
	lru   *list.List // of *ref, front: used last
	used  int64      // bytes of disk

	negative map[string]miss
	flights  map[string]*flight // guarded by Cache.mu
	slots    chan struct{}
	sumdbs   map[string]bool // names of checksum databases
}

type miss struct {
	status int
	until  time.Time
}

// disk keeps all shelves within the budget.
type disk struct {
	root   string
	budget int64
	lock   *os.File
	slots  int

	mu        sync.Mutex
	shelves   map[string]*shelf
	used      int64 // with what is being written
	objects   int
	evictions int64
}

// onDisk rounds a size up to what a file takes.
func onDisk(size int64) int64 { return (size + 4095) &^ 4095 }

// cost of an object beyond its bytes: the file that describes it.
const refCost = 4096

// openDisk reads what an earlier process kept and removes what it did not
// finish.
func openDisk(root string, budget int64, slots int) (*disk, error) {
	if err := os.MkdirAll(root, 0o700); err != nil {
		return nil, sandbox.Internal.Errorf("make package cache: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(root, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, sandbox.Internal.Errorf("open package cache: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = lock.Close()
		return nil, sandbox.Conflict.Errorf("open package cache %s: another process has it", root)
	}
	d := &disk{root: root, budget: budget, lock: lock, slots: slots, shelves: map[string]*shelf{}}
	dirs, err := os.ReadDir(root)
	if err != nil {
		_ = lock.Close()
		return nil, sandbox.Internal.Errorf("read package cache: %w", err)
	}
	for _, e := range dirs {
		if !e.IsDir() || len(e.Name()) != 32 {
			continue
		}
		s, err := d.load(e.Name())
		if err != nil {
			_ = lock.Close()
			return nil, sandbox.Internal.Errorf("read package cache: %w", err)
		}
		d.shelves[e.Name()] = s
	}
	d.mu.Lock()
	d.evict(0)
	d.mu.Unlock()
	return d, nil
}

// shelf of a tenant, made if it is not there.
func (d *disk) shelf(tenant string) (*shelf, error) {
	sum := sha256.Sum256([]byte(tenant))
	name := hex.EncodeToString(sum[:16])
	d.mu.Lock()
	defer d.mu.Unlock()
	if s := d.shelves[name]; s != nil {
		return s, nil
	}
	s, err := d.load(name)
	if err != nil {
		return nil, err
	}
	d.shelves[name] = s
	return s, nil
}

// load reads a shelf. Precondition: nobody uses it.
func (d *disk) load(name string) (*shelf, error) {
	s := &shelf{d: d, dir: filepath.Join(d.root, name), refs: map[string]*ref{}, blobs: map[string]*blob{}, lru: list.New(),
		negative: map[string]miss{}, flights: map[string]*flight{}, slots: make(chan struct{}, d.slots), sumdbs: map[string]bool{}}
	if err := os.RemoveAll(filepath.Join(s.dir, "tmp")); err != nil {
		return nil, err
	}
	for _, sub := range []string{"", "tmp", "blob", "ref"} {
		if err := os.MkdirAll(filepath.Join(s.dir, sub), 0o700); err != nil {
			return nil, err
		}
	}
	sizes := map[string]int64{}
	blobs, err := os.ReadDir(filepath.Join(s.dir, "blob"))
	if err != nil {
		return nil, err
	}
	for _, e := range blobs {
		if fi, err := e.Info(); err == nil && fi.Mode().IsRegular() {
			sizes[e.Name()] = fi.Size()
		}
	}
	refs, err := os.ReadDir(filepath.Join(s.dir, "ref"))
	if err != nil {
		return nil, err
	}
	var found []*ref
	for _, e := range refs {
		p := filepath.Join(s.dir, "ref", e.Name())
		m, used, err := readRef(p)
		if err != nil || refName(m.Key) != e.Name() {
			_ = os.RemoveAll(p)
			continue
		}
		if size, ok := sizes[m.Sum]; !ok || size != m.Size {
			_ = os.Remove(p)
			continue
		}
		found = append(found, &ref{t: s, meta: m, touched: used})
	}
	slices.SortFunc(found, func(a, b *ref) int { return a.touched.Compare(b.touched) })
	for _, r := range found {
		d.link(r)
	}
	for name := range sizes {
		if s.blobs[name] == nil {
			_ = os.Remove(filepath.Join(s.dir, "blob", name))
		}
	}
	return s, nil
}

func readRef(p string) (*meta, time.Time, error) {
	fi, err := os.Lstat(p)
	if err != nil {
		return nil, time.Time{}, err
	}
	if !fi.Mode().IsRegular() || fi.Size() > maxRefFile {
		return nil, time.Time{}, fs.ErrInvalid
	}
	b, err := os.ReadFile(p)
	if err != nil {
		return nil, time.Time{}, err
	}
	m := &meta{}
	if err := json.Unmarshal(b, m); err != nil {
		return nil, time.Time{}, err
	}
	return m, fi.ModTime(), nil
}

func refName(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

// link counts r in, as the one used last. Precondition: d.mu is held, or nobody
// uses the shelf.
func (d *disk) link(r *ref) {
	s := r.t
	b := s.blobs[r.meta.Sum]
	if b == nil {
		b = &blob{size: r.meta.Size}
		s.blobs[r.meta.Sum] = b
		s.add(onDisk(b.size))
	}
	b.refs++
	s.add(refCost)
	d.objects++
	s.refs[r.meta.Key] = r
	r.elem = s.lru.PushFront(r)
}

func (s *shelf) add(n int64) {
	s.used += n
	s.d.used += n
}

// unlink forgets r, and its bytes if nothing else has them. files says whether
// to remove them from the disk too. Precondition: d.mu is held.
func (d *disk) unlink(r *ref, files bool) {
	s := r.t
	if s.refs[r.meta.Key] != r {
		return
	}
	delete(s.refs, r.meta.Key)
	s.lru.Remove(r.elem)
	s.add(-refCost)
	d.objects--
	if files {
		_ = os.Remove(s.refPath(r.meta.Key))
	}
	b := s.blobs[r.meta.Sum]
	if b.refs--; b.refs == 0 {
		delete(s.blobs, r.meta.Sum)
		s.add(-onDisk(b.size))
		_ = os.Remove(s.blobPath(r.meta.Sum))
	}
}

func (s *shelf) refPath(key string) string  { return filepath.Join(s.dir, "ref", refName(key)) }
func (s *shelf) blobPath(sum string) string { return filepath.Join(s.dir, "blob", sum) }

// evict makes room for more bytes. The tenant that has most gives: one that
// fetches much cannot push out what others have. Precondition: d.mu is held.
func (d *disk) evict(more int64) {
	for d.used+more > d.budget || d.objects > maxObjects {
		var most *shelf
		for _, s := range d.shelves {
			if s.lru.Len() > 0 && (most == nil || s.used > most.used) {
				most = s
			}
		}
		if most == nil {
			return
		}
		d.unlink(most.lru.Back().Value.(*ref), true)
		d.evictions++
	}
}

// get returns what is kept under a key and counts it as used.
func (s *shelf) get(key string) *meta {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	r := s.refs[key]
	if r == nil {
		return nil
	}
	s.lru.MoveToFront(r.elem)
	if now := time.Now(); now.Sub(r.touched) > touchPeriod {
		r.touched = now
		_ = os.Chtimes(s.refPath(key), now, now) // the order after a restart; no more than that
	}
	return r.meta
}

// peek is get without counting.
func (s *shelf) peek(key string) *meta {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	if r := s.refs[key]; r != nil {
		return r.meta
	}
	return nil
}

// open opens the bytes of an object, which stay readable whatever is evicted.
func (s *shelf) open(m *meta) (*os.File, error) {
	f, err := os.Open(s.blobPath(m.Sum))
	if err == nil {
		return f, nil
	}
	if errors.Is(err, fs.ErrNotExist) {
		s.drop(m) // somebody else removed it
	}
	return nil, err
}

// drop forgets an object if it is still that.
func (s *shelf) drop(m *meta) {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	if r := s.refs[m.Key]; r != nil && r.meta.Sum == m.Sum {
		s.d.unlink(r, true)
	}
}

// temp makes a file for what is being fetched.
func (s *shelf) temp() (*os.File, error) { return os.CreateTemp(filepath.Join(s.dir, "tmp"), "f") }

// reserve counts bytes that are being written, and makes room for them. False
// says that there is none, for all is being written. Released with a negative
// number.
func (s *shelf) reserve(n int64) bool {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	if n > 0 {
		s.d.evict(n)
		if s.d.used+n > s.d.budget {
			return false
		}
	}
	s.add(n)
	return true
}

// keep puts the file temp, whole and of m's sum and size, in its place under
// m.Key. On an error nothing is kept.
func (s *shelf) keep(temp *os.File, m *meta) error {
	if err := temp.Sync(); err != nil {
		return fmt.Errorf("sync: %w", err)
	}
	rt, err := s.writeRef(m, true)
	if err != nil {
		return err
	}
	d := s.d
	d.mu.Lock()
	defer d.mu.Unlock()
	d.evict(onDisk(m.Size) + refCost)
	if s.blobs[m.Sum] != nil {
		_ = os.Remove(temp.Name())
	} else if err := os.Rename(temp.Name(), s.blobPath(m.Sum)); err != nil {
		_ = os.Remove(rt)
		return err
	}
	old := s.refs[m.Key]
	if err := os.Rename(rt, s.refPath(m.Key)); err != nil {
		_ = os.Remove(rt)
		if s.blobs[m.Sum] == nil {
			_ = os.Remove(s.blobPath(m.Sum))
		}
		return err
	}
	r := &ref{t: s, meta: m, touched: time.Now()}
	d.replace(old, r)
	return nil
}

// replace counts r in and old, which may be nil, out. Its file was replaced
// already. Precondition: d.mu is held.
func (d *disk) replace(old, r *ref) {
	if old == nil {
		d.link(r)
		return
	}
	// The new one first, so that bytes that both have stay.
	s := r.t
	delete(s.refs, old.meta.Key)
	d.link(r)
	s.refs[old.meta.Key] = old
	d.unlink(old, false)
	s.refs[r.meta.Key] = r
}

// update replaces what is kept about an object whose bytes stay, if it is still
// there with those bytes.
func (s *shelf) update(m *meta) error {
	rt, err := s.writeRef(m, false)
	if err != nil {
		return err
	}
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	r := s.refs[m.Key]
	if r == nil || r.meta.Sum != m.Sum {
		return os.Remove(rt)
	}
	if err := os.Rename(rt, s.refPath(m.Key)); err != nil {
		_ = os.Remove(rt)
		return err
	}
	r.meta = m
	return nil
}

func (s *shelf) writeRef(m *meta, sync bool) (string, error) {
	b, err := json.Marshal(m)
	if err != nil {
		return "", err
	}
	if len(b) > maxRefFile {
		return "", fmt.Errorf("%d bytes about an object", len(b))
	}
	f, err := s.temp()
	if err != nil {
		return "", err
	}
	_, err = f.Write(b)
	if err == nil && sync {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return "", err
	}
	return f.Name(), nil
}

const maxNegative = 4096

// missing remembers that upstream does not have an object.
func (s *shelf) missing(key string, status int, ttl time.Duration) {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	for k := range s.negative { // in no order, so any
		if len(s.negative) < maxNegative {
			break
		}
		delete(s.negative, k)
	}
	s.negative[key] = miss{status, time.Now().Add(ttl)}
}

// isMissing returns the status that upstream gave, or 0.
func (s *shelf) isMissing(key string) int {
	s.d.mu.Lock()
	defer s.d.mu.Unlock()
	m, ok := s.negative[key]
	if ok && time.Now().After(m.until) {
		delete(s.negative, key)
		return 0
	}
	return m.status
}

func (d *disk) close() error { return d.lock.Close() }
