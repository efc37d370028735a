package client

import (
	"context"
	"io"

	"connectrpc.com/connect"

	v1 "vivarium/api/vivarium/v1"
	"vivarium/sandbox"
)

// Info says what the daemon is.
func (c *Client) Info(ctx context.Context) (*v1.InfoResponse, error) {
	res, err := c.Daemon.Info(ctx, connect.NewRequest(&v1.InfoRequest{}))
	if err != nil {
		return nil, err
	}
	return res.Msg, nil
}

// CreateToken makes a token and returns its secret. An empty tenant is the
// caller's own.
func (c *Client) CreateToken(ctx context.Context, tenant, name string, admin bool) (*v1.Token, string, error) {
	res, err := c.Daemon.CreateToken(ctx, connect.NewRequest(&v1.CreateTokenRequest{Tenant: tenant, Name: name, Admin: admin}))
	if err != nil {
		return nil, "", err
	}
	return res.Msg.Token, res.Msg.Secret, nil
}

// ListTokens lists the tokens of all tenants.
func (c *Client) ListTokens(ctx context.Context) ([]*v1.Token, error) {
	res, err := c.Daemon.ListTokens(ctx, connect.NewRequest(&v1.ListTokensRequest{}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Tokens, nil
}

// RevokeToken makes a token invalid.
func (c *Client) RevokeToken(ctx context.Context, id string) error {
	_, err := c.Daemon.RevokeToken(ctx, connect.NewRequest(&v1.RevokeTokenRequest{Id: id}))
	return err
}

// PullImage pulls an image; progress may be nil.
func (c *Client) PullImage(ctx context.Context, req *v1.PullImageRequest, progress func(*v1.Progress)) (*v1.Image, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.Images.Pull(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return imageOf(s, progress)
}

// BuildBase makes a base image from the distribution's packages.
func (c *Client) BuildBase(ctx context.Context, req *v1.BuildBaseRequest, progress func(*v1.Progress)) (*v1.Image, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := c.Images.BuildBase(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return imageOf(s, progress)
}

func imageOf(s *connect.ServerStreamForClient[v1.PullImageResponse], progress func(*v1.Progress)) (*v1.Image, error) {
	var img *v1.Image
	err := each(s, func(m *v1.PullImageResponse) error {
		if m.Image != nil {
			img = m.Image
		}
		if m.Progress != nil && progress != nil {
			progress(m.Progress)
		}
		return nil
	})
	if err == nil && img == nil {
		err = sandbox.Internal.Errorf("the daemon's answer has no image")
	}
	return img, err
}

// LoadImage loads images from an archive; first has everything but the data.
func (c *Client) LoadImage(ctx context.Context, first *v1.LoadImageRequest, r io.Reader) ([]*v1.Image, error) {
	res, err := send(ctx, c.Images.Load, first, r, func(p []byte) *v1.LoadImageRequest { return &v1.LoadImageRequest{Data: p} })
	return res.GetImages(), err
}

// GetImage finds an image by reference, digest or id.
func (c *Client) GetImage(ctx context.Context, ref string) (*v1.Image, error) {
	res, err := c.Images.Get(ctx, connect.NewRequest(&v1.GetImageRequest{Ref: ref}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Image, nil
}

// ListImages lists the images on the node.
func (c *Client) ListImages(ctx context.Context) ([]*v1.Image, error) {
	res, err := c.Images.List(ctx, connect.NewRequest(&v1.ListImagesRequest{}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Images, nil
}

// TagImage gives an image another name.
func (c *Client) TagImage(ctx context.Context, ref, tag string) (*v1.Image, error) {
	res, err := c.Images.Tag(ctx, connect.NewRequest(&v1.TagImageRequest{Ref: ref, Tag: tag}))
	if err != nil {
		return nil, err
	}
	return res.Msg.Image, nil
}

// RemoveImage removes a name, and the image with its last one.
func (c *Client) RemoveImage(ctx context.Context, ref string, force bool) error {
	_, err := c.Images.Remove(ctx, connect.NewRequest(&v1.RemoveImageRequest{Ref: ref, Force: force}))
	return err
}

// PruneImages removes images that are over the budget, or with all those that
// no sandbox uses. It returns the bytes freed and how many were removed.
func (c *Client) PruneImages(ctx context.Context, all bool) (freed int64, removed int, err error) {
	res, err := c.Images.Prune(ctx, connect.NewRequest(&v1.PruneImagesRequest{All: all}))
	if err != nil {
		return 0, 0, err
	}
	return res.Msg.Freed, int(res.Msg.Removed), nil
}
