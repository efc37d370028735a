package engine

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"time"

	"github.com/oklog/ulid/v2"

	"vivarium/guest/wire"
	"vivarium/image"
	"vivarium/sandbox"
)

// creation is a create with an idempotency key that is being made.
type creation struct {
	done chan struct{}
	spec string
	sb   sandbox.Sandbox
	err  error
}

// Create records a sandbox and starts its life. It returns at once with the
// sandbox in stage queued or later; use Wait to follow it.
func (e *Engine) Create(ctx context.Context, tenant string, spec sandbox.Spec, opts CreateOptions) (sandbox.Sandbox, error) {
	if opts.IdempotencyKey == "" {
		return e.create(tenant, spec, "", "")
	}
	if len(opts.IdempotencyKey) > 256 {
		return sandbox.Sandbox{}, sandbox.Invalid.Errorf("idempotency key of %d bytes: at most 256", len(opts.IdempotencyKey))
	}
	raw, err := json.Marshal(spec)
	if err != nil {
		return sandbox.Sandbox{}, sandbox.Invalid.Errorf("encode spec: %w", err)
	}
	asked := string(raw)
	same := func(spec string, sb sandbox.Sandbox) (sandbox.Sandbox, error) {
		if spec != asked {
			return sandbox.Sandbox{}, sandbox.Conflict.Errorf("idempotency key %q was used for another create", opts.IdempotencyKey).
				WithHint("use a new key for a new sandbox")
		}
		return sb, nil
	}
	slot := tenant + "\x00" + opts.IdempotencyKey // NUL: neither may hold one
	e.mu.Lock()
	if c, ok := e.keys[slot]; ok {
		e.mu.Unlock()
		select {
		case <-c.done:
			if c.err != nil {
				return sandbox.Sandbox{}, c.err
			}
			return same(c.spec, c.sb)
		case <-ctx.Done():
			return sandbox.Sandbox{}, sandbox.Timeout.Errorf("create: %w", ctx.Err())
		}
	}
	c := &creation{done: make(chan struct{}), spec: asked}
	e.keys[slot] = c
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		delete(e.keys, slot)
		e.mu.Unlock()
		close(c.done)
	}()
	id, before, err := e.store.Idempotent(ctx, tenant, opts.IdempotencyKey)
	switch {
	case err == nil:
		if c.sb, c.err = e.byID(ctx, tenant, id); c.err != nil {
			return sandbox.Sandbox{}, c.err
		}
		c.spec = before
		return same(before, c.sb)
	case !errors.Is(err, sandbox.NotFound):
		c.err = err
		return sandbox.Sandbox{}, err
	}
	c.sb, c.err = e.create(tenant, spec, opts.IdempotencyKey, asked)
	return c.sb, c.err
}

func (e *Engine) create(tenant string, spec sandbox.Spec, key, asked string) (sandbox.Sandbox, error) {
	spec, err := e.complete(spec)
	if err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := e.checkDisk(); err != nil {
		return sandbox.Sandbox{}, err
	}
	now := time.Now()
	sb := sandbox.Sandbox{
		ID: "sb-" + ulid.Make().String(), Tenant: tenant, Spec: spec, Created: now, Deadline: now.Add(spec.Timeout),
		GuestKey: make([]byte, 32),
	}
	rand.Read(sb.GuestKey) // never fails: see its documentation
	b := e.newBox(sb)
	b.created = make(chan struct{})
	b.setStage(sandbox.StageQueued, e.opts.Deadlines.Queue)
	if err := e.admit(b); err != nil {
		return sandbox.Sandbox{}, err
	}
	if err := e.opts.Fail("create.record"); err != nil {
		e.dismiss(b)
		return sandbox.Sandbox{}, err
	}
	// boot while the record is made durable; a crash before that leaves an
	// orphan, which the next start removes
	p := e.store.Create(b.rec, key, asked)
	e.events.emit(tenant, sb.ID, eventCreated, spec.Image, map[string]string{"name": spec.Name, "image": spec.Image, "runtime": spec.Runtime})
	e.wg.Go(b.run)
	if err := p.Wait(); err != nil {
		b.end(ending{reason: sandbox.ReasonFailed, err: err})
		return sandbox.Sandbox{}, err
	}
	b.watchDeadline()
	return b.record(), nil
}

