package native

import (
	"context"
	"time"

	"connectrpc.com/connect"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/api/vivarium/v1/vivariumv1connect"
	"vivarium/engine"
	"vivarium/sandbox"
	"vivarium/server"
)

const (
	defaultGrace = 10 * time.Second
	maxGrace     = 10 * time.Minute
	defaultList  = 1000
	maxList      = 10000
)

type sandboxes struct {
	eng     Engine
	tunnels Tunnels // nil: there are none
}

var _ vivariumv1connect.SandboxServiceHandler = (*sandboxes)(nil)

func (s *sandboxes) Create(ctx context.Context, req *connect.Request[v1.CreateSandboxRequest]) (*connect.Response[v1.CreateSandboxResponse], error) {
	spec, err := specFrom(req.Msg.Spec)
	if err != nil {
		return nil, err
	}
	if key := req.Msg.IdempotencyKey; len(key) > maxKey || !printable(key) {
		return nil, sandbox.Invalid.Errorf("the idempotency key is longer than %d bytes or not printable", maxKey)
	}
	spec.Prove = req.Msg.Prove
	tenant := server.Tenant(ctx)
	sb, err := s.eng.Create(ctx, tenant, spec, engine.CreateOptions{IdempotencyKey: req.Msg.IdempotencyKey})
	if err != nil {
		return nil, err
	}
	until := engine.Until("")
	if req.Msg.Wait {
		until = engine.UntilRunning
	}
	if req.Msg.WaitReady {
		until = engine.UntilReady
	}
	if until != "" {
		if sb, err = s.eng.Wait(ctx, tenant, sb.ID, until); err != nil {
			return nil, err
		}
	}
	return answer(&v1.CreateSandboxResponse{Sandbox: s.told(sb)}), nil
}

func (s *sandboxes) Get(ctx context.Context, req *connect.Request[v1.GetSandboxRequest]) (*connect.Response[v1.GetSandboxResponse], error) {
	if err := checkRef(req.Msg.Id); err != nil {
		return nil, err
	}
	sb, err := s.eng.Get(ctx, server.Tenant(ctx), req.Msg.Id)
	if err != nil {
		return nil, err
	}
	m := s.told(sb)
	if sb.Stage.Usable() {
		// What it uses is extra: a sandbox that ends just now has none.
		if u, err := s.eng.Usage(ctx, server.Tenant(ctx), sb.ID); err == nil {
			m.Usage = usageTo(u)
		}
	}
	return answer(&v1.GetSandboxResponse{Sandbox: m}), nil
}

func (s *sandboxes) List(ctx context.Context, req *connect.Request[v1.ListSandboxesRequest]) (*connect.Response[v1.ListSandboxesResponse], error) {
	f := engine.Filter{Name: req.Msg.Name, Tags: req.Msg.Tags, Ended: req.Msg.Ended, Removed: req.Msg.Removed, Limit: int(req.Msg.Limit), After: req.Msg.After}
	if f.Name != "" {
		if err := checkID("the name", f.Name); err != nil {
			return nil, err
		}
	}
	if f.After != "" {
		if err := checkID("the id to go on after", f.After); err != nil {
			return nil, err
		}
	}
	if err := checkTags(f.Tags); err != nil {
		return nil, err
	}
	if f.Limit < 0 || f.Limit > maxList {
		return nil, sandbox.Invalid.Errorf("limit %d is not between 0 and %d", f.Limit, maxList)
	}
	if f.Limit == 0 {
		f.Limit = defaultList
	}
	for _, name := range req.Msg.Stages {
		st := sandbox.Stage(name)
		switch st {
		case sandbox.StageQueued, sandbox.StageImage, sandbox.StageBoot, sandbox.StageNetwork, sandbox.StageGuest,
			sandbox.StageReady, sandbox.StageRunning, sandbox.StageStopping:
		case sandbox.StageEnded:
			f.Ended = true
		default:
			return nil, sandbox.Invalid.Errorf("stage %q", clip(name)).
				WithHint("the stages are queued, image, boot, network, guest, ready, running, stopping and ended")
		}
		f.Stages = append(f.Stages, st)
	}
	list, err := s.eng.List(ctx, server.Tenant(ctx), f)
	if err != nil {
		return nil, err
	}
	res := &v1.ListSandboxesResponse{Sandboxes: make([]*v1.Sandbox, len(list))}
	for i, sb := range list {
		res.Sandboxes[i] = s.told(sb)
	}
	return answer(res), nil
}

