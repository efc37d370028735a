package client

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	v1 "vivarium/api/vivarium/v1"
)

// CreateOptions are what a create carries besides the spec.
type CreateOptions struct {
	IdempotencyKey string
	Wait           bool // until it runs
	WaitReady      bool // until its probe has passed
	Prove          bool // its network policy from inside, before its command starts
}

// Create makes a sandbox.
func (c *Client) Create(ctx context.Context, spec *v1.SandboxSpec, o CreateOptions) (*v1.Sandbox, error) {
	res, err := c.Sandboxes.Create(ctx, connect.NewRequest(&v1.CreateSandboxRequest{
		Spec: spec, IdempotencyKey: o.IdempotencyKey, Wait: o.Wait, WaitReady: o.WaitReady, Prove: o.Prove,
	}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Sandbox, nil
}

// Get finds a sandbox by id or name.
func (c *Client) Get(ctx context.Context, ref string) (*v1.Sandbox, error) {
	res, err := c.Sandboxes.Get(ctx, connect.NewRequest(&v1.GetSandboxRequest{Id: ref}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Sandbox, nil
}

// listPage is how many sandboxes one call of List asks for.
const listPage = 1000

// List lists sandboxes. A limit of 0 is all, in as many calls as it takes.
func (c *Client) List(ctx context.Context, req *v1.ListSandboxesRequest) ([]*v1.Sandbox, error) {
	if req.Limit != 0 {
		res, err := c.Sandboxes.List(ctx, connect.NewRequest(req))
		if err != nil {
			return nil, err
		}
		return res.Msg.Sandboxes, nil
	}
	var all []*v1.Sandbox
	page := &v1.ListSandboxesRequest{Name: req.Name, Tags: req.Tags, Stages: req.Stages, Ended: req.Ended, Removed: req.Removed, Limit: listPage, After: req.After}
	for {
		res, err := c.Sandboxes.List(ctx, connect.NewRequest(page))
		if err != nil {
			return nil, err
		}
		all = append(all, res.Msg.Sandboxes...)
		if len(res.Msg.Sandboxes) < listPage {
			return all, nil
		}
		page.After = all[len(all)-1].Id
	}
}

// Wait returns when a sandbox is ended, running or ready. A timeout of 0 is
// none.
func (c *Client) Wait(ctx context.Context, ref, until string, timeout time.Duration) (*v1.Sandbox, error) {
	req := &v1.WaitSandboxRequest{Id: ref, Until: until}
	if timeout > 0 {
		req.Timeout = durationpb.New(timeout)
	}
	res, err := c.Sandboxes.Wait(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg.Sandbox, nil
}

// Stop ends a sandbox; a grace below zero is the default.
func (c *Client) Stop(ctx context.Context, ref string, grace time.Duration) (*v1.Sandbox, error) {
	req := &v1.StopSandboxRequest{Id: ref}
	if grace >= 0 {
		req.Grace = durationpb.New(grace)
	}
	res, err := c.Sandboxes.Stop(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg.Sandbox, nil
}

// Remove forgets a sandbox that ended; with force it is killed first.
func (c *Client) Remove(ctx context.Context, ref string, force bool) error {
	_, err := c.Sandboxes.Remove(ctx, connect.NewRequest(&v1.RemoveSandboxRequest{Id: ref, Force: force}))
	return err
}

// Extend sets the time a sandbox has left.
func (c *Client) Extend(ctx context.Context, ref string, timeout time.Duration) (*v1.Sandbox, error) {
	res, err := c.Sandboxes.Extend(ctx, connect.NewRequest(&v1.ExtendSandboxRequest{Id: ref, Timeout: durationpb.New(timeout)}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Sandbox, nil
}

// SetTags replaces all tags of a sandbox.
func (c *Client) SetTags(ctx context.Context, ref string, tags map[string]string) (*v1.Sandbox, error) {
	res, err := c.Sandboxes.SetTags(ctx, connect.NewRequest(&v1.SetTagsRequest{Id: ref, Tags: tags}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Sandbox, nil
}

// Events calls fn with events until they end, ctx does, or fn fails.
func (c *Client) Events(ctx context.Context, req *v1.WatchEventsRequest, fn func(*v1.Event) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.Sandboxes.Events(ctx, connect.NewRequest(req))
	if err != nil {
		return err
	}
	return each(s, fn)
}

// each calls fn with every message of a stream and closes it.
func each[T any](s *connect.ServerStreamForClient[T], fn func(*T) error) error {
	defer s.Close()
	for s.Receive() {
		if err := fn(s.Msg()); err != nil {
			return err
		}
	}
	return s.Err()
}