// admit makes the box known, if its name is free and its tenant may have one
// more.
func (e *Engine) admit(b *box) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.ctx.Err() != nil {
		return sandbox.Unavailable.Errorf("the daemon is stopping")
	}
	if n := b.rec.Spec.Name; n != "" {
		if id, ok := e.names[b.tenant+"/"+n]; ok {
			return sandbox.Exists.Errorf("the name %q is taken by the living sandbox %s", n, id).WithHint("stop it, or choose another name")
		}
	}
	if l := e.opts.Limits.MaxPerTenant; l > 0 && e.tenants[b.tenant] >= l {
		return sandbox.Exhausted.Errorf("the tenant has %d sandboxes, as many as it may", l).WithHint("stop some: `viv ps` lists them")
	}
	e.enlist(b)
	return nil
}

// enlist puts a box into the maps. The caller holds mu.
func (e *Engine) enlist(b *box) {
	e.boxes[b.id] = b
	if b.rec.Slot != "" {
		e.slots[b.rec.Slot] = b
	}
	e.tenants[b.tenant]++
	if n := b.rec.Spec.Name; n != "" {
		e.names[b.tenant+"/"+n] = b.id
	}
}

func (e *Engine) dismiss(b *box) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.boxes[b.id] != b {
		return
	}
	delete(e.boxes, b.id)
	if b.rec.Slot != "" {
		delete(e.slots, b.rec.Slot)
	}
	if e.tenants[b.tenant]--; e.tenants[b.tenant] == 0 {
		delete(e.tenants, b.tenant)
	}
	if n := b.rec.Spec.Name; n != "" {
		delete(e.names, b.tenant+"/"+n)
	}
}

// checkDisk refuses new sandboxes when the host's reserve is touched.
func (e *Engine) checkDisk() error {
	if e.opts.Limits.ReserveDisk == 0 {
		return nil
	}
	free, err := e.freeDisk()
	if err != nil {
		return err
	}
	if free < e.opts.Limits.ReserveDisk {
		return sandbox.Exhausted.Errorf("only %d MiB of disk are free below the data directory, and %d are kept in reserve", free>>20, e.opts.Limits.ReserveDisk>>20).
			WithHint("remove sandboxes or images: `viv image prune`")
	}
	return nil
}

// run brings a box to life: each stage with a name and a deadline.
func (b *box) run() {
	defer close(b.created)
	if err := b.start(); err != nil {
		if b.e.ctx.Err() != nil {
			return // the next engine finishes it off
		}
		b.end(ending{reason: sandbox.ReasonFailed, err: err})
	}
}

// stage runs fn as a stage.
func (b *box) stage(s sandbox.Stage, limit time.Duration, fn func(ctx context.Context) error) error {
	if !b.enter(s, limit) {
		return context.Canceled
	}
	if err := b.e.opts.Fail("create." + string(s)); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(b.life, limit)
	defer cancel()
	if err := fn(ctx); err != nil {
		if errors.Is(ctx.Err(), context.DeadlineExceeded) && b.life.Err() == nil && sandbox.KindOf(err) != sandbox.Exhausted {
			return sandbox.Timeout.Errorf("stage %s took longer than %s: %w", s, limit, err)
		}
		return err
	}
	return nil
}

