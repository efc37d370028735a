package native

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"

	"connectrpc.com/connect"
	"github.com/google/go-containerregistry/pkg/authn"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/api/vivarium/v1/vivariumv1connect"
	"vivarium/image"
	"vivarium/sandbox"
	"vivarium/server"
)

// Images is what this package needs of image.Store; see there for what the
// methods promise.
type Images interface {
	Pull(ctx context.Context, tenant, ref string, o image.PullOptions) (*image.Image, error)
	Load(ctx context.Context, tenant string, r io.Reader, o image.LoadOptions) ([]*image.Image, error)
	Get(ctx context.Context, tenant, refOrID string) (*image.Image, error)
	List(ctx context.Context, tenant string) ([]*image.Image, error)
	Tag(ctx context.Context, tenant, refOrID, newRef string) error
	Remove(ctx context.Context, tenant, refOrID string) error
	GC(ctx context.Context, inUse func(id string) bool) (image.GCReport, error)
}

var _ Images = (*image.Store)(nil)

// BaseRequest says what a base image shall hold; empty fields take defaults.
type BaseRequest struct {
	Tag, Suite string
	Packages   []string
	BuildTools bool
}

// BuildBase makes a base image from the distribution's packages for a tenant.
type BuildBase func(ctx context.Context, tenant string, r BaseRequest, progress func(image.Progress)) (*image.Image, error)

type images struct {
	store Images
	inUse func(id string) bool
	base  BuildBase
}

var _ vivariumv1connect.ImageServiceHandler = (*images)(nil)

func checkImageRef(what, s string) error {
	if s == "" {
		return sandbox.Invalid.Errorf("%s is missing", what)
	}
	if len(s) > maxImageRef || !printable(s) || strings.ContainsAny(s, " \t") {
		return sandbox.Invalid.Errorf("%s %q is not a reference, digest or id", what, clip(s))
	}
	return nil
}

func imageTo(i *image.Image) *v1.Image {
	if i == nil {
		return nil
	}
	c := i.Config
	return &v1.Image{
		Id: i.ID, Digest: i.Digest, Tags: i.Tags, Size: i.Size, Platform: i.Platform,
		Created: stamp(i.Created), LastUsed: stamp(i.LastUsed), Source: i.Source,
		Config: &v1.ImageConfig{
			Env: c.Env, WorkingDir: c.WorkingDir, User: c.User, Entrypoint: c.Entrypoint, Cmd: c.Cmd,
			ExposedPorts: c.ExposedPorts, Labels: c.Labels, StopSignal: c.StopSignal,
		},
	}
}

func imageConfigFrom(m *v1.ImageConfig) *image.Config {
	if m == nil {
		return nil
	}
	return &image.Config{
		Env: m.Env, WorkingDir: m.WorkingDir, User: m.User, Entrypoint: m.Entrypoint, Cmd: m.Cmd,
		ExposedPorts: m.ExposedPorts, Labels: m.Labels, StopSignal: m.StopSignal,
	}
}

// latest passes on the newest progress only, since those who make it must not
// be held up by a client that is slow to hear of it.
type latest struct {
	mu   sync.Mutex
	p    image.Progress
	news chan struct{}
}

func newLatest() *latest { return &latest{news: make(chan struct{}, 1)} }

func (l *latest) set(p image.Progress) {
	l.mu.Lock()
	l.p = p
	l.mu.Unlock()
	select {
	case l.news <- struct{}{}:
	default:
	}
}

func (l *latest) get() *v1.Progress {
	l.mu.Lock()
	defer l.mu.Unlock()
	return &v1.Progress{Step: l.p.Stage, Done: l.p.Done, Total: l.p.Total}
}

// withProgress runs work and streams how far it is, then its image.
func withProgress(ctx context.Context, stream *connect.ServerStream[v1.PullImageResponse], work func(context.Context, func(image.Progress)) (*image.Image, error)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	l := newLatest()
	type result struct {
		img *image.Image
		err error
	}
	done := make(chan result, 1)
	go func() {
		img, err := work(ctx, l.set)
		done <- result{img, err}
	}()
	for {
		select {
		case <-l.news:
			if err := stream.Send(&v1.PullImageResponse{Progress: l.get()}); err != nil {
				cancel()
				<-done // the work must not outlive the call that its context belongs to
				return err
			}
		case r := <-done:
			if r.err != nil {
				return r.err
			}
			return stream.Send(&v1.PullImageResponse{Progress: &v1.Progress{Step: "done"}, Image: imageTo(r.img)})
		}
	}
}

