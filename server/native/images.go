package native

import "vivarium/api/vivarium/v1/vivariumv1connect"

// Images is the store of images.
type Images interface{}

type images struct {
	vivariumv1connect.UnimplementedImageServiceHandler
	store Images
}
