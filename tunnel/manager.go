package tunnel

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"net"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/oklog/ulid/v2"

	"vivarium/sandbox"
)

// Store keeps tunnels, so that they are found again after a restart.
type Store interface {
	// Tunnels are those of all tenants.
	Tunnels(ctx context.Context) ([]sandbox.Tunnel, error)
	// PutTunnel returns when it is durable.
	PutTunnel(ctx context.Context, t sandbox.Tunnel) error
	// DeleteTunnel is no error where there is none.
	DeleteTunnel(ctx context.Context, tenant, id string) error
	// DeleteTunnels deletes those of a sandbox.
	DeleteTunnels(ctx context.Context, tenant, sandboxID string) error
}

// Sandboxes are what tunnels lead to; the engine is it.
type Sandboxes interface {
	Get(ctx context.Context, tenant, ref string) (sandbox.Sandbox, error)
	Dial(ctx context.Context, tenant, ref string, port uint16) (net.Conn, error)
}

// Options of a Manager.
type Options struct {
	Dir    string // of keys and certificates; made if missing
	Store  Store
	Listen string // address of the TLS listener; "" is no HTTPS tunnels
	Domain string // in lower case; names of tunnels are one label below
	// Port is the one in URLs, where that is not the listener's; 0 is the
	// listener's.
	Port uint16
	// API are the hosts that the API is reached by; see CheckDomain.
	API []string
	// Cert and Key are PEM files of a certificate for *.Domain. Without them, and
	// without ACME, a local authority makes it.
	Cert, Key      string
	ACME           ACME
	TCPAddress     string // that TCP tunnels listen on
	Ports          Ports  // of TCP tunnels; none is no TCP tunnels
	MaxConnections int    // of one tunnel: requests, WebSockets and raw connections at once
	Logger         *slog.Logger
}

// Manager has the node's tunnels. It is safe for concurrent use.
type Manager struct {
	opts          Options
	log           *slog.Logger
	tokens        *tokens
	certs         certs // nil without a listener
	headerTimeout time.Duration
	ctx           context.Context // ends with Close
	cancel        context.CancelFunc
	wg            sync.WaitGroup

	sandboxes Sandboxes     // set before ready is closed
	ready     chan struct{} // closed by Start

	op sync.Mutex // held while tunnels are opened and closed; before mu

	mu     sync.RWMutex
	byHost map[string]*live            // guarded by mu
	byID   map[string]*live            // guarded by mu
	byBox  map[string]map[string]*live // by sandbox and id; guarded by mu
	front  *front                      // nil while there is no need; guarded by mu
	port   string                      // of the listener, once there was one; guarded by mu
	closed bool                        // guarded by mu
}

// New checks the options and reads the keys. Nothing listens yet.
func New(opts Options) (*Manager, error) {
	m := &Manager{
		opts: opts, log: opts.Logger, headerTimeout: readHeaderTimeout, ready: make(chan struct{}),
		byHost: map[string]*live{}, byID: map[string]*live{}, byBox: map[string]map[string]*live{},
	}
	if m.log == nil {
		m.log = slog.Default()
	}
	if opts.MaxConnections < 1 {
		return nil, sandbox.Invalid.Errorf("tunnels with %d connections", opts.MaxConnections)
	}
	// passable for all: the authority's certificate is for everybody to trust
	if err := os.MkdirAll(opts.Dir, 0o755); err != nil {
		return nil, sandbox.Internal.Errorf("make directory of tunnels: %w", err)
	}
	key, err := tokenKey(opts.Dir)
	if err != nil {
		return nil, err
	}
	if m.tokens, err = newTokens(key); err != nil {
		return nil, err
	}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	if opts.Listen == "" {
		return m, nil
	}
	if _, m.port, err = net.SplitHostPort(opts.Listen); err != nil {
		return nil, sandbox.Invalid.Errorf("tunnel listen address %q: %w", opts.Listen, err)
	}
	if err := CheckDomain(opts.Domain, opts.API...); err != nil {
		return nil, err
	}
	switch {
	case opts.Cert != "":
		f, err := openCertFiles(opts.Cert, opts.Key, opts.Domain)
		if err != nil {
			return nil, err
		}
		m.certs = wildcard{f.certificate}
	case opts.ACME.Email != "":
		if m.certs, err = openACME(opts.ACME, opts.Dir, opts.Listen, m.log); err != nil {
			return nil, err
		}
	default:
		ca, err := openCA(opts.Dir, opts.Domain, time.Now)
		if err != nil {
			return nil, err
		}
		m.certs = wildcard{ca.certificate}
	}
	return m, nil
}