func (i *images) Pull(ctx context.Context, req *connect.Request[v1.PullImageRequest], stream *connect.ServerStream[v1.PullImageResponse]) error {
	m := req.Msg
	if err := checkImageRef("the reference", m.Ref); err != nil {
		return err
	}
	o := image.PullOptions{Platform: m.Platform}
	switch m.Policy {
	case "", sandbox.PullAlways:
		o.Policy = image.Always
	case sandbox.PullMissing:
		o.Policy = image.Missing
	case sandbox.PullNever:
		o.Policy = image.Never
	default:
		return sandbox.Invalid.Errorf("pull policy %q", clip(m.Policy)).WithHint("the policies are missing, always and never")
	}
	switch {
	case m.Username != "" || m.Password != "":
		o.Auth = authn.FromConfig(authn.AuthConfig{Username: m.Username, Password: m.Password})
	case !server.CallFrom(ctx).Token.Admin:
		// The keychain of the host is root's own, and not for tenants.
		o.Auth = authn.Anonymous
	}
	tenant := server.Tenant(ctx)
	return withProgress(ctx, stream, func(ctx context.Context, progress func(image.Progress)) (*image.Image, error) {
		o.Progress = progress
		return i.store.Pull(ctx, tenant, m.Ref, o)
	})
}

func (i *images) Load(ctx context.Context, stream *connect.ClientStream[v1.LoadImageRequest]) (*connect.Response[v1.LoadImageResponse], error) {
	if !stream.Receive() {
		if err := stream.Err(); err != nil {
			return nil, err
		}
		return nil, sandbox.Invalid.Errorf("the first message is missing")
	}
	m := stream.Msg()
	o := image.LoadOptions{Tag: m.Tag, Config: imageConfigFrom(m.Config)}
	if m.Tag != "" {
		if err := checkImageRef("the tag", m.Tag); err != nil {
			return nil, err
		}
	}
	switch m.Format {
	case "", "auto":
	case "oci":
		o.Format = image.OCILayout
	case "docker":
		o.Format = image.Docker
	case "rootfs":
		o.Format = image.RootFS
	default:
		return nil, sandbox.Invalid.Errorf("format %q", clip(m.Format)).WithHint("the formats are auto, oci, docker and rootfs")
	}
	r := &messages{rest: m.Data, next: following(stream, (*v1.LoadImageRequest).GetData)}
	list, err := i.store.Load(ctx, server.Tenant(ctx), r, o)
	if err != nil {
		return nil, err
	}
	res := &v1.LoadImageResponse{}
	for _, img := range list {
		res.Images = append(res.Images, imageTo(img))
	}
	return answer(res), nil
}

func (i *images) Get(ctx context.Context, req *connect.Request[v1.GetImageRequest]) (*connect.Response[v1.GetImageResponse], error) {
	if err := checkImageRef("the reference", req.Msg.Ref); err != nil {
		return nil, err
	}
	img, err := i.store.Get(ctx, server.Tenant(ctx), req.Msg.Ref)
	if err != nil {
		return nil, err
	}
	return answer(&v1.GetImageResponse{Image: imageTo(img)}), nil
}

func (i *images) List(ctx context.Context, _ *connect.Request[v1.ListImagesRequest]) (*connect.Response[v1.ListImagesResponse], error) {
	list, err := i.store.List(ctx, server.Tenant(ctx))
	if err != nil {
		return nil, err
	}
	res := &v1.ListImagesResponse{}
	for _, img := range list {
		res.Images = append(res.Images, imageTo(img))
	}
	return answer(res), nil
}