func (b *box) start() error {
	e, d, spec := b.e, b.e.opts.Deadlines, b.rec.Spec
	rt := e.runtimes[spec.Runtime]
	// already entered by create
	ctx, cancel := context.WithTimeout(b.life, d.Queue)
	err := e.room.take(ctx, spec.Resources.CPURequest, spec.Resources.MemoryRequest)
	cancel()
	if err != nil {
		return err
	}
	b.mu.Lock()
	b.admitted = true
	b.mu.Unlock()

	var img *image.Image
	if err := b.stage(sandbox.StageImage, d.Image, func(ctx context.Context) (err error) {
		img, err = b.fetch(ctx)
		return err
	}); err != nil {
		return err
	}
	var m sandbox.Machine
	if err := b.stage(sandbox.StageBoot, d.Boot, func(ctx context.Context) (err error) {
		m, err = rt.Boot(ctx, sandbox.BootSpec{Resources: spec.Resources, Hostname: hostname(&b.rec), ImagePath: img.Path, Capabilities: spec.Capabilities})
		if err != nil {
			return err
		}
		b.mu.Lock()
		b.machine = m
		b.rec.MachineID, b.rec.Slot, b.rec.Address = m.ID(), m.Slot(), addrString(m.Address())
		if w, ok := m.(sandbox.Warm); ok && w.WarmKey() != nil {
			b.rec.GuestKey = w.WarmKey()
		}
		b.mu.Unlock()
		e.mu.Lock()
		if e.boxes[b.id] == b {
			e.slots[m.Slot()] = b
		}
		e.mu.Unlock()
		return nil
	}); err != nil {
		return err
	}
	go b.watchMachine(m)
	if err := b.stage(sandbox.StageNetwork, d.Network, func(ctx context.Context) error {
		if err := b.bind(ctx); err != nil {
			return err
		}
		a, err := e.opts.Network.SetPolicy(ctx, m.Slot(), b.record().Spec.Network)
		if err != nil {
			return err
		}
		if err := b.inject(); err != nil {
			return err
		}
		b.mu.Lock()
		b.rec.Spec.Network, b.rec.NetworkHash = a.Policy, a.Hash
		b.mu.Unlock()
		return nil
	}); err != nil {
		return err
	}
	if err := b.stage(sandbox.StageGuest, d.Guest, func(ctx context.Context) error {
		b.persist() // with the machine's id: from here on it can be found again
		start := b.startSpec(img.Path)
		if err := m.Start(ctx, start); err != nil {
			return err
		}
		if w, ok := m.(sandbox.Warm); ok && w.WarmKey() != nil {
			if err := b.setUp(ctx, w, start); err != nil {
				return err
			}
		}
		return b.outfit(ctx, img)
	}); err != nil {
		return err
	}
	if spec.Prove {
		if err := b.stage(sandbox.StageGuest, d.Guest, b.proven); err != nil {
			return err
		}
	}
	return b.begun(mainCommand(spec, img.Config.Entrypoint, img.Config.Cmd))
}

// outfit puts into a machine that was started what its image's file system does
// not bring. Doing it again does no harm.
func (b *box) outfit(ctx context.Context, img *image.Image) error {
	if err := b.setXattrs(ctx, img); err != nil {
		return err
	}
	if err := b.furnish(ctx); err != nil {
		return err
	}
	return b.trust(ctx)
}

// proven fails unless the policy is enforced.
func (b *box) proven(ctx context.Context) error {
	pr, err := b.prove(ctx)
	if err == nil && pr.Result != sandbox.ProofEnforced {
		err = sandbox.Denied.Errorf("the network policy is not enforced: %s", failedChecks(pr)).
			WithHint("viv events shows what the canary saw; viv doctor looks at the host")
	}
	return err
}

// startSpec is what the box's machine is started with.
func (b *box) startSpec(imagePath string) sandbox.StartSpec {
	sb := b.record()
	s := sandbox.StartSpec{
		SandboxID: sb.ID, Hostname: hostname(&sb), ImagePath: imagePath, Resources: sb.Spec.Resources,
		Capabilities: sb.Spec.Capabilities, GuestKey: sb.GuestKey,
	}
	if sb.Spec.Network.Mode != sandbox.NetworkNone {
		s.Nameserver = b.e.opts.Network.DNS()
	}
	return s
}

// setUp tells a guest that was started ahead which sandbox it is in.
func (b *box) setUp(ctx context.Context, w sandbox.Warm, start sandbox.StartSpec) error {
	g, err := w.WarmSetup(start)
	if err != nil {
		return err
	}
	c, err := b.guest(ctx)
	if err != nil {
		return err
	}
	err = c.Prepare(ctx, wire.Setup{Hostname: g.Hostname, Hosts: g.Hosts, ResolvConf: g.ResolvConf, Unmount: g.Unmount, DropCaps: g.DropCaps})
	switch sandbox.KindOf(err) {
	case "", sandbox.Internal, sandbox.Unavailable, sandbox.Timeout, sandbox.Gone:
		return err
	}
	// a file that this image cannot have is not worth the sandbox
	b.e.log.Debug("set up guest", "sandbox", b.id, "err", err)
	return nil
}