// Start opens the tunnels of an earlier daemon whose sandboxes live, and forgets
// the others. A port that is taken is tried again until it is free.
func (m *Manager) Start(ctx context.Context, s Sandboxes) error {
	m.sandboxes = s
	all, err := m.opts.Store.Tunnels(ctx)
	if err != nil {
		return err
	}
	m.op.Lock()
	for _, t := range all {
		sb, err := s.Get(ctx, t.Tenant, t.SandboxID)
		if err != nil && !errors.Is(err, sandbox.NotFound) {
			m.op.Unlock()
			return err
		}
		if err != nil || !open(sb.Stage) {
			if err := m.opts.Store.DeleteTunnel(ctx, t.Tenant, t.ID); err != nil {
				m.op.Unlock()
				return err
			}
			continue
		}
		m.add(m.newLive(t))
	}
	m.op.Unlock()
	close(m.ready)
	if m.listenAll() {
		return nil
	}
	m.wg.Go(func() {
		for tick := time.NewTicker(time.Second); ; {
			select {
			case <-m.ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
				if m.listenAll() {
					tick.Stop()
					return
				}
			}
		}
	})
	return nil
}

// open says whether a sandbox in this stage may have tunnels.
func open(s sandbox.Stage) bool { return s != sandbox.StageStopping && s != sandbox.StageEnded }

// listenAll opens the ports of the tunnels that there are; false if one is taken.
func (m *Manager) listenAll() bool {
	m.op.Lock()
	defer m.op.Unlock()
	ok := true
	for _, l := range m.all() {
		err := m.listen(l)
		if err != nil && !l.missed {
			l.missed = true
			m.log.Error("open the port of a tunnel again", "tunnel", l.t.ID, "err", err)
		}
		// what this node's configuration has no longer is not tried again
		ok = ok && (err == nil || errors.Is(err, sandbox.Unsupported))
	}
	return ok
}

// listen sees to it that what a tunnel needs listens. The caller holds op.
func (m *Manager) listen(l *live) error {
	if err := m.listenFor(l); err != nil {
		return err
	}
	if l.host != "" && !l.certified {
		l.certified = true
		m.certs.open(l.host) // an authority may ask the listener for proof
	}
	return nil
}

func (m *Manager) listenFor(l *live) error {
	m.mu.RLock()
	f, closed, tcp := m.front, m.closed, l.tcp
	m.mu.RUnlock()
	switch {
	case closed:
		return sandbox.Unavailable.Errorf("the daemon is stopping")
	case l.t.Spec.Kind == sandbox.TunnelTCP && tcp != nil, l.t.Spec.Kind != sandbox.TunnelTCP && f != nil:
		return nil
	case l.t.Spec.Kind == sandbox.TunnelTCP:
		ln, err := m.listenTCP(l.t.HostPort)
		if err != nil {
			return err
		}
		m.mu.Lock()
		l.tcp = ln
		m.mu.Unlock()
		m.wg.Go(func() { l.serveTCP(ln) })
		return nil
	case m.certs == nil:
		return sandbox.Unsupported.Errorf("this node has no HTTPS tunnels").WithHint("set tunnel.listen in its configuration")
	}
	f, err := m.listenFront()
	if err != nil {
		return err
	}
	_, port, _ := net.SplitHostPort(f.ln.Addr().String())
	m.mu.Lock()
	m.front, m.port = f, port
	m.mu.Unlock()
	return nil
}