func (i *images) Tag(ctx context.Context, req *connect.Request[v1.TagImageRequest]) (*connect.Response[v1.TagImageResponse], error) {
	if err := firstOf(checkImageRef("the reference", req.Msg.Ref), checkImageRef("the tag", req.Msg.Tag)); err != nil {
		return nil, err
	}
	tenant := server.Tenant(ctx)
	if err := i.store.Tag(ctx, tenant, req.Msg.Ref, req.Msg.Tag); err != nil {
		return nil, err
	}
	img, err := i.store.Get(ctx, tenant, req.Msg.Tag)
	if err != nil {
		return nil, err
	}
	return answer(&v1.TagImageResponse{Image: imageTo(img)}), nil
}

func (i *images) Remove(ctx context.Context, req *connect.Request[v1.RemoveImageRequest]) (*connect.Response[v1.RemoveImageResponse], error) {
	if err := checkImageRef("the reference", req.Msg.Ref); err != nil {
		return nil, err
	}
	err := i.store.Remove(ctx, server.Tenant(ctx), req.Msg.Ref)
	if req.Msg.Force && errors.Is(err, sandbox.NotFound) {
		err = nil
	}
	if err != nil {
		return nil, err
	}
	return answer(&v1.RemoveImageResponse{}), nil
}

func (i *images) Prune(ctx context.Context, req *connect.Request[v1.PruneImagesRequest]) (*connect.Response[v1.PruneImagesResponse], error) {
	// The budget is the node's: what is evicted may be another tenant's.
	if err := server.RequireAdmin(ctx); err != nil {
		return nil, err
	}
	report, err := i.store.GC(ctx, i.inUse)
	if err != nil {
		return nil, err
	}
	res := &v1.PruneImagesResponse{Freed: report.Freed, Removed: int32(len(report.Removed))}
	if req.Msg.All {
		if err := i.removeUnused(ctx, res); err != nil {
			return nil, err
		}
	}
	return answer(res), nil
}

// removeUnused removes the images of the caller's tenant that no sandbox uses.
func (i *images) removeUnused(ctx context.Context, res *v1.PruneImagesResponse) error {
	tenant := server.Tenant(ctx)
	list, err := i.store.List(ctx, tenant)
	if err != nil {
		return err
	}
	for _, img := range list {
		if i.inUse != nil && i.inUse(img.ID) {
			continue
		}
		err := i.store.Remove(ctx, tenant, img.ID)
		switch sandbox.KindOf(err) {
		case "":
			res.Removed++
			res.Freed += img.Disk
		case sandbox.Conflict, sandbox.NotFound: // taken into use or gone meanwhile
		default:
			return err
		}
	}
	return nil
}

func (i *images) BuildBase(ctx context.Context, req *connect.Request[v1.BuildBaseRequest], stream *connect.ServerStream[v1.PullImageResponse]) error {
	if err := server.RequireAdmin(ctx); err != nil {
		return err
	}
	if i.base == nil {
		return sandbox.Unsupported.Errorf("this daemon cannot make base images").WithHint("load one with `viv load`")
	}
	m := req.Msg
	if m.Tag != "" {
		if err := checkImageRef("the tag", m.Tag); err != nil {
			return err
		}
	}
	if m.Suite != "" {
		if err := checkID("the suite", m.Suite); err != nil {
			return err
		}
	}
	if len(m.Packages) > 1000 {
		return sandbox.Invalid.Errorf("more than 1000 packages")
	}
	for _, p := range m.Packages {
		if !debianName(p) {
			return sandbox.Invalid.Errorf("%q is not the name of a package", clip(p))
		}
	}
	tenant := server.Tenant(ctx)
	return withProgress(ctx, stream, func(ctx context.Context, progress func(image.Progress)) (*image.Image, error) {
		return i.base(ctx, tenant, BaseRequest{
			Tag: m.Tag, Suite: m.Suite, Packages: m.Packages, BuildTools: m.BuildTools,
		}, progress)
	})
}

// debianName holds to the syntax of package names (Debian policy, 5.6.1), with
// an architecture after a colon. They become arguments of the package tools.
func debianName(s string) bool {
	if len(s) < 2 || len(s) > 128 {
		return false
	}
	for i, c := range []byte(s) {
		switch {
		case c >= 'a' && c <= 'z', c >= '0' && c <= '9':
		case i > 0 && strings.IndexByte("+-.:", c) >= 0:
		default:
			return false
		}
	}
	return true
}
