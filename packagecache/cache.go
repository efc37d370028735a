package packagecache

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"vivarium/sandbox"
)

// Cache is the cache of a node. It is an http.Handler; Serve runs it with the
// bounds that hostile clients need.
type Cache struct {
	cfg       Config
	up        map[string][]*upstream // by kind
	disk      *disk
	transport *http.Transport
	memory    *semaphore.Weighted
	ctx       context.Context
	cancel    context.CancelFunc
	running   sync.WaitGroup
	fetched   atomic.Int64
	served    atomic.Int64
	checking  chan struct{} // one check of what was kept before at a time
	suites    suites

	mu      sync.Mutex
	closed  bool
	counts  map[string]*Counts
	servers map[*http.Server]struct{}
}

// Counts of requests.
type Counts struct {
	Hits        int64 // answered from the disk
	Misses      int64 // fetched; those who waited for the same download count as hits
	Revalidated int64 // upstream said that it has not changed
	Stale       int64 // upstream did not answer, and what it said before was served
	Absent      int64 // not there
	Errors      int64 // upstream failed or lied, or no room
	Denied      int64 // the client may not have that
}

// Stats of a cache since it was opened.
type Stats struct {
	Kinds     map[string]Counts // by kind of registry
	Fetched   int64             // bytes from upstreams
	Served    int64             // bytes to clients
	Evictions int64
	Objects   int
	Used      int64 // bytes of disk
	Budget    int64
}

// Open opens the cache in cfg.Dir. Errors: Invalid (configuration), Conflict
// (another process has the folder), Internal.
func Open(cfg Config) (*Cache, error) {
	if err := cfg.fill(); err != nil {
		return nil, err
	}
	c := &Cache{cfg: cfg, up: map[string][]*upstream{}, counts: map[string]*Counts{}, servers: map[*http.Server]struct{}{},
		memory: semaphore.NewWeighted(memoryLimit), checking: make(chan struct{}, 1)}
	for kind, list := range map[string][]Upstream{Debian: cfg.Debian, NPM: cfg.NPM, PyPI: cfg.PyPI, Go: cfg.Go} {
		c.counts[kind] = &Counts{}
		ups, err := parse(kind, list)
		if err != nil {
			return nil, err
		}
		c.up[kind] = ups
	}
	d, err := openDisk(cfg.Dir, cfg.Budget, cfg.Fetches)
	if err != nil {
		return nil, err
	}
	c.disk = d
	c.transport = c.newTransport()
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c, nil
}

// Close ends all connections and downloads.
func (c *Cache) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	servers := c.servers
	c.servers = map[*http.Server]struct{}{}
	c.mu.Unlock()
	for s := range servers {
		_ = s.Close()
	}
	c.cancel()
	c.running.Wait()
	c.transport.CloseIdleConnections()
	if err := c.disk.close(); err != nil {
		return sandbox.Internal.Errorf("close package cache: %w", err)
	}
	return nil
}

// Stats returns what was done so far.
func (c *Cache) Stats() Stats {
	st := Stats{Kinds: map[string]Counts{}, Fetched: c.fetched.Load(), Served: c.served.Load(), Budget: c.cfg.Budget}
	c.mu.Lock()
	for k, n := range c.counts {
		st.Kinds[k] = *n
	}
	c.mu.Unlock()
	c.disk.mu.Lock()
	defer c.disk.mu.Unlock()
	st.Evictions, st.Objects, st.Used = c.disk.evictions, c.disk.objects, c.disk.used
	return st
}

func (c *Cache) count(kind string, fn func(*Counts)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := c.counts[kind]; n != nil {
		fn(n)
	}
}

// request is what a route looks at.
type request struct {
	r     *http.Request
	s     *shelf
	path  string // decoded, without the first slash, below the kind's part
	base  string // http://address:port at which the client reached us
	where string // of the upstream: /npm or /npm/_/name
	ups   []*upstream
}

// ServeHTTP answers a sandbox's request.
func (c *Cache) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	kind, o, s, err := c.route(r)
	out := &answer{ResponseWriter: w, ctl: http.NewResponseController(w), c: c, kind: kind}
	if r.ContentLength != 0 { // what is left of it is not waited for
		_ = out.ctl.SetReadDeadline(time.Now().Add(5 * time.Second))
	}
	if err != nil {
		out.fail(r, err)
		return
	}
	if o == nil { // there is nothing behind it
		out.text(http.StatusOK, "{}\n")
		return
	}
	c.serve(out, r, s, o)
}