// rest closes the TLS listener when no tunnel needs it any more. The caller holds
// op.
func (m *Manager) rest() {
	m.mu.Lock()
	f := m.front
	if f == nil || len(m.byHost) > 0 {
		m.mu.Unlock()
		return
	}
	m.front = nil
	m.mu.Unlock()
	f.stop(0)
}

// Close closes every port and connection. The tunnels are there again when the
// next daemon starts.
func (m *Manager) Close() error {
	m.cancel()
	defer m.wg.Wait()
	m.op.Lock()
	defer m.op.Unlock()
	all := m.all()
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	m.closed = true
	f := m.front
	m.front = nil
	for _, l := range all {
		if l.tcp != nil {
			_ = l.tcp.Close() // nothing waits for it
		}
	}
	m.mu.Unlock()
	if f != nil {
		f.stop(stopTimeout)
	}
	for _, l := range all {
		l.end()
	}
	if m.certs != nil {
		m.certs.stop()
	}
	return nil
}

// Check says whether these tunnels can be opened here, and fills in what they
// leave out.
func (m *Manager) Check(specs []sandbox.TunnelSpec) ([]sandbox.TunnelSpec, error) {
	if len(specs) > MaxPerSandbox {
		return nil, sandbox.Invalid.Errorf("%d tunnels: at most %d", len(specs), MaxPerSandbox)
	}
	out := slices.Clone(specs)
	for i, s := range specs {
		s, err := Normalise(s)
		switch {
		case err != nil:
			return nil, err
		case s.Kind == sandbox.TunnelTCP && m.opts.Ports.First == 0:
			return nil, sandbox.Unsupported.Errorf("this node has no ports for tcp tunnels").WithHint("set tunnel.ports in its configuration")
		case s.Kind != sandbox.TunnelTCP && m.certs == nil:
			return nil, sandbox.Unsupported.Errorf("this node has no HTTPS tunnels").WithHint("set tunnel.listen in its configuration")
		}
		out[i] = s
	}
	return out, nil
}

// Open opens a way in to a port of a living sandbox.
func (m *Manager) Open(ctx context.Context, tenant, ref string, spec sandbox.TunnelSpec) (sandbox.Tunnel, error) {
	if err := m.started(ctx); err != nil {
		return sandbox.Tunnel{}, err
	}
	m.op.Lock()
	defer m.op.Unlock()
	return m.openOne(ctx, tenant, ref, spec)
}

func (m *Manager) started(ctx context.Context) error {
	select {
	case <-m.ready:
		return nil
	case <-ctx.Done():
		return sandbox.Timeout.Errorf("wait for tunnels: %w", ctx.Err())
	case <-m.ctx.Done():
		return sandbox.Unavailable.Errorf("the daemon is stopping")
	}
}