func (s *sandboxes) Wait(ctx context.Context, req *connect.Request[v1.WaitSandboxRequest]) (*connect.Response[v1.WaitSandboxResponse], error) {
	if err := checkRef(req.Msg.Id); err != nil {
		return nil, err
	}
	until := engine.Until(req.Msg.Until)
	switch until {
	case "":
		until = engine.UntilEnded
	case engine.UntilEnded, engine.UntilRunning, engine.UntilReady:
	default:
		return nil, sandbox.Invalid.Errorf("wait until %q", clip(req.Msg.Until)).WithHint("it is ended, running or ready")
	}
	ctx, cancel, err := within(ctx, req.Msg.Timeout)
	if err != nil {
		return nil, err
	}
	defer cancel()
	sb, err := s.eng.Wait(ctx, server.Tenant(ctx), req.Msg.Id, until)
	if err != nil {
		return nil, err
	}
	return answer(&v1.WaitSandboxResponse{Sandbox: s.told(sb)}), nil
}

func (s *sandboxes) Stop(ctx context.Context, req *connect.Request[v1.StopSandboxRequest]) (*connect.Response[v1.StopSandboxResponse], error) {
	if err := checkRef(req.Msg.Id); err != nil {
		return nil, err
	}
	grace := defaultGrace
	if req.Msg.Grace != nil {
		var err error
		if grace, err = duration("grace", req.Msg.Grace); err != nil {
			return nil, err
		}
		if grace > maxGrace {
			return nil, sandbox.Invalid.Errorf("grace of %v is longer than %v", grace, maxGrace)
		}
	}
	sb, err := s.eng.Stop(ctx, server.Tenant(ctx), req.Msg.Id, grace)
	if err != nil {
		return nil, err
	}
	return answer(&v1.StopSandboxResponse{Sandbox: s.told(sb)}), nil
}

func (s *sandboxes) Remove(ctx context.Context, req *connect.Request[v1.RemoveSandboxRequest]) (*connect.Response[v1.RemoveSandboxResponse], error) {
	if err := checkRef(req.Msg.Id); err != nil {
		return nil, err
	}
	if err := s.eng.Remove(ctx, server.Tenant(ctx), req.Msg.Id, req.Msg.Force); err != nil {
		return nil, err
	}
	return answer(&v1.RemoveSandboxResponse{}), nil
}

func (s *sandboxes) Extend(ctx context.Context, req *connect.Request[v1.ExtendSandboxRequest]) (*connect.Response[v1.ExtendSandboxResponse], error) {
	if err := checkRef(req.Msg.Id); err != nil {
		return nil, err
	}
	d, err := duration("timeout", req.Msg.Timeout)
	if err != nil {
		return nil, err
	}
	if d == 0 {
		return nil, sandbox.Invalid.Errorf("the timeout is missing")
	}
	sb, err := s.eng.Extend(ctx, server.Tenant(ctx), req.Msg.Id, d)
	if err != nil {
		return nil, err
	}
	return answer(&v1.ExtendSandboxResponse{Sandbox: s.told(sb)}), nil
}

func (s *sandboxes) SetTags(ctx context.Context, req *connect.Request[v1.SetTagsRequest]) (*connect.Response[v1.SetTagsResponse], error) {
	if err := firstOf(checkRef(req.Msg.Id), checkTags(req.Msg.Tags)); err != nil {
		return nil, err
	}
	sb, err := s.eng.SetTags(ctx, server.Tenant(ctx), req.Msg.Id, req.Msg.Tags)
	if err != nil {
		return nil, err
	}
	return answer(&v1.SetTagsResponse{Sandbox: s.told(sb)}), nil
}

func (s *sandboxes) Events(ctx context.Context, req *connect.Request[v1.WatchEventsRequest], stream *connect.ServerStream[v1.Event]) error {
	if req.Msg.SandboxId != "" {
		if err := checkRef(req.Msg.SandboxId); err != nil {
			return err
		}
	}
	if req.Msg.After < -1 {
		return sandbox.Invalid.Errorf("sequence number %d is below -1", req.Msg.After)
	}
	return s.eng.Events(ctx, server.Tenant(ctx), req.Msg.SandboxId, req.Msg.After, req.Msg.Follow, func(e sandbox.Event) error {
		return stream.Send(eventTo(e))
	})
}