// setXattrs gives the files of an image their extended attributes, such as file
// capabilities, which the image's file cannot hold (see image/erofsimg).
func (b *box) setXattrs(ctx context.Context, img *image.Image) error {
	c, err := b.guest(ctx)
	if err != nil || img.Xattrs == "" {
		return err
	}
	var l []wire.Xattr
	if err := image.ReadXattrs(img, func(path, name string, value []byte) error {
		l = append(l, wire.Xattr{Path: path, Name: name, Value: string(value)})
		return nil
	}); err != nil {
		return err
	}
	if err := c.SetXattrs(ctx, l); err != nil {
		if k := sandbox.KindOf(err); k == sandbox.Unavailable || k == sandbox.Timeout || k == sandbox.Gone {
			return err
		}
		// one that the kernel inside does not have is not worth the sandbox
		b.e.log.Info("set attributes of image files", "sandbox", b.id, "err", err)
	}
	return nil
}

// begun starts the main command and waits until the probe passes.
func (b *box) begun(main []string) error {
	if err := b.openTunnels(); err != nil {
		return err
	}
	if err := b.e.opts.Fail("create.main"); err != nil {
		return err
	}
	spec := b.record().Spec
	stage, limit := sandbox.StageRunning, time.Duration(0)
	if spec.Probe != nil {
		stage, limit = sandbox.StageReady, b.e.opts.Deadlines.Ready
	}
	if len(main) > 0 {
		if err := b.startMain(main); err != nil {
			return err
		}
	} else if spec.RunImageCommand {
		return sandbox.Invalid.Errorf("the image names no command to run").WithHint("give one: viv run IMAGE -- COMMAND")
	}
	b.mu.Lock()
	if b.ending != nil {
		b.mu.Unlock()
		return context.Canceled
	}
	b.rec.Started = time.Now()
	b.rec.IsReady = spec.Probe == nil
	b.setStage(stage, limit)
	b.rest()
	b.mu.Unlock()
	b.persist()
	b.e.events.emit(b.tenant, b.id, eventStage, string(stage), map[string]string{"stage": string(stage)})
	if spec.Probe == nil {
		b.e.events.emit(b.tenant, b.id, eventReady, "", nil)
		return nil
	}
	return b.probe(spec.Probe, limit)
}

func (b *box) startMain(argv []string) error {
	spec := b.record().Spec
	x := sandbox.ExecSpec{Argv: argv, PTY: spec.PTY}
	if spec.Stdin {
		x.Stdin = sandbox.StdinPipe
	}
	m, err := b.startExec(b.life, sandbox.MainExec, x)
	if err != nil {
		return err
	}
	go func() {
		select {
		case <-m.done:
			st := m.record()
			if st.State != sandbox.ExecExited {
				return // lost: the machine's death tells why
			}
			b.end(ending{reason: sandbox.ReasonExited, exit: &st.Exit})
		case <-b.quit:
		}
	}()
	return nil
}

// fetch finds the image, or pulls it, and pins it.
func (b *box) fetch(ctx context.Context) (*image.Image, error) {
	e, spec := b.e, b.rec.Spec
	if spec.Pull == sandbox.PullAlways {
		if _, err := e.opts.Images.Pull(ctx, b.tenant, spec.Image, image.PullOptions{Policy: image.Always}); err != nil {
			return nil, err
		}
	}
	img, release, err := e.opts.Images.Use(ctx, b.tenant, spec.Image)
	if errors.Is(err, sandbox.NotFound) && spec.Pull == sandbox.PullMissing {
		if _, err := e.opts.Images.Pull(ctx, b.tenant, spec.Image, image.PullOptions{Policy: image.Missing}); err != nil {
			return nil, err
		}
		img, release, err = e.opts.Images.Use(ctx, b.tenant, spec.Image)
	}
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	b.release = release
	b.rec.ImageID, b.rec.ImageDigest = img.ID, img.Digest
	b.rec.Base = sandbox.Base{Env: img.Config.Env, Workdir: img.Config.WorkingDir, User: img.Config.User}
	b.mu.Unlock()
	return img, nil
}

// watchMachine ends the box when its machine dies by itself.
func (b *box) watchMachine(m sandbox.Machine) {
	select {
	case <-m.Done():
		b.end(ending{reason: sandbox.ReasonKilled, message: "its machine died"})
	case <-b.quit:
	case <-b.gone:
	}
}