// openOne is Open for a caller that holds op.
func (m *Manager) openOne(ctx context.Context, tenant, ref string, spec sandbox.TunnelSpec) (sandbox.Tunnel, error) {
	var none sandbox.Tunnel
	if m.ctx.Err() != nil {
		return none, sandbox.Unavailable.Errorf("the daemon is stopping")
	}
	specs, err := m.Check([]sandbox.TunnelSpec{spec})
	if err != nil {
		return none, err
	}
	sb, err := m.living(ctx, tenant, ref)
	if err != nil {
		return none, err
	}
	if n := len(m.of(tenant, sb.ID)); n >= MaxPerSandbox {
		return none, sandbox.Exhausted.Errorf("sandbox %s has %d tunnels, as many as it may", sb.ID, n).WithHint("close some: `viv tunnel ls`")
	}
	t := sandbox.Tunnel{ID: "tn-" + ulid.Make().String(), Tenant: tenant, SandboxID: sb.ID, Spec: specs[0], Created: time.Now().UTC()}
	if t.Spec.Kind != sandbox.TunnelTCP {
		t.Name = strings.ToLower(rand.Text()) // 128 bits or more, base32
	}
	l := m.newLive(t)
	if t.Spec.Kind == sandbox.TunnelTCP {
		if l.tcp, err = m.listenTCP(0); err != nil {
			return none, err
		}
		l.t.HostPort = l.tcp.Addr().(*net.TCPAddr).AddrPort().Port()
	} else if err := m.listen(l); err != nil {
		return none, err
	}
	undo := func() {
		m.remove(l)
		m.rest()
	}
	if err := m.opts.Store.PutTunnel(ctx, l.t); err != nil {
		undo()
		return none, err
	}
	m.add(l)
	if l.tcp != nil {
		ln := l.tcp
		m.wg.Go(func() { l.serveTCP(ln) })
	}
	// it may have ended meanwhile, and its tunnels been closed before this one was
	if _, err := m.living(ctx, tenant, sb.ID); err != nil {
		undo()
		return none, errors.Join(err, m.opts.Store.DeleteTunnel(context.WithoutCancel(ctx), tenant, t.ID))
	}
	return m.told(l.t), nil
}

func (m *Manager) living(ctx context.Context, tenant, ref string) (sandbox.Sandbox, error) {
	sb, err := m.sandboxes.Get(ctx, tenant, ref)
	if err == nil && !open(sb.Stage) {
		err = sandbox.Gone.Errorf("sandbox %s has ended", sb.ID)
	}
	return sb, err
}

// Ensure opens those of these tunnels that a sandbox does not have yet: again
// after a restart in the middle.
func (m *Manager) Ensure(ctx context.Context, tenant, id string, specs []sandbox.TunnelSpec) error {
	if err := m.started(ctx); err != nil {
		return err
	}
	m.op.Lock()
	defer m.op.Unlock()
	have := m.of(tenant, id)
	for _, s := range specs {
		if i := slices.IndexFunc(have, func(l *live) bool { return reflect.DeepEqual(l.t.Spec, s) }); i >= 0 {
			have = slices.Delete(have, i, i+1)
			continue
		}
		if _, err := m.openOne(ctx, tenant, id, s); err != nil {
			return err
		}
	}
	return nil
}

// List returns the tunnels of a sandbox, by its id, or with "" all of the
// tenant, the oldest first.
func (m *Manager) List(tenant, sandboxID string) []sandbox.Tunnel {
	var out []sandbox.Tunnel
	for _, l := range m.of(tenant, sandboxID) {
		out = append(out, m.told(l.t))
	}
	return out
}

// CloseTunnel closes a tunnel and cuts what goes through it: NotFound if the
// tenant has none of that id.
func (m *Manager) CloseTunnel(ctx context.Context, tenant, id string) error {
	if err := m.started(ctx); err != nil {
		return err
	}
	m.op.Lock()
	defer m.op.Unlock()
	m.mu.RLock()
	l := m.byID[id]
	m.mu.RUnlock()
	if l == nil || l.t.Tenant != tenant {
		return sandbox.NotFound.Errorf("tunnel %s does not exist", id)
	}
	m.remove(l)
	m.rest()
	return m.opts.Store.DeleteTunnel(ctx, tenant, id)
}

// CloseSandbox closes the tunnels of a sandbox that ends.
func (m *Manager) CloseSandbox(ctx context.Context, tenant, id string) error {
	m.op.Lock()
	defer m.op.Unlock()
	all := m.of(tenant, id)
	select {
	case <-m.ready:
		if len(all) == 0 {
			return nil
		}
	default: // not yet read from the store
	}
	for _, l := range all {
		m.remove(l)
	}
	m.rest()
	return m.opts.Store.DeleteTunnels(ctx, tenant, id)
}