// route finds the object of a request. Its error is a *failure.
func (c *Cache) route(r *http.Request) (kind string, o *object, s *shelf, err error) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		return "", nil, nil, fail(http.StatusMethodNotAllowed, "this is a cache: it only reads")
	}
	if r.ContentLength != 0 {
		return "", nil, nil, fail(http.StatusBadRequest, "no request here has a body")
	}
	client, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return "", nil, nil, fail(http.StatusForbidden, "no client address")
	}
	addr := client.Addr().Unmap()
	tenant := c.cfg.Tenant(addr)
	if tenant == "" {
		return "", nil, nil, fail(http.StatusForbidden, "not an address of a sandbox")
	}
	p, ok := strings.CutPrefix(r.URL.Path, "/")
	p = strings.ReplaceAll(p, "/./", "/") // apt's way with an archive that has no dists
	if !ok || !cleanPath(p) {
		return "", nil, nil, fail(http.StatusNotFound, "no such path")
	}
	if r.URL.RawQuery != "" {
		return "", nil, nil, fail(http.StatusNotFound, "no object here has a query")
	}
	if s, err = c.disk.shelf(tenant); err != nil {
		return "", nil, nil, fail(http.StatusInternalServerError, "open cache: %v", err)
	}
	q := &request{r: r, s: s}
	var find func(*request) (*object, error)
	if r.URL.Host != "" { // a forward proxy's request
		kind, q.path, find = Debian, p, c.debianProxy
	} else {
		if a, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); ok {
			q.base = "http://" + a.String()
		}
		kind, q.path, _ = strings.Cut(p, "/")
		// npm moves what its lock file has from the default registry to ours by the
		// host alone, so that our /npm is lost (older versions).
		if npmTarball(p) {
			kind, q.path = NPM, p
		}
		switch kind {
		case Debian:
			find = c.debianPath
		case NPM:
			find = c.npm
		case PyPI:
			find = c.pypi
		case Go:
			find = c.golang
		default:
			return "", nil, nil, fail(http.StatusNotFound, "no such path; want /debian/, /npm/, /pypi/ or /go/")
		}
	}
	if err := c.named(kind, q); err != nil {
		return kind, nil, nil, err
	}
	o, err = find(q)
	if err != nil || o == nil {
		return kind, nil, nil, err
	}
	if c.cfg.Allow != nil {
		for n := o; n != nil; n = n.next {
			if !c.allowed(addr, n.url) {
				if n == o {
					return kind, nil, nil, fail(http.StatusForbidden, "the sandbox's network policy does not allow %s", hostPort(n.url))
				}
				return kind, cutBefore(o, n), s, nil
			}
		}
	}
	return kind, o, s, nil
}

// cutBefore ends a chain of places to ask before one that a client may not have.
func cutBefore(o, end *object) *object {
	n := *o
	if o.next == end {
		n.next = nil
	} else {
		n.next = cutBefore(o.next, end)
	}
	return &n
}

func (c *Cache) allowed(client netip.Addr, u *url.URL) bool {
	host, port, err := net.SplitHostPort(hostPort(u))
	if err != nil {
		return false
	}
	n, err := net.LookupPort("tcp", port) // a number: asks nobody
	return err == nil && n > 0 && n < 1<<16 && c.cfg.Allow(client, host, uint16(n))
}

// named takes the upstream out of a path: /kind/_/name/... is the one of that
// name, else it is the first.
func (c *Cache) named(kind string, q *request) error {
	q.ups, q.where = c.up[kind], "/"+kind
	if rest, ok := strings.CutPrefix(q.path, "_/"); ok && (kind == NPM || kind == PyPI) {
		name, rest, _ := strings.Cut(rest, "/")
		q.ups = nil
		for _, u := range c.up[kind] {
			if u.name == name {
				q.ups = []*upstream{u}
			}
		}
		q.path, q.where = rest, q.where+"/_/"+name
	}
	if len(q.ups) == 0 {
		return fail(http.StatusNotFound, "the configuration has no such %s upstream", kind)
	}
	return nil
}

// Serve answers on l until l or the cache is closed. Errors: as of
// http.Server.Serve; nil after Close.
func (c *Cache) Serve(l net.Listener) error {
	srv := &http.Server{
		Handler:           c,
		ReadHeaderTimeout: 10 * time.Second,
		// No ReadTimeout: it would end long answers. Bodies are refused.
		IdleTimeout:    2 * time.Minute,
		MaxHeaderBytes: 16 << 10,
		ErrorLog:       nil,
	}
	srv.ErrorLog = discardLog
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return sandbox.Conflict.Errorf("serve package cache: it is closed")
	}
	c.servers[srv] = struct{}{}
	c.mu.Unlock()
	err := srv.Serve(&bounded{Listener: l, max: c.cfg.Conns, of: map[netip.Addr]int{}})
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.servers, srv)
	if c.closed {
		return nil
	}
	return err
}