// Connect makes a token for a port of a sandbox, and opens a tunnel that asks for
// one where there is none. lifetime 0, and the most, is the sandbox's.
func (m *Manager) Connect(ctx context.Context, tenant, ref string, port uint16, metadata string, lifetime time.Duration) (url, token string, expires time.Time, err error) {
	if err := m.started(ctx); err != nil {
		return "", "", time.Time{}, err
	}
	if err := checkMetadata(metadata); err != nil {
		return "", "", time.Time{}, err
	}
	m.op.Lock()
	defer m.op.Unlock()
	sb, err := m.living(ctx, tenant, ref)
	if err != nil {
		return "", "", time.Time{}, err
	}
	expires = sb.Deadline
	if expires.IsZero() {
		expires = time.Now().Add(24 * time.Hour)
	}
	if lifetime > 0 && time.Now().Add(lifetime).Before(expires) {
		expires = time.Now().Add(lifetime)
	}
	expires = expires.Truncate(time.Second).Add(time.Second).UTC() // what the token holds
	var t sandbox.Tunnel
	for _, l := range m.of(tenant, sb.ID) {
		if l.t.Spec.Port == port && l.t.Spec.Token {
			t = m.told(l.t)
			break
		}
	}
	if t.ID == "" {
		if t, err = m.openOne(ctx, tenant, sb.ID, sandbox.TunnelSpec{Port: port, Token: true}); err != nil {
			return "", "", time.Time{}, err
		}
	}
	return t.URL, m.tokens.seal(t.ID, ticket{expires, metadata}), expires, nil
}

// told is a tunnel with what the configuration says of where it is.
func (m *Manager) told(t sandbox.Tunnel) sandbox.Tunnel {
	if t.Spec.Kind == sandbox.TunnelTCP {
		host := m.opts.TCPAddress
		if a := net.ParseIP(host); host == "" || a != nil && a.IsUnspecified() {
			host = m.opts.Domain
		}
		t.Address = net.JoinHostPort(host, strconv.Itoa(int(t.HostPort)))
		return t
	}
	m.mu.RLock()
	port := m.port
	m.mu.RUnlock()
	if m.opts.Port != 0 {
		port = strconv.Itoa(int(m.opts.Port))
	}
	t.URL = "https://" + t.Name + "." + m.opts.Domain
	if port != "443" {
		t.URL += ":" + port
	}
	return t
}

func (m *Manager) add(l *live) {
	m.mu.Lock()
	m.byID[l.t.ID] = l
	if m.byBox[l.t.SandboxID] == nil {
		m.byBox[l.t.SandboxID] = map[string]*live{}
	}
	m.byBox[l.t.SandboxID][l.t.ID] = l
	if l.host != "" {
		m.byHost[l.host] = l
	}
	m.mu.Unlock()
}

func (m *Manager) remove(l *live) {
	m.mu.Lock()
	delete(m.byID, l.t.ID)
	if box := m.byBox[l.t.SandboxID]; box != nil {
		if delete(box, l.t.ID); len(box) == 0 {
			delete(m.byBox, l.t.SandboxID)
		}
	}
	if l.host != "" {
		delete(m.byHost, l.host)
	}
	tcp := l.tcp
	m.mu.Unlock()
	if tcp != nil {
		_ = tcp.Close() // nothing waits for it
	}
	l.end()
	if l.certified {
		l.certified = false
		m.certs.close(l.host)
	}
}

func (m *Manager) find(host string) *live {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.byHost[host]
}

func (m *Manager) all() []*live { return m.of("", "") }

// of is the tunnels of a sandbox; with "" all of the tenant, or of all tenants.
func (m *Manager) of(tenant, sandboxID string) []*live {
	m.mu.RLock()
	defer m.mu.RUnlock()
	from := m.byID
	if sandboxID != "" {
		from = m.byBox[sandboxID]
	}
	var out []*live
	for _, l := range from {
		if tenant == "" || l.t.Tenant == tenant {
			out = append(out, l)
		}
	}
	slices.SortFunc(out, func(a, b *live) int { return cmp.Compare(a.t.ID, b.t.ID) }) // ULIDs
	return out
}
